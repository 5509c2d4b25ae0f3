"""AsyncGEPA: dspy.GEPA on an asynchronous engine. Its arguments, and what its methods promise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import cloudpickle
import dspy
from dspy.clients.lm import LM
from dspy.primitives import Example, Module
from dspy.teleprompt.gepa.gepa import AUTO_RUN_SETTINGS, GEPA
from dspy.teleprompt.gepa.gepa_flex_utils import enumerate_flex_submodules
from dspy.teleprompt.gepa.gepa_utils import CodeProposalFn
from dspy.teleprompt.teleprompt import Teleprompter
from gepa.core.adapter import ProposalFn
from gepa.proposer.reflective_mutation.base import ReflectionComponentSelector

from dspy_flashevolve.engine.errors import ConfigurationError, DataError, check_counts, check_limits
from dspy_flashevolve.engine.run import Schedule
from dspy_flashevolve.engine.staleness import StalenessPolicy, policy_named
from dspy_flashevolve.engine.steps import STEPS_TO_OVERLAP, pays_overlap
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.gepa.compilation import Best, Compilation, Estimate, estimate, texts_of
from dspy_flashevolve.gepa.edits import is_too_long
from dspy_flashevolve.gepa.options import check_options
from dspy_flashevolve.gepa.reports import gepa_logger
from dspy_flashevolve.gepa.search import Search
from dspy_flashevolve.gepa.settings import Edits, GepaSettings, Workflow, asks_for_edits, edits_of
from dspy_flashevolve.programs.function_lm import lm_of
from dspy_flashevolve.programs.metric import check_metric
from dspy_flashevolve.programs.ray_rollouts import RayRollouts
from dspy_flashevolve.programs.run import with_compile_events
from dspy_flashevolve.programs.settings import check_data, settings_of
from dspy_flashevolve.programs.usage import rates_of

logger = logger_named(__name__)


# Teleprompter is named although GEPA is one: MLflow's autologging patches `compile` of Teleprompter.__subclasses__().
class AsyncGEPA(GEPA, Teleprompter):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]  # dspy's @experimental hides the type
    """A drop-in replacement for ``dspy.GEPA`` whose stages overlap.

    It takes every argument of ``dspy.GEPA``, with the same default but for ``reflection_minibatch_size``. Four of them
    mean a little more here and are described below, with the arguments that ``dspy.GEPA`` does not have.

    Args:
        reflection_lm: a ``dspy.LM``, as in ``dspy.GEPA``. Also the name of a model, such as "openai/gpt-5", or a
            function from prompt to text, sync or async, as gepa takes it; its tokens and dollars are not known.
        max_metric_calls: metric calls, as in ``dspy.GEPA``, but never exceeded (``dspy.GEPA`` may exceed it by a
            validation). A budget that pays fewer than two steps is spent as ``dspy.GEPA`` does it, overshoot too.
        reflection_minibatch_size: training examples that a reflection reads. Default None: up to twelve, so many that
            the budget allows twelve reflections, and at most half of the training set; three, as in ``dspy.GEPA``, with
            ``search="pareto"``, as long as children are whole texts, with a sampler or a sampling strategy of your own,
            and in lockstep.
        num_threads: most requests in flight, over all stages. Default None: the run finds out how many the endpoint
            takes, from ``dspy.settings.num_threads`` up to ``max_concurrency`` (docs/guide/backends.md). In lockstep,
            and for programs that run in threads unless ``max_concurrency`` is given, None is
            ``dspy.settings.num_threads``.
        schedule: "async" (default), or "lockstep": one step at a time, with the candidates, parents, scores and metric
            calls of ``dspy.GEPA`` for the same seed, and its way of overshooting the budget.
        staleness: what happens to a child when the pool has changed since its parent was selected. "full" (default)
            admits it. "guarded" discards it when it is more than 8 commits behind. "reflective" lets the reflection LM
            read it beside what was committed meanwhile, and patch it onto the best candidate or drop it; it is asked
            before the child is screened. Or a policy: :class:`Full`, :class:`Guarded`, :class:`Reflective`, or an
            object of your own (docs/staleness.md). Any policy goes with any search.
        search: how candidates are composed. "edits" asks the reflection LM for edits, tests these in many prompts, and
            joins those that are expected to help. "pareto" is GEPA's own: every child stands for itself. Or
            :class:`Edits` with other settings, or a :class:`~.gepa.search.Search` of your own (docs/staleness.md).
            Default None: "edits", but "pareto" with an ``instruction_proposer`` of your own, so that every text that
            runs is one that it returned, and where all that evolves is code. With "edits", texts of your own proposer
            are joined as far as they are an :class:`EditedText`. In lockstep it is "pareto".
        stale_candidate_reflection: the ``dspy.Module`` that repairs stale children. Default:
            :class:`StaleCandidateReflection`. It asks ``reflection_lm`` unless its predictors have LMs of their own.
        max_reflection_calls: no step starts after this many reflections and repairs. Default None: no limit.
        max_cost: no step starts after this many dollars, by litellm's cost map. Steps that run are finished and a last
            validation may follow, so that a run may end a little above it. Default None: no limit. Given without a
            number of metric calls, it is the budget.
        max_seconds: no step starts after this many seconds of a session; steps that run are finished, and the last
            validation begins early enough to end about then. A run that goes on in its ``log_dir`` counts from zero
            again, as for no other limit. Default None: no limit. Given without a number of metric calls, it is the
            budget.
        max_concurrency: most requests in flight when ``num_threads`` is None. Default None: 256.
        workflow: how steps overlap, a :class:`Workflow`: how early a stage passes its output on, how many steps run,
            whose requests get slots, how long a rollout may take, how long an unanswering provider is waited for, and
            how long a candidate may be (docs/guide/shaping-a-search.md). Default None: ``Workflow()``.
        rollouts: a :class:`~.programs.ray_rollouts.RayRollouts`, to run program and metric in other processes, on many
            cores or a cluster (docs/guide/backends.md). Default None: in this process.
        metric_lock: True for a metric that is not thread-safe. It is then called once at a time within a run, for
            scores and for feedback, sync or coroutine, while programs run side by side; a call that waits for its turn
            keeps its slot. Default False: calls overlap.

    Raises:
        ConfigurationError: an argument that cannot work, with the reason.
        TypeError: a metric with the wrong signature (as ``dspy.GEPA``).
        AssertionError: no budget, or more than one in metric calls, or no reflection LM (as ``dspy.GEPA``).

    Example:
        >>> import dspy
        >>> from dspy_flashevolve import AsyncGEPA
        >>> def metric(gold, pred, trace=None, pred_name=None, pred_trace=None):
        ...     return dspy.Prediction(score=float(gold.answer == pred.answer), feedback="...")
        >>> optimizer = AsyncGEPA(metric, auto="light", num_threads=64, reflection_lm=dspy.LM("openai/gpt-5"))
        >>> # optimized = optimizer.compile(program, trainset=trainset, valset=valset)

    Source: FlashEvolve (arXiv 2605.08520) for the asynchronous stages, GEPA (arXiv 2507.19457) for the loop.
    """

    schedule: Schedule
    staleness: Literal["full", "guarded", "reflective"] | StalenessPolicy
    search: Literal["edits", "pareto"] | Edits | Search | None
    stale_candidate_reflection: Module | None
    max_reflection_calls: int | None
    max_cost: float | None
    max_seconds: float | None
    max_concurrency: int | None
    rollouts: RayRollouts | None
    metric_lock: bool

    def __init__(
        self,
        metric: Callable[..., Any],
        *,
        # Budget configuration
        auto: Literal["light", "medium", "heavy"] | None = None,
        max_full_evals: int | None = None,
        max_metric_calls: int | None = None,
        # Reflection configuration
        reflection_minibatch_size: int | None = None,
        candidate_selection_strategy: Literal["pareto", "current_best"] = "pareto",
        reflection_lm: LM | str | Callable[[str], Any] | None = None,
        skip_perfect_score: bool = True,
        add_format_failure_as_feedback: bool = False,
        instruction_proposer: ProposalFn | None = None,
        code_proposer: CodeProposalFn | None = None,
        component_selector: ReflectionComponentSelector | str = "round_robin",
        # Merge-based configuration
        use_merge: bool = True,
        max_merge_invocations: int | None = 5,
        # Evaluation configuration
        num_threads: int | None = None,
        failure_score: float = 0.0,
        perfect_score: float = 1.0,
        # Logging
        log_dir: str | None = None,
        track_stats: bool = False,
        use_wandb: bool = False,
        wandb_api_key: str | None = None,
        wandb_init_kwargs: dict[str, Any] | None = None,
        track_best_outputs: bool = False,
        warn_on_score_mismatch: bool = True,
        use_mlflow: bool = False,
        # Reproducibility
        seed: int | None = 0,
        # GEPA passthrough kwargs
        gepa_kwargs: dict[str, Any] | None = None,
        # The asynchronous engine
        schedule: Schedule = "async",
        staleness: Literal["full", "guarded", "reflective"] | StalenessPolicy = "full",
        search: Literal["edits", "pareto"] | Edits | Search | None = None,
        stale_candidate_reflection: Module | None = None,
        max_reflection_calls: int | None = None,
        max_cost: float | None = None,
        max_seconds: float | None = None,
        max_concurrency: int | None = None,
        workflow: Workflow | None = None,
        rollouts: RayRollouts | None = None,
        metric_lock: bool = False,
        **unknown: Any,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "unknown", "__class__")}
        refuse_unknown(unknown)
        check_metric(metric)
        if auto is not None and auto not in AUTO_RUN_SETTINGS:
            raise ConfigurationError(f"auto is {auto!r}, expected one of {', '.join(map(repr, AUTO_RUN_SETTINGS))}.")
        counted = any(budget is not None for budget in (auto, max_full_evals, max_metric_calls))
        without_calls = not counted and (max_seconds is not None or max_cost is not None)
        own = {name: arguments.pop(name) for name in (*AsyncGEPA.__annotations__, "workflow")}
        most_calls = 1 if without_calls else max_metric_calls  # dspy.GEPA wants one of the budgets
        lm = lm_of(reflection_lm, "reflection_lm")
        super().__init__(**arguments | {"max_metric_calls": most_calls, "reflection_lm": lm})
        for name, value in own.items():
            setattr(self, name, value)
        self.max_metric_calls = None if without_calls else max_metric_calls
        self.workflow = Workflow() if workflow is None else workflow
        self._best = Best()
        self._check_arguments()
        check_options(self._settings())
        self._check_callbacks()

    def compile(  # pyright: ignore[reportIncompatibleMethodOverride]  # as dspy.GEPA, which takes no more either
        self,
        student: Module,
        *,
        trainset: list[Example],
        teacher: Module | None = None,
        valset: list[Example] | None = None,
        initial_candidates: Sequence[Module] = (),
    ) -> Module:
        """Optimize ``student``; the arguments and the result are those of ``dspy.GEPA.compile``.

        Call it from a script, a thread, or a notebook cell.

        In the main thread, the first Ctrl-C (a notebook's "Interrupt") or SIGTERM ends the run early: no further step
        starts, steps that run are finished, and the best program is returned. The process goes on, with its signal
        handlers as they were. The second one cancels the run and raises KeyboardInterrupt; :meth:`best_so_far` then has
        the best program and, with ``log_dir``, ``gepa_state.bin`` has every committed candidate. It waits for sync
        metrics that have begun, since their calls count, but not for programs in threads.

        A signal handler of your own (``asyncio.run`` sets one for Ctrl-C) is left alone; one that raises
        KeyboardInterrupt counts as Ctrl-C, and ``sys.exit`` in it cancels the run. In other threads no signal is
        touched. A file ``gepa.stop`` in ``log_dir`` ends a run from outside.

        Args:
            student: the program to optimize; it is not changed.
            trainset: examples to reflect on.
            teacher: not supported, as in ``dspy.GEPA``.
            valset: examples that decide which candidates are kept. Default None, and an empty list: the trainset.
            initial_candidates: programs with the student's predictors and other instructions, such as results of
                earlier runs. The search begins from these and the student alike; each costs a validation.

        Returns:
            The best program that was validated on every validation example. With ``track_stats=True`` it has
            ``detailed_results`` (an :class:`AsyncGEPAResult`) and ``async_stats``, whose ``outcome`` and
            ``stop_reason`` say how and why the run ended.

        Raises:
            ConfigurationError: the data, the program or the budget cannot work; raised before any LM call.
            RunAbortedError: the LM provider refused for good; its ``best_program`` is the best so far.
            KeyboardInterrupt: the run was cancelled by a second Ctrl-C or SIGTERM.
            Exception: what the metric, a selector, a stopper or another strategy of yours raised. The log names it;
                once the seed is validated, the exception has ``best_program`` too.
        """
        return self._prepare(student, trainset, teacher, valset, initial_candidates).run_sync()

    @with_compile_events
    async def acompile(
        self,
        student: Module,
        *,
        trainset: list[Example],
        teacher: Module | None = None,
        valset: list[Example] | None = None,
        initial_candidates: Sequence[Module] = (),
    ) -> Module:
        """Do what :meth:`compile` does, on the caller's event loop.

        Signals are left to the caller. Cancelling the coroutine ends the run at once; :meth:`best_so_far` then has the
        best program.
        """
        return await self._prepare(student, trainset, teacher, valset, initial_candidates).run_async()

    def best_so_far(self) -> Module | None:
        """Return the best program that is validated so far, while ``compile`` or ``acompile`` runs and after it.

        Call it from any thread, from a callback or from the metric: it never waits for the run.

        Returns:
            A new program, as ``compile`` would return it; None before the seed is validated. While the run goes on,
            its ``detailed_results`` are those of the moment when it became the best, without ``async_stats``. After
            the run they are the run's, also where its ``outcome`` is "aborted". Of several runs of this optimizer, the
            one that began last counts.
        """
        return self._best.program()

    def estimate(self, student: Module, *, trainset: list[Example], valset: list[Example] | None = None) -> Estimate:
        """Estimate what :meth:`compile` may cost, from one minibatch of rollouts and one reflection.

        These requests are paid for: they go past dspy's cache, and do not count against the budget. ``print`` the
        result to see what it assumes and what it does not know.

        Args:
            student, trainset, valset: those of :meth:`compile`.

        Returns:
            What one metric call and one reflection used, and the tokens and dollars of a whole run.

        Raises:
            ConfigurationError: the data or the program cannot work; raised before any LM call.
            RunAbortedError: the provider refused for good, or gave no answer.
            Exception: what the metric or the proposer raised, or the program on every example.
        """
        valset = _given(valset)
        check_data(student, trainset, None, valset)
        components = self._components(student)
        calls = self._budget(components, trainset, valset)
        first = len(trainset if valset is None else valset)
        settings = replace(self._settings(), max_metric_calls=calls, search=self._usable_search(student))
        settings = settings.sized_for(len(trainset), first, components)
        return estimate(settings, student, trainset, calls, first)

    def _prepare(
        self, student: Module, trainset: Any, teacher: Module | None, valset: Any, initial: Sequence[Module]
    ) -> Compilation:
        is_empty, valset = valset is not None, _given(valset)
        check_data(student, trainset, teacher, valset)
        check_texts(student, initial, self.workflow.max_candidate_characters)
        components = self._components(student)
        self._check_prices(student)
        # As in dspy.GEPA, the budget is stored in metric calls, in whatever way it was given.
        self.max_metric_calls = self._budget(components, trainset, valset)
        gepa_logger.info("Running AsyncGEPA for at most %s metric calls.", self.max_metric_calls)
        if valset is None:
            gepa_logger.warning(  # dspy.GEPA's logger: who has silenced its warning has silenced this one too
                "%s: the trainset is used for both, and prompts may overfit to it. Pass a separate valset to find "
                "prompts that generalize.",
                "The valset is empty" if is_empty else "No valset given",
            )
        schedule = self._usable_schedule(trainset, trainset if valset is None else valset, 1 + len(initial))
        own: dict[str, Any] = {"schedule": schedule, "search": self._usable_search(student)}
        settings, arguments = replace(self._settings(), **own), vars(self) | own
        compilation = Compilation(settings, type(self).__qualname__, arguments, student, trainset, valset, initial)
        self._best = compilation.best
        return compilation

    def _components(self, student: Module) -> int:
        """Count the texts that there are to evolve.

        Raises:
            ConfigurationError: there is none.
        """
        components = len(texts_of(student))
        if not components:
            raise ConfigurationError(
                f"{type(student).__name__} has no predictor and no dspy.Flex submodule: there is no text to evolve."
            )
        return components

    def _settings(self) -> GepaSettings:
        """Return the arguments as they are now, frozen.

        Raises:
            ConfigurationError: an argument that all optimizers have cannot work.
        """
        return settings_of(GepaSettings, self, self.workflow)

    def _usable_search(self, student: Module) -> str | Edits | Search:
        """Return the search of one run: GEPA's own where nothing is written as edits, unless the user asks for edits.

        Code is never joined, whoever asks for it.
        """
        if isinstance(self.search, Search):
            return self.search
        if texts_of(student).keys() == enumerate_flex_submodules(student).keys():
            return "pareto"
        if self.search is not None:
            return self.search
        return "edits" if asks_for_edits(self.custom_instruction_proposer) else "pareto"

    def _usable_schedule(self, trainset: Any, valset: Any, validations: int) -> Schedule:
        """Return the schedule of one run: dspy.GEPA's where the budget is too small for ours.

        Args:
            trainset, valset: examples.
            validations: number of programs that the run begins with, each of which is validated.

        Raises:
            ConfigurationError: the budget cannot pay these validations, where there are several.
        """
        calls, valset_size = self.max_metric_calls, len(valset)
        minibatch = min(self.reflection_minibatch_size or 3, len(trainset))  # 3 is gepa's where nothing is said
        narrow = hasattr(self.gepa_kwargs.get("val_evaluation_policy"), "get_seed_eval_batch")
        if self.schedule == "lockstep" or calls is None or narrow:
            return self.schedule
        needed = validations * valset_size
        if validations > 1 and calls < needed:  # dspy.GEPA, which overdraws a budget, has no such candidates
            raise ConfigurationError(
                f"The budget is {calls} metric calls, expected at least {needed}: the seed program is validated first, "
                f"on every validation example, and so are {validations - 1} initial candidates. Give a larger budget "
                "or a smaller valset."
            )
        if pays_overlap(calls, validations, valset_size, minibatch):
            return self.schedule
        step = 2 * minibatch + valset_size
        gepa_logger.info(
            "The budget of %d metric calls is too small for steps that overlap: it is spent as dspy.GEPA does, one "
            "step after the other (schedule='lockstep'), and the last one, of up to %d metric calls, may exceed it. "
            "From %d metric calls on steps overlap, and the budget is never exceeded.",
            calls,
            step,
            needed + STEPS_TO_OVERLAP * step,
        )
        return "lockstep"

    def _budget(self, components: int, trainset: Any, valset: Any) -> int | None:
        """Return the budget in metric calls, as ``dspy.GEPA.compile`` computes it; None without one."""
        if self.auto is not None:
            return self.auto_budget(
                num_preds=components,
                num_candidates=AUTO_RUN_SETTINGS[self.auto]["n"],
                valset_size=len(valset) if valset is not None else len(trainset),
            )
        if self.max_full_evals is not None:
            return self.max_full_evals * (len(trainset) + (len(valset) if valset is not None else 0))
        return self.max_metric_calls

    def _check_arguments(self) -> None:
        """Raise ConfigurationError for an argument of AsyncGEPA's own that cannot work."""
        policy_named(self.staleness)
        if self.search is not None:
            edits_of(self.search)
        module = self.stale_candidate_reflection
        if module is not None and not isinstance(module, Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"stale_candidate_reflection is {module!r}, expected a dspy.Module.")
        if not isinstance(self.workflow, Workflow):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"workflow is {self.workflow!r}, expected a Workflow, or None.")
        if isinstance(self.search, Search) and self.workflow.is_published:
            raise ConfigurationError(
                f"search is a {type(self.search).__name__} and workflow is {self.workflow!r}: FlashEvolve's "
                "Workflow(validate=, workers=, median_seconds=) goes with 'edits' and 'pareto'. Leave these out."
            )
        live = self.workflow.live_steps
        if self.schedule == "lockstep" and live not in (None, 1):
            raise ConfigurationError(f"live_steps is {live}, but schedule='lockstep' runs one step at a time.")
        check_counts(max_reflection_calls=self.max_reflection_calls)
        if not isinstance(self.metric_lock, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"metric_lock is {self.metric_lock!r}, expected True or False.")
        check_limits(max_cost=self.max_cost)

    def _check_prices(self, student: Module) -> None:
        """Check that a limit in dollars has a price for every LM that the run may ask.

        Raises:
            ConfigurationError: litellm's cost map does not have one.
        """
        if self.max_cost is None:
            return
        own = [getattr(predictor, "lm", None) for predictor in student.predictors()]
        lms: list[Any] = [*own, dspy.settings.lm, self.reflection_lm]
        models = {str(lm.model) for lm in lms if hasattr(lm, "model")}
        unknown = sorted(model for model in models if rates_of(model) is None)
        if unknown:
            raise ConfigurationError(
                f"max_cost is {self.max_cost:g}, but litellm's cost map has no price for {', '.join(unknown)}. "
                "Register one by litellm.register_model({...}), or bound the run by max_metric_calls, "
                "max_reflection_calls or max_seconds."
            )

    def _check_callbacks(self) -> None:
        """Check gepa's callbacks. A run with ``log_dir`` is written down to go on elsewhere, and they with it.

        Raises:
            ConfigurationError: they are no list or, with ``log_dir``, one of them cannot be pickled.
        """
        callbacks = self.gepa_kwargs.get("callbacks")
        if callbacks is not None and not isinstance(callbacks, list | tuple):
            raise ConfigurationError(f"gepa_kwargs['callbacks'] is {callbacks!r}, expected a list of callback objects.")
        for callback in callbacks or [] if self.log_dir is not None else []:
            try:
                cloudpickle.dumps(callback)
            except Exception as error:
                raise ConfigurationError(
                    f"The callback {callback!r} cannot be pickled ({error}), which a run with log_dir={self.log_dir!r} "
                    "needs. Leave out what cannot be pickled (define __getstate__), or run without log_dir."
                ) from error


