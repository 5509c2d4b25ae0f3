"""``search="edits"``, the default: edits of children are tested in many prompts, and those that help come together.

Steps start from variants of the head, the prompt of all edits that are expected to help. Each rollout is evidence on
the edits in its prompt (credit.py). A child that was written as edits joins by them and costs no validation; one that
was written as a whole text stands for itself. Once most children do so, steps start from the Pareto frontier, as
GEPA's do. When the head is validated, and how it is written anew, is a matter of heads.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

from gepa.core.state import GEPAState

from dspy_flashevolve.engine.staleness import Texts
from dspy_flashevolve.engine.steps import Step
from dspy_flashevolve.engine.store import Store
from dspy_flashevolve.gepa.credit import Credit
from dspy_flashevolve.gepa.records import Child
from dspy_flashevolve.gepa.screening import Screening
from dspy_flashevolve.gepa.search import ENDED_ROLLOUTS, Observation, Search, Start
from dspy_flashevolve.observe.statistics import ChangeRecord


class EditSearch(Search):
    """The search by edits.

    Args:
        credit: estimates what each edit is worth, and composes candidates.
        frontier_share: of the steps, those that start from the Pareto frontier all the same.
        split: the one to which minibatches belong, see :class:`Observation`.
    """

    def __init__(self, credit: Credit, frontier_share: float, split: str) -> None:
        self.credit, self.frontier_share, self._split = credit, frontier_share, split

    @property
    def come_together(self) -> bool | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Most of the last children were written as edits; None before the first child."""
        return self.credit.outlook.joins

    def select(self, state: GEPAState[Any, Any], rng: random.Random) -> Start | None:
        """Start from the head with and without some of the edits of unknown effect."""
        del state
        variant = None if self.come_together is False else self.credit.variant(rng)
        return None if variant is None else Start(self.credit.parent, variant)

    def observe(self, observation: Observation) -> None:
        """Take a score as evidence at once, on the loop: the next estimate may need it."""
        self.credit.record_score(observation.name, observation.split, observation.example, observation.score)

    async def needs_screen(self, step: Step, screening: Screening) -> bool:
        """Screen the first children, and later ones unless nearly all have beaten their parents."""
        await screening.wait_for_first()
        return screening.is_needed(step.number)

    def joins(self, step: int, child: Child, scores: Mapping[str, float]) -> bool:
        """Put the edits of a child among those that are tested."""
        if child.is_whole:
            return False
        return self.credit.take(step, child.source, child.candidate, child.edits, self._split, scores)

    def grown_in(self, texts: Texts) -> list[str]:
        """Name the components in which several children have edits."""
        return self.credit.grown_in(texts)

    def restore(self, store: Store, grown: Iterable[tuple[Texts, list[str]]]) -> None:
        """Put the edits back, the evidence on them from the rollouts of steps that have ended, and what has grown."""
        for texts, names in grown:
            self.credit.mark_grown(texts, names)
        if (written := store.get_state("credit")) is not None:
            self.credit.restore(written, [tuple(row) for row in store.rows(ENDED_ROLLOUTS)])

    def changes(self) -> list[ChangeRecord]:
        """List every edit that there has been, with its last estimate."""
        return self.credit.records()
