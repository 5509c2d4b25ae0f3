"""How many tickets may live at once.

A ticket that starts before another has ended cannot build on it: width costs depth. The bound is plain
arithmetic, in the manner of AReaL's staleness manager (arXiv 2505.24298, section 5.1, where the number
of live rollouts is bounded by the staleness that training tolerates).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from dspy_flashevolve.engine.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Load:
    """What an admission rule may look at.

    Args:
        live: tickets that have started and not ended.
        calls_left: metric calls neither spent nor reserved; None without a limit.
        calls_reserved: metric calls set aside for live tickets.
        calls_per_ticket: metric calls that an ended ticket has cost on average (an estimate before).
    """

    live: int
    calls_left: int | None
    calls_reserved: int
    calls_per_ticket: float


class Admission(Protocol):
    """Decides whether one more ticket may start."""

    def admits(self, load: Load) -> bool:
        """A pure function of the load."""
        ...


@dataclass(frozen=True, slots=True)
class LiveTickets:
    """At most ``limit`` live tickets, and fewer where the budget is what runs out.

    With ``calls_left + calls_reserved`` calls to go, ``n = calls_to_go / calls_per_ticket`` tickets can
    still be paid. If all of them ran at once, all would start from the same pool: one generation. To
    spend them over at least ``generations`` generations, at most ``n / generations`` may live at once:

        live < min(limit, max(1, ceil(n / generations)))

    Where the budget is large, the first term rules and the slots stay full; where it is small, the run
    narrows and every ticket builds on more of what was learnt before it.

    Args:
        limit: live tickets at most; at least 1.
        generations: see the formula; 0 turns the second term off.

    Raises:
        ConfigurationError: limit under 1 or negative generations.

    >>> rule = LiveTickets(limit=16, generations=10)
    >>> rule.admits(Load(live=15, calls_left=None, calls_reserved=0, calls_per_ticket=30.0))
    True
    >>> rule.admits(Load(live=3, calls_left=600, calls_reserved=0, calls_per_ticket=30.0))
    False
    """

    limit: int
    generations: float = 0.0

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ConfigurationError(f"live tickets: the limit is {self.limit}, expected at least 1.")
        if self.generations < 0:
            raise ConfigurationError(f"live tickets: generations is {self.generations}, expected 0 or more.")

    def admits(self, load: Load) -> bool:
        """See :meth:`Admission.admits`."""
        return load.live < self.bound(load)

    def bound(self, load: Load) -> int:
        """Live tickets that the load allows."""
        if load.calls_left is None or not self.generations:
            return self.limit
        tickets = (load.calls_left + load.calls_reserved) / max(load.calls_per_ticket, 1.0)
        return max(1, math.ceil(min(self.limit, tickets / self.generations)))


def default_live_limit(slots: int, calls_per_minibatch: int) -> int:
    """Live tickets that keep ``slots`` busy.

    A ticket in its rollout or screen keeps one minibatch in flight, in its proposal one LM call, and in
    its validation as much as is free; waiting for its slowest request it keeps fewer. About one
    minibatch of slots a ticket keeps them all busy (measured: benchmarks/README.md).

    >>> default_live_limit(64, 3)
    22
    """
    return max(2, math.ceil(slots / max(1, calls_per_minibatch)))
