"""What a sample asks of the program and the language models: attempts, reflections, a lesson, and validations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, Literal

import dspy
from dspy.primitives.module import Module

from dspy_flashevolve.ace.operations import parse_operations, parse_tags
from dspy_flashevolve.ace.playbook import (
    SECTIONS,
    CountTokens,
    Operation,
    Playbook,
    Tag,
    approximate_tokens,
    attached,
    checked_sections,
    line_of,
)
from dspy_flashevolve.engine.errors import ConfigurationError, check_counts
from dspy_flashevolve.engine.requests import Rollout
from dspy_flashevolve.engine.steps import EndKind, Reservation, Step, StepEnded
from dspy_flashevolve.engine.store import hash_of
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.observe.statistics import Problem
from dspy_flashevolve.programs.building import copy_of
from dspy_flashevolve.programs.records import ReplyText
from dspy_flashevolve.programs.run import DspyRun
from dspy_flashevolve.programs.settings import RunSettings

logger = logger_named(__name__)

CITATIONS = "cited_bullets"
"""The output field that a program in training has beside its own; numbered where the program has one of that name."""
CITATIONS_DESCRIPTION = "Ids of the playbook's bullets that you used, separated by commas; empty if none."
MOST_CHARACTERS = 6000
"""Characters of a field that a reflector is shown; the rest is cut off. Some 1,500 tokens, so that a prompt of task,
attempt and feedback fits into the context of a small model. Not tuned."""
EMPTY = "(empty)"
"""Shown to an LM in place of an empty text, so that it does not take the field for missing."""

COUNTS = ("max_rounds", "epochs", "curator_frequency", "token_budget", "eval_every")
EXPECTED: dict[str, tuple[Callable[[Any], object], Sequence[str]]] = {
    "a whole number of at least 1": (lambda value: value is not None, COUNTS),
    "a function": (callable, ["metric", "count_tokens"]),
    "a number": (
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value),
        ["perfect_score", "failure_score"],
    ),
    "a dspy.Module": (lambda value: isinstance(value, Module | None), ["reflector", "curator"]),
    "True or False": (lambda value: isinstance(value, bool), ["metric_lock", "no_ground_truth"]),
    "a path, or None": (lambda value: isinstance(value, str | PathLike | None), ["log_dir"]),
    "'all' or predictor names": (
        lambda value: value == "all" or (isinstance(value, list | tuple) and value), ["attach"]
    ),
}  # fmt: skip
"""What arguments have to be -> the test of it, and their names."""
Tags = tuple[tuple[str, Tag], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class AceSettings(RunSettings):
    """The arguments of `AsyncACE`, which explains each of them. Everything that belongs to a run reads them here."""

    metric: Callable[..., Any] = field(kw_only=False)
    reflector_lm: Any = None
    curator_lm: Any = None
    max_rounds: int = 3
    epochs: int = 1
    curator_frequency: int = 1
    no_ground_truth: bool = False
    token_budget: int = 8192
    eval_every: int = 10
    attach: Literal["all"] | Sequence[str] = "all"
    sections: Sequence[str] = SECTIONS
    perfect_score: float = 1.0
    failure_score: float = 0.0
    reflector: Module | None = None
    curator: Module | None = None
    count_tokens: CountTokens = approximate_tokens
    metric_lock: bool = False
    log_dir: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_sections(self.sections)
        check_counts(**{name: getattr(self, name) for name in COUNTS})
        for expected, (is_right, names) in EXPECTED.items():
            for name in names:
                if not is_right(getattr(self, name)):
                    raise ConfigurationError(f"{name} is {getattr(self, name)!r}, expected {expected}.")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of the program on an example: its score, the outputs of its predictors as text, feedback, and the ids of
    the bullets that it cited."""

    score: float
    steps: str
    feedback: str
    cited: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reflection:
    """What a reflector says of an attempt: text, tags of cited bullets, and the parts of the reply that could not be
    used."""

    text: str
    tags: Tags = ()
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """A training example with what has been tried and learnt so far.

    Its ``place`` is its number in its epoch of ``total`` samples, or in the stream, from 1; ``window`` is that of a
    stream. Attempts and the reflections on them are in order.
    """

    example: Any
    index: int
    playbook: Playbook
    place: int = 1
    total: int | None = None
    window: int | None = None
    attempts: tuple[Attempt, ...] = ()
    reflections: tuple[Reflection, ...] = ()

    @property
    def insight(self) -> str:
        """Text of the last reflection; empty before there is one."""
        return self.reflections[-1].text if self.reflections else ""

    @property
    def tags(self) -> Tags:
        """The tags of all reflections; a bullet is counted once for each reflection that tags it."""
        return tuple(tag for reflection in self.reflections for tag in reflection.tags)

    @property
    def current_playbook(self) -> Playbook:
        """The playbook that the next attempt is given: the first one's, with the sample's own tags counted."""
        return self.playbook.tagged(self.tags)


