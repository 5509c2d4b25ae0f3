"""One rollout in flight: what it gives, what it costs, and what is written down of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import anyio

from dspy_flashevolve.engine.budget import Reservation
from dspy_flashevolve.engine.claims import Claim


@dataclass(frozen=True, slots=True)
class Rollout:
    """One run of a program with a candidate on one example.

    Args:
        output: what the program returned.
        score: higher is better.
        objective_scores: objective name -> score; empty when the metric has one objective.
        trajectory: what reflection reads; None when no trace was asked for or none could be taken.
        tokens: prompt and completion tokens that the LMs reported.
        cost_dollars: of these tokens; 0 where a price is not known.
        error: what the program or its metric raised, as a sentence; empty where neither did.
    """

    output: Any
    score: float
    objective_scores: dict[str, float] = field(default_factory=dict[str, float])
    trajectory: Any = None
    tokens: int = 0
    cost_dollars: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Spent:
    """What a request that is no rollout has cost.

    Args:
        tokens, cost_dollars: see :class:`Rollout`.
        error: why its answer is of no use; empty when it is.
    """

    tokens: int
    cost_dollars: float = 0.0
    error: str = ""


class RolloutLog(Protocol):
    """Where rollouts are written down, so that none is paid twice."""

    async def call_begins(self, claim: Claim) -> int:
        """Write that a metric is about to be called; return the call's number when that is safe."""
        ...

    def call_counts(self, claim: Claim) -> int:
        """Write that a call is counted although no metric was called; return its number."""
        ...

    def call_returned(self, claim: Claim) -> None:
        """Write that a call which had begun is not counted after all."""
        ...

    def finished(self, key: Hashable, claim: Claim, rollout: Rollout, seconds: float, call: int) -> None:
        """Write what a rollout gave."""
        ...


@dataclass
class Flight:
    """A rollout that others may join."""

    landed: anyio.Event
    result: Rollout | None = None


@dataclass
class Run:
    """One run of a rollout: the original of an attempt, or its duplicate, which has a call of its own to spend."""

    key: Hashable
    claim: Claim
    reservation: Reservation
    call: Callable[[], Awaitable[Rollout]]
    attempt: int
    log: RolloutLog | None = None
    spare: Reservation | None = None
    granted_at: float = 0.0
    granted: anyio.Event = field(default_factory=anyio.Event)
    paid: bool = False
    number: int | None = None
    """Of its metric call in the log."""

    async def metric_begins(self) -> None:
        """Its metric is about to be called: that must not be forgotten, whatever comes."""
        if self.log is not None and self.number is None:
            self.number = await self.log.call_begins(self.claim)

    def settle(self) -> None:
        """Count the call of its metric, as the ticket's."""
        if self.spare is not None:
            self.spare.lend(self.reservation, 1)
        self.reservation.settle()
        self.paid = True
        if self.log is not None and self.number is None:
            self.number = self.log.call_counts(self.claim)

    def ended(self) -> None:
        """It is over: where its metric had begun and is not counted, say so."""
        if self.log is not None and self.number is not None and not self.paid:
            self.log.call_returned(self.claim)
            self.number = None

    def extend(self) -> bool:
        """Set a call aside for the next attempt, since this one's is paid; False where the budget has no room."""
        self.paid = not self.reservation.extend(1)
        self.number = None if not self.paid else self.number
        return not self.paid

    def give_back(self) -> None:
        """Nothing is owed for it: refund its call, if it is not paid."""
        if not self.paid and (call := self.reservation.beside(0)) is not None:
            self.reservation.lend(call, 1)
            call.refund()
