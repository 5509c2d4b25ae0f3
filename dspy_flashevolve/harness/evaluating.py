"""Evaluating candidates: the task that they solve, and how they are run on its examples and scored."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import dspy
from dspy.predict.flex.ctx import FlexContext
from dspy.primitives import Example, Module

from dspy_flashevolve.engine.errors import (
    ConfigurationError,
    DataError,
    FlashEvolveError,
    RolloutUnresolvedError,
    check_counts,
)
from dspy_flashevolve.engine.provider import OUTAGE_SECONDS
from dspy_flashevolve.engine.requests import Call, OnGranted, RequestCost, Rollout, RolloutCall, RolloutKey, batch
from dspy_flashevolve.engine.run import Schedule
from dspy_flashevolve.engine.steps import Step
from dspy_flashevolve.engine.store import hash_of
from dspy_flashevolve.engine.texts import without_surrogates
from dspy_flashevolve.harness.archive import (
    TRIAL,
    Checked,
    Cost,
    Draft,
    DraftError,
    Evaluated,
    Failed,
    Trial,
    context_tokens,
    draft_of,
)
from dspy_flashevolve.harness.program import Harness, as_json, call_in_thread, call_on_loop, prediction_of, typed_fields
from dspy_flashevolve.harness.proposing import DIRECTIONS
from dspy_flashevolve.programs.faults import raise_provider_fault, recording_lm_calls
from dspy_flashevolve.programs.metric import Metric, name_of
from dspy_flashevolve.programs.placement import answers_asynchronously
from dspy_flashevolve.programs.records import ModuleReply, ReplyText
from dspy_flashevolve.programs.run import DspyRun
from dspy_flashevolve.programs.settings import RunSettings, check_data, settings_of
from dspy_flashevolve.programs.usage import COUNTED_BY
from dspy_flashevolve.sandbox.contract import (
    CodeSandbox,
    Failure,
    Job,
    Limits,
    LmRecord,
    LmRequest,
    Outcome,
    SandboxError,
)
from dspy_flashevolve.sandbox.sandbox import accepted_layers


@dataclass(frozen=True, kw_only=True, eq=False)
class HarnessSettings:
    """The arguments of `AsyncMetaHarness`, which explains each of them. Everything that belongs to a run reads them
    here."""

    metric: Callable[..., Any] = field(kw_only=False)
    proposer_lm: Any
    iterations: int = 20
    k: int = 2
    proposers: int = 2
    cost: Cost = context_tokens
    limits: Limits = field(default_factory=Limits)
    log_dir: str | Path | None = None
    num_threads: int | None = None
    schedule: Schedule = "async"
    directions: Sequence[str] = DIRECTIONS
    proposer: Callable[[list[Any]], Any] | None = None
    proposer_steps: int = 12
    proposer_runs: int = 6
    proposer_tokens: int | None = None
    learn_batch: int = 16
    failure_score: float = 0.0
    max_seconds: float | None = None
    max_outage_seconds: float | None = OUTAGE_SECONDS
    sandbox: Literal["process"] | CodeSandbox = "process"
    accept_missing_protection: Collection[str] = ()
    seed: int | None = 0

    def __post_init__(self) -> None:
        counts = ("iterations", "k", "proposers", "proposer_steps", "learn_batch", "proposer_runs", "proposer_tokens")
        check_counts(**{name: getattr(self, name) for name in counts})
        settings_of(RunSettings, self)
        accepted_layers(self.accept_missing_protection)
        directions: Any = self.directions
        for name, is_right, expected in (
            ("metric", callable(self.metric), "a function"),
            ("cost", callable(self.cost), "a function"),
            ("limits", isinstance(self.limits, Limits), "Limits(...)"),  # pyright: ignore[reportUnnecessaryIsInstance]
            ("proposer", self.proposer is None or callable(self.proposer), "a function from tools to a dspy.Module"),
            ("directions", not isinstance(directions, str) and directions and all(directions), "one or more texts"),
            ("sandbox", self.sandbox == "process" or not isinstance(self.sandbox, str), "'process' or a CodeSandbox"),
        ):
            if not is_right:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r:.80}, expected {expected}.")


FLEX: Any = dspy.Flex
"""`dspy.Flex`, typed Any: its decorator hides from type checkers that it is a class."""
FEW_LESSONS = 8
"""Examples that a draft learns from when its proposer runs it, or when its check needs that: half a batch of a search,
since a proposer waits while they are run one after the other."""
MESSAGE_CHARACTERS = 1000
"""Most characters of an error that is shown to a candidate or a proposer: the type and the beginning are what helps."""


@dataclass(frozen=True)
class HarnessTask:
    """The task that candidates are to solve.

    ``lessons`` are the training examples that are not in the valset, which ``learn`` is given. ``memory`` is that of a
    student which is a `Harness`; other candidates do not get it.
    """

    signature: Any
    seed: Draft
    lm: Any
    trainset: Sequence[Example]
    valset: Sequence[Example]
    lessons: Sequence[Example]
    memory: Any = None

    @property
    def smoke_examples(self) -> Sequence[Example]:
        """Examples of the check, whose traces proposers see: the lessons, or the trainset where there are none."""
        return self.lessons or self.trainset

    @property
    def inputs(self) -> list[str]:
        """The names of the input fields."""
        return list(self.signature.input_fields)

    @property
    def outputs(self) -> dict[str, Any]:
        """The types of the output fields by name."""
        return {name: field.annotation for name, field in self.signature.output_fields.items()}

    @property
    def description(self) -> str:
        """The signature in words, for proposers."""
        return FlexContext(signature_cls=self.signature).render_signature_spec()


def task_of(student: Any, trainset: Any, valset: Any) -> HarnessTask:
    """Make a task of a student and its data; refuse those that cannot be used."""
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

    def key(example: Example) -> str:
        return json.dumps(inputs_of(signature, example), sort_keys=True)

    scored = {key(example) for example in val}
    lessons = [example for example in train if key(example) not in scored]
    try:
        seed = draft_of(source, list(signature.input_fields))
    except DraftError as error:
        raise DataError(f"the student's source is no harness: {error}.") from error
    memory = student.memory if isinstance(student, Harness) else None
    return HarnessTask(signature, seed, lm, train, val, lessons, memory)


def _source_of(student: Any) -> tuple[Any, str, Any]:
    """Return the signature, the source and the LM of a student."""
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


def inputs_of(signature: Any, example: Example) -> dict[str, Any]:
    """Return those inputs of an example that are fields of the signature, as JSON."""
    return {name: as_json(example[name]) for name in signature.input_fields}


class TrialRecord:
    """Writes a trial to the journal and reads it again; a `RolloutRecord`. A trace is its LM calls."""

    def write(self, rollout: Rollout) -> tuple[str, str]:
        row = asdict(rollout.trajectory)
        calls = row["outcome"].pop("calls")
        return json.dumps(row), json.dumps(calls)

    def read(self, row: Any) -> Rollout | None:
        try:
            data = json.loads(row["output"])
            data["outcome"]["calls"] = json.loads(row["trace"] or "[]")
            trial = TRIAL.validate_python(data)
        except (KeyError, TypeError, ValueError):  # written by another version of the package
            return None
        return Rollout(trial.outcome.fields, trial.score, trajectory=trial)


def texts_of(draft: Draft, memory: Any) -> dict[str, str]:
    """Return the texts that identify a candidate: with another memory it is another candidate."""
    texts = {"source": draft.source}
    return texts if memory is None else {**texts, "memory": hash_of({"memory": json.dumps(memory)})}


def _lesson(trial: Trial) -> dict[str, Any]:
    """Return a run as ``learn`` gets it."""
    return {
        "inputs": trial.inputs,
        "labels": trial.labels,
        "prediction": trial.outcome.fields,
        "score": trial.score,
        "feedback": trial.feedback,
    }


def _failure_in(traces: Sequence[Trial]) -> Failure | None:
    """Return why a check fails: the first grave failure, or the first one where every run failed."""
    failures = [trial.outcome.failure for trial in traces if trial.outcome.failure is not None]
    grave = [failure for failure in failures if failure.is_grave]
    return (grave or failures)[0] if grave or len(failures) == len(traces) else None


class _Disqualified(Exception):
    """A candidate failed gravely, or could not learn: the rest of its evaluation is skipped."""

    def __init__(self, failure: Failure, where: str) -> None:
        self.failure = Failure(failure.reason, f"{where}: {failure.message}")
        super().__init__(str(self.failure))


class Evaluations:
    """Runs candidates in the sandbox, in the run's slots, and scores them."""

    def __init__(self, settings: HarnessSettings, run: DspyRun, task: HarnessTask, sandbox: CodeSandbox) -> None:
        lm = run.dspy_settings.get("lm") if task.lm is None else run.pace(task.lm)
        if lm is None:
            raise ConfigurationError("no LM is configured: dspy.configure(lm=...), or an LM of the student's own.")
        self._settings, self._run, self._task, self._sandbox = settings, run, task, sandbox
        self._lm, self._on_loop = lm, answers_asynchronously(lm)
        self._has_answered = False
        """The LM has answered a request of a candidate."""
        self._metric = Metric(settings.metric, run.threads)
        self._adapter = type(run.dspy_settings.get("adapter") or dspy.ChatAdapter()).__name__
        # Where candidates are scored on what they are checked on, nobody may see the labels.
        self._splits = {
            "train": (task.smoke_examples, bool(task.lessons)),
            "lesson": (task.lessons, True),
            "val": (task.valset, False),
        }

    async def check(self, step: Step, draft: Draft, chosen: Sequence[int]) -> Checked:
        """Run a draft on the smoke examples of these numbers.

        It fails when it fails on all of them, or on one with a grave failure (`Failure.is_grave`). One that learns may
        fail on all of them for want of memory: it learns from a few others, as in `rehearse`, and is run again.
        """
        traces = await self._trials(step, draft, "train", chosen, self._first_memory(draft))
        failure, lessons = _failure_in(traces), self._few_lessons(draft, chosen)
        if failure is not None and not failure.is_grave and lessons:
            try:
                memory = await self._learn(step, draft, lessons)
            except _Disqualified as error:
                return Failed(draft, error.failure, tuple(traces))
            traces = await self._trials(step, draft, "train", chosen, memory)
            failure = _failure_in(traces)
        if failure is not None:
            return Failed(draft, failure, tuple(traces))
        return Evaluated(draft, (), (), traces=tuple(traces))

    async def rehearse(self, step: int, draft: Draft, number: int) -> Trial:
        """Run a draft of a step's proposer on a smoke example, in the slot of the proposer, which waits for it.

        A draft that learns first learns from a few other examples. Where it fails gravely on one of these, that run is
        returned.
        """
        memory, lessons = self._first_memory(draft), list[Trial]()
        for other in self._few_lessons(draft, [number]):
            lesson = await self._rehearse_example(step, draft, "lesson", other, memory)
            if lesson.outcome.failure is not None and lesson.outcome.failure.is_grave:
                return lesson
            lessons.append(lesson)
        if lessons:
            outcome = await self._run_job(draft, memory, batch=[_lesson(trial) for trial in lessons])
            self._count_for_proposer(outcome)
            if outcome.failure is not None:
                failure = Failure(outcome.failure.reason, f"in learn: {outcome.failure.message}")
                inputs = inputs_of(self._task.signature, self._task.smoke_examples[number])
                return Trial(f"train {number}", inputs, replace(outcome, failure=failure), self._settings.failure_score)
            memory = outcome.memory
        return await self._rehearse_example(step, draft, "train", number, memory)

    async def _rehearse_example(self, step: int, draft: Draft, split: str, number: int, memory: Any) -> Trial:
        """Run a draft on an example, and count tokens and metric call with those of its proposal: no rollout does."""
        trial: Trial = (await self._predict(draft, split, number, memory)).trajectory
        self._count_for_proposer(trial.outcome)
        if (reservation := self._run.budget.reserve(1)) is not None:
            reservation.settle()
        self._run.store.record_call("propose", step)
        return trial

    def _count_for_proposer(self, outcome: Outcome) -> None:
        used = dspy.settings.get(COUNTED_BY)
        if used is not None:
            used.add(
                self._lm.model,
                [
                    {"prompt_tokens": call.prompt_tokens, "completion_tokens": call.completion_tokens}
                    for call in outcome.calls
                ],
            )

    def _first_memory(self, draft: Draft) -> Any:
        """Return the memory that a draft begins with: the student its own, others that learn an empty one."""
        own = self._task.memory if draft is self._task.seed else None
        return {} if own is None and draft.learns else own

    def _few_lessons(self, draft: Draft, others_than: Sequence[int]) -> list[int]:
        """Return the numbers of a few lessons for a draft that learns, without these where there are others."""
        numbers = list(range(len(self._task.lessons))) if draft.learns else []
        others = [number for number in numbers if number not in others_than]
        return (others or numbers)[:FEW_LESSONS]

    async def evaluate(self, step: Step, candidate: Checked) -> Checked:
        """Let a candidate that passed its check learn, if it can, and run it on the whole validation set."""
        if isinstance(candidate, Failed):
            return candidate
        try:
            lessons = range(len(self._task.lessons)) if candidate.draft.learns else ()
            memory = await self._learn(step, candidate.draft, lessons)
            trials = await self._trials(step, candidate.draft, "val", range(len(self._task.valset)), memory)
        except _Disqualified as error:
            return Failed(candidate.draft, error.failure, candidate.traces)
        scores, costs = tuple(trial.score for trial in trials), tuple(trial.cost for trial in trials)
        failures = tuple(trial.outcome.failure for trial in trials if trial.outcome.failure is not None)
        return Evaluated(candidate.draft, scores, costs, failures, candidate.traces, memory)

    async def _learn(self, step: Step, draft: Draft, numbers: Sequence[int]) -> Any:
        """Return a candidate's memory after one pass over the lessons of these numbers, in batches."""
        memory = self._first_memory(draft)
        for start in range(0, len(numbers), self._settings.learn_batch):
            batch_numbers = numbers[start : start + self._settings.learn_batch]
            lessons = [_lesson(trial) for trial in await self._trials(step, draft, "lesson", batch_numbers, memory)]
            record = ReplyText(f"learn {batch_numbers} {hash_of(texts_of(draft, memory))}")
            learn = partial(self._learn_batch, draft, memory, lessons)
            asked = await self._run.requests.answer(
                Call(stage="evaluate", step=step, make=learn, cost_of=lambda reply: reply.spent, record=record)
            )
            assert asked.answer is not None
            memory, failure = asked.answer
            if failure is not None:
                raise _Disqualified(Failure(*failure), "in learn")
        return memory

    async def _learn_batch(
        self, draft: Draft, memory: Any, lessons: list[dict[str, Any]]
    ) -> ModuleReply[tuple[Any, Any]]:
        """Call ``learn`` once; return the memory after it, and the failure as (reason, message) or None."""
        outcome = await self._run_job(draft, memory, batch=lessons)
        failure = None if outcome.failure is None else (outcome.failure.reason, outcome.failure.message)
        return ModuleReply((outcome.memory, failure), spent=RequestCost(outcome.tokens))

    async def _trials(self, step: Step, draft: Draft, split: str, numbers: Iterable[int], memory: Any) -> list[Trial]:
        """Run a draft on the examples of these numbers; those that an interrupted run has paid come first.

        Raises _Disqualified: it failed gravely on one, outside of a check; its other runs are cancelled.
        """
        texts, traced, store = texts_of(draft, memory), split != "val", self._run.store
        candidate = store.record_candidate(texts)
        order = sorted(
            numbers, key=lambda number: store.count_missing(step.number, candidate, split, [number], traced=traced)
        )

        async def run_example(index: int, granted: OnGranted) -> Trial:
            number = order[index]
            call = RolloutCall(
                key=RolloutKey(candidate, split, number, traced),
                stage="check" if split == "train" else "evaluate",
                step=step,
                reservation=step.reservation,
                make=lambda: self._predict(draft, split, number, memory),
                written=TrialRecord(),
                followers=len(order) - index - 1,
                on_granted=granted,
            )
            rollout = await self._run.requests.answer(call)
            trial: Trial = rollout.trajectory
            failure = trial.outcome.failure
            if failure is not None and failure.is_grave and split != "train":
                raise _Disqualified(failure, f"on {trial.example}")
            return trial

        trials = dict(zip(order, await batch(len(order), run_example), strict=True))
        return [trials[number] for number in numbers]

    async def _predict(self, draft: Draft, split: str, number: int, memory: Any) -> Rollout:
        """Run a draft on the inputs of one example, and score its prediction. A fault of sandbox or provider is no
        score."""
        examples, labelled = self._splits[split]
        example, name = examples[number], f"{'validation' if split == 'val' else split} {number}"
        inputs = inputs_of(self._task.signature, example)
        outcome = await self._run_job(draft, memory, inputs=inputs)
        score, feedback = self._settings.failure_score, ""
        if outcome.failure is None:
            fields, failure = typed_fields(outcome.fields, self._task.outputs)
            outcome = replace(outcome, failure=failure)
            if failure is None:
                score, feedback = await self._score(example, fields)
        labels = {field: as_json(label) for field, label in example.labels().items()} if labelled else {}
        shown_feedback = without_surrogates(feedback) if labelled else ""
        without_memory = replace(outcome, memory=None)  # the memory that a prediction changes is not kept
        trial = Trial(name, inputs, without_memory, score, shown_feedback, self._cost_of(outcome), labels)
        return Rollout(outcome.fields, score, trajectory=trial, tokens=outcome.tokens)

    def _cost_of(self, outcome: Outcome) -> float:
        """Return the cost of a run; ConfigurationError where the user's function gives no finite number."""
        name = name_of(self._settings.cost)
        try:
            cost: Any = self._settings.cost(outcome)
        except Exception as error:
            raise ConfigurationError(f"cost {name} raised {type(error).__name__}: {error}.") from error
        try:
            number = float(cost)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ConfigurationError(f"cost {name} returned {cost!r:.80}, expected a finite number.")
        return number

    async def _run_job(self, draft: Draft, memory: Any, **work: Any) -> Outcome:
        """Run a draft in the sandbox; ``work`` is the inputs of a prediction or the batch of a lesson."""
        remembered = {} if memory is None and draft.learns else memory  # learn may have left None
        job = Job(draft.source, draft.class_name, memory=remembered, adapter=self._adapter, **work)
        try:
            return await self._sandbox.run(job, self._call_lm)
        except SandboxError as error:
            raise RolloutUnresolvedError(f"the sandbox failed: {error}") from error

    async def _call_lm(self, request: LmRequest) -> LmRecord | str:
        """Make an LM call of a candidate: on the event loop if the LM is asynchronous, else in a thread."""
        with recording_lm_calls() as calls:
            try:
                if self._on_loop:
                    answer = await call_on_loop(self._lm, request)
                else:
                    answer = await self._run.threads.run(call_in_thread, self._lm, request)
            except Exception as error:
                raise_provider_fault(error, calls.errors, others_answered=self._has_answered)
                return f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]
        self._has_answered = True
        return answer

    async def _score(self, example: Any, fields: dict[str, Any]) -> tuple[float, str]:
        """Return score and feedback. As in dspy.GEPA, a metric returns a number, or a prediction that has both.

        A metric that raises gives the failure score; an error of the provider of a judging LM gives no score.
        """
        with recording_lm_calls() as calls:
            try:
                raw = await self._metric.score(example, prediction_of(fields))
                score = float(raw.score if isinstance(raw, dspy.Prediction) else raw)
            except FlashEvolveError:
                raise
            except Exception as error:
                raise_provider_fault(error, calls.errors)
                message = f"the metric raised {type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]
                return self._settings.failure_score, message
        feedback = raw.get("feedback", "") if isinstance(raw, dspy.Prediction) else ""
        return (score if math.isfinite(score) else self._settings.failure_score), str(feedback or "")
