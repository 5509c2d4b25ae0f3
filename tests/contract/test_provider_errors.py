"""A provider's error is never a score: DESIGN section 4, invariant 6.

Most of it in virtual time, so that what waits before it is asked again costs nothing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import dspy
import pytest
from dspy.clients.base_lm import BaseLM
from dspy.utils.exceptions import (
    ContextWindowExceededError,
    LMAuthError,
    LMBillingError,
    LMRateLimitError,
    LMServerError,
    LMTimeoutError,
    LMUnsupportedModelError,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from dspy_flashevolve import RunAbortedError, Workflow
from tests.broken_server import BODIES, BROKEN, TEXTS, BrokenServer
from tests.contract.surface import (
    ENDLESS,
    VAL,
    Heard,
    Scored,
    check_ends,
    check_winner,
    compiled,
    completion,
    problems,
    raising,
    simulated,
)
from tests.contract.test_unanswered import Slow
from tests.fakes import Chain, digits, fake_lm, hashed, reply_for


def scores_of(details: Any) -> list[float]:
    return [score for candidate in details.val_subscores for score in candidate.values()]


# Faults that pass


TEMPORARY: dict[str, Callable[[], Exception]] = {
    "429": lambda: LMRateLimitError("429"),
    "429 with Retry-After": lambda: LMRateLimitError("429", retry_after=20.0),
    "503": lambda: LMServerError("503"),
    "timeout": lambda: LMTimeoutError("no answer"),
    "connection": lambda: ConnectionResetError("reset by peer"),
    "a body without choices": lambda: KeyError("choices"),
}


@pytest.mark.parametrize(
    ("name", "schedule"), [*((name, "async") for name in TEMPORARY), ("429", "lockstep"), ("timeout", "lockstep")]
)
def test_what_a_provider_in_trouble_raises_is_asked_again_and_never_a_score(name: str, schedule: Any) -> None:
    lm = raising(lambda number: TEMPORARY[name]() if hashed(number) % 100 < 30 else None)
    with dspy.context(lm=lm):
        details = simulated(50, schedule=schedule).detailed_results
    assert min(scores_of(details)) > 0, "every answer that came scores above 0; a 0 would be a fault"
    assert details.async_stats.retried_requests > 10
    check_winner(details)


class Own(BaseLM):
    """A user's own LM, which a run does not pace: it raises what its client raises, at every third request."""

    def __init__(self) -> None:
        super().__init__("own")
        self.requests = 0

    async def aforward(self, prompt: Any = None, messages: Any = None, **kwargs: Any) -> Any:
        self.requests += 1
        if self.requests % 3 == 0:
            raise ConnectionResetError("reset by peer")
        return completion(reply_for(str(messages), answer=str(1 + hashed(str(messages)) % 6)))


class Hiding(Chain):
    """Raises something of its own where an LM call fails."""

    async def aforward(self, question: str) -> dspy.Prediction:
        answer = None
        with suppress(Exception):
            answer = await super().aforward(question)
        if answer is None:
            raise ValueError("the workers failed")
        return answer


def test_where_a_program_raises_something_else_over_a_fault_of_an_own_lm_it_is_asked_again_and_never_scored() -> None:
    with dspy.context(lm=Own()):
        details = simulated(50, Hiding(), reflection_lm=raising(lambda number: None)).detailed_results
    assert min(scores_of(details)) > 0
    assert details.async_stats.retried_requests > 10


def test_where_a_program_raises_something_else_over_an_lm_that_gives_up_its_example_counts_as_unanswered() -> None:
    asked: list[str] = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        if "v 3" in prompt and len(asked) > 20:  # the first rollouts are heard in another way
            raise LMServerError("500", status=500)
        return reply_for(prompt, answer=str(len(asked) % 7), new_instruction=f"Instruction {hashed(prompt)}")

    with dspy.context(lm=fake_lm(answer)):
        details = simulated(50, Hiding()).detailed_results
    assert details.async_stats.unanswered_examples > 0


def test_what_an_lm_raises_that_a_program_asks_for_the_first_time_late_in_a_run_is_never_scored() -> None:
    own = Own()

    class Late(Chain):
        calls = itertools.count()

        async def aforward(self, question: str) -> dspy.Prediction:
            with dspy.context(lm=own if next(self.calls) > 15 else dspy.settings.lm):
                return await super().aforward(question)

    with dspy.context(lm=raising(lambda number: None)):
        details = simulated(50, Late()).detailed_results
    assert own.requests > 30
    assert min(scores_of(details)) > 0
    assert details.async_stats.retried_requests > 10


