"""What AsyncACE asks of the program and its language models, and what a sample has brought so far."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dspy
from dspy.primitives.module import Module

from dspy_flashevolve.ace.operations import Operation, parse_operations, parse_tags
from dspy_flashevolve.ace.playbook import Bullet, Playbook, Tag, attached
from dspy_flashevolve.ace.similarity import EmbeddingDuplicates
from dspy_flashevolve.engine.replay import hash_of
from dspy_flashevolve.engine.rollouts import Rollout
from dspy_flashevolve.engine.steps import EndKind, Reservation, Step, StepEnded
from dspy_flashevolve.observe.statistics import Problem
from dspy_flashevolve.programs.copies import isolated_copy
from dspy_flashevolve.programs.program import ProgramRunner
from dspy_flashevolve.programs.records import ReplyText
from dspy_flashevolve.programs.run import DspyRun

logger = logging.getLogger(__name__)

CITATIONS = "cited_bullets"
"""The output field that a program in training has beside its own; numbered where it has one of that name."""
CITING = "Ids of the playbook's bullets that you used, separated by commas; empty if none."
MOST_CHARACTERS = 6000
"""Of a field that is shown to a reflector; the rest is cut off."""
EMPTY = "(empty)"

Tags = tuple[tuple[str, Tag], ...]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of the program on a sample.

    Args:
        score: higher is better.
        steps: what it did, for a reflector.
        feedback: what the metric said.
        cited: ids of bullets that it named, as far as its playbook has them.
    """

    score: float
    steps: str
    feedback: str
    cited: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reflection:
    """What a reflector made of an attempt.

    Args:
        text: what went wrong, the right approach, the insight; empty where nothing could be read.
        tags: (id, tag) for cited bullets.
        problems: what of the reply could not be used.
    """

    text: str
    tags: Tags = ()
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """A training example on its way.

    Args:
        example: the user's.
        index: its place in the data.
        playbook: what the program is given.
        window: number of its window; None where there are none.
        attempts: so far, oldest first.
        reflections: one an attempt, but for the last attempt's while it is to come.
    """

    example: Any
    index: int
    playbook: Playbook
    window: int | None = None
    attempts: tuple[Attempt, ...] = ()
    reflections: tuple[Reflection, ...] = ()

    @property
    def insight(self) -> str:
        """What the last reflection said."""
        return self.reflections[-1].text if self.reflections else ""

    @property
    def tags(self) -> Tags:
        """What reflections said of bullets; the last word on each."""
        found: dict[str, Tag] = {bullet: tag for one in self.reflections for bullet, tag in one.tags}
        return tuple(found.items())


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a sample asks of the playbook.

    Args:
        operations: that its curator asks for.
        seen: the playbook's version for which they were written.
        problems: what could not be read.
    """

    operations: tuple[Operation, ...]
    seen: int
    problems: tuple[Problem, ...] = ()


class Learner:
    """Runs the program with playbooks, and the modules that reflect and curate.

    What a reply says that cannot be used is a problem and no error; only requests that the provider leaves without an
    answer raise.

    Args:
        run: whose slots and journal it uses.
        optimizer: an AsyncACE; only its arguments are read.
        modules: stage -> the module that it asks, and the LM that this asks.
        student: the program; it is not changed.
        names: the predictors that get the playbook.
        valset: what playbooks are scored on.
        duplicates: tells by embeddings whether texts say the same; None without.
    """

    def __init__(
        self,
        run: DspyRun,
        optimizer: Any,
        modules: Mapping[str, tuple[Module, Any]],
        student: Module,
        names: Sequence[str],
        valset: Sequence[Any],
        duplicates: EmbeddingDuplicates | None,
    ) -> None:
        self._run = run
        self._of, self._modules = optimizer, modules
        predictors: list[tuple[str, Any]] = student.named_predictors()
        self._instructions = {name: one.signature.instructions for name, one in predictors if name in names}
        taken = {name for _, one in predictors for name in one.signature.fields}
        numbered = (CITATIONS + (f"_{n + 1}" if n else "") for n in range(len(taken) + 1))
        self._citations = next(name for name in numbered if name not in taken)
        self._training = self._runner(_citing(student, names, self._citations))
        self._plain = self._runner(student)
        self._valset = valset
        self._duplicates = duplicates
        self._told: set[str] = set()

    def _runner(self, program: Module) -> ProgramRunner:
        of = self._of
        return self._run.runner(program, of.metric, failure_score=of.failure_score, metric_lock=of.metric_lock)

    def candidate(self, text: str) -> dict[str, str]:
        """The program's instructions with the text of a playbook."""
        return {name: attached(own, text) for name, own in self._instructions.items()}

    def playbook_of(self, candidate: Mapping[str, str], version: int) -> Playbook:
        """The playbook of a candidate that was kept, without its counters, which no program sees."""
        sections = self._of.sections
        found = Playbook.from_instructions(next(iter(candidate.values())), sections)
        return replace(found or Playbook(sections=sections), version=version)

    async def attempt(self, step: Step, sample: Sample) -> Attempt:
        """Run the program with the sample's playbook, and with what the last reflection said.

        Raises:
            StepEnded: a run that goes on has lost calls of its budget in the crash, and cannot pay another attempt.
        """
        run, text, advice = self._run, sample.playbook.render(), sample.insight
        candidate = self.candidate(text)
        name = hash_of(candidate)  # an attempt is named after its playbook; the advice stands beside the example
        if advice:
            told = f"{text}\n\nWhat was learnt from an earlier attempt at this task:\n{advice}".strip()
            candidate = self.candidate(told)
        example = (sample.index, step.number, len(sample.attempts), hash_of({"advice": advice})[:8])
        if run.journal is not None:
            unpaid = run.journal.missing(step.number, name, "train", [example], needs_trace=True)
            if not step.reservation.cover(unpaid):
                raise StepEnded(EndKind.CANCELLED, "the budget does not pay its next attempt")
        rollout = await run.rollout("rollout", step, self._training, candidate, sample.example, example, name=name)
        return _attempt_of(rollout, sample, self._citations)

    async def reflect(self, step: Step, sample: Sample) -> Reflection:
        """Reflect on the last attempt."""
        attempt = sample.attempts[-1]
        cited = [sample.playbook.get(one) for one in attempt.cited]
        reply, _, problems = await self._asked(
            "reflect",
            step,
            len(sample.reflections),
            sample.playbook.version,
            task=_shown(_inputs(sample.example)),
            attempt=attempt.steps,
            feedback=attempt.feedback,
            cited_bullets=_listed([one for one in cited if one is not None]),
        )
        parts = {"What went wrong": "what_went_wrong", "Right approach": "right_approach", "Insight": "insight"}
        said = {title: str(getattr(reply, name, "") or "").strip() for title, name in parts.items()}
        text = "\n".join(f"{title}: {text}" for title, text in said.items() if text)
        tags, unread = parse_tags(getattr(reply, "bullet_tags", ""))
        uncited = [Problem("tag of an uncited bullet", one) for one, _ in tags if one not in attempt.cited]
        empty = [] if text else [Problem("empty reflection")]
        return Reflection(
            text=text,
            tags=tuple((one, tag) for one, tag in tags if one in attempt.cited),
            problems=(*problems, *unread, *uncited, *empty),
        )

    async def curate(self, step: Step, sample: Sample, playbook: Playbook) -> Lesson:
        """Ask what of the last reflection belongs into a playbook."""
        reflection, scores = sample.insight, [attempt.score for attempt in sample.attempts]
        if len(scores) > 1:
            reflection += f"\n(Score before this reflection: {scores[-2]:g}, with it: {scores[-1]:g}.)"
        reply, seen, problems = await self._asked(
            "curate",
            step,
            0,
            playbook.version,
            playbook=playbook.render(counters=True) or EMPTY,
            sections=", ".join(playbook.sections),
            token_budget=f"{playbook.tokens(self._of.count_tokens)} of {self._of.token_budget}",
            task=_shown(_inputs(sample.example)),
            reflection=reflection,
        )
        operations, unread = parse_operations(getattr(reply, "operations", ""))
        return Lesson(tuple(operations), seen, (*problems, *unread))

    async def validate(self, step: Step, playbook: Playbook, pays: Reservation) -> list[float]:
        """The scores of the program with a playbook on the validation set.

        Args:
            pays: for the rollouts that are not paid yet.

        Raises:
            RolloutUnresolvedError: the provider gave no answer for an example.
        """
        candidate = self.candidate(playbook.render())
        rollouts = await self._run.evaluate("evaluate", step, self._plain, candidate, self._valset, pays=pays)
        return [one.score for one in rollouts]

    async def prepare(self, texts: list[str]) -> list[Problem]:
        """Get ready to tell whether texts say the same; what stands in the way, where they are compared by words."""
        if self._duplicates is None:
            return []
        try:
            await self._run.threads.run(self._duplicates.prepare, texts)
        except Exception as error:
            return [self._failed("embedder", error)]
        return []

    async def _asked(
        self, stage: str, step: Step, position: int, version: int, **inputs: str
    ) -> tuple[Any, int, list[Problem]]:
        """What the module of a stage replies, and the version of the playbook for which it was written.

        A module that raises says nothing, which is a problem and no error.
        """
        module, lm = self._modules[stage]
        asked = await self._run.asked(
            stage, step, module, inputs, lm=lm, read=lambda reply: (version, reply), record=ReplyText(str(position))
        )
        if asked.answer is None:
            return dspy.Prediction(), version, [self._failed(stage, asked.error)]
        seen, reply = asked.answer
        unreadable = getattr(reply, "unreadable", "")
        problems = [Problem("unreadable reply", f"{stage}: {unreadable}"[:200])] if unreadable else []
        return reply, seen, problems

    def _failed(self, what: str, error: Exception | None) -> Problem:
        """Counted each time; told once."""
        said = f"{type(error).__name__}: {error}"[:200]
        if what not in self._told:
            self._told.add(what)
            logger.warning("AsyncACE: %s failed, which is counted and not fatal: %s", what, said)
        return Problem(f"{what} failed", said)


