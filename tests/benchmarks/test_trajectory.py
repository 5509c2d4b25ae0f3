"""The arithmetic of trajectories, and what the recorder makes of dspy.GEPA's events."""

from __future__ import annotations

from typing import Any

import dspy
import pytest

from benchmarks.trajectory import Recorder
from tests.fakes import Chain, digits, examples, reflection_lm, task_lm


def _validated(candidate: int, parents: list[int], score: float, examples: int, of: int) -> Any:
    return {
        "candidate_idx": candidate,
        "parent_ids": parents,
        "average_score": score,
        "num_examples_evaluated": examples,
        "total_valset_size": of,
    }


def test_a_partly_validated_candidate_does_not_count_for_the_best_score() -> None:
    recorder = Recorder(clock=iter(range(9)).__next__)
    recorder.on_valset_evaluated(_validated(0, [], 0.2, 10, 10))
    recorder.on_valset_evaluated(_validated(1, [0], 0.9, 3, 10))
    assert recorder.trajectory.end.best_score == 0.2
    recorder.on_valset_evaluated(_validated(1, [0], 0.3, 10, 10))
    assert recorder.trajectory.end.best_score == 0.3
    assert recorder.trajectory.seed_score == 0.2


def test_the_true_score_is_that_of_the_program_with_the_best_validated_score() -> None:
    recorder = Recorder(clock=iter(range(9)).__next__, true_score=lambda texts: float(texts["p"]))
    for number, (score, true) in enumerate([(0.2, "0.3"), (0.5, "0.1"), (0.4, "0.9"), (0.6, "0.2")]):
        recorder.on_valset_evaluated({**_validated(number, [], score, 10, 10), "candidate": {"p": true}})
    assert [point.true_score for point in recorder.trajectory.points] == [0.3, 0.1, 0.1, 0.2]
    assert recorder.trajectory.seed_true_score == 0.3


def test_the_recorder_agrees_with_the_results_of_dspy_gepa() -> None:
    recorder = Recorder()
    settings: dict[str, Any] = {"max_metric_calls": 120, "track_stats": True, "num_threads": 2}
    optimizer = dspy.GEPA(digits, reflection_lm=reflection_lm(), gepa_kwargs={"callbacks": [recorder]}, **settings)
    with dspy.context(lm=task_lm()):
        found = optimizer.compile(Chain(), trainset=examples("train", 9), valset=examples("val", 8))
    details, end = found.detailed_results, recorder.trajectory.end
    assert len(details.val_aggregate_scores) > 1
    assert end.best_score == pytest.approx(max(details.val_aggregate_scores))
    assert recorder.trajectory.seed_score == pytest.approx(details.val_aggregate_scores[0])
    assert end.accepted == len(details.candidates) - 1
    assert end.metric_calls == details.total_metric_calls
    assert end.proposals >= end.accepted > 0
    assert recorder.trajectory.points[0].metric_calls == 8
    depths: list[int] = []
    for parents in details.parents:
        known = [depths[parent] for parent in parents if parent is not None]
        depths.append(1 + max(known) if known else 0)
    assert end.depth == max(depths)
