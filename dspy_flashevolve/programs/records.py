"""Rollouts and replies as JSON, and back: what the journal keeps.

Traces are kept to be reflected on after a crash, so they come back equal or not at all: a value is read again when it
is written, and refused where that gives another one. Its rollout is then paid again, if a run that was killed still has
to reflect on it. Outputs are kept for people and for gepa's best outputs; of these, what JSON does not have is text.

JSON's own values, but dicts, stand for themselves. All others have the form {"what it is": content}: pydantic writes
and reads dates, bytes and their like; an object of a data class is written by what it holds, and read without the
validators of its class, which would change it. Reading runs no code and imports nothing, and SQL can read the values.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from functools import cached_property, lru_cache
from inspect import getattr_static
from types import ModuleType
from typing import Any, Generic, TypeVar
from uuid import UUID

import dspy
import numpy
from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic_core import TzInfo, to_jsonable_python

from dspy_flashevolve.engine.requests import RequestCost, Rollout

T = TypeVar("T")
EXACT = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="strings")
LEAVES = {
    kind: TypeAdapter[Any](kind, config=EXACT)
    for kind in (float, bytes, date, datetime, time, timedelta, Decimal, UUID)
}
"""Type -> what writes and reads its values."""
NAMED_LEAVES = {kind.__name__: adapter for kind, adapter in LEAVES.items()}
OFFSETS = (type(None), timezone, TzInfo)
"""Zones of times that are an offset and no more, which is what is written."""
CONTAINERS: dict[str, Callable[[Iterable[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
}
OF_DSPY = {"_store", "_demos", "_input_keys", "_completions", "_lm_usage", "signature"}
"""What dspy's examples, predictions and completions keep in attributes."""
MODEL_STATE = ("__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
MAX_READY = 64
"""Candidates whose programs and predictors are kept ready; older ones are built again when they are needed. A round
number, above the 48 steps that are live at 64 slots: with half, programs of one generation push each other out; a
program is a few kB."""


class InexactError(Exception):
    """The value would not come back as it is."""


def to_json(value: Any) -> str:
    """Write a value as JSON text, and check that reading it gives an equal one; a number of numpy's becomes Python's.

    Raises:
        InexactError: it would come back as another one.
        Exception: it cannot be written, or what a class of the user's raises.
    """
    text = json.dumps(_encode(value))
    if json.dumps(_encode(from_json(text))) != text:
        raise InexactError(f"a {type(value).__name__} that is another one when it is read")
    return text


def from_json(text: str) -> Any:
    """Read the value that :func:`to_json` was given."""
    return _decode(json.loads(text))


def is_readable(trace: str) -> bool:
    """Whether the values in a trace that was kept can still be read: a class may be gone, or have other fields."""
    try:
        from_json(trace)
    except Exception:  # whatever a class of the user's raises
        return False
    return True


def _encode(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is list:
        return [_encode(item) for item in value]
    if kind is dict and all(type(name) is str for name in value):
        return {"": {name: _encode(item) for name, item in value.items()}}
    if kind is dict:
        return {"dict": [[_encode(name), _encode(item)] for name, item in value.items()]}
    if kind is tuple:
        return {"tuple": [_encode(item) for item in value]}
    if kind in (set, frozenset):
        return {kind.__name__: sorted((_encode(item) for item in value), key=json.dumps)}
    if kind in LEAVES:
        if type(getattr(value, "tzinfo", None)) not in OFFSETS:
            raise InexactError("a time whose zone is more than an offset")
        return {kind.__name__: LEAVES[kind].dump_python(value, mode="json")}
    if isinstance(value, numpy.generic):
        return _encode(value.item())
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _class_named(name) is not kind:
        raise InexactError(f"a {name}, which is another class than the one of that name")
    return {name: _encode(_state_of(value))}


def _decode(data: Any) -> Any:
    if isinstance(data, list):
        return [_decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    [(name, content)] = data.items()
    if not name:
        return {key: _decode(item) for key, item in content.items()}
    if name in NAMED_LEAVES:
        return NAMED_LEAVES[name].validate_json(json.dumps(content))
    if name in CONTAINERS:
        return CONTAINERS[name](_decode(content))
    kind, state = _class_named(name), _decode(content)
    if issubclass(kind, Enum):
        return kind[state]
    value = object.__new__(kind)
    fill(value, state)
    return value


def _state_of(value: Any) -> Any:
    """Return what an object holds, for :func:`fill`; the name of a member of an Enum."""
    kind, held = type(value), getattr(value, "__dict__", {})
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, BaseModel):
        attributes = {name: held[name] for name in kind.model_fields if name in held}
        return {"__dict__": attributes, **{name: getattr(value, name) for name in MODEL_STATE}}
    if isinstance(value, dspy.Prediction):
        if value.completions is not None and len(value.completions) > 1:
            raise InexactError("a prediction with several completions")
        return {name: held[name] for name in ("_store", "_lm_usage")}
    names = [field.name for field in fields(value)]
    if held.keys() - names:
        raise InexactError(f"a {kind.__name__} with more than its fields")
    return {name: getattr(value, name) for name in names}


def fill(value: Any, state: dict[str, Any]) -> None:
    """Give an object of a data class, made by ``object.__new__``, what it holds; no code of its class runs."""
    kind, attributes = type(value), state
    if isinstance(value, BaseModel):
        attributes, own = state["__dict__"], set(kind.model_fields)
        for name in [name for name in attributes if isinstance(getattr_static(kind, name, None), cached_property)]:
            del attributes[name]  # it is computed again
    else:
        own = {field.name for field in fields(value)} if is_dataclass(value) else OF_DSPY
    if attributes.keys() - own:
        raise InexactError(f"{kind.__module__}.{kind.__qualname__} has other fields now")
    if isinstance(value, BaseModel):
        BaseModel.__setstate__(value, {"__dict__": attributes, **{name: state.get(name) for name in MODEL_STATE}})
        return
    if isinstance(value, dspy.Prediction):
        vars(value).update(_completions=None, _lm_usage=None)
    for name, item in attributes.items():
        object.__setattr__(value, name, item)


def _class_named(name: str) -> Any:
    """Find a data class that the program has imported already."""
    kind = imported(*name.partition(":")[::2])
    is_data = isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, (dspy.Prediction, BaseModel, Enum)))
    if not is_data or hasattr(kind, "__del__"):
        raise InexactError(f"no class for data {name} is imported")
    return kind


