"""The frozen records that flow from stage to stage of a step, and what gepa calls their parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gepa.core.adapter import EvaluationBatch
from gepa.core.state import CachedEvaluation, ValsetEvaluation
from gepa.proposer.base import CandidateProposal, SubsampleEvaluation
from gepa.strategies.proposal_sampling import ProposalTask

from dspy_flashevolve.engine.steps import Step
from dspy_flashevolve.engine.store import Rollout
from dspy_flashevolve.gepa.edits import Edit

Candidate = dict[str, str]
Batch = EvaluationBatch[Any, Any]
Task = ProposalTask[Any, Any]
Proposal = CandidateProposal[Any]


@dataclass(frozen=True, slots=True)
class Selected:
    """One or more (parent, minibatch) pairs; more than one where the user's sampling strategy says so.

    Args:
        bases: for each task the handle of the speculative candidate that it starts from; None where it starts from
            gepa's pool. Its ``parent_idx`` is the nearest confirmed ancestor then.
    """

    tasks: tuple[Task, ...]
    bases: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Parent:
    """A task's parent, evaluated on its minibatch; ``index`` is the task's position in the step, ``base`` as in
    :class:`Selected`."""

    index: int
    task: Task
    evaluation: Batch
    base: int | None


@dataclass(frozen=True, slots=True)
class Base:
    """A candidate at ``index`` of the pool that a patched child stands on."""

    index: int
    texts: Candidate


@dataclass(frozen=True, slots=True)
class Child:
    """A proposed candidate, before its screen.

    Args:
        parent: what it was made from, on its minibatch.
        texts: the components that were written anew.
        feedback: what the metric said of the parent's rollouts.
        patched: what it stands on since it was patched; None where it stands on its parent.
        edits: component -> edits of the parent's text that made the new one; without those that were written as a
            whole.
    """

    parent: Parent
    texts: Candidate
    feedback: tuple[str, ...] = ()
    patched: Base | None = None
    edits: Mapping[str, tuple[Edit, ...]] = field(default_factory=dict[str, tuple[Edit, ...]])

    @property
    def is_whole(self) -> bool:
        """Whether a text of it was written as a whole: it stands for itself then, as in GEPA."""
        return any(text != self.source[name] and name not in self.edits for name, text in self.texts.items())

    @property
    def source(self) -> Candidate:
        """The texts in which the new ones take their place."""
        return self.parent.task.parent_candidate if self.patched is None else self.patched.texts

    @property
    def candidate(self) -> Candidate:
        """All texts, with the new ones in their place."""
        return {**self.source, **self.texts}

    @property
    def base(self) -> int | None:
        """Handle of the speculative candidate that it stands on; see :class:`Selected`."""
        return self.parent.base if self.patched is None else None

    def proposal(self, step: Step, batch: Batch | None = None) -> Proposal:
        """Make gepa's proposal of the child, with its screen where there is one."""
        task, before = self.parent.task, self.parent.evaluation
        nothing_to_show = {f"{what}:{name}": "" for name in self.texts for what in ("prompt", "raw_lm_output")}
        bases = [] if self.patched is None else [self.patched.index]
        return CandidateProposal(
            candidate=self.candidate,
            parent_program_ids=list(dict.fromkeys([*bases, task.parent_idx])),
            subsample_indices=task.minibatch_ids,
            subsample_scores_before=before.scores,
            subsample_scores_after=None if batch is None else batch.scores,
            eval_before=_subsample(before),
            eval_after=None if batch is None else _subsample(batch),
            tag="reflective_mutation",
            metadata={"proposal_id": f"{step.number + 1}-{self.parent.index}", **nothing_to_show},
        )


@dataclass(frozen=True, slots=True)
class Crossover:
    """Two parents of the frontier, as indices in the pool, and the examples that their child is screened on, with each
    parent's scores there (gepa's merge)."""

    candidate: Candidate
    parents: tuple[int, int]
    ancestor: int
    ids: tuple[Any, ...]
    parent_scores: tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Screened:
    """A proposal that passed its screen, to be validated.

    Args:
        base: handle of the speculative candidate that its parent is; see :class:`Selected`.
    """

    proposal: Proposal
    base: int | None = None


@dataclass(frozen=True, slots=True)
class Validated:
    """A proposal with its validation, to be committed.

    ``calls`` are what the validation cost at most; ``base`` as in :class:`Screened`; ``key`` is the handle under which
    it could be selected while it was validated."""

    proposal: Proposal
    evaluation: ValsetEvaluation[Any, Any]
    calls: int
    base: int | None
    key: int | None


@dataclass(frozen=True, slots=True)
class ValidationPlan:
    """Which validation examples are to be run for a candidate, and what the cache has of the others."""

    candidate: Candidate
    cached: dict[Any, CachedEvaluation[Any]]
    missing: list[Any]


@dataclass(frozen=True, slots=True)
class Commit:
    """One change of the pool."""

    candidate: int
    version: int
    score: float
    best_score: float
    generation: int
    parents: tuple[int, ...] = ()


def task_key(task: Task) -> tuple[Any, ...]:
    """Make a key that is equal for the same parent on the same minibatch."""
    return (tuple(sorted(task.parent_candidate.items())), tuple(task.minibatch_ids))


def evaluation_of(rollouts: Mapping[Any, Rollout]) -> ValsetEvaluation[Any, Any]:
    """Put rollouts on validation examples together as gepa does."""
    objectives = {i: dict(rollout.objective_scores) for i, rollout in rollouts.items()}
    return ValsetEvaluation(
        outputs_by_val_id={i: rollout.output for i, rollout in rollouts.items()},
        scores_by_val_id={i: rollout.score for i, rollout in rollouts.items()},
        objective_scores_by_val_id=objectives if any(objectives.values()) else None,
    )


def scored(scores: list[float]) -> Batch:
    """Make an evaluation of which nobody needs more than the scores."""
    return EvaluationBatch([None] * len(scores), scores)


def _subsample(batch: Batch) -> SubsampleEvaluation:
    return SubsampleEvaluation(
        scores=batch.scores,
        outputs=batch.outputs,
        objective_scores=list(batch.objective_scores) if batch.objective_scores else None,
        trajectories=batch.trajectories,
    )