@dataclass(frozen=True, slots=True)
class Lesson:
    """Operations that a curator wrote for version ``seen`` of the playbook, and what could not be read of its reply."""

    operations: tuple[Operation, ...]
    seen: int
    problems: tuple[Problem, ...] = ()


class Learner:
    """Runs the program with playbooks, and the modules that reflect and curate.

    Parts of a reply that cannot be used become problems, not errors. Only a request that the provider does not answer
    raises.
    """

    def __init__(
        self,
        run: DspyRun,
        settings: AceSettings,
        modules: Mapping[str, tuple[Module, Any]],
        student: Module,
        names: Sequence[str],
        valset: Sequence[Any],
    ) -> None:
        self._run = run
        self._settings, self._modules = settings, modules
        predictors: list[tuple[str, Any]] = student.named_predictors()
        self._instructions = {name: predictor.signature.instructions for name, predictor in predictors if name in names}
        field_names = {name for _, predictor in predictors for name in predictor.signature.fields}
        numbered = (CITATIONS + (f"_{n + 1}" if n else "") for n in range(len(field_names) + 1))
        self._citations = next(name for name in numbered if name not in field_names)
        options: dict[str, Any] = {"failure_score": settings.failure_score, "metric_lock": settings.metric_lock}
        self._training = run.runner(_citing(student, names, self._citations), settings.metric, **options)
        self._plain = run.runner(student, settings.metric, **options)
        self._valset = valset
        self._warned: set[str] = set()

    def candidate(self, text: str) -> dict[str, str]:
        """Return the program's instructions with the text of a playbook, as a candidate of the engine."""
        return {name: attached(own, text) for name, own in self._instructions.items()}

    def playbook_of(self, candidate: Mapping[str, str], version: int) -> Playbook:
        """Return the playbook in the instructions of a candidate."""
        sections = tuple(self._settings.sections)
        playbook = Playbook.from_instructions(next(iter(candidate.values())), sections)
        return replace(playbook or Playbook(sections=sections), version=version)

    async def attempt(self, step: Step, sample: Sample) -> Attempt:
        """Run the program with the sample's playbook and its last reflection.

        Raises:
            StepEnded: the budget cannot pay another attempt, because calls in flight at a crash count as spent.
        """
        run, text, advice = self._run, sample.current_playbook.render(), sample.insight
        if advice:
            text = f"{text}\n\nWhat was learnt from an earlier attempt at this task:\n{advice}".strip()
        candidate = self.candidate(text)
        # An attempt is named after its sample's first playbook; what it was shown since stands beside the example.
        name = hash_of(self.candidate(sample.playbook.render()))
        example = (sample.index, step.number, len(sample.attempts), hash_of({"shown": text})[:8])
        if not step.reservation.cover(run.store.count_missing(step.number, name, "train", [example], needs_trace=True)):
            raise StepEnded(EndKind.CANCELLED, "the budget does not pay its next attempt")
        rollout = await run.rollout("rollout", step, self._training, candidate, sample.example, example, name=name)
        has_labels = isinstance(sample.example, dspy.Example) and not self._settings.no_ground_truth
        labels = dict(sample.example.labels()) if has_labels else {}
        return _attempt_of(rollout, sample.playbook, labels, self._citations)

    async def reflect(self, step: Step, sample: Sample) -> Reflection:
        """Ask the reflector about the last attempt."""
        attempt, playbook = sample.attempts[-1], sample.current_playbook
        cited = [playbook.get(bullet_id) for bullet_id in attempt.cited]
        reply, _, problems = await self._ask(
            "reflect",
            step,
            str(len(sample.reflections)),
            playbook.version,
            task=_shown(_inputs(sample.example)),
            attempt=attempt.steps,
            feedback=attempt.feedback,
            cited_bullets="\n".join(line_of(bullet) for bullet in cited if bullet is not None) or EMPTY,
        )
        parts = {"What went wrong": "what_went_wrong", "Right approach": "right_approach", "Insight": "insight"}
        parts = {title: str(getattr(reply, name, "") or "").strip() for title, name in parts.items()}
        text = "\n".join(f"{title}: {text}" for title, text in parts.items() if text)
        tags, unread = parse_tags(getattr(reply, "bullet_tags", ""))
        uncited = [
            Problem("tag of an uncited bullet", bullet_id) for bullet_id, _ in tags if bullet_id not in attempt.cited
        ]
        empty = [] if text else [Problem("empty reflection")]
        return Reflection(
            text=text,
            tags=tuple((bullet_id, tag) for bullet_id, tag in tags if bullet_id in attempt.cited),
            problems=(*problems, *unread, *uncited, *empty),
        )

    async def curate(self, step: Step, sample: Sample, playbook: Playbook) -> Lesson:
        """Ask the curator how the last reflection is to change a playbook."""
        reply, seen, problems = await self._ask(
            "curate",
            step,
            "0",
            playbook.version,
            playbook=playbook.render() or EMPTY,
            sections=", ".join(playbook.sections),
            progress=self._progress(sample, playbook),
            task=_shown(_inputs(sample.example)),
            reflection=sample.insight,
        )
        operations, unread = parse_operations(getattr(reply, "operations", ""))
        return Lesson(tuple(operations), seen, (*problems, *unread))

    def _progress(self, sample: Sample, playbook: Playbook) -> str:
        """Say how far the run is, how full the playbook is, and how its bullets have done."""
        settings, bullets = self._settings, playbook.bullets
        harmful = sum(0 < bullet.harmful >= bullet.helpful for bullet in bullets)
        unused = sum(not bullet.helpful + bullet.harmful for bullet in bullets)
        return (
            f"Sample {sample.place} of {sample.total or 'a stream'}. "
            f"The playbook has {playbook.tokens(settings.count_tokens)} of {settings.token_budget} tokens and "
            f"{len(bullets)} bullets: {harmful} have harmed at least as often as they helped, {unused} did neither."
        )

    async def validate(self, step: Step, playbook: Playbook, reservation: Reservation) -> list[float]:
        """Return the scores of the program with a playbook on the validation set, paid by a reservation."""
        candidate = self.candidate(playbook.render())
        rollouts = await self._run.evaluate(
            "evaluate", step, self._plain, candidate, self._valset, reservation=reservation
        )
        return [rollout.score for rollout in rollouts]

    async def _ask(
        self, stage: str, step: Step, position: str, version: int, **inputs: str
    ) -> tuple[Any, int, list[Problem]]:
        """Return the reply of a stage's module, the playbook's version that it was written for, and its problems.

        The version is part of the journal's record: a run that goes on reads the reply with the version of that time. A
        module that raises is a problem and not an error, and its reply is empty.
        """
        module, lm = self._modules[stage]
        asked = await self._run.call_module(
            stage, step, module, inputs, lm=lm, read=lambda reply: (version, reply), record=ReplyText(position)
        )
        if asked.answer is None:
            message = f"{type(asked.error).__name__}: {asked.error}"[:200]
            if stage not in self._warned:
                self._warned.add(stage)
                logger.warning("AsyncACE: %s failed, which is counted and not fatal: %s", stage, message)
            return dspy.Prediction(), version, [Problem(f"{stage} failed", message)]
        seen, reply = asked.answer
        unreadable = getattr(reply, "unreadable", "")
        problems = [Problem("unreadable reply", f"{stage}: {unreadable}"[:200])] if unreadable else []
        return reply, seen, problems


