"""How many requests an endpoint may be sent at once, found out while they are sent.

Additive increase, multiplicative decrease (Chiu and Jain 1989), with TCP's slow start before the first sign that the
endpoint is full (RFC 5681) and a remembered ceiling that is tried again seldom (as CUBIC does, RFC 9438). What is
decided once a window is a pure function of what was seen in it: :func:`decide`; a refusal is acted on at once, for
as long as the limit is above the endpoint's own, every slot that comes free is refused: :func:`after_refusals`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.gradient import Level, elasticity


@dataclass(frozen=True, slots=True)
class AdaptiveLimit:
    """How a limit adapts.

    Args:
        start: slots at first.
        low, high: the limit stays within them.
        window_seconds: time between two decisions.
        boost: slots that each finished request adds until the first sign that the endpoint is full: with 1 the limit
            doubles in the time of a request, with 2 it triples. It never more than doubles in a window.
        step_seconds: after that sign, one slot is added at most this often.
        headroom: share of the ceiling that is used.
        probe_seconds: how long a ceiling is believed; then it is tried, slot by slot.
        least_elasticity: share of additional width that must become throughput (:func:`.gradient.elasticity`).
        gauge_seconds: age from which a server's gauges are ignored.
        cache_use: share of the server's KV cache from which the limit does not grow.

    Raises:
        ConfigurationError: not 1 <= low <= start <= high, or a time or share that cannot be.
    """

    start: int
    low: int = 1
    high: int = 256
    window_seconds: float = 0.2
    boost: float = 2.0
    step_seconds: float = 1.0
    headroom: float = 0.95
    probe_seconds: float = 60.0
    least_elasticity: float = 0.1
    gauge_seconds: float = 5.0
    cache_use: float = 0.9

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.start <= self.high:
            raise ConfigurationError(
                f"adaptive limit: low={self.low}, start={self.start}, high={self.high}, expected "
                "1 <= low <= start <= high."
            )
        for name in ("window_seconds", "boost", "step_seconds", "probe_seconds", "gauge_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"adaptive limit: {name} is {getattr(self, name)}, expected more than 0.")
        if not 0 < self.headroom <= 1:
            raise ConfigurationError(f"adaptive limit: headroom is {self.headroom}, expected a share in (0, 1].")


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
class State:
    """A limit and what it knows.

    Args:
        limit: slots.
        starting: there was no sign yet that the endpoint is full.
        ceiling: slots at which there was one, last.
        ceiling_seconds: when.
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


def decide(rules: AdaptiveLimit, state: State, window: Window) -> tuple[State, str]:
    """The limit after a window, and why it changed; the reason is empty where it did not.

    >>> rules = AdaptiveLimit(start=8)
    >>> grown, reason = decide(rules, State(8), Window(seconds=1.0, finished=3, pressed=True))
    >>> grown.limit, reason
    (14, 'it binds')
    >>> decide(rules, State(8), Window(seconds=1.0, finished=0, pressed=True))[0].limit
    8
    """
    if len(window.gauges) > 1 and all(gauge.is_crowded for gauge in window.gauges):
        running = math.ceil(max(gauge.running for gauge in window.gauges))
        return _at_ceiling(rules, state, window.seconds, min(state.limit, running), 1.0), "requests wait in the server"
    if window.levels is not None and elasticity(*window.levels) < rules.least_elasticity:
        narrow, wide = window.levels
        knee = round(math.sqrt(narrow.width * wide.width))
        return _at_ceiling(rules, state, window.seconds, min(state.limit, knee), 1.0), "throughput stopped growing"
    more = _growth(rules, state, window)
    if more <= 0:
        return state, ""
    limit = state.limit + more
    passed = state.ceiling is not None and limit > 1.1 * state.ceiling
    grown = replace(state, limit=limit, grown_seconds=window.seconds, ceiling=None if passed else state.ceiling)
    return grown, "it binds"


def _growth(rules: AdaptiveLimit, state: State, window: Window) -> int:
    """Slots to add; nothing grows that does not bind, or on signals that are stale."""
    gauge = window.gauges[-1] if window.gauges else None
    if not window.pressed or window.seconds < state.hold_seconds or (not window.finished and gauge is None):
        return 0
    if gauge is not None and (gauge.waiting > 0 or gauge.cache_use >= rules.cache_use):
        return 0
    most = rules.high
    if state.ceiling is not None and window.seconds < state.ceiling_seconds + rules.probe_seconds:
        most = min(most, math.floor(rules.headroom * state.ceiling))
    if state.starting:
        more = round(rules.boost * window.finished)
        if gauge is not None and gauge.seconds > state.grown_seconds:  # the server has room, whoever has ended
            more = max(more, math.ceil(state.limit / 2))
        more = min(more, state.limit)
    else:
        more = int(window.seconds >= state.grown_seconds + rules.step_seconds)
    return min(more, most - state.limit)


def after_refusals(
    rules: AdaptiveLimit, state: State, seconds: float, width: int, refused: int, retry_after_seconds: float = 0.0
) -> State:
    """The limit after the first ``refused`` refusals of one burst, in which ``width`` requests were in flight.

    What was accepted is the ceiling, but one burst never takes more than half: an endpoint that refuses everything
    for a moment says little of how much it can do.

    >>> after_refusals(AdaptiveLimit(start=8), State(120), seconds=9.0, width=110, refused=10).limit
    95
    """
    ceiling = max(width - refused, width // 2)
    after = _at_ceiling(rules, state, seconds, min(state.limit, ceiling), rules.headroom)
    return replace(after, hold_seconds=max(state.hold_seconds, seconds + retry_after_seconds))


def _at_ceiling(rules: AdaptiveLimit, state: State, seconds: float, ceiling: int, share: float) -> State:
    ceiling = min(rules.high, max(rules.low, ceiling))
    limit = min(state.limit, max(rules.low, math.floor(share * ceiling)))
    return replace(state, limit=limit, starting=False, ceiling=ceiling, ceiling_seconds=seconds)
