"""Candidates that steps may build on before their validation has confirmed them.

They stand beside gepa's state, which only ever holds confirmed candidates, and stays readable by gepa. Steps start from
the seed, too, while it is being validated.
"""

from __future__ import annotations

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

    def withdraw(self) -> None:
        """Wait no more."""
        self.waits, self.evaluation = False, None


class SpeculativeCandidates:
    """The speculative part of the pool.

    >>> waiting = SpeculativeCandidates()
    >>> head = waiting.add({"p": "text"})
    >>> child = waiting.add({"p": "longer text"}, parents=(head.key,))
    >>> waiting.remove(head.key)
    >>> waiting.all()
    []
    """

    def __init__(self) -> None:
        self._entries: list[Speculative] = []
        """All that there ever were, by their handles; children come after their parents."""
        self.fallen = frozenset[int]()
        """Those that did not hold what they promised: what was made from them is stale. Replaced, never changed, so
        that the loop may read it."""

    def __contains__(self, key: int) -> bool:
        return self._entries[key].waits

    def all(self) -> list[Speculative]:
        """All that wait, oldest first."""
        return [entry for entry in self._entries if entry.waits]

    def add(
        self,
        candidate: Candidate,
        parents: tuple[int, ...] = (),
        indices: tuple[int, ...] = (),
        evaluation: ValsetEvaluation[Any, Any] | None = None,
    ) -> Speculative:
        """Put a candidate up for speculation; its speculative ``parents`` wait, too."""
        self._entries.append(Speculative(len(self._entries), dict(candidate), parents, indices, evaluation))
        return self._entries[-1]

    def confirm(self, key: int, index: int) -> None:
        """Its validation is done: it is an ordinary candidate now, and its children stand on firm ground.

        It may have gone with one under it: its own validation has the last word.

        Args:
            index: its place in gepa's pool.
        """
        entry = self._entries[key]
        entry.withdraw()
        entry.parents, entry.indices = (), (index,)
        self.fallen -= {key}

    def mark_fallen(self, key: int) -> None:
        """Its validation was worse than its prefix: what was made from it is stale."""
        self.fallen |= {key}

    def remove(self, key: int) -> None:
        """Take one that waits back with its descendants, as if they had never been there."""
        gone = {key}
        for entry in self.all():
            if entry.key in gone or gone & set(entry.parents):
                gone.add(entry.key)
                entry.withdraw()
        self.fallen |= gone

    def resolve(self, keys: tuple[int, ...]) -> tuple[int, ...]:
        """The confirmed candidates that stand for ``keys``: themselves, or where they did not last their parents."""
        entries = [self._entries[key] for key in keys]
        ancestors = (index for entry in entries for index in (*self.resolve(entry.parents), *entry.indices))
        return tuple(dict.fromkeys(ancestors))
