"""How many requests and tokens a minute a provider takes: they are sent evenly, just below that, and not refused.

Each limit is a clock that says when what was let through is paid for (the generic cell rate algorithm, ITU-T I.371).
So no 60 seconds hold more than 97% of a limit and one request, wherever they begin: that is below the limit of a
provider that counts in fixed windows, in a sliding one, or by a bucket that is refilled all the time. (A request that
costs over 3% of the tokens may be too many for one that counts in windows.) What a provider says of itself
(:class:`Heard`) can only slow this down: others may use the key, too, or it may count tokens that it does not report.

Tokens are estimated before a request is sent, and corrected by what is reported.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Awaitable, Callable, Mapping
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
AHEAD_SECONDS = 0.5
"""So long before they may go, requests are let come: their programs take time until they ask."""
FARTHEST_SECONDS = 2 * PERIOD_SECONDS
"""What a shared file says of a later time than this is wrong: a clock was set back."""
LOCK_SECONDS = 0.25
"""So long a shared file is waited for."""
MOST = 10**12
"""Requests or tokens a minute; what is above is no limit."""
LONGEST_SECONDS = 86400.0
_COUNT = re.compile(r"[0-9]{1,15}")
_DURATION = re.compile(
    r"(?:(\d{1,4})d)?(?:(\d{1,5})h)?(?:(\d{1,6})m(?!s))?(?:(\d{1,7}(?:\.\d{1,9})?)s)?(?:(\d{1,9}(?:\.\d{1,9})?)ms)?",
    re.A,
)
_SECONDS = re.compile(r"\d{1,7}(?:\.\d{1,9})?", re.A)


@dataclass(frozen=True, slots=True)
class Heard:
    """What a provider said of one limit when it answered.

    Args:
        limit: a minute, above 0.
        remaining: that it would take at once, from 0 to ``limit``; None where it did not say.
        reset_seconds: until it would take ``limit`` at once; None where it did not say.
    """

    limit: float
    remaining: float | None = None
    reset_seconds: float | None = None

    def pace(self, own: float) -> float:
        """Seconds a unit, no less than ``own``, such that what remains lasts.

        >>> Heard(600, 599, 0.1).pace(own=0.1), round(Heard(600, 100, 50.0).pace(own=0.1), 2)
        (0.1, 0.18)
        >>> Heard(600, 100, 15.0).pace(own=0.1)  # a window that ends soon
        0.15
        >>> Heard(600, 0, 30.0).pace(own=0.1)
        30.0
        """
        if self.remaining is None or self.reset_seconds is None:
            return own
        share = self.remaining / self.limit
        if abs(self.reset_seconds - PERIOD_SECONDS * (1 - share)) <= 0.1 * PERIOD_SECONDS:  # refilled all the time
            return own / max(LEAST_SHARE, min(1.0, share / SHARE_LEFT))
        return max(own, self.reset_seconds / max(1.0, self.remaining))


def heard_in(headers: Mapping[str, str], now: Callable[[], datetime] | None = None) -> dict[Unit, Heard]:
    """The limits that a reply's headers tell, in OpenAI's form (also Azure's, Groq's and others') or in Anthropic's.

    They come from outside: what is not exactly as expected is left out, for no limit is better than a wrong one.

    Args:
        headers: by their names in lower case.
        now: for Anthropic's, which say at what time there is room again.

    >>> heard_in({"x-ratelimit-limit-requests": "600", "x-ratelimit-remaining-requests": "599",
    ...           "x-ratelimit-reset-requests": "100ms"})
    {'requests': Heard(limit=600.0, remaining=599.0, reset_seconds=0.1)}
    >>> heard_in({"x-ratelimit-limit-tokens": "many"})
    {}
    """
    found: dict[Unit, Heard] = {}
    for unit in UNITS:
        for form in (f"x-ratelimit-{{}}-{unit}", f"anthropic-ratelimit-{unit}-{{}}"):
            limit, left = _count(headers.get(form.format("limit"))), _count(headers.get(form.format("remaining")))
            if not limit:
                continue
            period = seconds_in(headers.get(form.format("renewalperiod"))) or PERIOD_SECONDS  # Azure's
            reset = seconds_in(headers.get(form.format("reset")), now)
            whole = left is not None and left <= limit and reset is not None
            found[unit] = Heard(limit * PERIOD_SECONDS / period, left if whole else None, reset if whole else None)
            break
    return found


def _count(text: str | None) -> float | None:
    """A whole number as it is written by a machine; None for anything else."""
    return float(text) if isinstance(text, str) and _COUNT.fullmatch(text) and int(text) <= MOST else None


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
    """

    rate: RateLimit
    tokens: float


@dataclass(slots=True)
class _Meter:
    """One limit. ``due`` is when what was let through is paid for. What was heard is believed for a while."""

    said: float = math.inf
    limit: float = math.inf
    due: float = -math.inf
    let_through: float = 0.0
    heard: Heard | None = None
    heard_until: float = -math.inf
    heard_after: float = 0.0

    @property
    def most(self) -> float:
        """A minute, by the user and by the provider; infinite where neither has said."""
        return min(self.said, self.limit)

    def pace(self, now: float) -> float:
        """Seconds a unit; 0 where no limit is known."""
        if self.most == math.inf:
            return 0.0
        own = PERIOD_SECONDS / (HEADROOM * self.most)
        if self.heard is None or self.heard.remaining is None or now >= self.heard_until:
            return own
        left = max(0.0, self.heard.remaining - (self.let_through - self.heard_after))
        return Heard(self.heard.limit, left, self.heard_until - now).pace(own)


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
        self.estimates: dict[str, Estimate] = {}
        """Stage -> what its requests cost."""
        self._cost, self._asked = 1.0, 0
        self.waiting = 0
        """Requests that wait here."""

    @property
    def is_known(self) -> bool:
        """Whether there is a limit."""
        return any(one.most < math.inf for one in self._meters.values())

    @property
    def limits(self) -> dict[Unit, float]:
        """What is known, a minute."""
        return {unit: one.most for unit, one in self._meters.items() if one.most < math.inf}

    @property
    def ahead(self) -> int:
        """Requests that should be on their way here, or wait here, so that none goes late."""
        now = self._clock()
        seconds = max(self._meters["requests"].pace(now), self._cost * self._meters["tokens"].pace(now))
        return 2 + math.ceil(AHEAD_SECONDS / seconds) if seconds > 0 else 2

    def say(self, limits: Mapping[Unit, float]) -> None:
        """What the user says; a provider may say less."""
        for unit, limit in limits.items():
            self._meters[unit].said = min(self._meters[unit].said, limit)
        if limits:
            self._changed()

    def hear(self, heard: Mapping[Unit, Heard]) -> None:
        """What the provider said in an answer. What was let through before anything was known is paid for now."""
        now, known = self._clock(), self.limits
        for unit, said in heard.items():
            meter = self._meters[unit]
            meter.limit, meter.heard, meter.heard_after = said.limit, said, meter.let_through
            meter.heard_until = now + (said.reset_seconds or 0.0)
        first = {unit: self._meters[unit].let_through for unit in heard if unit not in known}
        if first:
            self._move({unit: min(cost, MOST_BEFORE * heard[unit].limit) for unit, cost in first.items()})
        if heard:
            self._changed()

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
                    seconds = self._move({"requests": 1.0, "tokens": claim.tokens})
                    if seconds > 0:
                        await sleep(seconds)
            finally:
                self.waiting -= 1
                self._changed()
        for unit, cost in (("requests", 1.0), ("tokens", claim.tokens)):
            self._meters[unit].let_through += cost

    def settle(self, claim: Claim, tokens: float | None) -> None:
        """A request was answered.

        Args:
            tokens: that it has cost; None where that is not reported.
        """
        if tokens is not None and self.is_known:
            self._move({"tokens": tokens - claim.tokens}, wait=False)

    def refund(self, claim: Claim) -> None:
        """It was answered without the provider: from a cache."""
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
        if self._shared is None:
            self._shared = self._make_shared()
        shared = None if self._shared is None else self._shared.pay(by, credit)
        return seconds if shared is None else shared


class Estimate:
    """What a request will cost in tokens, by what others of the same LM have cost."""

    def __init__(self) -> None:
        self._per_character, self._written, self._count = 0.25, 500.0, 0

    def tokens(self, characters: int, most_written: float | None = None) -> float:
        """Of a prompt so long, before it is answered.

        Args:
            most_written: what the reply has at most, where that is known.
        """
        written = self._written if self._count or most_written is None else min(self._written, most_written)
        return self._per_character * characters + written

    def learn(self, characters: int, read: int, written: int) -> None:
        """What one has cost."""
        self._count += 1
        share = max(1 / 16, 1 / self._count)
        if characters > 0:
            self._per_character += share * (read / characters - self._per_character)
        self._written += share * (written - self._written)
