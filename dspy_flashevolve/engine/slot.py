"""The slot of one request: given back while the request waits, and bounded in time."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeVar

import anyio

from dspy_flashevolve.engine.errors import TransientError

T = TypeVar("T")


class Slot:
    """One slot of a request, which may be given back for a while from deep inside the request.

    A request that must wait, since its provider said when to come back, is not in flight: others can use its slot.
    Where a rollout has several LM calls under way in its one slot, the first that pauses gives the slot back, and the
    first that goes on takes it again.

    Args:
        step_and_stage: number of the step, and the stage, whose request is in it.
        enter: waits for a slot, with the number of requests of the same batch that come once this one has its slot.
        arrive: counts the slot as one whose request has asked its endpoint.
        leave: gives the slot back that was taken at the given time.
        clock: seconds.
    """

    def __init__(
        self,
        step_and_stage: tuple[int, str],
        enter: Callable[[int], Awaitable[None]],
        arrive: Callable[[], None],
        leave: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self.step_and_stage = step_and_stage
        self._enter, self._arrive, self._leave, self._clock = enter, arrive, leave, clock
        self._taking: anyio.Lock | None = None
        self._is_closed = False
        self._pauses = 0
        self.paused_since: float | None = None
        """When the first LM call in it began to wait for its next attempt; None where none waits."""
        self._left_seconds = math.inf
        self._taken_seconds = 0.0
        self.is_held = False
        self._is_arriving = False
        self.time_scope: anyio.CancelScope | None = None
        """Ends the work in the slot at its deadline, which moves on during a pause. None where nothing does."""
        self.shield_scope: anyio.CancelScope | None = None
        """Around work that is not cancelled with the rest: a metric in a thread."""

    async def take(self, followers: int = 0) -> None:
        """Wait for the slot in the run's order, unless it is held. Once closed, it takes none.

        Args:
            followers: requests of the same batch that come once this one has its slot.
        """
        if self.is_held or self._is_closed:
            return
        async with self._taking or nullcontext():  # others inside the same request may want it back, too
            if self.is_held or self._is_closed:
                return
            await self._enter(followers)
            self.is_held = self._is_arriving = True
            self._taken_seconds = self._clock()
            if self._is_closed:  # the holder was cancelled while the slot was awaited for it
                self._give_back()

    def mark_arrived(self) -> None:
        """Record that the request in it is about to be sent, or waits for a limit of its endpoint."""
        if self._is_arriving:
            self._is_arriving = False
            self._arrive()

    @asynccontextmanager
    async def released(self, keep: bool = False, is_retry: bool = True) -> AsyncGenerator[None, None]:
        """Give the slot back for the block, and take it again after it. A block that raises ends without the slot.

        Args:
            keep: it is not given back: a thread waits.
            is_retry: see :meth:`paused`.
        """
        if not keep:
            self._taking = self._taking or anyio.Lock()
            self._give_back()
        with self.paused(is_retry):
            yield
            await self.take()

    async def run_beside(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make another request of the same step and stage, in a slot of its own.

        A run inside a request gives the request's slot back while it waits (:meth:`released`), and makes its own
        requests by this: so the requests of both runs together stay within the limits of the outer one.
        """
        slot = Slot(self.step_and_stage, self._enter, self._arrive, self._leave, self._clock)
        await slot.take()
        try:
            with in_slot(slot):
                return await call()
        finally:
            slot.close()

    @contextmanager
    def paused(self, is_retry: bool = True) -> Generator[None, None, None]:
        """Let the deadline of the work in the slot move on during the block, which waits.

        Args:
            is_retry: the block waits for the next attempt; False where it waits for its turn.
        """
        self._pauses += 1
        if is_retry and self.paused_since is None:
            self.paused_since = self._clock()
        if self._pauses == 1 and self.time_scope is not None:
            self._left_seconds = self.time_scope.deadline - anyio.current_time()
            self.time_scope.deadline = math.inf
        try:
            yield
        finally:
            self._pauses -= 1
            self.paused_since = self.paused_since if self._pauses else None
            if not self._pauses and self.time_scope is not None:
                self.time_scope.deadline = anyio.current_time() + self._left_seconds

    def close(self) -> None:
        """Give the slot back for good."""
        self._is_closed = True
        self._give_back()

    def _give_back(self) -> None:
        if self.is_held:
            self.mark_arrived()
            self.is_held = False
            self._leave(self._taken_seconds)


_slot: ContextVar[Slot | None] = ContextVar("flashevolve_slot", default=None)
SLOT_SETTING = "flashevolve_slot"
"""The setting of dspy's with the slot, for threads that have dspy's settings and no context of ours."""


@contextmanager
def in_slot(slot: Slot | None) -> Generator[None, None, None]:
    """Make a slot the current one for the block; None for a block that is in none."""
    token = _slot.set(slot)
    try:
        yield
    finally:
        _slot.reset(token)


def current_slot() -> Slot | None:
    """Return the slot in which this code runs, which threads and tasks of a request inherit; None outside of any."""
    return _slot.get()


@contextmanager
def shielded() -> Generator[None, None, None]:
    """Shield the block from cancellation, but end it where a request that it makes takes too long.

    Raises:
        TransientError: it was ended.
    """
    slot = current_slot()
    with anyio.CancelScope(shield=True) as scope:
        if slot is not None:
            slot.shield_scope = scope
        try:
            yield
        finally:
            if slot is not None and not scope.cancel_called:  # else the thread that is left behind has to see it
                slot.shield_scope = None
    if scope.cancelled_caught:
        raise TransientError("no answer in time to a request of the metric's", of_request=True)
