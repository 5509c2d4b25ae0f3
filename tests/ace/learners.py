"""A learner in the process and the stages around it: ACE step by step, without a program or a language model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from dspy_flashevolve.ace.applying import PlaybookWriter
from dspy_flashevolve.ace.learner import Attempt, Learner, Reflection, Sample, Tags
from dspy_flashevolve.ace.operations import Add, Operation, Problem
from dspy_flashevolve.ace.playbook import Bullet, Playbook
from dspy_flashevolve.ace.run import AceStages
from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.events import Event
from dspy_flashevolve.engine.item import Item, Ticket
from dspy_flashevolve.engine.stages import Finish, Forward
from dspy_flashevolve.engine.staleness import Full, GapHistogram, StalenessPolicy


class ScriptedLearner(Learner):
    """Says what it is told to say; remembers what it was asked."""

    def __init__(self) -> None:  # pyright: ignore[reportMissingSuperCall]
        self.scores: Callable[[int], float] = lambda attempt: 0.0
        self.text = "an insight"
        self.tags: Tags = ()
        self.operations: tuple[Operation, ...] = ()
        self.reconciled: tuple[Operation, ...] = ()
        self.asked: list[tuple[Any, ...]] = []
        self.meanwhile: Callable[[], None] = lambda: None

    async def attempt(self, claim: Claim, sample: Sample, advice: str) -> Attempt:
        self.asked.append(("attempt", advice))
        return Attempt(self.scores(len(sample.attempts)), "steps", "feedback", ("oth-1",))

    async def reflect(self, claim: Claim, sample: Sample) -> Reflection:
        self.asked.append(("reflect", len(sample.attempts)))
        return Reflection(self.text, self.tags, (Problem("unknown tag", "x"),))

    async def curate(self, claim: Claim, sample: Sample, playbook: Playbook) -> tuple[list[Operation], list[Problem]]:
        self.asked.append(("curate", playbook.version))
        self.meanwhile()
        return list(self.operations), [Problem("unknown operation", "x")]

    async def reconcile(
        self, claim: Claim, additions: list[Add], newer: list[Bullet]
    ) -> tuple[list[Operation], list[Problem]]:
        self.asked.append(("reconcile", [one.content for one in additions], [one.id for one in newer]))
        self.meanwhile()
        return list(self.reconciled), []

    async def prepare(self, texts: list[str]) -> list[Problem]:
        self.asked.append(("prepare", sorted(texts)))
        return []


class Workshop:
    """The stages over a scripted learner; an item is walked through them step by step."""

    def __init__(
        self, playbook: Playbook, policy: StalenessPolicy | None = None, max_rounds: int = 3, token_budget: int = 10_000
    ) -> None:
        self.learner = ScriptedLearner()
        self.writer = PlaybookWriter(playbook, token_budget)
        self.events: list[Event] = []
        self.first_attempts: list[Sample] = []
        self.applications = 0
        self.stages = AceStages(
            learner=self.learner,
            writer=self.writer,
            policy=policy or Full(looks=("before_commit",)),
            perfect_score=1.0,
            max_rounds=max_rounds,
            claim=lambda item, stage: Claim(item.ticket.number, stage, 1),
            attempted=self.first_attempts.append,
            applied=self._applied,
            emit=self.events.append,
            clock=lambda: 0.0,
            gaps=GapHistogram(),
        )

    async def _applied(self) -> None:
        self.applications += 1

    def sample(self, number: int = 0) -> Item[Sample]:
        """A sample as the source would open it."""
        playbook = self.writer.playbook
        return Item(Sample(f"example {number}", number, playbook), Ticket(number, random.Random(0)), playbook.version)

    async def walk(self, item: Item[Sample], stage: str = "rollout") -> tuple[list[str], Finish]:
        """The stages that an item passes, and its end."""
        passed: list[str] = []
        handlers = self.stages.handlers()
        while True:
            passed.append(stage)
            outcome = await handlers[stage](item)
            if isinstance(outcome, Finish):
                return passed, outcome
            assert isinstance(outcome, Forward)
            version = item.version if outcome.version is None else outcome.version
            stage, item = outcome.stage, Item(outcome.payload, item.ticket, version)
