"""Every candidate so far, with what it scored and cost: what proposers read, and what the winner is taken from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dspy_flashevolve.harness.drafts import Draft
from dspy_flashevolve.harness.front import pareto_front
from dspy_flashevolve.sandbox.outcomes import Failure, Outcome


@dataclass(frozen=True)
class Trial:
    """One run of a candidate on one example.

    Args:
        example: which one, such as "train 3".
        inputs: of the example, as JSON.
        outcome: what the sandbox gave.
        score: the metric's; the failure score where the run failed.
        feedback: the metric's words; empty where it gave none.
        cost: of the run.
        labels: of the example, as JSON; only of training examples.
    """

    example: str
    inputs: dict[str, Any]
    outcome: Outcome
    score: float
    feedback: str = ""
    cost: float = 0.0
    labels: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Evaluated:
    """A candidate with its scores on the whole validation set.

    Args:
        draft: the candidate.
        scores, costs: one a validation example, in order; at least one.
        failures: why runs on validation examples failed, without their labels.
        traces: runs on training examples, with feedback.
        memory: what ``learn`` has left; None where it does not learn.
    """

    draft: Draft
    scores: tuple[float, ...]
    costs: tuple[float, ...]
    failures: tuple[Failure, ...] = ()
    traces: tuple[Trial, ...] = ()
    memory: Any = None

    @property
    def score(self) -> float:
        """Mean over the validation set."""
        return sum(self.scores) / len(self.scores)

    @property
    def cost(self) -> float:
        """Mean over the validation set."""
        return sum(self.costs) / len(self.costs)


@dataclass(frozen=True)
class Failed:
    """A candidate that failed its check or its evaluation.

    Args:
        draft: the candidate.
        failure: why.
        traces: runs on training examples, with feedback.
    """

    draft: Draft
    failure: Failure
    traces: tuple[Trial, ...] = ()


Checked = Evaluated | Failed
"""A candidate whose check, or whose evaluation, is done."""


class Archive:
    """Candidates by number, in the order of their admission. Only the admit stage changes it."""

    def __init__(self) -> None:
        self.candidates: list[Evaluated] = []
        self.failed: list[Failed] = []

    @property
    def version(self) -> int:
        """How many candidates have been admitted."""
        return len(self.candidates)

    @property
    def front(self) -> tuple[int, ...]:
        """Numbers of the candidates that no other beats in score and cost, best score first."""
        return pareto_front({number: (one.score, one.cost) for number, one in enumerate(self.candidates)})

    @property
    def best(self) -> int:
        """Number of the candidate with the best score; of equals the cheapest, then the first.

        Raises:
            IndexError: the archive is empty.
        """
        return self.front[0]

    def add(self, candidate: Evaluated) -> int:
        """Admit a candidate; returns its number."""
        self.candidates.append(candidate)
        return len(self.candidates) - 1

    def refuse(self, candidate: Failed) -> None:
        """Keep a failed candidate, so that nobody makes the same mistake again."""
        self.failed.append(candidate)
