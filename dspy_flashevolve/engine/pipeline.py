"""Stages joined by queues, in one task group.

.. code-block:: text

    source (select) -> [q] -> rollout -> [q] -> propose -> [q] -> screen -> [q] -> validate -> [q] -> commit
       ^                                                             ^                                  |
       +-- merge, another source of children ------------------------+                                  |
       +------------------------------------- a ticket ends: one more may start <----------------------+

The diagram shows GEPA's stages; the pipeline itself knows only names. Each stage has one input queue
and K workers; a workflow controller may move K while the run goes on. A worker takes an item, awaits
the stage's handler, and passes the item on or ends its ticket. Admission decides when the source may
open the next ticket. When the source is exhausted or a stop was asked for, no ticket is admitted and
what is live drains; then the queues close and every worker ends. A handler that raises cancels the
rest and the exception leaves :meth:`Pipeline.run`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

import anyio
from anyio.abc import TaskGroup

from dspy_flashevolve.engine.control import WorkflowController
from dspy_flashevolve.engine.crews import Crew, Crews
from dspy_flashevolve.engine.errors import ConfigurationError, QueueClosedError
from dspy_flashevolve.engine.events import EventBus, StageFinished, TicketClosed, TicketOpened
from dspy_flashevolve.engine.item import End, EndKind, Item, Ticket
from dspy_flashevolve.engine.queues import QueueStatistics, StageQueue
from dspy_flashevolve.engine.stages import Carried, Finish, Forward, Outcome, Stage


@dataclass(frozen=True, slots=True)
class Opened:
    """The source opened a ticket: its item enters ``stage``."""

    stage: str
    item: Item[Any]


class NotNow(Enum):
    """Why the source opened no ticket."""

    FULL = auto()
    """Ask again when a live ticket has ended, or at :meth:`Pipeline.wake`; where none lives there will be none."""
    WAITING = auto()
    """The same, but something that is no ticket is under way, and wakes the pipeline at its end."""
    EXHAUSTED = auto()
    """There will be none; drain."""


class Source(Protocol):
    """Opens tickets and hears of their ends."""

    async def open(self, number: int, live: int) -> Opened | NotNow:
        """Open ticket ``number`` while ``live`` others live."""
        ...

    async def close(self, ticket: Ticket, end: End) -> None:
        """A ticket has ended; called once a ticket, before the next is opened in its place."""
        ...


@dataclass(frozen=True, slots=True)
class PipelineStatistics:
    """What the pipeline has done.

    Args:
        opened: tickets admitted.
        ended: way -> tickets that ended so.
        queues: stage -> what its queue saw.
    """

    opened: int
    ended: dict[str, int]
    queues: dict[str, QueueStatistics]


class Pipeline:
    """Runs the stages until the source is exhausted or a stop is asked for.

    Args:
        stages: in any order; names are unique.
        source: opens tickets.
        bus: gets the events.
        clock: seconds.
        controller: decides how many workers each stage has, within its bounds; None gives each its most.

    Raises:
        ConfigurationError: two stages share a name, there is none, or the controller names one that there is not.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        source: Source,
        bus: EventBus,
        clock: Callable[[], float] = time.monotonic,
        controller: WorkflowController | None = None,
    ) -> None:
        names = [stage.name for stage in stages]
        if not names or len(set(names)) != len(names):
            raise ConfigurationError(f"pipeline: stage names must be unique and at least one, got {names}.")
        self._stages = list(stages)
        self._source = source
        self._bus = bus
        self._clock = clock
        self._queues: dict[str, StageQueue[Any]] = {s.name: StageQueue(s.name, s.queue_capacity, clock) for s in stages}
        self._crews = Crews(stages, self._queues, controller, bus, clock)
        self._live: dict[int, Ticket] = {}
        self._opened = 0
        self._ended: dict[str, int] = {kind.value: 0 for kind in EndKind}
        self._stopping: str | None = None
        self._wake = anyio.Event()
        self._scope: anyio.CancelScope | None = None
        self._failure: BaseException | None = None

    @property
    def live(self) -> int:
        """Tickets that have started and not ended."""
        return len(self._live)

    @property
    def stop_reason(self) -> str | None:
        """Why no more tickets are admitted; None while they are."""
        return self._stopping

    def stop(self, reason: str) -> None:
        """Admit no more tickets; what is live drains. The first reason stays. Call it on the loop."""
        self._stopping = self._stopping or reason
        self._wake.set()

    def wake(self) -> None:
        """Ask the source again whether a ticket may start, and batches whether they may begin. Call it on the loop."""
        self._wake.set()
        for stage in self._stages:
            if stage.ready is not None:
                self._queues[stage.name].poke()

    def waiting(self, stage: str) -> int:
        """Items that wait in the queue of a stage."""
        return len(self._queues[stage])

    async def run(self) -> None:
        """Run to the end.

        Raises:
            Exception: what a handler or the source raised, after everything else was cancelled.
        """
        try:
            async with anyio.create_task_group() as group:
                self._scope = group.cancel_scope
                self._crews.start(lambda crew: self._start_worker(group, crew))
                group.start_soon(self._guard, self._crews.control, name="workflow control")
                await self._guard(self._admit)
        except BaseException as error:
            self._cancel_live()
            raise (self._failure or error) from None
        if self._failure is not None:
            self._cancel_live()
            raise self._failure

    def statistics(self) -> PipelineStatistics:
        """What the pipeline has done so far."""
        return PipelineStatistics(
            opened=self._opened,
            ended=dict(self._ended),
            queues={name: queue.statistics() for name, queue in self._queues.items()},
        )

    def _start_worker(self, group: TaskGroup, crew: Crew) -> None:
        async def life() -> None:
            await self._crews.employed(crew, lambda: self._work(crew))

        group.start_soon(self._guard, life, name=f"stage {crew.stage.name}")

    async def _guard(self, run: Callable[[], Any]) -> None:
        """Keep the first exception as it is; task groups would wrap it."""
        try:
            await run()
        except Exception as error:
            self._failure = self._failure or error
            assert self._scope is not None
            self._scope.cancel()

    async def _admit(self) -> None:
        while self._stopping is None or self._live:
            self._wake = anyio.Event()
            if self._stopping is None and await self._open_one():
                continue
            if self._live or self._stopping is None:
                await self._wake.wait()
        self._crews.close()
        for queue in self._queues.values():
            queue.close()

    async def _open_one(self) -> bool:
        answer = await self._source.open(self._opened, len(self._live))
        if isinstance(answer, NotNow):
            if answer is NotNow.EXHAUSTED or (answer is NotNow.FULL and not self._live):
                self.stop("nothing more to do")
            return False
        self._opened += 1
        self._live[answer.item.ticket.number] = answer.item.ticket
        self._bus.emit(TicketOpened(self._clock(), answer.item.ticket.number, answer.item.version, len(self._live)))
        await self._queues[answer.stage].put(answer.item)
        return True

    async def _work(self, crew: Crew) -> None:
        while True:
            try:
                taken = await crew.take()
            except QueueClosedError:
                return
            if not taken:  # there are more workers than are wanted
                return
            await self._handle(crew, taken)
            del taken  # an idle worker holds no payload

    async def _handle(self, crew: Crew, taken: list[tuple[Item[Any], float]]) -> None:
        """Let the stage's handler work on items, with the seconds that each has waited, and pass them on."""
        stage, started, first = crew.stage, self._clock(), taken[0][0]
        with crew.at_work(len(taken)):
            work: Any = first if stage.batch is None else [item for item, _ in taken]
            outcomes = await stage.handler(work)
        worked = self._clock() - started
        for item, waited in taken:
            self._bus.emit(StageFinished(self._clock(), item.ticket.number, stage.name, waited, worked / len(taken)))
        pairs = [(first, outcomes)] if isinstance(outcomes, Forward | Finish) else list(outcomes)
        forgotten = {item.ticket.number for item, _ in taken} - {item.ticket.number for item, _ in pairs}
        if forgotten:
            raise ConfigurationError(f"stage {stage.name!r} did not say what becomes of tickets {sorted(forgotten)}.")
        for item, outcome in pairs:
            await self._pass_on(item, outcome)

    async def _pass_on(self, item: Item[Any], outcome: Outcome | Carried) -> None:
        if isinstance(outcome, Carried):
            return
        if isinstance(outcome, Finish):
            await self._end(item.ticket, outcome.end)
            return
        version = item.version if outcome.version is None else outcome.version
        await self._queues[outcome.stage].put(Item(outcome.payload, item.ticket, version, outcome.value))

    async def _end(self, ticket: Ticket, end: End) -> None:
        await self._source.close(ticket, end)
        self._count_end(ticket, end)
        self.wake()

    def _count_end(self, ticket: Ticket, end: End) -> None:
        del self._live[ticket.number]
        self._ended[end.kind.value] += 1
        self._bus.emit(TicketClosed(self._clock(), ticket.number, end, len(self._live)))

    def _cancel_live(self) -> None:
        for ticket in list(self._live.values()):
            self._count_end(ticket, End(EndKind.CANCELLED, "the run ended before the ticket did"))
