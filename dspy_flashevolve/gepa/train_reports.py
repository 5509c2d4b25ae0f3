"""What the screen and the validation of integrated candidates tell gepa's callbacks and logs.

Every function runs in the pool's writer; see :mod:`dspy_flashevolve.gepa.reports`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gepa.core.state import ValsetEvaluation
from gepa.proposer.base import CandidateProposal, SubsampleEvaluation

from dspy_flashevolve.engine.item import Ticket
from dspy_flashevolve.gepa.payloads import Train
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.reports import Proposal, log_entry


def train_starts(pool: Pool, ticket: Ticket, train: Train, examples: Sequence[Any]) -> None:
    """An integrated candidate is about to be screened."""
    pool.notify(
        "on_evaluation_start",
        iteration=ticket.number + 1,
        candidate_idx=None,
        batch_size=len(examples),
        capture_traces=True,
        parent_ids=[train.base.index],
        inputs=list(examples),
        is_seed_candidate=False,
    )


def passes(pool: Pool, ticket: Ticket, proposal: Proposal) -> bool:
    """Ask gepa's criterion; what was run on no example has shown nothing."""
    with pool.acting_for(ticket):
        return bool(proposal.subsample_indices) and pool.acceptance_criterion.should_accept(proposal, pool.state)


def train_ended(
    pool: Pool,
    ticket: Ticket,
    train: Train,
    ids: list[Any],
    before: list[float],
    after: list[float],
    parents: list[int],
) -> Proposal:
    """An integrated candidate is screened: gepa's proposal, for its criterion."""
    pool.notify(
        "on_evaluation_end",
        iteration=ticket.number + 1,
        candidate_idx=None,
        scores=after,
        has_trajectories=False,
        parent_ids=parents,
        outputs=[None] * len(after),
        trajectories=None,
        objective_scores=None,
        is_seed_candidate=False,
    )
    members = [item.ticket.number for item in train.members]
    log_entry(pool, ticket).update(
        integrated_tickets=members, subsample_scores=before, new_subsample_scores=after, subsample_ids=ids
    )
    return CandidateProposal(
        candidate=train.candidate,
        parent_program_ids=parents,
        subsample_indices=ids,
        subsample_scores_before=before,
        subsample_scores_after=after,
        eval_before=SubsampleEvaluation(scores=before),
        eval_after=SubsampleEvaluation(scores=after),
        tag="patch" if train.key is None else "train",
        metadata={"tickets": members},
    )


def given_up(pool: Pool, ticket: Ticket, train: Train, scores: list[float]) -> None:
    """An integrated candidate could not pass its screen any more; the scores that there are are stored nowhere."""
    proposal: Proposal = CandidateProposal(
        candidate=train.candidate,
        parent_program_ids=[train.base.index],
        subsample_scores_after=scores,
        tag="patch" if train.key is None else "train",
    )
    pool.notify(
        "on_evaluation_end",
        iteration=ticket.number + 1,
        candidate_idx=None,
        scores=scores,
        has_trajectories=False,
        parent_ids=[train.base.index],
        outputs=[None] * len(scores),
        trajectories=None,
        objective_scores=None,
        is_seed_candidate=False,
    )
    pool.reject(ticket, proposal, reason=f"it cannot pass its screen any more, after {len(scores)} examples")


def joined(first: ValsetEvaluation[Any, Any], last: ValsetEvaluation[Any, Any]) -> ValsetEvaluation[Any, Any]:
    """Two parts of one validation; a part in which no example has objective scores has empty ones."""
    objectives = {**(first.objective_scores_by_val_id or {}), **(last.objective_scores_by_val_id or {})}
    scores = {**first.scores_by_val_id, **last.scores_by_val_id}
    return ValsetEvaluation(
        outputs_by_val_id={**first.outputs_by_val_id, **last.outputs_by_val_id},
        scores_by_val_id=scores,
        objective_scores_by_val_id={i: objectives.get(i, {}) for i in scores} if objectives else None,
    )


def in_order(evaluation: ValsetEvaluation[Any, Any], ids: Sequence[Any]) -> ValsetEvaluation[Any, Any]:
    """The results in the order of ``ids``: the order in which they were run leaves no trace, not even in a sum."""
    objectives = evaluation.objective_scores_by_val_id
    return ValsetEvaluation(
        outputs_by_val_id={i: evaluation.outputs_by_val_id[i] for i in ids},
        scores_by_val_id={i: evaluation.scores_by_val_id[i] for i in ids},
        objective_scores_by_val_id=None if objectives is None else {i: objectives[i] for i in ids},
    )
