"""Rollouts and replies as JSON, and back: what the journal keeps.

Outputs are kept for people and for gepa's best outputs; what JSON does not have is kept as text. Traces are kept to be
reflected on after a crash, so they come back equal or not at all: a trace is read again when it is written, and is not
kept where that gives another one. Its rollout is then made anew, if an interrupted run still has to reflect on it.

Values are JSON, and no pickle: secrets can be taken out of it, reading it runs no code and imports nothing, and SQL can
read it. Objects are written by what they hold, each value with its own type, and read without their validators, which
would change them. An object of a class that is not named here cannot be written, and is made anew when it is needed.
"""

from __future__ import annotations

import base64
import copy
import inspect
import json
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import cached_property, lru_cache
from types import ModuleType
from typing import Any, Generic, TypeVar, cast
from uuid import UUID

import dspy
from dspy.primitives.prediction import Completions
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from dspy_flashevolve.engine.requests import RequestCost, Rollout

T = TypeVar("T")
Kind = TypeVar("Kind", bound=type)


class InexactError(Exception):
    """The value would not come back as it is."""


def _span(text: str) -> timedelta:
    days, seconds, microseconds = map(int, text.split())
    return timedelta(days, seconds, microseconds)


def fraction_of(text: str) -> Fraction:
    """Read "1/3", and no text with an exponent, which may stand for a number that fills the memory."""
    return Fraction(*map(int, text.split("/")))


TEXTS: dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    bytes: (lambda value: base64.b64encode(value).decode(), base64.b64decode),
    date: (date.isoformat, date.fromisoformat),
    datetime: (datetime.isoformat, datetime.fromisoformat),
    time: (time.isoformat, time.fromisoformat),
    timedelta: (lambda value: f"{value.days} {value.seconds} {value.microseconds}", _span),
    Decimal: (str, Decimal),
    Fraction: (str, fraction_of),
    UUID: (str, UUID),
    complex: (repr, complex),
}
"""Type -> how its values are written as a text, and read."""
TEXT_NAMES = {kind.__name__: kind for kind in TEXTS}


def to_json(value: Any) -> str:
    """Write a value as JSON text, and check that reading it gives an equal one."""
    text = json.dumps(encode(value))
    if json.dumps(encode(from_json(text))) != text:
        raise InexactError(f"a {type(value).__name__} that is another one when it is read")
    return text


def from_json(text: str) -> Any:
    """Read the value that :func:`to_json` was given."""
    return decode(json.loads(text))


def is_readable(trace: str) -> bool:
    """Whether the values in a trace that was kept can still be read: a class may be gone, or have other fields."""
    record = json.loads(trace)
    if not isinstance(record, dict) or "trace" not in record:
        return True
    try:
        decode([record["prediction"], record["score"], *(values for _, *values in record["trace"])])
    except Exception:  # whatever a class of the user's raises
        return False
    return True


def encode(value: Any) -> Any:
    """Express a value by what JSON has, so that :func:`decode` makes an equal one of it."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"x": repr(value)}
    if kind is list:
        return [encode(item) for item in value]
    if kind is tuple:
        return {"t": [encode(item) for item in value]}
    if kind is dict:
        if all(type(name) is str for name in value):
            return {"d": _encode_items(value)}
        return {"i": [[encode(name), encode(item)] for name, item in value.items()]}
    if kind in (set, frozenset):
        items = sorted((encode(item) for item in value), key=json.dumps)
        return {"s" if kind is set else "z": items}
    if kind in TEXTS:
        return {"c": [kind.__name__, _text_of(value, kind)]}
    if kind is FailedPrediction:
        return {"f": [encode(value.completion_text), encode(value.format_reward)]}
    if isinstance(value, _numpys_numbers()) and value.dtype.kind in "biuf":
        return {"n": [kind.__name__, encode(value.item())]}
    if isinstance(value, dspy.Prediction):
        return _encode_prediction(value)
    if isinstance(value, Enum):
        return {"e": [*_name(kind, Enum), encode(value.name)]}
    if isinstance(value, BaseModel):
        return {"m": [*_name(kind, BaseModel), *map(encode, _state_of(value))]}
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
        if set(getattr(value, "__dict__", ())) - set(names):
            raise InexactError(f"a {kind.__name__} with more than its fields")
        return {"a": [*_name(kind, object), {name: encode(getattr(value, name)) for name in names}]}
    raise InexactError(f"a {kind.__name__}")


def _numpys_numbers() -> tuple[Any, ...]:
    """Return the base classes of numpy's numbers; nothing where nobody has imported numpy."""
    numpy: Any = sys.modules.get("numpy")
    return () if numpy is None else (numpy.number, numpy.bool_)


