"""FlashEvolve's tables and figures: what is run and written down, and that the paper's numbers stand beside ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench, paper
from benchmarks.methods import method
from benchmarks.results import Result
from tests.benchmarks.workloads.samples import write_samples


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of small runs on a small workload, which is on the paper's list."""
    write_samples(tmp_path)
    monkeypatch.setenv("FLASHEVOLVE_DATA", str(tmp_path))
    options = ["--workload", "aime", "--most", "4", "--seconds", "100", "--seeds", "1", "--slots", "4"]
    return [*options, "--out", str(tmp_path / "paper.jsonl")]


@pytest.mark.parametrize("what", paper.EXPERIMENTS)
def test_an_experiment_runs_writes_goes_on_and_prints_the_papers_numbers(
    what: str, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(small[-1])
    assert paper.main([what, *small]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["method"] for row in rows] == list(paper.EXPERIMENTS[what].methods)
    assert all(row["error"] == "" and row["seconds"] == 100.0 for row in rows)
    first = capsys.readouterr().out.split("\n\n", 1)[1]
    assert first.splitlines()[0] == "h100-qwen3-8b, virtual time, plain model, 4 slots, 100 s"
    assert "paper's" in first.splitlines()[1]
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:-1]))
    assert paper.main([what, *small]) == 0
    assert len(out.read_text().splitlines()) == len(rows)
    assert capsys.readouterr().out.split("\n\n", 1)[1] == first, "the run that was missing is the same again"


@pytest.mark.parametrize("what", paper.EXPERIMENTS)
def test_every_method_is_one_and_every_number_of_the_paper_is_of_a_run(what: str) -> None:
    experiment = paper.EXPERIMENTS[what]
    assert all(method(name, virtual=True).name == name for name in experiment.methods)
    for figure in experiment.figures:
        assert set(figure.paper) <= set(experiment.methods)
        assert {len(numbers) for numbers in figure.paper.values()} <= {len(experiment.workloads)}


def result(name: str, proposals: int) -> Result:
    points = [[0.0, 0, 0, 0, 0, None, 0, None], [600.0, 9, 1, 1, 0, 0.5, 1, None], [1799.0, 9, 1, 1, 0, 0.75, 1, None]]
    return Result(
        "bench-ifbench-train60-val60-1800s", name, "h100", 0, 64, 1800.0, 1900.0, proposals=proposals,
        best_score=0.75, trajectory=points,
    )  # fmt: skip


def test_the_papers_number_and_ratio_stand_beside_ours() -> None:
    experiment = paper.EXPERIMENTS["table1"]
    asked = ["--workload", "ifbench", "--methods", "gepa", "flashevolve"]
    options = bench.parse([*asked, "--most", "60", "--seconds", "1800"])
    lines = paper.report(experiment, options, [result("gepa", 60), result("flashevolve", 300)]).splitlines()
    assert lines[-3].split()[-5:] == ["10.0", "8.9", "5.0", "/", "4.7"]
    assert lines[-4].split()[-5:] == ["2.0", "1.9", "1.0", "/", "1.0"]


def test_a_curve_is_read_at_a_minute_that_the_run_has_reached() -> None:
    run = result("gepa", 1)
    assert [paper.score_at(minutes)(run) for minutes in (5, 10, 30, 90)] == [None, 50.0, 75.0, None]
