"""How many requests an endpoint may be sent at once, found out while they are sent."""

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
GAUGE_SECONDS = 5.0
"""Age from which a server's gauges are ignored: they are read once a second."""
CACHE_USE = 0.9
"""Share of the server's KV cache from which the limit does not grow: vLLM preempts requests when it is full."""


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


@dataclass(frozen=True, slots=True)
class Gauge:
    """What a server said of itself at a moment: requests that it has taken and not begun, those that it works on, and
    the share of its KV cache that is in use."""

    seconds: float
    waiting: float
    running: float
    cache_use: float

    @property
    def is_crowded(self) -> bool:
        """Whether many wait: more than a tenth of those that run, and more than two."""
        return self.waiting > max(2.0, 0.1 * self.running)

    @property
    def has_room(self) -> bool:
        """Whether none waits, and the cache takes more."""
        return not self.waiting and self.cache_use < CACHE_USE


class AdaptiveLimit:
    """A limit on requests in flight by additive increase and multiplicative decrease (AIMD, Chiu and Jain 1989), with
    TCP's slow start before the first sign that the endpoint is full (RFC 5681) and a ceiling that is remembered (as
    CUBIC does, RFC 9438).

    Unlike a token bucket (:class:`~.rates.RateLimit`) it counts what is under way, and finds out by itself how much
    that may be. Unlike TCP it does not take a single refusal for a sign: the circuit breaker
    (:class:`~.endpoints.CircuitBreaker`) says when refusals are the rule. It does not grow unless requests waited
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
        self._gauges: list[Gauge] = []
        self._finished = 0
        self._decided, self._grown = clock(), -math.inf

    def record_answer(self) -> None:
        """Record that a request was answered."""
        self._finished += 1
        self._decide()

    def record_gauge(self, waiting: float, running: float, cache_use: float) -> None:
        """Record what the server said of itself; see :class:`Gauge`."""
        self._gauges = [*self._gauges[-1:], Gauge(self._clock(), waiting, running, cache_use)]
        self._decide()

    def cut(self, in_flight: int, reason: str) -> None:
        """Shrink to what the endpoint works on, and by half at most: one that turns everything away for a moment says
        little of how much it can do."""
        self._lower(max(in_flight, self.limit // 2), HEADROOM, reason)

    def _lower(self, ceiling: int, share: float, reason: str) -> None:
        self._ceiling = min(self._bounds.high, max(1, ceiling))
        self._ceiling_expires, self._is_starting = self._clock() + CEILING_SECONDS, False
        self._become(min(self.limit, max(1, math.floor(share * self._ceiling))), reason)

    def _decide(self) -> None:
        now = self._clock()
        if now < self._decided + WINDOW_SECONDS:
            return
        finished, self._finished, self._decided = self._finished, 0, now
        is_pressed, gauges = (
            self._take_pressure(),
            [gauge for gauge in self._gauges if now <= gauge.seconds + GAUGE_SECONDS],
        )
        if len(gauges) > 1 and all(gauge.is_crowded for gauge in gauges):
            running = math.ceil(max(gauge.running for gauge in gauges))
            self._lower(min(self.limit, running), 1.0, "requests wait in the server")
        elif is_pressed and (gauges[-1].has_room if gauges else finished):
            most = self._bounds.high if now >= self._ceiling_expires else math.floor(HEADROOM * self._ceiling)
            growth = int(now >= self._grown + STEP_SECONDS)
            if self._is_starting:
                # A gauge tells that there is room, whoever has ended.
                by_gauge = math.ceil(self.limit / 2) if gauges and gauges[-1].seconds > self._grown else 0
                growth = min(self.limit, max(by_gauge, round(BOOST * finished)))
            if (limit := min(most, self.limit + growth)) > self.limit:
                self._grown = now
                self._become(limit, "it binds")

    def _become(self, limit: int, reason: str) -> None:
        before, self.limit = self.limit, limit
        if limit != before:
            self._on_change(before, limit, reason)
