"""Adaptive limits: the decisions, what no sequence of signals may do, and closed loops on both simulated profiles."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.engine.endpoints import Endpoints
from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.events import EndpointPaused, Event, EventBus, LimitChanged
from dspy_flashevolve.engine.limits import (
    SAMPLES,
    AdaptiveLimit,
    Bounds,
    Gauge,
    Level,
    State,
    Throughput,
    Window,
    after_refusals,
    decide,
    elasticity,
)
from dspy_flashevolve.engine.retries import RetryPolicy, TrackedRequest
from dspy_flashevolve.engine.scheduler import Scheduler, current_slot
from dspy_flashevolve.sim.batching import BatchDriver
from dspy_flashevolve.sim.profiles import PROFILES
from dspy_flashevolve.sim.virtual import run
from tests.engine.stepped import Asker

RULES = Bounds(start=8, high=256)
BUSY = Window(seconds=10.0, finished=3, pressed=True)


def limit_after(state: State, window: Window, rules: Bounds = RULES) -> int:
    return decide(rules, state, window)[0].limit


# Decisions


def test_before_the_first_sign_of_saturation_every_answer_adds_slots_but_a_window_at_most_doubles() -> None:
    assert limit_after(State(40), BUSY) == 46
    assert limit_after(State(4), BUSY) == 8


def test_after_it_one_slot_is_added_at_a_time_and_not_too_often() -> None:
    steady = State(40, starting=False, ceiling=100, grown_seconds=9.5)
    assert limit_after(steady, BUSY) == 40
    assert limit_after(steady, replace(BUSY, seconds=10.6)) == 41


@pytest.mark.parametrize(
    "window",
    [
        replace(BUSY, pressed=False),
        replace(BUSY, finished=0),
        replace(BUSY, gauges=(Gauge(9.0, waiting=1, running=8, cache_use=0.1),)),
        replace(BUSY, gauges=(Gauge(9.0, waiting=0, running=8, cache_use=0.95),)),
    ],
    ids=["it does not bind", "no news", "requests wait in the server", "its cache is full"],
)
def test_it_does_not_grow_when(window: Window) -> None:
    assert limit_after(State(8), window) == 8


def test_it_does_not_grow_before_the_provider_wants_to_be_asked_again() -> None:
    held = after_refusals(RULES, State(64), 9.0, width=64, refused=1, retry_after_seconds=5.0)
    assert limit_after(replace(held, starting=True, ceiling=None), BUSY) == held.limit


def test_a_gauge_with_room_lets_it_grow_before_anything_has_ended() -> None:
    gauge = Gauge(9.9, waiting=0, running=20, cache_use=0.2)
    assert limit_after(State(20), replace(BUSY, finished=0, gauges=(gauge,))) == 30


def test_it_shrinks_to_what_runs_when_many_wait_in_the_server_twice_in_a_row() -> None:
    crowded = Gauge(9.0, waiting=60, running=100, cache_use=0.5)
    assert limit_after(State(160), replace(BUSY, gauges=(crowded,))) == 160
    state, reason = decide(RULES, State(160), replace(BUSY, gauges=(crowded, replace(crowded, seconds=10.0))))
    assert (state.limit, reason) == (100, "requests wait in the server")
    assert limit_after(state, replace(BUSY, seconds=12.0)) == 100


def test_it_goes_back_to_between_the_levels_when_more_requests_bring_nothing() -> None:
    flat = Level(64.0, 100.0), Level(100.0, 64.5)
    state, reason = decide(RULES, State(120), replace(BUSY, levels=flat))
    assert (state.limit, reason) == (80, "throughput stopped growing")
    still = Level(64.0, 100.0), Level(100.0, 80.0)
    assert limit_after(State(120), replace(BUSY, levels=still)) > 120


def test_a_ceiling_is_kept_at_a_distance_and_tried_again_slot_by_slot_when_it_is_old() -> None:
    state = after_refusals(RULES, State(101), 0.0, width=101, refused=1)
    assert (state.ceiling, state.limit) == (100, 95)
    assert limit_after(state, replace(BUSY, seconds=50.0)) == 95
    state, _ = decide(RULES, state, replace(BUSY, seconds=61.0))
    assert state.limit == 96
    for seconds in range(62, 80):
        state, _ = decide(RULES, state, replace(BUSY, seconds=float(seconds)))
    assert state.limit == 114
    assert state.ceiling is None


def test_a_burst_costs_what_was_refused_and_never_more_than_half() -> None:
    limits = [after_refusals(RULES, State(110), 0.0, width=110, refused=n).limit for n in (1, 10, 60, 110)]
    assert limits == [103, 95, 52, 52]


@pytest.mark.parametrize("wrong", [{"low": 0}, {"low": 9}, {"start": 300}, {"high": 7}])
def test_bounds_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="expected 1 <= low <= start <= high"):
        Bounds(**{"start": 8, "high": 256, **wrong})


# Throughput


def test_elasticity_is_the_share_of_width_that_became_throughput() -> None:
    assert elasticity(Level(8, 100), Level(16, 75)) == pytest.approx(0.585, abs=0.001)
    assert elasticity(Level(8, 100), Level(16, 40)) < 0


def test_requests_with_much_company_are_compared_with_those_with_less() -> None:
    seen = Throughput()
    for _ in range(SAMPLES):
        seen.add(width=4, seconds=2.0, tokens=200)
    assert seen.compared() is None
    for _ in range(SAMPLES):
        seen.add(width=8, seconds=4.0, tokens=200)
    assert seen.compared() == (Level(4, 100.0), Level(8, 50.0))
    assert seen.compared() is None


def test_a_wide_level_waits_for_requests_that_are_not_the_shortest() -> None:
    seen = Throughput()
    for _ in range(SAMPLES):
        seen.add(width=4, seconds=2.0, tokens=200)
    for _ in range(99):
        seen.add(width=200, seconds=1.0, tokens=10)
    assert seen.compared() is None
    seen.add(width=200, seconds=1.0, tokens=10)
    assert seen.compared() is not None


# The machine


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


SIGNALS = st.one_of(
    st.tuples(st.just("finished"), st.floats(0, 20), st.integers(0, 2000)),
    st.tuples(st.just("refused"), st.none() | st.floats(0, 30), st.floats(0, 5)),
    st.tuples(st.just("timed_out"), st.floats(0, 5), st.integers(0, 300)),
    st.tuples(st.just("gauge"), st.integers(0, 300), st.integers(0, 300), st.floats(0, 1)),
)


def give(limiter: AdaptiveLimit, clock: Clock, signal: Any) -> None:
    match signal:
        case ("finished", seconds, tokens):
            limiter.record_answer(seconds, tokens)
        case ("refused", retry_after, age):
            limiter.record_refusal(retry_after, clock.now - age, busy=limiter.limit)
        case ("timed_out", age, busy):
            limiter.record_timeout(clock.now - age, busy=busy)
        case ("gauge", waiting, running, cache_use):
            limiter.record_gauge(waiting, running, cache_use)


@given(
    st.integers(1, 4),
    st.integers(0, 40),
    st.integers(0, 200),
    st.lists(st.tuples(st.floats(0, 90), SIGNALS, st.booleans()), max_size=60),
)
def test_no_signals_drive_it_out_of_its_bounds(low: int, more: int, most: int, steps: list[Any]) -> None:
    clock, pressed = Clock(), False
    rules = Bounds(start=low + more, low=low, high=low + more + most)
    told: list[tuple[int, int, str]] = []
    limiter = AdaptiveLimit(rules, clock, lambda: pressed, lambda *change: told.append(change))
    for wait, signal, pressed in steps:  # noqa: B007  # read by the limiter
        clock.now += wait
        before = limiter.limit
        give(limiter, clock, signal)
        assert rules.low <= limiter.limit <= rules.high
        assert limiter.limit <= 2 * before + 1
    assert all(before != after for before, after, _ in told)
    assert [after for _, after, _ in told[:-1]] == [before for before, _, _ in told[1:]]


@given(st.lists(st.tuples(st.floats(0, 90), SIGNALS), max_size=60))
def test_nothing_grows_on_stale_signals(steps: list[Any]) -> None:
    """No answer, no fresh gauge: whatever else is heard, and however much it binds."""
    clock = Clock()
    limiter = AdaptiveLimit(RULES, clock, lambda: True)
    for wait, signal in steps:
        if signal[0] in ("finished", "gauge"):
            continue
        clock.now += wait
        before = limiter.limit
        give(limiter, clock, signal)
        assert limiter.limit <= before


def test_a_gauge_that_has_grown_old_is_ignored() -> None:
    clock = Clock()
    limiter = AdaptiveLimit(RULES, clock, lambda: True)
    limiter.record_gauge(waiting=0, running=8, cache_use=0.99)
    clock.now = 1.0
    limiter.record_answer(1.0, 100)
    assert limiter.limit == 8, "the cache is full"
    clock.now = 7.0
    limiter.record_answer(1.0, 100)
    assert limiter.limit == 10, "that was seven seconds ago"


def test_refusals_of_what_was_sent_before_the_cut_belong_to_its_burst() -> None:
    clock = Clock()
    limiter = AdaptiveLimit(Bounds(start=110), clock, lambda: True)
    clock.now = 5.0
    for _ in range(10):
        limiter.record_refusal(1.0, sent_seconds=4.9, busy=110)
        clock.now += 0.01
    assert limiter.limit == 95
    limiter.record_refusal(1.0, sent_seconds=5.05, busy=95)
    assert limiter.limit == 89, "sent since: this limit was too high as well"


def test_timeouts_cut_once_a_burst() -> None:
    clock = Clock()
    limiter = AdaptiveLimit(Bounds(start=100), clock, lambda: True)
    clock.now = 60.0
    for _ in range(30):
        limiter.record_timeout(sent_seconds=0.0, busy=100)
    assert limiter.limit == 71


@pytest.mark.long
@given(st.integers(4, 200), st.integers(0, 2**16))
def test_it_settles_under_a_stationary_load(capacity: int, seed: int) -> None:
    """An endpoint that refuses what is above its capacity, and answers in about 4 s."""
    clock, draw = Clock(), random.Random(seed)
    limiter = AdaptiveLimit(RULES, clock, lambda: True)
    in_flight, seen = list[tuple[float, float]](), list[int]()  # (ends, began)
    for step in range(2400):
        clock.now = step / 20
        for ends, began in [one for one in in_flight if one[0] <= clock.now]:
            in_flight.remove((ends, began))
            limiter.record_answer(ends - began, 100, width=len(in_flight) + 1)
        while len(in_flight) < limiter.limit:
            if len(in_flight) >= capacity:
                limiter.record_refusal(1.0, clock.now, busy=len(in_flight) + 1)
                break
            in_flight.append((clock.now + draw.uniform(2, 6), clock.now))
        seen.append(limiter.limit)
    late = sorted(seen[1200:])
    assert 0.85 * capacity - 1 <= late[len(late) // 20]
    assert late[-1] <= capacity + 2


# Closed loops: requests without end, through slots and endpoint, to a simulated backend in virtual time


@dataclass
class Outcome:
    tokens_per_second: float = 0.0
    sent_late: int = 0
    refused_late: int = 0
    events: list[Event] = field(default_factory=list[Event])


class Loop:
    """Rollouts of one request each."""

    def __init__(self, profile: str, slots: int, rules: Bounds | None, gauges: bool) -> None:
        self.profile, self.gauges, self.outcome = PROFILES[profile], gauges, Outcome()
        self.clock = asyncio.get_running_loop().time
        self.driver = BatchDriver(self.profile, time_scale=1.0)
        bus = EventBus([self.outcome.events.append])
        self.scheduler = Scheduler(slots, ["work"], {"work": "e"}, self.clock)
        endpoints = Endpoints({"work": ["e"]}, rules, self.scheduler, bus, self.clock, RetryPolicy(), random.Random(0))
        self.endpoint = endpoints.endpoint("e")
        self.draw = random.Random(0)

    async def request(self, tokens: int) -> None:
        slot, sent = current_slot(), TrackedRequest()
        while True:
            await self.endpoint.admit(slot)
            self.endpoint.record_sent(sent)
            if await self.answered(tokens):
                self.endpoint.record_reply(sent, tokens)
                return
            self.endpoint.record_refusal(sent, self.profile.retry_after_seconds)
            self.endpoint.record_failure(sent, "429")
            await self.endpoint.pause_before_retry(slot, sent, self.profile.retry_after_seconds)

    async def answered(self, tokens: int) -> bool:
        late = self.clock() > 10
        self.outcome.sent_late += late
        limit = self.profile.concurrency_limit
        if limit is not None and self.driver.in_flight >= limit:
            self.outcome.refused_late += late
            await asyncio.sleep(0.02)
            return False
        generation = self.driver.submit(350, tokens)
        try:
            await generation.finished
        finally:
            self.driver.release(generation)
        return True

    async def work(self) -> None:
        while True:
            tokens = self.profile.task_length.tokens(self.draw.uniform(1e-6, 1 - 1e-6))
            await self.scheduler.run("work", Asker(0), partial(self.request, tokens))

    async def poll(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            load = self.driver.load()
            self.endpoint.record_gauge(load.waiting, load.running, load.kv_tokens / self.profile.kv_cache_tokens)


@lru_cache
def closed_loop(profile: str, slots: int, start: int | None = None, gauges: bool = False) -> Outcome:
    async def main() -> Outcome:
        loop = Loop(profile, slots, None if start is None else Bounds(start=start, high=slots), gauges)
        tasks = [asyncio.ensure_future(loop.work()) for _ in range(slots + 50)]
        if gauges:
            tasks.append(asyncio.ensure_future(loop.poll()))
        await asyncio.sleep(120.0)
        loop.outcome.tokens_per_second = loop.driver.load().generated_tokens / 120.0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return loop.outcome

    return run(main)


H100, API = "h100-qwen3-8b", "api-gpt-4o-mini"


@pytest.mark.parametrize(("profile", "gauges"), [(H100, False), (H100, True), (API, False)])
def test_it_reaches_nine_tenths_of_the_best_fixed_limit_without_being_told_it(profile: str, gauges: bool) -> None:
    best = max(closed_loop(profile, slots).tokens_per_second for slots in (64, 128))
    adaptive = closed_loop(profile, 256, start=8, gauges=gauges)
    assert adaptive.tokens_per_second >= 0.9 * best
    assert adaptive.refused_late < 0.01 * adaptive.sent_late


def test_a_fixed_limit_above_the_endpoints_own_pauses_it_instead_of_hammering_it() -> None:
    outcome = closed_loop(API, 128)
    assert any(isinstance(event, EndpointPaused) for event in outcome.events)
    assert outcome.tokens_per_second > closed_loop(API, 64).tokens_per_second


def test_every_change_is_an_event() -> None:
    changes = [
        event for event in closed_loop("api-gpt-4o-mini", 256, start=8).events if isinstance(event, LimitChanged)
    ]
    assert changes[0].before == 8
    assert {event.name for event in changes} == {"e"}
    assert {event.reason for event in changes} == {"it binds", "refused"}
