"""Run a copy of a program with a candidate on one example: output, score, trace.

What counts as a failure, and what it scores, is what ``dspy.teleprompt.bootstrap_trace_data`` and
``dspy.Evaluate`` make of it inside dspy.GEPA, one example at a time. The one difference: an error of the
provider is not a score (see :mod:`dspy_flashevolve.programs.faults`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import anyio
import dspy
from dspy.primitives.code_interpreter import CodeInterpreterError
from dspy.primitives.module import Module
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from dspy.teleprompt.gepa.gepa_utils import DspyAdapter
from dspy.utils.exceptions import AdapterParseError
from dspy.utils.usage_tracker import UsageTracker, track_usage

from dspy_flashevolve.engine.errors import FlashEvolveError, RunAbortedError
from dspy_flashevolve.engine.loop import Threads, is_being_cancelled
from dspy_flashevolve.engine.rollouts import Rollout, given_up
from dspy_flashevolve.programs.copies import Copied, copied
from dspy_flashevolve.programs.faults import LmCalls, chain_of, fault_of, heard_lm_calls, raise_provider_fault
from dspy_flashevolve.programs.lm import LanguageModels, cost_of, tokens_of
from dspy_flashevolve.programs.metric import Metric, no_score
from dspy_flashevolve.programs.place import NeedsThreadError, Place, runs_on_loop
from dspy_flashevolve.programs.records import RolloutRecords

logger = logging.getLogger(__name__)

PROTOTYPES = 64
"""Programs that are kept ready; older ones are built again when they are needed."""
LISTENED = 8
"""So many of the first rollouts tell whether a program, or its metric, calls LMs that the run does not pace."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A finished run: the prediction and its trace, or the error that ended it."""

    prediction: Any
    trace: list[Any]
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of the code's own, which every other rollout may have, too.

    Args:
        error: what was raised.
        at: the type of the error, and the line of code that raised it.
        refused: the provider refused the request.
    """

    error: Exception
    at: tuple[Any, ...]
    refused: bool


@dataclass(frozen=True, slots=True)
class Tried:
    """A rollout, and what it failed with, where that may be a mistake in the code."""

    rollout: Rollout
    failure: Failure | None = None


Make = Callable[[dict[str, str], dspy.Example, bool, UsageTracker], Awaitable[Tried]]
"""Makes a rollout of a candidate on an example, with a trace where that is True, and adds what its LMs used."""


class ProgramRunner:
    """Runs candidates of one student program.

    Args:
        adapter: builds programs from candidates.
        metric: scores predictions.
        threads: where programs without a usable ``aforward`` run.
        models: pace the predictors' own LMs; None to call these as they are.
        finite: a score that is no finite number is a failure, with a warning; else it ends the run.
        elsewhere: makes the rollouts in other processes; None to make them here, by :meth:`tried`.
    """

    def __init__(
        self,
        adapter: DspyAdapter,
        metric: Metric,
        threads: Threads,
        models: LanguageModels | None = None,
        finite: bool = False,
        elsewhere: Make | None = None,
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
        self._student: Copied | None = None
        self._prototypes: OrderedDict[tuple[tuple[str, str], ...], Callable[[], Module] | Exception] = OrderedDict()
        self._building = anyio.Lock()
        self._place = Place(threads)
        self._listened, self._calls_others = 0, False
        """Rollouts in which all LM calls were heard, and whether one was of an LM that the run does not pace."""
        self._first: FirstRollouts | None = None
        self._mistake: Exception | None = None
        """What all first rollouts failed with: none is made any more."""

    @property
    def interruptible(self) -> bool:
        """Whether a rollout that has begun can be given up: one on the loop can, one in a thread cannot."""
        return bool(self._place.on_loop if self._elsewhere is None else runs_on_loop(self.adapter.student))

    def first_rollouts(self, count: int) -> None:
        """The next ``count`` rollouts are the run's first: where they all fail alike, their error ends the run."""
        self._first = FirstRollouts(count)

    async def rollout(self, candidate: dict[str, str], example: dspy.Example, *, capture_traces: bool) -> Rollout:
        """Run ``candidate`` on ``example``.

        Raises:
            TransientError: the provider asks to come back later.
            RunAbortedError: the provider refuses for good.
            TypeError, ValueError: what the metric returned is no score.
            Exception: of the program or the metric, where all first rollouts failed alike.
        """
        if self._mistake is not None:
            raise self._mistake
        make = self._elsewhere or self.tried
        with track_usage() as usage:
            try:
                tried = await make(candidate, example, capture_traces, usage)
                self._look_at(tried.failure)
            except BaseException:
                given_up(tokens_of(usage), cost_of(usage))
                raise
        return replace(tried.rollout, tokens=tokens_of(usage), cost_dollars=cost_of(usage))

    async def tried(
        self, candidate: dict[str, str], example: dspy.Example, capture_traces: bool, usage: UsageTracker
    ) -> Tried:
        """Run ``candidate`` on ``example`` in this process; ``usage`` tracks its LM calls."""
        prototype = await self._prototype(candidate)
        if isinstance(prototype, Exception):
            return Tried(Rollout(None, self.adapter.failure_score))
        only_paced = self._listened >= LISTENED and not self._calls_others
        with heard_lm_calls(only_paced) as calls:
            run = await self._run(prototype, example, calls)
            if dspy.settings.track_usage and isinstance(run.prediction, dspy.Prediction):
                run.prediction.set_lm_usage(usage.get_total_tokens())
            tried = await self._scored(example, run, capture_traces, calls)
        self._listened += 1
        self._calls_others = self._calls_others or not calls.only_paced
        return tried

    async def _prototype(self, candidate: dict[str, str]) -> Callable[[], Module] | Exception:
        """What makes a rollout's copy of a candidate's program. One is built at a time, each once."""
        key = tuple(sorted(candidate.items()))
        if key not in self._prototypes:
            async with self._building:
                if key not in self._prototypes:
                    self._prototypes[key] = await self._threads.run(self._built, candidate)
                while len(self._prototypes) > PROTOTYPES:
                    self._prototypes.popitem(last=False)
        self._prototypes.move_to_end(key)
        return self._prototypes[key]

    def _built(self, candidate: dict[str, str]) -> Callable[[], Module] | Exception:
        if self._flex:
            try:
                program, copy = copied(self.adapter.build_program(candidate))
            except (SyntaxError, CodeInterpreterError) as error:
                logger.warning("Candidate failed to build (%s); its rollouts score as failures.", error)
                return error
        else:  # as dspy's adapter, but large data that a student carries is copied once, not a candidate
            if self._student is None:
                self._student = copied(self.adapter.student)
            student, copy = self._student
            program = copy(student)
            for name, predictor in program.named_predictors():
                if name in candidate:
                    signature: Any = predictor.signature
                    predictor.signature = signature.with_instructions(candidate[name])
        return partial(copy, program if self._models is None else self._models.pace_in(program))

    async def _run(self, copied: Callable[[], Module], example: dspy.Example, calls: LmCalls) -> _Run:
        program = copied()
        inputs: dict[str, Any] = {}
        trace: list[Any] = []
        with dspy.context(trace=trace):
            try:
                inputs = dict(example.inputs())
                try:
                    prediction = await self._place.call(program, inputs)
                except NeedsThreadError:
                    program = copied()
                    trace.clear()
                    prediction = await self._place.call(program, inputs)
            except asyncio.CancelledError as error:
                if is_being_cancelled():
                    raise  # the run is being cancelled, not the program by itself
                return self._crash(trace, RuntimeError(f"the program was cancelled: {error}"), calls)
            except AdapterParseError as error:
                return self._parse_failure(program, inputs, trace, error)
            except Exception as error:
                return self._crash(trace, error, calls)
        return _Run(prediction, list(trace))

    def _parse_failure(
        self, program: Module, inputs: dict[str, Any], trace: list[Any], error: AdapterParseError
    ) -> _Run:
        """A reply that did not fit the format is worth reflecting on; dspy.GEPA drops half-parsed ones."""
        predictor = next((p for p in program.predictors() if p.signature == error.signature), None)
        if error.parsed_result or predictor is None:
            return _Run(None, [], error)
        failed = FailedPrediction(error.lm_response or "", format_reward=self.adapter.failure_score)
        return _Run(failed, [*trace, (predictor, inputs, failed)])

    def _crash(self, trace: list[Any], error: Exception, calls: LmCalls) -> _Run:
        raise_provider_fault(error, calls.errors)
        if not self._flex:
            return _Run(None, [], error)
        logger.warning("Program raised on an example: %s", _said(error))
        return _Run(FailedPrediction(_said(error)), list(trace))

    async def _scored(self, example: Any, run: _Run, capture_traces: bool, calls: LmCalls) -> Tried:
        failure = self.adapter.failure_score
        if run.error is not None:
            logger.warning("Example scored as a failure: %s", _said(run.error))
            failed = self.failed(f"The program failed: {_said(run.error)}", capture_traces)
            return Tried(failed, self._failure(run.error, calls))
        if isinstance(run.prediction, FailedPrediction):
            if not (capture_traces or self._flex):
                return Tried(self.failed("The program's reply could not be read.", capture_traces))
            return Tried(self._rollout(example, run, failure))
        try:
            raw = await self._metric.score(example, run.prediction, scoring_trace=run.trace, flex=self._flex)
        except FlashEvolveError:
            raise  # ours, not the metric's: the journal that could not note the call, say
        except Exception as error:
            raise_provider_fault(error, calls.errors)
            logger.warning("Metric %s raised on an example: %s", self._metric.name, _said(error))
            if self._flex:
                return Tried(self._rollout(example, run, failure))
            failed = self.failed(f"The program answered, but the metric failed: {_said(error)}", capture_traces)
            return Tried(failed, self._failure(error, calls))
        return Tried(self._rollout(example, run, raw))

    def _failure(self, error: Exception, calls: LmCalls) -> Failure | None:
        if self._flex or any(isinstance(one, AdapterParseError) for one in chain_of(error)):
            return None  # a reply that cannot be read, whatever its parser ran into, is no mistake in code
        return Failure(error, _raised_at(error), fault_of(error, calls.errors) is not None)

    def _look_at(self, failure: Failure | None) -> None:
        """Raise the error of a rollout if each of the first rollouts had it."""
        if self._first is None or failure is None:
            self._first = None
        elif said := self._first.failed(failure):
            error = failure.error
            logger.error("%s: %s", said, _said(error))
            if failure.refused:
                self._mistake = RunAbortedError(f"{said}: {_said(error)}")
                raise self._mistake from error
            if add_note := getattr(error, "add_note", None):  # Python 3.11
                add_note(said)
            self._mistake = error
            raise error

    def failed(self, error: str, capture_traces: bool) -> Rollout:
        """A rollout that failed, with the reason."""
        return Rollout(None if capture_traces else dspy.Prediction(), self.adapter.failure_score, error=error)

    def _rollout(self, example: Any, run: _Run, raw: Any) -> Rollout:
        score, objectives = raw, dict[str, float]()
        if isinstance(raw, dspy.Prediction):
            score, objectives = raw.get("score"), dict(raw.get("objective_scores") or {})
        if not self._finite and not _is_number(score):
            raise no_score(self._metric.name, raw, example)
        if self._finite and score is not None and not _is_number(score):
            logger.warning("Metric %s gave %r, expected a finite number: a failure.", self._metric.name, score)
            score = None
        return Rollout(
            output=run.prediction,
            score=self.adapter.failure_score if score is None else score,
            objective_scores=objectives,
            trajectory={"example": example, "prediction": run.prediction, "trace": run.trace, "score": raw},
        )


