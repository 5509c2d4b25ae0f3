"""Through how many files and functions does a step pass, from selection to commit?

    python -m benchmarks.traced_step

In virtual time, with the default policy and 64 slots: every call into the package that is made on behalf of a step
which ends in a commit, in its own task, those that it starts and the threads that work for it. For each of them the
files and functions are counted; the step with the most files is listed. Calls of ``sim/`` do not count.
"""

from __future__ import annotations

import statistics
import sys
import threading
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

import dspy

import dspy_flashevolve
from dspy_flashevolve import AsyncGEPA
from dspy_flashevolve.gepa.step import GepaLoop
from dspy_flashevolve.sim import HouseRules
from dspy_flashevolve.sim.virtual import SimulatedModel, run

ROOT = str(Path(dspy_flashevolve.__file__).parent)
STEP: ContextVar[set[tuple[str, str]] | None] = ContextVar("STEP", default=None)


def note(frame: FrameType, event: str, _: Any) -> None:
    """A profile function: keep which function of the package is called for which step."""
    file = frame.f_code.co_filename
    if event == "call" and file.startswith(ROOT) and "/sim/" not in file and (seen := STEP.get()) is not None:
        seen.add((file.removeprefix(ROOT + "/"), frame.f_code.co_qualname))  # type: ignore[attr-defined]


def traced(step: Callable[..., Awaitable[Any]], committed: list[set[tuple[str, str]]]) -> Callable[..., Awaitable[Any]]:
    """The loop's step, with what it calls kept where it ends in a commit."""

    async def traced_step(self: GepaLoop, one: Any) -> Any:
        seen: set[tuple[str, str]] = set()
        token = STEP.set(seen)
        try:
            end = await step(self, one)
        finally:
            STEP.reset(token)
        committed.append(seen)
        return end

    return traced_step


def main() -> None:
    """Run once and print."""
    task, committed = HouseRules(rules=12), list[set[tuple[str, str]]]()
    lm = SimulatedModel("h100-qwen3-8b").lm()
    GepaLoop.step = traced(GepaLoop.step, committed)  # type: ignore[method-assign]

    async def compiled() -> Any:
        optimizer = AsyncGEPA(task.metric, max_seconds=60, max_metric_calls=100_000, num_threads=64, reflection_lm=lm)
        with dspy.context(lm=lm):
            return await optimizer.acompile(task.program(), trainset=task.trainset(60), valset=task.valset(60))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run(compiled)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    files = [{file for file, _ in seen} for seen in committed]
    counts = [len(one) for one in files]
    functions = [len(seen) for seen in committed]
    print(f"{len(committed)} steps that ended in a commit")
    print(f"files: median {statistics.median(counts):g}, at most {max(counts)}")
    print(f"functions: median {statistics.median(functions):g}, at most {max(functions)}")
    widest = max(committed, key=lambda seen: len({file for file, _ in seen}))
    for file in sorted({file for file, _ in widest}):
        print(f"  {file}: {sum(one == file for one, _ in widest)}")


if __name__ == "__main__":
    main()
