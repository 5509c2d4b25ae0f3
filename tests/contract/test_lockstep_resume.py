"""Lockstep with a journal, stopped and taken up again at every ticket, is the run that was never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dspy
import pytest

from dspy_flashevolve import AsyncGEPA
from tests.fakes import Chain, digits, examples, reflection_lm, task_lm

TRAIN, VAL = examples("t", 7), examples("v", 8)
MOST_SESSIONS = 200


class AfterTickets:
    """A stopper that says stop once `tickets` have ended since it was made."""

    def __init__(self, tickets: int) -> None:
        self.left = tickets + 1  # it is asked once before the first

    def __call__(self, state: Any) -> bool:
        self.left -= 1
        return self.left <= 0


def lockstep(calls: int, seed: int, log_dir: Path | None, predictors: int, stopper: Any = None, **options: Any) -> Any:
    with dspy.context(lm=task_lm(seed)):
        optimizer = AsyncGEPA(
            digits,
            max_metric_calls=calls,
            reflection_lm=reflection_lm(seed),
            schedule="lockstep",
            seed=seed,
            log_dir=None if log_dir is None else str(log_dir),
            track_stats=True,
            gepa_kwargs={} if stopper is None else {"stop_callbacks": [stopper]},
            **options,
        )
        return optimizer.compile(Chain(predictors), trainset=TRAIN, valset=VAL).detailed_results


def facts(details: Any) -> tuple[Any, ...]:
    candidates = [
        {name: predictor.signature.instructions for name, predictor in program.named_predictors()}
        for program in details.candidates
    ]
    return candidates, details.parents, details.val_aggregate_scores, details.val_subscores, details.total_metric_calls


@pytest.mark.parametrize(("predictors", "seed"), [(1, 0), (2, 1), (2, 2)])
def test_a_run_stopped_at_every_ticket_has_the_candidates_of_one_that_was_not(
    tmp_path: Path, predictors: int, seed: int
) -> None:
    """Merges included: with two predictors gepa merges."""
    calls = 150
    whole = lockstep(calls, seed, None, predictors)
    sessions, stopped = 0, None
    while stopped is None or stopped.total_metric_calls < whole.total_metric_calls:
        stopped = lockstep(calls, seed, tmp_path, predictors, AfterTickets(1))
        sessions += 1
        assert sessions < MOST_SESSIONS
    assert sessions > 5
    assert facts(stopped) == facts(whole)
