"""Requests: slots, retries, single flight."""

from __future__ import annotations

import random
from collections.abc import Callable

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.engine.budget import Budget, Reservation
from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.errors import RolloutUnresolvedError, TransientError
from dspy_flashevolve.engine.events import Event, EventBus, RolloutFinished
from dspy_flashevolve.engine.rollouts import RetryPolicy, Rollout, Rollouts
from dspy_flashevolve.engine.slots import Slots

pytestmark = pytest.mark.anyio
FIRST, SECOND = Claim(0, "screen", 3), Claim(1, "screen", 3)
AT_ONCE = RetryPolicy(attempts=3, first_seconds=0.0)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def service(bus: EventBus | None = None, slots: int = 4, **options: object) -> tuple[Rollouts, Slots]:
    shared = Slots(slots)
    return Rollouts(shared, bus or EventBus(), retry=AT_ONCE, rng=random.Random(0), **options), shared  # type: ignore[arg-type]


def reserved(calls: int) -> Reservation:
    reservation = Budget(None).reserve(calls)
    assert reservation is not None
    return reservation


class Call:
    """A rollout that ends when it is told to; counts how often it was run."""

    def __init__(self) -> None:
        self.runs = 0
        self.go = anyio.Event()

    async def __call__(self) -> Rollout:
        self.runs += 1
        await self.go.wait()
        return Rollout("output", 0.5, tokens=7)


async def test_equal_rollouts_in_flight_are_run_and_paid_once() -> None:
    rollouts, _ = service()
    call, results = Call(), list[tuple[Rollout, bool]]()
    paying, joining = reserved(1), reserved(1)

    async def one(claim: Claim, reservation: Reservation) -> None:
        results.append(await rollouts.rollout("key", claim, reservation, call))

    async with anyio.create_task_group() as group:
        group.start_soon(one, FIRST, paying)
        await checkpoint()
        group.start_soon(one, SECOND, joining)
        await checkpoint()
        call.go.set()
    assert call.runs == 1
    assert sorted(paid for _, paid in results) == [False, True]
    assert (paying.settled, joining.settled, rollouts.shared) == (1, 0, 1)


async def test_equal_rollouts_one_after_the_other_are_run_twice() -> None:
    rollouts, _ = service()
    call = Call()
    call.go.set()
    for _ in range(2):
        await rollouts.rollout("key", FIRST, reserved(1), call)
    assert call.runs == 2


async def test_without_single_flight_every_rollout_is_run() -> None:
    rollouts, _ = service(single_flight=False)
    call = Call()
    async with anyio.create_task_group() as group:
        for claim in (FIRST, SECOND):
            group.start_soon(rollouts.rollout, "key", claim, reserved(1), call)
        await checkpoint()
        await checkpoint()
        call.go.set()
    assert call.runs == 2


async def test_one_who_joined_flies_himself_when_the_first_is_cancelled() -> None:
    rollouts, _ = service()
    call, results = Call(), list[tuple[Rollout, bool]]()

    async def second() -> None:
        results.append(await rollouts.rollout("key", SECOND, reserved(1), call))

    async with anyio.create_task_group() as outer:
        async with anyio.create_task_group() as inner:
            inner.start_soon(rollouts.rollout, "key", FIRST, reserved(1), call)
            await checkpoint()
            outer.start_soon(second)
            await checkpoint()
            inner.cancel_scope.cancel()
        for _ in range(5):
            await checkpoint()
        call.go.set()
    assert call.runs == 2
    assert results == [(Rollout("output", 0.5, tokens=7), True)]


def failing(times: int, seen: Callable[[], None] = lambda: None) -> Callable[[], object]:
    left = times

    async def call() -> Rollout:
        nonlocal left
        seen()
        if left:
            left -= 1
            raise TransientError("429")
        return Rollout("output", 1.0)

    return call


async def test_a_transient_fault_is_retried_and_leaves_no_trace_in_the_score() -> None:
    rollouts, _ = service()
    reservation = reserved(1)
    rollout, paid = await rollouts.rollout("key", FIRST, reservation, failing(2))  # type: ignore[arg-type]
    assert (rollout.score, paid, reservation.settled, rollouts.retried) == (1.0, True, 1, 2)


async def test_an_unresolved_rollout_is_neither_scored_nor_paid() -> None:
    events: list[Event] = []
    bus = EventBus()
    bus.subscribe(events.append)
    rollouts, _ = service(bus)
    reservation = reserved(1)
    with pytest.raises(RolloutUnresolvedError, match="no answer after 3 attempts: 429"):
        await rollouts.rollout("key", FIRST, reservation, failing(3))  # type: ignore[arg-type]
    assert (reservation.settled, reservation.open, events) == (0, 1, [])


async def test_no_slot_is_held_while_waiting_for_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts, slots = service()
    busy_while_waiting: list[int] = []

    async def sleep(seconds: float) -> None:
        busy_while_waiting.append(slots.statistics().busy)

    monkeypatch.setattr("dspy_flashevolve.engine.rollouts.anyio.sleep", sleep)
    await rollouts.rollout("key", FIRST, reserved(1), failing(2))  # type: ignore[arg-type]
    assert busy_while_waiting == [0, 0]


async def test_a_paid_rollout_is_reported_with_its_score_and_tokens() -> None:
    events: list[Event] = []
    bus = EventBus()
    bus.subscribe(events.append)
    rollouts, _ = service(bus)
    call = Call()
    call.go.set()
    await rollouts.rollout("key", FIRST, reserved(1), call)
    (event,) = events
    assert isinstance(event, RolloutFinished)
    assert (event.ticket, event.stage, event.score, event.tokens) == (0, "screen", 0.5, 7)


@given(st.integers(0, 20), st.none() | st.floats(0, 100), st.floats(0, 0.999))
def test_a_wait_is_at_least_what_the_provider_asked_for_and_else_bounded(
    attempt: int, retry_after: float | None, chance: float
) -> None:
    policy = RetryPolicy()
    wait = policy.wait_seconds(attempt, retry_after, chance)
    if retry_after is None:
        assert 0 <= wait <= policy.most_seconds
    else:
        assert retry_after <= wait <= retry_after + policy.first_seconds
