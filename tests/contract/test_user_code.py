"""Code of the user's that raises, is not thread-safe, or keeps things: what comes back, and who is named."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import itertools
import logging
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dspy
import pytest
from gepa.strategies.acceptance import StrictImprovementAcceptance
from gepa.strategies.batch_sampler import EpochShuffledBatchSampler
from gepa.strategies.candidate_selector import CurrentBestCandidateSelector
from gepa.strategies.component_selector import RoundRobinReflectionComponentSelector
from gepa.strategies.eval_policy import FullEvaluationPolicy
from gepa.strategies.proposal_sampling import SingleMutationSampling
from gepa.strategies.proposal_selection import AllImprovements

from tests.contract.surface import VAL, Heard, InThread, compiled, text_of
from tests.fakes import Chain, digits, fake_lm, hashed, reply_for


@pytest.mark.parametrize(("text", "why"), [("half a \ud800 character", "not valid Unicode"), (None, "is None")])
def test_a_proposal_that_no_program_can_be_built_with_fails_its_step(text: Any, why: str, tmp_path: Any) -> None:
    numbers = itertools.count()

    def proposer(candidate: Any, reflective_dataset: Any, components_to_update: list[str]) -> dict[str, str]:
        number = next(numbers)
        return dict.fromkeys(components_to_update, text if number % 6 < 4 else f"Version {number}.")

    details = compiled(60, instruction_proposer=proposer, log_dir=str(tmp_path)).detailed_results
    stats = details.async_stats
    assert stats.ended["failed"] > 0
    assert all(text_of(program) != text for program in details.candidates)
    assert all(why in reason for reason in stats.end_reasons if reason.startswith("reflection failed"))


class Pooled(dspy.Module):
    """Calls its predictor in a thread of its own, which dspy does not trace."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question: str) -> Any:
        with ThreadPoolExecutor(1) as pool, dspy.context():
            return pool.submit(contextvars.Context().run, self._answered, dspy.settings.lm, question).result()

    def _answered(self, lm: Any, question: str) -> Any:
        with dspy.context(lm=lm):
            return self.answer(question=question)


def test_a_program_whose_calls_dspy_does_not_trace_ends_the_run_with_what_to_do() -> None:
    scored: list[Any] = []

    def metric(gold: Any, pred: Any, *rest: Any) -> Any:
        scored.append(gold)
        return digits(gold, pred, *rest)

    with pytest.raises(RuntimeError, match=r"no call of its predictors is in dspy's trace.*use dspy\.Parallel"):
        compiled(300, program=Pooled(), metric=metric)
    assert len(scored) < 150


@pytest.mark.parametrize("where", ["program", "metric"])
def test_a_warning_of_one_example_says_which_and_what_it_gets(where: str, caplog: pytest.LogCaptureFixture) -> None:
    class Breaks(Chain):
        async def aforward(self, question: str) -> Any:
            if where == "program" and question == VAL[0].question:
                raise KeyError("no such row")
            return await super().aforward(question=question)

    def metric(gold: Any, pred: Any, *rest: Any) -> Any:
        if where == "metric" and gold.question == VAL[0].question:
            raise KeyError("no such row")
        return digits(gold, pred, *rest)

    compiled(40, program=Breaks(), metric=metric, failure_score=-1.0)
    [line, *_] = [message for message in caplog.messages if "no such row" in message]
    assert "failure_score=-1" in line
    assert VAL[0].question in line


# Code of the user's

HOOKS: dict[str, tuple[type, str, Any]] = {
    "candidate_selection_strategy": (CurrentBestCandidateSelector, "select_candidate_idx", ()),
    "component_selector": (RoundRobinReflectionComponentSelector, "__call__", ()),
    "acceptance_criterion": (StrictImprovementAcceptance, "should_accept", ()),
    "batch_sampler": (EpochShuffledBatchSampler, "next_minibatch_ids", (3,)),
    "sampling_strategy": (SingleMutationSampling, "sample_tasks", ()),
    "selection_strategy": (AllImprovements, "select", ()),
    "val_evaluation_policy": (FullEvaluationPolicy, "get_eval_batch", ()),
}
"""Hook -> a strategy of gepa's, its method, its arguments."""


