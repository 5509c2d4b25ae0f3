"""How many requests an endpoint may be sent at once, found out while they are sent.

Additive increase, multiplicative decrease (Chiu and Jain 1989), with TCP's slow start before the first sign that the
endpoint is full (RFC 5681) and a remembered ceiling that is tried again seldom (as CUBIC does, RFC 9438). What is
decided once a window is a pure function of what was seen in it: :func:`decide`; a refusal is acted on at once, for
as long as the limit is above the endpoint's own, every slot that comes free is refused: :func:`after_refusals`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from dspy_flashevolve.engine.errors import ConfigurationError

WINDOW_SECONDS = 0.2
"""Time between two decisions."""
BOOST = 2.0
"""Slots that each finished request adds until the first sign that the endpoint is full: with 1 the limit doubles in the
time of a request, with 2 it triples. It never more than doubles in a window."""
STEP_SECONDS = 1.0
"""After that sign, one slot is added at most this often."""
HEADROOM = 0.95
"""Share of the ceiling that is used."""
PROBE_SECONDS = 60.0
"""How long a ceiling is believed; then it is tried, slot by slot."""
LEAST_ELASTICITY = 0.1
"""Share of additional width that must become throughput."""
GAUGE_SECONDS = 5.0
"""Age from which a server's gauges are ignored."""
CACHE_USE = 0.9
"""Share of the server's KV cache from which the limit does not grow."""
TIMED_OUT_SHARE = 0.25
"""A burst of timeouts counts as if this share had been refused."""
SAMPLES = 24
"""Requests that throughput at one width is told from, at least; and at least half as many as are in flight, since the
first to end are the shortest, whose speed is not that of all."""
WIDER = 1.5
"""Throughput is compared with that at a width smaller by this factor."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where a limit begins, and within what it stays: 1 <= low <= start <= high slots.

    Raises:
        ConfigurationError: anything else.
    """

    start: int
    high: int = 256
    low: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.start <= self.high:
            raise ConfigurationError(
                f"adaptive limit: low={self.low}, start={self.start}, high={self.high}, expected "
                "1 <= low <= start <= high."
            )


@dataclass(frozen=True, slots=True)
class Gauge:
    """What a server says of itself.

    Args:
        seconds: when.
        waiting: requests that it has taken and not begun.
        running: requests that it works on.
        cache_use: share of its KV cache that is in use.
    """

    seconds: float
    waiting: float
    running: float
    cache_use: float

    @property
    def is_crowded(self) -> bool:
        """Many wait: more than a tenth of those that run, and more than two."""
        return self.waiting > max(2.0, 0.1 * self.running)


@dataclass(frozen=True, slots=True)
class Level:
    """What was seen at one width: requests in flight, and tokens a second of one request (requests without tokens)."""

    width: float
    speed: float


def elasticity(narrow: Level, wide: Level) -> float:
    """How much of the additional width became throughput: 1 all of it, 0 none, below 0 there is less than before.

    By Little's law the throughput at a width is ``width * speed``, with the speed of one request in its own time; that
    is far steadier than the count of requests which happen to end in a second, since long replies take long.

    >>> elasticity(Level(8, 100.0), Level(16, 100.0)), elasticity(Level(8, 100.0), Level(16, 50.0))
    (1.0, 0.0)
    """
    return math.log(wide.width * wide.speed / (narrow.width * narrow.speed)) / math.log(wide.width / narrow.width)


@dataclass(frozen=True, slots=True)
class State:
    """A limit and what it knows.

    Args:
        limit: slots.
        starting: there was no sign yet that the endpoint is full.
        ceiling: slots at which there was one, last; ceiling_seconds: when.
        grown_seconds: when the limit was raised last.
        hold_seconds: it is not raised before.
    """

    limit: int
    starting: bool = True
    ceiling: int | None = None
    ceiling_seconds: float = -math.inf
    grown_seconds: float = -math.inf
    hold_seconds: float = -math.inf


@dataclass(frozen=True, slots=True)
class Window:
    """What was seen since the last decision.

    Args:
        seconds: now.
        finished: requests that were answered.
        pressed: requests waited because of this limit.
        levels: throughput at two widths, where there is news of it.
        gauges: the server's last two, the newest last; none that is too old.
    """

    seconds: float
    finished: int
    pressed: bool
    levels: tuple[Level, Level] | None = None
    gauges: tuple[Gauge, ...] = ()


