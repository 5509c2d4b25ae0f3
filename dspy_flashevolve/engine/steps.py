"""An evolution step: its number, its randomness, what pays for it, and the one way in which it ends.

The budget of metric calls: reserve before, settle after, refund the rest. ``spent + reserved <= limit`` holds at every
moment, so a run never exceeds its limit, whatever is in flight (docs/architecture.md). A budget that is too small for
steps that overlap is not bounded so: :func:`pays_overlap`.

How many steps may live at once: one that starts before another has ended cannot build on it, so width costs depth. The
bound is plain arithmetic, in the manner of AReaL's staleness manager (arXiv 2505.24298, section 5.1, where the number
of live rollouts is bounded by the staleness that training tolerates).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from dspy_flashevolve.engine.errors import BudgetError, ConfigurationError, FlashEvolveError

DEMAND = 1.5
"""Steps are admitted for this many times the slots there are now, up to the most there may be: only where requests wait
can an endpoint's limit be seen to bind, and grow."""


STEPS_TO_OVERLAP = 2
"""Steps that a budget of metric calls has to pay, beside the first validations, for steps to overlap.

Measured on ten and ten examples: with one step (up to 31 calls) dspy.GEPA's program is the better one, .71 to .79
against .57, since the calls that pay no further step, which it overdraws, are half of the search. With two it depends
on the task; a third would take the hard limit away from budgets that do not need it."""


def pays_overlap(calls: int, validations: int, valset_size: int, minibatch_size: int) -> bool:
    """Whether a budget of metric calls is large enough for steps that overlap, within a limit that is never exceeded.

    A step costs ``2 * minibatch_size + valset_size`` calls at most: its parent and its child on a minibatch, and the
    child's validation. Beside the ``validations`` of the programs that a run begins with, the budget has to pay
    :data:`STEPS_TO_OVERLAP` of them. A smaller one is spent as dspy.GEPA does: one step after the other, the last of
    which may exceed it.

    >>> pays_overlap(42, 1, valset_size=10, minibatch_size=3), pays_overlap(41, 1, valset_size=10, minibatch_size=3)
    (True, False)
    """
    return calls >= validations * valset_size + STEPS_TO_OVERLAP * (2 * minibatch_size + valset_size)


class Budget:
    """Counts calls, also those of sessions before, against a limit; None for no limit.

    Raises:
        ConfigurationError: a negative limit.

    >>> budget = Budget(10)
    >>> reservation = budget.reserve(6)
    >>> reservation.settle(2); reservation.refund()
    >>> budget.spent, budget.reserved, budget.left
    (2, 0, 8)
    """

    def __init__(self, limit: int | None, spent: int = 0) -> None:
        if limit is not None and limit < 0:
            raise ConfigurationError(f"budget: the limit is {limit}, expected 0 or more, or None.")
        self.limit = limit
        self.spent = spent
        self.reserved = 0

    @property
    def left(self) -> int | None:
        """Calls that are neither spent nor reserved; None without a limit."""
        return None if self.limit is None else max(0, self.limit - self.spent - self.reserved)

    def reserve(self, calls: int) -> Reservation | None:
        """Set ``calls`` aside, or return None when they do not fit; BudgetError for a negative number."""
        if calls < 0:
            raise BudgetError(f"cannot reserve {calls} calls.")
        if self.limit is not None and self.spent + self.reserved + calls > self.limit:
            return None
        self.reserved += calls
        return Reservation(self, calls)


class Reservation:
    """Calls set aside for one step. Made by :meth:`Budget.reserve`."""

    def __init__(self, budget: Budget, calls: int) -> None:
        self._budget = budget
        self.open = calls
        self.settled = 0
        """Calls of it that were spent."""

    def settle(self, calls: int = 1) -> None:
        """Count ``calls`` of the reservation as spent; BudgetError where fewer are still open."""
        if calls < 0 or calls > self.open:
            raise BudgetError(f"cannot settle {calls} calls: {self.open} are reserved.")
        self.open -= calls
        self._budget.reserved -= calls
        self._budget.spent += calls
        self.settled += calls

    def extend(self, calls: int) -> bool:
        """Set more calls aside; False (and nothing changes) when they do not fit."""
        more = self._budget.reserve(calls)
        if more is None:
            return False
        self.open += more.open
        return True

    def cover(self, calls: int) -> bool:
        """Make sure that ``calls`` are open; False (and nothing changes) when the budget has no room for them."""
        return calls <= self.open or self.extend(calls - self.open)

    def lend(self, other: Reservation, calls: int) -> bool:
        """Hand ``calls`` that are still open to another reservation of the same budget; False when there are fewer."""
        if calls > self.open:
            return False
        self.open -= calls
        other.open += calls
        return True

    def refund(self) -> None:
        """Give back what is still open. Calling it again does nothing."""
        self._budget.reserved -= self.open
        self.open = 0


class EndKind(str, Enum):
    """The one way in which a step ends.

    A step that joined: its change lives on in a candidate that another step brings to its end.
    """

    COMMITTED = "committed"
    JOINED = "joined"
    REJECTED = "rejected"
    DISCARDED = "discarded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class End:
    """How a step ended, and why: a sentence for people, empty when the kind says it all."""

    kind: EndKind
    reason: str = ""


