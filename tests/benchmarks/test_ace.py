"""`python -m benchmarks.ace`: what it plans, what a run leaves, and what its report says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import ace, harness
from benchmarks.ace_runs import Row, virtually
from benchmarks.workloads.registry import workload_named
from benchmarks.workloads.rows import RowsMissing
from dspy_flashevolve.sim import SimServer

ROW = Row("few:rules=8", "async", "h100-qwen3-8b", 0, 16, 60.0, 12, 8, 2, "obliging")


def row(schedule: str, seed: int, samples: int, score: float | None) -> Row:
    return replace(ROW, schedule=schedule, seed=seed, samples=samples, best_score=score)


def test_a_run_is_read_at_its_limit_and_drained() -> None:
    run = virtually(replace(ROW, limit=40.0))
    assert run.error == ""
    assert 0 < run.samples <= 60
    at_limit = [score for seconds, _, score in run.snapshots if seconds <= 40.0]
    assert run.best_score == max(at_limit)
    assert run.validations == len(at_limit) < len(run.snapshots)
    assert run.total_seconds > 40.0
    assert run.final_score == max(score for *_, score in run.snapshots)
    assert [point[0] for point in run.curve] == sorted(point[0] for point in run.curve)
    assert run.curve[-1][2] == run.best_score
    assert all(0 <= true <= 1 for *_, true in run.curve)
    assert run.curve[-1][3] > run.curve[0][3], "it learns"


def test_the_report_compares_medians_and_says_whether_the_target_is_met() -> None:
    lockstep = [row("lockstep", seed, 10, 0.4) for seed in range(3)]
    good = [row("async", seed, samples, score) for seed, samples, score in ((0, 26, 0.5), (1, 20, 0.4), (2, 30, 0.3))]
    assert "2.6 x the samples, score 0.400 against 0.400: met" in ace.report([*lockstep, *good])
    slow = [replace(one, samples=24) for one in good]
    assert "2.4 x the samples, score 0.400 against 0.400: MISSED" in ace.report([*lockstep, *slow])
    worse = [replace(one, best_score=0.39) for one in good]
    assert "MISSED" in ace.report([*lockstep, *worse])


@pytest.mark.parametrize(("benchmark", "own"), [(ace, []), (harness, ["--proposers", "2"])])
def test_a_server_gets_the_rows_of_a_workload(benchmark: ModuleType, own: list[str], tmp_path: Path) -> None:
    """The simulated server in the place of a real one, which is what the address could be of."""
    try:
        workload_named("formula", train=4, val=2, test=0, seed=0)
    except RowsMissing as error:
        pytest.skip(str(error))
    sizes = ["--train", "4", "--val", "2", "--seeds", "1", "--slots", "4", "--seconds", "3"]
    with SimServer(time_scale=20.0) as server:
        where = ["--api-base", server.api_base, "--model", "simulated", "--tasks", "formula"]
        assert benchmark.main([*where, *sizes, *own, "--out", str(tmp_path / "rows.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["schedule"] for row in rows] == ["lockstep", "async"]
    assert {(row["backend"], row["task"]) for row in rows} == {("simulated", "formula")}
    assert all(row["seed_score"] == 0.0 and row["total_seconds"] > 3 for row in rows), "the model knows no formulas"
