"""What gepa logs at the beginning and at the end of a run. Everything runs in the pool's writer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspy_flashevolve.gepa.pool import Pool


def report_seed(pool: Pool) -> None:
    """What gepa logs of the seed (gepa 0.1.4, ``GEPAEngine.run``)."""
    state, tracker = pool.state, pool.experiment_tracker
    average, coverage = state.get_program_average_val_subset(0)
    front = list(state.pareto_front_valset.values())
    tracker.log_config(_config(pool))
    tracker.log_metrics(
        {
            "val_program_average": average,
            "best_score_on_valset": average,
            "val_evaluated_count_new_program": coverage,
            "val_total_count": len(pool.loader),
            "total_metric_calls": state.total_num_evals,
            "valset_pareto_front_agg": sum(front) / len(front) if front else average,
            "new_program_idx": 0,
            "linear_pareto_front_program_idx": 0,
            "best_program_as_per_agg_score_valset": 0,
        },
        step=0,
    )
    pool.logger.log(f"Base program full valset score: {average} over {coverage} / {len(pool.loader)} examples")
    pool.notify(
        "on_valset_evaluated",
        iteration=0,
        candidate_idx=0,
        candidate=pool.seed_candidate,
        scores_by_val_id=dict(state.prog_candidate_val_subscores[0]),
        average_score=average,
        num_examples_evaluated=coverage,
        total_valset_size=len(pool.loader),
        parent_ids=[],
        is_best_program=True,
        outputs_by_val_id=None,
    )


def _config(pool: Pool) -> dict[str, Any]:
    return {
        "seed": pool.seed,
        "perfect_score": pool.perfect_score,
        "frontier_type": pool.frontier_type,
        "track_best_outputs": pool.track_best_outputs,
        "use_cloudpickle": pool.use_cloudpickle,
        "raise_on_exception": pool.raise_on_exception,
        "trainset_size": len(pool.trainset),
        "valset_size": len(pool.loader),
        "seed_candidate_components": sorted(pool.seed_candidate),
        "val_evaluation_policy": type(pool.val_evaluation_policy).__name__,
        "has_merge_proposer": pool.merge_proposer is not None,
        "run_dir": pool.run_dir,
    }


def report_end(pool: Pool) -> None:
    """What gepa tells the callbacks and logs at the end of a run."""
    state, policy = pool.state, pool.val_evaluation_policy
    best = policy.get_best_program(state)
    pool.notify(
        "on_optimization_end",
        best_candidate_idx=best,
        total_iterations=state.i,
        total_metric_calls=state.total_num_evals,
        final_state=state,
    )
    summary: dict[str, Any] = {
        "best_candidate_idx": best,
        "best_valset_score": policy.get_valset_score(best, state),
        "total_iterations": state.i,
        "total_candidates": len(state.program_candidates),
    }
    for name in sorted(pool.seed_candidate):
        summary[f"seed/{name}"] = pool.seed_candidate[name]
        summary[f"best/{name}"] = state.program_candidates[best][name]
    pool.experiment_tracker.log_summary(summary)
