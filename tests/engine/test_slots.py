"""Slots: the limits, work conservation, the order, fairness, cancellation, slots that are given back for a while."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.leases import current_lease, paused_slot
from dspy_flashevolve.engine.slots import Slots

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


# Limits that change


async def test_growing_hands_the_new_slots_to_those_who_wait() -> None:
    slots = Slots(1)
    async with anyio.create_task_group() as group:
        requests = Requests(slots, group)
        await requests.ask(SCREEN, 4)
        slots.resize(3)
        await settle()
        assert (slots.statistics().busy, slots.statistics().waiting, slots.limit) == (3, 1, 3)
        await requests.end_all()


async def test_shrinking_lets_holders_finish() -> None:
    slots = Slots(4)
    async with anyio.create_task_group() as group:
        requests = Requests(slots, group)
        await requests.ask(SCREEN, 5)
        slots.resize(2)
        assert (slots.statistics().busy, slots.idle) == (4, 0)
        for _ in range(2):
            await requests.end_oldest()
        assert (slots.statistics().busy, slots.statistics().waiting) == (2, 1)
        await requests.end_oldest()
        assert (slots.statistics().busy, slots.statistics().waiting) == (2, 0)
        await requests.end_all()
    assert slots.idle == 2


async def test_growth_that_nobody_waits_for_is_announced_as_idle() -> None:
    slots, idle = Slots(1), []
    slots.on_idle = lambda: idle.append(slots.idle)
    slots.resize(3)
    assert idle == [3]


@pytest.mark.parametrize("endpoint", [None, "e"])
def test_a_new_limit_under_one_is_refused(endpoint: str | None) -> None:
    with pytest.raises(ConfigurationError, match="limit is 0, expected at least 1"):
        Slots(4).resize(0, endpoint)


async def test_an_endpoint_that_is_full_does_not_hold_up_another() -> None:
    slots = Slots(8)
    slots.assign({"validate": "slow", "rollout": "fast"})
    slots.resize(2, "slow")
    async with anyio.create_task_group() as group:
        requests = Requests(slots, group)
        await requests.ask(VALIDATION, 6)
        await requests.ask(ROLLOUT, 3)
        assert requests.granted == [VALIDATION] * 2 + [ROLLOUT] * 3
        assert slots.idle == 0, "at the slow one"
        assert (slots.busy_at("slow"), slots.busy_at("fast")) == (2, 3)
        assert (slots.statistics().limit, slots.statistics().limits) == (8, {"slow": 2})
        await requests.end_oldest()
        assert requests.granted[-1] == VALIDATION
        await requests.end_all()


async def test_a_claim_may_name_its_endpoint() -> None:
    slots = Slots(8)
    slots.assign({"validate": "slow"})
    slots.resize(1, "slow")
    async with anyio.create_task_group() as group:
        requests = Requests(slots, group)
        await requests.ask(Claim(1, "validate", 4, endpoint="other"), 3)
        assert (slots.busy_at("slow"), slots.busy_at("other")) == (0, 3)
        await requests.end_all()


@given(
    st.integers(1, 6),
    st.dictionaries(st.sampled_from("xyz"), st.integers(1, 4)),
    st.lists(st.tuples(st.sampled_from("aer"), st.sampled_from("xyz"), st.integers(1, 6)), min_size=1, max_size=20),
)
def test_whatever_the_limits_no_slot_that_somebody_may_have_is_idle(
    total: int, limits: dict[str, int], steps: list[tuple[str, str, int]]
) -> None:
    async def run() -> None:
        slots = Slots(total)
        for name, limit in limits.items():
            slots.resize(limit, name)
        async with anyio.create_task_group() as group:
            requests = Requests(slots, group)
            for action, name, count in steps:
                if action == "a":
                    await requests.ask(Claim(1, "s", 1, endpoint=name), count)
                elif action == "r":
                    slots.resize(count, name)
                    limits[name] = count
                    await settle()
                elif requests.holding:
                    await requests.end_oldest()
                seen = slots.statistics()
                assert seen.busy <= total
                asked = {claim.endpoint for claim in slots._waiting}
                full = {one for one, limit in limits.items() if slots.busy_at(one) >= limit}
                assert seen.busy == total or asked <= full
                assert slots.idle >= 0
            await requests.end_all()
        assert slots.statistics().busy == slots.statistics().waiting == 0

    anyio.run(run)


async def test_it_is_known_whether_requests_waited_for_an_endpoints_own_limit() -> None:
    slots = Slots(3)
    slots.resize(2, "e")
    claim = Claim(1, "s", 1, endpoint="e")
    async with anyio.create_task_group() as group:
        requests = Requests(slots, group)
        await requests.ask(claim, 2)
        assert not slots.pressed("e")
        await requests.ask(claim)
        assert slots.pressed("e")
        assert slots.pressed("e"), "it still waits"
        await requests.end_oldest()
        assert not slots.pressed("e")
        await requests.end_all()


async def test_slots_and_limits_are_summed_over_time() -> None:
    now = 0.0
    slots = Slots(4, clock=lambda: now)
    async with slots.hold(SCREEN), slots.hold(SCREEN):
        now = 3.0
        slots.resize(2)
        now = 5.0
    assert slots.width_seconds("") == 10.0
    assert slots.statistics().limit_seconds == 4 * 3 + 2 * 2


# Slots that are given back for a while


async def test_a_paused_slot_is_of_use_to_others_and_is_taken_again_in_order() -> None:
    now, slots = 0.0, Slots(1, clock=lambda: now)
    order: list[str] = []

    async def other() -> None:
        nonlocal now
        async with slots.hold(ROLLOUT):
            order.append("other")
            now = 5.0

    async with anyio.create_task_group() as group, slots.hold(SCREEN):
        group.start_soon(other)
        await settle()
        now = 1.0
        async with paused_slot(current_lease()):
            order.append("paused")
            await settle()
        order.append("again")
        now = 7.0
    assert order == ["paused", "other", "again"]
    assert slots.statistics().busy_seconds_by_stage == {"screen": 1.0 + 2.0, "rollout": 4.0}


async def test_parts_of_one_rollout_share_its_slot() -> None:
    slots = Slots(1)
    busy: list[int] = []

    async def part() -> None:
        async with paused_slot(current_lease()):
            busy.append(slots.statistics().busy)
            await settle()
        busy.append(slots.statistics().busy)

    async with slots.hold(SCREEN):
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(part)
        assert slots.statistics().busy == 1
    assert busy == [0, 0, 0, 1, 1, 1]
    assert slots.statistics().busy == 0


async def test_a_holder_that_is_cancelled_while_it_pauses_or_comes_back_leaves_no_trace() -> None:
    slots = Slots(1)

    async def pausing(wait: float) -> None:
        async with slots.hold(SCREEN) as lease, paused_slot(lease):
            await anyio.sleep(wait)

    for wait in (0.0, 60.0):
        async with anyio.create_task_group() as group:
            group.start_soon(pausing, wait)
            await checkpoint()
            await checkpoint()
            async with slots.hold(ROLLOUT):
                await settle()
                group.cancel_scope.cancel()
        assert slots.statistics().busy == slots.statistics().waiting == 0


async def test_a_lease_that_has_ended_takes_no_slot() -> None:
    slots = Slots(1)
    async with slots.hold(SCREEN) as lease:
        assert current_lease() is lease
    assert current_lease() is None
    await lease.take()
    assert slots.statistics().busy == 0


async def test_outside_of_any_slot_a_pause_does_nothing() -> None:
    async with paused_slot(current_lease()):
        assert current_lease() is None
