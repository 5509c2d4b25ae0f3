"""Comparing a candidate with the pool's best while its validation runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dspy_flashevolve.gepa.pool import Pool


def against_best(pool: Pool, scores: Mapping[Any, float]) -> tuple[float, float | None]:
    """The mean of a candidate's scores, and that of the pool's best on the same examples.

    Where the best was run on a part of them only, both are of that part. The second is None before the seed is
    confirmed, and where the best was run on none of them.
    """
    theirs = best_scores(pool)
    common = [i for i in scores if i in theirs]
    if not common:
        return sum(scores.values()) / max(1, len(scores)), None
    return sum(scores[i] for i in common) / len(common), sum(theirs[i] for i in common) / len(common)


class Race:
    """Gives up a validation whose candidate lies clearly under the pool's best. Approximate, and optional.

    Args:
        pool: has the best.
        margin: how far under it, in score, a candidate may lie; None never gives up.
        least: examples that have to be there before it is judged.
    """

    def __init__(self, pool: Pool, margin: float | None, least: int) -> None:
        self._pool = pool
        self._margin = margin
        self._least = least
        self._scores: dict[Any, float] = {}

    def watch(self, ids: Sequence[Any]) -> Callable[[int, float], bool] | None:
        """What to tell of each example that has finished; None where nothing is ever given up."""
        if self._margin is None:
            return None
        return lambda index, score: self._goes_on(ids[index], score)

    def _goes_on(self, example: Any, score: float) -> bool:
        self._scores[example] = score
        if len(self._scores) < self._least or self._margin is None:
            return True
        mean, best = against_best(self._pool, self._scores)
        return best is None or mean >= best - self._margin


def best_scores(pool: Pool) -> dict[Any, float]:
    """The validation scores of the pool's best candidate; none before the seed is confirmed."""
    if not pool.seed_confirmed:
        return {}
    return pool.state.prog_candidate_val_subscores[pool.val_evaluation_policy.get_best_program(pool.state)]
