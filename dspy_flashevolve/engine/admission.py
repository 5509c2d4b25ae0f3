"""How many steps may live at once.

A step that starts before another has ended cannot build on it: width costs depth. The bound is plain
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
        live: steps that have started and not ended.
        working: live steps that still work towards a child; the others wait for its validation or commit.
        idle_slots: slots that are free.
        calls_left: metric calls neither spent nor reserved; None without a limit.
        calls_reserved: metric calls set aside for live steps.
        calls_per_step: metric calls that an ended step has cost on average (an estimate before).
        ended: steps that have ended.
        slots: requests that may be in flight now; None where the rule need not know.
        resting: live steps that wait for other steps, for the end of the run, or for a provider that answers others,
            and need no room meanwhile.
        unasked: live steps that have made no request yet.
    """

    live: int
    working: int
    idle_slots: int
    calls_left: int | None
    calls_reserved: int
    calls_per_step: float
    ended: int = 0
    slots: int | None = None
    resting: int = 0
    unasked: int = 0


class Admission(Protocol):
    """Decides whether one more step may start."""

    def admits(self, load: Load) -> bool:
        """Asked whenever a step has begun or ended, a slot is free, or the pool has changed."""
        ...


@dataclass(frozen=True, slots=True)
class LiveSteps:
    """A bound on live steps, one on those that work, and fewer where the budget is what runs out.

    A child that waits for its validation keeps slots busy but makes nothing new; a step that works
    towards a child starts from the pool as it is. Bounding the second kind apart keeps new children
    coming from a pool that has moved on, whatever waits to be validated.

    With ``calls_left + calls_reserved`` calls to go, ``n = calls_to_go / calls_per_step`` steps can
    still be paid. If all of them ran at once, all would start from the same pool: one generation. To
    spend them over at least ``generations`` generations, at most ``n / generations`` may live at once:

        live < min(limit, max(1, ceil(n / generations)))  and  (working < working_limit  or  idle_slots >= burst)

    The last term keeps the slots busy: where few children are worth a validation, ``working_limit`` steps
    cannot fill them, and a step that starts in an idle slot delays nobody. Steps that only wait for others, for the
    end of the run, or for a provider that answers others, do not count against the limit.

    Args:
        limit: live steps at most; at least 1.
        working_limit: live steps that work towards a child and compete for slots; None for no bound of their own.
        burst: idle slots, what a step's first requests need, from which one more may start beyond ``working_limit``.
        generations: see the formula; 0 turns it off.
        slots: requests in flight for which both limits are meant; where fewer may be in flight now, they shrink
            alike, to 2 at the least. None for limits that stay.
        strict: every live step counts.

    Raises:
        ConfigurationError: a limit under 1, or negative generations.

    >>> rule = LiveSteps(limit=32, working_limit=12, generations=8)
    >>> rule.admits(Load(live=20, working=11, idle_slots=0, calls_left=None, calls_reserved=0, calls_per_step=30.0))
    True
    >>> rule.admits(Load(live=20, working=12, idle_slots=2, calls_left=None, calls_reserved=0, calls_per_step=30.0))
    False
    >>> rule.admits(Load(live=20, working=12, idle_slots=3, calls_left=None, calls_reserved=0, calls_per_step=30.0))
    True
    >>> rule.admits(Load(live=3, working=0, idle_slots=64, calls_left=600, calls_reserved=0, calls_per_step=30.0))
    False
    """

    limit: int
    working_limit: int | None = None
    generations: float = 0.0
    burst: int = 3
    slots: int | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        for name, value in (("limit", self.limit), ("working_limit", self.working_limit), ("burst", self.burst)):
            if value is not None and value < 1:
                raise ConfigurationError(f"live steps: {name} is {value}, expected at least 1.")
        if self.generations < 0:
            raise ConfigurationError(f"live steps: generations is {self.generations}, expected 0 or more.")

    def admits(self, load: Load) -> bool:
        """See :meth:`Admission.admits`."""
        if load.live - (0 if self.strict else load.resting) >= self.bound(load):
            return False
        if self.working_limit is None or load.working < self._scaled(self.working_limit, load):
            return True
        return load.idle_slots - self.burst * load.unasked >= self.burst

    def bound(self, load: Load) -> int:
        """Live steps that the budget allows."""
        limit = self._scaled(self.limit, load)
        if load.calls_left is None or not self.generations:
            return limit
        steps = (load.calls_left + load.calls_reserved) / max(load.calls_per_step, 1.0)
        return max(1, math.ceil(min(limit, steps / self.generations)))

    def _scaled(self, limit: int, load: Load) -> int:
        if self.slots is None or load.slots is None:
            return limit
        return min(limit, max(2, math.ceil(limit * DEMAND * load.slots / self.slots)))


DEMAND = 1.5
"""Steps are admitted for this many times the slots there are now, up to the most there may be: only where requests wait
can an endpoint's limit be seen to bind, and grow."""
