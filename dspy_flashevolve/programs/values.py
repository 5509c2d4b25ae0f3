"""Values as JSON from which equal values can be read: what traces and replies in the journal are made of.

JSON, and no pickle beside it: secrets are taken out of all texts that the journal gets, which nobody can do in a
pickle; reading it runs no code and imports nothing; and SQL can read it. The price is that an object of a class that is
not named here cannot be written: :func:`written` refuses it, and what it was part of is made anew when it is needed.

Objects are written by what they hold, not by what they show of themselves: the fields of a pydantic model under their
own names, whatever its aliases, serializers and excluded fields are, each value with its own type. They are read
without their validators, which would change them, or refuse what they gave themselves.
"""

from __future__ import annotations

import base64
import inspect
import json
import math
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import cached_property
from typing import Any, TypeVar, cast
from uuid import UUID

import dspy
from dspy.primitives.prediction import Completions
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from pydantic import BaseModel

T = TypeVar("T", bound=type)


class InexactError(Exception):
    """The value would not come back as it is."""


def _span(text: str) -> timedelta:
    days, seconds, microseconds = map(int, text.split())
    return timedelta(days, seconds, microseconds)


TEXTS: dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    bytes: (lambda value: base64.b64encode(value).decode(), base64.b64decode),
    date: (date.isoformat, date.fromisoformat),
    datetime: (datetime.isoformat, datetime.fromisoformat),
    time: (time.isoformat, time.fromisoformat),
    timedelta: (lambda value: f"{value.days} {value.seconds} {value.microseconds}", _span),
    Decimal: (str, Decimal),
    Fraction: (str, Fraction),
    UUID: (str, UUID),
    complex: (repr, complex),
}
"""Type -> how its values are written as a text, and read."""
TEXT_NAMES = {kind.__name__: kind for kind in TEXTS}


def written(value: Any) -> str:
    """A value as JSON text, which was read again and is equal.

    >>> read(written({"a": (1, [None, "b"])}))
    {'a': (1, [None, 'b'])}

    Raises:
        InexactError: what :func:`read` makes of it is another value.
        Exception: it cannot be written, or not be read: whatever a class of the user's raises.
    """
    text = json.dumps(encoded(value))
    if json.dumps(encoded(read(text))) != text:
        raise InexactError(f"a {type(value).__name__} that is another one when it is read")
    return text


def read(text: str) -> Any:
    """What :func:`written` was given.

    Raises:
        InexactError: it holds an object of a class that is not there any more, or is another one now.
    """
    return decoded(json.loads(text))


def is_readable(trace: str) -> bool:
    """Whether the values in a trace that was kept can still be read: a class may be gone, or have other fields.

    Args:
        trace: as :class:`~.records.RolloutRecords` writes it; that of another loop counts as readable.
    """
    kept = json.loads(trace)
    if not isinstance(kept, dict) or "trace" not in kept:
        return True
    try:
        for part in (kept["prediction"], kept["score"], *(value for _, *values in kept["trace"] for value in values)):
            decoded(part)
    except Exception:  # whatever a class of the user's raises
        return False
    return True


def encoded(value: Any) -> Any:
    """A value as what JSON has, from which :func:`decoded` makes an equal one.

    Raises:
        InexactError: it, or something in it, is of a type that is not known here.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"x": repr(value)}
    if kind is list:
        return [encoded(item) for item in value]
    if kind is tuple:
        return {"t": [encoded(item) for item in value]}
    if kind is dict:
        if all(type(name) is str for name in value):
            return {"d": _encoded_items(value)}
        return {"i": [[encoded(name), encoded(item)] for name, item in value.items()]}
    if kind in (set, frozenset):
        items = sorted((encoded(item) for item in value), key=json.dumps)
        return {"s" if kind is set else "z": items}
    if kind in TEXTS:
        return {"c": [kind.__name__, _text_of(value, kind)]}
    if kind is FailedPrediction:
        return {"f": [encoded(value.completion_text), encoded(value.format_reward)]}
    if isinstance(value, _numpys_numbers()) and value.dtype.kind in "biuf":
        return {"n": [kind.__name__, encoded(value.item())]}
    if isinstance(value, dspy.Prediction):
        return _encoded_prediction(value)
    if isinstance(value, Enum):
        return {"e": [*_name(kind, Enum), encoded(value.name)]}
    if isinstance(value, BaseModel):
        return {"m": [*_name(kind, BaseModel), *map(encoded, _state_of(value))]}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return {"u": [*_name(kind, tuple), [encoded(item) for item in value]]}
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
        if set(getattr(value, "__dict__", ())) - set(names):
            raise InexactError(f"a {kind.__name__} with more than its fields")
        return {"a": [*_name(kind, object), {name: encoded(getattr(value, name)) for name in names}]}
    raise InexactError(f"a {kind.__name__}")


def _numpys_numbers() -> tuple[Any, ...]:
    """The base class of numpy's numbers; nothing where nobody has imported numpy."""
    numpy: Any = sys.modules.get("numpy")
    return () if numpy is None else (numpy.generic,)


def _encoded_items(value: dict[str, Any]) -> dict[str, Any]:
    if not all(type(name) is str for name in value):
        raise InexactError("a field whose name is no text")
    return {name: encoded(item) for name, item in value.items()}


def _text_of(value: Any, kind: type) -> str:
    zone: Any = getattr(value, "tzinfo", None)
    if getattr(value, "fold", 0) or not (zone is None or type(zone) is timezone):
        raise InexactError("a time whose zone is more than an offset")
    return TEXTS[kind][0](value)


