"""Rows come from the folder, else from the hub, else the error says what to do."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.workloads.rows import VARIABLE, Hub, RowsMissing, Source, load_rows

HUB = Hub("someone/things", "validation[:2]", config="small", convert=lambda row: {"thing": row["name"]})
THINGS = Source("things/all.jsonl", ("thing",), HUB, "Things, CC0")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "things").mkdir()
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def _hub(monkeypatch: pytest.MonkeyPatch, load_dataset: Any) -> None:
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))


def test_rows_of_a_file_come_in_its_order(folder: Path) -> None:
    (folder / "things/all.jsonl").write_text('{"thing": "a\\u2028b"}\n\n{"thing": "c", "more": 1}\n', encoding="utf-8")
    assert load_rows(THINGS) == [{"thing": "a\u2028b"}, {"thing": "c", "more": 1}]


def test_a_missing_file_is_loaded_from_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*args: Any, **options: Any) -> list[dict[str, str]]:
        asked.append((args, options))
        return [{"name": "a"}]

    _hub(monkeypatch, load_dataset)
    assert load_rows(THINGS) == [{"thing": "a"}]
    assert asked == [(("someone/things",), {"split": "validation[:2]", "name": "small"})]


def test_without_file_and_hub_package_the_error_says_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RowsMissing) as caught:
        load_rows(THINGS)
    for part in (
        "things/all.jsonl", "Things, CC0", str(folder), "someone/things", VARIABLE, "install datasets",
    ):  # fmt: skip
        assert part in str(caught.value)
