"""Requests and tokens a minute: they are sent evenly, just below what a provider takes, and not refused.

A token bucket for each unit, as the user gives its limit or as the provider reports it in the headers of its replies.
Unlike an adaptive limit (``limits.py``) it counts what is sent a minute and not what is under way, and somebody has to
say the limit: refusals alone teach it nothing. A provider that reports nothing is asked again request by request
(``provider.py``).

Headers come from outside: what is not exactly as expected is left out, for no limit is better than a wrong one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

import anyio

Unit = str
UNITS: tuple[Unit, Unit] = ("requests", "tokens")
"""What providers limit."""
PERIOD_SECONDS = 60.0
"""Limits are a minute's."""
HEADROOM = 0.96
"""Share of a limit that is used. With :data:`CREDIT_SECONDS` no minute holds more than 97%; measured over real HTTP
nothing was refused. At 1 a provider and this clock that disagree by a percent end in refusals."""
CREDIT_SECONDS = 0.5
"""Time of unused limit that may be made up for at once, since timers wake late. It adds under one percent to a minute;
without it a busy loop loses what it slept too long."""
REFUSAL_COST = 4.0
"""Requests that a refusal counts as: so of two runs that are both given the whole limit of their key one request in six
is refused, where half of them would be. A fifth of refusals at random would take 45% of a limit."""
LEAST_PACE = 0.1
"""Share of a limit's pace that is kept however little a provider says is left, so that a run never stands still because
of an old header. Not tuned."""
FIRST_TOKENS = 1000.0
"""What a request is expected to cost before anything was answered. Not tuned: each request corrects its own estimate,
so that a limit in tokens is missed by it for the first requests only."""
COST_ANSWERS = 16
"""Requests over which the mean cost in tokens is taken. Not tuned."""
MAX_LIMIT = 10**12
"""Requests or tokens a minute; what is above is no limit."""
MAX_WAIT_SECONDS = 86400.0
"""The longest time that is believed: a day, the longest period in which providers count."""
_COUNT = re.compile(r"[0-9]{1,15}")
_DURATION = re.compile(
    r"(?:(\d{1,4})d)?(?:(\d{1,5})h)?(?:(\d{1,6})m(?!s))?(?:(\d{1,7}(?:\.\d{1,9})?)s)?(?:(\d{1,9}(?:\.\d{1,9})?)ms)?",
    re.A,
)
_SECONDS = re.compile(r"\d{1,7}(?:\.\d{1,9})?", re.A)


@dataclass(frozen=True, slots=True)
class ReportedLimit:
    """What a provider reported of one limit with a reply: requests or tokens a minute, how many of them it would accept
    at once, and the seconds until it would accept all (None where it did not say)."""

    limit: float
    remaining: float | None = None
    reset_seconds: float | None = None


class _Bucket:
    """The token bucket of one unit, as a clock (the generic cell rate algorithm, ITU-T I.371): the time at which all
    that was sent is paid for."""

    def __init__(self) -> None:
        self.user_limit = self.reported_limit = math.inf
        self.paid_seconds = -math.inf
        self._report: ReportedLimit | None = None
        self._expires = -math.inf
        self._sent_since_report = 0.0

    @property
    def limit(self) -> float:
        """The limit a minute; infinite where nobody has told it."""
        return min(self.user_limit, self.reported_limit)

    def record_report(self, report: ReportedLimit, now: float) -> None:
        """Take what the provider reports; it can only slow the bucket down."""
        self.reported_limit, self._report, self._sent_since_report = report.limit, report, 0.0
        self._expires = now + (report.reset_seconds or 0.0)

    def record_refusal(self, cost: float, now: float, retry_after_seconds: float) -> None:
        """Send nothing for as long as the provider says, where it reports that nothing is left; then forget the report,
        which is true for a moment only, and not renewed where only refusals have headers. Any other refusal costs as
        much as some requests, since others may use the limit, too."""
        if self._report is not None and self._report.remaining == 0:
            self.paid_seconds = max(self.paid_seconds, now + retry_after_seconds)
            self._report = None
        elif self.limit < math.inf:
            self.correct(REFUSAL_COST * cost, now)

    def pace(self, now: float) -> float:
        """Return the seconds that one request or token takes to pay for, 0 where no limit is known: at least so many
        that what the provider said remains, which runs on a key share, lasts until its reset."""
        if self.limit == math.inf:
            return 0.0
        own, report = PERIOD_SECONDS / (HEADROOM * self.limit), self._report
        if report is None or report.remaining is None or now >= self._expires:
            return own
        remaining = max(1.0, report.remaining - self._sent_since_report)
        return min(own / LEAST_PACE, max(own, (self._expires - now) / remaining))

    def pay(self, cost: float, now: float, wait: float) -> None:
        """Count a cost as sent after so many seconds; what was not used long before is lost."""
        self._sent_since_report += cost
        self.paid_seconds = max(self.paid_seconds, now + wait - CREDIT_SECONDS)
        self.correct(cost, now)

    def correct(self, cost: float, now: float) -> None:
        """Correct the cost of what was sent. One that is above a minute's limit holds up others for a minute."""
        bound = PERIOD_SECONDS / HEADROOM
        self.paid_seconds += max(-bound, min(bound, cost * self.pace(now)))


