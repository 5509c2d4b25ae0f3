"""Requests and tokens a minute: never above the limit, however a provider counts, and close below it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.quota import Counting, Quota, QuotaCounter
from dspy_flashevolve.engine.rates import RateLimit, ReportedLimit
from dspy_flashevolve.sim.virtual import run
from tests.engine.test_requests import now

COUNTINGS: list[Counting] = ["bucket", "fixed", "sliding"]


class Provider:
    """Counts as providers do; each request takes a second, and is told what is left."""

    def __init__(self, quota: Quota) -> None:
        self.counter, self.quota = QuotaCounter(quota), quota
        self.taken, self.refused, self.tokens = list[float](), 0, 0

    async def answer(self, tokens: int) -> None:
        if self.counter.admit(now(), tokens) is None:
            self.taken.append(now())
            self.tokens += tokens
        else:
            self.refused += 1
        await anyio.sleep(1.0)

    def heard(self) -> dict[str, ReportedLimit]:
        headers = self.counter.headers(now())
        left = {unit: int(headers[f"x-ratelimit-remaining-{unit}"]) for unit in ("requests", "tokens")}
        limits = {"requests": self.quota.requests, "tokens": self.quota.tokens}
        resets = {unit: self.counter._meters[unit][1].reset_seconds(now()) for unit in limits}
        return {unit: ReportedLimit(limit, left[unit], resets[unit]) for unit, limit in limits.items()}


async def ask(limit: RateLimit, provider: Provider, tokens: int, guess: float, told: bool = False) -> None:
    await limit.admit(guess, anyio.sleep)
    await provider.answer(tokens)
    limit.correct(0.0, tokens - guess)
    if told:
        limit.record_reported_limits(provider.heard())


async def for_minutes(minutes: float, *workers: Callable[[], Any]) -> None:
    with anyio.move_on_after(60.0 * minutes):
        async with anyio.create_task_group() as group:
            for worker in workers:
                group.start_soon(worker)


def known(**limits: float) -> RateLimit:
    limit = RateLimit(now)
    limit.add_user_limits(limits)
    return limit


def workers(limit: RateLimit, provider: Provider, sizes: list[int], count: int = 40, told: bool = False) -> list[Any]:
    draws = random.Random(0)

    async def work() -> None:
        while True:
            tokens = draws.choice(sizes)
            await ask(limit, provider, tokens, sum(sizes) / len(sizes), told)

    return [work] * count


@pytest.mark.parametrize("counting", COUNTINGS)
@pytest.mark.parametrize("sizes", [[100], [400, 700, 2000], [300] * 15 + [6000]])
@pytest.mark.parametrize("told", [False, True])
def test_over_nine_tenths_of_a_limit_are_used_and_nothing_is_refused(
    counting: Counting, sizes: list[int], told: bool
) -> None:
    async def main() -> None:
        provider, limit = Provider(Quota(600, 200_000, counting)), known(requests=600, tokens=200_000)
        told_too = told and counting != "sliding"  # no provider is known that says what such a window holds
        await for_minutes(5, *workers(limit, provider, sizes, told=told_too))
        used = max(len(provider.taken) / 3000, provider.tokens / 1_000_000)
        assert provider.refused <= 0.005 * len(provider.taken)
        assert used >= 0.9

    run(main)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 1800)), min_size=1, max_size=120),
    st.integers(1, 120),
    st.sampled_from(COUNTINGS),
)
def test_no_minute_holds_more_than_the_limit_whenever_requests_come(
    arrivals: list[tuple[float, int]], requests: int, counting: Counting
) -> None:
    async def main() -> None:
        provider, limit = Provider(Quota(requests, 60_000, counting)), known(requests=requests, tokens=60_000)
        async with anyio.create_task_group() as group:
            for wait, tokens in arrivals:
                await anyio.sleep(wait if tokens % 3 == 0 else 0)
                group.start_soon(ask, limit, provider, tokens, tokens)
        assert provider.refused == 0
        assert len(provider.taken) == len(arrivals)

    run(main)


def test_what_others_take_of_the_same_key_is_left_to_them() -> None:
    async def main() -> None:
        provider, limit = Provider(Quota(600, 10**9)), known()

        async def others() -> None:
            while True:
                await anyio.sleep(0.2)
                await provider.answer(1)

        limit.record_reported_limits(provider.heard())
        await for_minutes(5, *workers(limit, provider, [1], told=True), *[others] * 6)
        assert provider.refused == 0
        assert len(provider.taken) >= 0.85 * 3000

    run(main)


def test_a_provider_says_less_than_the_user_or_the_user_less_than_the_provider() -> None:
    async def main() -> None:
        limit = known(requests=100)
        assert limit.limits == {"requests": 100}
        limit.record_reported_limits({"requests": ReportedLimit(60), "tokens": ReportedLimit(500)})
        assert limit.limits == {"requests": 60, "tokens": 500}
        limit.record_reported_limits({"requests": ReportedLimit(1000)})
        assert limit.limits == {"requests": 100, "tokens": 500}

    run(main)


def test_a_refusal_of_which_the_headers_say_that_nothing_is_left_holds_up_all_and_any_other_none() -> None:
    async def main() -> None:
        limit = known()
        limit.record_refusal(20.0)
        limit.record_reported_limits({"requests": ReportedLimit(60, 1, 30.0)})
        limit.record_refusal(20.0)
        await limit.admit(1.0, anyio.sleep)
        assert now() == 0.0
        limit.record_reported_limits({"requests": ReportedLimit(60, 0, 30.0)})
        limit.record_refusal(20.0)
        await limit.admit(1.0, anyio.sleep)
        assert 19.0 < now() < 21.0
        await limit.admit(1.0, anyio.sleep)
        assert now() < 23.0, "what was reported of that moment is over"

    run(main)


def test_a_request_that_costs_more_than_a_minute_holds_up_others_for_a_minute() -> None:
    async def main() -> None:
        limit = known(tokens=1000)
        for _ in range(2):
            await limit.admit(1e9, anyio.sleep)
        assert 60.0 < now() < 63.0

    run(main)
