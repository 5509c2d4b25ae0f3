"""Workflow controllers: how many workers a stage gets, from what the stages did in the last window of time.

A controller is a pure function of the windows: equal windows give equal decisions, and nothing is
remembered between them. The pipeline measures the windows with the run's clock, keeps what was decided
within the bounds of each stage, and records every change as an event.

Source: FlashEvolve (arXiv 2605.08520) section 3.4 for :class:`MedianRate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from dspy_flashevolve.engine.errors import ConfigurationError

ROUNDING = 1e-9
"""Workers; what sums of seconds may be off by."""


@dataclass(frozen=True, slots=True)
class StageWindow:
    """What one stage did in the last window, and how it stands at its end.

    Args:
        stage: its name.
        workers: workers that the controller wanted last; 0 before the run begins, when the controller is asked how
            many to begin with.
        busy: workers that are in the handler now. Above ``workers`` while some finish their last item.
        queued: items that wait now.
        arrived: items that came into the queue during the window.
        finished: items that the handler was done with during the window.
        worked_seconds: worker-seconds spent in the handler during the window, of items under way too. Divided by the
            window it is the mean number of busy workers.
        waited_seconds: seconds in the queue, summed over the items that were taken during the window.
        low, high: workers that the stage has at least and at most.
    """

    stage: str
    workers: int
    busy: int
    queued: int
    arrived: int
    finished: int
    worked_seconds: float
    waited_seconds: float
    low: int
    high: int

    def clamp(self, workers: int) -> int:
        """``workers``, or the bound of the stage that it lies beyond."""
        return max(self.low, min(self.high, workers))


class WorkflowController(Protocol):
    """Decides how many workers the stages have.

    Attributes:
        window_seconds: how often it is asked, and how long a window is; infinity to be asked at the start only.
    """

    @property
    def window_seconds(self) -> float: ...

    def decide(self, windows: Sequence[StageWindow]) -> dict[str, int]:
        """The workers that each stage shall have: a pure function of the windows.

        A stage that is left out keeps what it has. The pipeline keeps the answer within the stage's bounds. Before the
        run begins it is asked with windows in which nothing happened and no stage has workers; a stage that is left
        out then begins with the most.
        """
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """A number of workers that does not change.

    Args:
        workers: for every stage, or stage -> workers; stages that are not named have the most that they may have.

    Raises:
        ConfigurationError: under 1 worker.

    >>> Fixed({"screen": 2}).decide([])
    {'screen': 2}
    """

    workers: int | Mapping[str, int]

    def __post_init__(self) -> None:
        named = self.workers if isinstance(self.workers, Mapping) else {"workers": self.workers}
        for name, workers in named.items():
            _check_workers("fixed workers", name, workers)

    @property
    def window_seconds(self) -> float:
        """See :class:`WorkflowController`."""
        return math.inf

    def decide(self, windows: Sequence[StageWindow]) -> dict[str, int]:
        """See :meth:`WorkflowController.decide`."""
        if isinstance(self.workers, Mapping):
            return dict(self.workers)
        return {window.stage: self.workers for window in windows}


@dataclass(frozen=True, slots=True)
class MedianRate:
    """The paper's rule: workers go, one at a time, to the stages that produce less than the others.

    A stage's production rate is the items that it finished divided by the window. The median is taken over the stages
    that had work: that finished something, work on something, or have something waiting. A stage under half the median
    gains a worker, one over twice the median loses one. A stage gains only where a worker would find something to do:
    where items wait and every worker is busy. So an idle stage does not grow, and nothing is moved by a window in
    which nothing was produced.

    The rule balances stages against each other. Where all produce alike, the slowest of a row sets the pace of all and
    nothing moves, however long its queue is: so a stage begins with the most workers, as in a run without a
    controller, unless ``start`` says otherwise.

    Args:
        window_seconds: above 0; long enough for a stage to finish several items.
        low: workers a stage has at least.
        high: workers a stage has at most; None for what the stage allows.
        start: workers a stage begins with; None for the most.

    Raises:
        ConfigurationError: a window that is no number above 0, ``low`` or ``start`` under 1, ``high`` under ``low``.

    >>> slow = StageWindow("propose", 2, 2, 9, 8, 2, 60.0, 90.0, 1, 8)
    >>> even = StageWindow("screen", 2, 1, 0, 6, 6, 20.0, 0.0, 1, 8)
    >>> fast = StageWindow("rollout", 4, 4, 0, 13, 13, 90.0, 0.0, 1, 8)
    >>> MedianRate(window_seconds=30.0).decide([slow, even, fast])
    {'propose': 3, 'screen': 2, 'rollout': 3}
    """

    window_seconds: float = 10.0
    low: int = 1
    high: int | None = None
    start: int | None = None

    def __post_init__(self) -> None:
        _check_window("median rate", self.window_seconds)
        _check_bounds("median rate", self.low, self.high)
        if self.start is not None:
            _check_workers("median rate", "start", self.start)

    def decide(self, windows: Sequence[StageWindow]) -> dict[str, int]:
        """See :meth:`WorkflowController.decide`."""
        at_work = [window.finished for window in windows if window.finished or window.busy or window.queued]
        middle = median(at_work) if at_work else 0  # counts: the window is the same for all, and counts are exact
        return {window.stage: _bounded(window, self._wanted(window, middle), self.low, self.high) for window in windows}

    def _wanted(self, window: StageWindow, middle: float) -> int:
        if not window.workers:
            return window.high if self.start is None else self.start
        if 2 * window.finished < middle and window.queued and window.busy >= window.workers:
            return window.workers + 1
        if window.finished > 2 * middle:
            return window.workers - 1
        return window.workers


@dataclass(frozen=True, slots=True)
class Backlog:
    """Enough workers for what a stage has to do: what arrives, and what waits within one more window.

    By Little's law the workers that a load keeps busy are its arrivals a second times the seconds that an item takes.
    For what is served they are measured: the mean number of busy workers. What waits needs its own on top, with the
    mean seconds that the handler took an item::

        demand = worked_seconds / window_seconds + queued * (worked_seconds / finished) / window_seconds

    (with 1 for ``finished`` where nothing was: an item takes at least as long). A stage with every worker busy grows to
    the demand at once. It shrinks by one where the demand leaves the others ``slack`` of their time: what lies between
    is left alone, so that a load that does not change ends the changes.

    Args:
        window_seconds: above 0; long enough for a stage to finish several items.
        low: workers a stage has at least, and at the start.
        high: workers a stage has at most; None for what the stage allows.
        slack: of the time of the workers that stay; from 0 to under 1.

    Raises:
        ConfigurationError: a window that is no number above 0, ``low`` under 1, ``high`` under ``low``, or a slack
            outside of [0, 1).

    >>> behind = StageWindow("propose", 2, 2, 6, 8, 2, 60.0, 90.0, 1, 16)
    >>> Backlog(window_seconds=30.0).decide([behind])  # 2 are busy; 6 wait, of 30 seconds each
    {'propose': 8}
    """

    window_seconds: float = 10.0
    low: int = 1
    high: int | None = None
    slack: float = field(default=0.25, kw_only=True)

    def __post_init__(self) -> None:
        _check_window("backlog", self.window_seconds)
        _check_bounds("backlog", self.low, self.high)
        if not 0 <= self.slack < 1:
            raise ConfigurationError(f"backlog: slack is {self.slack!r}, expected a number from 0 to under 1.")

    def decide(self, windows: Sequence[StageWindow]) -> dict[str, int]:
        """See :meth:`WorkflowController.decide`."""
        return {window.stage: _bounded(window, self._wanted(window), self.low, self.high) for window in windows}

    def _wanted(self, window: StageWindow) -> int:
        demand = self.demand(window)
        if demand > window.workers + ROUNDING and window.busy >= window.workers:
            return math.ceil(demand - ROUNDING)
        if demand < (window.workers - 1) * (1 - self.slack):
            return window.workers - 1
        return window.workers

    def demand(self, window: StageWindow) -> float:
        """Workers that would be busy all the time, if what waits were to be done within one window."""
        seconds_an_item = window.worked_seconds / max(1, window.finished)
        return (window.worked_seconds + window.queued * seconds_an_item) / self.window_seconds


def _bounded(window: StageWindow, workers: int, low: int, high: int | None) -> int:
    """Within the controller's bounds, and within the stage's, which go first."""
    return window.clamp(max(low, workers if high is None else min(high, workers)))


def _check_window(rule: str, seconds: float) -> None:
    if isinstance(seconds, bool) or not 0 < seconds < math.inf:
        raise ConfigurationError(f"{rule}: window_seconds is {seconds!r}, expected a number above 0.")


def _check_workers(rule: str, name: str, workers: int) -> None:
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(f"{rule}: {name} is {workers!r}, expected a whole number of at least 1.")


def _check_bounds(rule: str, low: int, high: int | None) -> None:
    _check_workers(rule, "low", low)
    if high is not None:
        _check_workers(rule, "high", high)
        if high < low:
            raise ConfigurationError(f"{rule}: high is {high}, under low={low}.")