def _encoded_prediction(value: dspy.Prediction) -> dict[str, Any]:
    """A prediction. Its completions are kept where there are several; else they are its fields once more."""
    state: dict[str, Any] = vars(value)
    store, usage = state["_store"], state["_lm_usage"]
    completions = None if state["_completions"] is None else dict(state["_completions"].items())
    if completions is not None and all(len(items) == 1 for items in completions.values()):
        completions = None
    if type(value) is dspy.Prediction and completions is None and usage is None:
        return {"p": _encoded_items(store)}
    return {"P": [*_name(type(value), dspy.Prediction), _encoded_items(store), encoded(completions), encoded(usage)]}


def _state_of(model: BaseModel) -> tuple[Any, ...]:
    """The values of a model's fields, the names of those that were given, and what it holds beside them."""
    kind, held = type(model), vars(model)
    for name in held.keys() - kind.model_fields.keys():
        if not isinstance(inspect.getattr_static(kind, name, None), cached_property):  # which is computed again
            raise InexactError(f"a {kind.__name__} with an attribute {name!r} that is no field")
    values = {name: held[name] for name in kind.model_fields if name in held}
    return values, model.model_fields_set, model.__pydantic_extra__, model.__pydantic_private__


def decoded(value: Any) -> Any:
    """What :func:`encoded` was given.

    Raises:
        InexactError: a class that is not there any more, or is another one now.
    """
    if isinstance(value, list):
        return [decoded(item) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    [(kind, kept)] = cast("dict[str, Any]", value).items()
    if kind not in READERS:
        raise InexactError(f"it was written in another way, {kind!r}")
    return READERS[kind](kept)


def _decoded_items(kept: dict[str, Any]) -> dict[str, Any]:
    return {name: decoded(item) for name, item in kept.items()}


def _read_prediction(kept: list[Any]) -> dspy.Prediction:
    module, qualified, store, completions, usage = kept
    prediction = object.__new__(_class_named(module, qualified, dspy.Prediction))
    several = decoded(completions)
    held = {"_completions": None if several is None else Completions(several), "_lm_usage": decoded(usage)}
    vars(prediction).update(_store=_decoded_items(store), **held)
    return prediction


def _read_model(kept: list[Any]) -> BaseModel:
    module, qualified, values, set_fields, extra, private = kept
    kind = _class_named(module, qualified, BaseModel)
    values = decoded(values)
    if values.keys() - kind.model_fields.keys():
        raise InexactError(f"{module}.{qualified} has other fields now")
    model = object.__new__(kind)
    state = {"__dict__": values, "__pydantic_fields_set__": decoded(set_fields)}
    state |= {"__pydantic_extra__": decoded(extra), "__pydantic_private__": decoded(private)}
    BaseModel.__setstate__(model, state)
    return model


def _read_dataclass(kept: list[Any]) -> Any:
    module, qualified, values = kept
    kind = _class_named(module, qualified, object)
    if not is_dataclass(kind) or values.keys() != {field.name for field in fields(kind)}:
        raise InexactError(f"{module}.{qualified} has other fields now")
    result = object.__new__(kind)
    for name, item in values.items():
        object.__setattr__(result, name, decoded(item))
    return result


def _read_named_tuple(kept: list[Any]) -> Any:
    module, qualified, items = kept
    kind = _class_named(module, qualified, tuple)
    if len(items) != len(getattr(kind, "_fields", ())):
        raise InexactError(f"{module}.{qualified} has other fields now")
    return tuple.__new__(kind, [decoded(item) for item in items])


def _read_enum(kept: list[Any]) -> Any:
    module, qualified, name = kept
    try:
        return _class_named(module, qualified, Enum)[name]
    except KeyError as error:
        raise InexactError(f"{module}.{qualified} has no {error} any more") from error


READERS: dict[str, Callable[[Any], Any]] = {
    "x": float,
    "t": lambda kept: tuple(decoded(item) for item in kept),
    "d": _decoded_items,
    "i": lambda kept: {decoded(name): decoded(item) for name, item in kept},
    "s": lambda kept: {decoded(item) for item in kept},
    "z": lambda kept: frozenset(decoded(item) for item in kept),
    "c": lambda kept: TEXTS[TEXT_NAMES[kept[0]]][1](kept[1]),
    "n": lambda kept: _class_named("numpy", kept[0], *_numpys_numbers())(decoded(kept[1])),
    "f": lambda kept: FailedPrediction(*map(decoded, kept)),
    "p": lambda kept: dspy.Prediction(**_decoded_items(kept)),
    "P": _read_prediction,
    "e": _read_enum,
    "m": _read_model,
    "u": _read_named_tuple,
    "a": _read_dataclass,
}
"""Mark of a kind of values -> what reads one. The marks are in journals: one that changes its meaning gets another."""


def _name(kind: type, base: type) -> tuple[str, str]:
    """The name by which :func:`_class_named` finds a class.

    Raises:
        InexactError: it does not: the class is defined inside a function, say.
    """
    name = kind.__module__, kind.__qualname__
    if _class_named(*name, base) is not kind:
        raise InexactError(f"a {kind.__name__}, which is another one than {'.'.join(name)}")
    return name


def _class_named(module: str, qualified: str, base: T) -> T:
    """A class that the program has imported already; nothing is imported by a name that stands in a file.

    Raises:
        InexactError: there is none of this name, or it is no subclass of ``base``.
    """
    held: Any = sys.modules.get(module)
    for part in qualified.split("."):
        held = getattr(held, part, None)
    if not isinstance(held, type) or not issubclass(held, base):
        raise InexactError(f"no {base.__name__} {module}.{qualified} is imported")
    return cast(T, held)
