"""What flows between GEPA's stages: frozen records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gepa.core.adapter import EvaluationBatch
from gepa.core.state import ValsetEvaluation
from gepa.proposer.base import CandidateProposal
from gepa.strategies.proposal_sampling import ProposalTask

from dspy_flashevolve.engine.flights import Rollout
from dspy_flashevolve.engine.item import Item

Candidate = dict[str, str]
Batch = EvaluationBatch[Any, Any]
SEED_TICKET = -1
"""The seed's validation belongs to no ticket; this number stands for it in claims, events and the journal."""


class Late(Protocol):
    """The rest of an evaluation whose output was released early."""

    async def complete(self) -> Batch:
        """The whole evaluation, when it is there.

        Raises:
            RolloutUnresolvedError: the provider gave no answer for a part of it.
        """
        ...


class Proposed(Protocol):
    """What a reflection proposed: component -> text, and the tokens and dollars that it took."""

    @property
    def texts(self) -> dict[str, str]: ...
    @property
    def tokens(self) -> int: ...
    @property
    def cost_dollars(self) -> float: ...


class EvolvingProgram(Protocol):
    """The program under optimization, as the loop sees it.

    Attributes:
        interruptible: whether a rollout that has begun can be given up. One in a thread cannot: it would go on without
            its slot.
    """

    @property
    def interruptible(self) -> bool: ...

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
    """One or more (parent, minibatch) pairs; more than one where the user's sampling strategy says so.

    Args:
        bases: for each task the handle of the speculative candidate that it starts from; None where it starts from
            gepa's pool. Its ``parent_idx`` is the nearest confirmed ancestor then.
    """

    tasks: tuple[ProposalTask[Any, Any], ...]
    bases: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class RolledOut:
    """The parents' evaluations on their minibatches, one a task.

    Args:
        evaluations: on the part of each minibatch that has finished.
        bases: see :class:`Selected`.
        late: for each task the evaluation on the whole minibatch; None where nothing is missing.
    """

    tasks: tuple[ProposalTask[Any, Any], ...]
    evaluations: tuple[Batch, ...]
    bases: tuple[int | None, ...]
    late: tuple[Late | None, ...]


@dataclass(frozen=True, slots=True)
class Child:
    """A proposed candidate, before its screen.

    Args:
        index: position of its task in the ticket.
        feedback: what the metric said of the parent's rollouts.
        base: handle of the speculative candidate that its parent is; None for one of gepa's pool.
        late: the parent's evaluation on the whole minibatch, where ``parent_evaluation`` is of a part.
    """

    index: int
    task: ProposalTask[Any, Any]
    candidate: Candidate
    parent_evaluation: Batch
    metadata: dict[str, Any]
    feedback: tuple[str, ...] = ()
    base: int | None = None
    late: Late | None = None


@dataclass(frozen=True, slots=True)
class Children:
    """The children of a ticket; at least one."""

    children: tuple[Child, ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """Children of one ticket that wait to be integrated.

    Args:
        children: as proposed.
        proposals: those of them that passed their screen; empty where they were not screened.
        attempts: integrations that did not take them.
    """

    children: tuple[Child, ...]
    proposals: tuple[CandidateProposal[Any], ...] = ()
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class Base:
    """What an integration stands on.

    Args:
        index: its place in gepa's pool; of its nearest confirmed ancestor where it is a head.
        key: its handle; None where it is confirmed.
        generation: steps from the seed.
    """

    candidate: Candidate
    index: int
    key: int | None
    generation: int


@dataclass(frozen=True, slots=True)
class Train:
    """An integrated candidate and the tickets whose children ride in it; the first one carries it.

    Args:
        key: its handle as a head; None for a patch, which becomes no head.
        members: with their children.
    """

    candidate: Candidate
    base: Base
    key: int | None
    members: tuple[Item[Waiting], ...]


@dataclass(frozen=True, slots=True)
class Head:
    """A head to be validated."""

    key: int
    proposal: CandidateProposal[Any]


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
        paid: metric calls that each validation cost (cached examples cost none).
        bases: see :class:`Screened`.
        keys: for each the handle under which it could be selected while it was validated; None where it could not.
        head: handle of the head that is confirmed; None for an ordinary candidate.
    """

    proposals: tuple[CandidateProposal[Any], ...]
    evaluations: tuple[ValsetEvaluation[Any, Any], ...]
    paid: tuple[int, ...]
    bases: tuple[int | None, ...] = ()
    keys: tuple[int | None, ...] = ()
    merge: bool = False
    head: int | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """One change of the pool."""

    candidate: int
    version: int
    score: float
    best_score: float
    generation: int
    parents: tuple[int, ...] = ()


@dataclass
class Counts:
    """What the run's stages have made and used; they write it, statistics read it.

    Args:
        proposals: children that the reflection wrote.
        task_tokens: prompt and completion tokens of rollouts.
        reflection_tokens: the same of reflections and integrations.
        reflection_calls: reflections asked for, integrations included.
        integration_calls: LM calls of integrations.
        cost_dollars: of all LM calls whose price is known.
    """

    proposals: int = 0
    task_tokens: int = 0
    reflection_tokens: int = 0
    reflection_calls: int = 0
    integration_calls: int = 0
    cost_dollars: float = 0.0
