"""How many requests and tokens a minute a provider takes: they are sent evenly, just below that, and not refused.

Each limit is a clock that says when what was let through is paid for (the generic cell rate algorithm, ITU-T I.371).
So no 60 seconds hold more than 97% of a limit and one request, wherever they begin: that is below the limit of a
provider that counts in fixed windows, in a sliding one, or by a bucket that is refilled all the time. (A request that
costs over 3% of the tokens may be too many for one that counts in windows.) What a provider says of itself
(:class:`ReportedLimit`) can only slow this down: others may use the key, too, or it may count tokens that it does not
report.

Tokens are estimated before a request is sent, and corrected by what is reported.

Where a refusal is one of the account, nothing is sent until the time that the provider named (Retry-After, else the end
of its window by its headers, else a short backoff). Where no limit is known the pace is learned from refusals, see
:class:`LearnedPace`. A refusal of one request alone, while others are answered, holds up that request and no other: see
:class:`Suspicion`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import cast

import anyio
from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

Unit = str
UNITS: tuple[Unit, Unit] = ("requests", "tokens")
PERIOD_SECONDS = 60.0
"""Limits are a minute's."""
HEADROOM = 0.96
"""Share of a limit that is used."""
CREDIT_SECONDS = 0.5
"""What was not used for so long may be sent at once: timers wake late."""
MOST_BEFORE = 0.5
"""So much of a minute's limit is paid for at most that was let through before the limit was known."""
SHARE_LEFT = 0.3
"""From so little on that a provider says is left, of what it refills all the time, less is asked of it."""
LEAST_SHARE = 0.1
"""Of the pace that a limit allows, that is kept while a provider that refills all the time says that little is left."""
EARLY_SECONDS = 0.01
"""A timer may wake so much too early."""
AHEAD_SECONDS = 0.5
"""So long before they may go, requests are let come: their programs take time until they ask."""
FARTHEST_SECONDS = 2 * PERIOD_SECONDS
"""What a shared file says of a later time than this is wrong: a clock was set back."""
LOCK_SECONDS = 0.25
"""So long a shared file is waited for."""
FIRST_BACKOFF_SECONDS, BACKOFF_FACTOR, MOST_BACKOFF_SECONDS = 1.0, 1.5, 5.0
"""Waits after refusals that are not told how long to wait, or that follow each other without an answer in between. The
first is what providers name most often. With 5 seconds at most a window that opens again is missed by a twelfth of a
minute; a fixed window that is used up after 10 of its 60 seconds is asked 13 times in vain."""
TRIAL_SECONDS = 0.25
"""So long after a wait that followed another one only one request is sent: most refusals come back within it."""
SPAN_SECONDS = 1.0
"""The shortest time over which a pace is learned: several requests sent in the same instant tell no pace."""
CAUTIOUS_REQUESTS = 200
"""So many requests without a refusal let a learned pace grow by half. It reaches the limit, 4% above, after 90: so
about 1% of the requests are refused where a provider tells nothing. With 100 it is 2%, with 400 a pace that was learned
too low is kept for minutes."""
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
MAX_LIMIT = 10**12
"""Requests or tokens a minute; what is above is no limit."""
LONGEST_SECONDS = 86400.0
_COUNT = re.compile(r"[0-9]{1,15}")
_DURATION = re.compile(
    r"(?:(\d{1,4})d)?(?:(\d{1,5})h)?(?:(\d{1,6})m(?!s))?(?:(\d{1,7}(?:\.\d{1,9})?)s)?(?:(\d{1,9}(?:\.\d{1,9})?)ms)?",
    re.A,
)
_SECONDS = re.compile(r"\d{1,7}(?:\.\d{1,9})?", re.A)


