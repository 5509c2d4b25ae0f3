"""What each part of a step tells gepa's callbacks, caches, counts, logs and trackers.

Every function runs in the pool's writer. Names, order and contents of events, log entries and metrics
are those of gepa 0.1.4 (``ReflectiveMutationProposer.propose``, ``MergeProposer.propose`` and
``GEPAEngine``); the iteration is the step's, so that steps may overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gepa.core.adapter import EvaluationBatch
from gepa.core.engine import _MemoizedAcceptance  # pyright: ignore[reportPrivateUsage]
from gepa.core.state import CachedEvaluation, ValsetEvaluation
from gepa.proposer.base import CandidateProposal, SubsampleEvaluation
from gepa.strategies.proposal_sampling import ProposalTask

from dspy_flashevolve.engine.replay import Rollout
from dspy_flashevolve.engine.steps import Step
from dspy_flashevolve.gepa.pool import Batch, Candidate, Child, Commit, Crossover, Pool, Validated, write_commits

Task = ProposalTask[Any, Any]
Proposal = CandidateProposal[Any]


@dataclass(frozen=True, slots=True)
class ValidationPlan:
    """Which validation examples are to be run for a candidate, and what the cache has of the others."""

    candidate: Candidate
    cached: dict[Any, CachedEvaluation[Any]]
    missing: list[Any]


def task_key(task: Task) -> tuple[Any, ...]:
    """Equal keys mean the same parent on the same minibatch."""
    return (tuple(sorted(task.parent_candidate.items())), tuple(task.minibatch_ids))


def expected_score(pool: Pool, proposals: Sequence[Proposal]) -> float:
    """What the best of the proposals may reach on the validation set: its parent's score and its gain on the screen.

    It orders validations: the child that is likely to be the next parent is validated first.
    """

    def reach(one: Proposal) -> float:
        after, before = one.subsample_scores_after or [], one.subsample_scores_before or []
        parent = pool.score_of(one.parent_program_ids[0]) if pool.seed_confirmed else 0.0
        return parent + (sum(after) - sum(before)) / max(1, len(after))

    return max(map(reach, proposals))


def parents_start(pool: Pool, step: Step, tasks: Sequence[Task]) -> None:
    """The parents are about to be evaluated."""
    for task in tasks:
        evaluation_start(pool, step, task.minibatch, _parents_of(pool, task), task.parent_idx)


def parents_end(pool: Pool, step: Step, tasks: Sequence[Task], evaluations: Sequence[Batch]) -> None:
    """The parents are evaluated."""
    for task, batch in zip(tasks, evaluations, strict=True):
        evaluation_end(pool, step, batch, _parents_of(pool, task), task.parent_idx)
    pool.count_calls()
    for task, batch in zip(tasks, evaluations, strict=True):
        remember(pool, task.parent_candidate, task, batch)
    first, iteration = tasks[0], step.number + 1
    pool.log_entry(step).update(
        selected_program_candidate=first.parent_idx,
        subsample_ids=first.minibatch_ids,
        n_tasks=len(tasks),
        tasks=[{"parent_idx": task.parent_idx, "subsample_ids": list(task.minibatch_ids)} for task in tasks],
    )
    score = pool.score_of(first.parent_idx) if pool.seed_confirmed else "not known yet"
    pool.logger.log(f"Iteration {iteration}: Selected program {first.parent_idx} score: {score}")
    pool.experiment_tracker.log_metrics(
        {
            "iteration": iteration,
            "selected_program_candidate": first.parent_idx,
            "total_metric_calls": pool.state.total_num_evals,
        },
        step=iteration,
    )


def nothing_in(pool: Pool, evaluation: Batch) -> str | None:
    """Why a parent's evaluation is not worth a reflection; None when it is."""
    if not evaluation.trajectories:
        return "no_trajectories"
    perfect = pool.perfect_score
    if pool.skips_perfect and perfect is not None and all(one >= perfect for one in evaluation.scores):
        return "all_scores_perfect"
    return None


