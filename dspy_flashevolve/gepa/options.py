"""What a user may pass on to gepa, checked before anything is run; and gepa's own parts, put together as
``gepa.optimize`` puts them together."""

from __future__ import annotations

import inspect
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dspy.primitives.module import Module
from gepa.api import optimize
from gepa.core.data_loader import DataLoader
from gepa.core.state import EvaluationCache, GEPAState
from gepa.proposer.merge import MergeProposer
from gepa.proposer.reflective_mutation.base import CandidateSelector
from gepa.strategies.acceptance import AcceptanceCriterion, ImprovementOrEqualAcceptance, StrictImprovementAcceptance
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
from gepa.strategies.eval_policy import EvaluationPolicy, FullEvaluationPolicy
from gepa.strategies.proposal_sampling import SingleMutationSampling
from gepa.strategies.proposal_selection import AllImprovements
from gepa.utils import CompositeStopper, FileStopper, MaxMetricCallsStopper, NoImprovementStopper

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.gepa.reports import Tracker
from dspy_flashevolve.gepa.settings import GepaSettings
from dspy_flashevolve.programs.building import StudentAdapter

REFUSED = {
    "seed_candidate": "it is read from the student that compile() gets",
    "trainset": "pass it to compile()",
    "valset": "pass it to compile()",
    "adapter": "the optimizer builds dspy's adapter from the student and the metric",
    "task_lm": "the student's LM runs the task: dspy.configure(lm=...) or student.set_lm(...)",
    "evaluator": "the metric evaluates",
    "reflection_lm_kwargs": "set them on the dspy.LM that is passed as reflection_lm",
    "reflection_prompt_template": "dspy's adapter writes the prompt; pass instruction_proposer=",
    "custom_candidate_proposer": "dspy's adapter owns the proposals; pass instruction_proposer=",
    "reflection_strategy": "dspy's adapter owns the proposals; pass instruction_proposer=",
    "max_reflection_cost": "dspy.LM does not tell gepa its cost; bound the run by max_metric_calls or max_seconds",
    "logger": "the optimizer logs through Python's logging, like dspy.GEPA",
    "display_progress_bar": "the optimizer shows its own",
    "raise_on_exception": "the optimizer raises, like dspy.GEPA",
}
"""gepa's name -> why it cannot be passed through."""

NAMED: dict[str, dict[str, Callable[[random.Random], Any]]] = {
    "candidate_selection_strategy": {
        "pareto": lambda rng: ParetoCandidateSelector(rng=rng),
        "current_best": lambda rng: CurrentBestCandidateSelector(),
        "epsilon_greedy": lambda rng: EpsilonGreedyCandidateSelector(epsilon=0.1, rng=rng),
        "top_k_pareto": lambda rng: TopKParetoCandidateSelector(k=5, rng=rng),
    },
    "component_selector": {
        "round_robin": lambda rng: RoundRobinReflectionComponentSelector(),
        "all": lambda rng: AllReflectionComponentSelector(),
    },
    "acceptance_criterion": {
        "strict_improvement": lambda rng: StrictImprovementAcceptance(),
        "improvement_or_equal": lambda rng: ImprovementOrEqualAcceptance(),
    },
    "val_evaluation_policy": {"full_eval": lambda rng: FullEvaluationPolicy()},
}
"""Strategy -> the names that gepa has for its own -> what makes one."""
PROTOCOLS: dict[str, type] = {
    "candidate_selection_strategy": CandidateSelector,
    "acceptance_criterion": AcceptanceCriterion,
    "val_evaluation_policy": EvaluationPolicy,
}
"""Strategy -> what an object of the user's own must be; a component selector may be any callable."""
FRONTIERS = ("instance", "objective", "hybrid", "cartesian")

ARGUMENTS = {
    **{name: name for name in (
        "candidate_selection_strategy", "reflection_minibatch_size", "skip_perfect_score", "perfect_score", "use_merge",
        "max_merge_invocations", "max_metric_calls", "use_wandb", "wandb_api_key", "wandb_init_kwargs", "use_mlflow",
        "track_best_outputs", "seed", "reflection_lm",
    )},
    "module_selector": "component_selector",
    "run_dir": "log_dir",
}  # fmt: skip
"""gepa's name -> the optimizer's own argument that sets it."""