def imported(module: str, qualified: str) -> Any:
    """Find what a name in a file stands for; None where nothing of that name is imported.

    Nothing is imported by it, and no code runs: a module may import, or do anything, where it is asked for a name.
    """
    held: Any = sys.modules.get(module)
    for part in qualified.split("."):
        held = vars(held).get(part) if isinstance(held, ModuleType | type) else None
    return held


@dataclass(frozen=True, slots=True)
class ModuleReply(Generic[T]):
    """What calling a module came to, and what it has cost, whether or not there is an answer.

    Args:
        answer: what was read; None when there is an error.
        error: what the module, or the reading of its answer, raised; a reply that did not fit the format, say.
        calls: LM calls that reported their usage, and at least one where any were made; 0 of what was read again.
        spent: tokens that the LMs reported, and dollars, 0 where no price is known or none was asked for.
    """

    answer: T | None
    error: Exception | None = None
    calls: int = 0
    spent: RequestCost = field(default_factory=lambda: RequestCost(0))


class RolloutRecords:
    """Writes the rollouts of one student down, and reads them."""

    def __init__(self, student: dspy.Module, code: bool = False) -> None:
        self._student, self._code = student, code
        self._predictors = lru_cache(MAX_READY)(self._predictors_with)

    def trace(self, candidate: dict[str, str], rollout: Rollout) -> str | None:
        """Write what reflection reads of a rollout: "null" for nothing, None where it cannot be kept."""
        held = rollout.trajectory
        if held is None:
            return "null"
        if self._code:
            return None
        try:
            own = self._predictors(frozenset(candidate.items())).items()
            steps = [
                (next(name for name, other in own if predictor.signature.equals(other.signature)), inputs, output)
                for predictor, inputs, output in held["trace"]
            ]
            return to_json((held["prediction"], held["score"], steps))
        except Exception:  # whatever a class of the user's raises
            return None

    def read_trace(self, candidate: dict[str, str], example: Any, text: str) -> Any:
        """Read a trajectory as reflection needs it."""
        if text == "null":
            return None
        own, (prediction, score, steps) = self._predictors(frozenset(candidate.items())), from_json(text)
        trace = [(own[name], inputs, output) for name, inputs, output in steps]
        return {"example": example, "prediction": prediction, "trace": trace, "score": score}

    def _predictors_with(self, candidate: frozenset[tuple[str, str]]) -> dict[str, Any]:
        """Copy the student's predictors with a candidate's instructions, by their names."""
        texts, copies = dict(candidate), dict[str, Any]()
        predictors: list[tuple[str, Any]] = self._student.named_predictors()
        for name, original in predictors:
            predictor = copies[name] = copy.copy(original)
            if name in texts:
                predictor.signature = original.signature.with_instructions(texts[name])
        return copies


