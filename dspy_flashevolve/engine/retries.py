"""When a request that got no answer is made again, and whether the request or its provider is to blame.

A request that fails while most others are answered is at fault itself: its attempts count, and after the last one it is
given up alone. Where most others fail too, the provider is in trouble: attempts do not count, and the run ends when the
provider has answered nothing for :attr:`RetryPolicy.outage_seconds` (docs/guide/resume-stop-faults.md).

Everything here happens on the run's loop.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import anyio

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.events import EventBus, RequestTurnedAway
from dspy_flashevolve.engine.loop import EARLY_SECONDS
from dspy_flashevolve.engine.scheduler import Slot
from dspy_flashevolve.engine.texts import logger_named

logger = logger_named(__name__)

OUTAGE_SECONDS = 60.0
"""Default for how long a run waits for a provider that answers nothing. A limit a minute is over after that time, and
an unattended run should not hang for hours on a dead server; ``max_outage_seconds`` is the user's own choice."""
COMPARED = 32
"""Number of other requests whose last outcome is compared with that of a failing one. A majority of 32 is wrong about a
provider that fails a third of its requests once in 27 times (binomial); 16 once in 8 times, and 64 notices an outage
only after twice as many failures."""
PATIENT_SECONDS = 60.0
"""A rate limit, a timeout or a lost connection says "later" and nothing about the request: it counts as an attempt only
from this long after the request's first failure. Providers count their limits by the minute; with less than a minute,
requests that a limit turned away are given up before it is over."""
RECOVERED, ODD_FACTOR = 256, 3
"""A request is odd that fails so many times as often as any of the last that failed and were then answered: where a
limit turns four of five requests away the unluckiest of 256 fails 25 times, and one of a million more than 75 times."""
ISOLATED_BACKOFF_SECONDS = 2.0
"""Longest backoff of a request that fails while others are answered. Backoff spares a provider in trouble, and this one
is not: a longer wait only delays the step. Not tuned."""
SILENT_FAILURES = 5
"""A responder is called silent in the log after this many failures without an answer in between: where a fifth of the
requests is refused at random, so many follow each other once in 3,000."""
SILENT_SECONDS = 10.0
"""With requests under way it is called so only after this time: one that is sent more than it takes at once turns some
away while it works on the others. Not tuned."""
WARNING_SECONDS = 60.0
"""Shortest time between two warnings about one responder, so that an outage does not flood the log."""
REASON_CHARACTERS = 300
"""Characters of a provider's error that are kept: enough for its message, not for a page of HTML."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with full jitter.

    Args:
        attempts: requests in all, at least 1, of those that count: see :meth:`Responder.record_failure`.
        first_seconds, most_seconds: upper bounds of the first wait and, but for a longer Retry-After, of every wait.
        outage_seconds: the run ends when an endpoint has answered nothing for this long and turned away everything
            that it was sent; no Retry-After is waited for longer. None waits as long as it takes.

    Raises:
        ConfigurationError: attempts is less than 1.
    """

    attempts: int = 6
    first_seconds: float = 1.0
    most_seconds: float = 30.0
    outage_seconds: float | None = OUTAGE_SECONDS

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigurationError(f"retries: attempts is {self.attempts}, expected at least 1.")

    def wait_seconds(self, attempt: int, retry_after_seconds: float | None, chance: float) -> float:
        """Return how long to wait after failed attempt number ``attempt`` (from 0); ``chance``, a draw from [0, 1),
        spreads out requests that failed together.

        >>> RetryPolicy().wait_seconds(2, None, chance=0.5)
        2.0
        >>> RetryPolicy().wait_seconds(0, 10.0, chance=0.5), RetryPolicy().wait_seconds(0, 3600.0, chance=0.5)
        (10.5, 60.5)
        """
        if retry_after_seconds is not None:
            return self.capped_retry_after(retry_after_seconds) + self.first_seconds * chance
        return self.backoff_seconds(attempt) * chance

    def backoff_seconds(self, attempt: int) -> float:
        """Return the upper bound of the wait after failed attempt number ``attempt`` (from 0)."""
        exponent = min(attempt, 32)  # 2**1024 is no float, and the minimum makes 32 as good as any
        return min(self.most_seconds, self.first_seconds * 2**exponent)

    def capped_retry_after(self, retry_after_seconds: float) -> float:
        """Return how much of a Retry-After is waited for."""
        return retry_after_seconds if self.outage_seconds is None else min(retry_after_seconds, self.outage_seconds)


