"""What live tickets have of the budget."""

from __future__ import annotations

from dataclasses import dataclass

from dspy_flashevolve.engine.budget import Reservation


@dataclass
class Account:
    """What one live ticket has reserved, how much of it gepa's count knows, and whether it asked for slots yet.

    Args:
        elsewhere: calls that were split off for work which may outlive the ticket; it counts them itself.
    """

    reservation: Reservation
    merge: bool = False
    counted: int = 0
    started: bool = False
    elsewhere: int = 0

    def cover(self, calls: int) -> bool:
        """Make sure that ``calls`` more are reserved; False when the budget has no room for them."""
        missing = calls - self.reservation.open
        return missing <= 0 or self.reservation.extend(missing)
