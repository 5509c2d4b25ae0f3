"""A run of an evolution loop over DSPy programs: LMs, modules and rollouts on :class:`EvolutionRun`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any, TypeVar, cast

import dspy
from dspy.primitives import Module
from dspy.utils.callback import with_callbacks
from dspy.utils.exceptions import AdapterParseError

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.events import LmCallCounted
from dspy_flashevolve.engine.limits import Bounds
from dspy_flashevolve.engine.loop import is_being_cancelled
from dspy_flashevolve.engine.provider import RetryPolicy
from dspy_flashevolve.engine.requests import Call, OnGranted, RequestCost, Rollout, RolloutCall, RolloutKey, batch
from dspy_flashevolve.engine.run import EvolutionRun, Observer
from dspy_flashevolve.engine.scheduler import Requester
from dspy_flashevolve.engine.steps import EndKind, Reservation, Step, StepEnded
from dspy_flashevolve.engine.store import BEFORE_STEPS, Store, hash_of
from dspy_flashevolve.observe.progress import Display, Progress
from dspy_flashevolve.observe.statistics import Recorder, RunStats
from dspy_flashevolve.programs.building import StudentAdapter, copy_of
from dspy_flashevolve.programs.faults import raise_provider_fault, recording_lm_calls
from dspy_flashevolve.programs.lm import LanguageModels
from dspy_flashevolve.programs.metric import Metric
from dspy_flashevolve.programs.placement import Placement, runs_on_loop
from dspy_flashevolve.programs.program import ProgramRunner
from dspy_flashevolve.programs.ray_rollouts import Actors
from dspy_flashevolve.programs.records import ModuleReply, ProgramRecord, ReplyText
from dspy_flashevolve.programs.replies import CutOffReplyError, recording_cut_off_replies
from dspy_flashevolve.programs.servers import endpoint_of
from dspy_flashevolve.programs.settings import RunSettings
from dspy_flashevolve.programs.usage import (
    Entry,
    Place,
    calls_of,
    cost_of,
    cost_of_call,
    counting_usage,
    rates_of,
    tokens_of,
    tokens_of_call,
    usage_settings,
)

T = TypeVar("T")
Compile = TypeVar("Compile", bound=Callable[..., Any])
MAX_CONCURRENCY = 256
"""Requests in flight at most where the slots adapt and ``max_concurrency`` is not given. A round number: limits adapt
below it, threads are made for as many, and with half a large endpoint is left idle."""


def with_compile_events(acompile: Compile) -> Compile:
    """Let an optimizer's ``acompile`` tell dspy's callbacks ``on_compile_start`` and ``on_compile_end``.

    dspy wraps every method named ``compile`` of a ``Teleprompter`` in this way, and knows no ``acompile``.
    """
    return cast(Compile, with_callbacks(acompile))


class DspyRun(EvolutionRun):
    """One run of an evolution loop over DSPy programs. docs/adding-an-algorithm.md writes a loop from beginning to end.

    Make it, and give the loop's async main function, which calls :meth:`evolve`, to :meth:`run_sync` or
    :meth:`run_async`.

    Args:
        name: of the optimizer, for people.
        stages: stage -> what its requests ask: LMs, modules (the LMs of their predictors), or None for the configured
            LM. In the order of the way that a step takes: a later stage goes first where slots are scarce.
        settings: limits, schedule and seed.
        retry: how often a request is made that the provider turns away, and when.
        store: what writes the run down, so that it can go on; see ``open_store``. Default: nothing is written down.
        shown_calls: what the progress bar and the statistics give as the budget. Default: ``max_metric_calls``.

    Raises:
        ConfigurationError: an argument that cannot work, with the reason.
    """

    def __init__(
        self,
        *,
        name: str,
        stages: Mapping[str, Sequence[Any]],
        settings: RunSettings | None = None,
        retry: RetryPolicy | None = None,
        store: Store | None = None,
        shown_calls: int | None = None,
    ) -> None:
        if not all(isinstance(targets, list | tuple) and targets for targets in stages.values()):
            raise ConfigurationError(
                f"stages is {stages!r}, expected stage -> a list of what it asks: LMs, modules, or None for the "
                "configured LM."
            )
        self.settings = settings = RunSettings() if settings is None else settings
        self.dspy_settings = dict(dspy.settings.copy())
        """dspy's settings for the length of the run: a later ``dspy.configure`` does not reach it."""
        lm, modules = self.dspy_settings.get("lm"), [target for targets in stages.values() for target in targets]
        lms = {stage: _lms_of(targets, lm) for stage, targets in stages.items()}
        models = {stage: {str(getattr(stage_lm, "model", "")) for stage_lm in asked} for stage, asked in lms.items()}
        self._models_by_stage = models
        self._unpriced = {stage for stage, names in models.items() if None in map(rates_of, names)}
        slots, adaptive = _slots_of(settings, [target for target in modules if isinstance(target, Module)])
        observers = [
            callback for callback in self.dspy_settings.get("callbacks") or () if isinstance(callback, Observer)
        ]
        if not any(isinstance(observer, Display) for observer in observers):
            observers.insert(0, Progress())
        super().__init__(
            name=name,
            stages={stage: {endpoint_of(stage_lm) for stage_lm in asked} for stage, asked in lms.items()},
            slots=slots,
            adaptive=adaptive,
            limits=settings,
            retry=retry,
            store=store,
            observers=observers,
        )
        self.recorder = Recorder(self.clock)
        self.bus.subscribe(self.recorder)
        self.models = LanguageModels(self.providers, self.redaction, count=self._count_lm_call)
        self.pace(lm)
        self.actors = None if settings.rollouts is None else Actors(settings.rollouts, self, self.dspy_settings)
        """Where rollouts are made; None for this process."""
        self.dspy_settings.update(self.models.settings | usage_settings(self._count_lm_call))
        self._shown_calls = shown_calls or settings.max_metric_calls
        self._seconds: float | None = None

    def pace(self, lm: Any) -> Any:
        """Let the run make an LM's calls from now on, see :class:`LanguageModels`; gives the LM back."""
        return self.models.pace(lm)

    def _count_lm_call(self, place: Place | None, model: str, entry: Entry) -> None:
        """Count an LM call that no event of a rollout or of a request sums up; from any thread."""
        if self.models.portal is not None:
            self.models.portal.call_soon(self._tell_lm_call, place, model, entry)

    def _tell_lm_call(self, place: Place | None, model: str, entry: Entry) -> None:
        of_model = [name for name, models in self._models_by_stage.items() if model in models]
        step, stage = place or (BEFORE_STEPS, (of_model or list(self._models_by_stage))[0])
        event = LmCallCounted(self.clock(), step, stage, tokens_of_call(entry), cost_of_call(model, entry))
        self.bus.emit(event)

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None, None]:
        """See :meth:`EvolutionRun.opened`."""
        self.models.attach(asyncio.get_running_loop())
        try:
            with dspy.context(**self.dspy_settings):
                async with super().opened(), nullcontext() if self.actors is None else self.actors.opened():
                    yield
        finally:
            self._seconds = self.clock() - self.clock.began
            self.models.close()

    async def call_module(
        self,
        stage: str,
        step: Requester,
        module: Module,
        inputs: Mapping[str, Any],
        *,
        lm: Any = None,
        read: Callable[[Any], T],
        record: Any = None,
        is_fresh: bool = False,
    ) -> ModuleReply[T]:
        """Call a module in a slot: on the loop where it can be awaited, else in a thread; asked again where need be.

        Args:
            stage, step: whose queue it waits in.
            module: is not changed; a copy is called, unless ``is_fresh``: it was made for this call, and a copy
                would take time in proportion to all that its tools can reach.
            lm: what it asks, unless its predictors have LMs of their own. None for the configured LM.
            read: makes of what the module returns what is wanted. What it raises is the module's error.
            record: how the answer is written down; None where it is not.

        Raises:
            RolloutUnresolvedError: the provider gave no answer.
            RunAbortedError: the provider refused for good.
        """
        copy = self.models.pace_in(module if is_fresh else copy_of(module))
        asks = self.dspy_settings.get("lm") if lm is None else self.pace(lm)
        placement = Placement(copy, self.threads)
        placement.prepare(copy)

        async def call() -> ModuleReply[T]:
            answer: T | None = None
            failure: Exception | None = None
            recording = recording_lm_calls(), recording_cut_off_replies()
            with counting_usage() as usage, dspy.context(lm=asks), recording[0] as calls, recording[1] as cut_off:
                try:
                    answer = read(await placement.call(copy, inputs))
                    if cut_off and stage == "integrate":
                        answer, failure = None, CutOffReplyError(cut_off[0])
                except asyncio.CancelledError as error:
                    if is_being_cancelled():
                        raise  # the run is being cancelled, not the module by itself
                    failure = RuntimeError(f"the module was cancelled: {error}")
                except Exception as error:
                    raise_provider_fault(error, calls.errors)
                    failure = error
            problem = "" if failure is None else f"{type(failure).__name__}: {failure}"[:300]
            spent = RequestCost(tokens_of(usage), cost_of(usage), problem)
            return ModuleReply(answer, failure, max(1, calls_of(usage)), spent)

        return await self.requests.answer(
            Call(stage=stage, step=step, make=call, cost_of=lambda reply: reply.spent, record=record)
        )

    async def ask(
        self, stage: str, step: Requester, module: Module, /, lm: Any = None, position: str = "0", **inputs: Any
    ) -> Any:
        """Call a module in a slot, and return what it returns; see :meth:`call_module`.

        With a journal the reply is written down, and read by a run that goes on, as far as it can be kept.

        Args:
            position: tells the questions of a step in a stage apart.

        Raises:
            RolloutUnresolvedError: the provider gave no answer.
            RunAbortedError: the provider refused for good.
            StepEnded: as failed: no reply fitted its format.
            Exception: what the module raised.
        """
        reply = await self.call_module(
            stage, step, module, inputs, lm=lm, read=lambda answer: answer, record=ReplyText(position)
        )
        if isinstance(reply.error, AdapterParseError):
            raise StepEnded(EndKind.FAILED, f"no reply in its format: {reply.error}") from reply.error
        if reply.error is not None:
            raise reply.error
        return reply.answer

    def runner(
        self, student: Module, metric: Callable[..., Any], *, failure_score: float = 0.0, metric_lock: bool = False
    ) -> ProgramRunner:
        """Return what runs candidates (component -> text) of a program on examples; ``{}`` is the program as it is.

        Args:
            student: is not changed.
            metric: a function (example, prediction, ...), sync or coroutine, that returns a score, or a
                ``dspy.Prediction`` with ``score`` and ``feedback``; further arguments that it needs are None.
            failure_score: of an example on which the program or the metric raises, or the score is no finite number.
            metric_lock: call the metric once at a time.
        """
        adapter = StudentAdapter(student, metric, feedback_map={}, failure_score=failure_score)  # reflects on nothing
        scorer = Metric(metric, self.threads, metric_lock)
        elsewhere = None if self.actors is None else self.actors.rollout_maker(adapter, metric_lock, finite=True)
        return ProgramRunner(adapter, scorer, self.threads, self.models, finite=True, elsewhere=elsewhere)

    async def rollout(
        self,
        stage: str,
        step: Step,
        runner: ProgramRunner,
        candidate: dict[str, str],
        example: Any,
        example_id: Any,
        *,
        split: str = "train",
        traced: bool = True,
        name: str = "",
        reservation: Reservation | None = None,
        followers: int = 0,
        on_granted: OnGranted = lambda: None,
    ) -> Rollout:
        """Run a candidate on one example in a slot; an equal rollout in flight is joined, and costs nothing.

        Args:
            example_id: tells the examples of ``split`` apart.
            traced: take a trace.
            name: of the candidate. Default: a hash of its texts.
            reservation: pays for it. Default: what is set aside for the step.
            followers, on_granted: see :meth:`Scheduler.run`.

        Raises:
            RolloutUnresolvedError: the provider gave no answer.
            RunAbortedError: the provider refused for good.
        """
        call = RolloutCall(
            key=RolloutKey(name or hash_of(candidate), split, example_id, traced),
            stage=stage,
            step=step,
            reservation=step.reservation if reservation is None else reservation,
            make=lambda: runner.rollout(candidate, example, capture_traces=traced),
            written=ProgramRecord(runner.records, candidate, example, traced),
            make_failure=lambda reason: runner.failed_rollout(reason, traced),
            followers=followers,
            on_granted=on_granted,
        )
        return await self.requests.answer(call)

    async def evaluate(
        self,
        stage: str,
        step: Step,
        runner: ProgramRunner,
        candidate: dict[str, str],
        examples: Sequence[Any],
        *,
        split: str = "val",
        traced: bool = False,
        reservation: Reservation | None = None,
    ) -> list[Rollout]:
        """Run a candidate on many examples, as many at once as there are slots for; see :meth:`rollout`.

        Raises:
            RolloutUnresolvedError: the provider gave no answer for one of them.
        """
        count = len(examples)

        async def evaluate_one(index: int, granted: OnGranted) -> Rollout:
            return await self.rollout(
                stage, step, runner, candidate, examples[index], index,
                split=split, traced=traced, reservation=reservation, followers=count - index - 1, on_granted=granted,
            )  # fmt: skip

        return await batch(count, evaluate_one)

    @property
    def dollars(self) -> float:
        """Dollars that LM calls have cost so far, where their price is known."""
        return self.recorder.dollars

    def statistics(self, metric_calls: int | None = None) -> RunStats:
        """Return what the run has done so far, from any thread.

        Args:
            metric_calls: made so far. Default: those that this run has paid, and that its journal knows of.
        """
        return self.recorder.stats(
            self,
            self._unpriced,
            schedule=self.settings.schedule,
            seconds=self.clock() - self.clock.began if self._seconds is None else self._seconds,
            stop_reason=self.stop_reason or self.end_reason,
            metric_calls=self.budget.spent if metric_calls is None else metric_calls,
            max_metric_calls=self._shown_calls,
        )


def _lms_of(targets: Sequence[Any], default: Any) -> list[Any]:
    """List the LMs that a stage asks: those given, and those of given modules' predictors."""
    lms: list[Any] = []
    for target in targets:
        lms += [getattr(each, "lm", None) for each in target.predictors()] if isinstance(target, Module) else [target]
    return [lm for lm in (own_lm or default for own_lm in lms) if lm is not None]


def _slots_of(settings: RunSettings, programs: Iterable[Module]) -> tuple[int, Bounds | None]:
    """Return the slots of a run, and how its endpoints' limits adapt below them; None where they do not.

    They adapt from dspy's number of threads up to ``max_concurrency``, unless ``num_threads`` is given, the run is in
    lockstep, or a program runs in threads and nobody said how many.

    Args:
        programs: what the run calls.
    """
    adapts = settings.schedule != "lockstep" and settings.num_threads is None
    if not adapts or (settings.max_concurrency is None and not all(runs_on_loop(program) for program in programs)):
        return settings.num_threads or dspy.settings.num_threads, None
    high: int = settings.max_concurrency or MAX_CONCURRENCY
    return high, Bounds(start=min(dspy.settings.num_threads, high), high=high)
