"""Requests in flight: a slot for each, retries outside the slot, one flight for equal rollouts."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio

from dspy_flashevolve.engine.budget import Reservation
from dspy_flashevolve.engine.errors import ConfigurationError, RolloutUnresolvedError, TransientError
from dspy_flashevolve.engine.events import EventBus, RolloutFinished
from dspy_flashevolve.engine.slots import Claim, Slots

T = TypeVar("T")


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
    """

    output: Any
    score: float
    objective_scores: dict[str, float] = field(default_factory=dict[str, float])
    trajectory: Any = None
    tokens: int = 0
    cost_dollars: float = 0.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with full jitter.

    Args:
        attempts: requests in all, at least 1.
        first_seconds: the longest first wait.
        most_seconds: the longest wait, unless the provider's Retry-After is longer.

    Raises:
        ConfigurationError: attempts under 1.
    """

    attempts: int = 6
    first_seconds: float = 1.0
    most_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigurationError(f"retries: attempts is {self.attempts}, expected at least 1.")

    def wait_seconds(self, attempt: int, retry_after_seconds: float | None, chance: float) -> float:
        """How long to wait after failed attempt number ``attempt`` (from 0).

        Args:
            chance: a draw from [0, 1); spreads out requests that failed together.

        >>> RetryPolicy().wait_seconds(2, None, chance=0.5)
        2.0
        >>> RetryPolicy().wait_seconds(0, 10.0, chance=0.5)
        10.5
        """
        backoff = min(self.most_seconds, self.first_seconds * 2**attempt) * chance
        return backoff if retry_after_seconds is None else retry_after_seconds + self.first_seconds * chance


@dataclass
class _Flight:
    landed: anyio.Event
    result: Rollout | None = None


class Rollouts:
    """Runs requests in the run's slots.

    Args:
        slots: shared by the whole run.
        bus: gets a :class:`RolloutFinished` for each rollout that was paid.
        clock: seconds.
        retry: what happens on a :class:`TransientError`.
        single_flight: two tickets that need the same rollout at the same time share it.
        rng: jitter.
    """

    def __init__(
        self,
        slots: Slots,
        bus: EventBus,
        clock: Callable[[], float] = time.monotonic,
        retry: RetryPolicy | None = None,
        single_flight: bool = True,
        rng: random.Random | None = None,
    ) -> None:
        self._slots = slots
        self._bus = bus
        self._clock = clock
        self._retry = retry or RetryPolicy()
        self._single_flight = single_flight
        self._rng = rng or random.Random()
        self._flights: dict[Hashable, _Flight] = {}
        self.shared = 0
        self.retried = 0
        self.on_retry: Callable[[Claim, TransientError], None] = lambda claim, error: None
        """Called each time a request is made again."""

    async def request(self, claim: Claim, call: Callable[[], Awaitable[T]]) -> T:
        """Make one request in a slot; wait between retries without one.

        Raises:
            RolloutUnresolvedError: every attempt ended in a :class:`TransientError`.
        """
        attempts = 0
        while True:
            try:
                async with self._slots.hold(claim):
                    return await call()
            except TransientError as error:
                attempts += error.attempts
                if attempts >= self._retry.attempts:
                    raise RolloutUnresolvedError(f"no answer after {attempts} attempts: {error}") from error
                self.retried += 1
                self.on_retry(claim, error)
                wait = self._retry.wait_seconds(attempts - 1, error.retry_after_seconds, self._rng.random())
            await anyio.sleep(wait)

    async def rollout(
        self,
        key: Hashable,
        claim: Claim,
        reservation: Reservation,
        call: Callable[[], Awaitable[Rollout]],
    ) -> tuple[Rollout, bool]:
        """Run one rollout, or join an equal one that is in flight.

        Args:
            key: equal keys mean the same rollout.
            claim: who asks.
            reservation: pays for it, unless it is joined.
            call: runs it.

        Returns:
            The rollout, and whether it was paid here.

        Raises:
            RolloutUnresolvedError: the provider gave no answer.
        """
        while self._single_flight and (flight := self._flights.get(key)):
            await flight.landed.wait()
            if flight.result is not None:
                self.shared += 1
                return flight.result, False
            # The one who flew was cancelled or got no answer: fly again.
        flight = _Flight(anyio.Event())
        if self._single_flight:
            self._flights[key] = flight
        try:
            flight.result = await self._paid(claim, reservation, call)
        finally:
            if self._flights.get(key) is flight:
                del self._flights[key]
            flight.landed.set()
        return flight.result, True

    async def _paid(self, claim: Claim, reservation: Reservation, call: Callable[[], Awaitable[Rollout]]) -> Rollout:
        granted_at = 0.0

        async def timed() -> Rollout:
            nonlocal granted_at
            granted_at = self._clock()
            return await call()

        rollout = await self.request(claim, timed)
        reservation.settle()
        now = self._clock()
        cost = rollout.cost_dollars
        self._bus.emit(
            RolloutFinished(now, claim.ticket, claim.stage, rollout.score, now - granted_at, rollout.tokens, cost)
        )
        return rollout
