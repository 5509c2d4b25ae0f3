"""Rollouts of a DSPy program: a candidate's program, run on one example, and scored.

What counts as a failure, and what it scores, is what ``dspy.teleprompt.bootstrap_trace_data`` and ``dspy.Evaluate``
make of it inside dspy.GEPA, one example at a time. The one difference: an error of the provider is not a score (see
:mod:`dspy_flashevolve.programs.faults`).
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import anyio
import dspy
from dspy.evaluate.evaluate import EvaluationResult
from dspy.primitives.code_interpreter import CodeInterpreterError
from dspy.primitives.module import Module
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from dspy.teleprompt.gepa.gepa_utils import DspyAdapter
from dspy.utils.callback import with_callbacks
from dspy.utils.exceptions import AdapterParseError

from dspy_flashevolve.engine.errors import FlashEvolveError
from dspy_flashevolve.engine.loop import Threads, is_being_cancelled
from dspy_flashevolve.engine.requests import Rollout, record_wasted_cost
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.programs.building import PARSER_ERROR, TRIES, StudentAdapter
from dspy_flashevolve.programs.faults import LmCalls, raise_provider_fault, recording_lm_calls
from dspy_flashevolve.programs.lm import LanguageModels
from dspy_flashevolve.programs.metric import FaultyReply, Metric, fault_in
from dspy_flashevolve.programs.mistakes import Failure, Kind, Mistakes, error_text
from dspy_flashevolve.programs.placement import Placement
from dspy_flashevolve.programs.records import MAX_READY, RolloutRecords
from dspy_flashevolve.programs.reflection import ReflectionRunner
from dspy_flashevolve.programs.usage import Usage, cost_of, counting_usage, tokens_of

T = TypeVar("T")


logger = logger_named(__name__)

SHOWN_CHARACTERS = 300
"""Of a reply that could not be read, in the log: a few lines."""
RECORDED = 8
"""First rollouts in which all LM calls are recorded, to tell whether the program, or its metric, calls LMs that the run
does not pace. Recording takes a tenth of a millisecond for each call of a module, so it ends where none is found."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A rollout; what it failed with, where that may be a mistake in the code; and the reply, adapter first, that its
    adapter could not read."""

    rollout: Rollout
    failure: Failure | None = None
    unreadable: str = ""


@dataclass(slots=True)
class _ReadyProgram:
    """A candidate's program, which its rollouts share, the histories of its modules, and how many rollouts run now."""

    program: Module
    histories: list[list[Any]]
    rollouts: int = field(default=0, init=False)


MakeRollout = Callable[[dict[str, str], dspy.Example, bool, Usage], Awaitable[Attempt]]
"""Makes a rollout of a candidate on an example, with a trace where that is True, and adds what its LMs used."""


