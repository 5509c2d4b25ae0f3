"""A DSPy program as an evolution loop sees it: roll a candidate out, reflect on it, propose new texts.

A rollout runs a copy of the program with a candidate on one example. What counts as a failure, and what it scores, is
what ``dspy.teleprompt.bootstrap_trace_data`` and ``dspy.Evaluate`` make of it inside dspy.GEPA, one example at a time.
The one difference: an error of the provider is not a score (see :mod:`dspy_flashevolve.programs.faults`). It runs on
the event loop as long as that works, else in a thread. Reflection is dspy's own GEPA adapter.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import math
import random
import time
import traceback
import types
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import anyio
import dspy
from dspy.clients.base_lm import BaseLM
from dspy.evaluate.evaluate import EvaluationResult
from dspy.primitives.code_interpreter import CodeInterpreterError
from dspy.primitives.module import Module
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from dspy.teleprompt.gepa.gepa_utils import DspyAdapter
from dspy.utils.callback import BaseCallback, with_callbacks
from dspy.utils.dummies import DummyLM
from dspy.utils.exceptions import AdapterParseError
from dspy.utils.usage_tracker import UsageTracker
from gepa.core.adapter import EvaluationBatch

from dspy_flashevolve.engine.errors import FlashEvolveError, RunAbortedError, hook_that_raised
from dspy_flashevolve.engine.loop import Threads, is_being_cancelled
from dspy_flashevolve.engine.rollouts import Rollout, gather, record_wasted_cost
from dspy_flashevolve.programs.copies import Copied, copied
from dspy_flashevolve.programs.faults import LmCalls, chain_of, fault_of, raise_provider_fault, recording_lm_calls
from dspy_flashevolve.programs.feedback import (
    IncompleteReply,
    Question,
    name_missing_fields,
    questions_for,
    text_of,
    text_with,
    value_of,
)
from dspy_flashevolve.programs.lm import LanguageModels
from dspy_flashevolve.programs.metric import Metric, no_score
from dspy_flashevolve.programs.records import RolloutRecords
from dspy_flashevolve.programs.tools import ToolCalls, is_blocking_tool, is_coroutine_tool, tools_of
from dspy_flashevolve.programs.usage import cost_of, counting_for_run, counting_usage, tokens_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
ReflectiveDataset = Mapping[str, Sequence[Mapping[str, Any]]]
PROTOTYPES = 64
"""Programs that are kept ready; older ones are built again when they are needed."""
LISTENED = 8
"""So many of the first rollouts tell whether a program, or its metric, calls LMs that the run does not pace."""
ALIKE = 8
"""First rollouts that end a run if they all fail with one error: a mistake in a name, examples of another kind."""
OF_TRAINING, OF_FEEDBACK = 3 * ALIKE, 2 * ALIKE
"""So many on training examples, and requests for feedback, whatever the messages: these examples come by lot."""
TRAINING, FEEDBACK = "rollouts on training examples", "requests for the metric's feedback"
REFLECTIONS = "reflections"
OF_REFLECTION = 3 * ALIKE
"""So many attempts at a reflection that fail alike from the first on end a run: 12 steps, each of which tries twice. A
proposer that fails four times in five must not end it (with 16 attempts it did, tests/contract/test_unanswered.py)."""
WARNED = 4
"""After so many reflections without one that is of use the log says so: two steps, each of which tries twice."""
BLOCKING = ("CodeAct", "Flex", "ProgramOfThought", "RLM")
"""dspy's modules that run code in an interpreter and wait for it."""
WATCHED = 8
"""The first rollouts on the loop are watched for calls that block it."""
BLOCKED = 3
"""So many that do are no accident (an import, a busy machine)."""
HELD_SECONDS = 0.1
"""Who holds the loop for so long, and does nothing, waits for something."""


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
class Attempt:
    """A rollout, and what it failed with, where that may be a mistake in the code."""

    rollout: Rollout
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Reflection:
    """What a reflection proposed.

    Args:
        texts: component -> new text.
        tokens: prompt and completion tokens that the LMs reported.
        cost_dollars: of these tokens; 0 where a price is not known.
    """

    texts: dict[str, str]
    tokens: int
    cost_dollars: float = 0.0


