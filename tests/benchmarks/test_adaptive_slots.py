"""The benchmark of adaptive slots: its options, its lines and its table, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import dspy

from benchmarks import adaptive_slots
from benchmarks.adaptive_slots import Kept, Slots
from benchmarks.results import Result
from dspy_flashevolve.engine.events import LimitChanged
from tests.fakes import Chain, digits, examples, reflection_lm


def result(tokens: float) -> Result:
    return Result("adaptive_slots", "x", "sim", 0, 32, seconds=10.0, total_seconds=11.0, completion_tokens=tokens)


def finished(slots: Slots) -> Slots:
    changes = [LimitChanged(0.5, "e", 1, 2, "it binds"), LimitChanged(9.0, "e", 2, 1, "refused")]
    stats: Any = SimpleNamespace(limit_changes=changes, peak_slots=2, retried_requests=1, pauses=0)
    slots.kept.append(Kept({}, 1, stats))
    return slots


def test_a_run_leaves_the_course_of_its_limit() -> None:
    line = adaptive_slots.record(finished(Slots(64, 1)), result(100.0))
    assert line["limit_changes"] == [[0.5, 1, 2, "it binds"], [9.0, 2, 1, "refused"]]
    assert (line["start"], line["tokens_per_second"], line["retried_requests"]) == (1, 10.0, 1)


def test_the_table_compares_with_the_best_fixed_number() -> None:
    runs = [(finished(Slots(64, 1)), result(90.0)), (Slots(8), result(50.0)), (Slots(32), result(100.0))]
    rows = adaptive_slots.rows(runs)
    assert [row[0] for row in rows] == ["adaptive-1-64", "fixed-8", "fixed-32"]
    assert [row[4] for row in rows] == ["90%", "50%", "100%"]


def test_the_figures_of_a_run_are_kept() -> None:
    arguments = {"metric": digits, "max_metric_calls": 24, "reflection_lm": reflection_lm(), "track_stats": True}
    kept = Kept(arguments | {"num_threads": None, "max_concurrency": 4}, threads=2)
    assert isinstance(kept.compile(Chain(), trainset=examples("t", 3), valset=examples("v", 3)), dspy.Module)
    assert kept.stats.metric_calls <= 24
