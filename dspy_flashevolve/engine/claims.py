"""Who asks for a slot, and who gets the next one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Claim:
    """Who asks for a slot: one ticket in one stage.

    Args:
        ticket: number of the ticket.
        stage: name of the stage.
        depth: position of the stage in the pipeline; deeper is nearer to a commit.
        value: what finishing the item is thought to be worth.
        version: the pool's version that the ticket saw.
        rank: goes before the value among claims of one stage; higher goes first.
        endpoint: who answers it, where that has a limit of its own; empty for the one of the stage.
    """

    ticket: int
    stage: str
    depth: int
    value: float = 0.0
    version: int = 0
    rank: float = 0.0
    endpoint: str = ""


SlotKey = tuple[float, ...]


class SlotOrder(Protocol):
    """Decides which waiting claim gets the next free slot."""

    def key(self, claim: Claim, held: int, waiting: int) -> SlotKey:
        """The claim with the smallest key goes first; of equal claims the one that asked first.

        Args:
            claim: who asks.
            held: slots that the claim holds now.
            waiting: requests of the claim that wait for one.
        """
        ...


class DeepestFirst:
    """Small claims first; then the deepest stage, the highest value, the freshest version.

    A claim with few requests left delays a large one by little, and a large one delays it by much. So a
    validation of 300 examples, deep as it is, leaves the next slots to a screen of 3, and still takes
    every slot that nobody else wants. Large claims of one stage do not share: the most valuable one gets
    all it can use, so that it ends soon, instead of all ending late.

    Args:
        small: requests, held and waiting, up to which a claim is small.
    """

    def __init__(self, small: int = 8) -> None:
        self._small = small

    def key(self, claim: Claim, held: int, waiting: int) -> SlotKey:
        """See :meth:`SlotOrder.key`."""
        large = held + waiting > self._small
        first = (float(large), -float(claim.depth), -claim.rank)
        return (*first, -claim.value, -float(claim.version), float(claim.ticket))
