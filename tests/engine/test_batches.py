"""Stages that take several items at once: batches, when they begin, and items that ride in the payload of another."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.engine.errors import ConfigurationError, QueueClosedError
from dspy_flashevolve.engine.events import Event, EventBus, StageFinished, TicketClosed
from dspy_flashevolve.engine.item import End, EndKind, Item, Ticket
from dspy_flashevolve.engine.pipeline import NotNow, Opened, Pipeline
from dspy_flashevolve.engine.queues import StageQueue
from dspy_flashevolve.engine.stages import Carried, Finish, Forward, Outcome, Outcomes, Stage

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def settle() -> None:
    for _ in range(50):
        await checkpoint()


def item(number: int, version: int = 0) -> Item[int]:
    return Item(number, Ticket(number, random.Random(0)), version)


# The queue


async def taken_by(queue: StageQueue[int], ready: Any, got: list[int]) -> None:
    got.append((await queue.get(ready))[0].payload)


async def test_nothing_is_taken_before_ready_says_yes_and_every_item_that_comes_in_asks_it() -> None:
    queue, got, asked = StageQueue[int]("q", 8), list[int](), list[int]()

    def three(waiting: int) -> bool:
        asked.append(waiting)
        return waiting >= 3

    async with anyio.create_task_group() as group:
        group.start_soon(taken_by, queue, three, got)
        for number in range(3):
            await settle()
            assert got == []
            await queue.put(item(number))
        await settle()
    assert got == [0]
    assert asked == [1, 2, 3]


async def test_a_poke_asks_again_without_a_new_item() -> None:
    queue, got, open_ = StageQueue[int]("q", 8), list[int](), False
    await queue.put(item(7))
    async with anyio.create_task_group() as group:
        group.start_soon(taken_by, queue, lambda waiting: open_, got)
        await settle()
        queue.poke()
        await settle()
        assert got == []
        open_ = True
        await settle()
        assert got == []
        queue.poke()
        await settle()
    assert got == [7]


async def test_a_poke_of_an_empty_queue_takes_nothing_and_loses_no_getter() -> None:
    queue, got = StageQueue[int]("q", 8), list[int]()
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(taken_by, queue, None, got)
        await settle()
        for _ in range(4):
            queue.poke()
            await settle()
        assert queue.statistics().waiting_getters == 3
        for number in range(3):
            await queue.put(item(number))
    assert sorted(got) == [0, 1, 2]


async def test_a_put_right_after_a_poke_is_not_lost() -> None:
    queue, got = StageQueue[int]("q", 8), list[int]()
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(taken_by, queue, None, got)
        await settle()
        queue.poke()
        await queue.put(item(1))
        await queue.put(item(2))
    assert sorted(got) == [1, 2]


async def test_a_closed_queue_lets_the_rest_out_without_asking() -> None:
    queue = StageQueue[int]("q", 8)
    await queue.put(item(5))
    queue.close()
    assert (await queue.get(lambda waiting: False))[0].payload == 5
    with pytest.raises(QueueClosedError):
        await queue.get(lambda waiting: True)


async def test_a_getter_that_is_not_ready_hears_of_the_close() -> None:
    queue, ended = StageQueue[int]("q", 8), list[str]()

    async def get() -> None:
        with pytest.raises(QueueClosedError):
            await queue.get(lambda waiting: waiting > 99)
        ended.append("closed")

    async with anyio.create_task_group() as group:
        group.start_soon(get)
        await settle()
        queue.close()
    assert ended == ["closed"]


@given(st.lists(st.integers(0, 4), max_size=12), st.integers(0, 15))
def test_get_more_takes_what_is_there_freshest_first_up_to_its_bound(versions: list[int], most: int) -> None:
    async def run() -> list[int]:
        queue = StageQueue[int]("q", capacity=20)
        for number, version in enumerate(versions):
            await queue.put(item(number, version))
        more = [one.payload for one, _ in queue.get_more(most)]
        assert len(queue) == len(versions) - len(more)
        return more

    expected = sorted(range(len(versions)), key=lambda n: (-versions[n], n))[:most]
    assert anyio.run(run) == expected


async def test_get_more_makes_room_for_as_many_as_it_took() -> None:
    queue = StageQueue[int]("q", capacity=3)
    for number in range(3):
        await queue.put(item(number))
    async with anyio.create_task_group() as group:
        for number in range(3, 8):
            group.start_soon(queue.put, item(number))
        await settle()
        assert len(queue.get_more(2)) == 2
        await settle()
        assert (queue.statistics().size, queue.statistics().waiting_putters) == (3, 3)
        queue.get_more(3)
    assert queue.statistics().put == 8


def test_a_stage_needs_batches_of_at_least_one() -> None:
    async def handler(items: list[Item[Any]]) -> Outcomes:
        return []

    with pytest.raises(ConfigurationError, match="batch is 0, expected at least 1"):
        Stage("s", handler, 1, 1, batch=0)


# The pipeline

Fate = Literal["alone", "ride", "again", "later"]
KINDS = [EndKind.COMMITTED, EndKind.INTEGRATED, EndKind.REJECTED, EndKind.FAILED]


@dataclass(frozen=True)
class Riding:
    members: tuple[Item[Any], ...]


class Trains:
    """Items wait in a batch stage; of each batch some end alone, some come again once, and the rest ride together.

    Args:
        plan: what becomes of each ticket, and how it ends.
        live: tickets at once.
        limit: items that a batch takes at most.
        wanted: items that a batch waits for while anything else is under way.
        workers: batches at once.
    """

    def __init__(
        self, plan: list[tuple[Fate, EndKind]], live: int, limit: int, wanted: int, workers: int, capacity: int = 4
    ) -> None:
        self.plan = plan
        self.limit_live = live
        self.limit = limit
        self.wanted = wanted
        self.busy = 0
        self.batches: list[list[int]] = []
        self.tried: Counter[int] = Counter()
        self.closed: list[tuple[int, EndKind]] = []
        self.events: list[Event] = []
        bus = EventBus()
        bus.subscribe(self.events.append)
        stages = [
            Stage("first", self.first, 3, capacity),
            Stage("batch", self.batch, workers, capacity, batch=limit, ready=self.ready),
            Stage("end", self.end, 2, capacity),
        ]
        self.pipeline = Pipeline(stages, self, bus)

    async def open(self, number: int, live: int) -> Opened | NotNow:
        if number >= len(self.plan):
            return NotNow.EXHAUSTED
        if live >= self.limit_live:
            return NotNow.FULL
        self.busy += 1
        return Opened("first", Item(number, Ticket(number, random.Random(0)), version=number % 3))

    async def close(self, ticket: Ticket, end: End) -> None:
        self.closed.append((ticket.number, end.kind))

    def ready(self, waiting: int) -> bool:
        return waiting >= self.wanted or self.busy == 0

    async def first(self, item: Item[int]) -> Outcome:
        await checkpoint()
        self.busy -= 1
        return Forward("batch", item.payload)

    async def batch(self, items: list[Item[int]]) -> Outcomes:
        self.busy += len(items)
        self.batches.append([one.payload for one in items])
        await checkpoint()
        pairs: list[tuple[Item[Any], Outcome | Carried]] = []
        riders: list[Item[Any]] = []
        for one in items:
            fate, kind = self.plan[one.payload]
            self.tried[one.payload] += 1
            if fate == "alone":
                pairs.append((one, Finish(End(kind))))
                self.busy -= 1
            elif fate == "again" and self.tried[one.payload] == 1:
                pairs.append((one, Forward("batch", one.payload)))
                self.busy -= 1
            else:
                riders.append(one)
        if riders:
            lead, *others = riders
            pairs.append((lead, Forward("end", Riding(tuple(riders)))))
            pairs += [(one, Carried(lead.ticket.number)) for one in others]
        return pairs

    async def end(self, item: Item[Riding]) -> Outcomes:
        await checkpoint()
        pairs: list[tuple[Item[Any], Outcome | Carried]] = []
        for one in item.payload.members:
            fate, kind = self.plan[one.payload]
            self.busy -= 1
            if fate == "later" and self.tried[one.payload] == 1:
                pairs.append((one, Forward("batch", one.payload)))  # let down by its carrier, it waits again
            else:
                pairs.append((one, Finish(End(kind))))
        return pairs


PLANS = st.lists(
    st.tuples(st.sampled_from(["alone", "ride", "again", "later"]), st.sampled_from(KINDS)),
    max_size=25,
)


@given(PLANS, st.integers(1, 9), st.integers(1, 5), st.integers(1, 6), st.integers(1, 3), st.integers(0, 3))
def test_every_ticket_ends_exactly_once_whether_it_rides_or_not(
    plan: list[tuple[Fate, EndKind]], live: int, limit: int, wanted: int, workers: int, room: int
) -> None:
    # Stages that pass items back need queues that hold all that live: a worker never waits for its own queue.
    trains = Trains(plan, live, limit, wanted, workers, capacity=live + room)

    async def run() -> None:
        with anyio.fail_after(20):
            await trains.pipeline.run()

    anyio.run(run)
    expected = [(number, kind) for number, (_, kind) in enumerate(plan)]
    closed = [(event.ticket, event.end.kind) for event in trains.events if isinstance(event, TicketClosed)]
    assert sorted(closed) == sorted(trains.closed) == expected
    ended = {kind: count for kind, count in trains.pipeline.statistics().ended.items() if count}
    assert ended == Counter(kind.value for _, kind in plan)
    assert all(1 <= len(batch) <= limit for batch in trains.batches)
    assert Counter(number for batch in trains.batches for number in batch) == trains.tried
    assert all(trains.tried[n] == (2 if fate in ("again", "later") else 1) for n, (fate, _) in enumerate(plan))
    assert trains.pipeline.live == trains.busy == 0


async def test_a_carried_ticket_ends_with_the_outcome_of_its_carrier() -> None:
    trains = Trains([("ride", EndKind.COMMITTED), *[("ride", EndKind.INTEGRATED)] * 3], 4, 4, 4, 1)
    await trains.pipeline.run()
    assert len(trains.batches) == 1
    assert sorted(trains.batches[0]) == [0, 1, 2, 3]
    ends = trains.pipeline.statistics().ended
    assert (ends["committed"], ends["integrated"]) == (1, 3)
    passed = [event.ticket for event in trains.events if isinstance(event, StageFinished) and event.stage == "end"]
    assert passed == [trains.batches[0][0]], "the others never stood in that queue"


async def test_a_batch_takes_the_freshest_first() -> None:
    trains = Trains([("ride", EndKind.COMMITTED)] * 6, 6, 6, 6, 1, capacity=6)
    await trains.pipeline.run()
    assert trains.batches == [[2, 5, 1, 4, 0, 3]]


async def test_a_batch_begins_when_the_pipeline_is_woken_and_ready_has_changed_its_mind() -> None:
    allowed, seen = False, list[int]()

    async def handler(items: list[Item[int]]) -> Outcomes:
        seen.append(len(items))
        return [(one, Finish(End(EndKind.COMMITTED))) for one in items]

    class Three:
        async def open(self, number: int, live: int) -> Opened | NotNow:
            return Opened("batch", item(number)) if number < 3 else NotNow.EXHAUSTED

        async def close(self, ticket: Ticket, end: End) -> None:
            pass

    stages = [Stage("batch", handler, 1, 8, batch=8, ready=lambda waiting: allowed)]
    pipeline = Pipeline(stages, Three(), EventBus())
    async with anyio.create_task_group() as group:
        group.start_soon(pipeline.run)
        await settle()
        assert seen == []
        assert pipeline.waiting("batch") == 3
        pipeline.wake()
        await settle()
        assert seen == []
        allowed = True
        pipeline.wake()
    assert seen == [3]


async def test_the_time_of_a_batch_is_shared_out_among_its_items() -> None:
    now = 0.0

    async def handler(items: list[Item[int]]) -> Outcomes:
        nonlocal now
        now += 6.0
        return [(one, Finish(End(EndKind.COMMITTED))) for one in items]

    class Three:
        async def open(self, number: int, live: int) -> Opened | NotNow:
            return Opened("batch", item(number)) if number < 3 else NotNow.EXHAUSTED

        async def close(self, ticket: Ticket, end: End) -> None:
            pass

    bus, events = EventBus(), list[Event]()
    bus.subscribe(events.append)
    stages = [Stage("batch", handler, 1, 8, batch=8, ready=lambda waiting: waiting == 3)]
    await Pipeline(stages, Three(), bus, clock=lambda: now).run()
    assert [event.worked_seconds for event in events if isinstance(event, StageFinished)] == [2.0, 2.0, 2.0]


async def test_an_error_in_a_batch_cancels_the_tickets_that_ride() -> None:
    async def end(item: Item[Riding]) -> Outcomes:
        raise ZeroDivisionError("boom")

    trains = Trains([("ride", EndKind.COMMITTED)] * 3, 3, 3, 3, 1)
    stages = [
        Stage("first", trains.first, 3, 4),
        Stage("batch", trains.batch, 1, 4, batch=3, ready=trains.ready),
        Stage("end", end, 2, 4),
    ]
    pipeline = Pipeline(stages, trains, EventBus())
    with pytest.raises(ZeroDivisionError, match="boom"):
        await pipeline.run()
    assert pipeline.statistics().ended["cancelled"] == 3
