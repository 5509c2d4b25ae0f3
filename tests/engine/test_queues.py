"""Queues between stages: order, bounds, closing, statistics."""

from __future__ import annotations

import random

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.engine.errors import ConfigurationError, QueueClosedError
from dspy_flashevolve.engine.item import Item, Ticket
from dspy_flashevolve.engine.queues import StageQueue

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def item(number: int, version: int = 0, value: float = 0.0) -> Item[int]:
    return Item(number, Ticket(number, random.Random(0)), version, value)


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(20):
        await checkpoint()


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-2, 2)), min_size=1, max_size=20))
def test_get_gives_the_freshest_then_the_most_valuable_then_the_oldest_ticket(stamps: list[tuple[int, float]]) -> None:
    async def run() -> list[Item[int]]:
        queue = StageQueue[int]("q", capacity=len(stamps))
        for number, (version, value) in enumerate(stamps):
            await queue.put(item(number, version, value))
        return [(await queue.get())[0] for _ in stamps]

    taken = anyio.run(run)
    expected = sorted(range(len(stamps)), key=lambda n: (-stamps[n][0], -stamps[n][1], n))
    assert [one.payload for one in taken] == expected


async def test_put_waits_while_the_queue_is_full() -> None:
    queue = StageQueue[int]("q", capacity=1)
    await queue.put(item(0))
    async with anyio.create_task_group() as group:
        group.start_soon(queue.put, item(1))
        await settle()
        assert queue.statistics().size == 1
        assert queue.statistics().waiting_putters == 1
        await queue.get()
        await settle()
        assert queue.statistics().put == 2


async def test_closing_lets_the_rest_out_and_then_ends_every_getter() -> None:
    queue = StageQueue[int]("q", capacity=2)
    await queue.put(item(7))
    queue.close()
    assert (await queue.get())[0].payload == 7
    with pytest.raises(QueueClosedError, match="closed and empty"):
        await queue.get()
    with pytest.raises(QueueClosedError, match="ticket 3 cannot enter"):
        await queue.put(item(3))


async def test_closing_wakes_those_who_wait_on_either_side() -> None:
    empty, full = StageQueue[int]("empty", 1), StageQueue[int]("full", 1)
    await full.put(item(0))
    ended: list[str] = []

    async def get() -> None:
        with pytest.raises(QueueClosedError):
            await empty.get()
        ended.append("getter")

    async def put() -> None:
        with pytest.raises(QueueClosedError):
            await full.put(item(1))
        ended.append("putter")

    async with anyio.create_task_group() as group:
        group.start_soon(get)
        group.start_soon(put)
        await settle()
        empty.close()
        full.close()
    assert sorted(ended) == ["getter", "putter"]


async def test_one_item_wakes_one_worker_and_a_cancelled_one_passes_it_on() -> None:
    queue = StageQueue[int]("q", capacity=4)
    got: list[int] = []

    async def get() -> None:
        got.append((await queue.get())[0].payload)

    async with anyio.create_task_group() as outer:
        async with anyio.create_task_group() as inner:
            inner.start_soon(queue.get)
            await settle()
            outer.start_soon(get)
            outer.start_soon(get)
            await settle()
            inner.cancel_scope.cancel()
            await queue.put(item(1))  # it wakes the first in line, which is being cancelled
        await settle()
        assert got == [1]
        await queue.put(item(2))
    assert got == [1, 2]


async def test_statistics_count_items_and_the_time_they_waited() -> None:
    now = 10.0
    queue = StageQueue[int]("q", capacity=3, clock=lambda: now)
    await queue.put(item(0))
    await queue.put(item(1))
    now = 14.0
    _, waited = await queue.get()
    seen = queue.statistics()
    assert waited == 4.0
    assert (seen.put, seen.taken, seen.size, seen.largest, seen.waited_seconds) == (2, 1, 1, 2, 4.0)


def test_a_capacity_under_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="capacity is 0, expected at least 1"):
        StageQueue[int]("q", capacity=0)
