"""The chaos benchmark: its claims can fail, its audit finds what it looks for, and one small real run holds them."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import dspy
import pytest

from benchmarks.chaos import INJECTED, cells, jobs_of, made, parse, problems, recorded
from benchmarks.chaos_audit import Conditions, deserved, foreign_texts, wrong_entries, wrong_scores
from benchmarks.chaos_run import ChaosRow, Job, Restart, run_job
from dspy_flashevolve.sim import Faults, HouseRules, SimServer

SMALL = Conditions(time_scale=200.0, calls=60, train=6, val=6, timeout_seconds=10.0, down_seconds=0.0)


def row(method: str = "async", faulty: bool = True, seed: int = 0, **changes: Any) -> ChaosRow:
    """A run for which every claim holds."""
    good = ChaosRow(method, faulty, seed, limit=100, step_calls=20, spent=95, answered=95, stored=40, best_score=0.8)
    if faulty:
        good = replace(good, injected=dict.fromkeys(INJECTED, 3), restarts=1)
    return replace(good, **changes)


def test_a_good_run_has_no_problem() -> None:
    assert problems([row(faulty=False), row()]) == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"answered": 92}, "3 provider errors were scored"),
        ({"wrong": 2}, "2 of 40 validation scores in the pool are not deserved"),
        ({"cached": 9, "cached_wrong": 1}, "1 of 9 cached scores are not the metric's"),
        ({"foreign": 1}, "1 candidates hold a text that no reflection wrote"),
        ({"spent": 101, "answered": 101}, "1 metric calls more than 100 were spent"),
        (
            {"spent": 80, "answered": 80, "stop_reason": "steps failed"},
            "20 metric calls were left, .* steps failed",
        ),
        ({"injected": {}}, "no hang was injected"),
        ({"restarts": 0}, "the server was restarted 0 times"),
        ({"error": "ValueError: x"}, "ValueError: x"),
    ],
)
def test_a_claim_that_does_not_hold_is_said(bad: dict[str, Any], message: str) -> None:
    found = problems([row(faulty=False), row(**bad)])
    assert len(found) == (4 if bad == {"injected": {}} else 1)
    assert any(matches(message, problem) for problem in found)


def matches(pattern: str, text: str) -> bool:
    """Whether a problem of the run with faults matches."""
    return re.search(f"async, faults, seed 0: .*{pattern}", text) is not None


def test_dspy_gepas_errors_are_no_problem_of_ours_but_an_audit_that_finds_some_without_faults_is() -> None:
    assert problems([row("gepa", answered=10, wrong=30)]) == []
    assert "cannot be trusted" in problems([row("gepa", faulty=False, answered=90)])[0]


def test_the_median_with_faults_must_reach_the_worst_run_without() -> None:
    calm = [row(faulty=False, seed=seed, best_score=score) for seed, score in enumerate((0.6, 0.7, 0.9))]
    fair = [row(seed=seed, best_score=score) for seed, score in enumerate((0.5, 0.6, 0.95))]
    poor = [row(seed=seed, best_score=score) for seed, score in enumerate((0.5, 0.59, 0.95))]
    assert problems(calm + fair) == []
    assert problems(calm + poor) == ["the median best score with faults is 0.590, under 0.600 without"]


def test_the_table_has_a_row_an_optimizer_and_server() -> None:
    rows = [row(seed=seed, faulty=faulty, wrong=seed) for seed in range(3) for faulty in (False, True)]
    table = cells([*rows, row("gepa", answered=90)])
    assert [line[:2] for line in table] == [
        ["AsyncGEPA", "no faults"],
        ["AsyncGEPA", "faults and a restart"],
        ["dspy.GEPA", "faults and a restart"],
    ]
    assert table[0][4] == "3 of 120"
    assert table[2][3] == "5"


def test_the_later_of_two_recorded_runs_counts(tmp_path: Path) -> None:
    path = tmp_path / "chaos.jsonl"
    lines = [asdict(row(wrong=1)), asdict(row()), asdict(row(faulty=False))]
    path.write_text("\n".join(json.dumps({"benchmark": "chaos", **line}) for line in lines), encoding="utf-8")
    assert recorded(path) == [row(), row(faulty=False)]


def test_each_seed_runs_both_optimizers_with_faults_and_without() -> None:
    jobs = jobs_of(parse(["--seeds", "2", "--calls", "77"]))
    assert len({(job.method, job.faulty, job.seed) for job in jobs}) == len(jobs) == 8
    assert {job.conditions.calls for job in jobs} == {77}


def test_the_audit_finds_a_score_that_a_candidate_does_not_deserve() -> None:
    task = HouseRules(rules=6, rules_per_example=3)
    candidates = [{"answer": "Follow the house rules."}, {"answer": task.optimal_instruction()}]
    truth = deserved(task, SMALL, 0, candidates)
    assert truth == deserved(task, SMALL, 0, candidates)
    assert sum(truth[0]) == 0 < sum(truth[1])
    stored = [dict(enumerate(scores)) for scores in truth]
    assert wrong_scores(stored, truth) == 0
    best = max(stored[1], key=lambda example: stored[1][example])
    stored[1][best] = 0.0
    assert wrong_scores(stored, truth) == 1


def test_a_cached_failure_is_found_and_a_cached_answer_is_not() -> None:
    task = HouseRules(rules=6, rules_per_example=3)
    valset = task.valset(1)
    words = " ".join(rule.word for rule in valset[0]["required"])
    good = (0, dspy.Prediction(answer=words), 1.0)
    bad = [(0, None, 0.0), (0, dspy.Prediction(), 0.0), (0, object(), 0.0), (0, dspy.Prediction(answer=words), 0.5)]
    assert wrong_entries([good], valset, task.metric) == 0
    assert wrong_entries([good, *bad], valset, task.metric) == 4


def test_a_text_that_no_reflection_wrote_is_found() -> None:
    assert foreign_texts([{"answer": "Follow the house rules."}, {"answer": ""}, {"answer": None}]) == 2  # type: ignore[dict-item]


def test_the_restart_comes_with_the_call_that_was_named_and_only_once() -> None:
    with SimServer(faults=Faults(unauthorized=1.0)) as server:
        restart = Restart(server, at_call=2, down_seconds=0.0)
        metric = restart.watched(lambda *_: 1.0)
        pid = server.pid
        with restart.armed():
            metric(None, None)
            metric(None, None, pred_name="answer")
            assert server.pid == pid
            metric(None, None)
            metric(None, None)
        assert (restart.count, server.pid == pid) == (1, False)
        assert not [thread for thread in threading.enumerate() if thread.name == "restart"]


def test_a_restart_whose_call_never_comes_is_called_off() -> None:
    with SimServer() as server:
        restart, pid = Restart(server, at_call=2, down_seconds=0.0), server.pid
        with restart.armed():
            pass
        assert (restart.count, server.pid) == (0, pid)


def test_without_faults_the_audit_finds_nothing_to_object_to() -> None:
    rows = list(made([Job("async", False, 0, SMALL)], side_by_side=1))
    assert problems(rows) == []
    assert rows[0].stored >= SMALL.val
    assert rows[0].cached > 0


def test_a_small_run_under_server_errors_and_a_restart_scores_none_of_them() -> None:
    conditions = replace(SMALL, calls=36, faults=Faults(server_error=0.1, truncated_body=0.05))
    small = run_job(Job("async", True, 0, conditions))
    assert small.injected.keys() == {"server_error", "truncated_body"}
    assert small.restarts == 1
    enough = replace(small, injected=dict.fromkeys(INJECTED, 1))
    assert problems([enough]) == []


def test_dspy_gepa_scores_errors_and_the_audit_counts_them() -> None:
    conditions = replace(SMALL, calls=30, faults=Faults(empty_choices=0.3))
    small = run_job(Job("gepa", True, 0, conditions))
    assert small.unanswered > 0
    assert small.spent > small.answered
