"""Candidates that tickets may build on before their validation has confirmed them.

They stand beside gepa's state, which only ever holds confirmed candidates and stays readable by gepa.
The first is the seed itself: tickets start from it while it is being validated.
"""

from __future__ import annotations

from dataclasses import dataclass

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.gepa.payloads import Candidate


@dataclass(frozen=True, slots=True)
class Speculative:
    """A candidate that waits for its validation.

    Args:
        key: its handle.
        candidate: component -> text.
        parents: handles of speculative parents; a confirmed parent needs none.
    """

    key: int
    candidate: Candidate
    parents: tuple[int, ...] = ()


class SpeculativeCandidates:
    """The speculative part of the pool.

    >>> waiting = SpeculativeCandidates()
    >>> head = waiting.add({"p": "text"})
    >>> child = waiting.add({"p": "longer text"}, parents=(head.key,))
    >>> [gone.candidate["p"] for gone in waiting.remove(head.key)]
    ['text', 'longer text']
    >>> len(waiting)
    0
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Speculative] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: int) -> bool:
        return key in self._waiting

    def all(self) -> list[Speculative]:
        """All that wait, oldest first."""
        return list(self._waiting.values())

    def add(self, candidate: Candidate, parents: tuple[int, ...] = ()) -> Speculative:
        """Put a candidate up for speculation.

        Raises:
            ConfigurationError: a parent that does not wait.
        """
        unknown = [parent for parent in parents if parent not in self._waiting]
        if unknown:
            raise ConfigurationError(f"speculative parents {unknown} are not waiting; waiting: {list(self._waiting)}.")
        entry = Speculative(self._next, dict(candidate), parents)
        self._waiting[entry.key] = entry
        self._next += 1
        return entry

    def confirm(self, key: int) -> Speculative:
        """Its validation is done: it is an ordinary candidate now, and its children stand on firm ground.

        Raises:
            ConfigurationError: it does not wait.
        """
        entry = self._take(key)
        for child in [other for other in self._waiting.values() if key in other.parents]:
            parents = tuple(parent for parent in child.parents if parent != key)
            self._waiting[child.key] = Speculative(child.key, child.candidate, parents)
        return entry

    def remove(self, key: int) -> list[Speculative]:
        """Take it back with all its descendants, as if they had never been there; returns them, it first.

        Raises:
            ConfigurationError: it does not wait.
        """
        gone = [self._take(key)]
        for entry in list(self._waiting.values()):  # children always come after their parents
            if any(parent.key in entry.parents for parent in gone):
                gone.append(self._waiting.pop(entry.key))
        return gone

    def _take(self, key: int) -> Speculative:
        if key not in self._waiting:
            raise ConfigurationError(f"candidate {key} is not speculative; waiting: {list(self._waiting)}.")
        return self._waiting.pop(key)
