"""What a provider says of its limits a minute in the headers of its replies.

Headers come from outside: what is not exactly as expected is left out, for no limit is better than a wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

Unit = str
UNITS: tuple[Unit, Unit] = ("requests", "tokens")
"""What providers limit."""
PERIOD_SECONDS = 60.0
"""Limits are a minute's."""
COMFORTABLE_SHARE = 0.3
"""While a provider that refills all the time says that at least this share of its limit is left, the limit is used in
full; below it others use the key, too, and the pace falls in proportion. Chosen by hand: half of it leaves runs that
share a key less time to slow down before the first refusal, double slows a run down that is alone after each burst."""
MIN_PACE_SHARE = 0.1
"""Share of a limit's pace that is kept however little a refilling provider says is left, so that a run never stands
still because of an old header. A round number: with half of it such a header costs twice the time, with double a key
that others use up gets twice the refusals."""
MAX_LIMIT = 10**12
"""Requests or tokens a minute; what is above is no limit."""
MAX_WAIT_SECONDS = 86400.0
"""The longest time that is believed: a day, the longest period in which providers count."""
REFILL_TOLERANCE = 0.1
"""A reset time within this share of a minute of what a bucket would need counts as a bucket's: headers are rounded to
seconds, and some tell the time before the request was counted."""
_COUNT = re.compile(r"[0-9]{1,15}")
_DURATION = re.compile(
    r"(?:(\d{1,4})d)?(?:(\d{1,5})h)?(?:(\d{1,6})m(?!s))?(?:(\d{1,7}(?:\.\d{1,9})?)s)?(?:(\d{1,9}(?:\.\d{1,9})?)ms)?",
    re.A,
)
_SECONDS = re.compile(r"\d{1,7}(?:\.\d{1,9})?", re.A)


@dataclass(frozen=True, slots=True)
class ReportedLimit:
    """What a provider reported of one limit with a reply.

    Args:
        limit: requests or tokens a minute, above 0.
        remaining: how many of them it would accept at once, from 0 to ``limit``; None where it did not say.
        reset_seconds: time until it would accept ``limit`` at once; None where it did not say.
    """

    limit: float
    remaining: float | None = None
    reset_seconds: float | None = None

    @property
    def is_refilled(self) -> bool:
        """Whether the provider refills a bucket all the time: then what is missing takes its share of a minute, where
        one that counts in windows needs the rest of its window."""
        if self.remaining is None or self.reset_seconds is None:
            return False
        missing = PERIOD_SECONDS * (1 - self.remaining / self.limit)
        return abs(self.reset_seconds - missing) <= REFILL_TOLERANCE * PERIOD_SECONDS

    def pace(self, own: float) -> float:
        """Return seconds per request or token, at least ``own``, at which what remains lasts until the reset.

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
            return own / max(MIN_PACE_SHARE, min(1.0, self.remaining / self.limit / COMFORTABLE_SHARE))
        return max(own, self.reset_seconds / max(1.0, self.remaining))


def limits_in_headers(
    headers: Mapping[str, str], now: Callable[[], datetime] | None = None
) -> dict[Unit, ReportedLimit]:
    """Return the limits in a reply's headers, in OpenAI's form (also Azure's, Groq's and others') or in Anthropic's.

    Args:
        headers: by their names in lower case.
        now: for Anthropic's, which say at what time there is room again.

    >>> limits_in_headers({"x-ratelimit-limit-requests": "600", "x-ratelimit-remaining-requests": "599",
    ...           "x-ratelimit-reset-requests": "100ms"})
    {'requests': ReportedLimit(limit=600.0, remaining=599.0, reset_seconds=0.1)}
    >>> limits_in_headers({"x-ratelimit-limit-tokens": "many"})
    {}
    """
    limits: dict[Unit, ReportedLimit] = {}
    for unit in UNITS:
        for form in (f"x-ratelimit-{{}}-{unit}", f"anthropic-ratelimit-{unit}-{{}}"):
            limit, remaining = _count(headers.get(form.format("limit"))), _count(headers.get(form.format("remaining")))
            if not limit:
                continue
            period = seconds_in(headers.get(form.format("renewalperiod"))) or PERIOD_SECONDS  # Azure's
            reset = seconds_in(headers.get(form.format("reset")), now)
            is_complete = remaining is not None and remaining <= limit and reset is not None
            limits[unit] = ReportedLimit(
                limit * PERIOD_SECONDS / period, remaining if is_complete else None, reset if is_complete else None
            )
            break
    return limits


def _count(text: str | None) -> float | None:
    """Parse a whole number as a machine writes it; None for anything else."""
    return float(text) if isinstance(text, str) and _COUNT.fullmatch(text) and int(text) <= MAX_LIMIT else None


def seconds_in(text: str | None, now: Callable[[], datetime] | None = None) -> float | None:
    """Parse a time to wait, up to a day; None for anything else.

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
    return seconds if seconds <= MAX_WAIT_SECONDS else None
