"""The bench over named workloads: what it runs, what it does not run again, and what it says when it cannot."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench
from benchmarks.bench import COLUMNS, Backend, cells
from benchmarks.measure import Bench, NoMeter
from benchmarks.results import Result
from tests.benchmarks.test_measure import _workload
from tests.benchmarks.workloads.samples import write_samples

SMALL = ["--workload", "aime", "--methods", "gepa", "async", "--calls", "40", "--slots", "4", "--seeds", "2"]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """A small workload on fakes in this process, in place of a server; which runs were served."""
    asked: list[tuple[str, int]] = []

    @contextmanager
    def serving(self: Backend, benchmark: str, name: str, train: Any, val: Any, seed: int) -> Any:
        asked.append((name, seed))
        yield Bench(benchmark, self.name, NoMeter(), self.settings), _workload()

    monkeypatch.setattr(Backend, "serving", serving)
    return asked


def test_a_bench_that_was_interrupted_goes_on_where_it_stopped(tmp_path: Path, served: list[tuple[str, int]]) -> None:
    out = tmp_path / "bench.jsonl"
    assert bench.main([*SMALL, "--out", str(out)]) == 0
    lines = out.read_text().splitlines()
    failed = json.loads(lines[3]) | {"error": "RuntimeError: no"}
    out.write_text("\n".join([*lines[:1], *lines[2:3], json.dumps(failed)]) + "\n")  # one missing, one failed
    served.clear()
    assert bench.main([*SMALL, "--out", str(out)]) == 0
    assert served == [("aime", 0), ("aime", 1)]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["method"], row["seed"]) for row in rows[3:]] == [("async", 0), ("async", 1)]
    served.clear()
    assert bench.main([*SMALL, "--out", str(out)]) == 0
    assert served == []
    assert bench.main([*SMALL, "--calls", "41", "--out", str(out)]) == 0
    assert len(served) == 2


def test_a_bench_in_virtual_time_stands_lockstep_for_gepa_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_samples(tmp_path)
    monkeypatch.setenv("FLASHEVOLVE_DATA", str(tmp_path))
    out = tmp_path / "bench.jsonl"
    asked = ["--virtual", "--workload", "aime", "--methods", "gepa", "gepa-independent-2", "async", "--most", "4"]
    asked += ["--seconds", "aime=200", "--seeds", "1", "--slots", "4", "--out", str(out)]
    assert bench.main(asked) == 0
    rows = {row["method"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert list(rows) == ["gepa", "gepa-independent-2", "async"]
    assert {row["benchmark"] for row in rows.values()} == {"bench-aime-train4-val4-200s"}
    assert {row["backend"] for row in rows.values()} == {"h100-qwen3-8b, virtual time"}
    assert all(row["error"] == "" and row["seconds"] == 200.0 for row in rows.values())
    assert rows["gepa-independent-2"]["trajectory"] != rows["gepa"]["trajectory"], "two tasks a step are other steps"
    assert rows["gepa"]["mean_running"] < rows["async"]["mean_running"] <= 4.0 + 1e-9
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:2]))
    assert bench.main(asked) == 0
    again = json.loads(out.read_text().splitlines()[2])
    same = ("method", "best_score", "proposals", "metric_calls", "completion_tokens", "trajectory", "mean_running")
    assert {name: again[name] for name in same} == {name: rows["async"][name] for name in same}


def test_runs_of_other_slots_and_lengths_are_other_runs_and_stand_in_tables_of_their_own(
    tmp_path: Path, served: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "bench.jsonl")]
    one = [*SMALL, "--seeds", "1", "--methods", "async", *out]
    for more in ([], ["--slots", "2"], ["--time-scale", "2"]):
        assert bench.main([*one, *more]) == 0
    assert len(served) == 3
    capsys.readouterr()
    assert bench.main(one) == 0
    said = capsys.readouterr().out
    assert len(served) == 3
    assert "has 3 runs, which are not made again" in said
    assert [line for line in said.splitlines() if line.startswith("bench-aime on")] == [
        "bench-aime on h100-qwen3-8b, 4 slots, 40 metric calls, plain model",
        "bench-aime on h100-qwen3-8b, 2 slots, 40 metric calls, plain model",
        "bench-aime on h100-qwen3-8b, 4 slots, 40 metric calls, plain model, time scale 2",
    ]
    assert bench.main([*one, "--fresh"]) == 0
    assert len(served) == 4


def result(method: str, seed: int = 0, best: float = 0.5, **changes: Any) -> Result:
    made = Result(
        "bench-aime", method, "h100-qwen3-8b", seed, 64, 60.0, 70.0, proposals=30, metric_calls=300, best_score=best,
        seed_score=0.2, depth=2, completion_tokens=6000.0,
    )  # fmt: skip
    return replace(made, **changes)


def test_a_line_has_medians_spread_and_ratios_to_gepa() -> None:
    runs = [result("gepa", seed, best) for seed, best in enumerate([0.2, 0.3, 0.4])]
    runs += [result("async", seed, best, proposals=300) for seed, best in enumerate([0.5, 0.8, 0.6])]
    runs += [result("async", 3, 9.0, error="RuntimeError: no", proposals=9999)]
    gepa, ours = (dict(zip(COLUMNS, line, strict=True)) for line in cells(runs))
    assert (gepa["score"], gepa["gain"], gepa["x gepa's gain"]) == ("0.30 (0.20-0.40)", "+0.100", "1.00")
    assert (ours["score"], ours["gain"], ours["x gepa's gain"]) == ("0.60 (0.50-0.80)", "+0.400", "4.00")
    assert (ours["proposals a minute"], ours["x gepa's"], ours["tokens/s"]) == ("300.0", "10.0", "100")
    assert (ours["seeds"], ours["failed"]) == ("3", "1")


def test_a_score_is_the_true_one_where_it_is_known() -> None:
    runs = [result("gepa", best=0.5, true_score=0.4, seed_true_score=0.1), result("async", best=0.6)]
    known, validated = (dict(zip(COLUMNS, line, strict=True)) for line in cells(runs))
    assert (known["score"], known["gain"], known["validated"]) == ("0.40", "+0.300", "0.50")
    assert (validated["score"], validated["gain"], validated["validated"]) == ("0.60", "+0.400", "0.60")


def test_reflections_of_a_batch_that_the_limit_cuts_count_as_proposals_of_gepa_alone() -> None:
    runs = [result("gepa-independent-40", proposals=0, reflections=40), result("async", proposals=0, reflections=40)]
    batch, ours = (dict(zip(COLUMNS, line, strict=True)) for line in cells(runs))
    assert (batch["proposals a minute"], ours["proposals a minute"]) == ("40.0", "0.0")