def nothing_to_improve(pool: Pool, step: Step, task: Task, evaluation: Batch) -> str | None:
    """Why a parent's minibatch is not reflected on; None when it is."""
    reason = nothing_in(pool, evaluation)
    if reason is not None:
        pool.logger.log(f"Iteration {step.number + 1}: {reason} for parent {task.parent_idx}. Skipping.")
        pool.notify(
            "on_evaluation_skipped",
            iteration=step.number + 1,
            candidate_idx=task.parent_idx,
            reason=reason,
            scores=evaluation.scores,
            is_seed_candidate=task.parent_idx == 0,
        )
    return reason


def choose_components(pool: Pool, step: Step, task: Task, evaluation: Batch) -> list[str]:
    """Ask the component selector which texts to rewrite."""
    with pool.acting_for(step):
        return pool.parts.component_selector(
            pool.state, evaluation.trajectories, evaluation.scores, task.parent_idx, task.parent_candidate
        )


def reflection_starts(
    pool: Pool,
    step: Step,
    task: Task,
    components: list[str],
    dataset: Mapping[str, Sequence[Mapping[str, Any]]],
) -> None:
    """The reflective dataset is there."""
    records = {name: [dict(record) for record in rows] for name, rows in dataset.items()}
    iteration = step.number + 1
    pool.notify(
        "on_reflective_dataset_built",
        iteration=iteration,
        candidate_idx=task.parent_idx,
        components=components,
        dataset=records,
    )
    pool.notify(
        "on_proposal_start",
        iteration=iteration,
        parent_candidate=task.parent_candidate,
        components=components,
        reflective_dataset=records,
    )


def proposed(pool: Pool, step: Step, texts: dict[str, str]) -> None:
    """The reflection has written new texts."""
    iteration = step.number + 1
    pool.notify("on_proposal_end", iteration=iteration, new_instructions=texts, prompts={}, raw_lm_outputs={})
    for name, text in texts.items():
        pool.logger.log(f"Iteration {iteration}: Proposed new text for {name}: {text}")


def children_start(pool: Pool, step: Step, children: Sequence[Child]) -> None:
    """The children are about to be screened."""
    for child in children:
        evaluation_start(pool, step, child.parent.task.minibatch, [child.parent.task.parent_idx])


def given_up(pool: Pool, step: Step, child: Child, scores: list[float]) -> None:
    """A child could not pass its screen any more: it is reported with the scores that there are, and none is stored."""
    evaluation_end(pool, step, scored(scores), [child.parent.task.parent_idx])
    proposal = replace(_proposal(step, child, EvaluationBatch([], [])), eval_after=None, subsample_scores_after=scores)
    reason = (
        f"it cannot pass its screen any more, after {len(scores)} of {len(child.parent.task.minibatch_ids)} examples"
    )
    pool.reject(step, proposal, reason=reason)


def children_end(pool: Pool, step: Step, screened: Sequence[tuple[Child, Batch]]) -> list[tuple[Child, Proposal]]:
    """The children are screened; those that go on, with gepa's proposals for them."""
    for child, batch in screened:
        evaluation_end(pool, step, batch, [child.parent.task.parent_idx])
    pool.count_calls()
    trace = pool.log_entry(step)
    for child, batch in screened:
        remember(pool, child.candidate, child.parent.task, batch)
        trace["tasks"][child.parent.index]["subsample_scores"] = list(child.parent.evaluation.scores)
        trace["tasks"][child.parent.index]["new_subsample_scores"] = list(batch.scores)
    before, after = screened[0][0].parent.evaluation.scores, screened[0][1].scores
    trace["subsample_scores"], trace["new_subsample_scores"] = before, after
    pool.experiment_tracker.log_metrics(
        {
            "subsample_score": sum(before),
            "new_subsample_score": sum(after),
            "subsample/before": sum(before),
            "subsample/after": sum(after),
            "total_metric_calls": pool.state.total_num_evals,
        },
        step=step.number + 1,
    )
    children = {id(made := _proposal(step, child, batch)): (child, made) for child, batch in screened}
    kept = _choose(pool, step, [proposal for _, proposal in children.values()])
    return [children[id(one)] for one in kept]  # a selection strategy may change the order