def with_playbook(student: Module, names: Sequence[str], playbook: Playbook) -> Module:
    """A copy of a program that has a playbook: in the instructions of these predictors, and as an attribute."""
    program = student.deepcopy()
    predictors: list[tuple[str, Any]] = program.named_predictors()
    for name, predictor in predictors:
        if name in names:
            text = attached(predictor.signature.instructions, playbook.render())
            predictor.signature = predictor.signature.with_instructions(text)
    setattr(program, _attribute_of(program), playbook)
    return program


def held_playbook(student: Module, names: Sequence[str], sections: Sequence[str]) -> Playbook:
    """The playbook of a student, empty where it has none: the one in its instructions.

    As its attribute has it, where that is the same text, which has counters too.

    Args:
        names: of the predictors that get the playbook.
        sections: that it has beside those of its bullets.
    """
    predictors: list[tuple[str, Any]] = student.named_predictors()
    texts: list[str] = [one.signature.instructions for name, one in predictors if name in names]
    found = (Playbook.from_instructions(text, sections) for text in texts)
    held = next((one for one in found if one is not None), Playbook(sections=tuple(sections)))
    own: Any = getattr(student, _attribute_of(student), None)
    return own if isinstance(own, Playbook) and own.render() == held.render() else held


def _attribute_of(program: Any) -> str:
    """The attribute of a program that has its playbook: ``playbook``, unless the program has another use for that."""
    return "playbook" if isinstance(getattr(program, "playbook", None), Playbook | None) else "ace_playbook"