class ProgramRunner:
    """Runs candidates of one student program.

    Args:
        adapter: builds programs from candidates.
        metric: scores predictions.
        threads: where programs without a usable ``aforward`` run.
        models: pace the predictors' own LMs; None to call these as they are.
        finite: a score that is no finite number is a failure, with a warning; else it ends the run.
        elsewhere: makes the rollouts in other processes; None to make them here, by :meth:`evaluate_once`.
    """

    def __init__(
        self,
        adapter: StudentAdapter,
        metric: Metric,
        threads: Threads,
        models: LanguageModels | None = None,
        finite: bool = False,
        elsewhere: MakeRollout | None = None,
    ) -> None:
        self.adapter = adapter
        self._elsewhere = elsewhere
        self._metric = metric
        self._threads = threads
        self._models = models
        self._finite = finite
        self._flex = bool(adapter._flex_paths)  # pyright: ignore[reportPrivateUsage]
        self.records = RolloutRecords(adapter.student, code=self._flex)
        """How its rollouts are written down."""
        self._ready: OrderedDict[tuple[tuple[str, str], ...], _ReadyProgram | Exception] = OrderedDict()
        self._building = anyio.Lock()
        self._placement = Placement(adapter.student, threads)
        self._left_to_record: float = RECORDED
        """Rollouts in which all LM calls are to be recorded; infinite once an LM was called that the run does not
        pace."""
        self.unreadable = 0
        """Rollouts in which a reply did not fit the format of its adapter."""
        self.mistakes = Mistakes(of_code=self._flex)
        self.reflection = ReflectionRunner(adapter, metric, threads, self.mistakes)

    def program(self, candidate: dict[str, str]) -> Any:
        """Return a new program with a candidate's texts, for the user; the rest is as in its rollouts."""
        return self.adapter.build_program(candidate)

    @property
    def interruptible(self) -> bool:
        """Whether a rollout that has begun can be given up: one on the loop can, one in a thread cannot."""
        return self._placement.is_on_loop

    async def rollout(self, candidate: dict[str, str], example: dspy.Example, *, capture_traces: bool) -> Rollout:
        """Run ``candidate`` on ``example``, here or elsewhere, and count what that uses.

        Raises:
            TransientError: the provider asks to come back later.
            RunAbortedError: the provider refuses for good.
            TypeError, ValueError: what the metric returned is no score.
            Exception: of the program or the metric, where all first rollouts failed alike.
        """
        self.mistakes.raise_known()
        make = self._elsewhere or self.evaluate_once
        with counting_usage() as usage:
            try:
                attempt = await make(candidate, example, capture_traces, usage)
                self.mistakes.record(Kind.TRAINING_ROLLOUTS if capture_traces else Kind.ROLLOUTS, attempt.failure)
            except BaseException:
                usage.close()
                record_wasted_cost(tokens_of(usage), cost_of(usage))
                raise
        if attempt.unreadable:
            if not self.unreadable:
                logger.warning(
                    "A reply does not fit the format of %s: a failure, as all that follow, which are not shown "
                    "(failure_score=%g; the example: %.200r)",
                    attempt.unreadable, self.adapter.failure_score, example,
                )  # fmt: skip
            self.unreadable += 1
        return replace(attempt.rollout, tokens=tokens_of(usage), cost_dollars=cost_of(usage))

    async def evaluate_once(
        self, candidate: dict[str, str], example: dspy.Example, capture_traces: bool, usage: Usage
    ) -> Attempt:
        """Run ``candidate`` on ``example`` in this process; ``usage`` tracks its LM calls."""
        ready = await self._ready_program(candidate)
        if isinstance(ready, Exception):
            return Attempt(Rollout(None, self.adapter.failure_score))
        ready.rollouts += 1
        try:
            with recording_lm_calls(only_paced=self._left_to_record <= 0) as calls:
                prediction, trace, error = await self._run(ready.program, example, calls)
                if dspy.settings.track_usage and isinstance(prediction, dspy.Prediction):
                    prediction.set_lm_usage(usage.get_total_tokens())
                attempt = await self._score(example, prediction, trace, error, capture_traces, calls)
        finally:
            ready.rollouts -= 1
            if not ready.rollouts:
                for history in ready.histories:
                    history.clear()
        self._left_to_record = self._left_to_record - 1 if calls.only_paced else math.inf
        return attempt

    async def _ready_program(self, candidate: dict[str, str]) -> _ReadyProgram | Exception:
        """Return a candidate's program, or why there is none. One is built at a time, each once."""
        key = tuple(sorted(candidate.items()))
        if key not in self._ready:
            async with self._building:
                if key not in self._ready:
                    self._ready[key] = await self._threads.run(self._build, candidate)
                while len(self._ready) > MAX_READY:
                    self._ready.popitem(last=False)
        self._ready.move_to_end(key)
        return self._ready[key]

    def _build(self, candidate: dict[str, str]) -> _ReadyProgram | Exception:
        try:
            program = self.adapter.build_program(candidate, for_rollouts=True)
        except (SyntaxError, SystemError, CodeInterpreterError) as error:
            logger.warning("Candidate failed to build (%s); its rollouts score as failures.", error)
            return error
        if self._models is not None:
            self._models.pace_in(program)
        self._placement.prepare(program)
        modules: list[tuple[str, Any]] = list(program.named_sub_modules())
        return _ReadyProgram(program, [module.history for _, module in modules])

    async def _run(
        self, program: Module, example: dspy.Example, calls: LmCalls, tries: int = TRIES
    ) -> tuple[Any, list[Any], Exception | None]:
        """Return the prediction and its trace, and the error that ended the program; a reply that could not be read
        may be both a prediction and an error."""
        inputs: dict[str, Any] = {}
        trace: list[Any] = []
        with dspy.context(trace=trace):
            try:
                inputs = dict(example.inputs())
                return await self._placement.call(program, inputs), list(trace), None
            except asyncio.CancelledError as cancelled:
                if is_being_cancelled():
                    raise  # the run is being cancelled, not the program by itself
                error: Exception = RuntimeError(f"the program was cancelled: {cancelled}")
            except AdapterParseError as unreadable:
                # One that lacks some of its fields, or has one of another type, makes dspy.GEPA fail over it, and drop
                # the example; here it is reflected on where the user asked for it.
                predictor = next(
                    (part for part in program.predictors() if part.signature == unreadable.signature), None
                )
                is_shown = self.adapter.add_format_failure_as_feedback or not unreadable.parsed_result
                if predictor is None or not is_shown:
                    return None, [], unreadable
                failed = FailedPrediction(unreadable.lm_response or "", self.adapter.failure_score)
                shown = failed
                if unreadable.parsed_result:
                    shown = FaultyReply(failed.completion_text, failed.format_reward, fault_in(unreadable))
                return failed, [*trace, (predictor, inputs, shown)], unreadable
            except Exception as raised:
                if PARSER_ERROR in str(raised) and tries > 1:
                    return await self._run(program, example, calls, tries - 1)
                error = raised
        raise_provider_fault(error, calls.errors)
        if not self._flex:
            return None, [], error
        # The candidate wrote this code: what it raises is worth reflecting on, as in dspy.GEPA.
        logger.warning("Program raised on an example: %s", error_text(error))
        return FailedPrediction(error_text(error)), list(trace), None

    async def _score(
        self,
        example: Any,
        prediction: Any,
        trace: list[Any],
        error: Exception | None,
        capture_traces: bool,
        calls: LmCalls,
    ) -> Attempt:
        failure_score, unreadable = self.adapter.failure_score, ""
        if isinstance(error, AdapterParseError):
            unreadable = f"{error.adapter_name}: {(error.lm_response or '')!r:.{SHOWN_CHARACTERS}}"
        if isinstance(prediction, FailedPrediction):
            rollout = self.failed_rollout("The program's reply could not be read.", capture_traces)
            if capture_traces or self._flex:
                rollout = self._scored_rollout(example, prediction, trace, failure_score)
            return Attempt(rollout, unreadable=unreadable)
        message, said = "Example scored as a failure: %s", "The program failed"
        if error is None:
            try:
                returned = await self._metric.score(example, prediction, scoring_trace=trace, flex=self._flex)
            except FlashEvolveError:
                raise  # ours, not the metric's: the journal that could not note the call, say
            except Exception as raised:
                raise_provider_fault(raised, calls.errors)
                error, said = raised, "The program answered, but the metric failed"
                message = f"Metric {self._metric.name} raised on an example: %s"
            else:
                return Attempt(self._scored_rollout(example, prediction, trace, returned))
        if not unreadable:
            message += " (failure_score=%g; the example: %.200r)"
            logger.warning(message, error_text(error), failure_score, example)
            if self._flex:  # the metric's error
                return Attempt(self._scored_rollout(example, prediction, trace, failure_score))
        failed = self.failed_rollout(f"{said}: {error_text(error)}", capture_traces)
        return Attempt(failed, self.mistakes.failure(error, calls.errors), unreadable)

    def failed_rollout(self, error: str, capture_traces: bool) -> Rollout:
        """Return a rollout that failed, with the reason."""
        return Rollout(None if capture_traces else dspy.Prediction(), self.adapter.failure_score, error=error)

    def _scored_rollout(self, example: Any, prediction: Any, trace: list[Any], returned: Any) -> Rollout:
        score, objectives = returned, dict[str, float]()
        if isinstance(returned, dspy.Prediction):
            score, objectives = returned.get("score"), dict(returned.get("objective_scores") or {})
        if not _is_number(score) and not (self._finite and score is None):
            if not self._finite:
                kind = ValueError if isinstance(returned, float) else TypeError
                raise kind(
                    f"metric {self._metric.name} returned {returned!r:.200} for the example {example!r:.500}, expected "
                    "a finite number, or a dspy.Prediction with a score that is one."
                )
            logger.warning("Metric %s gave %r, expected a finite number: a failure.", self._metric.name, score)
            score = None
        return Rollout(
            output=prediction,
            score=self.adapter.failure_score if score is None else _as_number(score),
            objective_scores={name: _as_number(value) for name, value in objectives.items()},
            trajectory={"example": example, "prediction": prediction, "trace": trace, "score": returned},
        )


