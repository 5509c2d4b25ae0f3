"""Slots: the limit, work conservation, the order, fairness, cancellation."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.slots import Claim, Slots

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Requests:
    """Requests that hold a slot until they are told to end; records who was granted one, in order."""

    def __init__(self, slots: Slots, group: Any) -> None:
        self.slots = slots
        self.group = group
        self.granted: list[Claim] = []
        self.holding: list[tuple[Claim, anyio.Event]] = []

    async def _one(self, claim: Claim) -> None:
        async with self.slots.hold(claim):
            end = anyio.Event()
            self.granted.append(claim)
            self.holding.append((claim, end))
            await end.wait()

    async def ask(self, claim: Claim, count: int = 1) -> None:
        for _ in range(count):
            self.group.start_soon(self._one, claim)
        await settle()

    async def end_oldest(self) -> None:
        _, end = self.holding.pop(0)
        end.set()
        await settle()

    async def end_all(self) -> None:
        while self.holding:
            await self.end_oldest()


async def settle() -> None:
    for _ in range(20):
        await checkpoint()


SCREEN = Claim(ticket=2, stage="screen", depth=3)
VALIDATION = Claim(ticket=1, stage="validate", depth=4)
ROLLOUT = Claim(ticket=3, stage="rollout", depth=1)


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from("ae"), st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=15),
)
def test_slots_are_never_overdrawn_and_never_idle_while_somebody_waits(
    limit: int, steps: list[tuple[str, int, int]]
) -> None:
    async def run() -> None:
        slots = Slots(limit)
        async with anyio.create_task_group() as group:
            requests = Requests(slots, group)
            for action, ticket, count in steps:
                if action == "a":
                    await requests.ask(Claim(ticket, "s", ticket), count)
                elif requests.holding:
                    await requests.end_oldest()
                seen = slots.statistics()
                assert seen.busy <= limit
                assert seen.busy == limit or not seen.waiting
            await requests.end_all()
        assert slots.statistics().busy == slots.statistics().waiting == 0

    anyio.run(run)


async def test_a_validation_of_300_examples_does_not_block_a_screen_of_3() -> None:
    slots = Slots(8)
    async with anyio.create_task_group() as group:
        requests = Requests(slots, group)
        await requests.ask(VALIDATION, 300)
        await requests.ask(SCREEN, 3)
        for _ in range(3):
            await requests.end_oldest()
        assert requests.granted[8:11] == [SCREEN] * 3
        group.cancel_scope.cancel()


async def test_a_validation_takes_every_slot_that_nobody_else_wants() -> None:
    slots = Slots(8)
    async with anyio.create_task_group() as group:
        requests = Requests(slots, group)
        await requests.ask(VALIDATION, 300)
        assert slots.statistics().busy == 8
        group.cancel_scope.cancel()


async def test_validations_do_not_share_the_more_valuable_one_ends_first() -> None:
    poor, rich = Claim(1, "validate", 4, value=0.2), Claim(2, "validate", 4, value=0.9)
    slots = Slots(4)
    async with anyio.create_task_group() as group:
        requests = Requests(slots, group)
        await requests.ask(poor, 40)
        await requests.ask(rich, 20)
        for _ in range(20):
            await requests.end_oldest()
        assert requests.granted == [poor] * 4 + [rich] * 20
        group.cancel_scope.cancel()


async def test_of_small_claims_the_deepest_stage_goes_first() -> None:
    slots = Slots(1)
    async with anyio.create_task_group() as group:
        requests = Requests(slots, group)
        await requests.ask(Claim(9, "other", 0))
        await requests.ask(ROLLOUT)
        await requests.ask(SCREEN)
        await requests.end_all()
    assert requests.granted[1:] == [SCREEN, ROLLOUT]


async def test_of_equal_depth_the_more_valuable_and_then_the_fresher_goes_first() -> None:
    stale, fresh = Claim(1, "s", 1, version=0), Claim(2, "s", 1, version=5)
    valuable = Claim(3, "s", 1, value=2.0)
    slots = Slots(1)
    async with anyio.create_task_group() as group:
        requests = Requests(slots, group)
        await requests.ask(Claim(9, "other", 0))
        for claim in (stale, fresh, valuable):
            await requests.ask(claim)
        await requests.end_all()
    assert requests.granted[1:] == [valuable, fresh, stale]


async def test_the_order_can_be_replaced() -> None:
    class OldestTicket:
        def key(self, claim: Claim, held: int, waiting: int) -> tuple[float, ...]:
            return (float(claim.ticket),)

    slots = Slots(1, OldestTicket())
    async with anyio.create_task_group() as group:
        requests = Requests(slots, group)
        await requests.ask(Claim(9, "other", 0))
        for claim in (ROLLOUT, SCREEN, VALIDATION):
            await requests.ask(claim)
        await requests.end_all()
    assert [claim.ticket for claim in requests.granted[1:]] == [1, 2, 3]


async def test_a_cancelled_waiter_leaves_no_trace() -> None:
    slots = Slots(1)
    async with anyio.create_task_group() as outer:
        requests = Requests(slots, outer)
        await requests.ask(VALIDATION)
        async with anyio.create_task_group() as inner:
            waiting = Requests(slots, inner)
            await waiting.ask(SCREEN, 2)
            assert slots.statistics().waiting == 2
            inner.cancel_scope.cancel()
        assert slots.statistics().waiting == 0
        await requests.end_all()
    assert slots.statistics().busy == 0


async def test_a_slot_granted_to_a_waiter_that_is_cancelled_at_once_goes_to_the_next() -> None:
    slots = Slots(1)
    async with anyio.create_task_group() as outer:
        requests = Requests(slots, outer)
        await requests.ask(VALIDATION)
        async with anyio.create_task_group() as inner:
            cancelled = Requests(slots, inner)
            await cancelled.ask(SCREEN)
            await requests.ask(ROLLOUT)
            _, end = requests.holding.pop(0)
            end.set()
            await checkpoint()  # the slot is handed over, the new holder has not run yet
            inner.cancel_scope.cancel()
        await settle()
        assert requests.granted == [VALIDATION, ROLLOUT]
        await requests.end_all()


async def test_statistics_measure_busy_seconds_by_stage() -> None:
    now = 0.0
    slots = Slots(2, clock=lambda: now)
    async with slots.hold(SCREEN):
        now = 3.0
        async with slots.hold(VALIDATION):
            now = 4.0
    assert slots.statistics().busy_seconds_by_stage == {"validate": 1.0, "screen": 4.0}
    assert slots.statistics().peak == 2


def test_a_limit_under_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="limit is 0, expected at least 1"):
        Slots(0)


async def test_an_idle_slot_is_announced_only_when_nobody_takes_it() -> None:
    slots, idle = Slots(2), []
    slots.on_idle = lambda: idle.append(slots.idle)
    async with anyio.create_task_group() as group:
        requests = Requests(slots, group)
        await requests.ask(SCREEN, 3)
        await requests.end_oldest()
        assert idle == []
        await requests.end_oldest()
        assert idle == [1]
        await requests.end_all()
    assert idle == [1, 2]
    assert slots.idle == 2
