"""Slots: the limits, work conservation, who is next, cancellation, slots that are given back for a while."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.scheduler import (
    Scheduler,
    current_slot,
    priority,
)
from tests.engine.stepped import STAGES, Asker, Stepped, settle, stepped

QUEUES = {"rollout": "task", "screen": "task", "validate": "task", "propose": "reflection"}


def busy_at(scheduler: Scheduler, queue: str) -> int:
    """Slots held now by requests of one queue."""
    return scheduler._queue(queue).busy


# The limits


ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from(STAGES), st.integers(0, 3), st.integers(1, 4)),
    st.tuples(st.just("end"), st.integers(0, 9)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("pause"), st.integers(0, 9)),
    st.tuples(st.just("resume"), st.integers(0, 9)),
    st.tuples(st.just("resize"), st.sampled_from(["task", "reflection"]), st.integers(1, 6)),
    st.tuples(st.just("share"), st.sampled_from(STAGES), st.integers(1, 6)),
)


async def act(on: Stepped, action: Any, limits: dict[str, int], shares: dict[str, int]) -> None:
    match action:
        case ("ask", stage, step, count):
            await on.ask(stage, Asker(step, version=step, value=step / 3), count)
        case ("end", which) if held := on.of("held"):
            held[which % len(held)].end.set()
        case ("cancel", which) if there := on.of("waiting", "held", "paused"):
            await on.cancel(there[which % len(there)])
        case ("pause", which) if held := on.of("held"):
            held[which % len(held)].pause.set()
        case ("resume", which) if paused := on.of("paused"):
            paused[which % len(paused)].go_on.set()
        case ("resize", queue, limit):
            limits[queue] = limit
            on.scheduler.resize(limit, queue)
        case ("share", stage, share):
            shares[stage] = share
            on.scheduler.set_shares({stage: share})
        case _:
            pass
    await settle()


@settings(max_examples=200)
@given(st.integers(1, 6), st.lists(ACTIONS, max_size=40))
def test_no_limit_is_exceeded_by_a_grant_and_no_slot_that_somebody_may_have_is_free(
    total: int, actions: list[Any]
) -> None:
    limits, shares = dict[str, int](), dict[str, int]()

    def within() -> None:
        stages = on.scheduler.statistics().stages
        assert sum(one.running for one in stages.values()) <= total
        for queue, limit in limits.items():
            assert busy_at(on.scheduler, queue) <= limit
        for stage, share in shares.items():
            assert stages[stage].running <= share

    on = Stepped(total, within, queues=QUEUES)

    async def main() -> None:
        for action in actions:
            await act(on, action, limits, shares)
            seen = on.scheduler.statistics()
            assert seen.busy == len(on.of("held"))
            for name, one in seen.stages.items():
                full = busy_at(on.scheduler, QUEUES[name]) >= limits.get(QUEUES[name], total)
                assert seen.busy >= total or full or one.running >= shares.get(name, total) or not one.waiting
        await on.end_all()

    stepped(main)
    seen = on.scheduler.statistics()
    assert seen.busy == sum(one.waiting for one in seen.stages.values()) == 0
    assert not on.scheduler._lines, "nothing is kept of a line that has come to its end"


def test_a_validation_of_300_examples_takes_every_free_slot_and_does_not_block_a_screen_of_3() -> None:
    on = Stepped(8)

    async def main() -> None:
        await on.ask("validate", 1, 300)
        assert on.scheduler.statistics().busy == 8
        await on.ask("screen", 2, 3)
        await on.end(3)
        assert on.granted[8:] == [("screen", 2)] * 3
        for one in on.of("waiting"):
            await on.cancel(one)
        await on.end_all()

    stepped(main)


def test_a_stage_that_there_is_not_is_refused_by_name() -> None:
    async def main() -> None:
        with pytest.raises(ConfigurationError, match="stage 'judge' is not one of"):
            await Scheduler(1, STAGES).run("judge", Asker(0), settle)

    stepped(main)


# Who is next


REQUESTS = st.integers(1, 500)


def place(depth: int = 2, value: float = 0.5, version: int = 3, requests: int = 10, **options: Any) -> Any:
    defaults: dict[str, Any] = {"held": 0, "step": 7, "first": 4}
    return priority(depth, value, version, requests, **(defaults | options))


@given(st.floats(0.001, 1), st.integers(1, 100), st.integers(1, 6), REQUESTS)
def test_what_is_worth_more_deeper_or_fresher_goes_first(more: float, commits: int, depth: int, requests: int) -> None:
    here = place(depth, requests=requests)
    assert place(depth, value=0.5 + more, requests=requests) < here
    assert place(depth + 1, requests=requests) < here
    assert place(depth, version=3 + commits, requests=requests) < here
    assert place(depth, step=6, requests=requests) < here < place(depth, step=8, requests=requests)


@given(st.integers(0, 8), st.integers(1, 8), REQUESTS)
def test_the_seeds_validation_has_its_slots_first_and_beyond_them_holds_nobody_back(
    held: int, first: int, requests: int
) -> None:
    seed = place(1, value=math.inf, requests=requests, held=held, first=first)
    assert (seed < place(9, value=1e6, requests=1)) == (held < first)
    assert place(1, value=math.inf, requests=requests, held=first, first=first) > place(2, value=0.0, requests=1)


# Cancellation


def test_a_slot_granted_to_one_that_is_cancelled_at_once_goes_to_the_next() -> None:
    on = Stepped(1)

    async def main() -> None:
        await on.ask("validate", 1)
        await on.ask("screen", 2)
        await on.ask("rollout", 3)
        holder, second = on.requests[0], on.requests[1]
        holder.end.set()
        while on.scheduler.statistics().stages["screen"].waiting:
            await checkpoint()
        assert second.state == "waiting", "the slot is handed over, the new holder has not run yet"
        await on.cancel(second)
        assert on.granted == [("validate", 1), ("rollout", 3)]
        await on.end_all()

    stepped(main)


# What is counted


def test_slots_and_limits_are_summed_over_time() -> None:
    on = Stepped(4)

    async def main() -> None:
        on.clock.now = 5.0  # nothing is counted before the first request
        await on.ask("screen", 1, 2)
        on.clock.now = 8.0
        on.scheduler.resize(2, "")
        on.clock.now = 10.0
        await on.end_all()

    stepped(main)
    assert on.scheduler.statistics().limit_seconds == 4 * 3 + 2 * 2


# Slots that are given back for a while


def test_a_paused_slot_is_of_use_to_others_and_is_taken_again_in_order() -> None:
    on = Stepped(1)

    async def main() -> None:
        await on.ask("screen", 1)
        await on.ask("rollout", 2)
        on.clock.now = 1.0
        first, other = on.requests
        first.pause.set()
        await settle()
        assert (first.state, other.state) == ("paused", "held")
        first.go_on.set()
        await settle()
        assert first.state == "waiting"
        on.clock.now = 5.0
        await on.end()
        assert first.state == "held"
        on.clock.now = 7.0
        await on.end()

    stepped(main)
    stages = on.scheduler.statistics().stages
    assert (stages["screen"].served_seconds, stages["rollout"].served_seconds) == (1.0 + 2.0, 4.0)


def test_parts_of_one_request_share_its_slot() -> None:
    scheduler, busy = Scheduler(1, STAGES), list[int]()

    async def part() -> None:
        slot = current_slot()
        assert slot is not None
        async with slot.released():
            busy.append(scheduler.statistics().busy)
            await settle()
        busy.append(scheduler.statistics().busy)

    async def call() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(part)
        busy.append(scheduler.statistics().busy)

    async def main() -> None:
        await scheduler.run("screen", Asker(1), call)

    stepped(main)
    assert busy == [0, 0, 0, 1, 1, 1, 1]
    assert scheduler.statistics().busy == 0


def test_requests_beside_one_that_gave_its_slot_back_stay_within_the_limit_and_leave_no_slot_held() -> None:
    scheduler, busy = Scheduler(2, STAGES), list[int]()

    async def inner() -> int:
        slot = current_slot()
        assert slot is not None
        assert slot.step_and_stage == (1, "screen")
        await settle()
        busy.append(scheduler.statistics().busy)
        return 5

    async def call() -> list[int]:
        outer = current_slot()
        assert outer is not None
        async with outer.released(is_retry=False):
            assert not outer.is_retrying, "it waits for no next attempt"
            made = await asyncio.gather(*(outer.run_beside(inner) for _ in range(5)))
            assert current_slot() is outer
            assert scheduler.statistics().busy == 0
        return made

    async def main() -> None:
        assert await scheduler.run("screen", Asker(1), call) == [5] * 5

    stepped(main)
    assert max(busy) == 2
    assert scheduler.statistics().busy == 0


def test_a_slot_that_its_holder_wants_back_after_the_end_is_not_held() -> None:
    """A part of a request, in a task of its own, may live longer than the request."""
    scheduler = Scheduler(1, STAGES)
    parts: list[asyncio.Task[None]] = []
    go_on = anyio.Event()

    async def part() -> None:
        slot = current_slot()
        assert slot is not None
        async with slot.released():
            await go_on.wait()

    async def call() -> None:
        parts.append(asyncio.create_task(part()))
        await settle()

    async def main() -> None:
        await scheduler.run("screen", Asker(1), call)
        go_on.set()
        await asyncio.gather(*parts)
        assert scheduler.statistics().busy == 0

    stepped(main)
