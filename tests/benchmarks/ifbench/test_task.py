"""The program's two stages, the metric's score and feedback, and the benchmarks' workload."""

from __future__ import annotations

import dspy
import pytest
from dspy.utils import DummyLM
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.methods import Workload
from benchmarks.workloads.ifbench import (
    VERIFIERS,
    AnswerThenEnsure,
    Splits,
    feedback,
    metric,
    score_test,
    verify,
    workload,
)  # fmt: skip
from dspy_flashevolve import AsyncGEPA
from tests.benchmarks.ifbench.cases import CASES
from tests.fakes import fake_lm, reply_for

GOLD = dspy.Example(
    prompt="Say something.",
    kinds=["punctuation:no_comma", "count:numbers", "startend:quotation"],
    arguments=[{}, {"N": 0.0}, {}],
).with_inputs("prompt")


def test_the_program_answers_and_then_ensures_the_constraints() -> None:
    with dspy.context(lm=DummyLM([{"draft": "First, try"}, {"response": "Try first"}])):
        prediction = AnswerThenEnsure()(prompt=GOLD.prompt)
    assert prediction.draft == "First, try"
    assert prediction.response == "Try first"


def test_the_optimizer_sees_two_predictors() -> None:
    assert [name for name, _ in AnswerThenEnsure().named_predictors()] == ["answer", "ensure"]


def test_the_score_is_the_share_that_is_met_loosely() -> None:
    result = metric(GOLD, dspy.Prediction(response="Sure, 1:\nRun and jump"))
    assert result.score == pytest.approx(2 / 3)
    assert result.feedback.splitlines() == [
        "Not met: Wrap the whole response in double quotation marks.",
        "Met only without the first or last line or the asterisks: Use no comma.",
        "Met only without the first or last line or the asterisks: Include exactly 0 numbers, in digits.",
        "Strictly, 0 of 3 constraints are met.",
    ]


def test_the_feedback_of_a_good_response_names_nothing() -> None:
    result = metric(GOLD, dspy.Prediction(response='"Run and jump"'))
    assert result.score == 1.0
    assert result.feedback == "Every constraint of the prompt is met."


@pytest.mark.parametrize("prediction", [dspy.Prediction(), dspy.Prediction(response=None), None])
def test_no_response_meets_nothing(prediction: dspy.Prediction | None) -> None:
    assert metric(GOLD, prediction).score == 0.0


@given(data=st.data(), kinds=st.lists(st.sampled_from(sorted(CASES)), min_size=1, max_size=4, unique=True))
@settings(max_examples=60, deadline=None)
def test_the_feedback_names_exactly_the_constraints_that_are_not_met(data: st.DataObject, kinds: list[str]) -> None:
    cases = [CASES[kind](data.draw) for kind in kinds]
    text = data.draw(st.sampled_from([text for case in cases for text in (case.good, case.bad)]))
    gold = dspy.Example(kinds=kinds, arguments=[case.arguments for case in cases])
    verdict = verify(text, gold.kinds, gold.arguments)
    described = [VERIFIERS[kind].describe(**case.arguments) for kind, case in zip(kinds, cases, strict=True)]
    result = metric(gold, dspy.Prediction(response=text))
    named = [line.removeprefix("Not met: ") for line in result.feedback.splitlines() if line.startswith("Not met: ")]
    assert named == [text for text, met in zip(described, verdict.loose, strict=True) if not met]
    assert result.feedback == feedback(verdict)
    assert result.score == pytest.approx(1 - len(named) / len(kinds))


def test_test_predictions_have_four_accuracies() -> None:
    predictions = [dspy.Prediction(response='"Run and jump"'), None]
    found = score_test([GOLD, GOLD], predictions)
    assert (found.prompt_strict, found.prompt_loose) == (0.5, 0.5)
    assert (found.instruction_strict, found.instruction_loose) == (0.5, 0.5)


def test_the_workload_has_the_splits_and_the_models() -> None:
    task, reflection = DummyLM([]), DummyLM([])
    made = workload(Splits([GOLD], [GOLD, GOLD], []), task, reflection)
    assert isinstance(made, Workload)
    assert (len(made.trainset), len(made.valset)) == (1, 2)
    assert isinstance(made.program(), AnswerThenEnsure)
    assert (made.task_lm, made.reflection_lm, made.metric) == (task, reflection, metric)


def test_an_optimizer_finds_an_instruction_that_meets_the_constraint() -> None:
    def answer(prompt: str) -> str:
        said = "yes no comma" if "without commas" in prompt else "yes, a comma"
        return reply_for(prompt, draft="yes", response=said)

    gold = dspy.Example(prompt="Say yes.", kinds=["punctuation:no_comma"], arguments=[{}]).with_inputs("prompt")
    made = workload(
        Splits([gold] * 3, [gold] * 3, []),
        fake_lm(answer),
        fake_lm(lambda prompt: reply_for(prompt, new_instruction="Write without commas.")),
    )
    optimizer = AsyncGEPA(metric=made.metric, max_metric_calls=30, reflection_lm=made.reflection_lm, num_threads=2)
    with dspy.context(lm=made.task_lm):
        best = optimizer.compile(made.program(), trainset=made.trainset, valset=made.valset)
        assert score_test([gold], [best(prompt=gold.prompt)]).prompt_strict == 1.0