def strategies(settings: GepaSettings) -> dict[str, Any]:
    """Strategy -> gepa's name of one of its own, or an object; of those in ``NAMED``."""
    more = settings.gepa_kwargs
    return {
        "candidate_selection_strategy": settings.candidate_selection_strategy,
        "component_selector": settings.component_selector,
        "acceptance_criterion": more.get("acceptance_criterion", "strict_improvement"),
        "val_evaluation_policy": more.get("val_evaluation_policy") or "full_eval",
    }


def check_options(settings: GepaSettings) -> None:
    """Refuse what cannot work, with the reason.

    Raises:
        ConfigurationError: an unknown or refused key of ``gepa_kwargs``, an unknown strategy, a minibatch size
            under 1, or a combination that gepa does not take.
    """
    parameters = set(inspect.signature(optimize).parameters)
    for name, value in settings.gepa_kwargs.items():
        if name not in REFUSED or value is not None:  # None is gepa's own default: nothing was asked for
            if name in ARGUMENTS:
                raise ConfigurationError(
                    f"gepa_kwargs has {name!r}: pass it as the argument {ARGUMENTS[name]}= instead."
                )
            if name in REFUSED:
                raise ConfigurationError(f"gepa_kwargs has {name!r}, which cannot be passed through: {REFUSED[name]}.")
            if name not in parameters:
                allowed = ", ".join(sorted(parameters - ARGUMENTS.keys() - REFUSED.keys()))
                raise ConfigurationError(f"gepa_kwargs has {name!r}, which gepa does not know. It knows: {allowed}.")
    for name, choice in strategies(settings).items():
        _check_choice(name, choice, PROTOCOLS.get(name))
    if settings.frontier_type not in FRONTIERS:
        raise ConfigurationError(
            f"frontier_type is {settings.frontier_type!r}, expected one of {', '.join(FRONTIERS)}."
        )
    size = settings.reflection_minibatch_size
    if settings.gepa_kwargs.get("batch_sampler", "epoch_shuffled") != "epoch_shuffled":
        if size is not None:
            raise ConfigurationError(
                f"reflection_minibatch_size is {size} and gepa_kwargs has a batch_sampler of its own, which decides "
                "the size: pass reflection_minibatch_size=None."
            )
    elif size is not None and size < 1:
        raise ConfigurationError(f"reflection_minibatch_size is {size}, expected at least 1.")
    if settings.skip_perfect_score and settings.perfect_score is None:
        raise ConfigurationError(
            "perfect_score is None while skip_perfect_score is True: give a score, or set it False."
        )


def _check_choice(name: str, choice: Any, protocol: type | None) -> None:
    names = ", ".join(NAMED[name])
    if isinstance(choice, str):
        if choice not in NAMED[name]:
            raise ConfigurationError(f"{name} is {choice!r}, expected one of {names}, or an object.")
    elif not (callable(choice) if protocol is None else isinstance(choice, protocol)):
        kind = "a callable" if protocol is None else f"a {protocol.__name__}"
        raise ConfigurationError(f"{name} is {choice!r}, expected one of {names}, or {kind}.")


@dataclass(frozen=True, slots=True)
class Parts:
    """The strategies of one run. ``rng`` is shared by the selector, the sampler and merge, as in gepa."""

    rng: random.Random
    candidate_selection_strategy: Any
    component_selector: Any
    acceptance_criterion: Any
    val_evaluation_policy: Any
    batch_sampler: Any
    sampling_strategy: Any
    selection_strategy: Any
    stopper: Stoppers
    merge: MergeProposer[Any] | None
    tracker: Tracker
    cache: EvaluationCache[Any, Any] | None
    callbacks: list[Any] | None


HOOKS = (*NAMED, "batch_sampler", "sampling_strategy", "selection_strategy")
"""Arguments of the optimizer, or keys of ``gepa_kwargs``; :class:`Parts` has the objects behind them."""


def hooks_of(parts: Parts, staleness: Any) -> dict[str, Any]:
    """Argument of the optimizer, or key of ``gepa_kwargs`` -> the object that stands behind it in this run."""
    hooks = {name: getattr(parts, name) for name in HOOKS}
    return {"staleness": staleness, **hooks, "stop_callbacks": parts.stopper}


