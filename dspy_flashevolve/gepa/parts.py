"""gepa's own parts, put together as ``gepa.optimize`` puts them together."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

from gepa.core.data_loader import DataLoader
from gepa.core.state import EvaluationCache
from gepa.logging.experiment_tracker import create_experiment_tracker
from gepa.proposer.merge import MergeProposer
from gepa.strategies.acceptance import ImprovementOrEqualAcceptance, StrictImprovementAcceptance
from gepa.strategies.batch_sampler import EpochShuffledBatchSampler
from gepa.strategies.candidate_selector import (
    CurrentBestCandidateSelector,
    EpsilonGreedyCandidateSelector,
    ParetoCandidateSelector,
    TopKParetoCandidateSelector,
)
from gepa.strategies.component_selector import (
    AllReflectionComponentSelector,
    RoundRobinReflectionComponentSelector,
)
from gepa.strategies.eval_policy import FullEvaluationPolicy
from gepa.strategies.proposal_sampling import (
    IndependentSampling,
    PxNSampling,
    SameParentSampling,
    SingleMutationSampling,
)
from gepa.strategies.proposal_selection import AllImprovements, BestImprovement, TopKImprovements

from dspy_flashevolve.gepa.options import GepaOptions
from dspy_flashevolve.gepa.stoppers import Stoppers, stoppers_of


@dataclass(frozen=True, slots=True)
class Parts:
    """The strategies of one run. ``rng`` is shared by the selector, the sampler and merge, as in gepa."""

    rng: random.Random
    candidate_selector: Any
    component_selector: Any
    batch_sampler: Any
    sampling_strategy: Any
    selection_strategy: Any
    acceptance: Any
    evaluation_policy: Any
    stopper: Stoppers
    merge: MergeProposer[Any] | None
    tracker: Any
    cache: EvaluationCache[Any, Any] | None
    callbacks: list[Any] | None


BUILT_IN = (
    ParetoCandidateSelector,
    CurrentBestCandidateSelector,
    EpsilonGreedyCandidateSelector,
    TopKParetoCandidateSelector,
    RoundRobinReflectionComponentSelector,
    AllReflectionComponentSelector,
    EpochShuffledBatchSampler,
    SingleMutationSampling,
    SameParentSampling,
    IndependentSampling,
    PxNSampling,
    AllImprovements,
    BestImprovement,
    TopKImprovements,
    StrictImprovementAcceptance,
    ImprovementOrEqualAcceptance,
    FullEvaluationPolicy,
)
"""gepa's strategies that do without the seed's scores while the seed is the only candidate."""


ENGINE_HOOKS = ("staleness", "admission", "slot_order", "controller")
"""Arguments of the optimizer that may be objects of the user's own and are no strategies of gepa's."""


def hooks_of(parts: Parts, optimizer: Any) -> dict[str, Any]:
    """Argument of the optimizer, or key of ``gepa_kwargs`` -> the object that stands behind it in this run."""
    engine = {name: getattr(optimizer, name) for name in ENGINE_HOOKS}
    return engine | {
        "candidate_selection_strategy": parts.candidate_selector,
        "component_selector": parts.component_selector,
        "batch_sampler": parts.batch_sampler,
        "sampling_strategy": parts.sampling_strategy,
        "selection_strategy": parts.selection_strategy,
        "acceptance_criterion": parts.acceptance,
        "val_evaluation_policy": parts.evaluation_policy,
        "stop_callbacks": parts.stopper,
    }


def has_foreign(parts: Parts) -> bool:
    """Whether a strategy is not gepa's own: it may look at scores, and must not see a pool without any."""
    strategies = (
        parts.candidate_selector,
        parts.component_selector,
        parts.batch_sampler,
        parts.sampling_strategy,
        parts.selection_strategy,
        parts.acceptance,
        parts.evaluation_policy,
    )
    return any(type(one) not in BUILT_IN for one in strategies)


