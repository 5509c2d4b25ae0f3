"""Our verdicts against those of IFBench's official evaluator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.workloads.ifbench.agreement import VERDICTS, Agreement, agreement, official_verdicts, table
from benchmarks.workloads.rows import data_folder

ROW = {
    "instruction_id_list": ["format:no_whitespace", "words:start_verb"],
    "kwargs": [{}, {}],
    "response": "Run fast",
    "strict": [False, False],
}


def test_ours_are_the_official_verdicts_in_at_least_99_percent_and_kind_by_kind() -> None:
    if not (data_folder() / VERDICTS).exists():
        pytest.skip("needs the data folder; set FLASHEVOLVE_DATA")
    found = agreement(official_verdicts())
    below = {kind: round(one.share, 3) for kind, one in found.items() if one.share < 0.99}
    assert sum(found.values(), Agreement()).share >= 0.99, f"kinds below 99%: {below}"
    assert not below


def test_agreement_is_counted_by_kind_and_loose_verdicts_where_there_are_some() -> None:
    assert agreement([ROW, ROW | {"loose": [False, True]}]) == {
        "format:no_whitespace": Agreement(strict=2, strict_same=2, loose=1, loose_same=1),
        "words:start_verb": Agreement(strict=2, strict_same=0, loose=1, loose_same=1),
    }


def test_the_table_has_a_row_for_each_kind_and_one_for_all() -> None:
    rows = table(agreement([ROW])).splitlines()
    assert [row.split(" | ")[0].strip("| ") for row in rows[2:]] == ["format:no_whitespace", "words:start_verb", "all"]
    assert rows[-1] == "| all | 1 of 2 | 0 of 0 |  |"


def test_verdicts_are_read_from_a_file_and_a_missing_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    with pytest.raises(FileNotFoundError, match=r"verdicts\.jsonl is missing: set FLASHEVOLVE_DATA"):
        official_verdicts(path)
    path.write_text(f"{json.dumps(ROW)}\n", encoding="utf-8")
    assert official_verdicts(path) == [ROW]
