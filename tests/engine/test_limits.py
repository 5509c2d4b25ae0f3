"""Adaptive limits: when they grow and shrink, and closed loops on both simulated profiles."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from functools import lru_cache, partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.batching import PROFILES
from dspy_flashevolve.engine.events import EventBus
from dspy_flashevolve.engine.limits import AdaptiveLimit, Bounds
from dspy_flashevolve.engine.provider import Attempts, Failure, Providers, RetryPolicy
from dspy_flashevolve.engine.scheduler import Scheduler, current_slot
from dspy_flashevolve.sim.virtual import run
from tests.engine.stepped import Asker


class Bench:
    """A limit, its clock, and whether it binds."""

    def __init__(self, start: int, high: int = 256) -> None:
        self.now, self.binds = 0.0, True
        self.changes: list[tuple[int, int, str]] = []
        self.limit = AdaptiveLimit(
            Bounds(start, high), lambda: self.now, lambda: self.binds, lambda *change: self.changes.append(change)
        )

    def answers(self, count: int, seconds: float = 1.0) -> int:
        """So many answers, the last of them after that time; the limit then."""
        for _ in range(count - 1):
            self.limit.record_answer()
        self.now += seconds
        self.limit.record_answer()
        return self.limit.limit


def test_before_the_first_sign_of_saturation_every_answer_adds_slots_but_a_window_at_most_doubles() -> None:
    assert Bench(40).answers(3) == 46
    assert Bench(4).answers(3) == 8


def test_after_a_cut_one_slot_is_added_at_a_time_and_not_before_the_ceiling_is_old() -> None:
    bench = Bench(101)
    bench.limit.cut(100, "refused")
    assert bench.limit.limit == 95
    assert bench.answers(50, seconds=50.0) == 95
    assert [bench.answers(5, seconds=11.0), bench.answers(5, seconds=0.5), bench.answers(5)] == [96, 96, 97]


@pytest.mark.parametrize(("in_flight", "limit"), [(110, 104), (100, 95), (50, 52), (0, 52)])
def test_a_cut_leaves_what_the_endpoint_works_on_and_takes_half_at_most(in_flight: int, limit: int) -> None:
    bench = Bench(110)
    bench.limit.cut(in_flight, "refused")
    assert bench.changes == [(110, limit, "refused")]


def test_what_does_not_bind_does_not_grow() -> None:
    bench = Bench(8)
    bench.binds = False
    assert bench.answers(5) == 8


SIGNALS = st.just(("answer",)) | st.tuples(st.just("cut"), st.integers(0, 500))


@given(st.integers(1, 40), st.integers(0, 60), st.lists(st.tuples(st.floats(0, 90), SIGNALS)))
def test_no_signals_drive_it_out_of_its_bounds(
    start: int, more: int, signals: list[tuple[float, tuple[object, ...]]]
) -> None:
    bench = Bench(start, start + more)
    for seconds, (name, *values) in signals:
        bench.now += seconds
        if name == "cut":
            bench.limit.cut(*values, "refused")  # type: ignore[misc,arg-type]
        else:
            bench.limit.record_answer()
        assert 1 <= bench.limit.limit <= start + more


# Closed loops: requests without end, through slots and endpoint, to a simulated backend in virtual time


@dataclass
class Outcome:
    tokens_per_second: float = 0.0
    sent_late: int = 0
    refused_late: int = 0


class Loop:
    """Rollouts of one request each."""

    def __init__(self, profile: str, slots: int, rules: Bounds | None) -> None:
        self.profile, self.outcome = PROFILES[profile], Outcome()
        self.clock = asyncio.get_running_loop().time
        self.driver = self.profile.batch(time_scale=1.0)
        self.scheduler = Scheduler(slots, ["work"], {"work": "e"}, self.clock)
        self.providers = Providers(
            {"work": ["e"]}, rules, self.scheduler, EventBus(), self.clock, RetryPolicy(), random.Random(0)
        )
        self.draw = random.Random(0)

    async def request(self, tokens: int) -> None:
        request = Attempts(self.providers.provider("e"), current_slot())
        while True:
            await request.begin()
            request.send()
            if await self.answered(tokens):
                request.answered()
                return
            await request.try_again(Failure("429", False, self.profile.retry_after_seconds, "refused"))

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


@lru_cache
def closed_loop(profile: str, slots: int, start: int | None = None) -> Outcome:
    async def main() -> Outcome:
        loop = Loop(profile, slots, None if start is None else Bounds(start=start, high=slots))
        tasks = [asyncio.ensure_future(loop.work()) for _ in range(slots + 50)]
        await asyncio.sleep(120.0)
        loop.outcome.tokens_per_second = loop.driver.load().generated_tokens / 120.0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return loop.outcome

    return run(main)


H100, API = "h100-qwen3-8b", "api-gpt-4o-mini"


@pytest.mark.parametrize("profile", [H100, API])
def test_it_reaches_nine_tenths_of_the_best_fixed_limit_without_being_told_it(profile: str) -> None:
    best = max(closed_loop(profile, slots).tokens_per_second for slots in (64, 128))
    adaptive = closed_loop(profile, 256, start=8)
    assert adaptive.tokens_per_second >= 0.9 * best
    assert adaptive.refused_late < 0.01 * adaptive.sent_late
