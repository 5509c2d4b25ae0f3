"""Candidates on examples: what they are to solve, and how they are run and scored, in the run's slots."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import dspy
from dspy.predict.flex.ctx import FlexContext
from dspy.primitives import Example, Module

from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.errors import ConfigurationError, DataError, FlashEvolveError, RolloutUnresolvedError
from dspy_flashevolve.engine.flights import Rollout, Spent
from dspy_flashevolve.engine.gathering import gather
from dspy_flashevolve.engine.item import Item
from dspy_flashevolve.engine.sources import TicketSource
from dspy_flashevolve.engine.staleness import StalenessPolicy
from dspy_flashevolve.harness.archive import Checked, Cost, Evaluated, Failed, Trial
from dspy_flashevolve.harness.drafts import Draft, DraftError, draft_of
from dspy_flashevolve.harness.program import as_json, call_in_thread, call_on_loop, typed_fields
from dspy_flashevolve.programs.faults import heard_lm_calls, raise_provider_fault
from dspy_flashevolve.programs.metric import Metric
from dspy_flashevolve.programs.runner import answers_asynchronously
from dspy_flashevolve.sandbox.contract import (
    CodeSandbox,
    Failure,
    Job,
    Limits,
    LmAnswer,
    LmRequest,
    Outcome,
    SandboxError,
)
from dspy_flashevolve.workbench import Workbench

FLEX: Any = dspy.Flex
"""Its decorator hides from type checkers that it is a class."""
MESSAGE_CHARACTERS = 1000


@dataclass(frozen=True)
class HarnessTask:
    """What candidates are to solve.

    Args:
        signature: inputs and outputs.
        seed: the first candidate.
        lm: the student's own LM; None for the configured one.
        trainset: examples whose labels a proposer, and ``learn``, may see.
        valset: examples that candidates are scored on; their labels stay with the metric.
        lessons: the training examples that are not in the valset: those that ``learn`` is given.
    """

    signature: Any
    seed: Draft
    lm: Any
    trainset: Sequence[Example]
    valset: Sequence[Example]
    lessons: Sequence[Example]

    @property
    def smoke_examples(self) -> Sequence[Example]:
        """What new candidates are tried on, and proposers see the traces of: lessons, where there are any."""
        return self.lessons or self.trainset

    @property
    def inputs(self) -> list[str]:
        """Names of the input fields."""
        return list(self.signature.input_fields)

    @property
    def outputs(self) -> dict[str, Any]:
        """Output field -> type."""
        return {name: field.annotation for name, field in self.signature.output_fields.items()}

    @property
    def description(self) -> str:
        """For the proposer."""
        return FlexContext(signature_cls=self.signature).render_signature_spec()


def task_of(student: Any, trainset: Any, valset: Any) -> HarnessTask:
    """The task that a student and its data are.

    Raises:
        ConfigurationError: the student is not one whose source is known.
        DataError: no data, or data that do not fit the student.
    """
    signature, source, lm = _source_of(student)
    train = _examples("trainset", trainset, signature)
    val = train if valset is None else _examples("valset", valset, signature)
    scored = {_key(example) for example in val}
    lessons = [example for example in train if _key(example) not in scored]
    try:
        seed = draft_of(source, list(signature.input_fields))
    except DraftError as error:
        raise DataError(f"the student's source is no harness: {error}.") from error
    return HarnessTask(signature, seed, lm, train, val, lessons)


def _source_of(student: Any) -> tuple[Any, str, Any]:
    """Signature, source and LM of a student."""
    if isinstance(student, FLEX):
        if student._flex_ctx.tools:  # pyright: ignore[reportPrivateUsage]
            raise ConfigurationError(
                "the student has tools, and these would have to run in the sandbox: leave them out, or write them "
                "into its module_src."
            )
        return student.signature, student.module_src or "", student.lm
    predictor = student.predict if isinstance(student, dspy.ChainOfThought) else student
    if not isinstance(predictor, dspy.Predict):
        kind = f"a {type(student).__name__}" if isinstance(student, Module) else repr(student)
        raise ConfigurationError(
            f"the student is {kind}, expected a dspy.Predict or dspy.ChainOfThought; for any other program write its "
            "source into a Harness(signature, module_src), and give that."
        )
    signature: Any = predictor.signature
    if isinstance(student, dspy.ChainOfThought):
        signature = signature.delete("reasoning")
    source = FLEX(signature).module_src or ""
    if isinstance(student, dspy.ChainOfThought):
        source = source.replace("dspy.Predict(", "dspy.ChainOfThought(", 1)
    return signature, source, predictor.lm


def _examples(name: str, data: Any, signature: Any) -> list[Example]:
    examples = [] if data is None else list(data)
    if not examples:
        raise DataError(f"{name} is empty, expected at least one dspy.Example.")
    for number, example in enumerate(examples):
        if not isinstance(example, Example) or example._input_keys is None:  # pyright: ignore[reportPrivateUsage]
            raise DataError(
                f"{name}[{number}] is {example!r:.80}, expected a dspy.Example(...).with_inputs(...), which says what "
                "the inputs are."
            )
        missing = set(signature.input_fields) - set(example.inputs().keys())
        if missing:
            raise DataError(f"{name}[{number}] lacks the student's inputs {sorted(missing)}.")
    return examples


def _key(example: Example) -> str:
    return json.dumps(as_json(dict(example.inputs())), sort_keys=True)


@dataclass(frozen=True)
class RunSettings:
    """What a run was asked for; see :class:`~dspy_flashevolve.async_meta_harness.AsyncMetaHarness`."""

    metric: Callable[..., Any]
    proposer_lm: Any
    iterations: int
    k: int
    proposers: int
    proposer_steps: int
    cost: Cost
    limits: Limits
    directions: Sequence[str]
    staleness: StalenessPolicy
    learn_batch: int
    failure_score: float
    log_dir: Path | None
    accept_missing_protection: tuple[str, ...]


class _Hopeless(Exception):
    """A candidate has done on an example what no candidate may do: the rest of its evaluation is given up."""

    def __init__(self, failure: Failure, where: str) -> None:
        self.failure = Failure(failure.reason, f"{where}: {failure.message}")
        super().__init__(str(self.failure))


class Evaluations:
    """Evaluates candidates.

    Args:
        bench: of the run.
        source: its reservations pay.
        task: what they are to solve.
        sandbox: where their code runs.
        lm: what answers their LM calls.
        settings: the rest.
    """

    def __init__(
        self,
        bench: Workbench,
        source: TicketSource,
        task: HarnessTask,
        sandbox: CodeSandbox,
        lm: Any,
        settings: RunSettings,
    ) -> None:
        self._bench, self._source, self._task, self._sandbox = bench, source, task, sandbox
        self._lm, self._on_loop = lm, answers_asynchronously(lm)
        self._settings, self._metric = settings, Metric(settings.metric, bench.threads)
        self._adapter = type(bench.settings.get("adapter") or dspy.ChatAdapter()).__name__

    async def checked(self, item: Item[Any], draft: Draft, chosen: Sequence[int]) -> Checked:
        """Run a draft on the smoke examples of these numbers: what nobody may do, or failing on all, ends it."""
        claim = self._bench.claim(item, "check")
        examples = [(f"train {number}", self._task.smoke_examples[number]) for number in chosen]
        labelled = bool(self._task.lessons)  # else candidates are scored on these, and nobody may see the labels
        traces = await gather([partial(self._trial, item, claim, draft, one, labelled) for one in examples])
        failures = [one.outcome.failure for one in traces if one.outcome.failure is not None]
        grave = [failure for failure in failures if failure.is_grave]
        if grave or len(failures) == len(traces):
            return Failed(draft, (grave or failures)[0], tuple(traces))
        return Evaluated(draft, (), (), traces=tuple(traces))

    async def evaluated(self, item: Item[Any], one: Checked) -> Checked:
        """Let a candidate that passed its check learn, where it can, and run it on the whole validation set."""
        if isinstance(one, Failed):
            return one
        claim = self._bench.claim(item, "evaluate")
        try:
            memory = await self._learnt(item, claim, one.draft) if one.draft.learns else None
            named = [(f"validation {number}", example) for number, example in enumerate(self._task.valset)]
            trials = await self._hopeful(item, claim, one.draft, named, False, memory)
        except _Hopeless as error:
            return Failed(one.draft, error.failure, one.traces)
        scores, costs = tuple(trial.score for trial in trials), tuple(trial.cost for trial in trials)
        failures = tuple(trial.outcome.failure for trial in trials if trial.outcome.failure is not None)
        return Evaluated(one.draft, scores, costs, failures, one.traces, memory)

    async def _learnt(self, item: Item[Any], claim: Claim, draft: Draft) -> Any:
        """What a candidate remembers after one pass over the training examples that nobody is scored on."""
        memory: Any = {}
        named = [(f"lesson {number}", example) for number, example in enumerate(self._task.lessons)]
        for start in range(0, len(named), self._settings.learn_batch):
            examples = named[start : start + self._settings.learn_batch]
            trials = await self._hopeful(item, claim, draft, examples, True, memory)
            batch = [
                {
                    "inputs": one.inputs,
                    "labels": one.labels,
                    "prediction": one.outcome.fields,
                    "score": one.score,
                    "feedback": one.feedback,
                }
                for one in trials
            ]
            learn = partial(self._run, draft, memory, batch=batch)
            outcome = await self._bench.rollouts.request(claim, learn, lambda done: Spent(done.tokens))
            if outcome.failure is not None:
                raise _Hopeless(outcome.failure, "in learn")
            memory = outcome.memory
        return memory

    async def _hopeful(
        self,
        item: Item[Any],
        claim: Claim,
        draft: Draft,
        named: Sequence[tuple[str, Example]],
        labelled: bool,
        memory: Any,
    ) -> list[Trial]:
        """Run a draft on examples until it does on one what none may do.

        Raises:
            _Hopeless: it did; the other runs are cancelled.
        """

        async def tried(one: tuple[str, Example]) -> Trial:
            trial = await self._trial(item, claim, draft, one, labelled, memory)
            if trial.outcome.failure is not None and trial.outcome.failure.is_grave:
                raise _Hopeless(trial.outcome.failure, f"on {trial.example}")
            return trial

        return await gather([partial(tried, one) for one in named])

    async def _trial(
        self,
        item: Item[Any],
        claim: Claim,
        draft: Draft,
        named: tuple[str, Example],
        labelled: bool,
        memory: Any = None,
    ) -> Trial:
        """Run a draft on one example in a slot."""

        async def call() -> Rollout:
            trial = await self._predicted(draft, named, labelled, memory)
            return Rollout(trial.outcome.fields, trial.score, trajectory=trial, tokens=trial.outcome.tokens)

        key = (item.ticket.number, draft.source, named[0])
        pays = self._source.reservations[item.ticket.number]
        rollout, _ = await self._bench.rollouts.rollout(key, claim, pays, call)
        return rollout.trajectory

    async def _predicted(self, draft: Draft, named: tuple[str, Example], labelled: bool, memory: Any) -> Trial:
        """Run a draft on one example, of which it sees the inputs, and score what it answers.

        Args:
            labelled: keep the example's labels and the metric's words: for training examples.

        Raises:
            RolloutUnresolvedError: the sandbox failed, not the candidate.
            TransientError: the provider asks to come back later.
            RunAbortedError: the provider refuses for good.
        """
        name, example = named
        inputs = as_json(dict(example.inputs()))
        outcome = await self._run(draft, memory, inputs=inputs)
        score, feedback = self._settings.failure_score, ""
        if outcome.failure is None:
            fields, failure = typed_fields(outcome.fields, self._task.outputs)
            outcome = replace(outcome, failure=failure)
            if failure is None:
                score, feedback = await self._scored(example, fields)
        labels = as_json(dict(example.labels())) if labelled else {}
        return Trial(name, inputs, outcome, score, feedback if labelled else "", self._settings.cost(outcome), labels)

    async def _run(self, draft: Draft, memory: Any, **what: Any) -> Outcome:
        remembered = {} if memory is None and draft.learns else memory
        job = Job(draft.source, draft.class_name, memory=remembered, adapter=self._adapter, **what)
        try:
            return await self._sandbox.run(job, self._call_lm)
        except SandboxError as error:
            raise RolloutUnresolvedError(f"the sandbox failed: {error}") from error

    async def _call_lm(self, request: LmRequest) -> LmAnswer:
        """Make a candidate's LM call: on the loop where the LM can, else in a thread."""
        with heard_lm_calls() as calls:
            try:
                if self._on_loop:
                    return await call_on_loop(self._lm, request)
                return await self._bench.threads.run(call_in_thread, self._lm, request)
            except Exception as error:
                raise_provider_fault(error, calls.errors)
                return LmAnswer(None, f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS])

    async def _scored(self, example: Any, fields: dict[str, Any]) -> tuple[float, str]:
        """Score and feedback, as dspy.GEPA reads a metric: a number, or a prediction with ``score`` and ``feedback``.

        An error of the metric's is the failure score; one of the provider's (an LM that judges) is none.
        """
        with heard_lm_calls() as calls:
            try:
                raw = await self._metric.score(example, dspy.Prediction(**fields))
                found = float(raw.score if isinstance(raw, dspy.Prediction) else raw)
            except FlashEvolveError:
                raise
            except Exception as error:
                raise_provider_fault(error, calls.errors)
                said = f"the metric raised {type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]
                return self._settings.failure_score, said
        feedback = raw.get("feedback", "") if isinstance(raw, dspy.Prediction) else ""
        return (found if math.isfinite(found) else self._settings.failure_score), str(feedback or "")