@dataclass(eq=False, slots=True)
class TrackedRequest:
    """One request over all of its attempts.

    Args:
        sent_seconds, number: of its last attempt; numbers are in the order in which its endpoint was sent requests.
        failures, counted_failures: attempts without an answer; those that count against :attr:`RetryPolicy.attempts`.
        first_failure_index, first_failure_seconds: how many requests had ended at its responder before, and when.
        is_isolated: it failed last, for ``reason``, while most others were answered, so that the fault is its own.
    """

    sent_seconds: float = 0.0
    number: int = 0
    failures: int = 0
    counted_failures: int = 0
    first_failure_index: int = 0
    first_failure_seconds: float = 0.0
    is_isolated: bool = False
    reason: str = ""


class Retries:
    """The waits of one run before requests are made again, and what ends all of them at once: ``on_outage`` is called
    once, with the reason, when a provider is given up and the run has to end."""

    def __init__(
        self,
        policy: RetryPolicy,
        clock: Callable[[], float],
        rng: random.Random,
        bus: EventBus,
        on_outage: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.policy, self.clock, self.bus = policy, clock, bus
        self.chance: Callable[[], float] = rng.random
        """A draw from [0, 1)."""
        self._on_outage = on_outage
        self.outage = ""
        """Why the run ends: the provider that was given up. Empty while every provider may still answer."""
        self.is_hurried = False
        """The run is about to end: waits are cut short, and every failure counts as an attempt."""
        self.count = 0
        """Requests that were made again."""
        self._sleeping: set[anyio.CancelScope] = set()

    async def sleep(self, slot: Slot | None, seconds: float, keep_slot: bool = False, is_retry: bool = True) -> None:
        """Wait without the slot (unless a thread waits: ``keep_slot``), at most until :meth:`hurry`; once the run is
        hurried, for a moment only."""
        async with nullcontext() if slot is None else slot.released(keep_slot, is_retry):
            with anyio.CancelScope() as scope:
                self._sleeping.add(scope)
                try:
                    await anyio.sleep(min(seconds, self.policy.first_seconds) if self.is_hurried else seconds)
                finally:
                    self._sleeping.discard(scope)

    def hurry(self) -> None:
        """Cut all waits short, now and from now on, since the run is to end."""
        self.is_hurried = True
        for scope in self._sleeping:
            scope.cancel()

    def give_up(self, outage: str) -> None:
        """End the run, since a provider does not answer."""
        self.outage = outage
        self._on_outage(outage)


class Responder:
    """Whoever is asked: compares the outcomes of its requests, to tell a faulty request from a provider in trouble.
    Where the run can do without it (``is_optional``) its silence ends nothing."""

    def __init__(self, name: str, retries: Retries, is_optional: bool = False) -> None:
        self.name, self.retries, self._is_optional = name, retries, is_optional
        self._under_way: set[TrackedRequest] = set()
        self._isolated: set[TrackedRequest] = set()
        """Requests that wait although others are answered. They are given up soon; those that wait with them may go on,
        so no outage is declared before."""
        self._outcomes: dict[TrackedRequest, tuple[int, bool]] = {}
        """Request -> its place in the order of ends, and whether it was answered; the latest stand last. The order and
        not the clock, since in virtual time many requests end at one moment."""
        self._recovered: deque[tuple[float, int]] = deque(maxlen=RECOVERED)
        """Of the last requests that were answered though they had failed: when, and how often."""
        self._ended = 0
        self._silent_since: float | None = None
        self._failures_in_silence = 0
        self._warned_seconds = -math.inf

    def begin(self, request: TrackedRequest) -> None:
        """Count a request as under way."""
        request.sent_seconds = self.retries.clock()
        self._under_way.add(request)

    def leave(self, request: TrackedRequest) -> None:
        """Count a request as under way no more, whatever became of it."""
        self._under_way.discard(request)

    def record_answer(self, request: TrackedRequest) -> None:
        """Record that a request was answered."""
        self._record_outcome(request, answered=True)
        if request.failures:
            self._recovered.append((self.retries.clock(), request.failures))
        self._silent_since, self._failures_in_silence = None, 0

    def record_failure(self, request: TrackedRequest, reason: str, of_request: bool = False) -> None:
        """Record that a request got no answer, and decide whether that counts as one of its attempts. It does

        - where the fault may well be the request's alone (``of_request``: an error inside the server, a reply that
        holds nothing), unless most others fail, too, since its first failure or, where nobody else asked meanwhile,
        before;
        - else (a rate limit, say) where others are answered, it was not for :data:`PATIENT_SECONDS`, and it failed
        far more often than those that were answered at last: else it may only be unlucky with a limit that all meet;
        - where nothing is waited for any more, or the run can do without the answer.
        """
        now = self.retries.clock()
        if not request.failures:
            request.first_failure_index, request.first_failure_seconds = self._ended, now
        request.failures += 1
        request.reason = reason[:REASON_CHARACTERS]
        others = [outcome for other, outcome in self._outcomes.items() if other is not request]
        since = [answered for index, answered in others if index >= request.first_failure_index]
        compared = [answered for _, answered in others] if of_request and not since else since
        answers, failures = compared.count(True), compared.count(False)
        request.is_isolated = answers > failures
        if of_request:
            is_own_fault = answers >= failures
        else:
            usual = max(
                (failures for when, failures in self._recovered if when >= now - 2 * PATIENT_SECONDS), default=0
            )
            is_odd = request.is_isolated and request.failures > ODD_FACTOR * usual
            is_own_fault = is_odd and now >= request.first_failure_seconds + PATIENT_SECONDS
        request.counted_failures += is_own_fault or self.retries.is_hurried or self._is_optional
        self._record_outcome(request, answered=False)
        if not request.is_isolated or not since:  # answers to others since then say more about the provider
            self._silent_since = now if self._silent_since is None else self._silent_since
            self._failures_in_silence += 1
        if not request.is_isolated:
            self._report_silence(now, request)

    def may_retry(self, request: TrackedRequest, attempts: int) -> bool:
        """Whether a request that failed is made again."""
        return not self.retries.outage and request.counted_failures < attempts

    async def pause_before_retry(
        self, slot: Slot | None, request: TrackedRequest, retry_after_seconds: float | None, keep_slot: bool = False
    ) -> None:
        """Wait before a request is made again; see :meth:`RetryPolicy.wait_seconds` and :meth:`Retries.sleep`."""
        retries, policy = self.retries, self.retries.policy
        retries.count += 1
        retries.bus.emit(RequestTurnedAway(retries.clock(), self.name, request.reason))
        if (
            request.counted_failures
            and retry_after_seconds is not None
            and retry_after_seconds > policy.capped_retry_after(retry_after_seconds)
        ):
            retry_after_seconds = None  # the longest wait is over already, and brought nothing
        seconds = policy.wait_seconds(request.failures - 1, retry_after_seconds, retries.chance())
        if request.is_isolated and retry_after_seconds is None:
            seconds = min(seconds, ISOLATED_BACKOFF_SECONDS)
        if self._silent_since is not None and policy.outage_seconds is not None:
            left = self._silent_since + policy.outage_seconds - retries.clock()
            seconds = min(seconds, left) if left > 0 else seconds  # one last attempt decides whether this is an outage
        if request.is_isolated:
            self._isolated.add(request)
        try:
            await retries.sleep(slot, seconds, keep_slot)
        finally:
            self._isolated.discard(request)

    def _record_outcome(self, request: TrackedRequest, answered: bool) -> None:
        self.leave(request)
        self._outcomes.pop(request, None)  # so that it moves to the end of the dict
        self._outcomes[request] = self._ended, answered
        if len(self._outcomes) > COMPARED:
            del self._outcomes[next(iter(self._outcomes))]
        self._ended += 1

    def _report_silence(self, now: float, request: TrackedRequest) -> None:
        """Log that nobody is answered; after :attr:`RetryPolicy.outage_seconds` of that, end the run."""
        assert self._silent_since is not None
        if self.retries.outage:
            return
        silent_seconds, failures = now - self._silent_since, self._failures_in_silence
        outage_seconds = self.retries.policy.outage_seconds
        limit = math.inf if outage_seconds is None else outage_seconds
        # Where a single request hung for all that time, and nothing else was asked, one more request decides.
        is_certain = now - request.sent_seconds <= limit or failures > 2
        is_over = silent_seconds >= limit - EARLY_SECONDS and not (self._under_way or self._isolated)
        if is_over and is_certain and not self._is_optional:
            self.retries.give_up(
                f"{self.name} has answered nothing for {silent_seconds:.0f} seconds, and turned away all that it was "
                f"sent; the last: {request.reason}"
            )
        elif (
            failures >= SILENT_FAILURES
            and (not self._under_way or silent_seconds >= SILENT_SECONDS)
            and now >= self._warned_seconds + WARNING_SECONDS
        ):
            self._warned_seconds = now
            until = "until it answers" if limit == math.inf else f"for up to {limit:g} seconds"
            logger.warning("%s does not answer (%s): it is asked again, %s.", self.name, request.reason, until)
