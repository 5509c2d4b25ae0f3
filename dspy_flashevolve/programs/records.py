"""Rollouts as JSON, and back: what the journal keeps of an output and of a trace.

Outputs are kept for people and for gepa's best outputs; what JSON does not have is kept as text. Traces are kept to be
reflected on after a crash, so they come back equal or not at all.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from typing import Any, cast

import dspy
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from dspy_flashevolve.engine.flights import Rollout

REMEMBERED = 64
"""Candidates whose predictors are kept ready."""


class InexactError(Exception):
    """The value would not come back as it is."""


class RolloutRecords:
    """Writes the rollouts of one student down, and reads them.

    Args:
        student: the program; its predictors are the steps of traces.
        code: whether candidates change code, whose predictors are not known by name. Their traces are not kept.
    """

    def __init__(self, student: dspy.Module, code: bool = False) -> None:
        self._student = student
        self._code = code
        self._predictors: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}

    def output(self, rollout: Rollout) -> str:
        """What the program returned."""
        try:
            return json.dumps(encoded(rollout.output))
        except InexactError:
            value: Any = rollout.output
            fields = dict(value.items()) if isinstance(value, dspy.Prediction) else {"text": str(value)}
            plain: dict[str, Any] = to_jsonable_python(fields, fallback=repr, inf_nan_mode="strings")
            return json.dumps({"p": {name: encoded(one) for name, one in plain.items()}})

    def trace(self, candidate: dict[str, str], rollout: Rollout) -> str | None:
        """What reflection reads of a rollout, "null" where there is nothing to read; None where it cannot be kept."""
        if rollout.trajectory is None:
            return "null"
        if self._code:
            return None
        known = self._of(candidate)
        try:
            steps = [
                [_name_of(predictor, known), encoded(inputs), encoded(output)]
                for predictor, inputs, output in rollout.trajectory["trace"]
            ]
            kept = {
                "prediction": encoded(rollout.trajectory["prediction"]),
                "score": encoded(rollout.trajectory["score"]),
            }
            return json.dumps({**kept, "trace": steps})
        except (InexactError, KeyError, TypeError, ValueError):
            return None

    def read_output(self, text: str | None) -> Any:
        """An output, as far as it was kept."""
        return None if text is None else decoded(json.loads(text))

    def read_trace(self, candidate: dict[str, str], example: Any, text: str) -> Any:
        """A trajectory, as reflection reads it.

        Raises:
            InexactError: it was kept of a program that had other predictors or models than this one.
        """
        kept = json.loads(text)
        if kept is None:
            return None
        known = self._of(candidate)
        try:
            steps = [(known[name], decoded(inputs), decoded(output)) for name, inputs, output in kept["trace"]]
        except KeyError as error:
            raise InexactError(f"no predictor {error}") from error
        return {
            "example": example,
            "prediction": decoded(kept["prediction"]),
            "trace": steps,
            "score": decoded(kept["score"]),
        }

    def _of(self, candidate: dict[str, str]) -> dict[str, Any]:
        """The student's predictors with a candidate's instructions."""
        key = tuple(sorted(candidate.items()))
        if key not in self._predictors:
            found: dict[str, Any] = {}
            predictors: list[tuple[str, Any]] = self._student.named_predictors()
            for name, predictor in predictors:
                found[name] = copy.copy(predictor)
                if name in candidate:
                    found[name].signature = predictor.signature.with_instructions(candidate[name])
            while len(self._predictors) >= REMEMBERED:
                del self._predictors[next(iter(self._predictors))]
            self._predictors[key] = found
        return self._predictors[key]


def _name_of(predictor: Any, known: dict[str, Any]) -> str:
    for name, other in known.items():
        if predictor.signature.equals(other.signature):
            return name
    raise InexactError("a predictor that the student does not have")


def encoded(value: Any) -> Any:
    """A value as JSON that :func:`decoded` turns into an equal one.

    >>> decoded(encoded({"a": (1, [None, "b"])}))
    {'a': (1, [None, 'b'])}

    Raises:
        InexactError: its type is none of JSON's, and no prediction, pydantic model or tuple.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"x": repr(value)}
    if type(value) is list:
        return [encoded(one) for one in cast("list[Any]", value)]
    if type(value) is tuple:
        return {"t": [encoded(one) for one in cast("tuple[Any, ...]", value)]}
    if type(value) is dict and all(type(name) is str for name in cast("dict[Any, Any]", value)):
        return {"d": {name: encoded(one) for name, one in cast("dict[str, Any]", value).items()}}
    if isinstance(value, FailedPrediction):
        return {"f": [value.completion_text, value.format_reward]}
    if isinstance(value, dspy.Prediction):
        return {"p": {str(name): encoded(one) for name, one in value.items()}}
    if isinstance(value, BaseModel) and _model_named(*(name := _name(type(value)))) is type(value):
        return {"m": [*name, json.loads(value.model_dump_json())]}
    raise InexactError(f"a {type(value).__name__}")


def decoded(value: Any) -> Any:
    """What :func:`encoded` was given.

    Raises:
        InexactError: a model that is not there any more, or is another one now.
    """
    if isinstance(value, list):
        return [decoded(one) for one in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    [(kind, kept)] = cast("dict[str, Any]", value).items()
    if kind == "x":
        return float(kept)
    if kind == "t":
        return tuple(decoded(one) for one in kept)
    if kind == "d":
        return {name: decoded(one) for name, one in kept.items()}
    if kind == "f":
        return FailedPrediction(*kept)
    if kind == "p":
        return dspy.Prediction(**{name: decoded(one) for name, one in kept.items()})
    module, qualified, fields = kept
    model = _model_named(module, qualified)
    if model is None:
        raise InexactError(f"no model {module}.{qualified} is imported")
    try:
        return model.model_validate(fields)
    except ValueError as error:
        raise InexactError(str(error)) from error


def _name(model: type) -> tuple[str, str]:
    return model.__module__, model.__qualname__


def _model_named(module: str, qualified: str) -> type[BaseModel] | None:
    """A pydantic model that the program has imported already; nothing is imported by a name that stands in a file."""
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None
