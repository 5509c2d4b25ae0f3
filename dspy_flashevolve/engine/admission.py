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
        idle_slots: slots that are free and that no live ticket is about to take.
        calls_left: metric calls neither spent nor reserved; None without a limit.
        calls_reserved: metric calls set aside for live tickets.
        calls_per_ticket: metric calls that an ended ticket has cost on average (an estimate before).
    """

    live: int
    idle_slots: int
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
    """As few live tickets as keep the slots busy, and fewer where the budget is what runs out.

    Up to ``base`` tickets always start. Beyond them a ticket starts only where ``burst`` slots, what its
    first requests need, would stay idle: what is live goes first, so that a ticket starts from as new a
    pool as the slots allow. At most ``limit`` live at all.

    With ``calls_left + calls_reserved`` calls to go, ``n = calls_to_go / calls_per_ticket`` tickets can
    still be paid. If all of them ran at once, all would start from the same pool: one generation. To
    spend them over at least ``generations`` generations, at most ``n / generations`` may live at once:

        live < min(limit, max(1, ceil(n / generations)))

    Where the budget is large, the slots rule; where it is small, the run narrows and every ticket builds
    on more of what was learnt before it.

    Args:
        limit: live tickets at most; at least 1.
        base: live tickets that never wait for idle slots; None for all of ``limit``: a fixed bound.
        burst: slots that a new ticket's first requests need.
        generations: see the formula; 0 turns it off.

    Raises:
        ConfigurationError: limit, base or burst under 1, or negative generations.

    >>> rule = LiveTickets(limit=64, base=8, burst=3, generations=10)
    >>> rule.admits(Load(live=7, idle_slots=0, calls_left=None, calls_reserved=0, calls_per_ticket=30.0))
    True
    >>> rule.admits(Load(live=8, idle_slots=2, calls_left=None, calls_reserved=0, calls_per_ticket=30.0))
    False
    >>> rule.admits(Load(live=3, idle_slots=64, calls_left=600, calls_reserved=0, calls_per_ticket=30.0))
    False
    """

    limit: int
    base: int | None = None
    burst: int = 1
    generations: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("limit", self.limit), ("base", self.base), ("burst", self.burst)):
            if value is not None and value < 1:
                raise ConfigurationError(f"live tickets: {name} is {value}, expected at least 1.")
        if self.generations < 0:
            raise ConfigurationError(f"live tickets: generations is {self.generations}, expected 0 or more.")

    def admits(self, load: Load) -> bool:
        """See :meth:`Admission.admits`."""
        if load.live >= self.bound(load):
            return False
        return self.base is None or load.live < self.base or load.idle_slots >= self.burst

    def bound(self, load: Load) -> int:
        """Live tickets that the budget allows."""
        if load.calls_left is None or not self.generations:
            return self.limit
        tickets = (load.calls_left + load.calls_reserved) / max(load.calls_per_ticket, 1.0)
        return max(1, math.ceil(min(self.limit, tickets / self.generations)))


def for_slots(slots: int, burst: int, generations: float) -> LiveTickets:
    """The rule for a number of slots: half of them are the base's, and one ticket a slot is the most.

    Args:
        slots: requests in flight at most.
        burst: slots that a new ticket's first requests need (a minibatch).
        generations: see :class:`LiveTickets`.

    >>> for_slots(64, 3, 8.0)
    LiveTickets(limit=64, base=11, burst=3, generations=8.0)
    """
    return LiveTickets(max(2, slots), max(1, math.ceil(slots / (2 * burst))), min(burst, slots), generations)
