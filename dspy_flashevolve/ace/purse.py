"""What pays for validations: kept aside for the first and the last, saved up for those between."""

from __future__ import annotations

from dspy_flashevolve.engine.budget import Budget, Reservation


class Purse:
    """Metric calls for validations.

    Those of the first and the last playbook are kept aside from the beginning, so that samples cannot take them. For
    one that is due between, calls are saved up as samples give them back, unless the budget can never pay it.

    Args:
        budget: the run's.
        calls: of one validation.
    """

    def __init__(self, budget: Budget, calls: int) -> None:
        self._budget = budget
        self._calls = calls
        self._kept, self._saved = Reservation(budget, 0), Reservation(budget, 0)

    def open(self) -> None:
        """Keep aside what the first and the last validation cost; that it fits was checked."""
        self._kept.extend(2 * self._calls)

    def kept(self) -> Reservation:
        """What one of the two costs."""
        return self._kept.split(self._calls)

    def save(self) -> None:
        """Take what is left for the validation that is due."""
        limit = self._budget.limit
        if limit is not None and limit - self._budget.spent - self._kept.open < self._calls:
            self._saved.refund()
            return
        missing, left = self._calls - self._saved.open, self._budget.left
        self._saved.extend(missing if left is None else min(missing, left))

    def pay(self) -> Reservation | None:
        """What a validation costs; None where there is not enough yet."""
        self.save()
        return self._saved.split(self._calls) if self._saved.open >= self._calls else None

    def release(self) -> None:
        """Give back what is kept and saved."""
        self._kept.refund()
        self._saved.refund()