@dataclass(frozen=True, slots=True)
class ReportedLimit:
    """What a provider said of one limit when it answered.

    Args:
        limit: a minute, above 0.
        remaining: that it would take at once, from 0 to ``limit``; None where it did not say.
        reset_seconds: until it would take ``limit`` at once; None where it did not say.
    """

    limit: float
    remaining: float | None = None
    reset_seconds: float | None = None

    @property
    def is_refilled(self) -> bool:
        """Whether this is told by a provider that refills all the time: what is missing takes its share of a minute."""
        if self.remaining is None or self.reset_seconds is None:
            return False
        missing = PERIOD_SECONDS * (1 - self.remaining / self.limit)
        return abs(self.reset_seconds - missing) <= 0.1 * PERIOD_SECONDS

    def pace(self, own: float) -> float:
        """Seconds a unit, no less than ``own``, such that what remains lasts.

        >>> ReportedLimit(600, 599, 0.1).pace(own=0.1), round(ReportedLimit(600, 100, 50.0).pace(own=0.1), 2)
        (0.1, 0.18)
        >>> ReportedLimit(600, 100, 15.0).pace(own=0.1)  # a window that ends soon
        0.15
        >>> ReportedLimit(600, 0, 30.0).pace(own=0.1)
        30.0
        """
        if self.remaining is None or self.reset_seconds is None:
            return own
        if self.is_refilled:
            return own / max(LEAST_SHARE, min(1.0, self.remaining / self.limit / SHARE_LEFT))
        return max(own, self.reset_seconds / max(1.0, self.remaining))


def limits_in_headers(
    headers: Mapping[str, str], now: Callable[[], datetime] | None = None
) -> dict[Unit, ReportedLimit]:
    """The limits that a reply's headers tell, in OpenAI's form (also Azure's, Groq's and others') or in Anthropic's.

    They come from outside: what is not exactly as expected is left out, for no limit is better than a wrong one.

    Args:
        headers: by their names in lower case.
        now: for Anthropic's, which say at what time there is room again.

    >>> limits_in_headers({"x-ratelimit-limit-requests": "600", "x-ratelimit-remaining-requests": "599",
    ...           "x-ratelimit-reset-requests": "100ms"})
    {'requests': ReportedLimit(limit=600.0, remaining=599.0, reset_seconds=0.1)}
    >>> limits_in_headers({"x-ratelimit-limit-tokens": "many"})
    {}
    """
    found: dict[Unit, ReportedLimit] = {}
    for unit in UNITS:
        for form in (f"x-ratelimit-{{}}-{unit}", f"anthropic-ratelimit-{unit}-{{}}"):
            limit, left = _count(headers.get(form.format("limit"))), _count(headers.get(form.format("remaining")))
            if not limit:
                continue
            period = seconds_in(headers.get(form.format("renewalperiod"))) or PERIOD_SECONDS  # Azure's
            reset = seconds_in(headers.get(form.format("reset")), now)
            whole = left is not None and left <= limit and reset is not None
            found[unit] = ReportedLimit(
                limit * PERIOD_SECONDS / period, left if whole else None, reset if whole else None
            )
            break
    return found


def _count(text: str | None) -> float | None:
    """A whole number as it is written by a machine; None for anything else."""
    return float(text) if isinstance(text, str) and _COUNT.fullmatch(text) and int(text) <= MAX_LIMIT else None


def seconds_in(text: str | None, now: Callable[[], datetime] | None = None) -> float | None:
    """A time to wait, up to a day; None for anything else.

    >>> seconds_in("6m0s"), seconds_in("20ms"), seconds_in("1h2m3.5s"), seconds_in("7"), seconds_in("soon")
    (360.0, 0.02, 3723.5, 7.0, None)
    """
    if not isinstance(text, str) or not 0 < len(text) <= 64:
        return None
    if _SECONDS.fullmatch(text):
        return _bounded(float(text))
    match = _DURATION.fullmatch(text)
    if match is not None:
        parts = zip(match.groups(), (86400, 3600, 60, 1, 0.001), strict=True)
        return _bounded(sum(float(part) * unit for part, unit in parts if part))
    try:
        when = datetime.fromisoformat(text.replace("Z", "+00:00"))
        if when.tzinfo is None:
            return None
        moment = datetime.now(timezone.utc) if now is None else now()
        return _bounded(max(0.0, (when - moment).total_seconds()))
    except (ValueError, OverflowError):
        return None


def _bounded(seconds: float) -> float | None:
    return seconds if seconds <= LONGEST_SECONDS else None


