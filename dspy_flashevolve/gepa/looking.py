"""Asking the staleness policy what becomes of an item."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.events import Looked
from dspy_flashevolve.engine.item import Item
from dspy_flashevolve.engine.staleness import Admit, Decision, Discard, History, Integrate, Look, Place, gap
from dspy_flashevolve.gepa.services import Services


class Lookout:
    """Looks at items where the policy wants it, and keeps count.

    Args:
        services: shared with the stages.
        integrates: whether there is anything to integrate with.
    """

    def __init__(self, services: Services, integrates: bool) -> None:
        self._on = services
        self._integrates = integrates
        self._passed = self._discarded = 0

    @property
    def discarded_share(self) -> float:
        """Of the items that the policy looked at, the share that it discarded."""
        return self._discarded / max(1, self._discarded + self._passed)

    def at(self, item: Item[Any], place: Place, bases: Collection[int | None], *, integrates: bool = True) -> Decision:
        """Ask the policy, where it wants to be asked; gaps are recorded at every place.

        Args:
            bases: the speculative candidates that the item was made from.
            integrates: False for merges, which stand on two validated candidates: they are admitted instead.
        """
        behind = gap(self._on.pool.version, item.version)
        self._on.gaps.record(place, behind)
        if place not in self._on.staleness.looks:
            return Admit()
        orphaned = any(base in self._on.pool.speculative.fallen for base in bases)
        history = History(self._on.pool.version, self._discarded, self._passed)
        decision = self._on.staleness.decide(Look(place, item.version, orphaned), history)
        if isinstance(decision, Integrate) and not integrates:
            decision = Admit()
        if isinstance(decision, Integrate) and (not self._integrates or place not in ("after_propose", "after_screen")):
            raise ConfigurationError(
                f"{self._on.staleness!r} wants to integrate {place}, where there is no integration."
            )
        self._discarded += isinstance(decision, Discard)
        self._passed += not isinstance(decision, Discard)
        reason = decision.reason if isinstance(decision, Discard) else ""
        word = type(decision).__name__.lower()
        self._on.bus.emit(Looked(self._on.clock(), item.ticket.number, place, behind, word, reason))
        return decision
