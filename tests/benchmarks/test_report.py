"""The report: what its tables and curves say, and that the page needs nothing but itself."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pictures import curve
from benchmarks.report import COLUMNS, cells, main, page, read
from benchmarks.results import Result

SEED = [1.0, 10, 0, 0, 0, 0.2, 0, 1]


def result(method: str, seed: int = 0, best: float = 0.5, **changes: Any) -> Result:
    end = [30.0, 300, 30, 3, 9, best, 2, 4]
    made = Result(
        "score-time", method, "a <profile>", seed, 64, 60.0, 70.0, proposals=30, metric_calls=300, best_score=best,
        seed_score=0.2, depth=2, completion_tokens=6000.0, trajectory=[SEED, end],  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    return replace(made, **changes)


def written(path: Path, *results: Result) -> Path:
    path.write_text("".join(json.dumps({**asdict(one), "command": "c", "date": "2026-01-01T0", "machine": "m"}) + "\n"
                            for one in results))  # fmt: skip
    return path


class Reader(HTMLParser):
    """Collects what a browser would load, and the tables' cells."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.cells: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]
        self._inside = tag in ("td", "th")
        if self._inside:
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.cells[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._inside = False


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


def test_a_curve_is_the_median_and_the_range_from_where_every_seed_has_a_score() -> None:
    runs = [result("async", seed, best) for seed, best in enumerate([0.4, 0.5, 0.9])]
    runs[2] = replace(runs[2], trajectory=[[6.0, *SEED[1:]], runs[2].trajectory[1]])
    places, medians, low, high = curve(runs, "seconds", 60.0)
    assert places[0] == pytest.approx(6.0)
    assert (medians[0], low[0], high[0]) == (0.2, 0.2, 0.2)
    assert (medians[-1], low[-1], high[-1]) == (0.5, 0.4, 0.9)
    by_calls = curve(runs, "metric_calls", 300)
    assert by_calls[1][-1] == 0.5
    assert curve([replace(runs[0], trajectory=[])], "seconds", 60.0) == ([], [], [], [])


def test_the_page_loads_nothing_and_shows_every_cell_as_it_is(tmp_path: Path) -> None:
    source = written(
        tmp_path / "runs.jsonl", result("gepa"), result("async", best=0.9, error="<b>no</b>"), result("async", 1)
    )
    assert main([str(source), "--out", str(tmp_path / "r.html"), "--pictures", str(tmp_path / "png")]) == 0
    text = (tmp_path / "r.html").read_text()
    reader = Reader()
    reader.feed(text)
    assert len(reader.loaded) == 2
    for picture in reader.loaded:
        kind, data = picture.split(",", 1)
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data).startswith(b"\x89PNG")
    assert "<b>no</b>" not in text
    assert "a &lt;profile&gt;" in text
    assert {"gepa", "async", "c", "2026-01-01", "m"} <= set(reader.cells)
    assert sorted(path.name for path in (tmp_path / "png").iterdir()) == [
        "0-score-time-metric_calls.png",
        "0-score-time-seconds.png",
    ]
    assert not re.search(r"https?://", text)


def test_slots_and_stages_are_shown_where_a_run_has_them(tmp_path: Path) -> None:
    rows = [[0, "rollout", 0.0, 2.0], [1, "rollout", 0.5, 2.5], [0, "propose", 2.0, 9.0]]
    timed = result("async", busy=[[1.0, 3.0], [2.0, 60.0]], stages=rows)
    pages = {name: page([(one, {})], tmp_path / name) for name, one in (("plain", result("async")), ("timed", timed))}
    shown = {name: re.findall(r'alt="([^"]+)"', text) for name, text in pages.items()}
    assert shown["plain"] == ["best score over seconds", "best score over metric calls"]
    assert shown["timed"] == [*shown["plain"], "slots busy over seconds", "timeline of the stages of async"]
    assert len(list((tmp_path / "timed").glob("*.png"))) == 4
    assert page([(replace(timed, error="no"), {})]).count("<img") == 3, "slots of a failed run are left out"


def test_what_drains_after_the_limit_is_in_no_curve() -> None:
    late = [90.0, 900, 90, 9, 9, 0.9, 5, 9]
    run = result("async", best=0.5)
    run = replace(run, trajectory=[*run.trajectory, late])
    assert curve([run], "seconds", 100.0)[1][-1] == 0.5
    assert curve([run], "metric_calls", 1000.0)[1][-1] == 0.5


def test_reflections_of_a_batch_that_the_limit_cuts_count_as_proposals_of_gepa_alone() -> None:
    runs = [result("gepa-independent-40", proposals=0, reflections=40), result("async", proposals=0, reflections=40)]
    batch, ours = (dict(zip(COLUMNS, line, strict=True)) for line in cells(runs))
    assert (batch["proposals a minute"], ours["proposals a minute"]) == ("40.0", "0.0")


@pytest.mark.parametrize("name", ["$\\frac$", "a$x_$b", "a/b c"])
def test_names_are_drawn_as_they_are(tmp_path: Path, name: str) -> None:
    page([(replace(result(name), benchmark=name), {})], tmp_path)
    assert len(list(tmp_path.glob("*.png"))) == 2


def test_of_equal_runs_the_last_counts(tmp_path: Path) -> None:
    source = written(tmp_path / "runs.jsonl", result("gepa", best=0.3), result("gepa", best=0.4))
    [(only, row)] = read(source)
    assert (only.best_score, row["command"]) == (0.4, "c")


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"method": "gepa"}', "null"])
def test_a_line_that_is_no_run_is_named(tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = written(tmp_path / "runs.jsonl", result("gepa"))
    source.write_text(source.read_text() + line + "\n")
    with pytest.raises(SystemExit):
        main([str(source), "--out", str(tmp_path / "r.html")])
    assert "line 2" in capsys.readouterr().err


@settings(max_examples=8)
@given(st.text(), st.text())
def test_no_name_breaks_out_of_the_page(method: str, backend: str) -> None:
    body = page([(replace(result(method or "x"), backend=backend, trajectory=[]), {"command": method})])
    reader = Reader()
    reader.feed(body)
    assert all(source.startswith("data:image/png") for source in reader.loaded)
    assert "<script" not in body
