"""What code inside a rollout reports to the run: that its metric is called, and what came to nothing.

A metric call has to be in the journal before it is made, and only the code that runs a program knows when that is. It
may run in a thread, or in a process of its own with another recorder.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class RolloutRecorder(Protocol):
    """Records the metric's call of one rollout, and what the rollout has cost although it came to nothing."""

    async def record_metric_call(self) -> None: ...

    def retract_metric_call(self) -> None: ...

    def record_wasted_cost(self, tokens: int, cost_dollars: float) -> None: ...


_RECORDER: ContextVar[RolloutRecorder | None] = ContextVar("flashevolve_rollout", default=None)


@contextmanager
def recording_rollout(recorder: RolloutRecorder) -> Generator[None, None, None]:
    """Let ``recorder`` hear of the rollout that is made in the block."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


async def record_metric_call() -> None:
    """Record, inside a rollout, that its metric is called when this returns. Outside of a rollout do nothing."""
    recorder = _RECORDER.get()
    if recorder is not None:
        await recorder.record_metric_call()


def retract_metric_call() -> None:
    """Take back, inside a rollout, that its metric was called, since the rollout was given up before it was."""
    recorder = _RECORDER.get()
    if recorder is not None:
        recorder.retract_metric_call()


def record_wasted_cost(tokens: int, cost_dollars: float) -> None:
    """Record, inside a rollout, what it has cost although it comes to nothing. Outside of a rollout do nothing."""
    recorder = _RECORDER.get()
    if recorder is not None and tokens:
        recorder.record_wasted_cost(tokens, cost_dollars)
