"""Where the benchmarks' rows come from: a folder of JSON lines, else the Hugging Face hub.

The folder is `FLASHEVOLVE_DATA`, or `../shared/data` beside the project. A file that is not there is loaded through
`datasets` where its set stands on a hub. Rows are never part of the project.
"""

from __future__ import annotations

import importlib
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
VARIABLE = "FLASHEVOLVE_DATA"
ACE = "https://raw.githubusercontent.com/ace-agent/ace/ba78d343bf8cbe52f284da339a329a609565426a/finance/data"
"""Where ACE's rows stand, by commit: the folder has moved since, and its rows could change."""


class RowsMissing(FileNotFoundError):
    """A set of rows is nowhere to be found; the message says where it was looked for and how to get it."""


def _unchanged(row: Row) -> Row:
    return row


@dataclass(frozen=True)
class Hub:
    """Where `datasets.load_dataset` finds a set.

    Attributes:
        path: First argument: a repository of the hub, or "json" with `data_files`.
        split: Which split, with an optional slice as in "validation[:100]".
        config: The configuration's name, or None.
        revision: A branch or commit, or None.
        data_files: An address for a `path` such as "json", or None.
        part: Which rows of the split to take once it is shuffled (always in the same way), or None for all as they
            stand; a split may be sorted by label.
        convert: From the hub's row to the fields of the file's rows.
    """

    path: str
    split: str
    config: str | None = None
    revision: str | None = None
    data_files: str | None = None
    part: slice | None = None
    convert: Callable[[Row], Row] = _unchanged

    def __str__(self) -> str:
        return f"{self.data_files or self.path}, split {self.split}"


def ace_file(name: str) -> Hub:
    """Where a file of ACE's repository stands, by its name without the ending."""
    return Hub("json", "train", data_files=f"{ACE}/{name}.jsonl")


@dataclass(frozen=True)
class Source:
    """A file of rows.

    Attributes:
        file: Its path in the data folder, with forward slashes.
        fields: What each row must hold.
        hub: Where else the rows stand, or None.
        origin: For people: where the set comes from.
    """

    file: str
    fields: tuple[str, ...]
    hub: Hub | None
    origin: str


def data_folder() -> Path:
    """Where the rows lie: `FLASHEVOLVE_DATA`, or `../shared/data` beside the project."""
    given = os.environ.get(VARIABLE)
    return Path(given) if given else Path(__file__).resolve().parents[3] / "shared" / "data"


def load_rows(source: Source) -> list[Row]:
    """All rows of a source, in the order of the file.

    Raises:
        RowsMissing: If the folder does not hold the file and the hub cannot give it.
        ValueError: If a line is no JSON object or lacks a field; the message names file and line.
    """
    path = data_folder() / source.file
    rows = _from_file(path) if path.is_file() else _from_hub(source, path)
    for number, row in enumerate(rows, start=1):
        lacking = [name for name in source.fields if name not in row]
        if lacking:
            raise ValueError(f"row {number} of {source.file} has no {', '.join(lacking)}: it has {', '.join(row)}")
    return rows


def _from_file(path: Path) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} of {path} is no JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"line {number} of {path} is no JSON object but {type(row).__name__}")
        rows.append(row)
    return rows


def _from_hub(source: Source, path: Path) -> list[Row]:
    hub = source.hub
    if hub is None:
        raise RowsMissing(_message(source, path, "it stands on no hub", "put the file there"))
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        why, remedy = f"the package that would load it from the hub ({hub}) is not installed", "install datasets"
        raise RowsMissing(_message(source, path, why, f"put the file there, or {remedy}")) from None
    given = {"name": hub.config, "revision": hub.revision, "data_files": hub.data_files}
    options = {name: value for name, value in given.items() if value is not None}
    try:
        rows = [hub.convert(dict(row)) for row in datasets.load_dataset(hub.path, split=hub.split, **options)]
    except Exception as error:  # whatever the hub's client raises: no network, no such set, another layout
        why = f"the hub ({hub}) did not give it: {type(error).__name__}: {error}"
        raise RowsMissing(_message(source, path, why, "put the file there")) from error
    if hub.part is None:
        return rows
    random.Random(0).shuffle(rows)
    return rows[hub.part]


def _message(source: Source, path: Path, why: str, remedy: str) -> str:
    return (
        f"no rows for {source.file} ({source.origin}): {path} is missing, and {why}. "
        f"Set {VARIABLE} to the folder that holds {source.file}: {remedy}."
    )
