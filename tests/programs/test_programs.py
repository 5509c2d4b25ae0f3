"""Running programs: copies, loop or thread, metrics, failures as dspy.GEPA counts them, faults of the provider."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import dspy
import pytest
from dspy.clients.base_lm import BaseLM
from dspy.utils.dummies import DummyLM
from dspy.utils.exceptions import ContextWindowExceededError, LMAuthError, LMRateLimitError, LMServerError

from dspy_flashevolve.engine.errors import ConfigurationError, RunAbortedError, TransientError
from dspy_flashevolve.engine.loop import Threads
from dspy_flashevolve.engine.rollouts import Rollout
from dspy_flashevolve.gepa.evaluate import as_batch
from dspy_flashevolve.programs.building import StudentAdapter
from dspy_flashevolve.programs.faults import raise_provider_fault
from dspy_flashevolve.programs.metric import Metric, check_metric
from dspy_flashevolve.programs.placement import answers_asynchronously, runs_on_loop
from dspy_flashevolve.programs.program import ProgramRunner
from tests.fakes import Chain, digits, examples, fake_lm, hashed, reply_for, task_lm

# Loop or thread


class OnlyForward(dspy.ChainOfThought):
    def forward(self, **inputs: Any) -> Any:
        return dspy.Prediction(answer="own")


class SyncOnlyLM(BaseLM):
    def forward(self, prompt: Any = None, messages: Any = None, **kwargs: Any) -> Any:
        raise NotImplementedError


def test_a_program_with_its_own_aforward_runs_on_the_loop() -> None:
    assert runs_on_loop(Chain())
    assert runs_on_loop(dspy.ChainOfThought("question -> answer"))


def test_a_program_that_overrides_only_forward_runs_in_a_thread() -> None:
    assert not runs_on_loop(OnlyForward("question -> answer"))


def test_a_program_whose_forward_was_patched_runs_in_a_thread() -> None:
    program = Chain()
    program.forward = lambda question: dspy.Prediction(answer="patched")  # type: ignore[method-assign]
    assert not runs_on_loop(program)


def test_a_program_runs_in_a_thread_when_an_lm_cannot_be_awaited() -> None:
    with dspy.context(lm=task_lm(asynchronous=False)):
        assert not runs_on_loop(Chain())
    program = Chain()
    program.set_lm(SyncOnlyLM("m"))
    assert not runs_on_loop(program)


def test_which_lms_answer_asynchronously() -> None:
    assert answers_asynchronously(dspy.LM("openai/gpt-4o-mini"))
    assert answers_asynchronously(DummyLM([{"answer": "x"}]))
    assert not answers_asynchronously(SyncOnlyLM("m"))


# Metrics


def test_a_metric_with_the_wrong_signature_is_refused_with_what_it_has() -> None:
    with pytest.raises(TypeError, match=r"must accept five arguments.*\(gold, pred\) does not"):
        check_metric(lambda gold, pred: 1.0)
    with pytest.raises(ConfigurationError, match="metric is 5, expected a function"):
        check_metric(5)  # type: ignore[arg-type]


def required(gold: Any, pred: Any, trace: Any, pred_name: Any, pred_trace: Any) -> float:
    return 0.25


async def awaited(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> float:
    await asyncio.sleep(0)
    return 0.5


class CallableMetric:
    async def __call__(
        self, gold: Any, pred: Any, trace: Any = None, name: Any = None, pred_trace: Any = None
    ) -> float:
        return 0.75


@pytest.mark.parametrize(("function", "score"), [(required, 0.25), (awaited, 0.5), (CallableMetric(), 0.75)])
def test_sync_and_coroutine_metrics_score_and_give_feedback(function: Any, score: float) -> None:
    async def main() -> tuple[Any, Any]:
        threads = Threads(2, "metric")
        metric = Metric(function, threads)
        try:
            return await metric.score(None, None), await metric.feedback(None, None, None, "p", None)
        finally:
            threads.close()

    assert asyncio.run(main()) == (score, score)


def test_a_sync_metric_does_not_hold_up_the_loop() -> None:
    async def main() -> set[str]:
        threads, seen = Threads(1, "metric"), set[str]()

        def metric(gold: Any, pred: Any, *rest: Any) -> float:
            seen.add(threading.current_thread().name)
            return 1.0

        await Metric(metric, threads).score(None, None)
        threads.close()
        return seen

    assert threading.main_thread().name not in asyncio.run(main())


# Rollouts, beside dspy's own evaluation


class Faulty(Chain):
    """Crashes on some questions."""

    def forward(self, question: str) -> dspy.Prediction:
        if hashed(question) % 4 == 0:
            raise ValueError("the program broke")
        return super().forward(question)

    async def aforward(self, question: str) -> dspy.Prediction:
        if hashed(question) % 4 == 0:
            raise ValueError("the program broke")
        return await super().aforward(question)


def unreliable(prompt: str) -> str:
    kind = hashed(prompt) % 3
    if kind == 0:
        return "no field in sight"
    return reply_for(prompt, answer=str(hashed(prompt) % 7))


def picky(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
    if hashed(gold.question) % 7 == 0:
        raise KeyError("the metric broke")
    return digits(gold, pred) if hashed(gold.question) % 2 else digits(gold, pred).score


def adapter_for(program: dspy.Module, metric: Any) -> StudentAdapter:
    return StudentAdapter(program, metric, feedback_map={}, failure_score=-0.5, num_threads=1, rng=random.Random(0))


def roll_out(adapter: StudentAdapter, metric: Any, batch: list[Any], capture: bool) -> list[Rollout]:
    candidate = {name: p.signature.instructions for name, p in adapter.student.named_predictors()}

    async def main() -> list[Rollout]:
        threads = Threads(2, "rollouts")
        runner = ProgramRunner(adapter, Metric(metric, threads), threads)
        try:
            return [await runner.rollout(candidate, example, capture_traces=capture) for example in batch]
        finally:
            threads.close()

    return asyncio.run(main())


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("capture", [True, False])
def test_rollouts_give_the_outputs_scores_and_traces_of_dspys_adapter(capture: bool, asynchronous: bool) -> None:
    batch = examples("q", 40)
    with dspy.context(lm=fake_lm(unreliable, asynchronous=asynchronous)):
        adapter = adapter_for(Faulty(2), picky)
        candidate = {name: p.signature.instructions for name, p in adapter.student.named_predictors()}
        expected = adapter.evaluate(batch, candidate, capture_traces=capture)
        ours = as_batch(roll_out(adapter, picky, batch, capture))
    assert ours.scores == expected.scores
    assert [str(one) for one in ours.outputs] == [str(one) for one in expected.outputs]
    assert {-0.5} < set(ours.scores), "some must fail and some succeed"
    if capture:
        assert expected.trajectories is not None
        assert ours.trajectories is not None
        assert [t["example_ind"] for t in ours.trajectories] == [t["example_ind"] for t in expected.trajectories]
        for one, theirs in zip(ours.trajectories, expected.trajectories, strict=True):
            assert [str(step[1:]) for step in one["trace"]] == [str(step[1:]) for step in theirs["trace"]]
            assert str(one["score"]) == str(theirs["score"])


def test_each_rollout_counts_its_own_tokens_and_the_users_tracker_gets_them_all() -> None:
    with dspy.track_usage() as tracker:
        rollouts = roll_out(adapter_for(Chain(2), digits), digits, examples("q", 3), True)
    assert [rollout.tokens for rollout in rollouts] == [14] * 3
    assert tracker.get_total_tokens()["fake/model"]["total_tokens"] == 42


def test_predictions_carry_their_usage_where_the_user_asked_for_it() -> None:
    with dspy.context(track_usage=True):
        (rollout,) = roll_out(adapter_for(Chain(), digits), digits, examples("q", 1), True)
    assert rollout.output.get_lm_usage()["fake/model"]["total_tokens"] == 7


# Faults


@pytest.mark.parametrize("error", [LMRateLimitError("slow down", retry_after=7.0), LMServerError("503")])
def test_a_transient_fault_of_the_provider_asks_for_a_retry(error: Exception) -> None:
    with pytest.raises(TransientError) as caught:
        raise_provider_fault(error)
    assert caught.value.retry_after_seconds == getattr(error, "retry_after", None)


def test_a_rejected_key_aborts_the_run() -> None:
    with pytest.raises(RunAbortedError, match="Check the API key"):
        raise_provider_fault(LMAuthError("bad key"))


@pytest.mark.parametrize("error", [ContextWindowExceededError(message="too long"), ValueError("the program's own")])
def test_what_the_candidate_caused_is_no_fault_of_the_provider(error: Exception) -> None:
    raise_provider_fault(error)  # returns: the rollout is scored as a failure


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_rate_limited_rollout_is_not_scored(asynchronous: bool) -> None:
    def limited(prompt: str) -> str:
        raise LMRateLimitError("429")

    with dspy.context(lm=fake_lm(limited, asynchronous=asynchronous)), pytest.raises(TransientError):
        roll_out(adapter_for(Chain(), digits), digits, examples("q", 1), True)


def test_what_a_judge_of_the_metric_reads_and_writes_counts_as_the_rollouts() -> None:
    judge = fake_lm(lambda prompt: "fine")

    def judged(gold: Any, pred: Any, *rest: Any) -> Any:
        judge("is it right?")
        return digits(gold, pred)

    with dspy.context(lm=task_lm()):
        [plain] = roll_out(adapter_for(Chain(1), digits), digits, examples("q", 1), True)
        [rollout] = roll_out(adapter_for(Chain(1), judged), judged, examples("q", 1), True)
    assert (plain.tokens, rollout.tokens) == (7, 14)


def test_a_metric_whose_judge_is_rate_limited_is_not_a_score_of_the_candidate() -> None:
    def judged(gold: Any, pred: Any, *rest: Any) -> float:
        raise LMRateLimitError("429")

    with pytest.raises(TransientError):
        roll_out(adapter_for(Chain(), judged), judged, examples("q", 1), True)
