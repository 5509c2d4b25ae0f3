"""Collects what many steps hand in, and works on several at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from dspy_flashevolve.engine.run import EvolutionRun
from dspy_flashevolve.engine.steps import Step

I = TypeVar("I")  # noqa: E741
O = TypeVar("O")  # noqa: E741


@dataclass(eq=False)
class _Handed(Generic[I, O]):
    """What one step handed in, and what becomes of it."""

    step: Step
    item: I
    outcome: asyncio.Future[O]


class Batcher(Generic[I, O]):
    """Hands a batch to ``work`` when it is half full; sooner only where no step is at work that could still join it.

    Give :meth:`watch` to :meth:`EvolutionRun.evolve` as a watcher.

    Args:
        run: whose steps they are.
        most: items of a batch.
        at_once: batches that are worked on at the same time.
        work: from the steps and their items to an outcome each, in order. What it raises is raised in each of them.
    """

    def __init__(
        self,
        run: EvolutionRun,
        max_size: int,
        max_running: int,
        work: Callable[[Sequence[tuple[Step, I]]], Awaitable[Sequence[O]]],
    ) -> None:
        self._run, self._most, self._at_once, self._work = run, max_size, max_running, work
        self._waiting: list[_Handed[I, O]] = []
        self._running = 0

    async def submit(self, step: Step, item: I) -> O:
        """Wait until a batch with the item has been worked on; what became of the item.

        A step that waits needs no room, up to two batches of them: others may start meanwhile.
        """
        handed = _Handed[I, O](step, item, asyncio.get_running_loop().create_future())
        self._waiting.append(handed)
        step.is_parked = len(self._waiting) <= 2 * self._most
        self._run.notify()
        try:
            return await handed.outcome
        finally:
            step.is_parked = False
            if handed in self._waiting:
                self._waiting.remove(handed)

    async def watch(self) -> None:
        """Begin batches as they become due, until it is cancelled."""
        while True:
            while self._waiting and self._running < self._at_once and self._is_due():
                await self._begin()
            await self._run.wait_for_change()

    def _is_due(self) -> bool:
        waiting = sum(submission.step.is_working and not submission.step.is_parked for submission in self._waiting)
        return 2 * len(self._waiting) >= self._most or self._run.working <= waiting

    async def _begin(self) -> None:
        """Begin a batch, freshest steps first."""
        self._waiting.sort(
            key=lambda submission: (-submission.step.version, -submission.step.value, submission.step.number)
        )
        taken, self._waiting[:] = self._waiting[: self._most], self._waiting[self._most :]
        for number, submission in enumerate((*taken, *self._waiting)):
            submission.step.is_parked = len(taken) <= number < len(taken) + 2 * self._most
        self._running += 1
        await self._run.run_in_background(lambda: self._done(taken))

    async def _done(self, taken: list[_Handed[I, O]]) -> None:
        try:
            outcomes = await self._work([(submission.step, submission.item) for submission in taken])
            for submission, outcome in zip(taken, outcomes, strict=True):
                if not submission.outcome.done():  # its step may have been cancelled
                    submission.outcome.set_result(outcome)
        except Exception as error:
            for submission in taken:
                if not submission.outcome.done():
                    submission.outcome.set_exception(error)
        finally:
            self._running -= 1