def mine(hook: str, after: int) -> Any:
    """A strategy of the user's that breaks at its call number ``after``."""
    base, method, arguments = HOOKS[hook]
    calls = 0

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= after:
            raise LookupError("it broke")
        return getattr(base, method)(self, *args, **kwargs)

    return type("Mine", (base,), {method: broken})(*arguments)


def with_hook(hook: str, strategy: Any) -> dict[str, Any]:
    if hook in ("candidate_selection_strategy", "component_selector"):
        return {hook: strategy}
    return {"gepa_kwargs": {hook: strategy}} | ({"reflection_minibatch_size": None} if hook == "batch_sampler" else {})


@pytest.mark.parametrize(
    ("hook", "schedule"), [*((hook, "async") for hook in HOOKS), ("component_selector", "lockstep")]
)
def test_a_strategy_that_raises_is_named_and_the_best_so_far_stays(
    hook: str, schedule: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="dspy_flashevolve"), pytest.raises(LookupError) as caught:
        compiled(90, log_dir=str(tmp_path), schedule=schedule, **with_hook(hook, mine(hook, 2)))
    assert f"{hook}: Mine.broken raised LookupError: it broke" in caplog.text
    best: Any = caught.value
    assert best.best_program.detailed_results.val_subscores[0].keys() == set(range(len(VAL)))
    resumed = compiled(90, log_dir=str(tmp_path), schedule=schedule).detailed_results
    assert len(resumed.val_aggregate_scores) >= len(best.best_program.detailed_results.val_aggregate_scores)
    assert resumed.total_metric_calls <= 90 or schedule == "lockstep"


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_a_stopper_that_raises_is_named_among_others(schedule: Any, caplog: pytest.LogCaptureFixture) -> None:
    asked = 0

    def my_stopper(state: Any) -> bool:
        nonlocal asked
        asked += 1
        if asked > 2:
            raise LookupError("it broke")
        return False

    with caplog.at_level(logging.ERROR, logger="dspy_flashevolve"), pytest.raises(LookupError) as caught:
        compiled(130, schedule=schedule, gepa_kwargs={"stop_callbacks": [my_stopper]})
    assert "my_stopper raised LookupError: it broke" in caplog.text
    assert "stop_callbacks: " in caplog.text
    assert caught.value.best_program is not None  # type: ignore[attr-defined]


def breaks(*_: Any, **__: Any) -> Any:
    raise LookupError("it broke")


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_callbacks_that_raise_change_nothing_and_are_named(schedule: Any, caplog: pytest.LogCaptureFixture) -> None:
    one_at_a_time: dict[str, Any] = {"schedule": schedule, "num_threads": 1}
    quiet = compiled(90, **one_at_a_time).detailed_results
    with caplog.at_level(logging.WARNING):
        loud = compiled(90, gepa_kwargs={"callbacks": [Heard(breaks)]}, **one_at_a_time).detailed_results
    assert re.search(r"Callback .*Heard.* failed on on_iteration_end: it broke", caplog.text)
    assert loud.val_subscores[0] == quiet.val_subscores[0]
    if schedule == "lockstep":
        assert loud.to_dict() == quiet.to_dict()


class MyProposer(dspy.Module):
    def forward(self, **_: Any) -> Any:
        raise LookupError("it broke")


@pytest.mark.parametrize(
    ("proposer", "name"),
    [(MyProposer(), "MyProposer.forward"), (breaks, "breaks"), (functools.partial(breaks, 1), "breaks")],
)
def test_a_proposer_that_raises_is_named(proposer: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="dspy_flashevolve"):
        stats = compiled(40, instruction_proposer=proposer).async_stats
    assert f"instruction_proposer: {name} raised LookupError: it broke" in caplog.text
    assert stats.ended["committed"] == 0
    assert stats.ended["failed"] == stats.end_reasons["reflection failed: it broke"] > 3


# Metrics that are not thread-safe


class Alone:
    """Counts how many calls of it run at once, from threads and on the loop."""

    def __init__(self) -> None:
        self.running = self.most = self.scores = self.feedback = 0
        self.guard = threading.Lock()
        self.overlap = threading.Event()

    def enter(self, name: Any) -> None:
        with self.guard:
            self.running += 1
            self.most = max(self.most, self.running)
            self.scores += name is None
            self.feedback += name is not None

    def leave(self) -> None:
        with self.guard:
            self.running -= 1