def with_playbook(student: Module, names: Sequence[str], playbook: Playbook) -> Module:
    """Return a copy of a program with a playbook in the instructions of these predictors, and as an attribute."""
    program: Any = copy_of(student)
    predictors: list[tuple[str, Any]] = program.named_predictors()
    for name, predictor in predictors:
        if name in names:
            text = attached(predictor.signature.instructions, playbook.render())
            predictor.signature = predictor.signature.with_instructions(text)
    is_free = isinstance(getattr(program, "playbook", None), Playbook | None)
    setattr(program, "playbook" if is_free else "ace_playbook", playbook)
    return program


def playbook_in(student: Module, names: Sequence[str], sections: Sequence[str]) -> Playbook:
    """Return the playbook in the instructions of a student's predictors; an empty one where they have none."""
    predictors: list[tuple[str, Any]] = student.named_predictors()
    texts: list[str] = [predictor.signature.instructions for name, predictor in predictors if name in names]
    playbooks = (Playbook.from_instructions(text, sections) for text in texts)
    return next((held for held in playbooks if held is not None), Playbook(sections=tuple(sections)))


def _citing(student: Module, names: Sequence[str], citations: str) -> Module:
    """Return a copy of a program whose predictors name the bullets that they used, in one more output field."""
    program = copy_of(student)
    predictors: list[tuple[str, Any]] = program.named_predictors()
    for name, predictor in predictors:
        if name in names:
            field = dspy.OutputField(desc=CITATIONS_DESCRIPTION, default="")
            predictor.signature = predictor.signature.append(citations, field, str)
    return program


