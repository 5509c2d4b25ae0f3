"""Requests and tokens a minute: never above the limit, however a provider counts, and close below it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from dspy_flashevolve.engine.learned_rates import BURST_REFUSALS, Claim
from dspy_flashevolve.engine.shared_rates import SharedTimes, times_in
from hypothesis import given, settings
from hypothesis import strategies as st

from dspy_flashevolve.engine.endpoints import Endpoints
from dspy_flashevolve.engine.events import EventBus
from dspy_flashevolve.engine.rates import RateLimit, ReportedLimit, TokenEstimate, limits_in_headers
from dspy_flashevolve.engine.retries import RetryPolicy, TrackedRequest
from dspy_flashevolve.engine.scheduler import Scheduler, current_slot
from dspy_flashevolve.sim.quota import Counting, Quota, QuotaCounter
from dspy_flashevolve.sim.virtual import run
from tests.engine.stepped import Asker
from tests.engine.test_rollouts import now

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
    claim = Claim(guess)
    await limit.admit(claim, anyio.sleep)
    await provider.answer(tokens)
    limit.settle(claim, tokens)
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


def test_what_was_sent_before_a_limit_was_known_counts_too() -> None:
    async def main() -> None:
        limit = known()
        for _ in range(20):
            await limit.admit(Claim(1.0), anyio.sleep)
        assert now() == 0.0
        limit.record_reported_limits({"requests": ReportedLimit(60)})
        await limit.admit(Claim(1.0), anyio.sleep)
        assert 15.0 < now() < 21.0

    run(main)


def test_without_a_limit_nothing_waits_and_answers_of_a_cache_use_nothing_up() -> None:
    async def main() -> None:
        free = RateLimit(now)
        for _ in range(1000):
            await free.admit(Claim(1e6), anyio.sleep)
        limit = known(requests=6, tokens=1000)
        for _ in range(1000):
            claim = Claim(10)
            await limit.admit(claim, anyio.sleep)
            limit.refund(claim)
        assert now() < 10.0

    run(main)


def test_a_request_that_costs_more_than_a_minute_holds_up_others_for_a_minute() -> None:
    async def main() -> None:
        limit = known(tokens=1000)
        for _ in range(2):
            await limit.admit(Claim(1e9), anyio.sleep)
        assert 60.0 < now() < 63.0

    run(main)


def test_what_cannot_be_sent_yet_waits_for_a_slot_in_the_runs_order() -> None:
    order: list[int] = []

    async def main() -> None:
        scheduler = Scheduler(64, ["rollout", "validate"], {"rollout": "api", "validate": "api"}, now)
        asked = {"rollout": ["api"], "validate": ["api"]}
        endpoints = Endpoints(asked, None, scheduler, EventBus(), now, RetryPolicy(), random.Random(0))
        limit = endpoints.rate_limit("api", "account")
        limit.add_user_limits({"requests": 60})

        async def request(number: int) -> None:
            await endpoints.endpoint("api").admit(current_slot(), limit, Claim(1.0))
            order.append(number)

        async with anyio.create_task_group() as group:
            for number in range(50):
                group.start_soon(scheduler.run, "rollout", Asker(number), lambda n=number: request(n))
            await anyio.sleep(3.0)
            assert scheduler.idle == 0
            assert scheduler.statistics().busy <= 8
            group.start_soon(scheduler.run, "validate", Asker(99, value=1.0), lambda: request(99))
        assert len(order) == 51

    run(main)
    assert order.index(99) <= 8


def test_a_program_that_ends_without_a_request_leaves_room_for_the_next() -> None:
    async def main() -> None:
        scheduler = Scheduler(64, ["rollout"], {"rollout": "api"}, now)
        scheduler.set_room(1, "api")
        for number in range(10):
            await scheduler.run("rollout", Asker(number), anyio.lowlevel.checkpoint)

    run(main)


# A limit that is learned from refusals


class Customer:
    """Sends requests as a run does: through an endpoint, again after a refusal, with 64 slots.

    Args:
        refuses: seconds until the provider would take a request of which it refuses the first try; None where it takes
            it. It is told the time and how many requests are under way at the provider.
        headers: what its refusals say of its limits.
        retry_after: what its refusals say of when to come back, by how long they would wait.
    """

    def __init__(
        self,
        refuses: Callable[[float, int], float | None],
        headers: Callable[[], dict[str, str]] = dict,
        retry_after: Callable[[float], float | None] = lambda wait: None,
    ) -> None:
        self._refuses, self._headers, self._retry_after = refuses, headers, retry_after
        self._scheduler = Scheduler(64, ["rollout"], {"rollout": "api"}, now)
        asked = {"rollout": ["api"]}
        endpoints = Endpoints(asked, None, self._scheduler, EventBus(), now, RetryPolicy(), random.Random(0))
        self._api, self._limit = endpoints.endpoint("api"), endpoints.rate_limit("api", "account")
        self._at_provider, self._draws = 0, random.Random(0)
        self.sent, self.refused = list[float](), list[float]()

    async def ask(self, requests: int) -> None:
        async with anyio.create_task_group() as group:
            for number in range(requests):
                group.start_soon(self._scheduler.run, "rollout", Asker(number), self._until_answered)

    async def _until_answered(self) -> None:
        sent = TrackedRequest()
        while True:
            claim = Claim(1.0, was_refused=sent.failures > 0)
            await self._api.admit(current_slot(), self._limit, claim)
            self._api.record_sent(sent)
            told = await self._once(claim, sent)
            self._api.leave(sent)
            self._limit.leave(claim)
            if told is None:
                return
            await self._api.pause_before_retry(current_slot(), sent, told[0])

    async def _once(self, claim: Claim, sent: TrackedRequest) -> tuple[float | None] | None:
        """Send a request; gives what a refusal says of when to come back."""
        self.sent.append(now())
        wait = self._refuses(now(), self._at_provider)
        if wait is None:
            self._at_provider += 1
            await anyio.sleep(self._draws.uniform(0.5, 1.5))
            self._at_provider -= 1
            self._api.record_reply(sent, 1)
            self._limit.settle(claim, 1)
            return None
        self.refused.append(now())
        await anyio.sleep(0.05)
        told = self._retry_after(wait)
        self._limit.record_reported_limits(limits_in_headers(self._headers()))
        self._api.record_failure(sent, "429")
        self._limit.record_refusal(claim, told, self._api.is_isolated(sent))
        self._api.record_refusal(sent, told)
        return (told,)

    @property
    def longest_silence(self) -> float:
        """Seconds between two requests in a row."""
        return max(later - earlier for earlier, later in zip(self.sent, self.sent[1:], strict=False))


def customer_of(quota: Quota, retry_after: Callable[[float], float | None]) -> Customer:
    counter = QuotaCounter(quota)
    return Customer(lambda seconds, _: counter.admit(seconds, 1), lambda: counter.headers(now()), retry_after)


def in_a_second(wait: float) -> float:
    return 1.0


def says_nothing(wait: float) -> None:
    return None


@pytest.mark.parametrize("retry_after", [in_a_second, says_nothing])
@pytest.mark.parametrize("sends_headers", [False, True])
@pytest.mark.parametrize("holds_seconds", [2.0, 60.0])
def test_after_a_refusal_requests_go_on_at_the_pace_at_which_a_bucket_is_refilled(
    retry_after: Callable[[float], float | None], sends_headers: bool, holds_seconds: float
) -> None:
    async def main() -> None:
        customer = customer_of(Quota(600, 10**9, sends_headers=sends_headers, holds_seconds=holds_seconds), retry_after)
        await customer.ask(1500)
        assert customer.longest_silence < 2.5
        assert now() < (150 - holds_seconds) / 0.9
        first_slots = 64 - 600 * holds_seconds / 60  # what is sent before the first refusal has come back
        assert len(customer.refused) <= max(0, first_slots) + 0.05 * 1500

    run(main)


@pytest.mark.parametrize("counting", ["fixed", "sliding"])
@pytest.mark.parametrize("sends_headers", [False, True])
def test_a_window_that_is_used_up_is_asked_seldom_and_at_once_when_it_opens_again(
    counting: Counting, sends_headers: bool
) -> None:
    async def main() -> None:
        customer = customer_of(Quota(600, 10**9, counting, sends_headers), in_a_second)
        await customer.ask(1500)
        assert customer.longest_silence < 6.0
        assert now() < 150 / 0.9
        assert len(customer.refused) <= 0.05 * 1500

    run(main)


def test_nothing_is_sent_for_the_rest_of_a_window_of_which_the_headers_say_that_it_is_used_up() -> None:
    async def main() -> None:
        customer = customer_of(Quota(600, 10**9, "fixed"), says_nothing)
        await customer.ask(900)
        assert len(customer.refused) <= 0.005 * 900 + 1
        assert now() < 90 / 0.9

    run(main)


def test_a_pace_that_was_learned_far_too_low_is_doubled_again_and_again_within_minutes() -> None:
    """Who says an hour and takes requests after two seconds: after the wait of a minute 2 or 3 a minute look right."""

    async def main() -> None:
        customer = Customer(
            lambda seconds, at_once: 3600.0 if seconds < 2 and at_once >= 2 else None, dict, lambda w: w
        )
        await customer.ask(300)
        assert now() < 40 * 60

    run(main)


@pytest.mark.long
def test_a_provider_that_takes_so_many_requests_at_once_is_not_paced_by_the_minute() -> None:
    async def main() -> None:
        customer = Customer(lambda _, at_once: 1.0 if at_once >= 24 else None, retry_after=in_a_second)
        await customer.ask(1500)
        assert now() < 1500 / 24 / 0.65  # places stay free while who was refused waits the second that it was told

    run(main)


def test_requests_that_are_told_to_wait_for_an_hour_while_others_are_answered_hold_up_no_other() -> None:
    async def main() -> None:
        limit = RateLimit(now)
        for number in range(100):
            claim = Claim(1.0, was_refused=number == 90)
            await limit.admit(claim, anyio.sleep)
            if number % 3 == 0:
                limit.record_refusal(claim, 3600.0, is_isolated=claim.was_refused)
            else:
                limit.settle(claim, 1.0)
        assert now() == 0.0

    run(main)


def test_refusals_of_most_that_is_sent_hold_up_all_until_some_of_them_prove_to_be_of_single_requests() -> None:
    async def main() -> None:
        limit = RateLimit(now)
        for _ in range(BURST_REFUSALS):
            claim = Claim(1.0)
            await limit.admit(claim, anyio.sleep)
            limit.record_refusal(claim, 10.0)
        await limit.admit(Claim(1.0), anyio.sleep)
        assert now() == 10.0
        for _ in range(BURST_REFUSALS):
            limit.record_refusal(Claim(1.0, was_refused=True), 10.0, is_isolated=True)
        assert not limit.is_known

    run(main)


# A file that several runs share


def shared(path: Path) -> RateLimit:
    limit = RateLimit(now, lambda: SharedTimes(path, lambda: 1e9 + now()))
    limit.add_user_limits({"requests": 600, "tokens": 200_000})
    return limit


@pytest.mark.parametrize("counting", COUNTINGS)
def test_two_runs_on_one_key_stay_below_its_limit_together_and_share_it(counting: Counting, tmp_path: Path) -> None:
    async def main() -> None:
        provider = Provider(Quota(600, 200_000, counting))
        limits = [shared(tmp_path / "limits" / "key") for _ in range(2)]
        sent = [0, 0]

        async def work(which: int) -> None:
            while True:
                await ask(limits[which], provider, 200, 200)
                sent[which] += 1

        both = [lambda which=which: work(which) for which in (0, 1) for _ in range(20)]
        await for_minutes(2, *both)
        assert provider.refused == 0
        assert len(provider.taken) >= 0.9 * 1200
        assert min(sent) > 0.4 * sum(sent)

    run(main)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"\xff\x00", b'{"requests": 1e300}', b'{"requests": "x"}', b'{"requests": NaN}', b"9" * 5000],
)
def test_a_broken_file_is_begun_again(text: bytes, tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "key"
        path.write_bytes(text)
        limit = shared(path)
        await limit.admit(Claim(1.0), anyio.sleep)
        assert now() < 1.0
        assert set(times_in(path.read_bytes())) == {"requests", "tokens"}
        assert path.stat().st_mode & 0o777 == 0o600 or text is not None

    run(main)


def test_a_file_from_the_future_holds_up_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "key"
        path.write_text(json.dumps({"requests": 5e9, "tokens": 5e9}))
        limit = shared(path)
        await limit.admit(Claim(1.0), anyio.sleep)
        assert now() < 1.0

    run(main)


def test_where_no_file_can_be_written_a_run_goes_on_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        (tmp_path / "file").write_text("no folder")
        for path in (tmp_path / "file" / "key", tmp_path):
            limit = shared(path)
            began = now()
            for _ in range(40):
                await limit.admit(Claim(1.0), anyio.sleep)
            assert 2.0 < now() - began < 4.0

    run(main)
    assert caplog.text.count("other runs on the same key are not seen") == 2


def test_a_new_file_is_the_users_alone(tmp_path: Path) -> None:
    SharedTimes(tmp_path / "limits" / "key", lambda: 1e9).pay({"requests": 1.0}, 0.5)
    assert (tmp_path / "limits").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "limits" / "key").stat().st_mode & 0o777 == 0o600


@given(st.binary(max_size=200))
def test_whatever_a_file_holds_is_read_as_times_or_as_nothing(text: bytes) -> None:
    assert all(0 <= at < 1e12 for at in times_in(text).values())


# Estimates


def test_an_estimate_follows_what_requests_have_cost() -> None:
    estimate = TokenEstimate()
    assert estimate.expected_tokens(400, most_written=100) == 200.0
    for _ in range(100):
        estimate.record_usage(400, read=200, written=50)
    assert estimate.expected_tokens(800) == pytest.approx(450.0, rel=0.01)
