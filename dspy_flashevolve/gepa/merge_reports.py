"""What the screen of a merge tells gepa's callbacks and logs; see :mod:`dspy_flashevolve.gepa.reports`."""

from __future__ import annotations

from typing import Any

from gepa.core.state import ValsetEvaluation
from gepa.proposer.base import CandidateProposal

from dspy_flashevolve.engine.item import Ticket
from dspy_flashevolve.gepa.payloads import MergePlan
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.reports import Proposal, ValidationPlan, complete_validation, log_entry


def merged_score(pool: Pool, plan: MergePlan) -> float:
    """What a merge that passed its screen may reach: at least the better of its parents."""
    return max(map(pool.score_of, plan.parents))


def merge_start(pool: Pool, ticket: Ticket, plan: MergePlan) -> None:
    """A merged candidate is about to be screened."""
    pool.notify(
        "on_evaluation_start",
        iteration=ticket.number + 1,
        candidate_idx=None,
        batch_size=len(plan.ids),
        capture_traces=False,
        parent_ids=list(plan.parents),
        inputs=pool.loader.fetch(list(plan.ids)),
        is_seed_candidate=False,
    )


def merge_end(
    pool: Pool,
    ticket: Ticket,
    plan: MergePlan,
    lookup: ValidationPlan,
    fresh: ValsetEvaluation[Any, Any],
    paid: int,
) -> Proposal | None:
    """Judge a merge as gepa does: not worse than the better of its parents. None when it is."""
    result = complete_validation(pool, lookup, fresh)
    scores = [result.scores_by_val_id[i] for i in plan.ids]
    objectives = result.objective_scores_by_val_id
    iteration = ticket.number + 1
    pool.notify(
        "on_evaluation_end",
        iteration=iteration,
        candidate_idx=None,
        scores=scores,
        has_trajectories=False,
        parent_ids=list(plan.parents),
        outputs=[result.outputs_by_val_id[i] for i in plan.ids],
        trajectories=None,
        objective_scores=[objectives[i] for i in plan.ids] if objectives else None,
        is_seed_candidate=False,
    )
    log_entry(pool, ticket).update(
        id1_subsample_scores=list(plan.parent_scores[0]),
        id2_subsample_scores=list(plan.parent_scores[1]),
        new_program_subsample_scores=scores,
    )
    pool.count_calls(paid)
    pool.notify(
        "on_merge_attempted", iteration=iteration, parent_ids=list(plan.parents), merged_candidate=plan.candidate
    )
    sums = [sum(of_parent) for of_parent in plan.parent_scores]
    if sum(scores) < max(sums):
        reason = f"Merged score {sum(scores)} worse than both parents {sums}"
        pool.logger.log(f"Iteration {iteration}: {reason}, skipping merge")
        pool.notify("on_merge_rejected", iteration=iteration, parent_ids=list(plan.parents), reason=reason)
        return None
    return CandidateProposal(
        candidate=plan.candidate,
        parent_program_ids=list(plan.parents),
        subsample_indices=list(plan.ids),
        subsample_scores_before=[float(one) for one in sums],
        subsample_scores_after=scores,
        tag="merge",
        metadata={"ancestor": plan.ancestor},
    )
