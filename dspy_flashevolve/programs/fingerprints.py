"""What tells one run from another: the program, the data, the metric, the versions; and what must not be written."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from pathlib import Path
from typing import Any, cast

import dspy
from gepa.core.data_loader import ListDataLoader
from pydantic_core import to_jsonable_python

from dspy_flashevolve.engine.errors import RunDirectoryError
from dspy_flashevolve.engine.journal import Journal
from dspy_flashevolve.engine.redaction import Redaction, secrets_held_by, secrets_in
from dspy_flashevolve.engine.replay import RunJournal
from dspy_flashevolve.programs.values import is_readable

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def fingerprints_of(
    student: dspy.Module, seed_candidate: Mapping[str, str], trainset: Any, valset: Any, metric: Any
) -> dict[str, str]:
    """Name of a part -> a hash of it, or for the metric its name. Equal parts have equal hashes in any process.

    Args:
        seed_candidate: component -> text.
        trainset, valset: lists of examples, or gepa's loaders; of loaders that hold no list the ids are hashed.
    """
    found = {"program": type(student).__qualname__}
    predictors: list[tuple[str, Any]] = student.named_predictors()
    for name, predictor in predictors:
        fields = {
            field: [_text(one.annotation), one.json_schema_extra] for field, one in predictor.signature.fields.items()
        }
        found[f"predictor {name!r}"] = _hash([type(predictor).__qualname__, fields])
    for name, text in seed_candidate.items():
        found[f"seed text of {name!r}"] = _hash(text)
    found["trainset"] = _data(trainset)
    found["valset"] = _data(valset)
    found["metric"] = getattr(metric, "__qualname__", type(metric).__qualname__)
    return found


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The parts that are not the same, for people."""
    found: list[str] = []
    for name in dict.fromkeys((*before, *now)):
        if name not in now:
            found.append(f"{name} is gone")
        elif name not in before:
            found.append(f"{name} is new")
        elif before[name] != now[name]:
            readable = name in ("optimizer", "program", "metric", "trainset", "valset")
            found.append(f"{name} was {before[name]}, is {now[name]}" if readable else f"{name} has changed")
    return found


def versions() -> dict[str, str]:
    """Package -> version, of those whose formats a run directory depends on."""
    return {name: _version(name) for name in ("dspy", "gepa", "dspy-flashevolve")}


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
    """The number of the examples, and a hash."""
    held: Any = loader.items if isinstance(loader, ListDataLoader) else loader
    items: Any = held if isinstance(held, Sequence) else loader.all_ids()
    digest = hashlib.sha256()
    for item in items:
        digest.update(_text(dict(item) if isinstance(item, dspy.Example) else item).encode())
    return f"{len(loader)} examples, {digest.hexdigest()[:12]}"


def _hash(value: Any) -> str:
    return hashlib.sha256(_text(value).encode()).hexdigest()[:16]


def _text(value: Any) -> str:
    """A text that is the same in every process: without addresses, and with sets in one order."""
    plain = to_jsonable_python(
        _ordered(value), fallback=_told, inf_nan_mode="strings", bytes_mode="base64", serialize_unknown=True
    )
    return _ADDRESS.sub("", json.dumps(plain, sort_keys=True))


def _told(value: Any) -> str:
    """An object's representation; its type alone where that says where the object lies."""
    text = repr(value)
    return type(value).__qualname__ if str(id(value)) in text else text


def _ordered(value: Any) -> Any:
    """Sets as sorted lists, at any depth of plain containers: theirs is another order in every process."""
    if isinstance(value, Mapping):
        return {name: _ordered(one) for name, one in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, set | frozenset):
        return sorted((_ordered(one) for one in cast("Iterable[Any]", value)), key=_text)
    if isinstance(value, list | tuple):
        return [_ordered(one) for one in cast("Iterable[Any]", value)]
    return value


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def check_same(journal: Journal, now: Mapping[str, str], packages: Mapping[str, str]) -> None:
    """Refuse to go on with a run of something else.

    Args:
        now: by :func:`fingerprints_of`.
        packages: by :func:`versions`.

    Raises:
        RunDirectoryError: what differs.
    """
    rows = journal.rows("SELECT fingerprints, settings FROM sessions ORDER BY id DESC LIMIT 1")
    if not rows:
        return
    found = differences(json.loads(rows[0]["fingerprints"]), now)
    before: dict[str, str] = json.loads(rows[0]["settings"]).get("versions", {})
    if _line(before.get("gepa", "")) != _line(packages["gepa"]):
        found.append(f"gepa was {before.get('gepa')}, is {packages['gepa']}, and its checkpoints may differ")
    if found:
        raise RunDirectoryError(
            f"log_dir={str(journal.directory)!r} holds another run, which this one cannot continue: "
            f"{'; '.join(found)}. Give another log_dir, or what the run was begun with."
        )


def _line(version_text: str) -> list[str]:
    """The part of a version within which a checkpoint's format stays: 0.1.4 -> 0, 1."""
    return version_text.split(".")[:2]


@contextmanager
def open_journal(
    log_dir: str | PathLike[str] | None,
    optimizer: str,
    arguments: Mapping[str, Any],
    parts: Mapping[str, str],
    lms: Iterable[Any],
    each_once: bool = False,
) -> Generator[RunJournal | None, None, None]:
    """Open the journal of a run in a directory, a new one or one to go on with; None without a directory.

    What is raised while a run is built around it closes it, so that others may have the directory.

    Args:
        log_dir: the directory; None for no journal.
        optimizer: the name of its class.
        arguments: of the optimizer, by name; they are written down, without secrets.
        parts: of the run, by :func:`fingerprints_of`.
        lms: those that the run calls; their keys are secrets.
        each_once: see :class:`RunJournal`.

    Raises:
        RunDirectoryError: the directory cannot be written, is in use, or holds another run.
    """
    if log_dir is None:
        yield None
        return
    redaction = Redaction(secrets_in(arguments) | secrets_in(os.environ))
    for lm in lms:
        redaction.add(secrets_held_by(lm))
    journal = Journal(Path(log_dir), redaction)
    try:
        now, packages = {"optimizer": optimizer, **parts}, versions()
        check_same(journal, now, packages)
        journal.append(
            "sessions",
            id=journal.session,
            pid=os.getpid(),
            settings={**plain_settings(arguments), "versions": packages},
            fingerprints=now,
        )
        yield RunJournal(journal, each_once, is_readable)
    except BaseException:
        journal.close()
        raise