Make = Callable[[dict[str, str], dspy.Example, bool, UsageTracker], Awaitable[Attempt]]
"""Makes a rollout of a candidate on an example, with a trace where that is True, and adds what its LMs used."""

Ask = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""Makes a request, in a slot, as often as it needs."""


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
        self._to_hear: float = LISTENED
        """Rollouts in which all LM calls are to be heard; infinite once one was of an LM that the run does not pace."""
        self._first = dict[str, FirstRollouts]()
        """What may fail alike from its beginning on, by its name; what has succeeded once is not in it."""
        self._failed_at = set[tuple[Any, ...]]()
        """Where rollouts on other than training examples failed, as long as it matters."""
        self._judges_anew = False
        """The metric gave another score, and so another judgement, when it was asked for feedback."""
        self._useless_reflections: int | None = 0
        """Of the first ones; None when one was of use, or it was said that none is."""
        self.mistake: Exception | None = None
        """What all first ones of these failed with: no rollout is made any more."""

    @property
    def interruptible(self) -> bool:
        """Whether a rollout that has begun can be given up: one on the loop can, one in a thread cannot."""
        return bool(self._place.on_loop if self._elsewhere is None else runs_on_loop(self.adapter.student))

    def watch_first_rollouts(self, count: int, traced: bool = False) -> None:
        """The next ``count`` rollouts are the first: where they all fail alike, their error ends the run."""
        self._first[TRAINING if traced else "rollouts"] = FirstRollouts(count)

    def watch_first_steps(self) -> None:
        """The same of the first rollouts on training examples, requests for feedback, and reflections."""
        self._first[TRAINING] = FirstRollouts(OF_TRAINING, OF_TRAINING)
        self._first[FEEDBACK] = FirstRollouts(OF_FEEDBACK, OF_FEEDBACK)
        self._first[REFLECTIONS] = FirstRollouts(OF_REFLECTION, OF_REFLECTION)

    async def rollout(self, candidate: dict[str, str], example: dspy.Example, *, capture_traces: bool) -> Rollout:
        """Run ``candidate`` on ``example``.

        Raises:
            TransientError: the provider asks to come back later.
            RunAbortedError: the provider refuses for good.
            TypeError, ValueError: what the metric returned is no score.
            Exception: of the program or the metric, where all first rollouts failed alike.
        """
        if self.mistake is not None:
            raise self.mistake
        make = self._elsewhere or self.evaluate_once
        with counting_usage() as usage:
            try:
                attempt = await make(candidate, example, capture_traces, usage)
                self._look_at(attempt.failure, TRAINING if capture_traces else "rollouts")
            except BaseException:
                usage.close()
                record_wasted_cost(tokens_of(usage), cost_of(usage))
                raise
        return replace(attempt.rollout, tokens=tokens_of(usage), cost_dollars=cost_of(usage))

    async def evaluate_once(
        self, candidate: dict[str, str], example: dspy.Example, capture_traces: bool, usage: UsageTracker
    ) -> Attempt:
        """Run ``candidate`` on ``example`` in this process; ``usage`` tracks its LM calls."""
        prototype = await self._prototype(candidate)
        if isinstance(prototype, Exception):
            return Attempt(Rollout(None, self.adapter.failure_score))
        with recording_lm_calls(only_paced=self._to_hear <= 0) as calls:
            run = await self._run(prototype, example, calls)
            if dspy.settings.track_usage and isinstance(run.prediction, dspy.Prediction):
                run.prediction.set_lm_usage(usage.get_total_tokens())
            attempt = await self._scored(example, run, capture_traces, calls)
        self._to_hear = self._to_hear - 1 if calls.only_paced else math.inf
        return attempt

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
        """A reply that did not fit the format is worth reflecting on.

        One that lacks some of its fields makes dspy.GEPA fail over it, and drop the example; here it is reflected on
        where the user asked for it.
        """
        predictor = next((p for p in program.predictors() if p.signature == error.signature), None)
        wanted = self.adapter.add_format_failure_as_feedback or not error.parsed_result
        if predictor is None or not wanted:
            return _Run(None, [], error)
        text, score, signature = error.lm_response or "", self.adapter.failure_score, cast(Any, error.signature)
        missing = tuple(name for name in signature.output_fields if name not in (error.parsed_result or {}))
        shown = IncompleteReply(text, score, missing) if error.parsed_result else FailedPrediction(text, score)
        return _Run(FailedPrediction(text, format_reward=score), [*trace, (predictor, inputs, shown)])

    def _crash(self, trace: list[Any], error: Exception, calls: LmCalls) -> _Run:
        raise_provider_fault(error, calls.errors)
        if not self._flex:
            return _Run(None, [], error)
        logger.warning("Program raised on an example: %s", _said(error))
        return _Run(FailedPrediction(_said(error)), list(trace))

    async def _scored(self, example: Any, run: _Run, capture_traces: bool, calls: LmCalls) -> Attempt:
        failure = self.adapter.failure_score
        if run.error is not None:
            logger.warning("Example scored as a failure: %s", _said(run.error))
            failed = self.failed_rollout(f"The program failed: {_said(run.error)}", capture_traces)
            return Attempt(failed, self._failure(run.error, calls))
        if isinstance(run.prediction, FailedPrediction):
            if not (capture_traces or self._flex):
                return Attempt(self.failed_rollout("The program's reply could not be read.", capture_traces))
            return Attempt(self._rollout(example, run, failure))
        try:
            raw = await self._metric.score(example, run.prediction, scoring_trace=run.trace, flex=self._flex)
        except FlashEvolveError:
            raise  # ours, not the metric's: the journal that could not note the call, say
        except Exception as error:
            raise_provider_fault(error, calls.errors)
            logger.warning("Metric %s raised on an example: %s", self._metric.name, _said(error))
            if self._flex:
                return Attempt(self._rollout(example, run, failure))
            failed = self.failed_rollout(f"The program answered, but the metric failed: {_said(error)}", capture_traces)
            return Attempt(failed, self._failure(error, calls))
        return Attempt(self._rollout(example, run, raw))

    def _failure(self, error: Exception, calls: LmCalls) -> Failure | None:
        if self._flex or any(isinstance(one, AdapterParseError) for one in chain_of(error)):
            return None  # a reply that cannot be read, whatever its parser ran into, is no mistake in code
        return Failure(error, _raised_at(error), fault_of(error, calls.errors) is not None)

    def _look_at(self, failure: Failure | None, kind: str) -> None:
        """Raise an error if each of the first of a kind had it."""
        if kind == "rollouts" and failure is not None and TRAINING in self._first:
            self._failed_at.add(failure.at)
        first = self._first.get(kind)
        # What fails in the same way on other examples, too, though not on all, is no matter of the training examples.
        if first is None or failure is None or (kind == TRAINING and failure.at in self._failed_at):
            self._first.pop(kind, None)
        elif count := first.failed(failure):
            error, said = failure.error, f"All of the first {count} {kind} failed alike"
            logger.error("%s: %s", said, _said(error))
            if failure.refused:
                self.mistake = RunAbortedError(f"{said}: {_said(error)}")
                raise self.mistake from error
            if add_note := getattr(error, "add_note", None):  # Python 3.11
                add_note(said)
            self.mistake = error
            raise error

    def failed_rollout(self, error: str, capture_traces: bool) -> Rollout:
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
            score=self.adapter.failure_score if score is None else _as_number(score),
            objective_scores={name: _as_number(value) for name, value in objectives.items()},
            trajectory={"example": example, "prediction": run.prediction, "trace": run.trace, "score": raw},
        )

    # Reflection.

    async def announce_evaluation(
        self,
        candidate: dict[str, str],
        examples: Sequence[Any],
        evaluate: Callable[[], Awaitable[T]],
        results: Callable[[T], Sequence[tuple[Any, float]]],
    ) -> T:
        """An evaluation of a candidate, of which dspy's callbacks hear as of one of ``dspy.Evaluate``.

        Args:
            examples: what it is evaluated on.
            evaluate: makes it.
            results: output and score of each example.
        """
        if not dspy.settings.callbacks:
            return await evaluate()
        try:
            program = await self._threads.run(self.adapter.build_program, candidate)
        except (SyntaxError, CodeInterpreterError):  # its rollouts will say so
            program = self.adapter.student
        found: list[T] = []

        async def evaluated() -> list[tuple[Any, ...]]:
            found.append(await evaluate())
            return [(example, *result) for example, result in zip(examples, results(found[0]), strict=True)]

        adapter = self.adapter
        announced = _Announced(
            evaluated,
            devset=list(examples),
            metric=adapter.metric_fn,
            num_threads=adapter.num_threads,
            failure_score=adapter.failure_score,
        )
        await announced(program, callback_metadata={"metric_key": "eval_full"})
        return found[0]

    async def reflective_dataset(
        self,
        candidate: dict[str, str],
        evaluation: EvaluationBatch[Any, Any],
        components: list[str],
        rng: random.Random | None,
        ask: Ask,
    ) -> ReflectiveDataset:
        """The records that reflection reads, one list a component.

        Args:
            rng: picks one of several calls of a predictor. None to do as dspy.GEPA: by the adapter's own, shared one,
                and with one question to the metric after the other.
            ask: makes a request to the metric for feedback, and makes it again where the provider of a judge asks for
                that: so one example is asked for again, and not its minibatch.

        Raises:
            FlashEvolveError: of ``ask``, where the provider of a judge gave no answer, or refuses for good.
            Exception: what the metric raised while it gave feedback, or that there was nothing to reflect on.
        """
        adapter, trajectories = copy.copy(self.adapter), evaluation.trajectories or []
        adapter.rng = adapter.rng if rng is None else rng
        adapter.feedback_map = questions_for(adapter.student.named_predictors(), trajectories)
        # What is put together waits its turn among the reflections: it is read by one of them next.
        dataset: Any = await self._watched(
            lambda: ask(lambda: self._threads.run(adapter.make_reflective_dataset, candidate, evaluation, components))
        )
        records: list[dict[str, Any]] = [record for records in dataset.values() for record in records]
        name_missing_fields(records, trajectories)
        asked = [record for record in records if isinstance(record.get("Feedback"), Question)]
        calls = [partial(self._answered, record["Feedback"], ask, rng is None) for record in asked]
        texts = [await call() for call in calls] if rng is None else await gather(calls)
        for record, text in zip(asked, texts, strict=True):
            record["Feedback"] = text
        return dataset

    async def _answered(self, question: Question, ask: Ask, as_gepa: bool) -> Any:
        """The feedback that a question is for: what came with the score, or the metric's answer."""
        told, is_alone = text_with(question.score), len(self.adapter.student.predictors()) == 1
        looks = False if self._judges_anew else self._metric.looks_at_the_call
        if told is not None and (looks is False or (looks is None and is_alone and not as_gepa)):
            return told

        async def asked() -> Any:
            with counting_for_run():
                return await self._watched(lambda: self._metric.feedback(*question.arguments))

        answer = await ask(asked)
        self._look_at(None, FEEDBACK)
        counted, now = value_of(question.score), value_of(answer)
        if now == counted:
            return text_of(answer)
        self._judges_anew = told is not None and is_alone and not as_gepa
        if self.adapter.warn_on_score_mismatch:
            self.adapter.warn_on_score_mismatch = False  # once a run
            logger.warning(
                "Metric %s scored an answer %s, and %s when it was asked for feedback on it: it judges anew, or scores "
                "single predictors. The first score counts%s. warn_on_score_mismatch=False leaves this warning out.",
                self._metric.name, counted, now, ", and the feedback that came with it" if self._judges_anew else "",
            )  # fmt: skip
        return told if self._judges_anew else text_of(answer)

    async def propose(self, candidate: dict[str, str], dataset: ReflectiveDataset, components: list[str]) -> Reflection:
        """Ask the reflection LM, or the user's proposer, for new texts; a proposer with an async ``acall`` is awaited.

        Raises:
            TransientError: the provider asks to come back later.
            RunAbortedError: the provider refuses for good.
            Exception: what the proposer raised, or that what it returned is no text; see :attr:`mistake`.
        """
        if self.mistake is not None:
            raise self.mistake
        acall = self._awaitable_proposer(components)

        async def call() -> dict[str, str]:
            if acall is None:
                propose: Any = self.adapter.propose_new_texts
                texts = await self._threads.run(propose, candidate, dict(dataset), components)
            else:
                with dspy.context(lm=self.adapter.reflection_lm or dspy.settings.lm):
                    texts = await acall(
                        candidate=candidate, reflective_dataset=dict(dataset), components_to_update=components
                    )
            return checked_texts(texts or {})

        with counting_usage() as usage:
            texts = await self._watched(call, REFLECTIONS)
        self._useless_reflections = None
        self._look_at(None, REFLECTIONS)
        return Reflection(texts, tokens_of(usage), cost_of(usage))

    def _awaitable_proposer(self, components: list[str]) -> Callable[..., Awaitable[Any]] | None:
        proposer = self.adapter.custom_instruction_proposer
        acall = getattr(proposer, "acall", None)
        if isinstance(proposer, Module) and not has_own_aforward(proposer):
            return None  # every module has an ``acall``; not every one can be awaited
        if callable(proposer) and not answers_asynchronously(self.adapter.reflection_lm or dspy.settings.lm):
            return None  # its LM overrides ``forward`` alone: awaited, it would send the request elsewhere
        has_code = any(name in self.adapter._flex_paths for name in components)  # pyright: ignore[reportPrivateUsage]
        return acall if inspect.iscoroutinefunction(acall) and not has_code else None

    async def _watched(self, call: Callable[[], Awaitable[T]], kind: str = FEEDBACK) -> T:
        """Tell the provider's faults from what the user's code raised, and name that code.

        Args:
            kind: of the first requests, which may all fail alike.
        """
        with recording_lm_calls() as calls:
            try:
                return await call()
            except Exception as error:
                raise_provider_fault(error, calls.errors)
                adapter = self.adapter
                hooks = {
                    "instruction_proposer": _of_the_users(adapter.custom_instruction_proposer),
                    "code_proposer": _of_the_users(adapter.custom_code_proposer),
                    "metric": adapter.metric_fn,
                }
                hook = hook_that_raised(error, hooks)
                if hook is not None:
                    logger.warning("%s raised %s: %.300s", hook, type(error).__name__, error)
                    if hook.startswith("metric"):
                        kind = FEEDBACK
                if kind == REFLECTIONS:
                    self._warn_of_reflections(error)
                if kind == REFLECTIONS or hook is not None:
                    failure = self._failure(error, calls)
                    is_of_provider = failure is not None and failure.refused and kind == FEEDBACK
                    is_of_reply = hook is None and not calls.errors  # the LM wrote what dspy cannot use
                    self._look_at(None if is_of_provider or is_of_reply else failure, kind)
                raise

    def _warn_of_reflections(self, error: Exception) -> None:
        """Say once that no reflection was of use, before a run ends with the program that it was given."""
        if self._useless_reflections is None:
            return
        self._useless_reflections += 1
        if self._useless_reflections == WARNED:
            self._useless_reflections = None
            logger.warning("None of the first %d reflections was of use; the last: %.500s", WARNED, _said(error))


