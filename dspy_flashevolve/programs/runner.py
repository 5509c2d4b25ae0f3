"""Run a program with a candidate on one example: output, score, trace.

What counts as a failure, and what it scores, is what ``dspy.teleprompt.bootstrap_trace_data`` and
``dspy.Evaluate`` make of it inside dspy.GEPA, one example at a time. The one difference: an error of the
provider is not a score (see :mod:`dspy_flashevolve.programs.faults`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import anyio
import dspy
from dspy.primitives.code_interpreter import CodeInterpreterError
from dspy.primitives.module import Module
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from dspy.teleprompt.gepa.gepa_utils import DspyAdapter
from dspy.utils.exceptions import AdapterParseError
from dspy.utils.usage_tracker import UsageTracker, track_usage

from dspy_flashevolve.engine.errors import FlashEvolveError
from dspy_flashevolve.engine.flights import Rollout
from dspy_flashevolve.engine.threads import Threads
from dspy_flashevolve.programs.asynchrony import runs_on_loop
from dspy_flashevolve.programs.copies import isolated_copy
from dspy_flashevolve.programs.faults import raise_provider_fault
from dspy_flashevolve.programs.lm import LanguageModels
from dspy_flashevolve.programs.lm_calls import LmCalls, heard_lm_calls
from dspy_flashevolve.programs.metric import Metric
from dspy_flashevolve.programs.usage import cost_of, tokens_of

logger = logging.getLogger(__name__)

PROTOTYPES = 64
"""Programs that are kept ready; older ones are built again when they are needed."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A finished run: the prediction and its trace, or the error that ended it."""

    prediction: Any
    trace: list[Any]
    error: Exception | None = None


