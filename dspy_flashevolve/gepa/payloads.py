"""What flows between GEPA's stages: frozen records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gepa.core.adapter import EvaluationBatch
from gepa.core.state import ValsetEvaluation
from gepa.proposer.base import CandidateProposal
from gepa.strategies.proposal_sampling import ProposalTask

from dspy_flashevolve.engine.rollouts import Rollout

Candidate = dict[str, str]
Batch = EvaluationBatch[Any, Any]


class Proposed(Protocol):
    """What a reflection proposed: component -> text, and the tokens that it took."""

    @property
    def texts(self) -> dict[str, str]: ...
    @property
    def tokens(self) -> int: ...


class EvolvingProgram(Protocol):
    """The program under optimization, as the loop sees it."""

    async def rollout(self, candidate: Candidate, example: Any, *, capture_traces: bool) -> Rollout:
        """Run a candidate on one example."""
        ...

    async def reflective_dataset(
        self, candidate: Candidate, evaluation: Batch, components: list[str], rng: Any
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """The records that reflection reads."""
        ...

    async def propose(
        self, candidate: Candidate, dataset: Mapping[str, Sequence[Mapping[str, Any]]], components: list[str]
    ) -> Proposed:
        """New texts for the components."""
        ...


@dataclass(frozen=True, slots=True)
class Selected:
    """One or more (parent, minibatch) pairs; more than one where the user's sampling strategy says so."""

    tasks: tuple[ProposalTask[Any, Any], ...]


@dataclass(frozen=True, slots=True)
class RolledOut:
    """The parents' evaluations on their minibatches, one a task."""

    tasks: tuple[ProposalTask[Any, Any], ...]
    evaluations: tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class Child:
    """A proposed candidate, before its screen.

    Args:
        index: position of its task in the ticket.
    """

    index: int
    task: ProposalTask[Any, Any]
    candidate: Candidate
    parent_evaluation: Batch
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Children:
    """The children of a ticket; at least one."""

    children: tuple[Child, ...]


@dataclass(frozen=True, slots=True)
class MergePlan:
    """Two parents of the frontier and what their merged child is screened on.

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
    """Proposals that passed their screen, to be validated."""

    proposals: tuple[CandidateProposal[Any], ...]
    merge: bool = False


@dataclass(frozen=True, slots=True)
class Validated:
    """Proposals with their validations, to be committed.

    Args:
        paid: metric calls that each validation cost (cached examples cost none).
    """

    proposals: tuple[CandidateProposal[Any], ...]
    evaluations: tuple[ValsetEvaluation[Any, Any], ...]
    paid: tuple[int, ...]
    merge: bool = False


@dataclass(frozen=True, slots=True)
class Commit:
    """One change of the pool."""

    candidate: int
    version: int
    score: float
    best_score: float
    generation: int


@dataclass
class Counts:
    """What the run's stages have made and used; they write it, statistics read it.

    Args:
        proposals: children that the reflection wrote.
        task_tokens: prompt and completion tokens of rollouts.
        reflection_tokens: the same of reflections.
    """

    proposals: int = 0
    task_tokens: int = 0
    reflection_tokens: int = 0
