"""Rollouts as JSON, and back; fingerprints that are the same in every process."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import cached_property
from typing import Any
from zoneinfo import ZoneInfo

import dspy
import numpy
import pytest
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from dspy.teleprompt.gepa.gepa_utils import ScoreWithFeedback
from gepa.core.data_loader import ListDataLoader
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_serializer

from dspy_flashevolve.engine.requests import Rollout
from dspy_flashevolve.programs.fingerprints import fingerprints_of
from dspy_flashevolve.programs.records import (
    InexactError,
    ModuleReply,
    ReplyText,
    RolloutRecords,
    from_json,
    is_readable,
    output_in,
    output_text,
    to_json,
)
from tests.fakes import Chain, digits, examples


class City(BaseModel):
    name: str
    people: int = 0


class Thing:
    """Nothing that JSON knows."""


class Colour(Enum):
    RED = "r"
    BLUE = "b"


class Big(City):
    """A subclass, which a field may hold that is typed as its base."""

    mayors: list[str] = []


class Odd(BaseModel):
    """Whatever pydantic's own JSON changes, or leaves out."""

    model_config = ConfigDict(extra="allow", str_strip_whitespace=True)
    aliased: int = Field(alias="theAlias")
    hidden: str = Field(default="", exclude=True)
    ratio: float = 0.0
    city: City | None = None
    _noted: list[int] = PrivateAttr(default_factory=list[int])

    @field_serializer("ratio")
    def rounded(self, ratio: float) -> str:
        return f"about {ratio:.1f}"


@dataclass(frozen=True)
class Point:
    x: float
    label: str = ""


def odd(number: int, hidden: str, ratio: float, city: City | None, more: Any, noted: list[int]) -> Odd:
    model = Odd(theAlias=number, hidden=hidden, ratio=ratio, city=city, more=more)
    model._noted.extend(noted)
    return model


def completed(answers: list[str]) -> dspy.Prediction:
    return dspy.Prediction.from_completions({"answer": answers})


def unfolded(value: Any) -> Any:
    """Without the mark of the second pass through an hour, which ISO 8601 does not have: such a time is refused."""
    return value.replace(fold=0)


cities = st.builds(City, name=st.text(), people=st.integers()) | st.builds(Big, name=st.text())
images = st.binary(min_size=1).map(lambda data: dspy.Image("data:image/png;base64," + base64.b64encode(data).decode()))
audio = st.builds(dspy.Audio, data=st.text(), audio_format=st.sampled_from(["wav", "mp3"]))
hashable = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.sampled_from(Colour)
    | st.dates() | st.datetimes().map(unfolded) | st.times().map(unfolded)
    | st.timedeltas() | st.decimals(allow_nan=False, allow_infinity=False) | st.uuids()
    | st.builds(Point, x=st.floats(), label=st.text())
)  # fmt: skip
leaves = (
    hashable | cities | images | audio | st.sets(hashable) | st.frozensets(hashable)
    | st.builds(FailedPrediction, completion_text=st.text(), format_reward=st.floats())
    | st.text().map(lambda answer: completed([answer]))
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner) | st.dictionaries(hashable, inner)
        | inner.map(lambda value: dspy.Prediction(value=value))
        | inner.map(lambda value: ScoreWithFeedback(score=0.5, feedback=value))
        | st.builds(odd, st.integers(), st.text(), st.floats(), st.none() | cities, inner, st.lists(st.integers()))
    ),
    max_leaves=12,
)  # fmt: skip


def told(value: Any) -> Any:
    """A value with the types of all that is in it, so that what is told of equal values is equal, nan included."""
    kind = type(value)
    if isinstance(value, BaseModel):
        hidden = value.__pydantic_extra__, value.__pydantic_private__, value.model_fields_set
        return kind, told(vars(value)), *map(told, hidden)
    if isinstance(value, dspy.Prediction):
        completions = value.completions
        several = completions is not None and len(completions) > 1
        return kind, told(dict(value.items())), told(dict(completions.items()) if several else None)
    if isinstance(value, dict):
        return kind, [(told(name), told(item)) for name, item in value.items()]
    if isinstance(value, (list, tuple)):
        return kind, [told(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return kind, sorted((told(item) for item in value), key=repr)
    return kind, repr(value)


@settings(max_examples=300, deadline=None)
@given(values)
def test_what_is_written_is_read_equal_with_the_types_of_all_that_is_in_it(value: Any) -> None:
    assert told(from_json(to_json(value))) == told(value)


def test_a_number_of_numpys_comes_back_as_an_equal_one_of_pythons() -> None:
    for number in (numpy.float64(0.5), numpy.float32(0.1), numpy.int32(3), numpy.bool_(True)):
        back = from_json(to_json(number))
        assert (back, type(back).__module__) == (number, "builtins")


def test_fields_that_a_class_computes_are_computed_again() -> None:
    value = Named(name="x")
    assert value.shouted == "X"
    assert from_json(to_json(value)).shouted == "X"


class Named(BaseModel):
    name: str

    @cached_property
    def shouted(self) -> str:
        return self.name.upper()


class Forgetful(dict[str, int]):
    """A class of JSON's kind that JSON would make another one of."""


class Setting(BaseModel):
    """It changes what it is given when it is set up again."""

    name: str

    def __getattribute__(self, name: str) -> Any:
        held = super().__getattribute__(name)
        return {"name": f"{held['name']}!"} if name == "__dict__" else held


def local_model() -> BaseModel:
    class Local(BaseModel):
        name: str

    return Local(name="x")


@pytest.mark.parametrize(
    "value",
    [Thing(), [Thing()], {"a": Thing()}, Forgetful(a=1), Setting(name="x"), datetime.now(ZoneInfo("Europe/Paris")),
     local_model(), completed(["a", "b"])],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_would_not_come_back_is_refused_when_it_is_written(value: Any) -> None:
    with pytest.raises(InexactError):
        to_json(value)


@pytest.mark.parametrize("name", ["antigravity:City", "os:system", "subprocess:Popen", "builtins:dict", "os", ":"])
def test_nothing_is_imported_or_made_by_a_name_in_a_file_but_data(name: str) -> None:
    for content in ({"": {}}, "A", []):
        with pytest.raises(InexactError):
            from_json(json.dumps({name: content}))
    assert "antigravity" not in sys.modules


def test_what_is_gone_or_has_other_fields_is_not_readable_any_more() -> None:
    student, candidate = Chain(1), {"steps[0]": "first"}
    rollout = traced(student, candidate)
    rollout.trajectory["trace"][0][1]["city"] = City(name="Ulm")
    text = RolloutRecords(student).trace(candidate, rollout)
    assert text is not None
    assert is_readable(text)
    for renamed in (text.replace(":City", ":Town"), text.replace('"people"', '"persons"')):
        assert renamed != text
        assert not is_readable(renamed)
    assert is_readable("null")


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
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(other.stdout) == prints()


def test_an_example_with_an_object_in_it_has_the_same_fingerprint_wherever_it_lies() -> None:
    first, second = ([dspy.Example(question="q", thing=Thing()).with_inputs("question")] for _ in range(2))
    assert prints(train=first) == prints(train=second)


def test_a_field_that_is_described_otherwise_is_another_predictor() -> None:
    changed = Chain(2)
    changed.steps[0].signature = changed.steps[0].signature.with_updated_fields("answer", desc="in one word")
    assert prints()["predictor 'steps[0]'"] != prints(changed)["predictor 'steps[0]'"]


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
        ReplyText("0").write(ModuleReply(output))
