"""Rows from the data folder or the hub, and splits drawn by a seed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.workloads.ifbench import Sizes, examples, read, splits
from benchmarks.workloads.ifeval import FILES, data_folder
from benchmarks.workloads.rows import RowsMissing


def _row(number: int, kind: str = "punctuation:no_comma", **arguments: Any) -> dict[str, Any]:
    return {"key": number, "prompt": f"prompt {number}", "instruction_id_list": [kind], "kwargs": [arguments]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with 20 rows of IFEval, two of them alike, and 5 of IFBench."""
    long = _row(19, "length_constraints:number_words", relation="at least", num_words=900, N=None)
    given = {"ifeval": [*map(_row, range(19)), _row(3), long], "ifbench": [_row(number + 100) for number in range(5)]}
    for source, rows in given.items():
        path = tmp_path / FILES[source]
        path.parent.mkdir()
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    monkeypatch.setenv("FLASHEVOLVE_DATA", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_splits_are_disjoint_and_of_the_sizes_asked_for() -> None:
    drawn = splits(Sizes(train=8, val=12), seed=1)
    assert (len(drawn.train), len(drawn.val), len(drawn.test)) == (8, 12, 5)
    assert len({example.prompt for part in (drawn.train, drawn.val, drawn.test) for example in part}) == 25
    assert all(example.inputs().keys() == ["prompt"] for example in drawn.train)


@pytest.mark.usefixtures("folder")
def test_a_seed_draws_the_same_examples_and_another_seed_others() -> None:
    sizes = Sizes(train=5, val=5, test=3)
    assert splits(sizes, seed=1) == splits(sizes, seed=1)
    assert splits(sizes, seed=1) != splits(sizes, seed=2)


@pytest.mark.usefixtures("folder")
def test_too_many_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="ifeval has 20 different prompts, 21 were asked for"):
        splits(Sizes(train=10, val=11))
    with pytest.raises(ValueError, match="ifeval has 19 different prompts that fit in 100 tokens"):
        splits(Sizes(train=10, val=10), max_tokens=100)


def test_unset_arguments_are_left_out_and_whole_numbers_are_int() -> None:
    (example,) = examples([_row(1, "count:numbers", N=5.0, word=None)])
    assert example.arguments == [{"N": 5}]
    assert isinstance(example.arguments[0]["N"], int)


def test_missing_rows_without_datasets_say_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHEVOLVE_DATA", str(tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RowsMissing, match=r"google/IFEval.*FLASHEVOLVE_DATA.*install datasets"):
        read("ifeval")


def test_missing_rows_come_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, split: str) -> list[dict[str, Any]]:
        asked.append((name, split))
        return [_row(1)]

    monkeypatch.setenv("FLASHEVOLVE_DATA", str(tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read("ifbench") == [_row(1)]
    assert asked == [("allenai/IFBench_test", "train")]


def test_an_unreachable_hub_says_how_to_get_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, split: str) -> list[dict[str, Any]]:
        raise ConnectionError("no route")

    monkeypatch.setenv("FLASHEVOLVE_DATA", str(tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(RowsMissing, match=r"did not give it.*no route.*FLASHEVOLVE_DATA"):
        read("ifbench")


def test_the_real_rows_give_the_default_splits() -> None:
    if not all((data_folder() / file).exists() for file in FILES.values()):
        pytest.skip("needs the data folder; set FLASHEVOLVE_DATA")
    drawn = splits()
    assert (len(drawn.train), len(drawn.val)) == (150, 300)
    assert len(drawn.test) > 290
    assert not {example.prompt for example in [*drawn.train, *drawn.val]} & {example.prompt for example in drawn.test}
