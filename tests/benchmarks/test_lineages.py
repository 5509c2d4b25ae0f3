"""`python -m benchmarks.lineages`: what became of a parent's parts, the table, the split by runs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks import lineages
from benchmarks.lineages import fate_of

PARENT = """Sort the message into one folder.

Rules:
- Put every invoice and every receipt with an amount above "500 euros" under finance.
- Put requests for a new password under support.
- Leave greetings, thanks and small talk in the inbox."""
CHILD = """Sort the message into one folder.

Rules:
- Put every invoice and each receipt with an amount above "500 euros" into finance.
- Put requests for a new password under support.

Output format
- Reply with the folder alone:
  - in lower case
- Reply with the folder alone, as it is spelt above."""


def test_the_parts_of_a_parent_are_kept_reworded_or_dropped_and_those_of_the_child_added() -> None:
    fate = fate_of(PARENT, CHILD)
    assert (fate.kept, fate.reworded, fate.dropped) == (3 / 5, 1 / 5, 1 / 5)
    assert fate.added == 3 / 5
    assert (fate.all_specifics, fate.reworded_specifics, fate.kept_specifics) == (1.0, 1.0, None)
    assert (fate.parts, fate.headings, fate.nested, fate.repeats) == (7, 2, 1, False)


def test_the_command_prints_a_line_for_each_model_and_both_halves_of_the_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASHEVOLVE_DATA", str(tmp_path))
    assert lineages.main([]) == 1
    assert "set FLASHEVOLVE_DATA" in capsys.readouterr().err
    names = ("source", "run", "model", "parent", "child", "first")
    rows = [
        dict(zip(names, ("a", f"run {number % 6}", model, PARENT, CHILD, number % 4 < 2), strict=True))
        for model in ("gpt-5", "qwen3-8b")
        for number in range(24)
    ]
    (tmp_path / "lineages").mkdir()
    with gzip.open(tmp_path / lineages.FILE, "wt", encoding="utf-8") as file:
        file.write("\n".join(map(json.dumps, rows)))
    assert lineages.main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["gpt-5", "qwen3-8b"]
    assert lineages.main(["--fit"]) == 0
    kept = [
        line.split() for line in capsys.readouterr().out.splitlines() if " kept " in line and "simulated" not in line
    ]
    assert [line[:3] for line in kept] == [
        [name, part, kind] for name in ("strong", "strong-small") for part in ("fit", "test")
        for kind in ("first", "later")
    ]  # fmt: skip
    assert {line[5] for line in kept} == {"0.6"}
