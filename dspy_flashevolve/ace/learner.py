"""AsyncACE's program and language models, as ACE's stages see them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dspy
from dspy.primitives.module import Module

from dspy_flashevolve.ace.operations import Add, Problem, parse_operations, parse_tags
from dspy_flashevolve.ace.payloads import Attempt, Curated, Reflection, Sample
from dspy_flashevolve.ace.playbook import Bullet, Playbook
from dspy_flashevolve.ace.reconciling import decided
from dspy_flashevolve.ace.similarity import EmbeddingTwins
from dspy_flashevolve.ace.text import CountTokens, attached
from dspy_flashevolve.engine.budget import Reservation
from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.errors import FlashEvolveError
from dspy_flashevolve.engine.flights import Rollout
from dspy_flashevolve.engine.gathering import gather
from dspy_flashevolve.programs.copies import isolated_copy
from dspy_flashevolve.programs.runner import ProgramRunner
from dspy_flashevolve.workbench import Workbench

logger = logging.getLogger(__name__)

CITATIONS = "cited_bullets"
"""The output field that a program in training has beside its own; numbered where it has one of that name."""
CITING = "Ids of the playbook's bullets that you used, separated by commas; empty if none."
MOST_CHARACTERS = 6000
"""Of a field that is shown to a reflector; the rest is cut off."""
EMPTY = "(empty)"


def instructions_of(student: Module, names: Sequence[str]) -> dict[str, str]:
    """Predictor -> its instructions."""
    predictors: list[tuple[str, Any]] = student.named_predictors()
    return {name: one.signature.instructions for name, one in predictors if name in names}


def with_playbook(student: Module, names: Sequence[str], playbook: Playbook) -> Module:
    """A copy of a program whose predictors of these names have a playbook in their instructions."""
    program = student.deepcopy()
    predictors: list[tuple[str, Any]] = program.named_predictors()
    for name, predictor in predictors:
        if name in names:
            text = attached(predictor.signature.instructions, playbook.render())
            predictor.signature = predictor.signature.with_instructions(text)
    return program


class DspyLearner:
    """Runs the program with playbooks, and the modules that reflect, curate and reconcile.

    Args:
        bench: the run.
        student: the program; it is not changed.
        names: the predictors that get the playbook.
        metric, failure_score, metric_lock: see :meth:`Workbench.runner`.
        valset: what playbooks are scored on.
        modules: "reflect", "curate" and "reconcile" -> the module and its LM.
        token_budget, count_tokens: what the curator is told of.
        twins: tells by embeddings whether texts say the same; None without.
    """

    def __init__(
        self,
        bench: Workbench,
        student: Module,
        names: Sequence[str],
        metric: Callable[..., Any],
        failure_score: float,
        metric_lock: bool,
        valset: Sequence[Any],
        modules: Mapping[str, tuple[Module, Any]],
        token_budget: int,
        count_tokens: CountTokens,
        twins: EmbeddingTwins | None,
    ) -> None:
        self._bench = bench
        self._instructions = instructions_of(student, names)
        self._citations = _free_name(student)
        self._training = bench.runner(
            _citing(student, names, self._citations), metric, failure_score=failure_score, metric_lock=metric_lock
        )
        self._plain = bench.runner(student, metric, failure_score=failure_score, metric_lock=metric_lock)
        self._valset = valset
        self._modules = modules
        self._token_budget = token_budget
        self._count_tokens = count_tokens
        self._twins = twins
        self._told: set[str] = set()
        self.reservations: Mapping[int, Reservation] = {}
        """Ticket -> what pays for its rollouts."""

    async def attempt(self, claim: Claim, sample: Sample, advice: str) -> Attempt:
        """See :class:`~dspy_flashevolve.ace.payloads.Learner`."""
        added = f"What was learnt from an earlier attempt at this task:\n{advice}" if advice else ""
        key = ("train", claim.ticket, len(sample.attempts))
        pays = self.reservations[claim.ticket]
        rollout = await self._rollout(claim, pays, self._training, sample.playbook, added, sample.example, key, True)
        return _attempt_of(rollout, sample, self._citations)

    async def reflect(self, claim: Claim, sample: Sample) -> Reflection:
        """See :class:`~dspy_flashevolve.ace.payloads.Learner`."""
        attempt = sample.attempts[-1]
        cited = [sample.playbook.get(one) for one in attempt.cited]
        reply, problems = await self._asked(
            claim,
            task=_shown(_inputs(sample.example)),
            attempt=attempt.steps,
            feedback=attempt.feedback,
            cited_bullets=_listed([one for one in cited if one is not None]),
        )
        tags, unread = parse_tags(getattr(reply, "bullet_tags", ""))
        uncited = [Problem("tag of an uncited bullet", one) for one, _ in tags if one not in attempt.cited]
        return Reflection(
            text=_insight(reply),
            tags=tuple((one, tag) for one, tag in tags if one in attempt.cited),
            problems=(*problems, *unread, *uncited),
        )

    async def curate(self, claim: Claim, sample: Sample, playbook: Playbook) -> Curated:
        """See :class:`~dspy_flashevolve.ace.payloads.Learner`."""
        reply, problems = await self._asked(
            claim,
            playbook=playbook.render(counters=True) or EMPTY,
            sections=", ".join(playbook.sections),
            token_budget=f"{playbook.tokens(self._count_tokens)} of {self._token_budget}",
            task=_shown(_inputs(sample.example)),
            reflection=_with_outcome(sample),
        )
        operations, unread = parse_operations(getattr(reply, "operations", ""))
        return Curated(tuple(operations), (*problems, *unread))

    async def reconcile(self, claim: Claim, additions: list[Add], newer: list[Bullet]) -> Curated:
        """See :class:`~dspy_flashevolve.ace.payloads.Learner`."""
        numbered = [f"{number}. {one.content}" for number, one in enumerate(additions, start=1)]
        reply, problems = await self._asked(claim, additions="\n".join(numbered), newer_bullets=_listed(newer))
        operations, unread = decided(additions, newer, getattr(reply, "decisions", ""))
        return Curated(tuple(operations), (*problems, *unread))

    async def validate(self, claim: Claim, playbook: Playbook, pays: Reservation) -> float:
        """The mean score of the program with a playbook on the validation set.

        Args:
            pays: for a rollout an example.

        Raises:
            RolloutUnresolvedError: the provider gave no answer for an example.
        """

        async def one(index: int) -> float:
            key, example = ("val", index), self._valset[index]
            rollout = await self._rollout(claim, pays, self._plain, playbook, "", example, key, False)
            return rollout.score

        scores = await gather([lambda index=index: one(index) for index in range(len(self._valset))])
        return sum(scores) / len(scores)

    async def prepare(self, texts: list[str]) -> list[Problem]:
        """See :class:`~dspy_flashevolve.ace.payloads.Learner`."""
        if self._twins is None:
            return []
        try:
            await self._bench.threads.run(self._twins.prepare, texts)
        except Exception as error:
            return [self._failed("embedder", error)]
        return []

    async def _rollout(
        self,
        claim: Claim,
        pays: Reservation,
        runner: ProgramRunner,
        playbook: Playbook,
        added: str,
        example: Any,
        key: Any,
        traced: bool,
    ) -> Rollout:
        text = "\n\n".join(part for part in (playbook.render(), added) if part)
        candidate = {name: attached(own, text) for name, own in self._instructions.items()}
        return await self._bench.rollout(claim, pays, runner, candidate, example, key, capture_traces=traced)

    async def _asked(self, claim: Claim, **inputs: str) -> tuple[Any, list[Problem]]:
        """What the module of a stage replies; a module that raises says nothing, which is a problem and no error."""
        module, lm = self._modules[claim.stage]
        try:
            reply = await self._bench.ask(claim, module, lm=lm, **inputs)
        except FlashEvolveError:
            raise
        except Exception as error:
            return dspy.Prediction(), [self._failed(claim.stage, error)]
        unreadable = getattr(reply, "unreadable", "")
        return reply, [Problem("unreadable reply", f"{claim.stage}: {unreadable}"[:200])] if unreadable else []

    def _failed(self, what: str, error: Exception) -> Problem:
        """Counted each time; told once."""
        said = f"{type(error).__name__}: {error}"[:200]
        if what not in self._told:
            self._told.add(what)
            logger.warning("AsyncACE: %s failed, which is counted and not fatal: %s", what, said)
        return Problem(f"{what} failed", said)


def _free_name(student: Module) -> str:
    """A name of the field for citations that no predictor has a field of."""
    predictors: list[Any] = student.predictors()
    taken = {name for one in predictors for name in one.signature.fields}
    return next(name for n in range(len(taken) + 1) if (name := CITATIONS + (f"_{n + 1}" if n else "")) not in taken)


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
    for number, (_, inputs, outputs) in enumerate(trajectory["trace"], start=1):
        del inputs
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


def _insight(reply: Any) -> str:
    parts = {"What went wrong": "what_went_wrong", "Right approach": "right_approach", "Insight": "insight"}
    said = {title: str(getattr(reply, name, "") or "").strip() for title, name in parts.items()}
    return "\n".join(f"{title}: {text}" for title, text in said.items() if text)


def _with_outcome(sample: Sample) -> str:
    """The last reflection, with what came of it."""
    text, scores = sample.reflections[-1].text, [attempt.score for attempt in sample.attempts]
    if len(scores) == 1:
        return text
    return f"{text}\n(Score before this reflection: {scores[-2]:g}, with it: {scores[-1]:g}.)"