def has_foreign(parts: Parts) -> bool:
    """Say whether a strategy is the user's: it may look at scores, and must not see a pool without any.

    gepa's do without the seed's scores while the seed is the only candidate.
    """
    return any(not type(getattr(parts, name)).__module__.startswith("gepa.strategies.") for name in HOOKS)


def build_parts(settings: GepaSettings, valset: DataLoader[Any, Any], logger: Any) -> Parts:
    """Build the strategies that the settings name, which :func:`check_options` has checked."""
    rng, more = random.Random(settings.seed), settings.gepa_kwargs
    sampler = more.get("batch_sampler", "epoch_shuffled")
    if sampler == "epoch_shuffled":
        sampler = EpochShuffledBatchSampler(minibatch_size=settings.minibatch_size, rng=rng)
    most_merges = sys.maxsize if settings.max_merge_invocations is None else settings.max_merge_invocations
    merge = MergeProposer[Any](
        logger=logger,
        valset=valset,
        evaluator=_left_to_the_run,
        use_merge=True,
        max_merge_invocations=most_merges,
        val_overlap_floor=more.get("merge_val_overlap_floor", 5),
        rng=rng,
    )
    instances = {
        name: NAMED[name][choice](rng) if isinstance(choice, str) else choice
        for name, choice in strategies(settings).items()
    }
    return Parts(
        rng=rng,
        **instances,
        batch_sampler=sampler,
        sampling_strategy=more.get("sampling_strategy") or SingleMutationSampling(),
        selection_strategy=more.get("selection_strategy") or AllImprovements(),
        stopper=stoppers_of(settings),
        merge=merge if settings.use_merge else None,
        tracker=Tracker(settings),
        cache=EvaluationCache[Any, Any]() if more.get("cache_evaluation", False) else None,
        callbacks=more.get("callbacks"),
    )


class Chosen(Exception):
    """Raised where gepa's code has chosen candidates and would evaluate them, which is left to the run."""

    def __init__(self, *candidates: dict[str, str]) -> None:
        super().__init__()
        self.candidates = candidates


def _left_to_the_run(examples: Any, candidate: dict[str, str]) -> Any:
    raise Chosen(candidate)


class Stoppers(CompositeStopper):
    """Stops a run when one of its stoppers says so; the rest is not asked that time.

    Args:
        stoppers: gepa's, or the user's own.
    """

    def __init__(self, *stoppers: Any) -> None:
        super().__init__(*stoppers)
        self.reason = ""
        """Why to stop; empty until a stopper has said so."""
        self.budget_spent = False
        """It was the budget of metric calls that said so."""

    def __call__(self, gepa_state: Any, counts: bool = True) -> bool:
        """Ask the stoppers in order; those that count iterations without improvement only where ``counts`` is true."""
        says = next((stopper for stopper in self.stoppers if self._says(stopper, gepa_state, counts)), None)
        if says is not None and not self.reason:
            self.reason = _reason(says)
            self.budget_spent = isinstance(says, MaxMetricCallsStopper)
        return says is not None

    def _says(self, stopper: Any, gepa_state: Any, counts: bool) -> bool:
        """Say whether a stopper says stop; of gepa's composite, whether those that it has do."""
        if type(stopper) is CompositeStopper and stopper.mode in ("any", "all"):
            says = (self._says(nested, gepa_state, counts) for nested in stopper.stoppers)
            return any(says) if stopper.mode == "any" else all(says)
        if isinstance(stopper, NoImprovementStopper) and not counts:
            return False
        return bool(stopper(gepa_state))


def stoppers_of(settings: GepaSettings) -> Stoppers:
    """Build the stoppers: the user's, the file ``gepa.stop`` in the run directory, the budget."""
    hooks = settings.gepa_kwargs.get("stop_callbacks")
    stoppers: list[Any] = [] if hooks is None else list(hooks) if isinstance(hooks, list | tuple) else [hooks]
    if settings.log_dir is not None:
        stoppers.append(FileStopper(os.path.join(settings.log_dir, "gepa.stop")))
    if settings.max_metric_calls is not None:
        stoppers.append(MaxMetricCallsStopper(settings.max_metric_calls))
    return Stoppers(*stoppers)


