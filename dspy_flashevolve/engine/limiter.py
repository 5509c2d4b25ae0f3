"""A limit that adapts: signals in, decisions of :mod:`dspy_flashevolve.engine.limits` out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from dspy_flashevolve.engine.gradient import Gradient
from dspy_flashevolve.engine.limits import AdaptiveLimit, Gauge, State, Window, after_refusals, decide

TIMED_OUT_SHARE = 0.25
"""A burst of timeouts counts as if this share had been refused."""


@dataclass(slots=True)
class _Burst:
    began: float
    before: State
    width: int
    refused: int = 0


class Limiter:
    """A limit that adapts to the signals it is given.

    Args:
        rules: how.
        clock: seconds.
        pressed: whether requests waited because of this limit since it was last asked.
        changed: called with the limit before and after, and the reason.
    """

    def __init__(
        self,
        rules: AdaptiveLimit,
        clock: Callable[[], float],
        pressed: Callable[[], bool],
        changed: Callable[[int, int, str], None] = lambda before, after, reason: None,
    ) -> None:
        self._rules, self._clock, self._pressed, self._changed = rules, clock, pressed, changed
        self._state = State(rules.start)
        self._gradient = Gradient()
        self._gauges: tuple[Gauge, ...] = ()
        self._burst = _Burst(-math.inf, self._state, 0)
        self._finished = 0
        self._decided = clock()

    @property
    def limit(self) -> int:
        """Slots now."""
        return self._state.limit

    def finished(self, latency_seconds: float, tokens: int = 0, width: float | None = None) -> None:
        """A request was answered.

        Args:
            latency_seconds: how long it took.
            tokens: that were written; 0 where they are not reported.
            width: requests in flight, on average over its life; default: the limit.
        """
        self._finished += 1
        self._gradient.add(self.limit if width is None else width, latency_seconds, tokens)
        self._decide()

    def gauge(self, waiting: float, running: float, cache_use: float) -> None:
        """The server was asked how it is; see :class:`Gauge`."""
        self._gauges = (*self._gauges[-1:], Gauge(self._clock(), waiting, running, cache_use))
        self._decide()

    def refused(
        self, retry_after_seconds: float | None = None, sent_seconds: float | None = None, busy: int | None = None
    ) -> None:
        """A request was refused.

        Args:
            retry_after_seconds: what the endpoint said.
            sent_seconds: when it was sent; one that was sent before the last cut says nothing of the limit since.
            busy: requests in flight, this one included; default: the limit.
        """
        if self._begins_burst(sent_seconds, busy):
            self._burst.refused = 0
        self._burst.refused += 1
        self._cut(self._burst.refused, retry_after_seconds or 0.0, "refused")

    def timed_out(self, sent_seconds: float | None = None, busy: int | None = None) -> None:
        """A request was not answered in time; see :meth:`refused`."""
        if self._begins_burst(sent_seconds, busy):
            self._cut(math.ceil(TIMED_OUT_SHARE * self._burst.width), 0.0, "timed out")

    def _begins_burst(self, sent_seconds: float | None, busy: int | None) -> bool:
        now = self._clock()
        sent = now - self._rules.window_seconds if sent_seconds is None else sent_seconds
        if sent <= self._burst.began:
            return False
        self._burst = _Burst(now, self._state, max(1, min(self.limit, self.limit if busy is None else busy)))
        return True

    def _cut(self, refused: int, retry_after_seconds: float, reason: str) -> None:
        burst, now = self._burst, self._clock()
        state = after_refusals(self._rules, burst.before, now, burst.width, refused, retry_after_seconds)
        self._become(replace(state, limit=min(state.limit, self.limit)), reason)

    def _decide(self) -> None:
        now = self._clock()
        if now < self._decided + self._rules.window_seconds:
            return
        self._decided = now
        fresh = tuple(gauge for gauge in self._gauges if now <= gauge.seconds + self._rules.gauge_seconds)
        window = Window(now, self._finished, self._pressed(), self._gradient.compared(), fresh)
        self._finished = 0
        self._become(*decide(self._rules, self._state, window))

    def _become(self, state: State, reason: str) -> None:
        before, self._state = self._state.limit, state
        if state.limit != before:
            self._changed(before, state.limit, reason)
