"""Requests in flight: a slot for each, retries outside the slot, one flight for equal rollouts.

A rollout may be bounded in time and duplicated (:mod:`dspy_flashevolve.engine.stragglers`). Other requests (a
reflection, an integration) may not: they take many times as long as a rollout, and the LM's own timeout bounds them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar

import anyio

from dspy_flashevolve.engine.budget import Reservation
from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.errors import ConfigurationError, RolloutUnresolvedError, TransientError
from dspy_flashevolve.engine.events import (
    EventBus,
    RequestFinished,
    RolloutDuplicated,
    RolloutFinished,
    RolloutTimedOut,
)
from dspy_flashevolve.engine.flights import Flight, Rollout, RolloutLog, Run, Spent
from dspy_flashevolve.engine.leases import current_lease
from dspy_flashevolve.engine.retries import RetryPolicy
from dspy_flashevolve.engine.slots import Slots
from dspy_flashevolve.engine.stragglers import Duplicates, MetricCall, Stragglers, first_answer

T = TypeVar("T")


class Rollouts:
    """Runs requests in the run's slots.

    Args:
        slots: shared by the whole run.
        bus: gets a :class:`RolloutFinished` for each rollout that was answered and paid, a :class:`RolloutTimedOut` and
            a :class:`RolloutDuplicated` for each that was given up or begun a second time.
        clock: seconds.
        retry: what happens on a :class:`TransientError`.
        single_flight: two tickets that need the same rollout at the same time share it.
        rng: jitter.
        timeout_seconds: a run of a rollout that takes longer, from the grant of its slot, is cancelled and counts as a
            :class:`TransientError`. The time in which it has given its slot back, since its provider said when to come
            back, does not count. Code that runs in a thread cannot be cancelled: a program there is left behind, and
            a metric there, which is the end of a rollout, is waited for. None for no bound.
        duplicates: when a rollout is begun a second time; None never does.

    Raises:
        ConfigurationError: a timeout that is not above 0.
    """

    def __init__(
        self,
        slots: Slots,
        bus: EventBus,
        clock: Callable[[], float] = time.monotonic,
        retry: RetryPolicy | None = None,
        single_flight: bool = True,
        rng: random.Random | None = None,
        timeout_seconds: float | None = None,
        duplicates: Duplicates | None = None,
    ) -> None:
        if timeout_seconds is not None and not timeout_seconds > 0:
            raise ConfigurationError(
                f"rollouts: timeout_seconds is {timeout_seconds!r}, expected a number above 0, or None."
            )
        self._slots = slots
        self._bus = bus
        self._clock = clock
        self._retry = retry or RetryPolicy()
        self._single_flight = single_flight
        self._rng = rng or random.Random()
        self._flights: dict[Hashable, Flight] = {}
        self._timeout_seconds = timeout_seconds
        self._stragglers = None if duplicates is None else Stragglers(duplicates, clock)
        self.shared = 0
        """Rollouts that were joined instead of run."""
        self.retried = 0
        """Requests that were tried again."""
        self.timed_out = 0
        """Runs of rollouts that were given up."""
        self.duplicated = 0
        """Rollouts that were begun a second time."""
        self.log: RolloutLog | None = None
        """Where rollouts are written down; None for nowhere."""
        self.on_retry: Callable[[Claim, TransientError], None] = lambda claim, error: None
        """Called each time a request is made again."""

    async def request(
        self, claim: Claim, call: Callable[[], Awaitable[T]], spent: Callable[[T], Spent] | None = None
    ) -> T:
        """Make one request in a slot; wait between retries without one.

        Args:
            spent: what it has cost, for a :class:`RequestFinished`; None for no event.

        Raises:
            RolloutUnresolvedError: every attempt ended in a :class:`TransientError`.
        """

        async def once(attempt: int) -> T:
            del attempt
            async with self._slots.hold(claim):
                began = self._clock()
                answer = await call()
                if spent is not None:
                    self._finished(claim, self._clock() - began, spent(answer))
                return answer

        return await self._retried(claim, once)

    def _finished(self, claim: Claim, seconds: float, spent: Spent) -> None:
        request = (claim.ticket, claim.stage, seconds, spent.tokens, spent.cost_dollars, spent.error)
        self._bus.emit(RequestFinished(self._clock(), *request))

    async def _retried(self, claim: Claim, once: Callable[[int], Awaitable[T]]) -> T:
        """Call ``once`` with the number of the attempt, from 0, until it does not fail transiently."""
        attempts = 0
        while True:
            try:
                return await once(attempts)
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
        flight = Flight(anyio.Event())
        if self._single_flight:
            self._flights[key] = flight
        try:
            flight.result = await self._paid(key, claim, reservation, call)
        finally:
            if self._flights.get(key) is flight:
                del self._flights[key]
            flight.landed.set()
        return flight.result, True

    async def _paid(
        self, key: Hashable, claim: Claim, reservation: Reservation, call: Callable[[], Awaitable[Rollout]]
    ) -> Rollout:
        """Run a rollout until it is answered; the calls of its metric are settled."""

        async def once(attempt: int) -> Rollout:
            flight = Run(key, claim, reservation, call, attempt + 1, self.log)
            if self._stragglers is None:
                return await self._run(flight)
            duplicate = Run(key, claim, reservation, call, attempt + 1, self.log)
            rollout = await first_answer(
                lambda: self._run(flight),
                lambda: self._beside(flight, duplicate),
                lambda: duplicate.spare is not None,
            )
            flight.give_back()  # of one that lost before its metric began
            return rollout

        return await self._retried(claim, once)

    async def _beside(self, original: Run, duplicate: Run) -> Rollout:
        """Wait until the original is far beyond the others, and run it a second time."""
        assert self._stragglers is not None
        await original.granted.wait()
        claim = original.claim
        spare = duplicate.spare = await self._stragglers.overdue(claim.stage, original.granted_at, original.reservation)
        try:
            return await self._run(duplicate)
        finally:
            spare.refund()
            if not duplicate.granted.is_set():
                self._stragglers.not_begun()

    async def _run(self, run: Run) -> Rollout:
        """One run in a slot, within its time."""
        metric = MetricCall(run.metric_begins)
        async with self._slots.hold(run.claim):
            if run.spare is not None:  # the slot may be the one that the original's answer has just freed
                await anyio.lowlevel.checkpoint_if_cancelled()
            self._granted(run)
            try:
                with metric.watched(), anyio.move_on_after(self._timeout_seconds) as bound:
                    if (lease := current_lease()) is not None:
                        lease.bound = bound
                    rollout = await run.call()
                    self._answered(run, rollout)
                    return rollout
            except anyio.get_cancelled_exc_class():
                if metric.begun:
                    run.settle()
                raise
            except Exception:
                run.ended()
                raise
        raise self._gave_up(run, metric)

    def _granted(self, run: Run) -> None:
        run.granted_at = self._clock()
        run.granted.set()
        if run.spare is not None:
            self.duplicated += 1
            self._bus.emit(RolloutDuplicated(run.granted_at, run.claim.ticket, run.claim.stage))
        elif self._stragglers is not None:
            self._stragglers.begun()

    def _answered(self, run: Run, rollout: Rollout) -> None:
        run.settle()
        now, claim = self._clock(), run.claim
        seconds, cost = now - run.granted_at, rollout.cost_dollars
        if self._stragglers is not None:
            self._stragglers.finished(claim.stage, seconds)
        if self.log is not None and run.number is not None:
            self.log.finished(run.key, claim, rollout, seconds, run.number)
        self._bus.emit(RolloutFinished(now, claim.ticket, claim.stage, rollout.score, seconds, rollout.tokens, cost))

    def _gave_up(self, run: Run, metric: MetricCall) -> Exception:
        """The run took too long: what to raise."""
        now, claim = self._clock(), run.claim
        self.timed_out += 1
        self._bus.emit(RolloutTimedOut(now, claim.ticket, claim.stage, now - run.granted_at, run.attempt))
        late = f"no answer within {self._timeout_seconds:g} seconds"
        if metric.begun:
            run.settle()
            if run.spare is None and not run.extend():
                return RolloutUnresolvedError(f"{late}, and the budget does not pay another attempt.")
        return TransientError(late)
