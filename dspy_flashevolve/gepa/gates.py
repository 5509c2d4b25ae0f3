"""Giving up an evaluation whose outcome is known: no further call of it could change what is decided.

It rests on ``perfect_score``, the highest score there is, as dspy.GEPA has it. A metric that was once seen above it
turns the gates off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gepa.strategies.acceptance import ImprovementOrEqualAcceptance, StrictImprovementAcceptance
from gepa.strategies.proposal_selection import AllImprovements, BestImprovement, TopKImprovements

from dspy_flashevolve.engine.speculation import at_most
from dspy_flashevolve.gepa.parts import Parts

SELECTIONS = (AllImprovements, BestImprovement, TopKImprovements)
"""gepa's selection strategies that take nothing which the acceptance criterion refuses."""


class Gate:
    """Watches the scores of one evaluation, and closes once their sum can no longer pass.

    Args:
        requests: examples of the evaluation.
        passes: whether a sum passes; monotone.
        highest: the highest score that an example can have; asked each time.
    """

    def __init__(self, requests: int, passes: Callable[[float], bool], highest: Callable[[], float]) -> None:
        self.scores: list[float | None] = [None] * requests
        self._passes = passes
        self._highest = highest
        self.closed = False

    def __call__(self, index: int, score: float) -> bool:
        """Take the score of example number ``index``; False from when the sum cannot pass any more."""
        self.scores[index] = score
        self.closed = self.closed or not self._passes(at_most(self.scores, self._highest()))
        return not self.closed

    @property
    def seen(self) -> list[float]:
        """The scores that are there, in the order of the examples."""
        return [score for score in self.scores if score is not None]


def rejects_by_sum(parts: Parts) -> bool:
    """Whether a child whose summed score cannot pass is refused, whatever else is known of it."""
    return type(parts.selection_strategy) in SELECTIONS and type(parts.acceptance) in (
        StrictImprovementAcceptance,
        ImprovementOrEqualAcceptance,
    )


def passes_screen(criterion: Any, before: Callable[[], float | None]) -> Callable[[float], bool]:
    """gepa's built-in criteria as a question to the child's sum.

    Args:
        before: the parent's sum; None as long as it is not known.
    """
    strict = type(criterion) is StrictImprovementAcceptance

    def passes(total: float) -> bool:
        needed = before()
        return needed is None or (total > needed if strict else total >= needed)

    return passes
