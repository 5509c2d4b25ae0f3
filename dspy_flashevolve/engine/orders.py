"""The default order of slots; the other one is :class:`~dspy_flashevolve.engine.claims.DeepestFirst`."""

from __future__ import annotations

import math

from dspy_flashevolve.engine.claims import Claim, SlotKey
from dspy_flashevolve.engine.errors import ConfigurationError


class ValueFirst:
    """What is worth most a request goes first.

    A claim's worth is what its item is thought to reach (the score of its parent, and the child's gain on the screen
    once it is known), more the nearer its stage is to a commit, less by a factor for each commit that its ticket has
    not seen, and shared by the requests that it still needs: the last two requests of a validation go before its first
    fifty, and those before nothing.

    A claim without an end to its value (the seed's validation, on which every commit waits) has some slots before all
    others. What it could use beyond them goes by its requests alone, so that it holds nobody else back.

    Args:
        discount: what an item keeps of its worth for each commit it has not seen; above 0, up to 1.
        first: slots that a claim without an end to its value has before all others; at least 1. By its name,
            ``slot_order="value"``, half of the slots, and 32 where they adapt.

    Raises:
        ConfigurationError: a discount outside of (0, 1], or fewer than 1 first.
    """

    def __init__(self, discount: float = 0.9, first: int = 32) -> None:
        if not 0 < discount <= 1:
            raise ConfigurationError(f"value order: discount is {discount}, expected above 0 and up to 1.")
        if first < 1:
            raise ConfigurationError(f"value order: first is {first}, expected at least 1.")
        self._lost = -math.log(discount)
        self._first = first

    def key(self, claim: Claim, held: int, waiting: int) -> SlotKey:
        """See :meth:`~dspy_flashevolve.engine.slots.SlotOrder.key`."""
        if math.isinf(claim.value) and claim.value > 0 and held < self._first:
            return (-math.inf, -claim.rank, float(claim.ticket))
        value = max(0.0, claim.value) if math.isfinite(claim.value) else 0.0
        worth = (BASE_WORTH + value) * claim.depth
        # The logarithm of the share of worth, up to what is the same for all claims: how many commits there are.
        share = math.log(worth) if worth > 0 else -math.inf
        share += claim.version * self._lost - math.log(max(1, held + waiting))
        return (-share, -claim.rank, float(claim.ticket))


BASE_WORTH = 0.1
"""Of an item of which nothing is known, in score: new candidates may come from anywhere."""