def build_parts(options: GepaOptions, valset: DataLoader[Any, Any], logger: Any) -> Parts:
    """Build the strategies that ``options`` names.

    Args:
        options: already checked.
        valset: merge draws its subsample from it.
        logger: gepa's logger protocol.
    """
    rng = random.Random(options.seed)
    return Parts(
        rng=rng,
        candidate_selector=_candidate_selector(options.candidate_selection_strategy, rng),
        component_selector=_component_selector(options.component_selector),
        batch_sampler=_batch_sampler(options, rng),
        sampling_strategy=options.get("sampling_strategy") or SingleMutationSampling(),
        selection_strategy=options.get("selection_strategy") or AllImprovements(),
        acceptance=_acceptance(options.get("acceptance_criterion", "strict_improvement")),
        evaluation_policy=_evaluation_policy(options.get("val_evaluation_policy")),
        stopper=stoppers_of(options),
        merge=_merge(options, valset, logger, rng) if options.use_merge else None,
        tracker=_tracker(options),
        cache=EvaluationCache[Any, Any]() if options.get("cache_evaluation", False) else None,
        callbacks=options.get("callbacks"),
    )


def _candidate_selector(given: Any, rng: random.Random) -> Any:
    built_in = {
        "pareto": lambda: ParetoCandidateSelector(rng=rng),
        "current_best": CurrentBestCandidateSelector,
        "epsilon_greedy": lambda: EpsilonGreedyCandidateSelector(epsilon=0.1, rng=rng),
        "top_k_pareto": lambda: TopKParetoCandidateSelector(k=5, rng=rng),
    }
    return built_in[given]() if isinstance(given, str) else given


def _component_selector(given: Any) -> Any:
    built_in = {"round_robin": RoundRobinReflectionComponentSelector, "all": AllReflectionComponentSelector}
    return built_in[given]() if isinstance(given, str) else given


def _batch_sampler(options: GepaOptions, rng: random.Random) -> Any:
    given = options.get("batch_sampler", "epoch_shuffled")
    if given != "epoch_shuffled":
        return given
    return EpochShuffledBatchSampler(minibatch_size=options.reflection_minibatch_size or 3, rng=rng)


def _acceptance(given: Any) -> Any:
    built_in = {"strict_improvement": StrictImprovementAcceptance, "improvement_or_equal": ImprovementOrEqualAcceptance}
    return built_in[given]() if isinstance(given, str) else given


def _evaluation_policy(given: Any) -> Any:
    return FullEvaluationPolicy() if given is None or given == "full_eval" else given


def _merge(options: GepaOptions, valset: DataLoader[Any, Any], logger: Any, rng: random.Random) -> MergeProposer[Any]:
    return MergeProposer(
        logger=logger,
        valset=valset,
        evaluator=_never_called,
        use_merge=True,
        max_merge_invocations=sys.maxsize if options.max_merge_invocations is None else options.max_merge_invocations,
        val_overlap_floor=options.get("merge_val_overlap_floor", 5),
        rng=rng,
        callbacks=options.get("callbacks"),
    )


def _never_called(*_: Any) -> Any:
    raise AssertionError("merged candidates are evaluated by the screen stage, never by the merge proposer")


def _tracker(options: GepaOptions) -> Any:
    return create_experiment_tracker(
        use_wandb=options.use_wandb,
        wandb_api_key=options.wandb_api_key,
        wandb_init_kwargs=options.wandb_init_kwargs,
        wandb_attach_existing=options.get("wandb_attach_existing", False),
        use_mlflow=options.use_mlflow,
        mlflow_tracking_uri=options.get("mlflow_tracking_uri"),
        mlflow_experiment_name=options.get("mlflow_experiment_name"),
        mlflow_attach_existing=options.get("mlflow_attach_existing", False),
        key_prefix=options.get("tracking_key_prefix", ""),
    )