def _encode_items(value: dict[str, Any]) -> dict[str, Any]:
    if not all(type(name) is str for name in value):
        raise InexactError("a field whose name is no text")
    return {name: encode(item) for name, item in value.items()}


def _text_of(value: Any, kind: type) -> str:
    zone: Any = getattr(value, "tzinfo", None)
    if getattr(value, "fold", 0) or not (zone is None or type(zone) is timezone):
        raise InexactError("a time whose zone is more than an offset")
    return TEXTS[kind][0](value)


def _encode_prediction(value: dspy.Prediction) -> dict[str, Any]:
    """Encode a prediction; its completions only where there are several, else they are its fields once more."""
    state: dict[str, Any] = vars(value)
    store, usage = state["_store"], state["_lm_usage"]
    completions = None if state["_completions"] is None else dict(state["_completions"].items())
    if completions is not None and all(len(items) == 1 for items in completions.values()):
        completions = None
    if type(value) is dspy.Prediction and completions is None and usage is None:
        return {"p": _encode_items(store)}
    return {"P": [*_name(type(value), dspy.Prediction), _encode_items(store), encode(completions), encode(usage)]}


def _state_of(model: BaseModel) -> tuple[Any, ...]:
    """Return the values of a model's fields, the names of those that were set, and what it holds beside them."""
    kind, held = type(model), vars(model)
    for name in held.keys() - kind.model_fields.keys():
        if not isinstance(inspect.getattr_static(kind, name, None), cached_property):  # which is computed again
            raise InexactError(f"a {kind.__name__} with an attribute {name!r} that is no field")
    values = {name: held[name] for name in kind.model_fields if name in held}
    return values, model.model_fields_set, model.__pydantic_extra__, model.__pydantic_private__