@dataclass(frozen=True)
class ProgramRecord:
    """How one rollout of a program is written down and read again; a :class:`~.requests.RolloutRecord`.

    Args:
        records: of the program.
        candidate, example: of the rollout.
        traced: it has a trace.
        needs_trace: a trace that could not be kept is needed: the rollout has to be made again.
    """

    records: RolloutRecords
    candidate: dict[str, str]
    example: Any
    traced: bool = True
    needs_trace: bool = True

    def write(self, rollout: Rollout) -> tuple[str, str | None]:
        """Write output and trace as text."""
        return output_text(rollout.output), self.records.trace(self.candidate, rollout) if self.traced else None

    def read(self, row: Any) -> Rollout | None:
        """Read the rollout in a row; None where its trace is needed, and could not be kept."""
        trajectory = None
        if self.traced:
            try:
                trajectory = self.records.read_trace(self.candidate, self.example, row["trace"])
            except Exception:  # it was not kept, or by an older version; or whatever a class of the user's raises
                if self.needs_trace:
                    return None
        return Rollout(output_in(row["output"]), float(row["score"]), json.loads(row["objective_scores"]), trajectory)


class ReplyText:
    """How the answer of a module is written down and read again; a :class:`~.requests.ReplyRecord`."""

    def __init__(self, position: str) -> None:
        self.position = position

    def write(self, answer: Any) -> str | None:
        """Write the answer as text; None for an error, and for what would not come back as it is."""
        with suppress(Exception):  # whatever a class of the user's raises: the question is asked again
            return to_json(answer.answer) if answer.error is None else None

    def read(self, text: str) -> Any:
        """Read the answer, which costs nothing now."""
        with suppress(Exception):
            return ModuleReply(from_json(text))


def output_text(output: Any) -> str:
    """Write what a program returned as text; whatever it is, since it is only shown: its ``repr`` where JSON has no
    such value."""
    if output is None:
        return "null"
    try:
        fields = dict(output.items()) if isinstance(output, dspy.Prediction) else {"text": str(output)}
        return json.dumps(to_jsonable_python(fields, fallback=repr, inf_nan_mode="strings", bytes_mode="base64"))
    except Exception as error:  # bytes that are no text, a cycle, a repr that raises
        return json.dumps({"text": f"a {type(output).__name__} that cannot be written down: {type(error).__name__}"})


def output_in(text: str | None) -> Any:
    """Read an output, as far as :func:`output_text` could keep it."""
    with suppress(Exception):  # another version of the package wrote it
        return None if text in (None, "null") else dspy.Prediction(**json.loads(text))


def as_writable(output: Any, write: Callable[[Any], object]) -> Any:
    """Return an output as it is where ``write`` can write it, else what :func:`output_text` keeps of it."""
    try:
        write(output)
    except Exception:  # whatever a class of the user's raises
        return output_in(output_text(output))
    return output
