"""Does throughput still grow with the number of requests in flight?

A request that takes twice as long beside twice as many others has brought nothing. By Little's law the throughput at
a width (requests in flight) is ``width * speed``, with the speed of one request in tokens a second of its own time;
that is far steadier than the count of requests which happen to end in a second, since long replies take long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Level:
    """What was seen at one width.

    Args:
        width: requests in flight, on average over the lives of those that ended.
        speed: tokens a second of one request (requests a second where no tokens are reported).
    """

    width: float
    speed: float

    @property
    def throughput(self) -> float:
        """Tokens a second of all."""
        return self.width * self.speed


def elasticity(narrow: Level, wide: Level) -> float:
    """How much of the additional width became throughput: 1 all of it, 0 none, below 0 there is less than before.

    >>> elasticity(Level(8, 100.0), Level(16, 100.0)), elasticity(Level(8, 100.0), Level(16, 50.0))
    (1.0, 0.0)
    """
    return math.log(wide.throughput / narrow.throughput) / math.log(wide.width / narrow.width)


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


class Gradient:
    """Compares requests that had much company with those that had less.

    Args:
        samples: requests that a level is made of, at least; and at least half as many as are in flight, since the
            first to end are the shortest, whose speed is not that of all.
        ratio: a wider level has at least this many times the width of the one it is compared with.
    """

    def __init__(self, samples: int = 24, ratio: float = 1.5) -> None:
        self._samples, self._ratio = samples, ratio
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
        if self._near.count >= self._samples:
            here = self._near.level.width
            sums = self._wide if width >= self._ratio * here else self._near
            sums = self._narrow if width <= here / self._ratio else sums
        sums.add(width, seconds, tokens or 1)
        if self._near.count >= 4 * self._samples:
            self._near.fade()
        if self._narrow.count >= self._samples:  # the limit went down: what was seen far above it is of no use
            self._near, self._narrow, self._wide = self._narrow, _Sums(), _Sums()

    def compared(self) -> tuple[Level, Level] | None:
        """The last two levels, narrow and wide, once; the wide one is what the next is compared with."""
        if not self._wide.count or self._wide.count < max(self._samples, self._wide.level.width / 2):
            return None
        levels = self._near.level, self._wide.level
        self._near, self._narrow, self._wide = self._wide, _Sums(), _Sums()
        return levels
