"""What comes from outside and is not as the journal's tables want it: nothing of it ends, hangs or spoils a run."""

from __future__ import annotations

import threading
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import dspy
import pytest

from dspy_flashevolve.engine.check import check
from dspy_flashevolve.engine.errors import JournalError
from dspy_flashevolve.engine.store import Store
from dspy_flashevolve.gepa.iterations import Iterations
from tests.contract.surface import Scored, simulated
from tests.contract.surface import sql as rows
from tests.contract.test_going_on import run


@pytest.mark.parametrize(("schedule", "after"), [("async", 5), ("async", 40), ("lockstep", 5)])
def test_a_journal_that_fails_ends_the_run_at_once_and_scores_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str, after: int
) -> None:
    """A metric call that could not be noted is no failure of the candidate's."""
    made = 0
    write = Store._write_batch  # pyright: ignore[reportPrivateUsage]

    def full(self: Store, rows: list[Any]) -> None:
        if made >= after:
            self.failure = self.failure or JournalError("the disk is full")
        write(self, rows)

    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        nonlocal made
        made += pred_name is None
        return dspy.Prediction(score=0.5, feedback="not a zero")

    monkeypatch.setattr(Store, "_write_batch", full)
    with pytest.raises(JournalError):
        run(tmp_path, 60, predictors=1, metric=metric, schedule=schedule)
    assert made < after + 20
    monkeypatch.undo()
    details = run(tmp_path, 60, predictors=1, metric=metric, schedule=schedule)
    assert {score for scores in details.val_subscores for score in scores.values()} == {0.5}
    assert check(tmp_path).problems == []


def test_half_a_surrogate_pair_is_written_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append("ends", step=1, session=1, ended_at=0.0, way="failed", reason="cut \ud83d off")
    waiting = threading.Thread(target=store.flush_blocking, daemon=True)
    waiting.start()
    waiting.join(10)
    assert not waiting.is_alive()
    assert store.rows("SELECT reason FROM ends")[0]["reason"] == r"cut \ud83d off"
    store.close()


def test_whatever_cannot_be_written_fails_the_flush_and_does_not_hang(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append("ends", step=2**70, session=1, ended_at=0.0, way="failed", reason="")  # OverflowError
    with pytest.raises(JournalError, match="too large"):
        store.flush_blocking()
    store.close()


@pytest.mark.parametrize(
    ("score", "options"),
    [(0.5, {}), (True, {}), (1, {}), (True, {"schedule": "lockstep"}), (True, {"search": "pareto"})],
)
def test_scores_that_json_or_sqlite_does_not_know_do_not_end_a_run(
    tmp_path: Path, score: Any, options: dict[str, Any]
) -> None:
    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        return dspy.Prediction(score=score, feedback="-", objective_scores={"a": Fraction(1, 4)})

    run(tmp_path, 40, predictors=1, metric=metric, **options)
    run(tmp_path, 60, predictors=1, metric=metric, **options)
    assert check(tmp_path).problems == []


@pytest.mark.long
def test_a_crossover_that_was_under_way_goes_on_where_further_ones_are_not_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Iterations.commit

    def killed(pool: Any, step: Any, work: Any) -> Any:
        if any(one.proposal.tag == "merge" for one in work):
            raise KeyError("killed before the commit of a crossover")
        return commit(pool, step, work)

    monkeypatch.setattr(Iterations, "commit", killed)
    options: dict[str, Any] = {"schedule": "lockstep", "predictors": 2, "seed": 2}
    with pytest.raises(KeyError):
        run(tmp_path, 900, **options)
    monkeypatch.undo()
    [(made,)] = rows(tmp_path, "SELECT SUM(calls) FROM calls")
    run(tmp_path, made + 20, use_merge=False, **options)
    [(committed,)] = rows(tmp_path, "SELECT COUNT(*) FROM steps s JOIN ends e ON e.step = s.number "
                          "WHERE s.selection LIKE '%ancestor%' AND e.session = 2 AND e.way = 'committed'")  # fmt: skip
    assert committed == 1
    assert check(tmp_path).problems == []


@cache
def calls_at_a_commit() -> int:
    """Metric calls that a run has made when it commits its second candidate: what that is follows from its prompts."""
    commit, calls, metric = Iterations.commit, list[int](), Scored()

    def noted(pool: Any, step: Any, work: Any) -> Any:
        calls.append(len(metric.questions))
        return commit(pool, step, work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Iterations, "commit", noted)
        simulated(120, search="pareto", num_threads=8, metric=metric)
    return calls[1]


@pytest.mark.parametrize("left", [1, 7, 19])
def test_a_validated_child_is_committed_although_the_budget_pays_no_further_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """What is paid is not thrown away, wherever in its budget a run was interrupted."""
    budget = calls_at_a_commit() + left
    commit, held, metric = Iterations.commit, list[Any](), Scored()

    def killed(pool: Any, step: Any, work: Any) -> Any:
        if len(metric.questions) >= budget - 20:
            held.append(step.number)
            raise KeyError("killed before a commit")
        return commit(pool, step, work)

    monkeypatch.setattr(Iterations, "commit", killed)
    options: dict[str, Any] = {"search": "pareto", "num_threads": 8, "metric": metric, "log_dir": str(tmp_path)}
    with pytest.raises(KeyError):
        simulated(budget, **options)
    monkeypatch.undo()
    details = simulated(budget, **options).detailed_results
    assert len(metric.questions) <= details.total_metric_calls <= budget
    ways = dict(rows(tmp_path, "SELECT step, way FROM ends"))
    assert [ways[number] for number in held] == ["committed"] * len(held)
    assert check(tmp_path).problems == []
