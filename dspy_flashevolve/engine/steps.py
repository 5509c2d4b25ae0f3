"""An evolution step: its number, its randomness, what pays for it, and the one way in which it ends."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from dspy_flashevolve.engine.budget import Reservation
from dspy_flashevolve.engine.errors import FlashEvolveError


class EndKind(str, Enum):
    """The one way in which a step ends.

    An integrated step's change lives on in a candidate that another step brings to its end; the reason names it.
    """

    COMMITTED = "committed"
    INTEGRATED = "integrated"
    REJECTED = "rejected"
    DISCARDED = "discarded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class End:
    """How a step ended, and why.

    Args:
        kind: one of the six ways.
        reason: a sentence for people; empty when the kind says it all.
    """

    kind: EndKind
    reason: str = ""


class StepEnded(FlashEvolveError):
    """Ends the step in which it is raised, from any depth; no error of the run."""

    def __init__(self, kind: EndKind, reason: str = "") -> None:
        super().__init__(reason)
        self.end = End(kind, reason)


class NothingToDoError(FlashEvolveError):
    """Raised by a step that finds nothing to work on: it never was, and no further one is opened."""


@dataclass(eq=False)
class Step:
    """One evolution step, from its selection to its end.

    Args:
        number: from 0, without gaps, in the order of selection.
        rng: the step's own source of randomness; no other step draws from it, so that what a step decides does not
            depend on how steps interleave.
        reservation: pays for its rollouts.
        recorded: what the journal has of its selection, where it runs again after an interruption; else None.
    """

    number: int
    rng: random.Random = field(repr=False)
    reservation: Reservation = field(repr=False)
    recorded: Any = None
    version: int = field(default=0, init=False)
    """The pool's version (count of commits) that it saw."""
    value: float = field(default=0.0, init=False)
    """What it is thought to reach, in score; where slots are scarce, more goes first."""
    has_begun: bool = field(default=False, init=False)
    """It has selected what it works on."""
    is_working: bool = field(default=True, init=False)
    """It works towards a child; else it only waits for an evaluation, or for other steps."""
    rests: bool = field(default=False, init=False)
    """It waits for other steps, or for the end of the run, and needs no room meanwhile."""
    has_asked: bool = field(default=False, init=False)
    """It has made a request."""

    def saw(self, version: int, value: float | None = None) -> None:
        """It works on what the pool had at ``version`` from now on, and is thought to reach ``value``."""
        self.version = version
        self.value = self.value if value is None else value


def rng_of(number: int, seed: object) -> random.Random:
    """A step's randomness: it follows from the run's seed and the step's number alone.

    >>> rng_of(3, seed=0).random() == rng_of(3, seed=0).random()
    True
    """
    return random.Random(f"{seed}/{number}")
