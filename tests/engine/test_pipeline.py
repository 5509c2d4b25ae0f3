"""The pipeline: every ticket ends once, stages overlap, stops drain, errors cancel. Stepped, never slept."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.events import Event, EventBus, StageFinished, TicketClosed, TicketOpened
from dspy_flashevolve.engine.item import End, EndKind, Item, Ticket
from dspy_flashevolve.engine.pipeline import NotNow, Opened, Pipeline
from dspy_flashevolve.engine.stages import Finish, Forward, Handler, Outcome, Stage

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def settle() -> None:
    for _ in range(50):
        await checkpoint()


class Tickets:
    """Opens ``count`` tickets, at most ``live`` at once, in the stage "first"."""

    def __init__(self, count: int, live: int = 10**6) -> None:
        self.count = count
        self.limit = live
        self.most_live = 0
        self.closed: list[tuple[int, EndKind]] = []

    async def open(self, number: int, live: int) -> Opened | NotNow:
        if number >= self.count:
            return NotNow.EXHAUSTED
        if live >= self.limit:
            return NotNow.FULL
        self.most_live = max(self.most_live, live + 1)
        return Opened("first", Item(number, Ticket(number, random.Random(0)), version=0))

    async def close(self, ticket: Ticket, end: End) -> None:
        self.closed.append((ticket.number, end.kind))


def stage(name: str, handler: Handler, workers: int = 4) -> Stage:
    return Stage(name, handler, workers, queue_capacity=4)


def forward(to: str) -> Handler:
    async def handler(item: Item[Any]) -> Outcome:
        return Forward(to, item.payload)

    return handler


def finish(kind: EndKind = EndKind.COMMITTED) -> Handler:
    async def handler(item: Item[Any]) -> Outcome:
        return Finish(End(kind))

    return handler


def recorded() -> tuple[EventBus, list[Event]]:
    bus, events = EventBus(), list[Event]()
    bus.subscribe(events.append)
    return bus, events


KINDS = [EndKind.COMMITTED, EndKind.REJECTED, EndKind.DISCARDED, EndKind.FAILED]


@given(
    st.lists(st.tuples(st.sampled_from(["first", "second", "third"]), st.sampled_from(KINDS)), max_size=30),
    st.integers(1, 5),
)
def test_every_ticket_ends_in_exactly_one_way(plan: list[tuple[str, EndKind]], live: int) -> None:
    source = Tickets(len(plan), live)
    bus, events = recorded()

    def handler(name: str, following: str | None) -> Handler:
        async def handle(item: Item[int]) -> Outcome:
            where, kind = plan[item.payload]
            await checkpoint()
            return Finish(End(kind)) if where == name or following is None else Forward(following, item.payload)

        return handle

    stages = [
        stage("first", handler("first", "second")),
        stage("second", handler("second", "third"), workers=1),
        stage("third", handler("third", None), workers=2),
    ]
    pipeline = Pipeline(stages, source, bus)
    anyio.run(pipeline.run)
    closed = [event for event in events if isinstance(event, TicketClosed)]
    assert sorted((event.ticket, event.end.kind) for event in closed) == [(n, kind) for n, (_, kind) in enumerate(plan)]
    assert sorted(source.closed) == [(n, kind) for n, (_, kind) in enumerate(plan)]
    ended = {kind: count for kind, count in pipeline.statistics().ended.items() if count}
    assert ended == Counter(kind.value for _, kind in plan)
    assert source.most_live <= live
    assert pipeline.live == 0


async def test_stages_of_different_tickets_overlap() -> None:
    gates = {n: anyio.Event() for n in range(3)}
    inside: dict[str, set[int]] = {"first": set(), "second": set()}

    def held(name: str, outcome: Callable[[Item[int]], Outcome], wait: Callable[[int], bool]) -> Handler:
        async def handler(item: Item[int]) -> Outcome:
            inside[name].add(item.payload)
            if wait(item.payload):
                await gates[item.payload].wait()
            inside[name].discard(item.payload)
            return outcome(item)

        return handler

    stages = [
        stage("first", held("first", lambda i: Forward("second", i.payload), lambda n: n == 2)),
        stage("second", held("second", lambda i: Finish(End(EndKind.COMMITTED)), lambda n: n != 2)),
    ]
    pipeline = Pipeline(stages, Tickets(3), EventBus())
    async with anyio.create_task_group() as group:
        group.start_soon(pipeline.run)
        await settle()
        assert inside == {"first": {2}, "second": {0, 1}}
        for gate in gates.values():
            gate.set()
    assert pipeline.statistics().ended["committed"] == 3


async def test_a_stop_admits_no_more_and_drains_what_is_live() -> None:
    gate = anyio.Event()

    async def wait(item: Item[int]) -> Outcome:
        await gate.wait()
        return Finish(End(EndKind.COMMITTED))

    source = Tickets(100, live=3)
    pipeline = Pipeline([stage("first", wait)], source, EventBus())
    async with anyio.create_task_group() as group:
        group.start_soon(pipeline.run)
        await settle()
        pipeline.stop("enough")
        pipeline.stop("a later reason")
        gate.set()
    assert sorted(source.closed) == [(n, EndKind.COMMITTED) for n in range(3)]
    assert pipeline.stop_reason == "enough"


async def test_an_error_in_a_handler_leaves_run_as_it_was_and_cancels_the_live_tickets() -> None:
    async def fail(item: Item[int]) -> Outcome:
        if item.payload == 2:
            raise ZeroDivisionError("boom")
        await anyio.sleep_forever()
        raise AssertionError

    bus, events = recorded()
    pipeline = Pipeline([stage("first", fail)], Tickets(3), bus)
    with pytest.raises(ZeroDivisionError, match="boom"):
        await pipeline.run()
    ends = [event.end.kind for event in events if isinstance(event, TicketClosed)]
    assert ends == [EndKind.CANCELLED] * 3


async def test_cancelling_the_run_ends_every_live_ticket_as_cancelled() -> None:
    async def forever(item: Item[int]) -> Outcome:
        await anyio.sleep_forever()
        raise AssertionError

    pipeline = Pipeline([stage("first", forever)], Tickets(2), EventBus())
    async with anyio.create_task_group() as group:
        group.start_soon(pipeline.run)
        await settle()
        group.cancel_scope.cancel()
    assert pipeline.statistics().ended["cancelled"] == 2


async def test_a_source_that_is_full_with_nothing_live_ends_the_run_instead_of_hanging() -> None:
    class Full(Tickets):
        async def open(self, number: int, live: int) -> Opened | NotNow:
            return NotNow.FULL

    pipeline = Pipeline([stage("first", finish())], Full(1), EventBus())
    with anyio.fail_after(5):
        await pipeline.run()
    assert pipeline.statistics().opened == 0


async def test_waking_asks_a_full_source_again() -> None:
    gate = anyio.Event()

    async def wait(item: Item[int]) -> Outcome:
        await gate.wait()
        return Finish(End(EndKind.COMMITTED))

    source = Tickets(3, live=1)
    pipeline = Pipeline([stage("first", wait)], source, EventBus())
    async with anyio.create_task_group() as group:
        group.start_soon(pipeline.run)
        await settle()
        source.limit = 2
        await settle()
        assert pipeline.live == 1
        pipeline.wake()
        await settle()
        assert pipeline.live == 2
        gate.set()


async def test_no_more_items_than_workers_are_in_a_stage() -> None:
    inside = most = 0

    async def count(item: Item[int]) -> Outcome:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await settle()
        inside -= 1
        return Finish(End(EndKind.REJECTED))

    await Pipeline([stage("first", count, workers=2)], Tickets(7), EventBus()).run()
    assert most == 2


async def test_events_tell_when_a_ticket_opened_passed_a_stage_and_closed() -> None:
    bus, events = recorded()
    now = 0.0

    async def later(item: Item[int]) -> Outcome:
        nonlocal now
        now += 2.5
        return Forward("second", None, version=4)

    versions: list[int] = []

    async def second(item: Item[Any]) -> Outcome:
        versions.append(item.version)
        return Finish(End(EndKind.COMMITTED, "done"))

    await Pipeline([stage("first", later), stage("second", second)], Tickets(1), bus, clock=lambda: now).run()
    assert [type(event) for event in events] == [TicketOpened, StageFinished, StageFinished, TicketClosed]
    assert [event.worked_seconds for event in events if isinstance(event, StageFinished)] == [2.5, 0.0]
    assert versions == [4], "a stage may stamp a new version"


def test_two_stages_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="unique"):
        Pipeline([stage("a", finish()), stage("a", finish())], Tickets(0), EventBus())


@pytest.mark.parametrize(("workers", "capacity", "field"), [(0, 1, "workers"), (1, 0, "queue_capacity")])
def test_a_stage_needs_a_worker_and_room(workers: int, capacity: int, field: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{field} is 0"):
        Stage("s", finish(), workers, capacity)


def test_a_source_that_waits_for_what_is_no_ticket_is_asked_again_when_the_pipeline_is_woken() -> None:
    asked: list[int] = []

    class Later(Tickets):
        async def open(self, number: int, live: int) -> Opened | NotNow:
            asked.append(live)
            return NotNow.WAITING if len(asked) < 3 else await super().open(number, live)

    source = Later(2, 1)
    pipeline = Pipeline([stage("first", finish())], source, recorded()[0])

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(pipeline.run)
            for _ in range(2):
                for _ in range(20):
                    await checkpoint()
                pipeline.wake()

    anyio.run(main)
    assert asked[:3] == [0, 0, 0]
    assert len(source.closed) == 2


def test_a_stop_reaches_a_source_that_waits_for_what_is_no_ticket() -> None:
    class Waiting(Tickets):
        async def open(self, number: int, live: int) -> Opened | NotNow:
            return NotNow.WAITING

    pipeline = Pipeline([stage("first", finish())], Waiting(1, 1), recorded()[0])

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(pipeline.run)
            for _ in range(20):
                await checkpoint()
            pipeline.stop("enough")

    anyio.run(main)
    assert pipeline.stop_reason == "enough"