def _reason(stopper: Any) -> str:
    if isinstance(stopper, FileStopper):
        return f"the file {stopper.stop_file_path} is there"
    if isinstance(stopper, MaxMetricCallsStopper):
        return f"max_metric_calls={stopper.max_metric_calls} is spent"
    return "a stopper said stop"


# Where the strategies stand, as JSON, so that a run can go on from there: what gepa's own checkpoint does not hold, the
# sampler's epoch, the merges tried, and in lockstep the shared randomness. Strategies of the user's own begin anew.

SAMPLER = ("epoch", "last_trainset_size", "_current_iteration", "_calls_in_iteration")
MERGE = ("merges_due", "total_merges_tested", "last_iter_found_new_program")
"""Attributes of gepa's objects."""


def strategies_of(
    parts: Parts, adapter: Any, state: GEPAState[Any, Any], shared_randomness: bool, text_of: Callable[[Any], str]
) -> dict[str, Any]:
    """Return, as JSON, where the strategies stand now. Runs in the pool's writer.

    Args:
        shared_randomness: steps draw from the run's randomness, not from their own.
        text_of: training example's id -> its text.
    """
    record: dict[str, Any] = {}
    sampler, merge = parts.batch_sampler, parts.merge
    if type(sampler) is EpochShuffledBatchSampler:
        record["sampler"] = {name: getattr(sampler, name) for name in SAMPLER}
        record["sampler"]["shuffled_ids"] = [text_of(example) for example in sampler.shuffled_ids]
    if merge is not None:
        record["merge"] = {name: getattr(merge, name) for name in (*MERGE, "merges_performed")}
    if shared_randomness:
        record["rng"] = parts.rng.getstate()
        record["next_components"] = state.named_predictor_id_to_update_next_for_program_candidate
        if isinstance(getattr(adapter, "rng", None), random.Random):
            record["adapter_rng"] = adapter.rng.getstate()
    return record


def restore_strategies(
    record: dict[str, Any], parts: Parts, adapter: Any, state: GEPAState[Any, Any], ids: dict[str, Any]
) -> None:
    """Put the strategies back where :func:`strategies_of` found them; ``ids``: text of a training example's id -> the
    id."""
    sampler, merge = parts.batch_sampler, parts.merge
    if type(sampler) is EpochShuffledBatchSampler and (there := record.get("sampler")):
        names: list[str] = there["shuffled_ids"]
        # An epoch that was laid out for another size of minibatches does not go on: a new one begins.
        is_laid_out = names and len(names) % sampler.minibatch_size == 0
        if is_laid_out and all(name in ids for name in names):
            for name in SAMPLER:
                setattr(sampler, name, there[name])
            sampler.shuffled_ids = [ids[name] for name in names]
            sampler.id_freqs = Counter(sampler.shuffled_ids)
    if merge is not None and (there := record.get("merge")):
        for name in MERGE:
            setattr(merge, name, there[name])
        first, second = there["merges_performed"]
        merge.merges_performed = ([_tuples(pair) for pair in first], [_tuples(pair) for pair in second])
    if "rng" in record:
        turns: list[int] = record["next_components"]
        state.named_predictor_id_to_update_next_for_program_candidate[: len(turns)] = turns
        parts.rng.setstate(_tuples(record["rng"]))
    if "adapter_rng" in record:
        adapter.rng.setstate(_tuples(record["adapter_rng"]))


def _tuples(value: Any) -> Any:
    """Turn lists, at any depth, into the tuples that they were before JSON."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType]


def adapter_of(settings: GepaSettings, student: Module, reflection_lm: Any) -> StudentAdapter:
    """Build dspy's adapter as ``dspy.GEPA.compile`` does."""
    return StudentAdapter(
        student_module=student,
        metric_fn=settings.metric_fn,
        feedback_map={},  # filled for each minibatch, see ReflectionRunner.dataset
        failure_score=settings.failure_score,
        num_threads=settings.num_threads,
        add_format_failure_as_feedback=settings.add_format_failure_as_feedback,
        rng=random.Random(settings.seed),
        reflection_lm=reflection_lm,
        custom_instruction_proposer=settings.custom_instruction_proposer,
        custom_code_proposer=settings.custom_code_proposer,
        warn_on_score_mismatch=settings.warn_on_score_mismatch,
        reflection_minibatch_size=settings.reflection_minibatch_size,
    )
