"""Candidates that steps may build on before their validation has confirmed them.

They stand beside gepa's state, which only ever holds confirmed candidates and stays readable by gepa.
The first is the seed itself: steps start from it while it is being validated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gepa.core.state import ValsetEvaluation

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.gepa.records import Candidate


@dataclass(frozen=True, slots=True)
class Speculative:
    """A candidate that waits for its validation.

    Args:
        key: its handle.
        candidate: component -> text.
        parents: handles of speculative parents.
        indices: confirmed parents, as indices of gepa's pool.
        generation: steps from the seed.
        evaluation: what is known of its validation; None for the seed, which selection picks while it is alone.
    """

    key: int
    candidate: Candidate
    parents: tuple[int, ...] = ()
    indices: tuple[int, ...] = ()
    generation: int = 0
    evaluation: ValsetEvaluation[Any, Any] | None = None


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
        self._settled: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """Key of one that left -> confirmed indices, and parents, that stand for it."""
        self._next = 0
        self.fallen: set[int] = set()
        """Those that did not hold what they promised: what was made from them is stale."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: int) -> bool:
        return key in self._waiting

    def __getitem__(self, key: int) -> Speculative:
        return self._waiting[key]

    def all(self) -> list[Speculative]:
        """All that wait, oldest first."""
        return list(self._waiting.values())

    def add(
        self,
        candidate: Candidate,
        parents: tuple[int, ...] = (),
        indices: tuple[int, ...] = (),
        generation: int = 0,
        evaluation: ValsetEvaluation[Any, Any] | None = None,
    ) -> Speculative:
        """Put a candidate up for speculation.

        Raises:
            ConfigurationError: a parent that does not wait.
        """
        unknown = [parent for parent in parents if parent not in self._waiting]
        if unknown:
            raise ConfigurationError(f"speculative parents {unknown} are not waiting; waiting: {list(self._waiting)}.")
        entry = Speculative(self._next, dict(candidate), parents, indices, generation, evaluation)
        self._waiting[entry.key] = entry
        self._next += 1
        return entry

    def confirm(self, key: int, index: int | None = None) -> Speculative:
        """Its validation is done: it is an ordinary candidate now, and its children stand on firm ground.

        Args:
            index: its place in gepa's pool; None leaves its children without it as a parent.

        Raises:
            ConfigurationError: it does not wait.
        """
        entry = self._known(key)
        self._leave(entry, () if index is None else (index,))
        return entry

    def confirm_late(self, key: int, index: int) -> None:
        """As :meth:`confirm`, for one that may have gone with one under it: its own validation has the last word."""
        if key in self._waiting:
            self.confirm(key, index)
        self._settled[key] = (index,), ()
        self.fallen.discard(key)

    def remove(self, key: int) -> list[Speculative]:
        """Take it back with its descendants, as if they had never been there; returns them, it first.

        Raises:
            ConfigurationError: it does not wait.
        """
        gone = [self._known(key)]
        for entry in list(self._waiting.values()):  # children always come after their parents
            if any(parent.key in entry.parents for parent in gone):
                gone.append(entry)
        for before in gone:
            entry = self._waiting[before.key]  # as it is now: the one under it has left
            self._leave(entry, entry.indices, heirs=entry.parents)
            self._settled[entry.key] = before.indices, before.parents  # one of these may be confirmed after all
            self.fallen.add(entry.key)
        return gone

    def resolve(self, keys: tuple[int, ...]) -> tuple[int, ...]:
        """The confirmed candidates that stand for ``keys``: themselves, or where they did not last their parents."""
        found: list[int] = []
        for key in keys:
            entry = self._waiting.get(key)
            indices, parents = self._settled.get(key, ((), ())) if entry is None else (entry.indices, entry.parents)
            found += [*self.resolve(parents), *indices]
        return tuple(dict.fromkeys(found))

    def _known(self, key: int) -> Speculative:
        if key not in self._waiting:
            raise ConfigurationError(f"candidate {key} is not speculative; waiting: {list(self._waiting)}.")
        return self._waiting[key]

    def _leave(self, entry: Speculative, indices: tuple[int, ...], heirs: tuple[int, ...] = ()) -> None:
        """Take it out; its children get ``indices`` and ``heirs`` for parents in its place."""
        self._settled[entry.key] = indices, heirs
        del self._waiting[entry.key]
        for child in [other for other in self._waiting.values() if entry.key in other.parents]:
            parents = [parent for parent in child.parents if parent != entry.key]
            parents += [heir for heir in heirs if heir not in parents and heir in self._waiting]
            firm = tuple(dict.fromkeys((*indices, *child.indices)))
            self._waiting[child.key] = replace(child, parents=tuple(parents), indices=firm)
