"""Limits a minute that a provider tells by refusals only: whom a refusal concerns, and the pace to learn from it.

Where no limit is known from the user or from headers, the pace is learned from refusals, see :class:`LearnedPace`. A
refusal of one request alone, while others are answered, holds up that request and no other: see
:class:`RefusalSuspicion`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dspy_flashevolve.engine.rate_headers import PERIOD_SECONDS

TRIAL_SECONDS = 0.25
"""After a wait that followed another one, this long only one request is sent: most refusals come back within it."""
MIN_SPAN_SECONDS = 1.0
"""The shortest time over which a pace is learned: several requests sent in the same instant tell no pace."""
CAUTIOUS_REQUESTS = 200
"""So many requests without a refusal let a learned pace grow by half. It reaches the limit, 4% above, after 90: so
about 1% of the requests are refused where a provider tells nothing. With 100 it is 2%, with 400 a pace that was learned
too low is kept for minutes."""
CAUTIOUS_SECONDS = 420.0
"""So much time without a refusal lets it grow by as much. Where a provider names a far longer wait than it needs, the
cycle shows a few requests a minute, of which 90 take most of an hour; here it doubles after nine minutes. A limit that
is right is tried three minutes after the last refusal: with 20 requests a minute or more, requests are faster."""
FEWER = 0.8
"""A provider that refuses a request while fewer than this share of the most that it ever had under way are under way
has a limit a minute. One that refuses at more may have a limit of requests at once: then all its places are taken, but
for those whose replies came while the refusal was on its way."""
REFUSALS_AT_MOST = 3
"""So many refusals in a row at the most that was ever under way tell a limit of requests at once. A small bucket
refuses twice so before it has been refilled, and each mistake costs as many refusals as there are slots."""
BURST_REFUSALS, BURST_REQUESTS = 6, 8
"""So many different requests refused, of so many that were sent in a row, tell that the account is limited. Where a
third of the requests is refused, each for itself, one burst in fifty looks so by chance."""
RECOVERED = 3
"""So many requests that were refused and then answered, within a minute, tell the same: a limit refuses for a time. One
or two may have been told to wait for reasons of their own."""


@dataclass(slots=True, eq=False)
class Claim:
    """A request as a limit a minute counts it.

    Args:
        tokens: that it is expected to cost.
        was_refused: the same limit has refused the request before.
        sent_seconds: when it was let through; None before.
        number: how many requests had been sent until then.
    """

    tokens: float
    was_refused: bool = False
    sent_seconds: float | None = None
    number: int = 0


class RefusalSuspicion:
    """Tells refusals of an account, which is asked for more than its limit, from those of single requests.

    An account is limited where most of what is sent in a row is refused, or where requests that were refused are then
    answered. A single request may be refused again and again while all others are answered.
    """

    def __init__(self) -> None:
        self._sent = 0
        self._refused: deque[int] = deque(maxlen=BURST_REFUSALS)
        """Numbers of the last requests that were refused for the first time."""
        self._isolated_refusals = 0
        """Repeated refusals of single requests since the account was suspected, while most others were answered."""
        self._recovered: deque[float] = deque(maxlen=RECOVERED)
        """Times at which requests were answered that had been refused before."""
        self.is_limited = False
        """The account is asked for more than its limit; else refusals concern single requests."""

    @property
    def is_burst(self) -> bool:
        """Whether most of what was sent in a row was refused."""
        return len(self._refused) == BURST_REFUSALS and max(self._refused) - min(self._refused) < BURST_REQUESTS

    def record_sent(self, claim: Claim) -> None:
        """Number a request."""
        self._sent += 1
        claim.number = self._sent

    def record_answer(self, claim: Claim, now: float) -> None:
        """Record an answer: a request that was refused before and now is not speaks for a limit of the account."""
        if claim.was_refused:
            self._recovered.append(now)
            if len(self._recovered) == RECOVERED and self._recovered[0] >= now - PERIOD_SECONDS:
                self.is_limited = True

    def record_refusal(self, claim: Claim) -> None:
        """Record the refusal of a request since whose first refusal others were not mostly answered."""
        if not claim.was_refused:
            self._refused.append(claim.number)
            if self.is_burst and not self.is_limited:
                self.is_limited, self._isolated_refusals = True, 0

    def clear_suspicion(self) -> bool:
        """Record that a request was refused again while most others were answered.

        Returns:
            Whether that clears the account: it was suspected because of a burst of refusals, but as many came again for
            single requests, and none of these ever recovered.
        """
        self._isolated_refusals += 1
        if not self.is_limited or self._recovered or self._isolated_refusals < BURST_REFUSALS:
            return False
        self._refused.clear()
        self.is_limited = False
        return True


def pace_of_cycle(accepted: Sequence[float], ends: float) -> float | None:
    """Estimate the requests a second that a provider sustains from one cycle of accepting and refusing.

    A cycle goes on from the first request that is accepted after a refusal until requests are accepted again after the
    next refusal. It includes the time in which a bucket is refilled, or in which a window ends, so that what is
    accepted in it is what the limit allows. Only the first cycle, which begins with a full bucket, shows too much. A
    cycle in which little was asked at first would show too little: therefore the busiest end of it counts.

    Args:
        accepted: when the requests of the cycle that were not refused were sent, in order.
        ends: when the cycle ends.

    Returns:
        Requests a second; None where nothing was accepted.

    >>> pace_of_cycle([0.0, 0.1, 0.2, 0.3], ends=2.0)
    2.0
    >>> pace_of_cycle([0.0, 58.0, 58.1, 58.2], ends=60.0)
    1.5
    """
    paces = ((len(accepted) - n) / max(MIN_SPAN_SECONDS, ends - seconds) for n, seconds in enumerate(accepted))
    return max(paces, default=None)


class LearnedPace:
    """Learns how many requests a minute a provider accepts that tells it by refusals only.

    The pace is that of the last cycle, see :func:`pace_of_cycle`. It grows with the requests and with the time
    since the last refusal, whichever makes more: slowly near what was learned, and then ever faster (as CUBIC does, RFC
    9438), in case the limit is higher.
    """

    def __init__(self) -> None:
        self._accepted: dict[Claim, float] = {}
        """Requests that were sent in the last minute and not refused -> when they were sent."""
        self._cycle_began = self._opened = -math.inf
        self._per_second = math.inf
        self._answered = 0
        self._under_way: set[Claim] = set()
        self._most_under_way = 0
        self._refusals_at_most = 0
        self._last_refusal_seconds = -math.inf

    def limit(self, now: float) -> float:
        """Return the requests a minute; infinite while nothing was learned, and where the provider limits requests in
        flight."""
        if self.limits_at_once or self._per_second == math.inf:
            return math.inf
        trust = max(self._answered / CAUTIOUS_REQUESTS, (now - self._opened) / CAUTIOUS_SECONDS)
        return self._per_second * PERIOD_SECONDS * (1 + 0.5 * trust**3)

    @property
    def limits_at_once(self) -> bool:
        """Whether the provider seems to limit requests in flight, and not those of a minute."""
        return self._refusals_at_most >= REFUSALS_AT_MOST

    @property
    def opened_seconds(self) -> float:
        """Time from which requests could be sent again after the last refusal."""
        return self._opened

    def record_sent(self, claim: Claim, now: float) -> None:
        """Count a request as accepted, until it is refused."""
        self._accepted[claim] = now
        self._under_way.add(claim)
        while (oldest := next(iter(self._accepted))) is not claim and self._accepted[oldest] < now - PERIOD_SECONDS:
            del self._accepted[oldest]

    def record_answer(self, claim: Claim, now: float) -> None:
        """Record an answer; one to a request that was sent since the last refusal lets the pace grow."""
        if claim.sent_seconds is not None and claim in self._under_way:
            # What was sent just now may yet be refused: only what is older was surely accepted.
            before = now - min(TRIAL_SECONDS, 0.5 * (now - claim.sent_seconds))
            accepted = sum(other.sent_seconds is not None and other.sent_seconds <= before for other in self._under_way)
            self._most_under_way = max(self._most_under_way, accepted)
        self.leave(claim)
        self._answered += claim.sent_seconds is not None and claim.sent_seconds >= self._opened

    def withdraw(self, claim: Claim) -> None:
        """Take back a request that was refused, or that the provider has not seen."""
        self._accepted.pop(claim, None)
        self.leave(claim)

    def leave(self, claim: Claim) -> None:
        """Count a request as under way no more, whatever became of it."""
        self._under_way.discard(claim)

    def record_refusal(self, now: float) -> None:
        """Record the first refusal after requests were sent, and whether as many were in flight as ever."""
        if now < self._last_refusal_seconds + TRIAL_SECONDS:  # it was sent together with the one before
            return
        self._last_refusal_seconds = now
        fewer = len(self._under_way) < FEWER * self._most_under_way
        self._refusals_at_most = 0 if fewer else self._refusals_at_most + 1

    def reopen(self, now: float) -> bool:
        """Learn from the cycle so far, at the end of the wait after a refusal.

        Returns:
            Whether anything was accepted since the wait before; where nothing was, the cycle goes on.
        """
        was_accepted = any(seconds >= self._opened for seconds in self._accepted.values())
        if was_accepted:
            self._cycle_began = self._opened
        pace = pace_of_cycle([seconds for seconds in self._accepted.values() if seconds >= self._cycle_began], now)
        if pace is not None:
            self._per_second, self._answered = pace, 0
        self._opened = now
        return was_accepted

    def forget(self) -> None:
        """Drop what was learned, since the provider reports its limits, or refuses single requests only, or the run is
        to end."""
        self._per_second = math.inf
