"""Candidates that steps may build on before their validation has confirmed them.

They stand beside gepa's state, which only ever holds confirmed candidates, and stays readable by gepa. Steps start from
the seed, too, while it is being validated.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from gepa.core.state import ValsetEvaluation

from dspy_flashevolve.gepa.records import Candidate


@dataclass(eq=False, slots=True)
class Speculative:
    """A candidate that waits for its validation, or has done so.

    Args:
        key: its handle.
        candidate: component -> text.
        parents: handles of speculative parents; none once it is confirmed.
        indices: confirmed parents, as indices of gepa's pool; its own once it is confirmed.
        evaluation: what is known of its validation.
        waits: its validation is under way.
    """

    key: int
    candidate: Candidate
    parents: tuple[int, ...] = ()
    indices: tuple[int, ...] = ()
    evaluation: ValsetEvaluation[Any, Any] | None = None
    waits: bool = True


class SpeculativeCandidates:
    """The speculative part of the pool.

    >>> waiting = SpeculativeCandidates()
    >>> head = waiting.add({"p": "text"})
    >>> child = waiting.add({"p": "longer text"}, parents=(head.key,))
    >>> waiting.remove(head.key)
    >>> waiting.entries
    ()
    """

    def __init__(self) -> None:
        self._all: list[Speculative] = []
        """All that there ever were, by their handles; children come after their parents."""
        self.entries: tuple[Speculative, ...] = ()
        """All that wait, oldest first. Replaced, never changed, so that the loop may read it."""
        self.fallen = frozenset[int]()
        """Those that did not hold what they promised: what was made from them is stale. Replaced, never changed, so
        that the loop may read it."""

    def __contains__(self, key: int) -> bool:
        return self._all[key].waits

    def add(
        self,
        candidate: Candidate,
        parents: tuple[int, ...] = (),
        indices: tuple[int, ...] = (),
        evaluation: ValsetEvaluation[Any, Any] | None = None,
    ) -> Speculative:
        """Put a candidate up for speculation; its speculative ``parents`` wait, too."""
        entry = Speculative(len(self._all), dict(candidate), parents, indices, evaluation)
        self._all.append(entry)
        self.entries += (entry,)
        return entry

    def confirm(self, key: int, index: int) -> None:
        """Make it an ordinary candidate, since its validation is done: its children stand on firm ground.

        It may have been removed with one under it: its own validation has the last word.

        Args:
            index: its place in gepa's pool.
        """
        entry = self._all[key]
        self._withdraw({key})
        entry.parents, entry.indices = (), (index,)
        self.fallen -= {key}

    def mark_fallen(self, key: int) -> None:
        """Call what was made from it stale, since its validation was worse than its prefix."""
        self.fallen |= {key}

    def remove(self, key: int) -> None:
        """Remove one that waits, and its descendants, as if they had never been there."""
        gone = {key}
        for entry in self.entries:
            if gone & set(entry.parents):
                gone.add(entry.key)
        self._withdraw(gone)
        self.fallen |= gone

    def _withdraw(self, keys: Collection[int]) -> None:
        """Take some out of those that wait."""
        for key in keys:
            self._all[key].waits, self._all[key].evaluation = False, None
        self.entries = tuple(entry for entry in self.entries if entry.waits)

    def resolve(self, keys: tuple[int, ...]) -> tuple[int, ...]:
        """Return the confirmed candidates that stand for ``keys``: these or, where they did not last, their parents."""
        entries = [self._all[key] for key in keys]
        ancestors = (index for entry in entries for index in (*self.resolve(entry.parents), *entry.indices))
        return tuple(dict.fromkeys(ancestors))
