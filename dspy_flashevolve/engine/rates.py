"""Requests and tokens a minute: they are sent evenly, just below what a provider takes, and not refused.

Each limit is a clock (``shared_rates.py``). No 60 seconds hold more than 97% of a limit and one request, wherever they
begin: that is below the limit of a provider that counts in fixed windows, in a sliding one, or by a bucket that is
refilled all the time. (A request that costs over 3% of the tokens may be too many for one that counts in windows.) What
a provider reports of itself (``rate_headers.py``) can only slow this down: others may use the key, too, or it may count
tokens that it does not report. Tokens are estimated before a request is sent, and corrected by what is reported.

Where a refusal is one of the account, nothing is sent until the time that the provider named (Retry-After, else the end
of its window by its headers, else a short backoff). Where no limit is known the pace is learned from refusals
(``learned_rates.py``).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import anyio

from dspy_flashevolve.engine.learned_rates import TRIAL_SECONDS, Claim, LearnedPace, RefusalSuspicion
from dspy_flashevolve.engine.loop import EARLY_SECONDS
from dspy_flashevolve.engine.rate_headers import PERIOD_SECONDS, UNITS, ReportedLimit, Unit
from dspy_flashevolve.engine.shared_rates import MAX_AHEAD_SECONDS, SharedTimes, pay

HEADROOM = 0.96
"""Share of a limit that is used. With :data:`CREDIT_SECONDS` no minute holds more than 97%; measured over real HTTP
nothing was refused (docs/scheduling.md, A provider's limits). At 1 a provider and this clock that disagree by a percent
end in refusals."""
CREDIT_SECONDS = 0.5
"""Time of unused limit that may be made up for at once, since timers wake late. It adds under one percent to a minute;
without it a busy loop loses what it slept too long."""
MAX_EARLIER_SHARE = 0.5
"""Share of a minute's limit that is paid for at most of what was let through before the limit was known. With all of
it, a first burst stops the run for a minute although most providers start with a full bucket; with none, the burst and
a minute's limit come together. Chosen by hand between the two."""
AHEAD_SECONDS = 0.5
"""Requests get a slot so long before they may go, since their programs take time until they ask. Half of it leaves the
limit unused where programs are slow to start, double holds slots that others could use."""
FIRST_BACKOFF_SECONDS, BACKOFF_FACTOR, MAX_BACKOFF_SECONDS = 1.0, 1.5, 5.0
"""Waits after refusals that are not told how long to wait, or that follow each other without an answer in between. The
first is what providers name most often. With 5 seconds at most a window that opens again is missed by a twelfth of a
minute; a fixed window that is used up after 10 of its 60 seconds is asked 13 times in vain."""
COST_ANSWERS = 16
"""Requests over which the mean cost in tokens is taken. A round number, since what a request has cost corrects its
estimate: with half of it estimates follow single replies, with double they follow a change of prompts later."""


@dataclass(slots=True)
class _Meter:
    """The clock of one limit, of requests or of tokens.

    Args:
        user_limit, reported_limit, learned_limit: a minute, by whom it is known; infinite where it is not.
        due: when what was let through is paid for.
        let_through: requests or tokens so far.
        report: what the provider reported last; None where that is old.
        report_expires: when its window, or its bucket, is full again.
        let_through_at_report: what was let through when it came.
    """

    user_limit: float = math.inf
    reported_limit: float = math.inf
    learned_limit: float = math.inf
    due: float = -math.inf
    let_through: float = 0.0
    report: ReportedLimit | None = None
    report_expires: float = -math.inf
    let_through_at_report: float = 0.0

    @property
    def told_limit(self) -> float:
        """The limit a minute that the user or the provider has told; infinite where neither has."""
        return min(self.user_limit, self.reported_limit)

    @property
    def limit(self) -> float:
        """The limit a minute that holds: the told one or, where none is, the learned one."""
        return min(self.told_limit, self.learned_limit)

    @property
    def is_used_up(self) -> bool:
        """Whether nothing is left of a window whose end the provider has reported."""
        return self.report is not None and self.report.remaining == 0 and not self.report.is_refilled

    def pace(self, now: float) -> float:
        """Return the seconds that one request or token takes to pay for; 0 where no limit is known."""
        if self.limit == math.inf:
            return 0.0
        own = PERIOD_SECONDS / (HEADROOM * self.limit)
        if self.report is None or self.report.remaining is None or now >= self.report_expires:
            return own
        left = max(0.0, self.report.remaining - (self.let_through - self.let_through_at_report))
        return ReportedLimit(self.report.limit, left, self.report_expires - now).pace(own)


class RateLimit:
    """The limits of one model at one endpoint for one key. Used on the run's loop.

    Args:
        clock: seconds.
        make_shared_times: makes the clocks that other runs on the same key share, once a limit is told; they may be
            None, for this run alone.
        on_change: called when the number of waiting requests, or a limit, has changed.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        make_shared_times: Callable[[], SharedTimes | None] = lambda: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock, self._make_shared_times, self._on_change = clock, make_shared_times, on_change
        self._meters: dict[Unit, _Meter] = {unit: _Meter() for unit in UNITS}
        self._shared_times: SharedTimes | None = None
        self._queue = anyio.Lock()
        self._learned_pace, self._suspicion = LearnedPace(), RefusalSuspicion()
        self._closed_until = -math.inf
        self._is_closed = False
        self._refusals_in_a_row = 0
        self.estimates: dict[str, TokenEstimate] = {}
        """Stage -> what its requests cost."""
        self._mean_tokens, self._requests = 1.0, 0
        self.waiting = 0
        """Requests that wait here until they may be sent."""

    @property
    def is_known(self) -> bool:
        """Whether there is a limit, or a refusal for which all wait."""
        return self._is_closed or any(meter.limit < math.inf for meter in self._meters.values())

    @property
    def limits(self) -> dict[Unit, float]:
        """The limits a minute that the user or the provider has told."""
        return {unit: meter.told_limit for unit, meter in self._meters.items() if meter.told_limit < math.inf}

    @property
    def ahead(self) -> int:
        """Requests that should wait here, or be on their way here, so that the limit is used up."""
        now = self._clock()
        seconds = max(self._meters["requests"].pace(now), self._mean_tokens * self._meters["tokens"].pace(now))
        return 2 + math.ceil(AHEAD_SECONDS / seconds) if seconds > 0 else 2

    def add_user_limits(self, limits: Mapping[Unit, float]) -> None:
        """Take limits a minute from the user; the provider may report lower ones."""
        for unit, limit in limits.items():
            self._meters[unit].user_limit = min(self._meters[unit].user_limit, limit)
        if limits:
            self._on_change()

    def record_reported_limits(self, reports: Mapping[Unit, ReportedLimit]) -> None:
        """Take the limits that the provider reports with an answer.

        What was let through in the minute before the limit was known is paid for now, at the pace that it allows; but
        not where nothing is left of it: then :meth:`record_refusal` says when it goes on.
        """
        now, known = self._clock(), self.limits
        if not reports:
            return
        for unit, report in reports.items():
            meter = self._meters[unit]
            meter.reported_limit, meter.report, meter.let_through_at_report = report.limit, None, meter.let_through
            meter.report_expires = now + (report.reset_seconds or 0.0)
        self._learned_pace.forget()
        self._apply_learned_pace()
        earlier = {
            unit: min(self._meters[unit].let_through, MAX_EARLIER_SHARE * report.limit)
            for unit, report in reports.items()
            if unit not in known and report.remaining != 0
        }
        if earlier:  # before the reports hold, which already lack what was let through
            self._pay(earlier)
        for unit, report in reports.items():
            self._meters[unit].report = report
        self._on_change()

    def record_refusal(self, claim: Claim, retry_after_seconds: float | None, is_isolated: bool = False) -> None:
        """Record a refusal; where it is the account's, send nothing until the provider wants to be asked again.

        Args:
            claim: the request.
            retry_after_seconds: what the provider said; None where it said nothing. Then its last report tells, where
                nothing is left of a window.
            is_isolated: since its first refusal more other requests were answered than turned away.
        """
        now, sent = self._clock(), claim.sent_seconds
        self._learned_pace.withdraw(claim)
        nothing_left = any(meter.report is not None and meter.report.remaining == 0 for meter in self._meters.values())
        if is_isolated and not nothing_left:
            if self._suspicion.clear_suspicion():
                self._learned_pace.forget()
                self._apply_learned_pace()
            return
        if not self._is_closed and (sent is None or sent < self._learned_pace.opened_seconds):
            return  # it was sent before the last wait, which its refusal came too late for
        self._suspicion.record_refusal(claim)
        if not self._is_closed:
            self._learned_pace.record_refusal(now)
            self._apply_learned_pace()
        if not nothing_left and not self._suspicion.is_limited:
            return  # it may be this request's alone, which waits by itself
        if self._learned_pace.limits_at_once and not self.limits:
            return  # others are answered as soon as a place is free: only this request waits
        backoff = FIRST_BACKOFF_SECONDS * BACKOFF_FACTOR**self._refusals_in_a_row
        wait = min(MAX_BACKOFF_SECONDS, backoff)
        if retry_after_seconds is None:
            ends = [meter.report_expires - now for meter in self._meters.values() if meter.is_used_up]
            wait = max([wait, *ends])
        elif self._refusals_in_a_row:
            wait = max(wait, retry_after_seconds)
        elif nothing_left or self._suspicion.is_burst:
            wait = retry_after_seconds
        else:  # a single refusal: it may name a time that is this request's alone, and the next one tells
            wait = min(MAX_BACKOFF_SECONDS, retry_after_seconds)
        self._closed_until, self._is_closed = max(self._closed_until, now + min(PERIOD_SECONDS, wait)), True
        for meter in self._meters.values():
            meter.report = None  # it was true for a moment at which nothing was left
            meter.due = max(meter.due, self._closed_until)
        self._on_change()

    def _reopen(self) -> None:
        """Send again: the wait after a refusal is over."""
        self._is_closed = False
        was_taken = self._learned_pace.reopen(self._clock())
        self._refusals_in_a_row = 0 if was_taken else self._refusals_in_a_row + 1
        if not was_taken:  # the next request tells whether anything is taken again
            for meter in self._meters.values():
                meter.due = max(meter.due, self._clock() + TRIAL_SECONDS)
        self._apply_learned_pace()
        self._on_change()

    def _apply_learned_pace(self) -> None:
        """Go by the learned pace, where no limit is told."""
        self._meters["requests"].learned_limit = math.inf if self.limits else self._learned_pace.limit(self._clock())

    async def admit(self, claim: Claim, sleep: Callable[[float], Awaitable[None]]) -> None:
        """Wait until a request may be sent; in the order in which they come.

        Args:
            sleep: waits so many seconds; where it returns early the request is sent all the same.
        """
        self._requests += 1
        self._mean_tokens += (claim.tokens - self._mean_tokens) / min(COST_ANSWERS, self._requests)
        if self.is_known:
            self.waiting += 1
            self._on_change()
            try:
                async with self._queue:
                    await self._wait_for_its_turn(claim, sleep)
            finally:
                self.waiting -= 1
                self._on_change()
        self.record_sent(claim)

    async def _wait_for_its_turn(self, claim: Claim, sleep: Callable[[float], Awaitable[None]]) -> None:
        turn = self._clock() + self._pay({"requests": 1.0, "tokens": claim.tokens})
        while (wait := max(turn, self._closed_until) - self._clock()) > 0:  # a refusal meanwhile makes it longer
            until = self._clock() + wait
            await sleep(wait)
            if self._clock() < until - EARLY_SECONDS:
                self._skip_waits()  # the sleep was cut short
                break
        if self._is_closed:
            self._reopen()

    def _skip_waits(self) -> None:
        """Let later requests wait neither for a refusal nor for a learned pace, since the run is to end."""
        self._closed_until, self._is_closed = -math.inf, False
        self._learned_pace.forget()
        self._apply_learned_pace()
        if not self.limits:
            for meter in self._meters.values():
                meter.due = min(meter.due, self._clock())

    def record_sent(self, claim: Claim) -> None:
        """Record that a request goes out, unless :meth:`admit` has done so."""
        if claim.sent_seconds is not None:
            return
        claim.sent_seconds = self._clock()
        self._learned_pace.record_sent(claim, claim.sent_seconds)
        self._suspicion.record_sent(claim)
        for unit, cost in (("requests", 1.0), ("tokens", claim.tokens)):
            self._meters[unit].let_through += cost

    def settle(self, claim: Claim, tokens: float | None) -> None:
        """Record that a request was answered, and correct the tokens that were estimated for it.

        Args:
            tokens: that it has cost; None where that is not reported.
        """
        self._learned_pace.record_answer(claim, self._clock())
        self._suspicion.record_answer(claim, self._clock())
        self._apply_learned_pace()
        if tokens is not None and self.is_known:
            self._pay({"tokens": tokens - claim.tokens}, wait=False)

    def leave(self, claim: Claim) -> None:
        """Count a request as under way no more, whatever became of it."""
        self._learned_pace.leave(claim)

    def refund(self, claim: Claim) -> None:
        """Take a request back that was answered from a cache, without the provider."""
        self._learned_pace.withdraw(claim)
        if self.is_known:
            self._pay({"requests": -1.0, "tokens": -claim.tokens}, wait=False)

    def _pay(self, costs: Mapping[Unit, float], wait: bool = True) -> float:
        """Move the clocks on by some costs; return how long a request with these costs waits.

        Args:
            wait: a request waits for it; else it corrects the costs of earlier ones.
        """
        now = self._clock()
        paces = {unit: self._meters[unit].pace(now) for unit in costs}
        by: dict[Unit, float] = {
            unit: max(-MAX_AHEAD_SECONDS, min(PERIOD_SECONDS / HEADROOM, cost * paces[unit]))
            for unit, cost in costs.items()
            if paces[unit] > 0
        }
        if not by:
            return 0.0
        credit = CREDIT_SECONDS if wait else math.inf
        due, seconds = pay({unit: self._meters[unit].due - now for unit in by}, by, credit)
        for unit in by:
            self._meters[unit].due = now + due[unit]
        if not self.limits:
            return seconds  # what a run has learned is its own share of the limit already
        if self._shared_times is None:
            self._shared_times = self._make_shared_times()
        shared_seconds = None if self._shared_times is None else self._shared_times.pay(by, credit)
        return seconds if shared_seconds is None else shared_seconds


class TokenEstimate:
    """Estimates what a request will cost in tokens, by what others of the same LM have cost."""

    def __init__(self) -> None:
        # Before the first answer: four characters a token, as in English prose, and a reply of a page. A limit in
        # tokens is missed by that for the first requests only, which are corrected by what they cost.
        self._per_character, self._written, self._count = 0.25, 500.0, 0

    def expected_tokens(self, characters: int, most_written: float | None = None) -> float:
        """Return the expected tokens of a prompt and its reply.

        Args:
            characters: of the prompt.
            most_written: tokens of the reply at most, where that is known.
        """
        written = self._written if self._count or most_written is None else min(self._written, most_written)
        return self._per_character * characters + written

    def record_usage(self, characters: int, read: int, written: int) -> None:
        """Learn from a request that was answered: its characters, and the tokens that were read and written."""
        self._count += 1
        share = max(1 / COST_ANSWERS, 1 / self._count)
        if characters > 0:
            self._per_character += share * (read / characters - self._per_character)
        self._written += share * (written - self._written)
