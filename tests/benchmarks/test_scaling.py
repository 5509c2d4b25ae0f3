"""The scaling benchmark: its rows, its table, and a run of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.methods import Limits, method
from benchmarks.scaling import HEADER, ScalingRow, cells, medians, recorded, slope
from benchmarks.tasks import task_kind
from benchmarks.virtual import Setting, run_virtually

ROW = ScalingRow("async", 0, slots=8, val=50, train=60, limit=60.0, tokens_per_second=100.0, proposals=6)


def test_a_slope_of_one_is_in_proportion_and_none_where_nothing_was_written() -> None:
    assert slope(ROW, replace(ROW, slots=64, tokens_per_second=800.0)) == pytest.approx(1.0)
    assert slope(ROW, replace(ROW, slots=64)) == pytest.approx(0.0)
    assert slope(ROW, replace(ROW, slots=64, tokens_per_second=0.0)) is None
    assert slope(ROW, ROW) is None


def test_a_line_has_the_medians_of_its_seeds_and_grows_from_the_fewest_slots() -> None:
    wide = replace(ROW, slots=64, tokens_per_second=400.0, mean_gap=4.0, best_score=0.5)
    rows = [
        replace(ROW, limit=120.0, slots=64, tokens_per_second=7.0),
        replace(ROW, val=500, tokens_per_second=50.0),
        *(replace(wide, seed=seed, tokens_per_second=value) for seed, value in enumerate([300.0, 400.0, 900.0])),
        ROW,
    ]
    lines = [dict(zip(HEADER, line, strict=True)) for line in cells(rows)]
    assert [(line["seconds"], line["val"], line["slots"]) for line in lines] == [
        ("60", "50", "8"), ("60", "50", "64"), ("60", "500", "8"), ("120", "50", "64"),
    ]  # fmt: skip
    assert lines[1]["tokens/s"] == "400"
    assert [line["x fewest slots"] for line in lines] == ["1.0", "4.0", "1.0", "1.0"]
    assert [line["slope"] for line in lines] == ["-", "0.67", "-", "-"]
    assert lines[1]["mean gap"] == "4.0"
    assert lines[0]["proposals a minute"] == "6.0"
    assert medians(rows)[1].best_score == 0.5


def test_a_run_is_cancelled_at_its_limit_with_the_figures_of_one_that_drains() -> None:
    task, setting = task_kind("few").task(0), Setting(profile="h100-qwen3-8b", train=12, val=20)
    limits = Limits(16, 0, seconds=40.0)
    drained, cancelled = (run_virtually(method("async-full"), task, limits, setting, drain) for drain in (True, False))
    assert cancelled.error == drained.error == ""
    assert cancelled.seconds == pytest.approx(40.0, abs=1.0)
    assert drained.seconds > 45.0
    assert cancelled.at() == drained.at()
    assert cancelled.tokens == drained.tokens
    assert cancelled.stats is not None
    assert drained.stats is not None
    assert 0 < cancelled.stats.metric_calls < drained.stats.metric_calls


def test_a_run_that_is_cancelled_before_its_seed_is_validated_has_no_statistics() -> None:
    task, setting = task_kind("few").task(0), Setting(profile="h100-qwen3-8b", train=12, val=20)
    run = run_virtually(method("async-full"), task, Limits(4, 0, seconds=2.0), setting, drain=False)
    assert (run.error, run.stats, run.at().validations) == ("", None, 0)


def test_a_run_that_the_file_has_is_not_made_again_and_one_that_failed_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, asked = tmp_path / "scaling.jsonl", list[tuple[int, int]]()

    def made(jobs: list[ScalingRow], side_by_side: int) -> list[ScalingRow]:
        asked.extend((job.slots, job.val) for job in jobs)
        return [replace(job, tokens_per_second=1.0, error="no" if job.slots == 9 else "") for job in jobs]

    monkeypatch.setattr(scaling, "made", made)
    command = ["--slots", "8", "9", "--vals", "5", "--methods", "async", "--out", str(out)]
    assert scaling.main(command) == 1
    assert scaling.main(command) == 1
    assert asked == [(8, 5), (9, 5), (9, 5)]
    assert [row.slots for row in recorded(out)] == [8]


def test_more_slots_write_more_in_virtual_time(tmp_path: Path) -> None:
    out = tmp_path / "scaling.jsonl"
    command = ["--slots", "4", "32", "--vals", "20", "--seconds", "20", "--methods", "async-full", "--out", str(out)]
    assert scaling.main(command) == 0
    few, many = recorded(out)
    assert many.tokens_per_second > 4 * few.tokens_per_second
    assert {"command", "date", "versions"} <= json.loads(out.read_text().splitlines()[0]).keys()
