"""What of a failure is the provider's, the request's, or the program's; over HTTP and as LMs of all kinds raise it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import dspy
import httpx
import openai
import pytest
from dspy.clients.base_lm import BaseLM
from dspy.utils.exceptions import (
    AdapterParseError,
    LMAuthError,
    LMBillingError,
    LMConfigurationError,
    LMInvalidRequestError,
    LMProviderError,
    LMRateLimitError,
    LMUnexpectedError,
    LMUnsupportedFeatureError,
    LMUnsupportedModelError,
)

from dspy_flashevolve.engine.errors import RunAbortedError, TransientError
from dspy_flashevolve.engine.events import EventBus
from dspy_flashevolve.engine.loop import Threads
from dspy_flashevolve.engine.provider import Providers, RetryPolicy
from dspy_flashevolve.engine.requests import Rollout
from dspy_flashevolve.engine.scheduler import Scheduler
from dspy_flashevolve.programs.faults import Fault, fault_of, raise_provider_fault
from dspy_flashevolve.programs.lm import LanguageModels
from dspy_flashevolve.programs.metric import Metric
from dspy_flashevolve.programs.program import ProgramRunner
from tests.broken_server import BrokenServer
from tests.contract.surface import InThread
from tests.fakes import Chain, digits, fake_lm, reply_for
from tests.programs.test_programs import adapter_for

FAILURE = -0.5
EXAMPLE = dspy.Example(question="q").with_inputs("question")


def rolled_out(
    lm: Any, program: Any = None, metric: Any = digits, retry: RetryPolicy | None = None, paced: bool = True
) -> Rollout:
    """One rollout as in a run; by default without any second attempt."""

    async def main() -> Rollout:
        loop, threads = asyncio.get_running_loop(), Threads(2, "test")
        once = retry or RetryPolicy(attempts=1)
        providers = Providers({}, None, Scheduler(1, ["work"]), EventBus(), loop.time, once, random.Random(0))
        if retry is None:
            providers.hurry()  # every refusal counts, and nothing is waited for
        models = LanguageModels(providers)
        models.attach(loop)
        made = program or Chain()
        runner = ProgramRunner(adapter_for(made, metric), Metric(metric, threads), threads, models=models)
        candidate = {name: one.signature.instructions for name, one in made.named_predictors()}
        try:
            with dspy.context(lm=models.pace(lm) if paced else lm, adapter=dspy.ChatAdapter(), **models.settings):
                return await runner.rollout(candidate, EXAMPLE, capture_traces=True)
        finally:
            models.close()
            threads.close()

    return asyncio.run(main())


@pytest.fixture(scope="module")
def server() -> Iterator[BrokenServer]:
    with BrokenServer() as running:
        yield running


# Over HTTP, by both of dspy's engines, on the loop and in a thread

LATER = [
    "empty_object", "no_choices", "nothing_but_no_choices", "null_choices", "no_message", "null_content",
    "a_list", "null", "a_notice", "an_error_with_status_200", "truncated", "html", "html_called_json",
    "no_body", "choice_error", "choice_error_beside_a_text", "finish_reason_error", "finish_reason_abort",
    "no_completion_token", "closed_in_mid_body", "reset", "408", "409", "425", "429", "500", "502", "503",
    "504", "529",
]  # fmt: skip
NEVER = ["401", "402", "403", "404", "404-model_not_found", "429-insufficient_quota"]
SCORED = [
    "filtered", "filtered_without_a_token", "cut_off", "cut_off_without_a_token", "refused", "empty_text",
    "unparsable", "400", "400-context_length_exceeded", "400-content_filter", "413", "422",
]  # fmt: skip
every_way = pytest.mark.parametrize(
    ("engine", "kind"), [("lm15", Chain), ("lm15", InThread), ("litellm", Chain)], ids=["lm15", "thread", "litellm"]
)


@every_way
@pytest.mark.parametrize("name", LATER)
def test_what_a_provider_in_trouble_sends_is_asked_for_again_and_never_scored(
    server: BrokenServer, name: str, engine: str, kind: Any
) -> None:
    with pytest.raises(TransientError):
        rolled_out(server.lm(name, engine), kind())


@every_way
@pytest.mark.parametrize("name", NEVER)
def test_what_a_provider_refuses_for_good_ends_the_run(server: BrokenServer, name: str, engine: str, kind: Any) -> None:
    says = "model's name" if name.startswith("404") else "API key"
    with pytest.raises(RunAbortedError, match=says):
        rolled_out(server.lm(name, engine), kind())


@every_way
@pytest.mark.parametrize("name", SCORED)
def test_what_the_request_or_the_model_is_to_blame_for_is_a_failure_of_the_candidate(
    server: BrokenServer, name: str, engine: str, kind: Any
) -> None:
    assert rolled_out(server.lm(name, engine), kind()).score == FAILURE


@every_way
def test_a_reply_without_a_message_is_asked_for_once_more_past_the_cache(
    engine: str, kind: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(["no_choices", "null_content", "good"])
    monkeypatch.setattr(dspy, "cache", dspy.cache)  # which puts it back
    dspy.configure_cache(disk_cache_dir=str(tmp_path))
    with BrokenServer(lambda prompt: next(names)) as server:
        lm = server.lm("chosen", engine, cache=True, num_retries=2)
        retry = RetryPolicy(first_seconds=0.0)
        assert rolled_out(lm, kind(), retry=retry).output.answer == "5"
        assert not list(names), "the second and the third reply were not the first one from the cache"


def test_looking_at_replies_keeps_the_users_choice_of_histories(server: BrokenServer) -> None:
    lm = server.lm("good")
    with dspy.context(disable_history=True):
        assert rolled_out(lm).score > 0
        assert lm.history == []
        with pytest.raises(TransientError):
            rolled_out(server.lm("no_choices"))
    rolled_out(lm)
    assert len(lm.history) == 1


def test_where_it_is_not_paced_a_reply_without_choices_is_still_no_score(server: BrokenServer) -> None:
    with pytest.raises(TransientError, match="no choice"):
        rolled_out(server.lm("no_choices", "litellm"), paced=False)


# LMs that are no dspy.LM


class HandWritten(BaseLM):
    """Raises what its author's client raises."""

    def __init__(self, error: Callable[[], BaseException]) -> None:
        super().__init__("m")
        self.error = error

    def forward(self, prompt: Any = None, messages: Any = None, **kwargs: Any) -> Any:
        raise self.error()

    async def aforward(self, prompt: Any = None, messages: Any = None, **kwargs: Any) -> Any:
        raise self.error()


