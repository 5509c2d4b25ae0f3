"""Requests that hold their slot until they are told to end: schedules that are stepped, never slept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from dspy_flashevolve.engine.scheduler import Scheduler, StageVisit, current_slot

STAGES = ("rollout", "propose", "screen", "validate")


@dataclass(frozen=True)
class Asker:
    """Who asks for a slot."""

    number: int
    version: int = 0
    value: float = 0.0


class Clock:
    """Seconds, as a test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def settle() -> None:
    for _ in range(20):
        await checkpoint()


class Request:
    """One request; ``state`` is waiting, held, paused or gone."""

    def __init__(self, stage: str, step: Asker) -> None:
        self.stage, self.step = stage, step
        self.end, self.pause, self.go_on = anyio.Event(), anyio.Event(), anyio.Event()
        self.state = "waiting"
        self.task: asyncio.Task[None] | None = None


class Stepped:
    """A scheduler, and the requests made of it.

    Args:
        checked: called at each grant.
    """

    def __init__(self, limit: int, checked: Callable[[], None] = lambda: None, **options: Any) -> None:
        self.visits: list[StageVisit] = []
        self.clock = Clock()
        self.scheduler = Scheduler(limit, STAGES, clock=self.clock, on_visit=self.visits.append, **options)
        self.requests: list[Request] = []
        self.granted: list[tuple[str, int]] = []
        self.checked = checked

    async def ask(self, stage: str, step: Asker | int, count: int = 1) -> None:
        asker = step if isinstance(step, Asker) else Asker(step)
        for _ in range(count):
            one = Request(stage, asker)
            one.task = asyncio.create_task(self._run(one))
            self.requests.append(one)
        await settle()

    async def _run(self, one: Request) -> None:
        def granted() -> None:
            one.state = "held"
            self.granted.append((one.stage, one.step.number))
            self.checked()

        async def call() -> None:
            async with anyio.create_task_group() as group:
                group.start_soon(pausing)
                await one.end.wait()
                group.cancel_scope.cancel()

        async def pausing() -> None:
            slot = current_slot()
            assert slot is not None
            while True:
                await one.pause.wait()
                one.pause = anyio.Event()
                one.state = "paused"
                async with slot.released():
                    await one.go_on.wait()
                    one.go_on = anyio.Event()
                    one.state = "waiting"
                one.state = "held"
                self.checked()

        try:
            await self.scheduler.run(one.stage, one.step, call, on_granted=granted)
        finally:
            one.state = "gone"

    def of(self, *states: str) -> list[Request]:
        return [one for one in self.requests if one.state in states]

    async def end(self, count: int = 1) -> None:
        """The oldest that hold a slot end."""
        for _ in range(count):
            self.of("held")[0].end.set()
            await settle()

    async def cancel(self, one: Request) -> None:
        assert one.task is not None
        one.task.cancel()
        await settle()

    async def end_all(self) -> None:
        while self.of("waiting", "held", "paused"):
            for one in self.of("waiting", "held", "paused"):
                one.end.set()
                one.go_on.set()
            await settle()


def stepped(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a schedule to its end."""
    anyio.run(main)
