"""The arguments of AsyncGEPA, frozen for the length of a run: they are read here, never from the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from dspy.primitives import Module
from dspy.teleprompt.gepa.instruction_proposal import InstructionProposer

from dspy_flashevolve.engine.errors import ConfigurationError, check_counts, check_limits
from dspy_flashevolve.engine.provider import OUTAGE_SECONDS
from dspy_flashevolve.engine.staleness import StalenessPolicy
from dspy_flashevolve.gepa.search import Search
from dspy_flashevolve.programs.settings import RunSettings

MINIBATCH = 3
"""Examples of a minibatch of gepa's, where nothing is said."""
MOST_READ, LEAST_REFLECTIONS = 12, 12
"""Examples that a reflection reads at most, and reflections that the budget has to pay all the same. A strong model
reads twelve examples as easily as three: with coded labels 16 reflections of twelve did as well as 34 of three to eight
(docs/benchmarks.md, real reflections). With 250 metric calls twelve smaller reflections were better than eight larger
ones in three of four simulated models. Of several components each gets so many: with two and three of which one decides
200 calls scored .16 to .19 more so (``benchmarks.compare --calls 200 --model obliging --train 20 --val 20 --slots 16
--tasks few:rules=12,rules_per_example=4,predictors=2,decides=last``, six seeds, a simulated model)."""


@dataclass(frozen=True, slots=True)
class Edits:
    """Search by edits: test the edits of children in many prompts at once, and keep those that help.

    They join the head, the prompt of all edits that are expected to help, without an LM call. A child that was written
    as a whole text stands for itself. Steps start from variants of the head, each with some of the edits left out, and
    one linear model over all rollouts tells what each edit is worth. What harms leaves the head; the head is validated
    where it is expected to be better. The alternative, ``search="pareto"``, is GEPA's own: every child stands for
    itself, and every step starts from the Pareto frontier.

    Args:
        frontier_share: share of the steps that start from the Pareto frontier all the same, 0 to 1.

    Raises:
        ConfigurationError: a share that is none.
    """

    frontier_share: float = 0.25

    def __post_init__(self) -> None:
        share: Any = self.frontier_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ConfigurationError(f"Edits: frontier_share is {share!r}, expected 0 to 1.")


STAGES = ("rollout", "propose", "integrate", "screen", "prefix", "validate")
"""Where a step's requests wait for their slots."""


def asks_for_edits(proposer: Any) -> bool:
    """Say whether the reflection LM can be asked for edits: whether a proposer is dspy's, with any settings."""
    return proposer is None or type(proposer) is InstructionProposer


def edits_of(search: Any) -> Edits | None:
    """Return the settings of the search by edits; None for GEPA's own search.

    Raises:
        ConfigurationError: no such search.
    """
    if isinstance(search, Edits):
        return search
    if isinstance(search, Search) or (isinstance(search, str) and search in ("edits", "pareto")):
        return Edits() if search == "edits" else None
    raise ConfigurationError(f"search is {search!r}, expected 'edits', 'pareto', an Edits(...), a Search, or None.")