def test_where_a_run_hears_all_lm_calls_itself_dspy_calls_no_callback_after_the_first_rollouts() -> None:
    heard: list[int] = []

    class Looking(Chain):
        async def aforward(self, question: str) -> dspy.Prediction:
            heard.append(len(dspy.settings.callbacks))
            return await super().aforward(question)

    with dspy.context(lm=raising(lambda number: None)):
        simulated(50, Looking(), num_threads=4)
    assert len(heard) > 30
    assert not any(heard[12:]), "a callback costs dspy as much as half of a rollout's other work"


@settings(max_examples=5)
@given(
    bursts=st.lists(st.tuples(st.integers(1, 80), st.integers(1, 40)), min_size=1, max_size=4),
    name=st.sampled_from(list(TEMPORARY)),
    slots=st.sampled_from([1, 4, 32]),
)
def test_bursts_of_errors_cost_no_score_and_no_call_of_the_budget(
    bursts: list[tuple[int, int]], name: str, slots: int
) -> None:
    """Of requests that fail in a row. Where they are all of a rollout's attempts, while most others are answered, its
    example is given up, which is told; else nothing is scored by them."""
    lm = raising(lambda number: TEMPORARY[name]() if any(a <= number < a + n for a, n in bursts) else None)
    metric = Scored()
    with dspy.context(lm=lm):
        try:
            details = simulated(50, num_threads=slots, metric=metric, reflection_lm=lm).detailed_results
        except RunAbortedError as error:
            assert "seed program" in str(error)  # noqa: PT017
            return
    assert min(scores_of(details)) > 0 or details.async_stats.unanswered_examples
    assert len(metric.questions) == details.total_metric_calls <= 50
    check_ends(details.async_stats)


def test_the_burst_of_a_whole_backend_is_waited_out() -> None:
    """Everything is refused for a minute; nothing fails of it, and requests in flight fall meanwhile."""
    refused: list[float] = []

    def choose(number: int) -> Exception | None:
        now = asyncio.get_running_loop().time()
        if 5 < now < 20:
            refused.append(now)
            return LMRateLimitError("429", retry_after=20.0 - now)
        return None

    with dspy.context(lm=raising(choose)):
        details = simulated(60, Slow()).detailed_results
    assert refused
    assert details.async_stats.ended.get("failed", 0) == 0
    assert min(scores_of(details)) > 0


def test_rollouts_that_take_too_long_are_given_up_and_asked_again() -> None:
    slow = {"v 3": 2, "t 1": 1}

    class Stuck(Chain):
        async def aforward(self, question: str) -> dspy.Prediction:
            left = slow.get(question, 0)
            slow[question] = left - 1
            await asyncio.sleep(1000 if left > 0 else 1)
            return await super().aforward(question)

    with dspy.context(lm=raising(lambda number: None)):
        details = simulated(50, Stuck(), workflow=Workflow(rollout_timeout_seconds=30)).detailed_results
    stats = details.async_stats
    assert stats.timed_out_rollouts == 3
    assert min(scores_of(details)) > 0
    assert stats.seconds < 900, "in virtual time"


# Faults that stay


PERMANENT: dict[str, tuple[Callable[[], Exception], str]] = {
    "rejected key": (lambda: LMAuthError("invalid key"), "API key"),
    "no credit": (lambda: LMBillingError("no credit"), "no credit"),
    "no such model": (lambda: LMUnsupportedModelError("no such model"), "no such model"),
}


@pytest.mark.parametrize("name", list(PERMANENT))
def test_a_refusal_for_good_ends_the_run_with_one_clear_error_and_the_best_so_far(name: str) -> None:
    error, says = PERMANENT[name]
    with dspy.context(lm=raising(lambda number: error())), pytest.raises(RunAbortedError, match=says) as at_once:
        compiled()
    assert at_once.value.best_program is None
    late = raising(lambda number: error() if number > 30 else None)
    with dspy.context(lm=late), pytest.raises(RunAbortedError, match=says) as caught:
        compiled(ENDLESS)
    best: Any = caught.value.best_program
    assert best.detailed_results.val_aggregate_scores[best.detailed_results.best_idx] > 0
    assert set(best.detailed_results.val_subscores[0]) == set(range(len(VAL)))
    assert best.async_stats.outcome == "aborted"
    check_ends(best.async_stats)


# What is no fault of the provider's


def test_an_input_that_is_too_long_and_a_reply_that_cannot_be_parsed_score_as_in_gepa() -> None:
    def answer(prompt: str) -> str:
        if "\nv 3" in prompt:
            raise ContextWindowExceededError(message="too long")
        return "no format at all" if "\nv 4" in prompt else reply_for(prompt, answer=str(1 + hashed(prompt) % 6))

    with dspy.context(lm=fake_lm(answer)):
        seed = simulated(20).detailed_results.val_subscores[0]
    assert (seed[3], seed[4]) == (0.0, 0.0)
    assert min(score for number, score in seed.items() if number not in (3, 4)) > 0


