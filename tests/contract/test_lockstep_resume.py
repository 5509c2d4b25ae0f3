"""Lockstep with a journal, stopped and taken up again at every step, is the run that was never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dspy
import pytest

from dspy_flashevolve import AsyncGEPA
from tests.contract.surface import facts
from tests.fakes import Chain, digits, examples, reflection_lm, task_lm

TRAIN, VAL = examples("t", 7), examples("v", 8)
MOST_SESSIONS = 200


class AfterSteps:
    """A stopper that says stop once `steps` have ended since it was made."""

    def __init__(self, steps: int) -> None:
        self.left = steps + 1  # it is asked once before the first

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


@pytest.mark.parametrize(("predictors", "seed"), [(1, 0), (2, 1)])
def test_a_run_stopped_at_every_step_has_the_candidates_of_one_that_was_not(
    tmp_path: Path, predictors: int, seed: int
) -> None:
    """Merges included: with two predictors gepa merges."""
    calls = 100
    whole = lockstep(calls, seed, None, predictors)
    sessions, stopped = 0, None
    while stopped is None or stopped.total_metric_calls < whole.total_metric_calls:
        stopped = lockstep(calls, seed, tmp_path, predictors, AfterSteps(1))
        sessions += 1
        assert sessions < MOST_SESSIONS
    assert sessions > 5
    assert facts(stopped) == facts(whole)