def _attempt_of(rollout: Rollout, playbook: Playbook, labels: Mapping[str, Any], citations: str) -> Attempt:
    trajectory: Any = rollout.trajectory
    if trajectory is None:
        failure = rollout.error or "The program failed and gave no output."
        return Attempt(rollout.score, _cut(failure), _feedback(rollout.score, None, labels))
    steps: list[str] = []
    cited: list[str] = []
    for number, (_, _, outputs) in enumerate(trajectory["trace"], start=1):
        values = dict(outputs) if isinstance(outputs, dspy.Prediction) else {"output": str(outputs)}
        cited.append(str(values.pop(citations, "")))
        steps.append(f"Step {number}\n{_shown(values)}")
    feedback = _feedback(rollout.score, getattr(trajectory["score"], "feedback", None), labels)
    return Attempt(rollout.score, "\n\n".join(steps), feedback, playbook.cited("\n".join(cited)))


def _feedback(score: float, metric_feedback: Any, labels: Mapping[str, Any]) -> str:
    """Return the score with the metric's feedback; where it gives none, with the example's labels."""
    if metric_feedback:
        return f"Score: {score:g}. {metric_feedback}"
    return f"Score: {score:g}." + (f" Expected:\n{_shown(labels)}" if labels else "")


def _inputs(example: Any) -> dict[str, Any]:
    return dict(example.inputs()) if isinstance(example, dspy.Example) else {"input": example}


def _shown(values: Mapping[str, Any]) -> str:
    return "\n".join(f"{name}: {_cut(str(value))}" for name, value in values.items())


def _cut(text: str) -> str:
    rest = len(text) - MOST_CHARACTERS
    return text if rest <= 0 else f"{text[:MOST_CHARACTERS]}\n({rest} more characters.)"
