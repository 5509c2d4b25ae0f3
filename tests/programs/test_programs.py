"""Running programs: copies, loop or thread, metrics, failures as dspy.GEPA counts them, faults of the provider."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import dspy
import pytest
from dspy.clients.base_lm import BaseLM
from dspy.utils.dummies import DummyLM

from dspy_flashevolve.engine.loop import Threads
from dspy_flashevolve.engine.requests import Rollout
from dspy_flashevolve.gepa.evaluate import as_batch
from dspy_flashevolve.programs.building import StudentAdapter
from dspy_flashevolve.programs.metric import Metric
from dspy_flashevolve.programs.placement import answers_asynchronously, runs_on_loop
from dspy_flashevolve.programs.program import ProgramRunner
from dspy_flashevolve.programs.usage import rates_of
from tests.fakes import Chain, digits, examples, fake_lm, hashed, reply_for, task_lm

# Loop or thread


class SyncOnlyLM(BaseLM):
    def forward(self, prompt: Any = None, messages: Any = None, **kwargs: Any) -> Any:
        raise NotImplementedError


def test_a_patched_forward_and_an_lm_that_cannot_be_awaited_run_in_a_thread() -> None:
    patched, with_own_lm = Chain(), Chain()
    patched.forward = lambda question: dspy.Prediction(answer="patched")  # type: ignore[method-assign]
    with_own_lm.set_lm(SyncOnlyLM("m"))
    assert not runs_on_loop(patched)
    assert not runs_on_loop(with_own_lm)
    with dspy.context(lm=task_lm(asynchronous=False)):
        assert not runs_on_loop(Chain())
    lms = dspy.LM("openai/gpt-4o-mini"), DummyLM([{"answer": "x"}]), SyncOnlyLM("m")
    assert [answers_asynchronously(lm) for lm in lms] == [True, True, False]


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


class Tracking(Chain):
    """Looks at what its own call has used."""

    async def aforward(self, question: str) -> dspy.Prediction:
        with dspy.track_usage() as tracker:
            prediction = await super().aforward(question)
        assert tracker.get_total_tokens()["fake/model"]["total_tokens"] == 7
        return prediction


@pytest.mark.parametrize("program", [Chain(), Tracking()])
def test_each_call_is_counted_once_for_its_rollout_and_for_the_users_tracker(program: dspy.Module) -> None:
    with dspy.track_usage() as tracker:
        rollouts = roll_out(adapter_for(program, digits), digits, examples("q", 3), True)
    assert [rollout.tokens for rollout in rollouts] == [7] * 3
    assert tracker.get_total_tokens()["fake/model"]["total_tokens"] == 21


def test_predictions_carry_their_usage_where_the_user_asked_for_it() -> None:
    with dspy.context(track_usage=True):
        (rollout,) = roll_out(adapter_for(Chain(), digits), digits, examples("q", 1), True)
    assert rollout.output.get_lm_usage()["fake/model"]["total_tokens"] == 7


def test_a_fine_tuned_model_has_the_price_that_litellm_finds_for_it() -> None:
    import litellm

    name = "openai/ft:gpt-4o-mini-2024-07-18:org::id"
    expected = litellm.cost_per_token(name, prompt_tokens=1_000_000, completion_tokens=1_000_000)
    rates_of.cache_clear()
    assert rates_of(name) == pytest.approx((expected[0] / 1e6, expected[1] / 1e6))
    assert rates_of("nobody/knows-this-model") is None
