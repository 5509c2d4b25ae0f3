"""The budget of metric calls: reserve before, settle after, refund the rest.

``spent + reserved <= limit`` holds at every moment, so a run never exceeds its limit, whatever is in
flight (docs/architecture.md).
"""

from __future__ import annotations

from dspy_flashevolve.engine.errors import BudgetError, ConfigurationError


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