def decide(bounds: Bounds, state: State, window: Window) -> tuple[State, str]:
    """The limit after a window, and why it changed; the reason is empty where it did not.

    >>> grown, reason = decide(Bounds(start=8), State(8), Window(seconds=1.0, finished=3, pressed=True))
    >>> grown.limit, reason
    (14, 'it binds')
    >>> decide(Bounds(start=8), State(8), Window(seconds=1.0, finished=0, pressed=True))[0].limit
    8
    """
    if len(window.gauges) > 1 and all(gauge.is_crowded for gauge in window.gauges):
        running = math.ceil(max(gauge.running for gauge in window.gauges))
        return _at_ceiling(bounds, state, window.seconds, min(state.limit, running), 1.0), "requests wait in the server"
    if window.levels is not None and elasticity(*window.levels) < LEAST_ELASTICITY:
        narrow, wide = window.levels
        knee = round(math.sqrt(narrow.width * wide.width))
        return _at_ceiling(bounds, state, window.seconds, min(state.limit, knee), 1.0), "throughput stopped growing"
    more = _growth(bounds, state, window)
    if more <= 0:
        return state, ""
    limit = state.limit + more
    passed = state.ceiling is not None and limit > 1.1 * state.ceiling
    grown = replace(state, limit=limit, grown_seconds=window.seconds, ceiling=None if passed else state.ceiling)
    return grown, "it binds"


def _growth(bounds: Bounds, state: State, window: Window) -> int:
    """Slots to add; nothing grows that does not bind, or on signals that are stale."""
    gauge = window.gauges[-1] if window.gauges else None
    if not window.pressed or window.seconds < state.hold_seconds or (not window.finished and gauge is None):
        return 0
    if gauge is not None and (gauge.waiting > 0 or gauge.cache_use >= CACHE_USE):
        return 0
    most = bounds.high
    if state.ceiling is not None and window.seconds < state.ceiling_seconds + PROBE_SECONDS:
        most = min(most, math.floor(HEADROOM * state.ceiling))
    if state.starting:
        more = round(BOOST * window.finished)
        if gauge is not None and gauge.seconds > state.grown_seconds:  # the server has room, whoever has ended
            more = max(more, math.ceil(state.limit / 2))
        more = min(more, state.limit)
    else:
        more = int(window.seconds >= state.grown_seconds + STEP_SECONDS)
    return min(more, most - state.limit)


