"""`python -m benchmarks.observed`: a run of each kind by turns, and the share between them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import observed


def test_runs_with_everything_and_with_nothing_take_turns_and_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "observed.jsonl"
    options = ["--runs", "2", "--seconds", "20", "--time-scale", "20", "--slots", "4", "--train", "6", "--val", "6"]
    assert observed.main([*options, "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["looked_at"] for row in rows] == [True, False, False, True]
    assert all(row["tokens"] > 0 and row["seconds"] > 0 for row in rows)
    assert re.search(r"^[\d.]+% of the tokens a second", capsys.readouterr().out, re.MULTILINE)
