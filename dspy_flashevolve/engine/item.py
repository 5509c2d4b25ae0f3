"""What flows through the stages: frozen records."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

P = TypeVar("P")


class EndKind(str, Enum):
    """The one way in which a ticket ends.

    An integrated ticket's change lives on in a head, which another ticket carries; the reason names it.
    """

    COMMITTED = "committed"
    INTEGRATED = "integrated"
    REJECTED = "rejected"
    DISCARDED = "discarded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class End:
    """How a ticket ended, and why.

    Args:
        kind: one of the six ways.
        reason: a sentence for people; empty when the kind says it all.
    """

    kind: EndKind
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ticket:
    """One evolution step, from its selection to its end.

    Args:
        number: from 0, without gaps, in the order of admission.
        rng: the ticket's own source of randomness; no other ticket draws from it, so that what a
            ticket decides does not depend on how tickets interleave.
    """

    number: int
    rng: random.Random = field(compare=False, repr=False)

    @classmethod
    def create(cls, number: int, seed: int | None) -> Ticket:
        """A ticket whose randomness follows from the run's seed and its own number alone.

        >>> Ticket.create(3, seed=0).rng.random() == Ticket.create(3, seed=0).rng.random()
        True
        """
        return cls(number, random.Random(f"{seed}/{number}"))


@dataclass(frozen=True, slots=True)
class Item(Generic[P]):
    """A unit of work in a stage's queue.

    Args:
        payload: what the stage works on; the engine does not look inside.
        ticket: the evolution step that it belongs to.
        version: the pool's version (count of commits) that the ticket saw.
        value: what finishing it is thought to be worth; higher goes first among equals.
    """

    payload: P
    ticket: Ticket
    version: int
    value: float = 0.0
