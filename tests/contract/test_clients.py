"""What users put around dspy's LMs goes on working: experiment trackers, instrumentation, servers that fail inside of a
200, and dspy's cache."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import re
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import dspy
import pytest
from dspy.clients.cache import Cache
from dspy.teleprompt.teleprompt import Teleprompter
from dspy.utils.callback import BaseCallback

from dspy_flashevolve import AsyncACE, AsyncGEPA, AsyncMetaHarness
from tests.broken_server import BrokenServer
from tests.contract.surface import TRAIN, VAL, InThread, compiled, evolved, optimizer
from tests.contract.test_unanswered import answer as replies
from tests.fakes import (
    AsyncFakeEngine,
    Chain,
    FakeEngine,
    digits,
    examples,
    fake_lm,
    hashed,
    prompt_of,
    reflection_lm,
    reply_for,
    task_lm,
)

# Experiment trackers


@pytest.mark.parametrize("kind", [AsyncGEPA, AsyncACE, AsyncMetaHarness])
def test_every_optimizer_is_a_direct_subclass_of_teleprompter_which_is_where_mlflow_patches_compile(kind: type) -> None:
    assert kind in Teleprompter.__subclasses__()
    assert "compile" in vars(kind)


def test_with_mlflow_autologging_a_compile_leaves_a_run_and_no_traces_as_one_of_dspy_gepa(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # its database needs more packages
    tracking_uri, usage = mlflow.get_tracking_uri(), dspy.settings.track_usage
    mlflow.set_tracking_uri(f"file:{tmp_path}")
    experiment = mlflow.set_experiment("compile").experiment_id

    def traces() -> int:
        mlflow.flush_trace_async_logging()
        return len(mlflow.search_traces(return_type="list"))

    def compile_with_both() -> None:
        mlflow.dspy.autolog(log_compiles=True)
        counts: list[tuple[int, int]] = []
        for kind in (dspy.GEPA, AsyncGEPA):
            one = kind(digits, max_metric_calls=60, num_threads=4, reflection_lm=reflection_lm())
            with dspy.context(lm=task_lm()):
                best = one.compile(Chain(), trainset=TRAIN, valset=VAL)
            counts.append((len(mlflow.MlflowClient().search_runs([experiment])), traces()))
        assert counts == [(1, 0), (2, 0)]
        with dspy.context(lm=task_lm()):
            best(question="after the compile")
        assert traces() == 1

    try:
        contextvars.Context().run(compile_with_both)  # dspy's settings as a script has them, in no dspy.context
    finally:
        contextvars.Context().run(mlflow.dspy.autolog, disable=True)
        mlflow.set_tracking_uri(tracking_uri)
        dspy.configure(track_usage=usage)


# Instrumentation: what OpenInference, MLflow and Langfuse do to the calls of dspy's classes


@contextmanager
def instrumented(kind: type, calls: list[str]) -> Generator[None, None, None]:
    """Wrap an LM class's calls, which note the model that is called."""
    originals = {name: vars(kind).get(name) for name in ("__call__", "acall")}
    call, acall = kind.__call__, kind.acall

    @functools.wraps(call)
    def noted_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append("sync")
        return call(self, *args, **kwargs)

    @functools.wraps(acall)
    async def noted_acall(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append("async")
        return await acall(self, *args, **kwargs)

    kind.__call__, kind.acall = noted_call, noted_acall
    try:
        yield
    finally:
        for name, original in originals.items():
            if original is None:
                delattr(kind, name)
            else:
                setattr(kind, name, original)


class CallsHeard(BaseCallback):
    def __init__(self) -> None:
        self.count = 0

    def on_lm_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        self.count += 1


@pytest.mark.parametrize("kind", [dspy.LM, dspy.BaseLM])
@pytest.mark.parametrize("program", [Chain, InThread])
def test_what_wraps_the_calls_of_lms_between_two_runs_sees_those_of_the_second_and_none_of_the_third(
    kind: type, program: Callable[[], dspy.Module]
) -> None:
    prompts, calls, heard = list[str](), list[str](), CallsHeard()

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return replies(prompt)

    def requests_of_a_run() -> int:
        before = len(prompts)
        compiled(60, program(), reflection_lm=fake_lm(answer))
        return len(prompts) - before

    with dspy.context(lm=fake_lm(answer), callbacks=[heard]):
        assert requests_of_a_run() == heard.count
        with instrumented(kind, calls):
            requests = requests_of_a_run()
        assert len(calls) == requests
        requests_of_a_run()
    assert len(calls) == requests
    assert heard.count == len(prompts), "dspy's callbacks hear of each call once"
    assert ("sync" if program is InThread else "async") in calls


# A server's failure inside of a 200


FAILURES_WITH_STATUS_200 = (
    *("choice_error", "choice_error_beside_a_text", "finish_reason_error", "finish_reason_abort"),
    "no_completion_token",
)


def test_a_failure_inside_of_a_200_is_asked_again_of_task_and_reflection_lm_and_never_scored() -> None:
    failures = {"task": list(FAILURES_WITH_STATUS_200), "reflection": list(FAILURES_WITH_STATUS_200[:2])}

    def choose(asker: str, request: str) -> str:
        if failures[asker]:
            return failures[asker].pop()
        return replies(request.replace("JSON", ""))

    task, reflection = (BrokenServer(functools.partial(choose, asker)) for asker in failures)
    with task, reflection, dspy.context(lm=task.lm("chosen")):
        details = compiled(40, reflection_lm=reflection.lm("chosen")).detailed_results
    assert not any(failures.values())
    assert min(score for scores in details.val_subscores for score in scores.values()) > 0
    assert details.async_stats.retried_requests == len(FAILURES_WITH_STATUS_200) + 2
    assert details.async_stats.ended.get("failed", 0) == 0


def test_what_a_model_is_to_blame_for_is_scored_and_not_asked_again() -> None:
    names = ("filtered", "filtered_without_a_token", "cut_off", "cut_off_without_a_token", "refused", "empty_text")
    asked = Counter[str]()

    def choose(request: str) -> str:
        name = next((name for number, name in enumerate(names) if f"\\nv {number}\\n" in request), "good")
        asked[name] += 1
        return name

    with BrokenServer(choose) as server, dspy.context(lm=server.lm("chosen")):
        details = compiled(len(VAL)).detailed_results
    assert [details.val_subscores[0][number] == 0.0 for number in range(len(VAL))] == [True] * 6 + [False] * 3
    assert details.async_stats.retried_requests == 0
    assert all(asked[name] <= 2 for name in names), "the adapter of dspy asks a second time in another format"


# Replies that do not fit their format


class Explained(Chain):
    """Its replies have two fields, of which some lack one."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = [dspy.Predict("question -> reasoning, answer")]


@pytest.mark.parametrize("program", [Chain, Explained])
@pytest.mark.parametrize("feedback", [False, True])
def test_of_replies_that_do_not_fit_their_format_the_first_is_shown_and_the_others_are_counted(
    caplog: pytest.LogCaptureFixture, program: Callable[[], dspy.Module], feedback: bool
) -> None:
    unreadable = "\x1b[2J[[ ## reasoning ## ]]\nbecause" + "!" * 1000

    def answer(prompt: str) -> str:
        number = hashed(prompt)
        is_readable = "\nv 3\n" not in prompt and "\nt 4\n" not in prompt
        return reply_for(prompt, reasoning="so", answer=str(number % 7)) if is_readable else unreadable

    with dspy.context(lm=fake_lm(answer)), caplog.at_level(logging.INFO, "dspy"):
        caplog.set_level(logging.INFO, "dspy_flashevolve")
        stats = compiled(60, program(), add_format_failure_as_feedback=feedback).async_stats
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    [shown] = [line for line in warnings if "format of" in line]
    assert "because!!!" in shown
    assert "!" * 500 not in shown
    assert "\x1b" not in shown
    assert not any("AdapterParseError" in line for line in warnings)
    assert stats.unreadable_replies > 3
    [end] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("AsyncGEPA finished")]
    [line] = [line for line in end.splitlines() if "format" in line]
    count, rollouts, share = map(int, re.findall(r"\d+", line))
    assert (count, share) == (stats.unreadable_replies, round(100 * count / rollouts))
    assert stats.metric_calls <= rollouts <= 60, "some were given up half-way"
    assert "add_format_failure_as_feedback" in line


def test_a_run_whose_replies_all_fit_their_format_says_nothing_of_it() -> None:
    assert "format" not in repr(compiled(60).async_stats)


# dspy's cache

DATA = examples("t", 12)


@pytest.mark.parametrize("search", ["edits", "pareto"])
@pytest.mark.parametrize("valset", ["left out", "the same examples", "others"])
def test_with_dspys_cache_no_request_is_paid_twice_whoever_runs_a_text_on_an_example(
    search: Any, valset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed's validation, the first minibatches and the screens ask the same at the same time, before any reply can
    be in the cache."""
    monkeypatch.setattr(dspy, "cache", Cache(False, True, None))
    requests = Counter[str]()

    def answer(prompt: str) -> str:
        requests[prompt] += 1
        return replies(prompt)

    class Slow(AsyncFakeEngine):
        async def complete(self, request: Any) -> Any:
            response = await super().complete(request)
            await asyncio.sleep(1 + hashed(prompt_of(request)) % 7)
            return response

    engine = FakeEngine(answer)
    lm = dspy.LM("fake/slow", engine=engine, async_engine=Slow(engine), temperature=0.0, num_retries=0)
    data = {"left out": None, "the same examples": list(DATA), "others": examples("v", 12)}
    one = optimizer(150, reflection_lm=lm, search=search, num_threads=16)
    stats = evolved(one, Chain(), DATA, data[valset], {"lm": lm}).async_stats
    assert stats.metric_calls <= 150
    assert stats.proposals > 3
    assert set(requests.values()) == {1}