REQUEST = httpx.Request("POST", "http://127.0.0.1")


def response(status: int, **headers: str) -> httpx.Response:
    return httpx.Response(status, request=REQUEST, headers=headers)


RAW: list[Callable[[], Exception]] = [
    lambda: TimeoutError("too slow"),
    lambda: asyncio.TimeoutError(),
    lambda: ConnectionResetError("gone"),
    lambda: httpx.ReadTimeout("too slow", request=REQUEST),
    lambda: httpx.HTTPStatusError("503", request=REQUEST, response=response(503)),
    lambda: openai.APIConnectionError(request=REQUEST),
    lambda: openai.APITimeoutError(REQUEST),
    lambda: openai.RateLimitError("429", response=response(429), body=None),
    lambda: KeyError("choices"),
    lambda: IndexError("list index out of range"),
]


@pytest.mark.parametrize("kind", [Chain, InThread])
@pytest.mark.parametrize("error", RAW, ids=lambda make: type(make()).__name__)
def test_what_a_hand_written_lm_raises_over_a_lost_or_broken_reply_is_never_scored(
    error: Callable[[], Exception], kind: Any
) -> None:
    with pytest.raises(TransientError):
        rolled_out(HandWritten(error), kind())


@pytest.mark.parametrize("error", RAW, ids=lambda make: type(make()).__name__)
def test_the_same_from_a_programs_own_code_is_an_error_of_the_program(error: Callable[[], Exception]) -> None:
    if "openai" in type(error()).__module__:
        return  # comes from a provider, whoever asked it

    class Tool(Chain):
        async def aforward(self, question: str) -> Any:
            await super().aforward(question)
            raise error()

    assert rolled_out(fake_lm(lambda prompt: reply_for(prompt, answer="5")), Tool()).score == FAILURE


def test_a_raw_rejection_of_the_key_ends_the_run() -> None:
    with pytest.raises(RunAbortedError, match="API key"):
        rolled_out(HandWritten(lambda: openai.AuthenticationError("bad key", response=response(401), body=None)))


def test_what_an_lm_raises_over_the_request_itself_is_the_candidates() -> None:
    assert rolled_out(HandWritten(lambda: ValueError("a lone surrogate"))).score == FAILURE