class FirstRollouts:
    """Whether the first rollouts of a run all fail alike, so that nothing would be learnt from more of them.

    Alike is: an error of one type, raised in one line of code. With one message, ``alike`` are enough; else it may
    depend on the data, and all of them are needed.

    Args:
        count: how many rollouts are the first.
    """

    def __init__(self, count: int, alike: int = ALIKE) -> None:
        self._count, self._alike, self._failed = count, min(alike, count), 0
        self._places, self._messages = set[tuple[Any, ...]](), set[str]()

    def failed(self, failure: Failure) -> int:
        """Take note of a failure; how many there were where it was the last that it needed, else 0."""
        self._failed += 1
        self._places.add(failure.at)
        self._messages.add(str(failure.error))
        enough = self._alike if len(self._messages) == 1 else self._count
        return self._failed if len(self._places) == 1 and self._failed == enough else 0


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


def _as_number(score: Any) -> Any:
    """The same number as an int or a float: a Decimal cannot be added to one, and numpy's scalars are no JSON."""
    return score if isinstance(score, int | float) or not _is_number(score) else float(score)


# Where rollouts run.


class NeedsThreadError(Exception):
    """A program was awaited that can only be called."""


class Place:
    """Where the rollouts of one program run: on the loop as long as that works, else in threads.

    Args:
        threads: of the run.
    """

    def __init__(self, threads: Threads) -> None:
        self.on_loop: bool | None = None
        """None before the first call."""
        self._threads = threads
        self._tools = ToolCalls(threads)
        self._watched = self._blocked = 0

    async def call(self, program: Module, inputs: dict[str, Any]) -> Any:
        """What a program returns.

        Raises:
            NeedsThreadError: its ``aforward`` is no real one; a fresh copy is called by its ``forward``.
            Exception: what the program raised.
        """
        if self.on_loop is None:
            self.on_loop = runs_on_loop(program)
        if not self.on_loop:
            return await self._in_thread(program, inputs)
        self._tools.prepare_for_loop(program)
        try:
            return await self._awaited(program, inputs)
        except NotImplementedError as error:
            if not _has(program, "forward"):
                raise
            if self.on_loop:
                self.on_loop = False
                name = type(program).__name__
                logger.warning("%s.aforward raises NotImplementedError: rollouts run in threads, by its forward.", name)
            raise NeedsThreadError from error

    async def _in_thread(self, program: Module, inputs: dict[str, Any]) -> Any:
        if self._blocked < BLOCKED:
            self._tools.prepare_for_thread(program)
            return await self._threads.run(_called, program, inputs)
        # What has blocked the run's loop may have been a coroutine tool: it runs on a loop of its own, as dspy does it.
        with dspy.context(allow_tool_async_sync_conversion=True):
            return await self._threads.run(_called, program, inputs)

    async def _awaited(self, program: Module, inputs: dict[str, Any]) -> Any:
        if self._watched >= WATCHED:
            return await program.acall(**inputs)
        watch = _Watch(lambda: self._has_blocked(program))
        with dspy.context(callbacks=[*dspy.settings.callbacks, watch]):
            result = await watch.awaiting(program.acall(**inputs))
        self._watched += 1
        return result

    def _has_blocked(self, program: Module) -> None:
        self._blocked += 1
        if self._blocked >= BLOCKED and self.on_loop:
            self.on_loop = False
            logger.warning(
                "%s.aforward blocks the event loop, so that rollouts would run one after another; they run in threads "
                "instead%s. In aforward, await what waits (predictor.acall(...) instead of predictor(...), an async "
                "client), or call it by asyncio.to_thread; or leave aforward out.",
                type(program).__name__,
                ", by its forward" if _has(program, "forward") else "",
            )