class StepEnded(FlashEvolveError):
    """Ends the step in which it is raised, from any depth; no error of the run."""

    def __init__(self, kind: EndKind, reason: str = "") -> None:
        super().__init__(reason)
        self.end = End(kind, reason)


class NothingToDoError(FlashEvolveError):
    """Raised by a step that finds nothing to work on: it never was, and no further one is opened."""


@dataclass(eq=False)
class Step:
    """One evolution step, from its selection to its end.

    Args:
        number: from 0, without gaps, in the order of selection.
        rng: the step's own source of randomness, so that what it decides does not depend on how steps interleave.
        reservation: pays for its rollouts.
        recorded: what the journal has of its selection, where it runs again after an interruption; else None.
    """

    number: int
    rng: random.Random = field(repr=False)
    reservation: Reservation = field(repr=False)
    recorded: Any = None
    version: int = field(default=0, init=False)
    """The pool's version (count of commits) that it saw."""
    value: float = field(default=0.0, init=False)
    """What it is thought to reach, in score; where slots are scarce, more goes first."""
    has_begun: bool = field(default=False, init=False)
    """It has selected what it works on."""
    is_working: bool = field(default=True, init=False)
    """It works towards a child; else it only waits for an evaluation."""
    blocked_by: int | None = field(default=None, init=False)
    """Number of the step whose end it waits for; None where it waits for none."""
    has_requested: bool = field(default=False, init=False)
    """It has made a request."""

    def mark_blocked_by(self, number: int | None) -> None:
        """It waits for the end of the step of that number from now on; None: it goes on."""
        self.blocked_by = number

    def record_version(self, version: int, value: float | None = None) -> None:
        """It works on what the pool had at ``version`` from now on, and is thought to reach ``value``."""
        self.version = version
        self.value = self.value if value is None else value


def step_rng(number: int, seed: object) -> random.Random:
    """A step's randomness: it follows from the run's seed and the step's number alone.

    >>> step_rng(3, seed=0).random() == step_rng(3, seed=0).random()
    True
    """
    return random.Random(f"{seed}/{number}")


@dataclass(frozen=True, slots=True)
class Load:
    """What an admission rule may look at.

    Args:
        live, working: steps that have started and not ended; those of them that still work towards a child, while
            the others wait for its validation or commit.
        idle_slots, slots: slots that are free; requests that may be in flight now, None where the rule need not know.
        calls_left, calls_reserved: metric calls neither spent nor reserved (None without a limit); set aside for
            live steps.
        calls_per_step: metric calls that an ended step has cost on average (an estimate before).
        ended: steps that have ended.
        parked, without_request: live steps that wait for a provider that answers others, and need no room meanwhile;
            that have made no request yet.
    """

    live: int
    working: int
    idle_slots: int
    calls_left: int | None
    calls_reserved: int
    calls_per_step: float
    ended: int = 0
    slots: int | None = None
    parked: int = 0
    without_request: int = 0


class Admission(Protocol):
    """Decides whether one more step may start."""

    def admits(self, load: Load) -> bool:
        """Asked whenever a step has begun or ended, a slot is free, or the pool has changed."""
        ...


@dataclass(frozen=True, slots=True)
class LiveSteps:
    """A bound on live steps, one on those that work, and fewer where the budget is what runs out.

    A child that waits for its validation keeps slots busy but makes nothing new; a step that works towards a child
    starts from the pool as it is. Bounding the second kind apart keeps new children coming from a pool that has
    moved on.

    With ``calls_left + calls_reserved`` calls to go, ``n = calls_to_go / calls_per_step`` steps can still be paid.
    If all of them ran at once, all would start from the same pool: one generation. To spend them over at least
    ``generations`` generations, at most ``n / generations`` may live at once:

        live < min(limit, max(1, ceil(n / generations)))  and  (working < working_limit  or  idle_slots >= burst)

    The last term keeps the slots busy: where few children are worth a validation, ``working_limit`` steps cannot
    fill them, and a step that starts in an idle slot delays nobody. Steps that only wait for a provider that answers
    others do not count against the limit, unless it is ``strict``.

    Args:
        limit, working_limit: at least 1; None for no bound of their own on those that work.
        burst: idle slots, what a step's first requests need, from which one more may start beyond ``working_limit``.
        generations: see the formula; 0 turns it off.
        slots: requests in flight for which both limits are meant; where fewer may be in flight now, they shrink
            alike, to 2 at the least. None for limits that stay.

    Raises:
        ConfigurationError: a limit under 1, or negative generations.

    >>> rule = LiveSteps(limit=32, working_limit=12, generations=8)
    >>> rule.admits(Load(live=20, working=12, idle_slots=2, calls_left=None, calls_reserved=0, calls_per_step=30.0))
    False
    >>> rule.admits(Load(live=20, working=12, idle_slots=3, calls_left=None, calls_reserved=0, calls_per_step=30.0))
    True
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
        if load.live - (0 if self.strict else load.parked) >= self.bound(load):
            return False
        if self.working_limit is None or load.working < self._scaled(self.working_limit, load):
            return True
        return load.idle_slots - self.burst * load.without_request >= self.burst

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