@dataclass(frozen=True, slots=True)
class Workflow:
    """How steps overlap, and what ends them: how early a validation releases its output, how many steps there are,
    whose slots they get, how long a rollout may take, how long nobody answers before the run ends, and how long a
    candidate may be.

    Args:
        validate: share of the validation set, the prefix, after which a candidate whose score there is above the pool's
            best on the same examples may be selected; the rest runs on. The default waits for the whole: it made the
            best programs (docs/staleness.md).
        rounds: an example of the validation set that this many candidates in a row have passed leaves the prefix.
        live_steps: steps at once, counted strictly. Default: as many as keep the slots busy, fewer where the budget of
            metric calls is small, so that steps can build on each other (:class:`~.steps.LiveSteps`).
        workers: stage -> its worker pool: the requests that it may have in flight (FlashEvolve's K_i), or a pair, the
            fewest and the most, between which ``median_seconds`` moves it, from the most on. Stages are rollout,
            propose, integrate (repairs), screen, prefix and validate; one that is not named may have all slots. None
            for no pools: each free slot goes to the request that is worth most.
        median_seconds: every so many seconds, slots move to the stages that produce less than the others
            (:func:`~.published.median_shares`). None for never: the order of the queues decides, which made the better
            programs.
        max_outage_seconds: a run whose provider answers nothing for so long, and turns away all that it is sent, is
            given up with the best program so far; no Retry-After is waited for longer. None to wait as long as it
            takes (docs/guide/resume-stop-faults.md).
        rollout_timeout_seconds: a rollout that takes longer, once it has its slot, is given up and asked for again, as
            after a rate limit. None for as long as the LM's own timeout lets it.
        max_candidate_characters: the most characters of all texts of a candidate together. A longer one ends its step
            before it costs a rollout. None for no limit.

    Raises:
        ConfigurationError: a share outside (0, 1], a count that is no whole number above 0, seconds that are no
            number above 0, or workers that are neither a count nor a pair of counts in order.
    """

    validate: float = 1.0
    rounds: int = 3
    live_steps: int | None = None
    workers: Mapping[str, int | tuple[int, int]] | None = None
    median_seconds: float | None = None
    max_outage_seconds: float | None = OUTAGE_SECONDS
    rollout_timeout_seconds: float | None = None
    max_candidate_characters: int | None = None

    @property
    def is_published(self) -> bool:
        """Whether it asks for what FlashEvolve has beyond steps that overlap (published.py)."""
        return self.validate < 1 or bool(self.workers) or self.median_seconds is not None

    def __post_init__(self) -> None:
        share: Any = self.validate
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigurationError(f"Workflow: validate is {share!r}, expected a share above 0 and up to 1.")
        if self.rounds is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise ConfigurationError("Workflow: rounds is None, expected a whole number of at least 1.")
        counts = "rounds", "live_steps", "max_candidate_characters"
        check_counts(**{f"Workflow: {name}": getattr(self, name) for name in counts})
        limits = "median_seconds", "max_outage_seconds", "rollout_timeout_seconds"
        check_limits(**{f"Workflow: {name}": getattr(self, name) for name in limits})
        workers: Any = {} if self.workers is None else self.workers
        if not isinstance(workers, Mapping) or not set(cast(Mapping[Any, Any], workers)) <= set(STAGES):
            raise ConfigurationError(
                f"Workflow: workers is {workers!r}, expected stage -> requests in flight; stages are "
                f"{', '.join(STAGES)}."
            )
        for stage, pool in cast(Mapping[str, Any], workers).items():
            pair = cast(tuple[Any, ...], pool) if isinstance(pool, tuple) else (pool, pool)
            are_counts = all(isinstance(count, int) and not isinstance(count, bool) and count > 0 for count in pair)
            if len(pair) != 2 or not are_counts or pair[0] > pair[1]:
                raise ConfigurationError(
                    f"Workflow: workers[{stage!r}] is {pool!r}, expected a whole number of at least 1, or a pair of "
                    "them: the fewest and the most."
                )
            if pair[0] < pair[1] and self.median_seconds is None:
                raise ConfigurationError(
                    f"Workflow: workers[{stage!r}] is {pool!r}, but nothing moves it: give median_seconds, or one "
                    "number."
                )


FLASHEVOLVE: dict[str, Any] = {
    "search": "pareto",
    "staleness": "reflective",
    "workflow": Workflow(validate=0.5, rounds=3, median_seconds=30.0),
}
"""FlashEvolve as published (arXiv 2605.08520), for ``AsyncGEPA(metric, ..., **FLASHEVOLVE)``: GEPA's own search, stale
children repaired (section 3.2), half of a validation before a candidate may be selected and examples that three
candidates in a row have passed moved to its end (section 3.3), slots moved by the median rule (section 3.4)."""


