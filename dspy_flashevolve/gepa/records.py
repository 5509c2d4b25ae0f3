"""What flows through a step of GEPA: frozen records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import anyio
from gepa.core.adapter import EvaluationBatch
from gepa.core.state import ValsetEvaluation
from gepa.proposer.base import CandidateProposal
from gepa.strategies.proposal_sampling import ProposalTask

from dspy_flashevolve.engine.errors import RolloutUnresolvedError

Candidate = dict[str, str]
Batch = EvaluationBatch[Any, Any]


@dataclass(frozen=True, slots=True)
class Selected:
    """One or more (parent, minibatch) pairs; more than one where the user's sampling strategy says so.

    Args:
        bases: for each task the handle of the speculative candidate that it starts from; None where it starts from
            gepa's pool. Its ``parent_idx`` is the nearest confirmed ancestor then.
    """

    tasks: tuple[ProposalTask[Any, Any], ...]
    bases: tuple[int | None, ...]


class LateRollouts:
    """The rest of a minibatch whose evaluation was released early."""

    def __init__(self) -> None:
        self._ended = anyio.Event()
        self._batch: Batch | None = None
        self._error: Exception | None = None

    async def complete(self) -> Batch:
        """The evaluation on the whole minibatch, when it is there.

        Raises:
            RolloutUnresolvedError: the provider gave no answer for a part of it.
        """
        await self._ended.wait()
        if self._batch is None:
            raise self._error or RolloutUnresolvedError("the run ended before the rest of the minibatch did")
        return self._batch

    def end(self, batch: Batch | None, error: Exception | None = None) -> None:
        """Everything has finished."""
        self._batch, self._error = batch, error
        self._ended.set()


@dataclass(frozen=True, slots=True)
class Parent:
    """A task's parent on its minibatch.

    Args:
        index: position of the task in the step.
        evaluation: on the part of the minibatch that has finished.
        late: the evaluation on all of it; None where nothing is missing.
        base: see :class:`Selected`.
    """

    index: int
    task: ProposalTask[Any, Any]
    evaluation: Batch
    late: LateRollouts | None
    base: int | None


@dataclass(frozen=True, slots=True)
class Child:
    """A proposed candidate, before its screen.

    Args:
        parent: what it was made from, on its minibatch.
        feedback: what the metric said of the parent's rollouts.
    """

    parent: Parent
    candidate: Candidate
    metadata: dict[str, Any]
    feedback: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Crossover:
    """Two parents of the frontier and what their child is screened on (gepa's merge).

    Args:
        parents: indices in the pool.
        parent_scores: of each parent on the subsample, in the order of ``ids``.
    """

    candidate: Candidate
    parents: tuple[int, int]
    ancestor: int
    ids: tuple[Any, ...]
    parent_scores: tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Screened:
    """Proposals that passed their screen, to be validated.

    Args:
        bases: handles of the speculative candidates that their parents are; see :class:`Selected`.
    """

    proposals: tuple[CandidateProposal[Any], ...]
    bases: tuple[int | None, ...]
    merge: bool = False


@dataclass(frozen=True, slots=True)
class Validated:
    """Proposals with their validations, to be committed.

    Args:
        calls: metric calls that each validation cost at most (cached examples cost none).
        bases: see :class:`Screened`.
        keys: for each the handle under which it could be selected while it was validated; None where it could not.
    """

    proposals: tuple[CandidateProposal[Any], ...]
    evaluations: tuple[ValsetEvaluation[Any, Any], ...]
    calls: tuple[int, ...]
    bases: tuple[int | None, ...] = ()
    keys: tuple[int | None, ...] = ()
    merge: bool = False


@dataclass(frozen=True, slots=True)
class Commit:
    """One change of the pool."""

    candidate: int
    version: int
    score: float
    best_score: float
    generation: int
    parents: tuple[int, ...] = ()
