"""What flows between the stages of ACE, and what they ask of the program and its language models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from dspy_flashevolve.ace.operations import Add, Operation, Problem
from dspy_flashevolve.ace.playbook import Bullet, Playbook, Tag
from dspy_flashevolve.engine.claims import Claim

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
        window: number of the window that it belongs to; None where there are none.
        attempts: so far, oldest first.
        reflections: one an attempt, but for the last attempt's while it is to come.
        tags: what reflections said of bullets; the last word on each.
        operations: what the curator asks for.
        is_reconciled: stale additions have been read together with the bullets that came between.
    """

    example: Any
    index: int
    playbook: Playbook
    window: int | None = None
    attempts: tuple[Attempt, ...] = ()
    reflections: tuple[Reflection, ...] = ()
    tags: Tags = ()
    operations: tuple[Operation, ...] = ()
    is_reconciled: bool = False


@dataclass(frozen=True, slots=True)
class Curated:
    """A curator's operations, and what of its reply could not be read."""

    operations: tuple[Operation, ...]
    problems: tuple[Problem, ...] = field(default_factory=tuple[Problem, ...])


class Learner(Protocol):
    """The program and the language models, as the stages see them. All raise as the engine's requests do."""

    async def attempt(self, claim: Claim, sample: Sample, advice: str) -> Attempt:
        """Run the program with the sample's playbook, and with advice of a reflection where there is some."""
        ...

    async def reflect(self, claim: Claim, sample: Sample) -> Reflection:
        """Reflect on the last attempt."""
        ...

    async def curate(self, claim: Claim, sample: Sample, playbook: Playbook) -> Curated:
        """Ask what of the last reflection belongs into a playbook."""
        ...

    async def reconcile(self, claim: Claim, additions: list[Add], newer: list[Bullet]) -> Curated:
        """Ask what becomes of additions that were written before some bullets."""
        ...

    async def prepare(self, texts: list[str]) -> list[Problem]:
        """Get ready to tell whether texts say the same; what stands in the way, where they are compared by words."""
        ...
