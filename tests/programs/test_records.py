"""Rollouts as JSON, and back; fingerprints that are the same in every process."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import dspy
import pytest
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from gepa.core.data_loader import ListDataLoader
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from dspy_flashevolve.engine.rollouts import Rollout
from dspy_flashevolve.programs.fingerprints import differences, fingerprints_of
from dspy_flashevolve.programs.records import (
    Asked,
    InexactError,
    ReplyText,
    RolloutRecords,
    decoded,
    encoded,
    output_in,
    output_text,
)
from tests.fakes import Chain, digits, examples


class City(BaseModel):
    name: str
    people: int = 0


class Thing:
    """Nothing that JSON knows."""


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(plain)
def test_what_json_and_python_share_comes_back_equal_with_its_types(value: Any) -> None:
    import json

    back = decoded(json.loads(json.dumps(encoded(value))))
    assert back == value
    assert repr(back) == repr(value)  # True is not 1, a tuple is no list


@pytest.mark.parametrize("value", [City(name="Ulm", people=3), dspy.Prediction(a=[1], city=City(name="Ulm"))])
def test_models_and_predictions_come_back(value: Any) -> None:
    back = decoded(encoded(value))
    assert type(back) is type(value)
    assert (back.toDict() if isinstance(back, dspy.Prediction) else back) == (
        value.toDict() if isinstance(value, dspy.Prediction) else value
    )


def test_a_conversation_comes_back() -> None:
    history = dspy.History(messages=[{"question": "q", "answer": "a"}])
    assert decoded(encoded(history)) == history


def test_a_failed_prediction_comes_back() -> None:
    failed = FailedPrediction("no format", format_reward=0.0)
    assert decoded(encoded(failed)) == failed


@pytest.mark.parametrize("value", [Thing(), {1: "a"}, [Thing()], {"a": {2}}, b"bytes"])
def test_what_would_not_come_back_is_refused(value: Any) -> None:
    with pytest.raises(InexactError):
        encoded(value)


def test_a_model_that_is_defined_inside_a_function_is_refused() -> None:
    class Local(BaseModel):
        name: str

    with pytest.raises(InexactError):
        encoded(Local(name="x"))


def test_no_module_is_imported_by_a_name_in_a_file() -> None:
    with pytest.raises(InexactError, match="no model"):
        decoded({"m": ["antigravity", "City", {}]})
    assert "antigravity" not in sys.modules
    with pytest.raises(InexactError, match="no model"):
        decoded({"m": ["os", "system", {}]})


def traced(student: Chain, candidate: dict[str, str]) -> Rollout:
    """A rollout of the candidate, as the runner makes it."""
    program = student.deepcopy()
    trace: list[Any] = []
    for name, predictor in program.named_predictors():
        predictor.signature = predictor.signature.with_instructions(candidate[name])
        trace.append((predictor, {"question": "q"}, dspy.Prediction(answer="3")))
    prediction = dspy.Prediction(answer="3 3")
    score = dspy.Prediction(score=0.5, feedback="half")
    trajectory = {"example": None, "prediction": prediction, "trace": trace, "score": score}
    return Rollout(prediction, 0.5, {}, trajectory, 7)


def test_a_trace_comes_back_with_the_predictors_that_reflection_looks_for() -> None:
    student = Chain(2)
    candidate = {"steps[0]": "first", "steps[1]": "second"}
    records = RolloutRecords(student)
    rollout = traced(student, candidate)
    text = records.trace(candidate, rollout)
    assert text is not None
    example = examples("q", 1)[0]
    back = records.read_trace(candidate, example, text)
    assert back["example"] is example
    assert back["prediction"].toDict() == rollout.output.toDict()
    assert back["score"].feedback == "half"
    for (predictor, inputs, output), (theirs, their_inputs, their_output) in zip(
        back["trace"], rollout.trajectory["trace"], strict=True
    ):
        assert predictor.signature.equals(theirs.signature)
        assert (inputs, output.toDict()) == (their_inputs, their_output.toDict())


def test_a_trace_with_a_value_that_json_does_not_have_is_not_kept_but_the_output_is() -> None:
    student, candidate = Chain(1), {"steps[0]": "first"}
    rollout = traced(student, candidate)
    rollout.trajectory["trace"][0][1]["tool"] = Thing()
    rollout.output.tool = Thing()
    records = RolloutRecords(student)
    assert records.trace(candidate, rollout) is None
    kept = output_in(output_text(rollout.output))
    assert kept.answer == "3 3"
    assert "Thing" in kept.tool


def test_a_trace_of_a_predictor_that_the_student_does_not_have_is_not_kept() -> None:
    rollout = traced(Chain(1), {"steps[0]": "first"})
    assert RolloutRecords(Chain(1)).trace({"steps[0]": "another"}, rollout) is None


def test_a_failed_example_has_no_trace_and_stays_known_as_that() -> None:
    records = RolloutRecords(Chain(1))
    assert records.trace({"steps[0]": "x"}, Rollout(None, 0.0)) == "null"
    assert records.read_trace({"steps[0]": "x"}, None, "null") is None


def prints(student: Any = None, train: Any = None, metric: Any = digits) -> dict[str, str]:
    student = student or Chain(2)
    seeds = {name: predictor.signature.instructions for name, predictor in student.named_predictors()}
    loader = ListDataLoader(train or examples("t", 4))
    return fingerprints_of(student, seeds, loader, loader, metric)


def test_equal_parts_have_equal_fingerprints_in_another_process() -> None:
    code = "import json; from tests.programs.test_records import prints; print(json.dumps(prints()))"
    import json

    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(other.stdout) == prints()


def test_an_example_with_an_object_in_it_has_the_same_fingerprint_wherever_it_lies() -> None:
    first, second = ([dspy.Example(question="q", thing=Thing()).with_inputs("question")] for _ in range(2))
    assert prints(train=first) == prints(train=second)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (prints(Chain(1)), ["predictor 'steps[1]' is gone", "seed text of 'steps[1]' is gone"]),
        (prints(train=examples("t", 5)), ["trainset was", "valset was"]),
        (prints(metric=Thing()), ["metric was digits, is Thing"]),
    ],
)
def test_what_differs_is_named(other: dict[str, str], named: list[str]) -> None:
    found = differences(prints(), other)
    assert len(found) == len(named)
    assert all(text.startswith(name) for text, name in zip(found, named, strict=True))


def test_a_field_that_is_described_otherwise_is_another_predictor() -> None:
    changed = Chain(2)
    changed.steps[0].signature = changed.steps[0].signature.with_updated_fields("answer", desc="in one word")
    assert differences(prints(), prints(changed)) == ["predictor 'steps[0]' has changed"]


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no repr")


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    "value",
    [b"\xff\xfe", {(1, 2): "tuple key"}, Unprintable(), CYCLE, [dspy.Prediction(answer=Unprintable())]],
    ids=["bytes", "key", "repr", "cycle", "inside"],
)
def test_an_output_that_cannot_be_written_down_costs_the_run_nothing(value: Any) -> None:
    records = RolloutRecords(Chain(1))
    for output in (value, dspy.Prediction(answer=value)):
        assert output_in(output_text(output)) is not None
        trajectory = {"trace": [], "prediction": output, "score": 1.0}
        records.trace({"steps[0]": "x"}, Rollout(output, 1.0, {}, trajectory))
        ReplyText("0").write(Asked(output))
