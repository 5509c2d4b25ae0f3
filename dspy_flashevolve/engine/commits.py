"""What every change of a pool has in common: its gap, its generation, and that the run's observers hear of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from dspy_flashevolve.engine.events import Committed, EventBus
from dspy_flashevolve.engine.item import Item
from dspy_flashevolve.engine.staleness import GapHistogram

BEFORE_COMMIT = "before_commit"
"""The place at which the gaps of what is committed are counted."""


class Commits:
    """Told of each change by the one stage that makes it.

    Args:
        bus: gets a :class:`Committed` a change.
        clock: seconds.
    """

    def __init__(self, bus: EventBus, clock: Callable[[], float]) -> None:
        self._bus = bus
        self._clock = clock
        self._generations: dict[int, int] = {}
        self._best = -math.inf
        self.gaps = GapHistogram()

    def add(
        self,
        item: Item[Any],
        *,
        version: int,
        candidate: int,
        score: float,
        best_score: float | None = None,
        parents: Sequence[int] = (),
    ) -> None:
        """What evolves has changed.

        Args:
            item: whose change it is; the version that it saw gives the gap.
            version: after the change.
            candidate: number of the new candidate.
            score: its score on the whole validation set.
            best_score: the best one, after the change. Default: the highest that was told so far.
            parents: numbers of the candidates that it was made from, what it was built on first; none for the seed.
        """
        gap = version - 1 - item.version
        self.gaps.record(BEFORE_COMMIT, gap)
        generation = 1 + max((self._generations.get(one, 0) for one in parents), default=-1)
        self._generations[candidate] = generation
        self._best = max(self._best, score)
        best = self._best if best_score is None else best_score
        change = (version, gap, candidate, score, best, generation, tuple(parents))
        self._bus.emit(Committed(self._clock(), item.ticket.number, *change))

    def mean_gap(self) -> float | None:
        """Of what was committed lately; None before anything was."""
        return self.gaps.mean_lately(BEFORE_COMMIT)
