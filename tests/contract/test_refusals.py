"""A request that a provider refuses is made again by itself: a run stops asking only where refusals are the rule.

In virtual time: what waits costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from itertools import pairwise
from typing import Any

import dspy
import pytest
from dspy.lm15 import RateLimitError, Request, Response
from dspy.utils.exceptions import LMRateLimitError

from benchmarks.quota import Counting, Quota, QuotaCounter
from dspy_flashevolve.programs.servers import BalancedLM
from dspy_flashevolve.sim.virtual import run
from tests.contract.surface import TRAIN, VAL, check_ends, check_winner, optimizer
from tests.contract.test_unanswered import answer, now
from tests.fakes import Chain, FakeEngine, fake_lm, hashed


class Slow(Chain):
    """Works for about a second before it asks."""

    async def aforward(self, question: str) -> dspy.Prediction:
        await asyncio.sleep(0.5 + hashed(question, now()) % 1000 / 1000)
        return await super().aforward(question)


def compiled(lm: dspy.LM, calls: int = 150, runs: int = 1, **options: Any) -> list[Any]:
    """The details of so many runs at once."""

    async def one(seed: int) -> Any:
        settings: dict[str, Any] = {"num_threads": 16, "seed": seed, "reflection_lm": lm} | options
        with dspy.context(lm=lm, num_threads=8):
            return await optimizer(calls, **settings).acompile(Slow(), trainset=TRAIN, valset=VAL)

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*map(one, range(runs)))

    return [program.detailed_results for program in run(all_of_them)]


class Storm:
    """Refuses a share of the requests at random, whatever they are."""

    def __init__(self, share: float, retry_after: float | None) -> None:
        self.share, self.retry_after, self.asked, self.refused = share, retry_after, 0, 0

    def choose(self, prompt: str) -> str:
        self.asked += 1
        if hashed("storm", self.asked) % 1000 < 1000 * self.share:
            self.refused += 1
            raise LMRateLimitError("429", retry_after=self.retry_after)
        return answer(prompt)


@cache
def seconds_without_a_refusal(num_threads: int | None) -> float:
    return compiled(fake_lm(answer), num_threads=num_threads)[0].async_stats.seconds


# Refusals of single requests


@pytest.mark.parametrize("num_threads", [16, None], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("retry_after", [None, 1.0], ids=["", "Retry-After"])
@pytest.mark.parametrize("share", [0.02, 0.05, 0.2])
def test_refusals_at_random_cost_a_run_little_time_and_no_score_and_nobody_is_said_to_be_silent(
    share: float, retry_after: float | None, num_threads: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    storm = Storm(share, retry_after)
    with caplog.at_level(logging.WARNING, "dspy_flashevolve"):
        [details] = compiled(fake_lm(storm.choose), num_threads=num_threads)
    stats = details.async_stats
    assert stats.retried_requests >= 0.8 * share * storm.asked > 1
    assert stats.seconds < (1.5 + 4 * share) * seconds_without_a_refusal(num_threads)
    assert min(score for scores in details.val_subscores for score in scores.values()) > 0
    assert (stats.outcome, stats.ended["failed"], stats.unanswered_examples) == ("finished", 0, 0)
    assert "does not answer" not in caplog.text
    check_winner(details)
    check_ends(stats)


def test_one_request_at_a_time_is_refused_at_random_and_nobody_is_said_to_be_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    storm = Storm(0.2, None)
    with caplog.at_level(logging.WARNING, "dspy_flashevolve"):
        [details] = compiled(fake_lm(storm.choose), num_threads=1)
    assert storm.refused > 20
    assert details.async_stats.outcome == "finished"
    assert "does not answer" not in caplog.text


@pytest.mark.parametrize("retry_after", [20.0, 3600.0])
def test_a_retry_after_delays_the_request_that_got_it_and_no_other(retry_after: float) -> None:
    asked: list[float] = []
    waiting: set[str] = set()

    def choose(prompt: str) -> str:
        asked.append(now())
        if len(asked) in (20, 40, 60) and prompt not in waiting:
            waiting.add(prompt)
            raise LMRateLimitError("429", retry_after=retry_after)
        return answer(prompt)

    [details] = compiled(fake_lm(choose))
    assert len(waiting) == 3
    assert details.async_stats.ended["failed"] == 0
    begun = asked[:100]
    assert max(after - before for before, after in pairwise(begun)) < 3


# Refusals that are the rule


@pytest.mark.parametrize("retry_after", [None, 5.0])
@pytest.mark.parametrize("num_threads", [16, 64, None])
def test_an_endpoint_that_refuses_everything_is_asked_seldom_until_it_answers_again(
    num_threads: int | None, retry_after: float | None
) -> None:
    refused: list[float] = []

    def choose(prompt: str) -> str:
        if 8 < now() < 38:
            refused.append(now())
            raise LMRateLimitError("429", retry_after=retry_after)
        return answer(prompt)

    [details] = compiled(fake_lm(choose), calls=400, num_threads=num_threads)
    stats = details.async_stats
    assert (stats.outcome, stats.ended["failed"], stats.unanswered_examples) == ("finished", 0, 0)
    assert 0 < sum(seconds > 12 for seconds in refused) < 60, "in 26 seconds, by up to 64 requests"
    assert stats.seconds < 38 + 30 + seconds_without_a_refusal(16) * 400 / 150


class Headed(Response):
    """A reply whose headers are shown where litellm shows them."""


class Limited:
    """An engine behind a limit of requests a minute, in this process."""

    def __init__(self, counting: Counting, sends_headers: bool) -> None:
        self.counter = QuotaCounter(Quota(120, 10**9, counting, sends_headers))
        self.engine, self.answered, self.refused = FakeEngine(answer), 0, 0

    async def complete(self, request: Request) -> Response:
        wait = self.counter.admit(now(), 1)
        headers = self.counter.headers(now())
        if wait is not None:
            self.refused += 1
            error = RateLimitError("429", status=429, retry_after=wait if headers else None)
            error.rate_limit_headers = headers  # pyright: ignore[reportAttributeAccessIssue]
            raise error
        self.answered += 1
        reply = self.engine.complete(request)
        response = Headed(None, "fake", reply.message, reply.finish_reason, reply.usage)
        object.__setattr__(response, "_hidden_params", {"additional_headers": headers})
        return response

    def lm(self) -> dspy.LM:
        return dspy.LM("fake/model", engine=self.engine, async_engine=self, cache=False, num_retries=0)

    def __deepcopy__(self, memo: Any) -> Limited:
        return self


@pytest.mark.parametrize("runs", [1, 2])
@pytest.mark.parametrize(
    ("counting", "sends_headers"),
    [("bucket", True), ("fixed", True), ("bucket", False), ("fixed", False), ("sliding", False)],
)
def test_runs_on_a_key_with_a_limit_a_minute_use_most_of_it_whether_or_not_it_is_told(
    counting: Counting, sends_headers: bool, runs: int
) -> None:
    provider = Limited(counting, sends_headers)
    finished = compiled(provider.lm(), calls=420 // runs, runs=runs)
    for details in finished:
        stats = details.async_stats
        assert (stats.outcome, stats.ended["failed"], stats.unanswered_examples) == ("finished", 0, 0)
    minutes = max(details.async_stats.seconds for details in finished) / 60
    assert provider.answered > 0.75 * 120 * minutes
    assert provider.refused < (0.02 if sends_headers else 1.1) * provider.answered


# Several servers of one model

ADDRESS: ContextVar[str] = ContextVar("address", default="")
FAST, OTHER = "http://fast/v1", "http://other/v1"


class InProcess(BalancedLM):
    """Its servers are functions of the prompt, in this process."""

    servers: dict[str, Callable[[str], str]]
    seconds: dict[str, float]

    async def acall(self, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        ADDRESS.set(address := kwargs.pop("api_base", FAST))
        await asyncio.sleep(self.seconds[address])
        return await dspy.LM.acall(self, prompt, messages=messages, **kwargs)


def balanced(servers: dict[str, Callable[[str], str]], seconds: dict[str, float]) -> InProcess:
    plain = fake_lm(lambda prompt: servers[ADDRESS.get()](prompt))
    engines = {"engine": plain.engine, "async_engine": plain._async_engine_spec}
    lm = InProcess("openai/x", api_base=list(servers), cache=False, num_retries=0, **engines)
    lm.servers, lm.seconds = servers, seconds
    return lm


@pytest.mark.parametrize("error", [LMRateLimitError("429"), ConnectionRefusedError("it is gone")], ids=repr)
@pytest.mark.parametrize("num_threads", [16, None], ids=["fixed", "adaptive"])
def test_of_two_servers_one_that_refuses_everything_or_is_gone_is_left_and_used_again_afterwards(
    num_threads: int | None, error: Exception
) -> None:
    refused, answered = list[float](), list[float]()

    def other(prompt: str) -> str:
        if 5 < now() < 25:
            refused.append(now())
            raise error
        answered.append(now())
        return answer(prompt)

    lm = balanced({FAST: answer, OTHER: other}, {FAST: 1.0, OTHER: 1.0})
    [details] = compiled(lm, calls=400, num_threads=num_threads, reflection_lm=fake_lm(answer))
    stats = details.async_stats
    assert (stats.outcome, stats.ended["failed"], stats.unanswered_examples) == ("finished", 0, 0)
    assert 5 <= len(refused) < 40
    assert min(answered) < 5
    assert any(seconds > 25 for seconds in answered), "used again"


@pytest.mark.parametrize("num_threads", [16, None], ids=["fixed", "adaptive"])
def test_a_slow_server_beside_a_fast_one_does_not_slow_a_run_down_by_half(num_threads: int | None) -> None:
    alone, both = (
        compiled(balanced(servers, {FAST: 1.0, OTHER: 4.0}), num_threads=num_threads)[0].async_stats.seconds
        for servers in ({FAST: answer}, {FAST: answer, OTHER: answer})
    )
    assert both < 1.5 * alone


def test_a_run_goes_on_though_one_of_two_servers_never_answers_what_it_is_sent() -> None:
    lm = balanced({FAST: answer, OTHER: answer}, {FAST: 1.0, OTHER: 1e9})
    [details] = compiled(lm, calls=150)
    stats = details.async_stats
    assert (stats.outcome, stats.ended["failed"], stats.unanswered_examples) == ("finished", 0, 0)