@dataclass(frozen=True, kw_only=True)
class GepaSettings(RunSettings):
    """What one run of :class:`AsyncGEPA` is told to do.

    Fields have the names, and the meaning, of the optimizer's attributes: those of ``dspy.GEPA``, where it has them.

    Args:
        max_metric_calls: in metric calls, in whatever way the budget was given. Lockstep may exceed it by its last
            step, as dspy.GEPA does.
        gepa_kwargs: gepa's own arguments, as the user gave them; checked by :func:`check_options`.
        sizes_minibatches: the run has chosen how many examples a reflection reads (:meth:`sized_for`).
    """

    metric_fn: Callable[..., Any]
    reflection_lm: Any = None
    reflection_minibatch_size: int | None = None
    candidate_selection_strategy: Any = "pareto"
    component_selector: Any = "round_robin"
    skip_perfect_score: bool = True
    perfect_score: float | None = 1.0
    failure_score: float = 0.0
    add_format_failure_as_feedback: bool = False
    custom_instruction_proposer: Any = None
    custom_code_proposer: Any = None
    use_merge: bool = True
    max_merge_invocations: int | None = 5
    log_dir: str | None = None
    track_stats: bool = False
    track_best_outputs: bool = False
    warn_on_score_mismatch: bool = True
    use_wandb: bool = False
    wandb_api_key: str | None = None
    wandb_init_kwargs: dict[str, Any] | None = None
    use_mlflow: bool = False
    gepa_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    staleness: Literal["full", "guarded", "reflective"] | StalenessPolicy = "full"
    search: Literal["edits", "pareto"] | Edits | Search | None = "edits"
    stale_candidate_reflection: Module | None = None
    max_reflection_calls: int | None = None
    max_cost: float | None = None
    workflow: Workflow = Workflow()
    metric_lock: bool = False
    sizes_minibatches: bool = False

    @property
    def is_lockstep(self) -> bool:
        """Whether steps are run one at a time, as dspy.GEPA does."""
        return self.schedule == "lockstep"

    @property
    def edits(self) -> Edits | None:
        """The settings of the search by edits; None where GEPA's own searches, as in lockstep."""
        return None if self.is_lockstep else edits_of(self.search)

    @property
    def minibatch_size(self) -> int:
        """Training examples of one minibatch; gepa's default where none is given."""
        return self.reflection_minibatch_size or MINIBATCH

    def sized_for(self, train: int, val: int, components: int) -> GepaSettings:
        """Choose how many examples a reflection reads, where the user has not said how rollouts and reflections go.

        As many as the budget pays :data:`LEAST_REFLECTIONS` reflections of for each component, each with its child's
        screen, beside the first and the last validation; from three to :data:`MOST_READ`, and at most half of the
        training set. For whole texts it is three.

        Args:
            train, val: numbers of examples.
            components: texts that take turns in being reflected on.
        """
        samples = {"batch_sampler", "sampling_strategy"} & set(self.gepa_kwargs)
        is_own = not asks_for_edits(self.custom_instruction_proposer)
        if self.reflection_minibatch_size is not None or self.edits is None or samples or is_own:
            return self
        size, turns = min(MOST_READ, train // 2), 1 if self.component_selector == "all" else components
        if self.max_metric_calls is not None:
            size = min(size, (self.max_metric_calls - 2 * val) // (2 * LEAST_REFLECTIONS * turns))
        return replace(self, reflection_minibatch_size=max(MINIBATCH, size), sizes_minibatches=True)

    @property
    def frontier_type(self) -> Any:
        """What gepa keeps the best candidates of: validation examples, objectives, or both."""
        return self.gepa_kwargs.get("frontier_type", "instance")

    @property
    def use_cloudpickle(self) -> bool:
        """Whether gepa's checkpoint may hold classes and functions, which run when it is read."""
        return bool(self.gepa_kwargs.get("use_cloudpickle", False))

    @property
    def max_text_characters(self) -> int | None:
        """Characters of one text at most; None for no limit.

        dspy's ``InstructionProposer`` keeps its replies to ``max_chars``; what is joined of them keeps to it as well.
        """
        return getattr(self.custom_instruction_proposer, "max_chars", None)