class ProgramRunner:
    """Runs candidates of one student program.

    Args:
        adapter: builds programs from candidates.
        metric: scores predictions.
        threads: where programs without a usable ``aforward`` run.
        priced: work out what the calls cost.
        models: the run's twins of the predictors' own LMs; None to call these as they are.
        finite: a score that is no finite number is a failure, with a warning; else it is passed on, as dspy.GEPA does.
    """

    def __init__(
        self,
        adapter: DspyAdapter,
        metric: Metric,
        threads: Threads,
        priced: bool = False,
        models: LanguageModels | None = None,
        finite: bool = False,
    ) -> None:
        self._finite = finite
        self._adapter = adapter
        self._models = models
        self._priced = priced
        self._metric = metric
        self._threads = threads
        self._flex = bool(adapter._flex_paths)  # pyright: ignore[reportPrivateUsage]
        self._prototypes: OrderedDict[tuple[tuple[str, str], ...], Module | Exception] = OrderedDict()
        self._building = anyio.Lock()
        self._on_loop: bool | None = None

    @property
    def on_loop(self) -> bool:
        """Whether rollouts run on the loop; False before the first one."""
        return bool(self._on_loop)

    async def rollout(self, candidate: dict[str, str], example: dspy.Example, *, capture_traces: bool) -> Rollout:
        """Run ``candidate`` on ``example``.

        Raises:
            TransientError: the provider asks to come back later.
            RunAbortedError: the provider refuses for good.
        """
        prototype = await self._prototype(candidate)
        if isinstance(prototype, Exception):
            return Rollout(None, self._adapter.failure_score)
        with track_usage() as usage, heard_lm_calls() as calls:
            run = await self._run(isolated_copy(prototype), example, calls)
            if run.error is not None:
                raise_provider_fault(run.error, calls.errors)
            if dspy.settings.track_usage and isinstance(run.prediction, dspy.Prediction):
                run.prediction.set_lm_usage(usage.get_total_tokens())
            return await self._score(example, run, usage, capture_traces, calls)

    async def _prototype(self, candidate: dict[str, str]) -> Module | Exception:
        """The program of a candidate; rollouts run copies of it. One is built at a time, each once."""
        key = tuple(sorted(candidate.items()))
        if key not in self._prototypes:
            async with self._building:
                if key not in self._prototypes:
                    self._prototypes[key] = await self._threads.run(self._build, candidate)
                while len(self._prototypes) > PROTOTYPES:
                    self._prototypes.popitem(last=False)
        self._prototypes.move_to_end(key)
        return self._prototypes[key]

    def _build(self, candidate: dict[str, str]) -> Module | Exception:
        built = self._built(candidate)
        return built if self._models is None or isinstance(built, Exception) else self._models.replace_in(built)

    def _built(self, candidate: dict[str, str]) -> Module | Exception:
        if not self._flex:
            # As dspy's adapter, but the data that a student carries is shared, not copied a candidate.
            program = isolated_copy(self._adapter.student)
            for name, predictor in program.named_predictors():
                if name in candidate:
                    signature: Any = predictor.signature
                    predictor.signature = signature.with_instructions(candidate[name])
            return program
        try:
            return self._adapter.build_program(candidate)
        except (SyntaxError, CodeInterpreterError) as error:
            logger.warning("Candidate failed to build (%s); its rollouts score as failures.", error)
            return error

    async def _run(self, program: Module, example: dspy.Example, calls: LmCalls) -> _Run:
        if self._on_loop is None:
            self._on_loop = runs_on_loop(program)
        inputs: dict[str, Any] = {}
        trace: list[Any] = []
        with dspy.context(trace=trace):
            try:
                inputs = dict(example.inputs())
                if self._on_loop:
                    prediction = await program.acall(**inputs)
                else:
                    prediction = await self._threads.run(program, **inputs)
            except asyncio.CancelledError as error:
                if anyio.current_effective_deadline() == -math.inf:
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
        failed = FailedPrediction(error.lm_response or "", format_reward=self._adapter.failure_score)
        return _Run(failed, [*trace, (predictor, inputs, failed)])

    def _crash(self, trace: list[Any], error: Exception, calls: LmCalls) -> _Run:
        raise_provider_fault(error, calls.errors)
        if not self._flex:
            return _Run(None, [], error)
        logger.warning("Program raised on an example: %s: %s", type(error).__name__, error)
        return _Run(FailedPrediction(f"{type(error).__name__}: {error}"), list(trace))

    async def _score(
        self, example: Any, run: _Run, usage: UsageTracker, capture_traces: bool, calls: LmCalls
    ) -> Rollout:
        failure = self._adapter.failure_score
        if run.error is not None:
            logger.warning("Example scored as a failure: %s: %s", type(run.error).__name__, run.error)
            return self._failed(capture_traces, usage, f"The program failed: {_said(run.error)}")
        if isinstance(run.prediction, FailedPrediction):
            if not (capture_traces or self._flex):
                return self._failed(capture_traces, usage, "The program's reply could not be read.")
            return self._rollout(example, run, failure, usage)
        try:
            raw = await self._metric.score(example, run.prediction, scoring_trace=run.trace, flex=self._flex)
        except FlashEvolveError:
            raise  # ours, not the metric's: the journal that could not note the call, say
        except Exception as error:
            raise_provider_fault(error, calls.errors)
            logger.warning("Metric %s raised on an example: %s: %s", self._metric.name, type(error).__name__, error)
            if self._flex:
                return self._rollout(example, run, failure, usage)
            return self._failed(capture_traces, usage, f"The program answered, but the metric failed: {_said(error)}")
        return self._rollout(example, run, raw, usage)

    def _failed(self, capture_traces: bool, usage: UsageTracker, error: str) -> Rollout:
        return Rollout(
            None if capture_traces else dspy.Prediction(),
            self._adapter.failure_score,
            tokens=tokens_of(usage),
            cost_dollars=cost_of(usage) if self._priced else 0.0,
            error=error,
        )

    def _rollout(self, example: Any, run: _Run, raw: Any, usage: UsageTracker) -> Rollout:
        score, objectives = raw, dict[str, float]()
        if isinstance(raw, dspy.Prediction):
            score, objectives = raw.score, dict(raw.get("objective_scores") or {})
        return Rollout(
            output=run.prediction,
            score=self._checked(score),
            objective_scores=objectives,
            trajectory={"example": example, "prediction": run.prediction, "trace": run.trace, "score": raw},
            tokens=tokens_of(usage),
            cost_dollars=cost_of(usage) if self._priced else 0.0,
        )

    def _checked(self, score: Any) -> Any:
        if score is None or (self._finite and not _is_number(score)):
            if score is not None:
                logger.warning("Metric %s gave %r, expected a finite number: a failure.", self._metric.name, score)
            return self._adapter.failure_score
        return score


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _is_number(score: Any) -> bool:
    try:
        return not isinstance(score, str) and math.isfinite(score)
    except (TypeError, ValueError):
        return False