def _given(valset: Any) -> Any:
    """Return the valset; None for an empty list, which ``dspy.GEPA`` takes for none as well."""
    return None if isinstance(valset, list | tuple) and not valset else valset


def check_texts(student: Module, initial: Sequence[Module], most_characters: int | None) -> None:
    """Check the programs to begin from: they have the student's predictors, and are no longer than candidates may be.

    Args:
        most_characters: the limit on all texts of a program together; None for none.

    Raises:
        DataError: one is not so.
    """
    if not isinstance(initial, list | tuple):
        raise DataError(f"initial_candidates is {initial!r:.80}, expected a list of programs.")
    expected = sorted(texts_of(student))
    for number, program in enumerate([student, *initial]):
        name = f"initial_candidates[{number - 1}]" if number else "student"
        if not isinstance(program, Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DataError(f"{name} is {program!r:.80}, expected a dspy.Module.")
        texts = texts_of(program)
        if sorted(texts) != expected:
            raise DataError(f"{name} has the predictors {sorted(texts)}, expected those of the student: {expected}.")
        if is_too_long(texts, most_characters):
            raise DataError(
                f"The texts of {name} have {sum(map(len, texts.values()))} characters, above "
                f"max_candidate_characters={most_characters}. Raise it, or shorten them."
            )


INSTEAD = {
    "max_steps": "max_metric_calls, max_full_evals, auto or max_seconds",
    "max_iterations": "max_metric_calls, max_full_evals, auto or max_seconds; a count of iterations is a stopper of "
    "gepa, gepa_kwargs={'stop_callbacks': MaxCandidateProposalsStopper(n)}",
    "optimize_tool_descriptions": "nothing: instructions evolve, descriptions of tools do not, as in dspy.GEPA; write "
    "into the instruction what is to be learnt of a tool",
    "num_trials": "max_metric_calls, max_full_evals, auto or max_seconds",
    "depth": "max_metric_calls, max_full_evals, auto or max_seconds",
    "num_candidates": "gepa_kwargs={'sampling_strategy': IndependentSampling(n)} of gepa for n children a step",
    "breadth": "gepa_kwargs={'sampling_strategy': IndependentSampling(n)} of gepa for n children a step",
    "bsize": "reflection_minibatch_size",
    "prompt_model": "reflection_lm",
    "task_model": "dspy.configure(lm=...), or set_lm of the program",
    "max_errors": "nothing: an error of the program scores failure_score",
}
"""Argument of another of dspy's optimizers (SIMBA, MIPROv2, COPRO) -> what to use instead."""


def refuse_unknown(arguments: Iterable[str]) -> None:
    """Raise TypeError for arguments that AsyncGEPA does not have, with what to use instead where that is known."""
    for name in arguments:
        if name in INSTEAD:
            raise TypeError(f"AsyncGEPA has no argument {name!r}, as other optimizers do: use {INSTEAD[name]}.")
        raise TypeError(f"AsyncGEPA() got an unexpected keyword argument {name!r}")