def paid(due: Mapping[Unit, float], by: Mapping[Unit, float], credit_seconds: float) -> tuple[dict[Unit, float], float]:
    """When what was let through is paid for once a request is let through, too, and how long that one waits.

    Args:
        due: unit -> when what was let through before is paid for, in seconds from now; below 0 it has been.
        by: unit -> seconds that the request takes to pay for.
        credit_seconds: what was not used for longer is lost.

    >>> paid({"requests": 2.0, "tokens": -9.0}, {"requests": 0.25, "tokens": 1.0}, 0.5)
    ({'requests': 2.25, 'tokens': 2.5}, 2.0)
    """
    wait = max([0.0, *(due[unit] for unit in by)])
    return {unit: max(due[unit], wait - credit_seconds) + by[unit] for unit in by}, wait


@dataclass(slots=True, eq=False)
class Claim:
    """A request.

    Args:
        rate: whose limits it counts against.
        tokens: that it is thought to cost.
        was_refused: the same limits have refused the request before.
        sent_seconds: when it was let through; None before.
        number: of requests sent until then.
    """

    rate: RateLimit
    tokens: float
    was_refused: bool = False
    sent_seconds: float | None = None
    number: int = 0


class Suspicion:
    """Tells refusals of an account, which is asked for more than its limit, from those of single requests.

    An account is limited where most of what is sent in a row is refused, or where requests that were refused are then
    answered. A single request may be refused again and again while all others are answered.
    """

    def __init__(self) -> None:
        self._sent = 0
        self._refused: deque[int] = deque(maxlen=BURST_REFUSALS)
        """The numbers of the last requests that were refused for the first time."""
        self._odd = 0
        """Requests that were refused again since the account was suspected, while most others were answered."""
        self._recovered: deque[float] = deque(maxlen=RECOVERED)
        """When requests that had been refused were answered."""
        self.is_limited = False
        """Refusals are taken as the account's."""

    @property
    def is_burst(self) -> bool:
        """Whether most of what was sent in a row was refused."""
        return len(self._refused) == BURST_REFUSALS and max(self._refused) - min(self._refused) < BURST_REQUESTS

    def note_sent(self, claim: Claim) -> None:
        """Number a request."""
        self._sent += 1
        claim.number = self._sent

    def note_answered(self, claim: Claim, now: float) -> None:
        """Take note where a request recovers from a refusal."""
        if claim.was_refused:
            self._recovered.append(now)
            if len(self._recovered) == RECOVERED and self._recovered[0] >= now - PERIOD_SECONDS:
                self.is_limited = True

    def note_refusal(self, claim: Claim) -> None:
        """A request was refused, and others were not answered more often since it was refused first."""
        if not claim.was_refused:
            self._refused.append(claim.number)
            if self.is_burst and not self.is_limited:
                self.is_limited, self._odd = True, 0

    def clear_up(self) -> bool:
        """A request was refused again, and most others were answered.

        Returns:
            Whether the account was suspected, for a burst of refusals, but as many of them came again and none of the
            requests ever recovered: then nothing speaks for it any more.
        """
        self._odd += 1
        if not self.is_limited or self._recovered or self._odd < BURST_REFUSALS:
            return False
        self._refused.clear()
        self.is_limited = False
        return True


def pace_of_cycle(taken: Sequence[float], ends: float) -> float | None:
    """Requests a second that a provider takes for long, by one cycle of taking and refusing; None where it took none.

    A cycle goes on from the first request that is taken after a refusal until requests are taken again after the next
    refusal. Since it includes the time in which a bucket is refilled, or in which a window ends, what is taken in it is
    what the limit allows. Only the first cycle, which begins with a full bucket, shows too much. A cycle in which
    little was asked at first shows too little: so the busiest end of it counts.

    Args:
        taken: when the requests of the cycle were sent that were not refused, in order.
        ends: when the cycle ends.

    >>> pace_of_cycle([0.0, 0.1, 0.2, 0.3], ends=2.0)
    2.0
    >>> pace_of_cycle([0.0, 58.0, 58.1, 58.2], ends=60.0)
    1.5
    """
    paces = ((len(taken) - n) / max(SPAN_SECONDS, ends - seconds) for n, seconds in enumerate(taken))
    return max(paces, default=None)


