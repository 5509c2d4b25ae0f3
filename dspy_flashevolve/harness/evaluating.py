"""Candidates on examples: what they are to solve, and how they are run and scored, in the run's slots."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import dspy
from dspy.predict.flex.ctx import FlexContext
from dspy.primitives import Example, Module

from dspy_flashevolve.engine.errors import ConfigurationError, DataError, FlashEvolveError, RolloutUnresolvedError
from dspy_flashevolve.engine.replay import hash_of
from dspy_flashevolve.engine.rollouts import Granted, Rollout, RolloutKey, Spent, batch
from dspy_flashevolve.engine.steps import Step
from dspy_flashevolve.harness.archive import TRIAL, Checked, Draft, DraftError, Evaluated, Failed, Trial, draft_of
from dspy_flashevolve.harness.program import as_json, call_in_thread, call_on_loop, typed_fields
from dspy_flashevolve.programs.faults import heard_lm_calls, raise_provider_fault
from dspy_flashevolve.programs.metric import Metric
from dspy_flashevolve.programs.program import answers_asynchronously
from dspy_flashevolve.programs.records import Asked, ReplyText
from dspy_flashevolve.programs.run import DspyRun, check_data
from dspy_flashevolve.sandbox.contract import CodeSandbox, Failure, Job, LmRecord, LmRequest, Outcome, SandboxError

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
    check_data(student, trainset, None, valset)
    train: list[Example] = list(trainset)
    val: list[Example] = train if valset is None else list(valset)
    for name, data in (("trainset", train), ("valset", val)):
        for number, example in enumerate(data):
            if not isinstance(example, Example):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise DataError(f"{name}[{number}] is {example!r:.80}, expected a dspy.Example.")
            missing = set(signature.input_fields) - set(example.inputs().keys())
            if missing:
                raise DataError(f"{name}[{number}] lacks the student's inputs {sorted(missing)}.")
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


def _key(example: Example) -> str:
    return json.dumps(as_json(dict(example.inputs())), sort_keys=True)


class TrialRecord:
    """How a trial is written down and read again; a :class:`~.rollouts.RolloutRecord`. A trace is its LM calls."""

    def write(self, rollout: Rollout) -> tuple[str, str]:
        kept = asdict(rollout.trajectory)
        calls = kept["outcome"].pop("calls")
        return json.dumps(kept), json.dumps(calls)

    def read(self, row: Any) -> Rollout | None:
        try:
            kept = json.loads(row["output"])
            kept["outcome"]["calls"] = json.loads(row["trace"] or "[]")
            trial = TRIAL.validate_python(kept)
        except (KeyError, TypeError, ValueError):  # of another version
            return None
        return Rollout(trial.outcome.fields, trial.score, trajectory=trial)


def texts_of(draft: Draft, memory: Any) -> dict[str, str]:
    """The texts that tell candidates apart: one that remembers something else is another one."""
    texts = {"source": draft.source}
    return texts if memory is None else {**texts, "memory": hash_of({"memory": json.dumps(memory)})}


class _Hopeless(Exception):
    """A candidate has done on an example what no candidate may do: the rest of its evaluation is given up."""

    def __init__(self, failure: Failure, where: str) -> None:
        self.failure = Failure(failure.reason, f"{where}: {failure.message}")
        super().__init__(str(self.failure))


class Evaluations:
    """Evaluates candidates.

    Args:
        of: the optimizer: its metric, cost, learn_batch and failure_score.
        run: gives the slots.
        task: what they are to solve.
        sandbox: where their code runs.

    Raises:
        ConfigurationError: no LM answers their calls.
    """

    def __init__(self, of: Any, run: DspyRun, task: HarnessTask, sandbox: CodeSandbox) -> None:
        lm = run.settings.get("lm") if task.lm is None else run.paced(task.lm)
        if lm is None:
            raise ConfigurationError("no LM is configured: dspy.configure(lm=...), or an LM of the student's own.")
        self._of, self._run, self._task, self._sandbox = of, run, task, sandbox
        self._lm, self._on_loop = lm, answers_asynchronously(lm)
        self._metric = Metric(of.metric, run.threads)
        self._adapter = type(run.settings.get("adapter") or dspy.ChatAdapter()).__name__
        # Where candidates are scored on what they are checked on, nobody may see the labels.
        self._splits = {
            "train": (task.smoke_examples, bool(task.lessons)),
            "lesson": (task.lessons, True),
            "val": (task.valset, False),
        }

    async def checked(self, step: Step, draft: Draft, chosen: Sequence[int]) -> Checked:
        """Run a draft on the smoke examples of these numbers: what nobody may do, or failing on all, ends it."""
        traces = await self._trials(step, draft, "train", chosen)
        failures = [one.outcome.failure for one in traces if one.outcome.failure is not None]
        grave = [failure for failure in failures if failure.is_grave]
        if grave or len(failures) == len(traces):
            return Failed(draft, (grave or failures)[0], tuple(traces))
        return Evaluated(draft, (), (), traces=tuple(traces))

    async def evaluated(self, step: Step, one: Checked) -> Checked:
        """Let a candidate that passed its check learn, where it can, and run it on the whole validation set."""
        if isinstance(one, Failed):
            return one
        try:
            memory = await self._learnt(step, one.draft) if one.draft.learns else None
            trials = await self._trials(step, one.draft, "val", range(len(self._task.valset)), memory)
        except _Hopeless as error:
            return Failed(one.draft, error.failure, one.traces)
        scores, costs = tuple(trial.score for trial in trials), tuple(trial.cost for trial in trials)
        failures = tuple(trial.outcome.failure for trial in trials if trial.outcome.failure is not None)
        return Evaluated(one.draft, scores, costs, failures, one.traces, memory)

    async def _learnt(self, step: Step, draft: Draft) -> Any:
        """What a candidate remembers after one pass over the training examples that nobody is scored on.

        Raises:
            _Hopeless: it did what none may do, or ``learn`` failed.
        """
        memory: Any = {}
        numbers = range(len(self._task.lessons))
        for start in range(0, len(numbers), self._of.learn_batch):
            taught = numbers[start : start + self._of.learn_batch]
            lessons = [
                {
                    "inputs": one.inputs,
                    "labels": one.labels,
                    "prediction": one.outcome.fields,
                    "score": one.score,
                    "feedback": one.feedback,
                }
                for one in await self._trials(step, draft, "lesson", taught, memory)
            ]
            record = ReplyText(f"learn {taught} {hash_of(texts_of(draft, memory))}")
            learn = partial(self._learns, draft, memory, lessons)
            asked = await self._run.rollouts.request("evaluate", step, learn, lambda one: one.spent, record)
            assert asked.answer is not None
            memory, failure = asked.answer
            if failure is not None:
                raise _Hopeless(Failure(*failure), "in learn")
        return memory

    async def _learns(self, draft: Draft, memory: Any, lessons: list[dict[str, Any]]) -> Asked[tuple[Any, Any]]:
        outcome = await self._ran(draft, memory, batch=lessons)
        failure = None if outcome.failure is None else (outcome.failure.reason, outcome.failure.message)
        return Asked((outcome.memory, failure), spent=Spent(outcome.tokens))

    async def _trials(
        self, step: Step, draft: Draft, split: str, numbers: Iterable[int], memory: Any = None
    ) -> list[Trial]:
        """Run a draft on the examples of these numbers. What was paid before an interruption comes first.

        Raises:
            _Hopeless: it does on one what none may do, and this is no check; the other runs are cancelled.
        """
        texts, traced, journal = texts_of(draft, memory), split != "val", self._run.journal
        candidate = hash_of(texts) if journal is None else journal.candidate(texts)
        order = list(numbers)
        if journal is not None:
            order.sort(key=lambda number: journal.missing(step.number, candidate, split, [number], traced=traced))

        async def one(index: int, granted: Granted) -> Trial:
            number = order[index]
            rollout = await self._run.rollouts.rollout(
                RolloutKey(candidate, split, number, traced),
                "check" if split == "train" else "evaluate",
                step,
                step.reservation,
                lambda: self._predicted(draft, split, number, memory),
                TrialRecord(),
                behind=len(order) - index - 1,
                granted=granted,
            )
            trial: Trial = rollout.trajectory
            failure = trial.outcome.failure
            if failure is not None and failure.is_grave and split != "train":
                raise _Hopeless(failure, f"on {trial.example}")
            return trial

        trials = dict(zip(order, await batch(len(order), one), strict=True))
        return [trials[number] for number in numbers]

    async def _predicted(self, draft: Draft, split: str, number: int, memory: Any) -> Rollout:
        """Run a draft on one example, of which it sees the inputs, and score what it answers.

        Raises:
            RolloutUnresolvedError: the sandbox failed, not the candidate.
            TransientError: the provider asks to come back later.
            RunAbortedError: the provider refuses for good.
        """
        examples, labelled = self._splits[split]
        example, name = examples[number], f"{'validation' if split == 'val' else split} {number}"
        inputs = as_json(dict(example.inputs()))
        outcome = await self._ran(draft, memory, inputs=inputs)
        score, feedback = self._of.failure_score, ""
        if outcome.failure is None:
            fields, failure = typed_fields(outcome.fields, self._task.outputs)
            outcome = replace(outcome, failure=failure)
            if failure is None:
                score, feedback = await self._scored(example, fields)
        labels, said = (as_json(dict(example.labels())), feedback) if labelled else ({}, "")
        cost, kept = self._of.cost(outcome), replace(outcome, memory=None)  # what a prediction remembers, nobody reads
        trial = Trial(name, inputs, kept, score, said, cost, labels)
        return Rollout(outcome.fields, score, trajectory=trial, tokens=outcome.tokens)

    async def _ran(self, draft: Draft, memory: Any, **what: Any) -> Outcome:
        remembered = {} if memory is None and draft.learns else memory
        job = Job(draft.source, draft.class_name, memory=remembered, adapter=self._adapter, **what)
        try:
            return await self._sandbox.run(job, self._call_lm)
        except SandboxError as error:
            raise RolloutUnresolvedError(f"the sandbox failed: {error}") from error

    async def _call_lm(self, request: LmRequest) -> LmRecord | str:
        """Make a candidate's LM call: on the loop where the LM can, else in a thread."""
        with heard_lm_calls() as calls:
            try:
                if self._on_loop:
                    return await call_on_loop(self._lm, request)
                return await self._run.threads.run(call_in_thread, self._lm, request)
            except Exception as error:
                raise_provider_fault(error, calls.errors)
                return f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]

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
                return self._of.failure_score, said
        feedback = raw.get("feedback", "") if isinstance(raw, dspy.Prediction) else ""
        return (found if math.isfinite(found) else self._of.failure_score), str(feedback or "")