def _choose(pool: Pool, step: Step, proposals: list[Proposal]) -> list[Proposal]:
    """Ask the selection strategy, report what it left, and return what goes on."""
    with pool.acting_for(step):
        criterion = _MemoizedAcceptance(pool.acceptance_criterion)  # draws lots, or counts, once a proposal
        picked = list(pool.selection_strategy.select(list(proposals), pool.state, criterion))  # pyright: ignore[reportArgumentType]
        unique: dict[tuple[tuple[str, str], ...], Proposal] = {}
        for one in picked:
            if any(one is known for known in proposals):
                unique.setdefault(tuple(sorted(one.candidate.items())), one)
        kept = list(unique.values())
        for proposal in proposals:
            if any(proposal is one for one in kept):
                continue
            if any(proposal is one for one in picked):
                pool.reject(step, proposal, reason="Duplicate of another candidate selected this iteration")
            else:
                pool.reject(step, proposal, passed=criterion.should_accept(proposal, pool.state))
    return kept


def lookup(pool: Pool, candidate: Candidate, ids: Sequence[Any] | None = None) -> ValidationPlan:
    """Ask the cache for what is known of a candidate on validation examples; on those that the policy names."""
    cache = pool.state.evaluation_cache
    wanted = list(pool.val_evaluation_policy.get_eval_batch(pool.loader, pool.state) if ids is None else ids)
    cached, missing = ({}, wanted) if cache is None else cache.get_batch(candidate, wanted)
    return ValidationPlan(candidate, cached, missing)


def evaluation_of(rollouts: Mapping[Any, Rollout]) -> ValsetEvaluation[Any, Any]:
    """Rollouts on validation examples as gepa has them."""
    objectives = {i: dict(one.objective_scores) for i, one in rollouts.items()}
    return ValsetEvaluation(
        outputs_by_val_id={i: one.output for i, one in rollouts.items()},
        scores_by_val_id={i: one.score for i, one in rollouts.items()},
        objective_scores_by_val_id=objectives if any(objectives.values()) else None,
    )


def complete_validation(
    pool: Pool, plan: ValidationPlan, rollouts: Mapping[Any, Rollout]
) -> ValsetEvaluation[Any, Any]:
    """Put fresh results into the cache, and together with the cached ones; their order leaves no trace."""
    cache, fresh = pool.state.evaluation_cache, evaluation_of({i: rollouts[i] for i in plan.missing})
    objectives = fresh.objective_scores_by_val_id
    if cache is not None and plan.missing:
        cache.put_batch(
            plan.candidate,
            plan.missing,
            [fresh.outputs_by_val_id[i] for i in plan.missing],
            [fresh.scores_by_val_id[i] for i in plan.missing],
            None if objectives is None else [objectives[i] for i in plan.missing],
        )
    known = {i: entry.objective_scores for i, entry in plan.cached.items() if entry.objective_scores is not None}
    return ValsetEvaluation(
        outputs_by_val_id={**{i: e.output for i, e in plan.cached.items()}, **fresh.outputs_by_val_id},
        scores_by_val_id={**{i: e.score for i, e in plan.cached.items()}, **fresh.scores_by_val_id},
        objective_scores_by_val_id={**known, **(objectives or {})} or None,
    )


def commit(pool: Pool, step: Step, work: Sequence[Validated]) -> list[Commit]:
    """Add the validated proposals to the pool, in order."""
    if pool.journal is not None:
        entries = [(one.proposal.candidate, one.proposal.parent_program_ids, one.evaluation) for one in work]
        write_commits(pool.journal, step.number, len(pool.state.program_candidates), pool.version, entries)
    commits: list[Commit] = []
    merge = pool.parts.merge
    for one in work:
        proposal = one.proposal
        before, after = sum(proposal.subsample_scores_before or []), sum(proposal.subsample_scores_after or [])
        screened = f" (subsample score {before} -> {after})" if proposal.subsample_scores_after else ""
        pool.logger.log(f"Iteration {step.number + 1}: Accepted candidate{screened}")
        done = pool.add(step, proposal, one.evaluation, one.calls)
        of_it = {"new_candidate_idx": done.candidate, "parent_ids": proposal.parent_program_ids}
        if proposal.tag == "merge":
            if merge is not None:  # else the run goes on without merges, and this one was planned before
                merge.merges_due -= 1
                merge.total_merges_tested += 1
            pool.notify("on_merge_accepted", iteration=step.number + 1, **of_it)
        else:
            pool.log_proposal(step, proposal, done.candidate)
        pool.notify("on_candidate_accepted", iteration=step.number + 1, new_score=after, **of_it)
        if proposal.tag != "merge" and merge is not None:
            merge.last_iter_found_new_program = True
            merge.schedule_if_needed()
        commits.append(done)
    pool.save(force=True)
    return commits


