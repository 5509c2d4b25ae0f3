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
        working: live tickets that still work towards a child; the others wait for its validation or commit.
        idle_slots: slots that are free and that no ticket which has just started is about to take.
        calls_left: metric calls neither spent nor reserved; None without a limit.
        calls_reserved: metric calls set aside for live tickets.
        calls_per_ticket: metric calls that an ended ticket has cost on average (an estimate before).
        ended: tickets that have ended.
        commits: versions that the pool has gone through since the first ticket.
        mean_gap: of the tickets that were about to be committed lately; None before there was one.
        slots: requests that may be in flight now; None where the rule need not know.
    """

    live: int
    working: int
    idle_slots: int
    calls_left: int | None
    calls_reserved: int
    calls_per_ticket: float
    ended: int = 0
    commits: int = 0
    mean_gap: float | None = None
    slots: int | None = None


class Admission(Protocol):
    """Decides whether one more ticket may start.

    Attributes:
        limit: live tickets at most, whatever the load; it sizes the run.
    """

    @property
    def limit(self) -> int: ...

    def admits(self, load: Load) -> bool:
        """A pure function of the load."""
        ...

    def is_narrowed(self, load: Load) -> bool:
        """Whether the budget of metric calls is what bounds the live tickets."""
        ...


@dataclass(frozen=True, slots=True)
class LiveTickets:
    """A bound on live tickets, one on those that work, and fewer where the budget is what runs out.

    A child that waits for its validation keeps slots busy but makes nothing new; a ticket that works
    towards a child starts from the pool as it is. Bounding the second kind apart keeps new children
    coming from a pool that has moved on, whatever waits to be validated.

    With ``calls_left + calls_reserved`` calls to go, ``n = calls_to_go / calls_per_ticket`` tickets can
    still be paid. If all of them ran at once, all would start from the same pool: one generation. To
    spend them over at least ``generations`` generations, at most ``n / generations`` may live at once:

        live < min(limit, max(1, ceil(n / generations)))  and  (working < working_limit  or  idle_slots >= burst)

    The last term keeps the slots busy: where few children are worth a validation, ``working_limit`` tickets
    cannot fill them, and a ticket that starts in an idle slot delays nobody.

    Args:
        limit: live tickets at most; at least 1.
        working_limit: live tickets that work towards a child and compete for slots; None for no bound of their own.
        burst: idle slots, what a ticket's first requests need, from which one more may start beyond ``working_limit``.
        generations: see the formula; 0 turns it off.
        slots: requests in flight for which both limits are meant; where fewer may be in flight now, they shrink
            alike, to 2 at the least. None for limits that stay.

    Raises:
        ConfigurationError: a limit under 1, or negative generations.

    >>> rule = LiveTickets(limit=32, working_limit=12, generations=8)
    >>> rule.admits(Load(live=20, working=11, idle_slots=0, calls_left=None, calls_reserved=0, calls_per_ticket=30.0))
    True
    >>> rule.admits(Load(live=20, working=12, idle_slots=2, calls_left=None, calls_reserved=0, calls_per_ticket=30.0))
    False
    >>> rule.admits(Load(live=20, working=12, idle_slots=3, calls_left=None, calls_reserved=0, calls_per_ticket=30.0))
    True
    >>> rule.admits(Load(live=3, working=0, idle_slots=64, calls_left=600, calls_reserved=0, calls_per_ticket=30.0))
    False
    """

    limit: int
    working_limit: int | None = None
    generations: float = 0.0
    burst: int = 3
    slots: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("limit", self.limit), ("working_limit", self.working_limit), ("burst", self.burst)):
            if value is not None and value < 1:
                raise ConfigurationError(f"live tickets: {name} is {value}, expected at least 1.")
        if self.generations < 0:
            raise ConfigurationError(f"live tickets: generations is {self.generations}, expected 0 or more.")

    def admits(self, load: Load) -> bool:
        """See :meth:`Admission.admits`."""
        if load.live >= self.bound(load):
            return False
        if self.working_limit is None or load.working < self._scaled(self.working_limit, load):
            return True
        return load.idle_slots >= self.burst

    def is_narrowed(self, load: Load) -> bool:
        """See :meth:`Admission.is_narrowed`."""
        return self.bound(load) < self._scaled(self.limit, load)

    def bound(self, load: Load) -> int:
        """Live tickets that the budget allows."""
        limit = self._scaled(self.limit, load)
        if load.calls_left is None or not self.generations:
            return limit
        tickets = (load.calls_left + load.calls_reserved) / max(load.calls_per_ticket, 1.0)
        return max(1, math.ceil(min(limit, tickets / self.generations)))

    def _scaled(self, limit: int, load: Load) -> int:
        if self.slots is None or load.slots is None or load.slots >= self.slots:
            return limit
        return min(limit, max(2, math.ceil(limit * load.slots / self.slots)))


PRIOR_ENDED = 4
"""The acceptance seen counts as if this many tickets had ended before the first, half of them committed."""


@dataclass(frozen=True, slots=True)
class GapBound:
    """A bound on live tickets from the gap that the staleness policy tolerates.

    Let L tickets live at a time, each for a time T, and let a of every ended ticket be commits. Tickets end at a rate
    of L / T, so the pool's version rises by a L / T a second, and a ticket sees the commits of the L - 1 others go by
    while it lives:

        E[gap] = a (L - 1),  and so  E[gap] <= gap  holds for  L <= 1 + gap / a.

    It is AReaL's rule (arXiv 2505.24298, section 5.1: rollouts in flight <= (gap + 1) batch size) with a batch of 1 / a
    tickets a version. It bounds the mean; single gaps lie around it.

    Args:
        gap: commits that may go by while a ticket lives, on average; at least 0.
        within: a further bound, which holds as well.
        acceptance: a, commits an ended ticket, above 0 and up to 1. None adapts it to what is seen: to the commits and
            the ended tickets, and, where the gaps seen are larger than the formula says, to these.

    Raises:
        ConfigurationError: a negative gap, or an acceptance outside of (0, 1].

    >>> wide = LiveTickets(limit=48)
    >>> rule = GapBound(gap=2.0, within=wide, acceptance=0.25)
    >>> load = Load(live=8, working=8, idle_slots=9, calls_left=None, calls_reserved=0, calls_per_ticket=30.0)
    >>> rule.bound(load), rule.admits(load)
    (9, True)
    """

    gap: float
    within: LiveTickets
    acceptance: float | None = None

    def __post_init__(self) -> None:
        if not self.gap >= 0:
            raise ConfigurationError(f"gap bound: gap is {self.gap}, expected 0 or more.")
        if self.acceptance is not None and not 0 < self.acceptance <= 1:
            raise ConfigurationError(f"gap bound: acceptance is {self.acceptance}, expected above 0 and up to 1.")

    @property
    def limit(self) -> int:
        """Live tickets at most, whatever is seen."""
        return self.within.limit

    def admits(self, load: Load) -> bool:
        """See :meth:`Admission.admits`."""
        return load.live < self.bound(load) and self.within.admits(load)

    def is_narrowed(self, load: Load) -> bool:
        """See :meth:`Admission.is_narrowed`."""
        return self.within.is_narrowed(load)

    def bound(self, load: Load) -> int:
        """Live tickets that keep the mean gap in bounds."""
        return min(self.limit, 1 + math.floor(self.gap / self._accepted(load) + 1e-9))

    def _accepted(self, load: Load) -> float:
        if self.acceptance is not None:
            return self.acceptance
        seen = (load.commits + PRIOR_ENDED / 2) / (load.ended + PRIOR_ENDED)
        if load.mean_gap is not None and load.live > 1:
            seen = max(seen, load.mean_gap / (load.live - 1))
        return seen


def for_slots(slots: int, generations: float, burst: int = 3) -> LiveTickets:
    """The rule for a number of slots: three quarters of them live tickets, three in sixteen at work.

    A working ticket keeps one to three slots busy, a validation as many as it has examples. More tickets
    make more proposals a minute and fewer generations (docs/architecture.md has the figures).

    Args:
        slots: requests in flight at most; while there may be fewer, both bounds shrink with them.
        generations, burst: see :class:`LiveTickets`.

    >>> for_slots(64, 8.0)
    LiveTickets(limit=48, working_limit=12, generations=8.0, burst=3, slots=64)
    """
    return LiveTickets(max(2, math.ceil(3 * slots / 4)), max(2, math.ceil(3 * slots / 16)), generations, burst, slots)
