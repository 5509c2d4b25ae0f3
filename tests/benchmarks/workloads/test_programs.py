"""What every workload keeps: one suite for all of them."""

from __future__ import annotations

import asyncio

import dspy
import pytest

from benchmarks.workloads.definition import NamedWorkload
from benchmarks.workloads.registry import workload_named
from tests.benchmarks.workloads.samples import NAMES, REAL_NAMES, right_outputs, wrong_outputs
from tests.fakes import fake_lm, reply_for


@pytest.fixture(params=NAMES)
def workload(request: pytest.FixtureRequest) -> NamedWorkload:
    """Each workload, small."""
    if request.param == "hotpotqa":
        pytest.importorskip("bm25s")
    return workload_named(request.param, train=4, val=4, test=4)


def _answer(workload: NamedWorkload, example: dspy.Example, outputs: dict[str, str]) -> dspy.Prediction:
    """The program's prediction when the model writes these outputs."""
    language_model = fake_lm(lambda prompt: reply_for(prompt, reasoning="So.", **outputs))
    with dspy.context(lm=language_model):
        prediction = workload.program()(**example.inputs())
        awaited = asyncio.run(workload.program().acall(**example.inputs()))
    assert prediction.toDict() == awaited.toDict()
    return prediction


def test_each_predictor_is_known_with_its_output(workload: NamedWorkload) -> None:
    assert [name for name, _ in workload.program().named_predictors()] == list(workload.outputs)
    prediction = _answer(workload, workload.trainset[0], wrong_outputs(workload.name))
    assert set(workload.outputs.values()) <= set(prediction.keys())


def test_the_right_answer_scores_1_and_is_called_right(workload: NamedWorkload) -> None:
    for example in (*workload.trainset, *workload.valset, *workload.testset):
        prediction = _answer(workload, example, right_outputs(workload.name, example))
        verdict = workload.metric(example, prediction, None, None, None)
        assert (verdict.score, "wrong" in verdict.feedback, "miss" in verdict.feedback) == (1, False, False)


def test_a_wrong_answer_scores_0_and_the_feedback_has_the_right_one(workload: NamedWorkload) -> None:
    example = workload.trainset[0]
    verdict = workload.metric(example, _answer(workload, example, wrong_outputs(workload.name)))
    right = {
        "hotpotqa": [example.get("answer")],
        "hover": [example.get("label")],
        "finer": str(example.get("target")).split(","),
    }.get(workload.name)
    wanted = right or list(right_outputs(workload.name, example).values())
    assert verdict.score == 0
    assert all(part.lstrip("0") in verdict.feedback for part in [*wanted, *example.get("titles", [])])


def test_a_program_that_left_nothing_scores_0(workload: NamedWorkload) -> None:
    assert workload.metric(workload.trainset[0], dspy.Prediction()).score == 0


@pytest.mark.parametrize("name", REAL_NAMES)
def test_the_right_answers_of_the_real_rows_score_1(name: str, real_rows: object) -> None:
    workload = workload_named(name)
    for example in (*workload.trainset, *workload.valset, *workload.testset):
        assert workload.metric(example, dspy.Prediction(**right_outputs(name, example))).score == 1