# Crossovers.


def crossover_starts(pool: Pool, step: Step, plan: Crossover) -> None:
    """A crossover is about to be screened."""
    evaluation_start(pool, step, pool.loader.fetch(list(plan.ids)), list(plan.parents), traced=False)


def crossover_ended(
    pool: Pool,
    step: Step,
    plan: Crossover,
    lookup: ValidationPlan,
    fresh: Mapping[Any, Rollout],
) -> Proposal | None:
    """Judge a crossover as gepa does: not worse than the better of its parents. None when it is."""
    result = complete_validation(pool, lookup, fresh)
    objectives, scores = result.objective_scores_by_val_id, [result.scores_by_val_id[i] for i in plan.ids]
    iteration = step.number + 1
    batch: Batch = EvaluationBatch(
        outputs=[result.outputs_by_val_id[i] for i in plan.ids],
        scores=scores,
        objective_scores=[objectives[i] for i in plan.ids] if objectives else None,
    )
    evaluation_end(pool, step, batch, list(plan.parents))
    pool.log_entry(step).update(
        id1_subsample_scores=list(plan.parent_scores[0]),
        id2_subsample_scores=list(plan.parent_scores[1]),
        new_program_subsample_scores=scores,
    )
    pool.count_calls()
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


# How it is put.


def _proposal(step: Step, child: Child, batch: Batch) -> Proposal:
    before = child.parent.evaluation
    nothing_to_show = {f"{what}:{name}": "" for name in child.texts for what in ("prompt", "raw_lm_output")}
    return CandidateProposal(
        candidate=child.candidate,
        parent_program_ids=[child.parent.task.parent_idx],
        subsample_indices=child.parent.task.minibatch_ids,
        subsample_scores_before=before.scores,
        subsample_scores_after=batch.scores,
        eval_before=_subsample(before),
        eval_after=_subsample(batch),
        tag="reflective_mutation",
        metadata={"proposal_id": f"{step.number + 1}-{child.parent.index}", **nothing_to_show},
    )


def _subsample(batch: Batch) -> SubsampleEvaluation:
    return SubsampleEvaluation(
        scores=batch.scores,
        outputs=batch.outputs,
        objective_scores=list(batch.objective_scores) if batch.objective_scores else None,
        trajectories=batch.trajectories,
    )


def remember(pool: Pool, candidate: Candidate, task: Task, batch: Batch) -> None:
    """gepa's cache has one key for a training and a validation example of equal id; only lockstep keeps that."""
    cache = pool.state.evaluation_cache
    if cache is not None and pool.caches_minibatches and len(batch.scores) == len(task.minibatch_ids):
        objectives = list(batch.objective_scores) if batch.objective_scores else None
        cache.put_batch(candidate, task.minibatch_ids, batch.outputs, batch.scores, objectives)


def _parents_of(pool: Pool, task: Task) -> list[int]:
    return [parent for parent in pool.state.parent_program_for_candidate[task.parent_idx] if parent is not None]


def scored(scores: list[float]) -> Batch:
    """An evaluation of which nobody needs more than the scores."""
    return EvaluationBatch([None] * len(scores), scores)


def evaluation_start(
    pool: Pool, step: Step, inputs: list[Any], parents: list[int], index: int | None = None, traced: bool = True
) -> None:
    """A candidate is about to be evaluated; ``index``: its place in gepa's pool, where it has one."""
    pool.notify(
        "on_evaluation_start",
        iteration=step.number + 1,
        candidate_idx=index,
        batch_size=len(inputs),
        capture_traces=traced,
        parent_ids=parents,
        inputs=inputs,
        is_seed_candidate=index == 0,
    )


def evaluation_end(pool: Pool, step: Step, batch: Batch, parents: list[int], index: int | None = None) -> None:
    """A candidate is evaluated."""
    pool.notify(
        "on_evaluation_end",
        iteration=step.number + 1,
        candidate_idx=index,
        scores=batch.scores,
        has_trajectories=bool(batch.trajectories),
        parent_ids=parents,
        outputs=batch.outputs,
        trajectories=batch.trajectories,
        objective_scores=batch.objective_scores,
        is_seed_candidate=index == 0,
    )