def test_a_program_that_raises_or_cancels_itself_scores_the_failure_score() -> None:
    class Breaks(Chain):
        async def aforward(self, question: str) -> dspy.Prediction:
            if question == "v 3":
                raise asyncio.CancelledError("by itself")
            if question == "v 4":
                raise LookupError("its own")
            return await super().aforward(question)

    seed = simulated(20, Breaks(), failure_score=-0.5).detailed_results.val_subscores[0]
    assert (seed[3], seed[4]) == (-0.5, -0.5)


# Reflections and judges


def test_a_reflection_that_fails_for_a_while_is_asked_again() -> None:
    reflecting = raising(lambda number: LMServerError("503") if number % 2 else None)
    stats = simulated(110, reflection_lm=reflecting).async_stats
    assert stats.retried_requests > 0
    assert stats.ended.get("failed", 0) == 0
    assert stats.ended["committed"] > 0


@pytest.mark.parametrize("locked", [False, True])
def test_a_judge_that_is_rate_limited_is_asked_again(locked: bool) -> None:
    judge = raising(lambda number: LMRateLimitError("429") if hashed(number) % 3 == 0 else None)

    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        judge("is it right?")
        return digits(gold, pred)

    details = simulated(40, metric=metric, metric_lock=locked).detailed_results
    assert details.async_stats.retried_requests > 0
    assert details.async_stats.proposals > 0
    check_ends(details.async_stats)


def test_what_an_aborted_run_has_spent_counts_when_it_goes_on(tmp_path: Any) -> None:
    metric, limit = Scored(), 0

    def answer(prompt: str) -> str:
        if len(metric.questions) >= limit:
            raise LMAuthError("the key was revoked")
        return reply_for(prompt, answer=str(hashed(prompt) % 7))

    with dspy.context(lm=fake_lm(answer)):
        for limit in (15, 30, 45):  # noqa: B007
            with pytest.raises(RunAbortedError):
                compiled(80, log_dir=str(tmp_path), metric=metric)
        limit = ENDLESS
        details = compiled(80, log_dir=str(tmp_path), metric=metric).detailed_results
    assert len(metric.questions) == details.total_metric_calls <= 80
    assert problems(tmp_path) == []


def test_callbacks_hear_of_an_error_and_not_of_an_end_that_did_not_come() -> None:
    heard = Heard()

    def selector(*args: Any) -> list[str]:
        raise LookupError("broken")

    with pytest.raises(LookupError):
        compiled(component_selector=selector, gepa_kwargs={"callbacks": [heard]})
    assert [str(event["exception"]) for event in heard.of("on_error")] == ["broken"]
    assert not heard.of("on_optimization_end")
    starts, ends = (heard.of(f"on_iteration_{name}") for name in ("start", "end"))
    assert {event["iteration"] for event in starts} == {event["iteration"] for event in ends}


# Over HTTP: a real server that answers in every broken way that providers have


WRONG = [
    name
    for name in (*BODIES, *TEXTS, *BROKEN, "429", "503", "409")
    if name not in ("good", "filtered", "cut_off", "refused", "empty_text", "unparsable")
]


def test_no_run_over_http_scores_what_a_provider_in_trouble_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    async def at_once(seconds: float) -> None:
        await asyncio.sleep(0)

    def choose(prompt: str) -> str:
        nonlocal asked
        asked += 1
        if hashed(asked) % 8 == 0:
            return WRONG[asked % len(WRONG)]
        return reply_for(prompt.replace("JSON", ""), answer=str(1 + hashed(prompt) % 6))

    monkeypatch.setattr("anyio.sleep", at_once)  # spares some seconds of waiting between attempts
    with BrokenServer(choose) as server, dspy.context(lm=server.lm("chosen")):
        details = compiled(60).detailed_results
    assert min(scores_of(details)) > 0, "every answer that came scores above 0; a 0 would be a fault"
    assert details.async_stats.retried_requests > 5
    assert details.async_stats.metric_calls <= 60


@pytest.mark.parametrize(("status", "says"), [("404-model_not_found", "model's name"), ("401", "API key")])
def test_a_refusal_for_good_over_http_ends_the_run_with_the_best_so_far(status: str, says: str) -> None:
    asked = 0

    def choose(prompt: str) -> str:
        nonlocal asked
        asked += 1
        return status if asked > 20 else reply_for(prompt.replace("JSON", ""), answer=str(hashed(prompt) % 7))

    with (
        BrokenServer(choose) as server,
        dspy.context(lm=server.lm("chosen")),
        pytest.raises(RunAbortedError, match=says) as caught,
    ):
        compiled(ENDLESS)
    assert set(caught.value.best_program.detailed_results.val_subscores[0]) == set(range(len(VAL)))