ALIKE = 8
"""First rollouts that end a run if they all fail with one error: a mistake in a name, examples of another kind."""


class FirstRollouts:
    """Whether the first rollouts of a run all fail alike, so that nothing would be learnt from more of them.

    Alike is: an error of one type, raised in one line of code. With one message, ``ALIKE`` are enough; else it may
    depend on the data, and all of them are needed.

    Args:
        count: how many rollouts are the first.
    """

    def __init__(self, count: int) -> None:
        self._count, self._failed = count, 0
        self._places, self._messages = set[tuple[Any, ...]](), set[str]()

    def failed(self, failure: Failure) -> str:
        """Take note of a failure; what is to be said where it was the last that it needed, else nothing."""
        self._failed += 1
        self._places.add(failure.at)
        self._messages.add(str(failure.error))
        enough = min(ALIKE, self._count) if len(self._messages) == 1 else self._count
        alike = len(self._places) == 1 and self._failed == enough
        return f"All of the first {self._failed} rollouts failed alike" if alike else ""


def _raised_at(error: Exception) -> tuple[Any, ...]:
    """The name of an error's type, and the line of code that raised it."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return type(error).__module__, type(error).__qualname__, *places[-1:]


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _is_number(score: Any) -> bool:
    try:
        return not isinstance(score, str) and math.isfinite(score)
    except (TypeError, ValueError):
        return False