def after_refusals(
    bounds: Bounds, state: State, seconds: float, width: int, refused: int, retry_after_seconds: float = 0.0
) -> State:
    """The limit after the first ``refused`` refusals of one burst, in which ``width`` requests were in flight.

    What was accepted is the ceiling, but one burst never takes more than half: an endpoint that refuses everything
    for a moment says little of how much it can do.

    >>> after_refusals(Bounds(start=8), State(120), seconds=9.0, width=110, refused=10).limit
    95
    """
    ceiling = max(width - refused, width // 2)
    after = _at_ceiling(bounds, state, seconds, min(state.limit, ceiling), HEADROOM)
    return replace(after, hold_seconds=max(state.hold_seconds, seconds + retry_after_seconds))


def _at_ceiling(bounds: Bounds, state: State, seconds: float, ceiling: int, share: float) -> State:
    ceiling = min(bounds.high, max(bounds.low, ceiling))
    limit = min(state.limit, max(bounds.low, math.floor(share * ceiling)))
    return replace(state, limit=limit, starting=False, ceiling=ceiling, ceiling_seconds=seconds)


@dataclass(slots=True)
class _Burst:
    began: float
    before: State
    width: int
    refused: int = 0


class AdaptiveLimit:
    """A limit that adapts to the signals it is given.

    Args:
        bounds: where it begins, and within what it stays.
        clock: seconds.
        pressed: whether requests waited because of this limit since it was last asked.
        changed: called with the limit before and after, and the reason.
    """

    def __init__(
        self,
        bounds: Bounds,
        clock: Callable[[], float],
        take_pressure: Callable[[], bool],
        on_change: Callable[[int, int, str], None] = lambda before, after, reason: None,
    ) -> None:
        self._bounds, self._clock, self._pressed, self._changed = bounds, clock, take_pressure, on_change
        self._state = State(bounds.start)
        self._throughput = Throughput()
        self._gauges: tuple[Gauge, ...] = ()
        self._burst = _Burst(-math.inf, self._state, 0)
        self._finished = 0
        self._decided = clock()

    @property
    def limit(self) -> int:
        """Slots now."""
        return self._state.limit

    def record_answer(self, latency_seconds: float, tokens: int = 0, width: float | None = None) -> None:
        """A request was answered.

        Args:
            latency_seconds: how long it took.
            tokens: that were written; 0 where they are not reported.
            width: requests in flight, on average over its life; default: the limit.
        """
        self._finished += 1
        self._throughput.add(self.limit if width is None else width, latency_seconds, tokens)
        self._decide()

    def record_gauge(self, waiting: float, running: float, cache_use: float) -> None:
        """The server was asked how it is; see :class:`Gauge`."""
        self._gauges = (*self._gauges[-1:], Gauge(self._clock(), waiting, running, cache_use))
        self._decide()

    def record_refusal(
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

    def record_timeout(self, sent_seconds: float | None = None, busy: int | None = None) -> None:
        """A request was not answered in time; see :meth:`refused`."""
        if self._begins_burst(sent_seconds, busy):
            self._cut(math.ceil(TIMED_OUT_SHARE * self._burst.width), 0.0, "timed out")

    def _begins_burst(self, sent_seconds: float | None, busy: int | None) -> bool:
        now = self._clock()
        sent = now - WINDOW_SECONDS if sent_seconds is None else sent_seconds
        if sent <= self._burst.began:
            return False
        self._burst = _Burst(now, self._state, max(1, min(self.limit, self.limit if busy is None else busy)))
        return True

    def _cut(self, refused: int, retry_after_seconds: float, reason: str) -> None:
        burst, now = self._burst, self._clock()
        state = after_refusals(self._bounds, burst.before, now, burst.width, refused, retry_after_seconds)
        self._become(replace(state, limit=min(state.limit, self.limit)), reason)

    def _decide(self) -> None:
        now = self._clock()
        if now < self._decided + WINDOW_SECONDS:
            return
        self._decided = now
        fresh = tuple(gauge for gauge in self._gauges if now <= gauge.seconds + GAUGE_SECONDS)
        window = Window(now, self._finished, self._pressed(), self._throughput.compared(), fresh)
        self._finished = 0
        self._become(*decide(self._bounds, self._state, window))

    def _become(self, state: State, reason: str) -> None:
        before, self._state = self._state.limit, state
        if state.limit != before:
            self._changed(before, state.limit, reason)


@dataclass(slots=True)
class _Sums:
    count: float = 0.0
    seconds: float = 0.0
    width_seconds: float = 0.0
    work: float = 0.0

    def add(self, width: float, seconds: float, work: float) -> None:
        self.count += 1
        self.seconds += seconds
        self.width_seconds += width * seconds
        self.work += work

    def fade(self) -> None:
        self.count, self.seconds = self.count / 2, self.seconds / 2
        self.width_seconds, self.work = self.width_seconds / 2, self.work / 2

    @property
    def level(self) -> Level:
        return Level(self.width_seconds / self.seconds, self.work / self.seconds)


class Throughput:
    """Does throughput still grow with the number of requests in flight? Compares requests that had much company with
    those that had less: a request that takes twice as long beside twice as many others has brought nothing."""

    def __init__(self) -> None:
        self._near, self._wide, self._narrow = _Sums(), _Sums(), _Sums()

    def add(self, width: float, seconds: float, tokens: int) -> None:
        """One request ended.

        Args:
            width: requests in flight, on average over its life.
            seconds: its latency; nothing is learnt from 0.
            tokens: that it wrote; 0 where they are not reported.
        """
        if seconds <= 0 or width <= 0:
            return
        sums = self._near
        if self._near.count >= SAMPLES:
            here = self._near.level.width
            sums = self._wide if width >= WIDER * here else self._near
            sums = self._narrow if width <= here / WIDER else sums
        sums.add(width, seconds, tokens or 1)
        if self._near.count >= 4 * SAMPLES:
            self._near.fade()
        if self._narrow.count >= SAMPLES:  # the limit went down: what was seen far above it is of no use
            self._near, self._narrow, self._wide = self._narrow, _Sums(), _Sums()

    def compared(self) -> tuple[Level, Level] | None:
        """The last two levels, narrow and wide, once; the wide one is what the next is compared with."""
        if not self._wide.count or self._wide.count < max(SAMPLES, self._wide.level.width / 2):
            return None
        levels = self._near.level, self._wide.level
        self._near, self._narrow, self._wide = self._wide, _Sums(), _Sums()
        return levels