class LearnedPace:
    """How many requests a minute a provider takes that tells it by refusals only.

    The pace is that of the last cycle, see :func:`pace_of_cycle`. It grows with each request that is not refused:
    slowly near what was learned, and then ever faster (as CUBIC does, RFC 9438), in case the limit is higher.
    """

    def __init__(self) -> None:
        self._taken: dict[Claim, float] = {}
        """Requests that were sent in the last minute and not refused -> when."""
        self._cycle_began = self._opened = -math.inf
        self._per_second = math.inf
        self._answered = 0
        self._under_way: set[Claim] = set()
        self._most_under_way = 0
        self._refusals_at_most = 0
        self._refused = -math.inf
        """When the last refusal came that was counted."""

    @property
    def limit(self) -> float:
        """Requests a minute; infinite while nothing was learned, and where requests at once are what is limited."""
        if self.limits_at_once:
            return math.inf
        return self._per_second * PERIOD_SECONDS * (1 + 0.5 * (self._answered / CAUTIOUS_REQUESTS) ** 3)

    @property
    def limits_at_once(self) -> bool:
        """Whether the provider seems to limit the requests under way at once, and not those of a minute."""
        return self._refusals_at_most >= REFUSALS_AT_MOST

    @property
    def opened_seconds(self) -> float:
        """When requests could be sent again after the last refusal."""
        return self._opened

    def note_sent(self, claim: Claim, now: float) -> None:
        """Count a request as taken until it is refused."""
        self._taken[claim] = now
        self._under_way.add(claim)
        while (oldest := next(iter(self._taken))) is not claim and self._taken[oldest] < now - PERIOD_SECONDS:
            del self._taken[oldest]

    def note_answered(self, claim: Claim, now: float) -> None:
        """Grow, for a request that was sent since the last refusal."""
        if claim.sent_seconds is not None and claim in self._under_way:
            # What was sent just now may yet be refused: only what is older was surely taken.
            before = now - min(TRIAL_SECONDS, 0.5 * (now - claim.sent_seconds))
            taken = sum(other.sent_seconds is not None and other.sent_seconds <= before for other in self._under_way)
            self._most_under_way = max(self._most_under_way, taken)
        self.leave(claim)
        self._answered += claim.sent_seconds is not None and claim.sent_seconds >= self._opened

    def withdraw(self, claim: Claim) -> None:
        """Take back a request that was refused, or that the provider has not seen."""
        self._taken.pop(claim, None)
        self.leave(claim)

    def leave(self, claim: Claim) -> None:
        """A request is not under way any more, whatever became of it."""
        self._under_way.discard(claim)

    def note_refusal(self, now: float) -> None:
        """The first refusal after a time in which requests were sent: was as much under way as ever?"""
        if now < self._refused + TRIAL_SECONDS:  # of what was sent together with the one before
            return
        self._refused = now
        fewer = len(self._under_way) < FEWER * self._most_under_way
        self._refusals_at_most = 0 if fewer else self._refusals_at_most + 1

    def reopen(self, now: float) -> bool:
        """Learn from the cycle so far, at the end of the wait after a refusal.

        Returns:
            Whether anything was taken since the wait before; where nothing was, the cycle goes on.
        """
        was_taken = any(seconds >= self._opened for seconds in self._taken.values())
        if was_taken:
            self._cycle_began = self._opened
        pace = pace_of_cycle([seconds for seconds in self._taken.values() if seconds >= self._cycle_began], now)
        if pace is not None:
            self._per_second, self._answered = pace, 0
        self._opened = now
        return was_taken

    def forget(self) -> None:
        """Go by nothing that was learned: the provider says its limits, or refuses single requests only, or the
        run is to end."""
        self._per_second = math.inf


@dataclass(slots=True)
class _Meter:
    """One limit. ``due`` is when what was let through is paid for. What was heard is believed for a while."""

    said: float = math.inf
    limit: float = math.inf
    learned: float = math.inf
    due: float = -math.inf
    let_through: float = 0.0
    heard: ReportedLimit | None = None
    heard_until: float = -math.inf
    heard_after: float = 0.0

    @property
    def told(self) -> float:
        """A minute, by the user and by the provider; infinite where neither has said."""
        return min(self.said, self.limit)

    @property
    def most(self) -> float:
        """A minute, by what is told or, where nothing is, by what was learned from refusals."""
        return min(self.told, self.learned)

    @property
    def is_used_up(self) -> bool:
        """Whether nothing is left of a window, of which the provider has told when it ends."""
        return self.heard is not None and self.heard.remaining == 0 and not self.heard.is_refilled

    def pace(self, now: float) -> float:
        """Seconds a unit; 0 where no limit is known."""
        if self.most == math.inf:
            return 0.0
        own = PERIOD_SECONDS / (HEADROOM * self.most)
        if self.heard is None or self.heard.remaining is None or now >= self.heard_until:
            return own
        left = max(0.0, self.heard.remaining - (self.let_through - self.heard_after))
        return ReportedLimit(self.heard.limit, left, self.heard_until - now).pace(own)


