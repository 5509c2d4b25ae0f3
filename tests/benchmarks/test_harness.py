"""`python -m benchmarks.harness`: what it refuses, what a run leaves, and what its report says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import harness, harness_run
from benchmarks.workloads import symptom2disease
from benchmarks.workloads.definition import Size
from dspy_flashevolve.sim import SimServer
from tests.benchmarks.workloads.samples import write_samples

SMALL = ["--seeds", "1", "--seconds", "120", "--train", "6", "--val", "4", "--slots", "8", "--rules", "8"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[harness.Row]:
    out = tmp_path_factory.mktemp("harness") / "rows.jsonl"
    assert harness.main([*SMALL, "--proposers", "2", "--out", str(out)]) == 0
    return _rows(out)


def _rows(path: Path) -> list[harness.Row]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [harness.Row(**{name: line[name] for name in harness.Row.__dataclass_fields__}) for line in lines]


def test_a_run_of_each_schedule_leaves_a_row_with_what_was_asked(rows: list[harness.Row]) -> None:
    assert [(row.task, row.name) for row in rows] == [
        ("house-rules", "lockstep"),
        ("house-rules", "async, 2 proposers"),
    ]
    assert {(row.train, row.val, row.k, row.slots, row.seconds) for row in rows} == {(6, 4, 2, 8, 120.0)}
    assert all(row.candidates > 0 and row.total_seconds > 120.0 for row in rows)
    assert all(0 < row.seed_score <= row.best_score <= 1 for row in rows)


def test_what_is_admitted_after_the_limit_does_not_count() -> None:
    """It stops at 60 s, and what is under way then is admitted in the drain."""
    asked = harness.Asked(harness.parse([*SMALL, "--seconds", "60"]), "house-rules", "async", 2, 0)
    commits = [SimpleNamespace(seconds=at, score=score, gap=0) for at, score in ((5, 0.1), (59, 0.3), (61, 0.9))]
    stats = SimpleNamespace(commits=commits, generations=2, occupancy=0.5)
    found = SimpleNamespace(stats=stats, candidates=[SimpleNamespace(score=0.1)], failed=[])
    program: Any = SimpleNamespace(detailed_results=found)
    row = asked._row("virtual", program, 70.0, 1.0)
    assert (row.candidates, row.best_score, row.total_seconds) == (1, 0.3, 70.0)
    fast = asked._row("http", program, 17.5, 4.0)
    assert (fast.candidates, fast.best_score, fast.total_seconds) == (0, 0.1, 70.0)


def test_the_report_compares_each_task_with_its_own_lockstep(rows: list[harness.Row]) -> None:
    slow, fast = replace(rows[0], candidates=4), replace(rows[1], candidates=18)
    other = [replace(slow, task="formula", candidates=6), replace(fast, task="formula")]
    text = harness.report([slow, fast, *other])
    assert "house-rules, async, 2 proposers: 4.50 x lockstep's validated candidates a minute, target 4 x: met" in text
    assert "formula, async, 2 proposers: 3.00 x lockstep's validated candidates a minute, target 4 x: missed" in text


def test_a_search_with_real_models_leaves_a_row_with_its_test_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over HTTP, with the real sandbox; the models are simulated."""
    write_samples(tmp_path / "data")
    monkeypatch.setenv("FLASHEVOLVE_DATA", str(tmp_path / "data"))
    out = tmp_path / "rows.jsonl"
    size = replace(symptom2disease.DEFINITION, size=Size(train=6, val=4, test=3))
    monkeypatch.setattr(harness_run, "definition_of", lambda *_: size)
    with SimServer("h100-qwen3-8b", time_scale=100) as server:
        models = [f"--{kind}-{part}" for kind in ("task", "proposer") for part in ("model", "base")]
        given = [text for name in models for text in (name, server.api_base if "base" in name else "openai/simulated")]
        layers = ["--accept-missing", "user", "namespaces", "landlock", "seccomp"]
        assert harness_run.main(["symptom2disease", *given, "--iterations", "1", "--out", str(out), *layers]) == 0
    [row] = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert 0 <= row["test"] <= 1
    assert row["candidates"][0]["source"].startswith("class ")
    assert row["proposer_requests"] >= 1
    assert f"test {row['test_before']:.3f} -> {row['test']:.3f}" in capsys.readouterr().out
