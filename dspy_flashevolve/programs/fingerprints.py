"""What tells one run from another: the program, the data, the metric, the versions; and what must not be written."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import tokenize
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from typing import Any, cast

import dspy
from gepa.core.data_loader import ListDataLoader
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from dspy_flashevolve.engine.errors import RunDirectoryError
from dspy_flashevolve.engine.redaction import Redaction, secrets_held_by, secrets_in
from dspy_flashevolve.engine.store import Store, reporting_damage
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.programs.records import is_readable

logger = logger_named(__name__)

SOURCE = "source of the "
"""Beginning of the names of parts that may change while a run goes on, of which the user is told."""
_MEMORY_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def fingerprints_of(
    student: dspy.Module, seed_candidate: Mapping[str, str], trainset: Any, valset: Any, metric: Any
) -> dict[str, str]:
    """Map the name of each part of a run to a hash of it, the metric to its name: equal in any process."""
    fingerprints = {"program": type(student).__qualname__}
    predictors: list[tuple[str, Any]] = student.named_predictors()
    for name, predictor in predictors:
        fields = {
            field: [_text(info.annotation), info.json_schema_extra]
            for field, info in predictor.signature.fields.items()
        }
        fingerprints[f"predictor {name!r}"] = _hash([type(predictor).__qualname__, fields])
    for name, text in seed_candidate.items():
        fingerprints[f"seed text of {name!r}"] = _hash(text)
    fingerprints["trainset"] = _data(trainset)
    fingerprints["valset"] = _data(valset)
    fingerprints["metric"] = getattr(metric, "__qualname__", type(metric).__qualname__)
    for name, code in {"program": type(student), "metric": metric}.items():
        if source := _source(code):
            fingerprints[f"{SOURCE}{name}"] = _hash(source)
    return fingerprints


def _source(code: Any) -> str:
    """Return the Python source of a function, or of the methods of a class or of an object's class.

    Empty where it is dspy's, or unknown. A class is read by its methods, for :func:`inspect.getsource` of a class
    parses the whole file, which can fail in Python 3.11 while other threads parse.
    """
    while isinstance(code, partial):
        code = code.func
    code = code if inspect.isroutine(code) or inspect.isclass(code) else type(code)
    if str(getattr(code, "__module__", None)).startswith(("dspy.", "builtins")):
        return ""
    if inspect.isclass(code):
        attributes = cast("dict[str, Any]", vars(code)).values()
        functions = (getattr(attribute, "__func__", attribute) for attribute in attributes)  # of static methods, too
        return "".join(_source(function) for function in functions if inspect.isfunction(function))
    try:
        return inspect.getsource(inspect.unwrap(code))
    except (OSError, TypeError, tokenize.TokenError):
        return ""


def versions() -> dict[str, str]:
    """Map the packages whose formats a run directory depends on to their versions."""
    found: dict[str, str] = {}
    for name in ("dspy", "gepa", "dspy-flashevolve"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def plain_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's arguments without secrets, as JSON has them: an object is named by its class, an LM by its model.

    >>> plain_settings({"num_threads": 8, "metric": plain_settings, "_private": 1, "api_key": "sk-1234567890abcdef"})
    {'num_threads': 8, 'metric': 'plain_settings'}
    """
    plain: dict[str, Any] = {}
    for name, value in arguments.items():
        if name.startswith("_") or secrets_in({name: value}):
            continue
        if value is None or isinstance(value, bool | int | float | str):
            plain[name] = value
        elif isinstance(value, dspy.BaseLM):
            plain[name] = str(getattr(value, "model", type(value).__name__))
        else:
            plain[name] = getattr(value, "__qualname__", type(value).__qualname__)
    return plain


def _data(loader: Any) -> str:
    """Describe a data set by the number of its examples and a hash."""
    held: Any = loader.items if isinstance(loader, ListDataLoader) else loader
    items: Any = held if isinstance(held, Sequence) else loader.all_ids()
    digest = hashlib.sha256()
    for item in items:
        digest.update(_text(item).encode())
    return f"{len(loader)} examples, {digest.hexdigest()[:12]}"


def _hash(value: Any) -> str:
    return hashlib.sha256(_text(value).encode()).hexdigest()[:16]


def _text(value: Any) -> str:
    """Write a value as a text that is the same in every process."""
    return json.dumps(_stable(value), sort_keys=True)


