"""What each proposer looks into, so that proposers that run at once do not write the same thing."""

from __future__ import annotations

from collections.abc import Sequence

from dspy_flashevolve.engine.errors import ConfigurationError

DIRECTIONS = (
    "the words of the prompts: what the traces show that the instructions do not say yet",
    "what goes into the context: worked examples, retrieved or chosen for the input, and their order",
    "fewer tokens at the same score: a shorter context, fewer calls",
    "checking an answer and asking again when it fails the check",
    "several calls: a plan, a draft, a critique, a vote",
    "plain Python before and after the LM: parsing, normalizing, deciding easy cases without a call",
    "memory: what learn(batch) should keep of the training examples, and how forward uses it",
    "joining what the best candidates of the archive do differently",
)
"""The default directions."""


class Directions:
    """Gives each live ticket a direction of its own while there are enough, the one taken least often first.

    Args:
        directions: at least one.

    Raises:
        ConfigurationError: none is given, or one is empty.

    >>> board = Directions(["prompts", "memory"])
    >>> board.reserve(0), board.reserve(1), board.others(0)
    ('prompts', 'memory', ['memory'])
    """

    def __init__(self, directions: Sequence[str] = DIRECTIONS) -> None:
        if isinstance(directions, str) or not directions or not all(directions):
            raise ConfigurationError(f"directions is {directions!r}, expected one or more texts.")
        self._taken = dict.fromkeys(directions, 0)
        self._held: dict[int, str] = {}

    def reserve(self, ticket: int) -> str:
        """A direction for a ticket, until :meth:`release`."""
        held = list(self._held.values())
        direction = min(self._taken, key=lambda one: (held.count(one), self._taken[one]))
        self._taken[direction] += 1
        self._held[ticket] = direction
        return direction

    def release(self, ticket: int) -> None:
        """The ticket has ended; a ticket that holds none is fine."""
        self._held.pop(ticket, None)

    def others(self, ticket: int) -> list[str]:
        """What the other live tickets look into."""
        return [direction for number, direction in self._held.items() if number != ticket]
