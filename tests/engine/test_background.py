"""Work that outlives its handler and not the run: it is waited for, and nothing of it is left after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import anyio
import pytest

from dspy_flashevolve.engine.background import Background
from dspy_flashevolve.sim.virtual import run


class Notes:
    """What pieces of work did."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def work(self, name: str, seconds: float, error: Exception | None = None) -> Callable[[], Awaitable[None]]:
        async def piece() -> None:
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                self.seen.append(f"{name} cancelled")
                raise
            if error is not None:
                raise error
            self.seen.append(name)

        return piece


def test_leaving_waits_for_what_still_runs_also_for_what_work_began() -> None:
    notes, background = Notes(), Background()

    async def chain() -> None:
        await asyncio.sleep(5)
        background.start(notes.work("begun by work", 5))

    async def main() -> None:
        async with background:
            background.start(chain)
            background.start(notes.work("slow", 20))
            notes.seen.append("left")

    running: list[int] = []
    background.ended = lambda: running.append(background.running)
    run(main)
    assert running == [2, 1, 0], "it begins the next before it ends"
    assert notes.seen == ["left", "begun by work", "slow"]
    assert background.failure is None


def test_the_first_failure_is_kept_as_it_is_and_ends_the_block_and_the_other_work() -> None:
    notes, background = Notes(), Background()
    error, second = ValueError("first"), ValueError("second")

    async def main() -> None:
        async with background:
            background.start(notes.work("failing", 5, error))
            background.start(notes.work("failing too", 5, second))
            background.start(notes.work("other", 20))
            await notes.work("block", 50)()
        notes.seen.append("after the block")
        await asyncio.sleep(1)

    run(main)
    assert background.failure is error
    assert sorted(notes.seen[:-1]) == ["block cancelled", "other cancelled"]
    assert notes.seen[-1] == "after the block"


def test_work_that_fails_while_the_block_is_left_ends_the_rest() -> None:
    notes, background = Notes(), Background()

    async def main() -> None:
        async with background:
            background.start(notes.work("failing", 5, ValueError("late")))
            background.start(notes.work("other", 20))

    run(main)
    assert repr(background.failure) == "ValueError('late')"
    assert notes.seen == ["other cancelled"]


def test_an_exception_of_the_block_cancels_the_work_and_leaves_as_it_is() -> None:
    notes, background = Notes(), Background()

    async def main() -> None:
        async with background:
            background.start(notes.work("work", 20))
            await asyncio.sleep(1)
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        run(main)
    assert notes.seen == ["work cancelled"]
    assert background.failure is None


@pytest.mark.parametrize("leaving", [False, True])
def test_a_cancellation_from_outside_reaches_the_work_and_goes_on(leaving: bool) -> None:
    notes, background = Notes(), Background()

    async def inner() -> None:
        async with background:
            background.start(notes.work("work", 20))
            if not leaving:
                await asyncio.sleep(50)

    async def native() -> None:
        task = asyncio.ensure_future(inner())
        await asyncio.sleep(1)
        task.cancel()
        await task

    async def scoped() -> None:
        with anyio.move_on_after(1) as scope:
            await inner()
            raise AssertionError("the cancellation was swallowed")
        assert scope.cancelled_caught

    with pytest.raises(asyncio.CancelledError):
        run(native)
    run(scoped)
    assert notes.seen == ["work cancelled"] * 2
    assert background.failure is None


def test_work_cannot_be_begun_outside_of_the_run() -> None:
    with pytest.raises(AssertionError, match="outside of the run"):
        Background().start(Notes().work("early", 1))
