"""Quotas of requests and tokens a minute, counted as providers do: by a bucket, in fixed windows or a sliding one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

Counting = Literal["bucket", "fixed", "sliding"]
PERIOD_SECONDS = 60.0


@dataclass(frozen=True)
class Quota:
    """The quota of one key. Its minutes are those of the wall clock: a server's `time_scale` does not change them.

    Attributes:
        requests: Requests a minute, at least 1.
        tokens: Tokens a minute, read and written, at least 1.
        counting: "bucket" is refilled all the time and holds a minute's worth (OpenAI's, Anthropic's), "fixed" begins
            a new minute every minute, "sliding" looks at the last 60 seconds.
        sends_headers: Whether each answer has OpenAI's rate-limit headers.
        holds_seconds: A bucket holds what it is refilled with in this time; many providers look at less than a minute.

    Raises:
        ValueError: If a number is below 1 or `counting` is unknown.
    """

    requests: int
    tokens: int
    counting: Counting = "bucket"
    sends_headers: bool = True
    holds_seconds: float = PERIOD_SECONDS

    def __call__(self) -> QuotaCounter:
        """Return a counter for one server."""
        return QuotaCounter(self)

    def __post_init__(self) -> None:
        if self.requests < 1 or self.tokens < 1 or not self.holds_seconds > 0:
            raise ValueError(f"a quota needs at least 1 request and 1 token, got {self.requests} and {self.tokens}")
        if self.counting not in ("bucket", "fixed", "sliding"):
            raise ValueError(f"counting must be 'bucket', 'fixed' or 'sliding', got {self.counting!r}")


class _Meter:
    """Counts one unit, requests or tokens, against its limit."""

    def __init__(self, limit: int, counting: Counting, holds_seconds: float) -> None:
        self._counting, self._refill = counting, limit / PERIOD_SECONDS
        self._limit = limit * holds_seconds / PERIOD_SECONDS if counting == "bucket" else limit
        self._used, self._since = 0.0, 0.0
        self._charges: deque[tuple[float, float]] = deque()

    def advance(self, now: float) -> None:
        if self._counting == "bucket":
            self._used = max(0.0, self._used - (now - self._since) * self._refill)
            self._since = now
        elif self._counting == "fixed":
            if now // PERIOD_SECONDS > self._since // PERIOD_SECONDS:
                self._used = 0.0
            self._since = now
        else:
            while self._charges and self._charges[0][0] <= now - PERIOD_SECONDS:
                self._used -= self._charges.popleft()[1]

    def has_room(self, cost: float) -> bool:
        return self._used + min(cost, self._limit) <= self._limit + 1e-9  # rounding errors of a refilled bucket

    def charge(self, now: float, cost: float) -> None:
        self._used += cost
        if self._counting == "sliding":
            self._charges.append((now, cost))

    def remaining(self) -> int:
        return max(0, int(self._limit - self._used))

    def reset_seconds(self, now: float) -> float:
        if self._counting == "bucket":
            return self._used / self._refill
        if self._counting == "fixed":
            return PERIOD_SECONDS - now % PERIOD_SECONDS
        return self._charges[-1][0] + PERIOD_SECONDS - now if self._charges else 0.0

    def wait_seconds(self, now: float, cost: float) -> float:
        if self._counting == "bucket":
            return max(0.0, self._used + cost - self._limit) / self._refill
        if self._counting == "fixed":
            return PERIOD_SECONDS - now % PERIOD_SECONDS
        return self._charges[0][0] + PERIOD_SECONDS - now if self._charges else 0.0


class QuotaCounter:
    """Counts requests against a quota.

    >>> counter = QuotaCounter(Quota(requests=2, tokens=1000))
    >>> [counter.admit(0.0, 100), counter.admit(0.0, 100), counter.admit(0.0, 100)]
    [None, None, 30.0]
    >>> counter.headers(0.0)["x-ratelimit-remaining-tokens"], counter.headers(0.0)["x-ratelimit-reset-tokens"]
    ('800', '12s')
    """

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        limits = {"requests": quota.requests, "tokens": quota.tokens}
        self._meters = {
            unit: (limit, _Meter(limit, quota.counting, quota.holds_seconds)) for unit, limit in limits.items()
        }

    def admit(self, now: float, tokens: int) -> float | None:
        """Count a request and return None; where the quota has no room, return the seconds until it would have."""
        costs = {"requests": 1, "tokens": tokens}
        for _, meter in self._meters.values():
            meter.advance(now)
        full = [unit for unit, (_, meter) in self._meters.items() if not meter.has_room(costs[unit])]
        if full:
            return max(self._meters[unit][1].wait_seconds(now, costs[unit]) for unit in full)
        for unit, (_, meter) in self._meters.items():
            meter.charge(now, costs[unit])
        return None

    def headers(self, now: float) -> dict[str, str]:
        """Return the rate-limit headers of OpenAI's API."""
        if not self._quota.sends_headers:
            return {}
        headers: dict[str, str] = {}
        for unit, (limit, meter) in self._meters.items():
            meter.advance(now)
            headers[f"x-ratelimit-limit-{unit}"] = str(limit)
            headers[f"x-ratelimit-remaining-{unit}"] = str(meter.remaining())
            headers[f"x-ratelimit-reset-{unit}"] = _duration(meter.reset_seconds(now))
        return headers


def _duration(seconds: float) -> str:
    """Format a duration as Go does, which OpenAI's headers show: "20ms", "1.5s", "6m0s"."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    text = f"{rest:.3f}".rstrip("0").rstrip(".")
    return f"{int(minutes)}m{text}s" if minutes else f"{text}s"
