"""Medians with spread, ratios, tables, and the lines of a results file."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.results import Result, read_results, write_result


def _result(method: str, seed: int = 0, **fields: object) -> Result:
    return Result("throughput", method, "simulated", seed, 4, **{"seconds": 60.0, "total_seconds": 70.0, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("counted", "scored", "limit", "over"), [(80, 80, 80, 0), (90, 84, 80, 10), (80, 83, 80, 3), (500, 500, None, 0)]
)
def test_overshoot_goes_by_the_larger_count(counted: int, scored: int, limit: int | None, over: int) -> None:
    assert _result("async", total_metric_calls=counted, scored=scored, call_limit=limit).overshoot == over


def test_a_results_file_grows_by_a_line_a_run_with_its_provenance(tmp_path: Path) -> None:
    path = tmp_path / "new" / "runs.jsonl"
    for seed in range(2):
        write_result(path, _result("async", seed, best_score=0.5, trajectory=[[1.0, 5, 0, 0, 0, 0.5, 0]]))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["seed"] for line in lines] == [0, 1]
    assert lines[0]["trajectory"] == [[1.0, 5, 0, 0, 0, 0.5, 0]]
    assert {"command", "commit", "date", "versions", "machine", "proposals_per_minute", "overshoot"} <= lines[0].keys()
    assert lines[0]["machine"].keys() == {"cores", "architecture", "system", "python"}
    assert lines[0]["versions"]["dspy"] != "missing"


def test_the_commit_is_that_of_the_checkout_and_says_what_was_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        names = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        return subprocess.run(
            ("git", "-C", str(tmp_path), *names, *arguments), capture_output=True, text=True, check=True
        ).stdout.strip()

    now = results.commit.__wrapped__
    monkeypatch.setattr(results, "__file__", str(tmp_path / "benchmarks" / "results.py"))
    assert now() == "", "no checkout"
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "results.py").write_text("1")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "x")
    assert now() == git("rev-parse", "--short=12", "HEAD")
    (tmp_path / "rows.jsonl").write_text("a results file is no change of the code")
    assert now() == git("rev-parse", "--short=12", "HEAD")
    (tmp_path / "benchmarks" / "results.py").write_text("2")
    assert now() == git("rev-parse", "--short=12", "HEAD") + " (changed)"


def test_of_equal_runs_of_a_file_the_last_counts(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    for score in (0.3, 0.4):
        write_result(path, _result("gepa", best_score=score))
    assert [run.best_score for run in read_results(path)] == [0.4]


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"method": "gepa"}', "null"])
def test_a_line_that_is_no_run_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "runs.jsonl"
    write_result(path, _result("gepa"))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        read_results(path)