def _citing(student: Module, names: Sequence[str], citations: str) -> Module:
    """A copy of a program whose predictors say in a field more which bullets they used."""
    program = isolated_copy(student)
    predictors: list[tuple[str, Any]] = program.named_predictors()
    for name, predictor in predictors:
        if name in names:
            field = dspy.OutputField(desc=CITING, default="")
            predictor.signature = predictor.signature.append(citations, field, str)
    return program


def _attempt_of(rollout: Rollout, sample: Sample, citations: str) -> Attempt:
    trajectory: Any = rollout.trajectory
    if trajectory is None:
        failure = rollout.error or "The program failed and gave no output."
        return Attempt(rollout.score, _cut(failure), _feedback(rollout.score, None, sample))
    steps: list[str] = []
    cited: list[str] = []
    for number, (_, _, outputs) in enumerate(trajectory["trace"], start=1):
        values = dict(outputs) if isinstance(outputs, dspy.Prediction) else {"output": str(outputs)}
        cited.append(str(values.pop(citations, "")))
        steps.append(f"Step {number}\n{_shown(values)}")
    feedback = _feedback(rollout.score, getattr(trajectory["score"], "feedback", None), sample)
    return Attempt(rollout.score, "\n\n".join(steps), feedback, sample.playbook.cited("\n".join(cited)))


def _feedback(score: float, said: Any, sample: Sample) -> str:
    """What the metric said; where it says nothing but the score, what the example says of the right result."""
    if said:
        return f"Score: {score:g}. {said}"
    labels = dict(sample.example.labels()) if isinstance(sample.example, dspy.Example) else {}
    return f"Score: {score:g}." + (f" Expected:\n{_shown(labels)}" if labels else "")


def _inputs(example: Any) -> dict[str, Any]:
    return dict(example.inputs()) if isinstance(example, dspy.Example) else {"input": example}


def _shown(values: Mapping[str, Any]) -> str:
    return "\n".join(f"{name}: {_cut(str(value))}" for name, value in values.items())


def _cut(text: str) -> str:
    rest = len(text) - MOST_CHARACTERS
    return text if rest <= 0 else f"{text[:MOST_CHARACTERS]}\n({rest} more characters.)"


def _listed(bullets: Sequence[Bullet]) -> str:
    return "\n".join(f"[{one.id}] {one.content}" for one in bullets) or EMPTY