def _called(program: Module, inputs: dict[str, Any]) -> Any:
    """Call a program in a thread; one without a ``forward`` on a loop of its own."""
    if _has(program, "forward") or not _has(program, "aforward"):
        return program(**inputs)
    return asyncio.run(program.acall(**inputs))


def _has(program: Module, name: str) -> bool:
    return name in vars(program) or any(name in vars(kind) for kind in type(program).__mro__)


class _Watch(BaseCallback):
    """Watches one call of a program on the loop.

    Args:
        blocks: called once, as soon as it is seen to wait without awaiting.
    """

    def __init__(self, blocks: Callable[[], None]) -> None:
        self._blocks: Callable[[], None] | None = blocks
        self._begun: set[str] = set()

    def on_lm_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        """See ``dspy.utils.callback.BaseCallback``."""
        self._begun.add(call_id)

    def on_lm_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        """A call of an LM that ends before anything else could run was not awaited."""
        if call_id in self._begun:
            self._tell()

    def _tell(self) -> None:
        if self._blocks is not None:
            self._blocks()
        self._blocks = None

    @types.coroutine
    def awaiting(self, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Await ``work``, and look at what it does between two awaits."""
        resume: Callable[[Any], Any] = work.send
        value: Any = None
        while True:
            self._begun.clear()
            began = time.perf_counter() - _occupied_seconds()
            try:
                awaited = resume(value)
            except StopIteration as end:
                return end.value
            finally:
                if time.perf_counter() - _occupied_seconds() - began > HELD_SECONDS:
                    self._tell()
            try:
                resume, value = work.send, (yield awaited)
            except GeneratorExit:
                work.close()
                raise
            except BaseException as error:
                resume, value = work.throw, error


def _occupied_seconds() -> float:
    """How long this thread has worked, or would have, had the machine had a processor for it (where Linux tells)."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            queued = int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        queued = 0.0
    return time.thread_time() + queued


def runs_on_loop(program: Module) -> bool:
    """True when ``program`` can be awaited and does the same as when it is called.

    It needs an ``aforward`` that is at least as specific as its ``forward``: a subclass that overrides
    only ``forward`` inherits an ``aforward`` that would skip its code. Every LM that it may call (its
    predictors' own, else the configured one) must answer asynchronously. And what is known to block must
    not be in it: code interpreters wait, and dspy calls a tool that is no coroutine function on the loop. Beside a
    coroutine tool, which has to be awaited, such tools run in threads: see :class:`~.tools.ToolCalls`.
    """
    tools = tools_of(program)
    return (
        has_own_aforward(program)
        and all(answers_asynchronously(lm) for lm in _language_models(program))
        and not any(_waits_for_code(module) for _, module in program.named_sub_modules())
        and (any(map(is_coroutine_tool, tools)) or not any(map(is_blocking_tool, tools)))
    )


def _waits_for_code(module: Any) -> bool:
    return any(kind.__name__ in BLOCKING and kind.__module__.startswith("dspy.") for kind in type(module).__mro__)


def has_own_aforward(program: Module) -> bool:
    """Whether a module's ``aforward`` is at least as specific as its ``forward``."""
    if "forward" in vars(program) and "aforward" not in vars(program):
        return False
    return _defines_first(type(program), {"aforward"}, {"forward"})


def _defines_first(kind: type, wanted: set[str], others: set[str]) -> bool:
    """Whether one of the wanted names is at least as specific as the others; BaseLM's own count for none."""
    for base in kind.__mro__:
        names = vars(base).keys()
        if base is BaseLM or (names & others and not names & wanted):
            return False
        if names & wanted:
            return True
    return False


def _language_models(program: Module) -> list[Any]:
    own = [getattr(predictor, "lm", None) for predictor in program.predictors()]
    return [lm for lm in [*own, dspy.settings.lm] if lm is not None]


def answers_asynchronously(lm: Any) -> bool:
    """True when ``await lm.acall(...)`` works and does not block the loop for the length of a request."""
    if isinstance(lm, DummyLM):
        return True
    if not isinstance(lm, BaseLM):
        return inspect.iscoroutinefunction(getattr(lm, "acall", None))
    engine = getattr(lm, "_engine_spec", "auto")
    if not isinstance(engine, str) and getattr(lm, "_async_engine_spec", None) is None:
        return False
    kind = getattr(type(lm), "original_class", type(lm))
    return _defines_first(kind, {"aforward", "acall"}, {"forward", "__call__"})


# As dspy.GEPA tells its callbacks.


class _Announced(dspy.Evaluate):
    """An evaluation as dspy's callbacks know it, made by the run.

    Args:
        evaluated: makes it; example, output and score of each example.
        options: of ``dspy.Evaluate``.
    """

    def __init__(self, evaluated: Callable[[], Awaitable[list[tuple[Any, ...]]]], **options: Any) -> None:
        super().__init__(**options)
        self._evaluated = evaluated

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
        results: Any = await self._evaluated()
        score = 100 * sum(result[-1] for result in results) / len(results)
        return EvaluationResult(round(score, 2), results)


def _of_the_users(proposer: Any) -> Any:
    """A proposer, unless it is dspy's or ours: what that raises says something of the reflection LM's reply."""
    return None if type(proposer).__module__.startswith(("dspy.", "dspy_flashevolve.")) else proposer


def checked_texts(texts: Mapping[str, Any]) -> dict[str, str]:
    """New texts of components, if a program can be built with them.

    Raises:
        TypeError: one is no text.
        ValueError: one has half a character in it (a lone surrogate), which no provider can receive.
    """
    for name, text in texts.items():
        if not isinstance(text, str):
            raise TypeError(f"the proposal for {name!r} is {text!r}, expected a text.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the proposal for {name!r} is not valid Unicode: {error.reason}.") from None
    return dict(texts)