class RateLimit:
    """The limits of one model at one server for one key. Used on the run's loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets = {unit: _Bucket() for unit in UNITS}
        self._queue = anyio.Lock()
        self._mean_tokens: dict[str, float] = {}
        """Stage -> the mean cost of its requests."""
        self._waiting = 0

    @property
    def is_known(self) -> bool:
        """Whether there is a limit."""
        return bool(self.limits)

    @property
    def limits(self) -> dict[Unit, float]:
        """The limits a minute that the user or the provider has told."""
        return {unit: bucket.limit for unit, bucket in self._buckets.items() if bucket.limit < math.inf}

    @property
    def wait_seconds(self) -> float:
        """How long a request that comes now is going to wait; 0 where no limit is known."""
        now, costs = self._clock(), (1.0, self._usual_tokens)
        waits = [
            bucket.paid_seconds - now + self._waiting * cost * bucket.pace(now)
            for bucket, cost in zip(self._buckets.values(), costs, strict=True)
            if bucket.limit < math.inf
        ]
        return max(0.0, *waits) if waits else 0.0

    def add_user_limits(self, limits: Mapping[Unit, float]) -> None:
        """Take limits a minute from the user; the provider may report lower ones."""
        for unit, limit in limits.items():
            self._buckets[unit].user_limit = min(self._buckets[unit].user_limit, limit)

    def record_reported_limits(self, reports: Mapping[Unit, ReportedLimit]) -> None:
        """Take the limits that the provider reports with a reply."""
        for unit, report in reports.items():
            self._buckets[unit].record_report(report, self._clock())

    def record_refusal(self, retry_after_seconds: float | None) -> None:
        """Record a refusal. Only where the reports say that nothing is left do all requests wait for the time that it
        names: else it may be the one request's alone."""
        for bucket, cost in zip(self._buckets.values(), (1.0, self._usual_tokens), strict=True):
            bucket.record_refusal(cost, self._clock(), min(PERIOD_SECONDS, retry_after_seconds or 0.0))

    async def admit(self, tokens: float, sleep: Callable[[float], Awaitable[None]]) -> None:
        """Wait until a request that is expected to cost so many tokens may be sent, in the order in which they come.
        Where ``sleep`` returns early it is sent all the same."""
        if not self.is_known:
            return
        self._waiting += 1
        try:
            async with self._queue:
                if (wait := self._pay({"requests": 1.0, "tokens": tokens})) > 0:
                    await sleep(wait)
        finally:
            self._waiting -= 1

    @property
    def _usual_tokens(self) -> float:
        return sum(self._mean_tokens.values()) / len(self._mean_tokens) if self._mean_tokens else FIRST_TOKENS

    def expected_tokens(self, stage: str) -> float:
        """Return the tokens that a request is expected to cost: as others of its stage have, else as all."""
        return self._mean_tokens.get(stage, self._usual_tokens)

    def record_cost(self, stage: str, tokens: float, expected_tokens: float) -> None:
        """Learn from what a request has cost, and correct what was expected."""
        mean = self._mean_tokens.setdefault(stage, tokens)
        self._mean_tokens[stage] = mean + (tokens - mean) / COST_ANSWERS
        self.correct(0.0, tokens - expected_tokens)

    def correct(self, requests: float, tokens: float) -> None:
        """Correct what was counted of a request: all of it where no provider saw it."""
        for bucket, cost in zip(self._buckets.values(), (requests, tokens), strict=True):
            if bucket.limit < math.inf:
                bucket.correct(cost, self._clock())

    def _pay(self, costs: Mapping[Unit, float]) -> float:
        """Move the clocks on by the costs of a request; return how long it waits."""
        now = self._clock()
        buckets = {bucket: costs[unit] for unit, bucket in self._buckets.items() if bucket.limit < math.inf}
        wait = max(0.0, *(bucket.paid_seconds - now for bucket in buckets))
        for bucket, cost in buckets.items():
            bucket.pay(cost, now, wait)
        return wait


def limits_in_headers(
    headers: Mapping[str, str], now: Callable[[], datetime] | None = None
) -> dict[Unit, ReportedLimit]:
    """Return the limits in a reply's headers (names in lower case), in OpenAI's form (also Azure's, Groq's and others')
    or in Anthropic's, which say at what time there is room again.

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
    seconds = math.inf
    if _SECONDS.fullmatch(text):
        seconds = float(text)
    elif (match := _DURATION.fullmatch(text)) is not None:
        parts = zip(match.groups(), (86400, 3600, 60, 1, 0.001), strict=True)
        seconds = sum(float(part) * unit for part, unit in parts if part)
    else:
        try:
            when = datetime.fromisoformat(text.replace("Z", "+00:00"))
            if when.tzinfo is not None:
                moment = datetime.now(timezone.utc) if now is None else now()
                seconds = max(0.0, (when - moment).total_seconds())
        except (ValueError, OverflowError):
            return None
    return seconds if seconds <= MAX_WAIT_SECONDS else None
