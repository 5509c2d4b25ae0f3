"""The workers of the stages: who is at work, what a window saw, and how a stage gets more or fewer of them."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import anyio

from dspy_flashevolve.engine.control import StageWindow, WorkflowController
from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.events import EventBus, WorkersChanged
from dspy_flashevolve.engine.item import Item
from dspy_flashevolve.engine.queues import StageQueue
from dspy_flashevolve.engine.stages import Stage


class Crew:
    """The workers of one stage.

    A worker takes an item with :meth:`take`, works on it under :meth:`at_work`, and comes back for the next; it ends
    where :meth:`take` gives it nothing. So workers are never interrupted: those above what is wanted end when they
    come for another item, and those that wait for one are asked to look again.

    Args:
        stage: whose workers they are.
        queue: its input.
        clock: seconds.
    """

    def __init__(self, stage: Stage, queue: StageQueue[Any], clock: Callable[[], float]) -> None:
        self.stage = stage
        self.queue = queue
        self.wanted = stage.workers
        """Workers that there should be."""
        self.running = 0
        """Workers that there are; above ``wanted`` while some finish their last item."""
        self.busy = 0
        """Workers in the handler."""
        self._clock = clock
        self._finished = 0
        self._worked_seconds = 0.0
        self._counted_at = 0.0
        self._before = (0, 0, 0.0, 0.0)

    async def take(self) -> list[tuple[Item[Any], float]]:
        """What a worker has to do next, with the seconds that each item waited; nothing for a worker that shall end.

        Raises:
            QueueClosedError: there will be no more items.
        """
        first = await self.queue.get_while(self._stays, self.stage.ready)
        if first is None:
            return []
        return [first] if self.stage.batch is None else [first, *self.queue.get_more(self.stage.batch - 1)]

    @contextmanager
    def at_work(self, items: int) -> Generator[None, None, None]:
        """A worker is in the handler for the length of the block, with ``items`` items."""
        self._count()
        self.busy += 1
        try:
            yield
        finally:
            self._count()
            self.busy -= 1
            self._finished += items

    def window(self) -> StageWindow:
        """What the stage did since it was last asked."""
        self._count()
        queue = self.queue.statistics()
        now = (queue.put, self._finished, self._worked_seconds, queue.waited_seconds)
        before, self._before = self._before, now
        return StageWindow(
            self.stage.name,
            self.wanted,
            self.busy,
            queue.size,
            arrived=now[0] - before[0],
            finished=now[1] - before[1],
            worked_seconds=now[2] - before[2],
            waited_seconds=now[3] - before[3],
            low=self.stage.least_workers,
            high=self.stage.workers,
        )

    def resize(self, workers: int) -> int:
        """Want that many workers.

        Returns:
            How many have to be started now; those that are too many end by themselves.
        """
        self.wanted = workers
        if self.running > workers:
            self.queue.poke()
        return max(0, workers - self.running)

    def _stays(self) -> bool:
        return self.running <= self.wanted

    def _count(self) -> None:
        now = self._clock()
        self._worked_seconds += self.busy * (now - self._counted_at)
        self._counted_at = now


class Crews:
    """The workers of all stages, and the controller that moves them.

    Args:
        stages: each begins with the workers that the controller says, or with its most without one.
        queues: stage -> its input.
        controller: asked at the start, and each time its window is over.
        bus: gets a :class:`WorkersChanged` a change, and one a stage at the start.
        clock: seconds.

    Raises:
        ConfigurationError: the controller names a stage that there is not.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        queues: Mapping[str, StageQueue[Any]],
        controller: WorkflowController | None,
        bus: EventBus,
        clock: Callable[[], float],
    ) -> None:
        self._crews = {stage.name: Crew(stage, queues[stage.name], clock) for stage in stages}
        self._controller = controller
        self._bus = bus
        self._clock = clock
        self._work: Callable[[Crew], None] | None = None
        self._scope: anyio.CancelScope | None = None
        self._first = {} if controller is None else self._decided(controller, self._idle())

    def start(self, work: Callable[[Crew], None]) -> None:
        """Start the workers that the run begins with.

        Args:
            work: starts one worker; it has to be run under :meth:`employed`.
        """
        self._work = work
        idle = {window.stage: window for window in self._idle()}
        for name, crew in self._crews.items():
            if self._controller is None:
                self._resize(crew, crew.stage.workers)
            else:
                self._change(crew, idle[name], self._first.get(name, crew.stage.workers), "at the start")

    async def employed(self, crew: Crew, work: Callable[[], Awaitable[None]]) -> None:
        """A worker's life, from its start to its end: it is counted as running."""
        try:
            await work()
        finally:
            crew.running -= 1

    async def control(self) -> None:
        """Ask the controller each time its window is over, until :meth:`close`."""
        controller = self._controller
        if controller is None or math.isinf(controller.window_seconds):
            return
        with anyio.CancelScope() as self._scope:
            while True:
                await anyio.sleep(controller.window_seconds)
                windows = [crew.window() for crew in self._crews.values()]
                decided = self._decided(controller, windows)
                for window in windows:
                    wanted = decided.get(window.stage, window.workers)
                    if wanted != window.workers:
                        self._change(self._crews[window.stage], window, wanted, f"in {controller.window_seconds:g} s")

    def close(self) -> None:
        """There is nothing left to control."""
        if self._scope is not None:
            self._scope.cancel()
        self._controller = None

    def _idle(self) -> list[StageWindow]:
        """The stages before the run begins."""
        bounds = [(name, crew.stage.least_workers, crew.stage.workers) for name, crew in self._crews.items()]
        return [StageWindow(name, 0, 0, 0, 0, 0, 0.0, 0.0, low, high) for name, low, high in bounds]

    def _decided(self, controller: WorkflowController, windows: Sequence[StageWindow]) -> dict[str, int]:
        """What the controller wants, within the bounds of each stage."""
        wanted = controller.decide(windows)
        unknown = sorted(set(wanted) - set(self._crews))
        if unknown:
            raise ConfigurationError(
                f"controller {controller!r} names stages {unknown}, expected some of {sorted(self._crews)}."
            )
        return {window.stage: window.clamp(wanted[window.stage]) for window in windows if window.stage in wanted}

    def _change(self, crew: Crew, window: StageWindow, wanted: int, when: str) -> None:
        saw = f"{window.finished} finished {when}, {window.busy} of {window.workers} busy, {window.queued} queued"
        reason = f"{type(self._controller).__name__}: {saw if window.workers else when}"
        self._bus.emit(WorkersChanged(self._clock(), crew.stage.name, window.workers, wanted, reason))
        self._resize(crew, wanted)

    def _resize(self, crew: Crew, workers: int) -> None:
        assert self._work is not None
        for _ in range(crew.resize(workers)):
            crew.running += 1  # before it begins: the next change counts it
            self._work(crew)
