"""Workloads under a simulated model: real rows and programs, a known optimum."""

from __future__ import annotations

import dspy
import pytest

from benchmarks.workloads.definition import NamedWorkload
from benchmarks.workloads.registry import workload_named
from benchmarks.workloads.simulated import simulated
from dspy_flashevolve import AsyncGEPA
from dspy_flashevolve.sim import HouseRules, ReplyModel
from dspy_flashevolve.sim.virtual import SimulatedModel, run
from tests.benchmarks.workloads.samples import NAMES

TASK = HouseRules(rules=12, rules_per_example=4, seed=1)


def _simulated(name: str) -> NamedWorkload:
    if name == "hotpotqa":
        pytest.importorskip("bm25s")
    return simulated(workload_named(name, train=6, val=6, test=3), TASK)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_gets_better_by_the_feedback(name: str) -> None:
    workload = _simulated(name)
    model = SimulatedModel(workload.profile("h100-qwen3-8b"), reply_model=TASK.reply_model)
    language_model = model.lm()
    optimizer = AsyncGEPA(
        metric=workload.metric, max_metric_calls=90, reflection_lm=language_model, num_threads=8, track_stats=True
    )
    with dspy.context(lm=language_model):
        best = run(lambda: optimizer.acompile(workload.program(), trainset=workload.trainset, valset=workload.valset))
    scores = best.detailed_results.val_aggregate_scores
    assert max(scores) > scores[0]
    assert model.requests["task"] >= 50 * len(workload.outputs)  # known answers are not asked for again
    assert model.requests["reflection"] > 0


def test_all_rules_in_place_reach_the_optimum() -> None:
    every_rule = HouseRules(rules=12, rules_per_example=4, seed=1, seed_rules=12, reply_model=ReplyModel(obedience=1))
    workload = simulated(workload_named("hover", train=2, val=6, test=0), every_rule)

    async def scores() -> list[float]:
        program = workload.program()
        predictions = [await program.acall(**example.inputs()) for example in workload.valset]
        return [workload.metric(gold, pred).score for gold, pred in zip(workload.valset, predictions, strict=True)]

    with dspy.context(lm=SimulatedModel(reply_model=every_rule.reply_model).lm()):
        assert run(scores) == [every_rule.optimum] * 6 == [1.0] * 6


def test_a_predictor_hears_of_its_own_rules_only() -> None:
    workload = _simulated("hover")
    gold = dspy.Example(required=TASK.all_rules()[:4])  # 1 and 3 belong to the hops, 2 and 4 to the verdict
    first, second, third, fourth = gold.required
    prediction = dspy.Prediction(hops=f"... {first.word}", verdict="")
    assert workload.metric(gold, prediction).score == 0.25
    assert workload.metric(gold, prediction).feedback == f"Missed: {second} {third} {fourth}"
    assert workload.metric(gold, prediction, None, "decompose").feedback == f"Missed: {third}"
    assert workload.metric(gold, prediction, None, "verdict.predict").feedback == f"Missed: {second} {fourth}"
