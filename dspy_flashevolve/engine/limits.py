"""How many requests an endpoint may be sent at once, found out while they are sent. Dollars: gepa/admission.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dspy_flashevolve.engine.errors import ConfigurationError

WINDOW_SECONDS = 0.2
"""Time between two decisions to grow. Not tuned."""
BOOST = 2.0
"""Slots that each finished request adds until the first sign that the endpoint is full: with 1 the limit doubles in the
time of a request, with 2 it triples. It never more than doubles in a window."""
STEP_SECONDS = 1.0
"""After that sign, one slot is added at most this often. Not tuned."""
HEADROOM = 0.95
"""Share of the ceiling that is used: at 1 the next reply that takes longer than usual ends in refusals. Not tuned."""
CEILING_SECONDS = 60.0
"""How long a ceiling is believed; then it is tried, slot by slot. Each try costs some refusals and a pause, and an
endpoint may have become faster for good. Not tuned."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where a limit begins, and up to what it goes: 1 <= start <= high slots.

    Raises:
        ConfigurationError: anything else.
    """

    start: int
    high: int = 256

    def __post_init__(self) -> None:
        if not 1 <= self.start <= self.high:
            raise ConfigurationError(
                f"adaptive limit: start={self.start}, high={self.high}, expected 1 <= start <= high."
            )


class AdaptiveLimit:
    """A limit on requests in flight by additive increase and multiplicative decrease (AIMD, Chiu and Jain 1989), with
    TCP's slow start before the first sign that the endpoint is full (RFC 5681) and a ceiling that is remembered (as
    CUBIC does, RFC 9438).

    Unlike a token bucket (:class:`~.rates.RateLimit`) it counts what is under way, and finds out by itself how much
    that may be. Unlike TCP it does not take a single refusal for a sign: the circuit breaker
    (:class:`~.provider.CircuitBreaker`) says when refusals are the rule. It does not grow unless requests waited
    because of it since ``take_pressure`` was last called.
    """

    def __init__(
        self,
        bounds: Bounds,
        clock: Callable[[], float],
        take_pressure: Callable[[], bool],
        on_change: Callable[[int, int, str], None] = lambda before, after, reason: None,
    ) -> None:
        self._bounds, self._clock, self._take_pressure, self._on_change = bounds, clock, take_pressure, on_change
        self.limit = bounds.start
        """Slots now."""
        self._is_starting = True
        self._ceiling, self._ceiling_expires = bounds.high, -math.inf
        self._finished = 0
        self._decided, self._grown = clock(), -math.inf

    def record_answer(self) -> None:
        """Record that a request was answered; grow where that is due."""
        self._finished += 1
        now = self._clock()
        if now < self._decided + WINDOW_SECONDS:
            return
        finished, self._finished, self._decided = self._finished, 0, now
        if self._take_pressure():
            most = self._bounds.high if now >= self._ceiling_expires else math.floor(HEADROOM * self._ceiling)
            growth = int(now >= self._grown + STEP_SECONDS)
            if self._is_starting:
                growth = min(self.limit, round(BOOST * finished))
            if (limit := min(most, self.limit + growth)) > self.limit:
                self._grown = now
                self._become(limit, "it binds")

    def cut(self, in_flight: int, reason: str) -> None:
        """Shrink to what the endpoint works on, and by half at most: one that turns everything away for a moment says
        little of how much it can do."""
        self._ceiling = min(self._bounds.high, max(1, in_flight, self.limit // 2))
        self._ceiling_expires, self._is_starting = self._clock() + CEILING_SECONDS, False
        self._become(min(self.limit, max(1, math.floor(HEADROOM * self._ceiling))), reason)

    def _become(self, limit: int, reason: str) -> None:
        before, self.limit = self.limit, limit
        if limit != before:
            self._on_change(before, limit, reason)
