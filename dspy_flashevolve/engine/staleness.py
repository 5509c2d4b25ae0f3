"""How far the pool has moved on since a ticket looked, and what to do about it.

Source: FlashEvolve (arXiv 2605.08520) section 3.2. The pool's version counts its commits; a ticket
remembers the version that it saw; the difference is its gap.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Admit:
    """The item goes on as it is."""


Decision = Admit


def gap(version: int, seen: int) -> int:
    """Commits between what a ticket saw and now.

    >>> gap(7, 5)
    2
    """
    return version - seen


class StalenessPolicy(Protocol):
    """Looks at an item before it may go on. A pure function of its arguments."""

    def decide(self, gap: int) -> Decision:
        """What happens to an item that is ``gap`` commits behind."""
        ...


class Full:
    """Admit everything: the fastest, and the widest pool. Gaps are still recorded and reported."""

    def decide(self, gap: int) -> Decision:
        """See :meth:`StalenessPolicy.decide`."""
        del gap
        return Admit()


class GapHistogram:
    """How often each gap was seen, by the place where it was looked at."""

    def __init__(self) -> None:
        self._seen: dict[str, Counter[int]] = {}

    def record(self, where: str, gap: int) -> None:
        """Count one look."""
        self._seen.setdefault(where, Counter())[gap] += 1

    def as_dict(self) -> dict[str, dict[int, int]]:
        """Place -> gap -> count, gaps ascending."""
        return {where: dict(sorted(counts.items())) for where, counts in self._seen.items()}
