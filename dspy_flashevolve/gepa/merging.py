"""gepa's merge, split in two: a plan that the pool's writer makes, and a screen that runs like any other.

``MergeProposer.propose`` does both in one blocking call. The plan below is the first half of it (gepa
0.1.4, ``proposer/merge.py``), with gepa's own functions for every decision.
"""

from __future__ import annotations

from typing import Any

from gepa.core.state import GEPAState
from gepa.gepa_utils import find_dominator_programs
from gepa.proposer.merge import MergeProposer, sample_and_attempt_merge_programs_by_common_predictors

from dspy_flashevolve.gepa.payloads import MergePlan


def plan_merge(
    proposer: MergeProposer[Any], state: GEPAState[Any, Any], trace: dict[str, Any], iteration: int
) -> MergePlan | None:
    """Choose two candidates of the frontier and the validation examples that judge their merge.

    Args:
        proposer: keeps the record of merges tried and the source of randomness.
        trace: the ticket's entry of the run log.
        iteration: for the log, from 1.

    Returns:
        None when there is nothing to merge; the reason is in the log.
    """
    trace["invoked_merge"] = True
    scores = state.per_program_tracked_scores
    merged = sample_and_attempt_merge_programs_by_common_predictors(
        agg_scores=list(scores),
        rng=proposer.rng,
        merge_candidates=find_dominator_programs(state.get_pareto_front_mapping(), list(scores)),
        merges_performed=proposer.merges_performed,
        program_candidates=state.program_candidates,
        parent_program_for_candidate=state.parent_program_for_candidate,
        has_val_support_overlap=lambda a, b: len(_common_ids(state, a, b)) >= proposer.val_overlap_floor,
    )
    if merged is None:
        proposer.logger.log(f"Iteration {iteration}: No merge candidates found")
        return None
    candidate, first, second, ancestor = merged
    trace["merged"] = True
    trace["merged_entities"] = (first, second, ancestor)
    proposer.merges_performed[0].append((first, second, ancestor))
    proposer.logger.log(f"Iteration {iteration}: Merged programs {first} and {second} via ancestor {ancestor}")
    subscores = state.prog_candidate_val_subscores
    ids = proposer.select_eval_subsample_for_merged_program(subscores[first], subscores[second])
    if not ids:
        proposer.logger.log(f"Iteration {iteration}: Skipping merge of {first} and {second}: too few common scores")
        return None
    trace["subsample_ids"] = ids
    parent_scores = tuple(tuple(subscores[parent][i] for i in ids) for parent in (first, second))
    return MergePlan(candidate, (first, second), ancestor, tuple(ids), (parent_scores[0], parent_scores[1]))


def _common_ids(state: GEPAState[Any, Any], first: int, second: int) -> set[Any]:
    return set(state.prog_candidate_val_subscores[first]) & set(state.prog_candidate_val_subscores[second])