def _is_number(score: Any) -> bool:
    try:
        return not isinstance(score, str) and math.isfinite(score)
    except (TypeError, ValueError):
        return False


def _as_number(score: Any) -> Any:
    """The same number as an int or a float: a Decimal cannot be added to one, and numpy's scalars are no JSON."""
    return score if isinstance(score, int | float) or not _is_number(score) else float(score)


async def announce_evaluation(
    adapter: DspyAdapter,
    threads: Threads,
    candidate: dict[str, str],
    examples: Sequence[Any],
    evaluate: Callable[[], Awaitable[T]],
    results: Callable[[T], Sequence[tuple[Any, float]]],
) -> T:
    """Evaluate a candidate between dspy's ``on_evaluate_start`` and ``on_evaluate_end``, where somebody listens."""
    if not dspy.settings.callbacks:
        return await evaluate()
    try:
        program = await threads.run(adapter.build_program, candidate)
    except (SyntaxError, CodeInterpreterError):  # its rollouts will say so
        program = adapter.student
    announced = _AnnouncedEvaluation(
        evaluate,
        results,
        devset=list(examples),
        metric=adapter.metric_fn,
        num_threads=adapter.num_threads,
        failure_score=adapter.failure_score,
    )
    await announced(program, callback_metadata={"metric_key": "eval_full"})
    return announced.evaluation


class _AnnouncedEvaluation(dspy.Evaluate):
    """An evaluation as dspy's callbacks know it, made by the run."""

    def __init__(
        self, evaluate: Callable[[], Awaitable[Any]], rows: Callable[[Any], Sequence[tuple[Any, float]]], **options: Any
    ) -> None:
        super().__init__(**options)
        self._evaluate, self._rows = evaluate, rows
        self.evaluation: Any = None

    @with_callbacks
    async def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        program: Module,
        metric: Any = None,
        devset: Any = None,
        num_threads: int | None = None,
        display_progress: bool | None = None,
        display_table: bool | int | None = None,
        callback_metadata: dict[str, Any] | None = None,
        save_as_csv: str | None = None,
        save_as_json: str | None = None,
    ) -> EvaluationResult:
        # Callbacks are given the arguments by their names: the signature is that of dspy.Evaluate.
        self.evaluation = await self._evaluate()
        results: Any = [(example, *row) for example, row in zip(self.devset, self._rows(self.evaluation), strict=True)]
        return EvaluationResult(round(100 * sum(row[-1] for row in results) / len(results), 2), results)
