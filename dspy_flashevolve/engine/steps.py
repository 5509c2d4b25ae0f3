"""An evolution step: its number, its randomness, what pays for it, and the one way in which it ends.

The budget of metric calls: reserve before, settle after, refund the rest. ``spent + reserved <= limit`` holds at every
moment, so a run never exceeds its limit, whatever is in flight (docs/architecture.md).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from dspy_flashevolve.engine.errors import BudgetError, ConfigurationError, FlashEvolveError


class Budget:
    """Counts calls against a limit.

    Args:
        limit: calls that may be made; None for no limit.
        spent: calls made before (a resumed run).

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
        """Set ``calls`` aside, or return None when they do not fit.

        Raises:
            BudgetError: a negative number of calls.
        """
        if calls < 0:
            raise BudgetError(f"cannot reserve {calls} calls.")
        if self.limit is not None and self.spent + self.reserved + calls > self.limit:
            return None
        self.reserved += calls
        return Reservation(self, calls)


class Reservation:
    """Calls set aside for one step. Made by :meth:`Budget.reserve`."""

    def __init__(self, budget: Budget, calls: int, parent: Reservation | None = None) -> None:
        self._budget = budget
        self._parent = parent
        self.open = calls
        self.settled = 0
        """Calls of it that were spent, those of its parts included."""

    def settle(self, calls: int = 1) -> None:
        """Count ``calls`` of the reservation as spent.

        Raises:
            BudgetError: more than are still open.
        """
        if calls < 0 or calls > self.open:
            raise BudgetError(f"cannot settle {calls} calls: {self.open} are reserved.")
        self.open -= calls
        self._budget.reserved -= calls
        self._budget.spent += calls
        one: Reservation | None = self
        while one is not None:
            one.settled += calls
            one = one._parent

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

    def split(self, calls: int) -> Reservation:
        """A part with ``calls`` that are still open, to be settled and refunded by itself.

        Raises:
            BudgetError: more than are open.
        """
        other = Reservation(self._budget, 0, self)
        if not self.lend(other, calls):
            raise BudgetError(f"cannot split {calls} calls off: {self.open} are reserved.")
        return other

    def refund(self) -> None:
        """Give back what is still open. Calling it again does nothing."""
        self._budget.reserved -= self.open
        self.open = 0


class EndKind(str, Enum):
    """The one way in which a step ends.

    An integrated step's change lives on in a candidate that another step brings to its end; the reason names it.
    """

    COMMITTED = "committed"
    INTEGRATED = "integrated"
    REJECTED = "rejected"
    DISCARDED = "discarded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class End:
    """How a step ended, and why.

    Args:
        kind: one of the six ways.
        reason: a sentence for people; empty when the kind says it all.
    """

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
        rng: the step's own source of randomness; no other step draws from it, so that what a step decides does not
            depend on how steps interleave.
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
    """It works towards a child; else it only waits for an evaluation, or for other steps."""
    rests: bool = field(default=False, init=False)
    """It waits for other steps, or for the end of the run, and needs no room meanwhile."""
    behind: int | None = field(default=None, init=False)
    """Number of the step whose end it waits for; None where it waits for none."""
    has_asked: bool = field(default=False, init=False)
    """It has made a request."""

    def waits_for(self, number: int | None) -> None:
        """It waits for the end of the step of that number from now on; None: it goes on."""
        self.behind = number

    def saw(self, version: int, value: float | None = None) -> None:
        """It works on what the pool had at ``version`` from now on, and is thought to reach ``value``."""
        self.version = version
        self.value = self.value if value is None else value


def rng_of(number: int, seed: object) -> random.Random:
    """A step's randomness: it follows from the run's seed and the step's number alone.

    >>> rng_of(3, seed=0).random() == rng_of(3, seed=0).random()
    True
    """
    return random.Random(f"{seed}/{number}")
