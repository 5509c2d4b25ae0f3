"""What a user may pass on to gepa, checked before anything is run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gepa.api import optimize
from gepa.proposer.reflective_mutation.base import CandidateSelector
from gepa.strategies.acceptance import AcceptanceCriterion
from gepa.strategies.eval_policy import EvaluationPolicy

from dspy_flashevolve.engine.errors import ConfigurationError

ARGUMENTS = {
    "reflection_lm": "reflection_lm",
    "candidate_selection_strategy": "candidate_selection_strategy",
    "skip_perfect_score": "skip_perfect_score",
    "reflection_minibatch_size": "reflection_minibatch_size",
    "module_selector": "component_selector",
    "perfect_score": "perfect_score",
    "use_merge": "use_merge",
    "max_merge_invocations": "max_merge_invocations",
    "max_metric_calls": "max_metric_calls",
    "run_dir": "log_dir",
    "use_wandb": "use_wandb",
    "wandb_api_key": "wandb_api_key",
    "wandb_init_kwargs": "wandb_init_kwargs",
    "use_mlflow": "use_mlflow",
    "track_best_outputs": "track_best_outputs",
    "seed": "seed",
}
"""gepa's name -> the optimizer's own argument that sets it."""

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

CANDIDATE_SELECTORS = ("pareto", "current_best", "epsilon_greedy", "top_k_pareto")
COMPONENT_SELECTORS = ("round_robin", "all")
ACCEPTANCE = ("strict_improvement", "improvement_or_equal")
FRONTIERS = ("instance", "objective", "hybrid", "cartesian")


@dataclass(frozen=True, slots=True)
class GepaOptions:
    """Everything that configures a run of GEPA beside the data, the program and the metric.

    The names and meanings are those of ``gepa.optimize``; ``extra`` is the user's ``gepa_kwargs``.
    """

    candidate_selection_strategy: Any = "pareto"
    component_selector: Any = "round_robin"
    reflection_minibatch_size: int | None = 3
    skip_perfect_score: bool = True
    perfect_score: float | None = 1.0
    use_merge: bool = True
    max_merge_invocations: int | None = 5
    max_metric_calls: int | None = None
    run_dir: str | None = None
    use_wandb: bool = False
    wandb_api_key: str | None = None
    wandb_init_kwargs: dict[str, Any] | None = None
    use_mlflow: bool = False
    track_best_outputs: bool = False
    seed: int | None = 0
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def get(self, name: str, default: Any = None) -> Any:
        """A value of ``gepa_kwargs``."""
        return self.extra.get(name, default)


def check_options(options: GepaOptions) -> None:
    """Refuse what cannot work, with the reason.

    Raises:
        ConfigurationError: an unknown or refused key of ``gepa_kwargs``, an unknown strategy, a minibatch size
            under 1, or a combination that gepa does not take.
    """
    known = set(inspect.signature(optimize).parameters)
    for name, value in options.extra.items():
        if name not in REFUSED or value is not None:  # None is gepa's own default: nothing was asked for
            _check_key(name, known)
    _check_choice(
        "candidate_selection_strategy", options.candidate_selection_strategy, CANDIDATE_SELECTORS, CandidateSelector
    )
    _check_choice("component_selector", options.component_selector, COMPONENT_SELECTORS, None)
    _check_choice(
        "acceptance_criterion", options.get("acceptance_criterion", ACCEPTANCE[0]), ACCEPTANCE, AcceptanceCriterion
    )
    _check_choice(
        "val_evaluation_policy", options.get("val_evaluation_policy") or "full_eval", ("full_eval",), EvaluationPolicy
    )
    frontier = options.get("frontier_type", "instance")
    if frontier not in FRONTIERS:
        raise ConfigurationError(f"frontier_type is {frontier!r}, expected one of {', '.join(FRONTIERS)}.")
    _check_minibatches(options)
    if options.skip_perfect_score and options.perfect_score is None:
        raise ConfigurationError(
            "perfect_score is None while skip_perfect_score is True: give a score, or set it False."
        )


def _check_key(name: str, known: set[str]) -> None:
    if name in ARGUMENTS:
        raise ConfigurationError(f"gepa_kwargs has {name!r}: pass it as the argument {ARGUMENTS[name]}= instead.")
    if name in REFUSED:
        raise ConfigurationError(f"gepa_kwargs has {name!r}, which cannot be passed through: {REFUSED[name]}.")
    if name not in known:
        allowed = ", ".join(sorted(known - ARGUMENTS.keys() - REFUSED.keys()))
        raise ConfigurationError(f"gepa_kwargs has {name!r}, which gepa does not know. It knows: {allowed}.")


def _check_choice(name: str, given: Any, names: tuple[str, ...], protocol: type | None) -> None:
    if isinstance(given, str):
        if given not in names:
            raise ConfigurationError(f"{name} is {given!r}, expected one of {', '.join(names)}, or an object.")
    elif (protocol is None and not callable(given)) or (protocol is not None and not isinstance(given, protocol)):
        kind = "a callable" if protocol is None else f"a {protocol.__name__}"
        raise ConfigurationError(f"{name} is {given!r}, expected one of {', '.join(names)}, or {kind}.")


def _check_minibatches(options: GepaOptions) -> None:
    size = options.reflection_minibatch_size
    if options.get("batch_sampler", "epoch_shuffled") != "epoch_shuffled":
        if size is not None:
            raise ConfigurationError(
                f"reflection_minibatch_size is {size} and gepa_kwargs has a batch_sampler of its own, which decides "
                "the size: pass reflection_minibatch_size=None."
            )
    elif size is not None and size < 1:
        raise ConfigurationError(f"reflection_minibatch_size is {size}, expected at least 1.")