def test_what_the_provider_says_of_when_to_come_back_is_read_from_raw_errors_too() -> None:
    error = openai.RateLimitError("429", response=response(429, **{"retry-after": "9"}), body=None)
    with pytest.raises(TransientError) as caught:
        rolled_out(HandWritten(lambda: error))
    assert caught.value.retry_after_seconds == 9.0


def test_a_metric_whose_judge_times_out_gives_no_score() -> None:
    judge = HandWritten(lambda: TimeoutError("too slow"))

    def judged(gold: Any, pred: Any, *rest: Any) -> float:
        judge("is it right?")
        return 1.0

    lm = fake_lm(lambda prompt: reply_for(prompt, answer="5"))
    with pytest.raises(TransientError):
        rolled_out(lm, metric=judged)

    def broken(gold: Any, pred: Any, *rest: Any) -> float:
        raise TimeoutError("of the metric's own database")

    assert rolled_out(lm, metric=broken).score == FAILURE


# Chains of causes


def hiding(error: Exception, over: Exception, how: str) -> Exception:
    """``over``, raised while ``error`` was handled."""
    over.__context__ = error
    if how != "meanwhile":
        over.__cause__ = error if how == "from" else None  # which suppresses the context, too
    return over


@pytest.mark.parametrize("how", ["from", "meanwhile"])
def test_a_fault_is_found_beneath_what_the_program_made_of_it(how: str) -> None:
    for limit in (LMRateLimitError("429"), ConnectionResetError("gone")):
        error = hiding(hiding(limit, KeyError("a"), how), ValueError("b"), how)
        fault = fault_of(error, lm_errors=[limit])
        assert fault is not None
        assert fault[0] is Fault.LATER
        assert fault[1] is limit
    with pytest.raises(RunAbortedError):
        raise_provider_fault(hiding(LMAuthError("401"), ValueError("b"), how))


def test_a_fault_is_found_in_an_exception_group() -> None:
    class Group(Exception):
        exceptions = (ValueError("own"), LMRateLimitError("429"))

    with pytest.raises(TransientError, match="429"):
        raise_provider_fault(Group())


@pytest.mark.parametrize("error", [LMRateLimitError("429"), LMAuthError("401")])
def test_a_fault_that_was_swallowed_on_the_way_to_a_crash_is_no_score(error: Exception) -> None:
    hidden = hiding(error, ValueError("the workers failed"), "from None")
    assert fault_of(hidden) is None
    with pytest.raises(TransientError):
        raise_provider_fault(hidden, lm_errors=[error])


def test_a_fault_that_dspys_parallel_swallows_is_no_score() -> None:
    class Side(InThread):
        def forward(self, question: str) -> Any:
            pairs = [(self.steps[0], {"question": f"{question} {n}"}) for n in range(2)]
            first, _ = dspy.Parallel(num_threads=2, max_errors=1, disable_progress_bar=True)(pairs)
            return first

    def limited(prompt: str) -> str:
        raise LMRateLimitError("429")

    with pytest.raises(TransientError):
        rolled_out(fake_lm(limited, asynchronous=False), Side())


def test_a_reply_that_cannot_be_parsed_stays_the_programs_whatever_failed_before_it() -> None:
    parse = AdapterParseError("ChatAdapter", dspy.Signature("a -> b"), "text")
    limit = LMRateLimitError("429")
    assert fault_of(hiding(limit, parse, "meanwhile"), lm_errors=[limit]) is None


def test_a_chain_that_bites_its_tail_ends() -> None:
    one, two = ValueError("1"), ValueError("2")
    one.__cause__, two.__cause__ = two, one
    assert fault_of(one) is None


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (LMProviderError("not JSON", status=200), Fault.LATER),
        (LMProviderError("of no kind"), Fault.LATER),
        (LMProviderError("too early", status=425), Fault.LATER),
        (LMUnexpectedError("the engine could not read the body"), Fault.LATER),
        (LMInvalidRequestError("conflict", status=409), Fault.LATER),
        (LMInvalidRequestError("no such path", status=404), Fault.NEVER),
        (LMUnsupportedModelError("no such model"), Fault.NEVER),
        (LMBillingError("no credit"), Fault.NEVER),
        (LMConfigurationError("no credential"), Fault.NEVER),
        (LMInvalidRequestError("too long", status=400), Fault.REQUEST),
        (LMUnsupportedFeatureError("no images"), Fault.REQUEST),
    ],
)
def test_every_kind_of_lm_error_has_its_meaning(error: Exception, fault: Fault) -> None:
    found = fault_of(error)
    assert found is not None
    assert found[0] is fault