class SharedTimes:
    """When what several processes have let through is paid for, in a small file that they share.

    A file that cannot be read is begun again, and one that cannot be written is done without.

    Args:
        path: of the file; its folder is made, readable by the user alone.
        clock: seconds since the epoch.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self.path, self._clock = path, clock
        self._lock = FileLock(path.with_suffix(".lock"), timeout=LOCK_SECONDS, mode=0o600, thread_local=False)
        self.is_lost = False
        """It cannot be used."""

    def pay(self, by: Mapping[Unit, float], credit_seconds: float) -> float | None:
        """Let a request through, see :func:`paid`; gives how long it waits, or None where the file cannot be used."""
        if self.is_lost:
            return None
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._lock.acquire(poll_interval=0.002):
                return self._pay(by, credit_seconds)
        except Timeout:  # its holder was stopped in the middle; next time it may go on
            return None
        except OSError as error:
            self.is_lost = True
            logger.warning("%s cannot be used (%s): other runs on the same key are not seen.", self.path, error)
            return None

    def _pay(self, by: Mapping[Unit, float], credit_seconds: float) -> float:
        now = self._clock()
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            times = times_in(os.read(file, 1000))
            due = {unit: times.get(unit, 0.0) - now for unit in by}
            due = {unit: seconds if seconds <= FARTHEST_SECONDS else 0.0 for unit, seconds in due.items()}
            due, wait = paid(due, by, credit_seconds)
            text = json.dumps({**times, **{unit: now + seconds for unit, seconds in due.items()}}).encode()
            os.lseek(file, 0, os.SEEK_SET)
            os.write(file, text)
            os.ftruncate(file, len(text))
            return wait
        finally:
            os.close(file)


def times_in(text: bytes) -> dict[Unit, float]:
    """Unit -> seconds since the epoch, of a shared file; what is no such thing is left out.

    >>> times_in(b'{"requests": 12.5, "tokens": "soon"}'), times_in(b"{")
    ({'requests': 12.5}, {})
    """
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    times = cast("dict[str, object]", found) if isinstance(found, dict) else {}
    told = {unit: at for unit in UNITS if isinstance(at := times.get(unit), int | float) and not isinstance(at, bool)}
    return {unit: float(at) for unit, at in told.items() if 0 <= at < 1e12}


class RateLimit:
    """The limits of one model of one endpoint, for one key. Used on the run's loop.

    Args:
        clock: seconds.
        shared: what other runs on the same key have let through; None for this run alone.
        changed: called when what waits or what is known has changed.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        shared: Callable[[], SharedTimes | None] = lambda: None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock, self._make_shared, self._changed = clock, shared, changed
        self._meters: dict[Unit, _Meter] = {unit: _Meter() for unit in UNITS}
        self._shared: SharedTimes | None = None
        self._first = anyio.Lock()
        self._learned, self._suspicion = LearnedPace(), Suspicion()
        self._closed_until = -math.inf
        self._is_closed = False
        self._refusals_in_a_row = 0
        self.estimates: dict[str, TokenEstimate] = {}
        """Stage -> what its requests cost."""
        self._cost, self._asked = 1.0, 0
        self.waiting = 0
        """Requests that wait here."""

    @property
    def is_known(self) -> bool:
        """Whether there is a limit, or a refusal for which all wait."""
        return self._is_closed or any(meter.most < math.inf for meter in self._meters.values())

    @property
    def limits(self) -> dict[Unit, float]:
        """What the user or the provider has told, a minute."""
        return {unit: meter.told for unit, meter in self._meters.items() if meter.told < math.inf}

    @property
    def ahead(self) -> int:
        """Requests that should be on their way here, or wait here, so that none goes late."""
        now = self._clock()
        seconds = max(self._meters["requests"].pace(now), self._cost * self._meters["tokens"].pace(now))
        return 2 + math.ceil(AHEAD_SECONDS / seconds) if seconds > 0 else 2

    def add_user_limits(self, limits: Mapping[Unit, float]) -> None:
        """What the user says; a provider may say less."""
        for unit, limit in limits.items():
            self._meters[unit].said = min(self._meters[unit].said, limit)
        if limits:
            self._changed()

    def record_reported_limits(self, heard: Mapping[Unit, ReportedLimit]) -> None:
        """What the provider said in an answer.

        What was let through in the minute before anything was known is paid for now, at the pace that the limit allows;
        but not where nothing is left of the limit: then :meth:`record_refusal` says when it goes on.
        """
        now, known = self._clock(), self.limits
        for unit, said in heard.items():
            meter = self._meters[unit]
            meter.limit, meter.heard, meter.heard_after = said.limit, None, meter.let_through
            meter.heard_until = now + (said.reset_seconds or 0.0)
        if heard:
            self._learned.forget()
            self._learn()
        first = {
            unit: self._meters[unit].let_through for unit in heard if unit not in known and heard[unit].remaining != 0
        }
        if first:
            self._move({unit: min(cost, MOST_BEFORE * heard[unit].limit) for unit, cost in first.items()})
        for unit, said in heard.items():
            self._meters[unit].heard = said
        if heard:
            self._changed()

    def record_refusal(self, claim: Claim, retry_after_seconds: float | None, is_odd: bool = False) -> None:
        """A request was refused: where that is the account's, send nothing until the provider wants to be asked again.

        Args:
            claim: the request.
            retry_after_seconds: what the provider said; None where it said nothing. Then its headers tell, as far as
                they were heard: the end of a window of which nothing is left.
            is_odd: since it was refused first more other requests were answered than turned away.
        """
        now, sent = self._clock(), claim.sent_seconds
        self._learned.withdraw(claim)
        nothing_left = any(meter.heard is not None and meter.heard.remaining == 0 for meter in self._meters.values())
        if is_odd and not nothing_left:
            if self._suspicion.clear_up():
                self._learned.forget()
                self._learn()
            return
        if not self._is_closed and (sent is None or sent < self._learned.opened_seconds):
            return  # it was sent before the last wait, which its refusal came too late for
        self._suspicion.note_refusal(claim)
        if not self._is_closed:
            self._learned.note_refusal(now)
            self._learn()
        if not nothing_left and not self._suspicion.is_limited:
            return  # it may be this request's alone, which waits by itself
        if self._learned.limits_at_once and not self.limits:
            return  # others are answered as soon as a place is free: only this request waits
        backoff = FIRST_BACKOFF_SECONDS * BACKOFF_FACTOR**self._refusals_in_a_row
        wait = min(MOST_BACKOFF_SECONDS, backoff)
        if retry_after_seconds is None:
            ends = [meter.heard_until - now for meter in self._meters.values() if meter.is_used_up]
            wait = max([wait, *ends])
        elif self._refusals_in_a_row:
            wait = max(wait, retry_after_seconds)
        elif nothing_left or self._suspicion.is_burst:
            wait = retry_after_seconds
        else:  # a single refusal: it may name a time that is this request's alone, and the next one tells
            wait = min(MOST_BACKOFF_SECONDS, retry_after_seconds)
        self._closed_until, self._is_closed = max(self._closed_until, now + min(PERIOD_SECONDS, wait)), True
        for meter in self._meters.values():
            meter.heard = None  # it was told for a moment at which nothing was left
            meter.due = max(meter.due, self._closed_until)
        self._changed()

    def _reopen(self) -> None:
        """The wait after a refusal is over."""
        self._is_closed = False
        was_taken = self._learned.reopen(self._clock())
        self._refusals_in_a_row = 0 if was_taken else self._refusals_in_a_row + 1
        if not was_taken:  # the next request tells whether anything is taken again
            for meter in self._meters.values():
                meter.due = max(meter.due, self._clock() + TRIAL_SECONDS)
        self._learn()
        self._changed()

    def _learn(self) -> None:
        """Go by the learned pace, where no limit is told."""
        self._meters["requests"].learned = math.inf if self.limits else self._learned.limit

    async def admit(self, claim: Claim, sleep: Callable[[float], Awaitable[None]]) -> None:
        """Wait until a request may be sent; in the order in which they come.

        Args:
            sleep: waits so many seconds; where it returns early the request is sent all the same.
        """
        self._asked += 1
        self._cost += (claim.tokens - self._cost) / min(16, self._asked)
        if self.is_known:
            self.waiting += 1
            self._changed()
            try:
                async with self._first:
                    await self._wait_for_its_turn(claim, sleep)
            finally:
                self.waiting -= 1
                self._changed()
        self.record_sent(claim)

    async def _wait_for_its_turn(self, claim: Claim, sleep: Callable[[float], Awaitable[None]]) -> None:
        turn = self._clock() + self._move({"requests": 1.0, "tokens": claim.tokens})
        while (wait := max(turn, self._closed_until) - self._clock()) > 0:  # a refusal meanwhile makes it longer
            until = self._clock() + wait
            await sleep(wait)
            if self._clock() < until - EARLY_SECONDS:
                self._wait_no_longer()
                break
        if self._is_closed:
            self._reopen()

    def _wait_no_longer(self) -> None:
        """A wait was cut short, for the run is to end: who comes next does not wait for what was learned either."""
        self._closed_until, self._is_closed = -math.inf, False
        self._learned.forget()
        self._learn()
        if not self.limits:
            for meter in self._meters.values():
                meter.due = min(meter.due, self._clock())

    def record_sent(self, claim: Claim) -> None:
        """A request goes out; what :meth:`admit` has let through is counted already."""
        if claim.sent_seconds is not None:
            return
        claim.sent_seconds = self._clock()
        self._learned.note_sent(claim, claim.sent_seconds)
        self._suspicion.note_sent(claim)
        for unit, cost in (("requests", 1.0), ("tokens", claim.tokens)):
            self._meters[unit].let_through += cost

    def settle(self, claim: Claim, tokens: float | None) -> None:
        """A request was answered.

        Args:
            tokens: that it has cost; None where that is not reported.
        """
        self._learned.note_answered(claim, self._clock())
        self._suspicion.note_answered(claim, self._clock())
        self._learn()
        if tokens is not None and self.is_known:
            self._move({"tokens": tokens - claim.tokens}, wait=False)

    def leave(self, claim: Claim) -> None:
        """A request is not under way any more, whatever became of it."""
        self._learned.leave(claim)

    def refund(self, claim: Claim) -> None:
        """It was answered without the provider: from a cache."""
        self._learned.withdraw(claim)
        if self.is_known:
            self._move({"requests": -1.0, "tokens": -claim.tokens}, wait=False)

    def _move(self, costs: Mapping[Unit, float], wait: bool = True) -> float:
        """Pay for so much; gives the seconds until it is paid for."""
        now = self._clock()
        paces = {unit: self._meters[unit].pace(now) for unit in costs}
        by: dict[Unit, float] = {
            unit: max(-FARTHEST_SECONDS, min(PERIOD_SECONDS / HEADROOM, cost * paces[unit]))
            for unit, cost in costs.items()
            if paces[unit] > 0
        }
        if not by:
            return 0.0
        credit = CREDIT_SECONDS if wait else math.inf
        due, seconds = paid({unit: self._meters[unit].due - now for unit in by}, by, credit)
        for unit in by:
            self._meters[unit].due = now + due[unit]
        if not self.limits:
            return seconds  # what a run has learned is its own share of the limit already
        if self._shared is None:
            self._shared = self._make_shared()
        shared = None if self._shared is None else self._shared.pay(by, credit)
        return seconds if shared is None else shared


class TokenEstimate:
    """What a request will cost in tokens, by what others of the same LM have cost."""

    def __init__(self) -> None:
        self._per_character, self._written, self._count = 0.25, 500.0, 0

    def expected_tokens(self, characters: int, most_written: float | None = None) -> float:
        """Of a prompt so long, before it is answered.

        Args:
            most_written: what the reply has at most, where that is known.
        """
        written = self._written if self._count or most_written is None else min(self._written, most_written)
        return self._per_character * characters + written

    def record_usage(self, characters: int, read: int, written: int) -> None:
        """What one has cost."""
        self._count += 1
        share = max(1 / 16, 1 / self._count)
        if characters > 0:
            self._per_character += share * (read / characters - self._per_character)
        self._written += share * (written - self._written)