class SyncAlone(Alone):
    def __call__(self, gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        self.enter(pred_name)
        self.overlap.wait(0.002)  # lets others in, if they may
        self.leave()
        return digits(gold, pred)


class CoroutineAlone(Alone):
    async def __call__(
        self, gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None
    ) -> Any:
        self.enter(pred_name)
        try:
            for _ in range(20):
                await asyncio.sleep(0)
        finally:  # nobody may want its score any more
            self.leave()
        return digits(gold, pred)


@pytest.mark.parametrize("program", [Chain, InThread])
@pytest.mark.parametrize("metric", [SyncAlone, CoroutineAlone])
def test_with_metric_lock_the_metric_is_called_once_at_a_time(metric: Any, program: Any) -> None:
    alone, together = metric(), metric()
    compiled(60, program(), metric=alone, metric_lock=True)
    compiled(60, program(), metric=together)
    assert alone.most == 1
    assert alone.scores > 0
    assert alone.feedback > 0
    assert together.most > 1, "without the lock this metric's calls overlap"


def test_a_locked_metric_that_raises_gives_up_its_turn() -> None:
    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        if hashed(gold.question) % 3 == 0:
            raise LookupError("it broke")
        return digits(gold, pred)

    assert compiled(100, metric=metric, metric_lock=True).async_stats.metric_calls > 20


# Memory


class Predictions:
    """A metric that knows which of the predictions that it was shown are still held by anyone."""

    def __init__(self) -> None:
        self.shown: list[weakref.ref[Any]] = []
        self.lives: list[int] = []

    def __call__(self, gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        if pred_name is None:
            self.shown.append(weakref.ref(pred))
        return digits(gold, pred)

    def alive(self) -> int:
        gc.collect()
        return sum(one() is not None for one in self.shown)

    def on_iteration_end(self, event: Any) -> None:
        if event["iteration"] % 10 == 0:
            self.lives.append(self.alive())

    def __reduce__(self) -> Any:
        return Predictions, ()


@pytest.mark.parametrize("program", [Chain, InThread])
def test_what_rollouts_leave_behind_is_released_when_their_step_ends(program: Any) -> None:
    watch = Predictions()
    optimized = compiled(160, program(), metric=watch, track_stats=False, gepa_kwargs={"callbacks": [watch]})
    assert len(watch.shown) > 120
    assert max(watch.lives) < 70, "what live steps hold, not what all rollouts left"
    assert watch.alive() == 0, "nothing of it is left after the run"
    assert optimized is not None


def test_validations_keep_no_traces() -> None:
    inputs: list[weakref.ref[Any]] = []

    class Question(str):
        """Can be referred to weakly; a trace holds its calls' inputs."""

    class Asks(Chain):
        async def aforward(self, question: str) -> dspy.Prediction:
            fresh = Question(question)
            inputs.append(weakref.ref(fresh))
            answer = (await self.steps[0].acall(question=fresh)).answer
            return dspy.Prediction(answer=answer)

    left: list[int] = []

    class AfterSeed:
        def on_valset_evaluated(self, event: Any) -> None:
            gc.collect()
            left.append(sum(one() is not None for one in inputs))

    with dspy.context(disable_history=True):
        compiled(60, Asks(), gepa_kwargs={"callbacks": [AfterSeed()]}, schedule="lockstep")
    assert left[0] == 0, "the seed's validation has ended, and no trace of it is held"


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_histories_and_the_users_trace_do_not_grow_with_the_run(schedule: Any) -> None:
    judge = dspy.Predict("answer -> verdict")

    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        judge(answer=pred.answer)
        return digits(gold, pred)

    lm = fake_lm(lambda prompt: reply_for(prompt, answer=str(hashed(prompt) % 7), verdict="yes"))
    outer: list[Any] = []
    with dspy.context(lm=lm, trace=outer, max_history_size=20):
        compiled(100, metric=metric, schedule=schedule)
    assert len(lm.history) == 20
    assert len(judge.history) <= 20
    assert outer == []
