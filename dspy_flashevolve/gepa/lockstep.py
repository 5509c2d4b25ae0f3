"""``schedule="lockstep"``: GEPA's search as gepa's engine does it, call by call.

Steps run one after the other. All of them draw from one source of randomness, as gepa's strategies do, every call that
gepa makes is made, its cache holds what gepa's holds, and its stopper ends the run, which may exceed the budget by the
last step. ``tests/contract/test_lockstep.py`` compares candidates, parents, scores and metric calls with dspy.GEPA's.

What the attributes below say is told in search.py. Beside them lockstep differs in engine/run.py (one step at a time,
work beside steps is done at once, no single flight), in compilation.py (gepa's own proposer and log, no staleness
policy) and in programs/run.py (``num_threads`` of dspy's settings).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from dspy_flashevolve.gepa.search import Search, T


class Lockstep(Search):
    """GEPA's search, one step at a time."""

    overlaps = False
    keeps_budget = False
    spares_calls = False
    caches_minibatches = True
    checkpoint_seconds = 0.0

    async def together(self, calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
        """Make calls of one step one after the other, in order."""
        return [await call() for call in calls]