def _stable(value: Any, within: tuple[int, ...] = ()) -> Any:
    """Express a value by what JSON has: objects of data classes by their fields, and sets in one order."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if id(value) in within:
        return "a circle"
    stable = partial(_stable, within=(*within, id(value)))
    if isinstance(value, dspy.Example):
        value = dict(value.items(include_dspy=True))
    elif isinstance(value, BaseModel):
        held = {name: vars(value).get(name) for name in type(value).model_fields}
        value = {"": type(value).__qualname__, **held, **(value.model_extra or {})}
    elif is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name, None) for field in fields(value)}
        value = {"": type(value).__qualname__, **held}
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {name if isinstance(name, str) else json.dumps(stable(name)): stable(item) for name, item in items}
    if isinstance(value, set | frozenset):
        return sorted(map(stable, cast("Iterable[Any]", value)), key=partial(json.dumps, sort_keys=True))
    if isinstance(value, list | tuple | deque):
        return list(map(stable, cast("Iterable[Any]", value)))
    return to_jsonable_python(
        value, fallback=_words, inf_nan_mode="strings", bytes_mode="base64", serialize_unknown=True
    )


def _words(value: Any) -> list[str]:
    """Represent an object of any class by the words of its text, in the order of the alphabet: it may show a set."""
    kind, text = type(value), repr(value)
    if kind.__repr__ is object.__repr__ or str(id(value)) in text:
        _warn_of(kind.__qualname__)
        return [kind.__qualname__]
    return sorted(re.findall(r"\w+", _MEMORY_ADDRESS.sub("", text)))


@lru_cache
def _warn_of(kind: str) -> None:
    logger.warning(
        "The data hold objects of %s, whose text only says where they lie: a run that goes on cannot tell others from "
        "them. Give the class a __repr__ that says what they are.",
        kind,
    )


def check_same(store: Store, now: Mapping[str, str], packages: Mapping[str, str]) -> None:
    """Refuse to go on with a run of something else; warn where the source of its program or metric has changed.

    Raises:
        RunDirectoryError: what differs.
    """
    rows = store.rows("SELECT fingerprints, settings FROM sessions ORDER BY id DESC LIMIT 1")
    if not rows:
        return
    then: dict[str, str] = json.loads(rows[0]["fingerprints"])
    changes: list[str] = []
    for name in dict.fromkeys((*then, *now)):
        if name.startswith(SOURCE) or then.get(name) == now.get(name):
            continue
        if name not in now or name not in then:
            changes.append(f"{name} is {'new' if name in now else 'gone'}")
        elif name in ("optimizer", "program", "metric", "trainset", "valset"):
            changes.append(f"{name} was {then[name]}, is {now[name]}")
        else:
            changes.append(f"{name} has changed")
    before: dict[str, str] = json.loads(rows[0]["settings"]).get("versions", {})
    if _release_series(before.get("gepa", "")) != _release_series(packages["gepa"]):
        changes.append(f"gepa was {before.get('gepa')}, is {packages['gepa']}, and its checkpoints may differ")
    if changes:
        raise RunDirectoryError(
            f"log_dir={str(store.directory)!r} holds another run, which this one cannot continue: "
            f"{'; '.join(changes)}. Give another log_dir, or what the run was begun with."
        )
    for name in now:
        if name.startswith(SOURCE) and then.get(name, now[name]) != now[name]:
            logger.warning(
                "log_dir=%r: the source of the %s has changed since the last session. Its scores and those to come are "
                "compared with each other. Give another log_dir if it scores otherwise now.",
                str(store.directory),
                name.removeprefix(SOURCE),
            )


def _release_series(version_text: str) -> list[str]:
    """The part of a version within which a checkpoint's format stays: 0.1.4 -> 0, 1."""
    return version_text.split(".")[:2]


@contextmanager
def open_store(
    log_dir: str | PathLike[str] | None,
    optimizer: str,
    arguments: Mapping[str, Any],
    parts: Mapping[str, str],
    lms: Iterable[Any],
    each_once: bool = False,
) -> Generator[Store, None, None]:
    """Open the Store of a run: in a directory, a new one or one to go on with; without a directory in memory.

    What is raised while a run is built around it closes it, so that others may have the directory. ``arguments`` (of
    the optimizer) are written down without secrets, among which are the keys of ``lms``.

    Raises:
        RunDirectoryError: the directory cannot be written, is in use, or holds another run.
    """
    redaction = Redaction(secrets_in(arguments) | secrets_in(os.environ))
    for lm in lms:
        redaction.add(secrets_held_by(lm))
    store = Store(log_dir, redaction, each_once=each_once, is_readable=is_readable)
    try:
        now, packages = {"optimizer": optimizer, **parts}, versions()
        with reporting_damage(store.path):
            check_same(store, now, packages)
        store.append(
            "sessions",
            id=store.session,
            pid=os.getpid(),
            settings={**plain_settings(arguments), "versions": packages},
            fingerprints=now,
        )
        yield store
    except BaseException:
        store.close()
        raise