def decode(value: Any) -> Any:
    """Make the value that :func:`encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    [(kind, data)] = cast("dict[str, Any]", value).items()
    if kind not in READERS:
        raise InexactError(f"it was written in another way, {kind!r}")
    return READERS[kind](data)


def _decode_items(data: dict[str, Any]) -> dict[str, Any]:
    return {name: decode(item) for name, item in data.items()}


def _read_prediction(data: list[Any]) -> dspy.Prediction:
    module, qualified, store, completions, usage = data
    prediction = object.__new__(_class_named(module, qualified, dspy.Prediction))
    several = decode(completions)
    held = {"_completions": None if several is None else Completions(several), "_lm_usage": decode(usage)}
    vars(prediction).update(_store=_decode_items(store), **held)
    return prediction


def _read_model(data: list[Any]) -> BaseModel:
    module, qualified, *state = data
    model = object.__new__(_class_named(module, qualified, BaseModel))
    fill_model(model, *map(decode, state))
    return model


def fill_model(model: BaseModel, values: dict[str, Any], set_fields: Any, extra: Any, private: Any) -> None:
    """Give a model, made by ``object.__new__``, its state, without its validators."""
    if values.keys() - type(model).model_fields.keys():
        raise InexactError(f"{type(model).__module__}.{type(model).__qualname__} has other fields now")
    state = {"__dict__": values, "__pydantic_fields_set__": set_fields}
    BaseModel.__setstate__(model, state | {"__pydantic_extra__": extra, "__pydantic_private__": private})


def _read_dataclass(data: list[Any]) -> Any:
    module, qualified, values = data
    kind = _class_named(module, qualified, object)
    if not is_dataclass(kind) or values.keys() != {field.name for field in fields(kind)}:
        raise InexactError(f"{module}.{qualified} has other fields now")
    result = object.__new__(kind)
    fill_dataclass(result, _decode_items(values))
    return result


def fill_dataclass(target: Any, values: dict[str, Any]) -> None:
    """Give an object of a dataclass, made by ``object.__new__``, its fields."""
    if values.keys() - {field.name for field in fields(target)}:
        raise InexactError(f"{type(target).__module__}.{type(target).__qualname__} has other fields now")
    for name, value in values.items():
        object.__setattr__(target, name, value)


def _read_number(data: list[Any]) -> Any:
    kind = imported("numpy", data[0])
    if not isinstance(kind, type) or not issubclass(kind, _numpys_numbers()):
        raise InexactError(f"numpy has no numbers {data[0]} any more")
    return kind(decode(data[1]))


def _read_enum(data: list[Any]) -> Any:
    module, qualified, name = data
    try:
        return _class_named(module, qualified, Enum)[name]
    except KeyError as error:
        raise InexactError(f"{module}.{qualified} has no {error} any more") from error


READERS: dict[str, Callable[[Any], Any]] = {
    "x": float,
    "t": lambda data: tuple(decode(item) for item in data),
    "d": _decode_items,
    "i": lambda data: {decode(name): decode(item) for name, item in data},
    "s": lambda data: {decode(item) for item in data},
    "z": lambda data: frozenset(decode(item) for item in data),
    "c": lambda data: TEXTS[TEXT_NAMES[data[0]]][1](data[1]),
    "n": _read_number,
    "f": lambda data: FailedPrediction(*map(decode, data)),
    "p": lambda data: dspy.Prediction(**_decode_items(data)),
    "P": _read_prediction,
    "e": _read_enum,
    "m": _read_model,
    "a": _read_dataclass,
}
"""Mark of a kind of values -> what reads a value of it. The marks are in journals: a mark never changes its meaning."""


def _name(kind: type, base: type) -> tuple[str, str]:
    """Return the name by which :func:`_class_named` finds a class."""
    name = kind.__module__, kind.__qualname__
    if _class_named(*name, base) is not kind:
        raise InexactError(f"a {kind.__name__}, which is another one than {'.'.join(name)}")
    return name


def _class_named(module: str, qualified: str, base: Kind) -> Kind:
    """Find a class that the program has imported already."""
    held = imported(module, qualified)
    if not isinstance(held, type) or not issubclass(held, base) or hasattr(held, "__del__"):
        raise InexactError(f"no {base.__name__} {module}.{qualified} is imported")
    return cast(Kind, held)


def imported(module: str, qualified: str) -> Any:
    """Find what a name in a file stands for; None where nothing of that name is imported.

    Nothing is imported by it, and no code runs: a module may import, or do anything, where it is asked for a name.
    """
    held: Any = sys.modules.get(module)
    for part in qualified.split("."):
        held = vars(held).get(part) if isinstance(held, ModuleType | type) else None
    return held


MAX_READY = 64
"""Candidates whose predictors are kept ready, as many as programs are (``program.MAX_READY``)."""


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
        self._student = student
        self._code = code
        self._predictors = lru_cache(MAX_READY)(self._predictors_with)

    def trace(self, candidate: dict[str, str], rollout: Rollout) -> str | None:
        """Write what reflection reads of a rollout: "null" for nothing, None where it cannot be kept."""
        if rollout.trajectory is None:
            return "null"
        if self._code:
            return None
        known = self._predictors(frozenset(candidate.items()))
        try:
            steps = ", ".join(
                f"[{json.dumps(_name_of(predictor, known))}, {to_json(inputs)}, {to_json(output)}]"
                for predictor, inputs, output in rollout.trajectory["trace"]
            )
            prediction, score = to_json(rollout.trajectory["prediction"]), to_json(rollout.trajectory["score"])
            return f'{{"prediction": {prediction}, "score": {score}, "trace": [{steps}]}}'
        except Exception:
            return None

    def read_trace(self, candidate: dict[str, str], example: Any, text: str) -> Any:
        """Read a trajectory as reflection needs it."""
        record = json.loads(text)
        if record is None:
            return None
        known = self._predictors(frozenset(candidate.items()))
        steps = [(known[name], decode(inputs), decode(output)) for name, inputs, output in record["trace"]]
        prediction, score = decode(record["prediction"]), decode(record["score"])
        return {"example": example, "prediction": prediction, "trace": steps, "score": score}

    def _predictors_with(self, candidate: frozenset[tuple[str, str]]) -> dict[str, Any]:
        """Copy the student's predictors with a candidate's instructions, by their names."""
        texts, copies = dict(candidate), dict[str, Any]()
        predictors: list[tuple[str, Any]] = self._student.named_predictors()
        for name, original in predictors:
            predictor = copies[name] = copy.copy(original)
            if name in texts:
                predictor.signature = original.signature.with_instructions(texts[name])
        return copies


class ProgramRecord:
    """How one rollout of a program is written down and read again; a :class:`~.requests.RolloutRecord`.

    Args:
        records: of the program.
        candidate, example: of the rollout.
        traced: it has a trace.
        needs_trace: a trace that could not be kept is needed: the rollout has to be made again.
    """

    def __init__(
        self,
        records: RolloutRecords,
        candidate: dict[str, str],
        example: Any,
        traced: bool = True,
        needs_trace: bool = True,
    ) -> None:
        self._records, self._candidate, self._example = records, candidate, example
        self._traced, self._needs_trace = traced, traced and needs_trace

    def write(self, rollout: Rollout) -> tuple[str, str | None]:
        """Write output and trace as text."""
        trace = self._records.trace(self._candidate, rollout) if self._traced else None
        return output_text(rollout.output), trace

    def read(self, row: Any) -> Rollout | None:
        """Read the rollout in a row; None where its trace is needed, and could not be kept."""
        trajectory = None
        if self._traced:
            try:
                if row["trace"] is None:
                    raise InexactError("the trace could not be kept")
                trajectory = self._records.read_trace(self._candidate, self._example, row["trace"])
            except Exception:
                if self._needs_trace:
                    return None
        output = output_in(row["output"])
        return Rollout(output, float(row["score"]), json.loads(row["objective_scores"]), trajectory)


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
    """Write what a program returned as text; whatever it is, since it is only shown."""
    try:
        return json.dumps(encode(output))
    except Exception:
        return _plain_text(output)


def _plain_text(output: Any) -> str:
    """Write what a program returned as values of JSON; what is none is replaced by its ``repr``."""
    try:
        fields = dict(output.items()) if isinstance(output, dspy.Prediction) else {"text": str(output)}
        plain: dict[str, Any] = to_jsonable_python(fields, fallback=repr, inf_nan_mode="strings")
        return json.dumps({"p": {name: encode(item) for name, item in plain.items()}})
    except Exception as error:  # bytes that are no text, a cycle, a repr that raises
        message = f"a {type(output).__name__} that cannot be written down: {type(error).__name__}"
        return json.dumps({"p": {"text": message}})


def output_in(text: str | None) -> Any:
    """Read an output, as far as :func:`output_text` could keep it."""
    with suppress(Exception):  # whatever a class of the user's raises: an output is only shown
        return None if text is None else from_json(text)


def as_writable(output: Any, write: Callable[[Any], object]) -> Any:
    """Return an output as it is where ``write`` can write it, else what :func:`output_text` keeps of it."""
    text = output_text(output)
    for form in (output, output_in(text)):
        try:
            write(form)
        except Exception:  # whatever a class of the user's raises
            continue
        return form
    return output_in(_plain_text(output))


def _name_of(predictor: Any, known: dict[str, Any]) -> str:
    for name, other in known.items():
        if predictor.signature.equals(other.signature):
            return name
    raise InexactError("a predictor that the student does not have")
