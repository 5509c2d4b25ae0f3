"""CombeeReflection: reflects on groups of records side by side, and integrates what they propose."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any

import dspy
from dspy.teleprompt.gepa.instruction_proposal import ProposeInstruction

from dspy_flashevolve.engine.staleness import StaleChild
from dspy_flashevolve.modules.integrate import StaleCandidateReflection

Records = Sequence[Mapping[str, Any]]
MOST_CHARACTERS = 100_000
"""Of each proposal that is integrated: a whole instruction by a strong model has 5,000 to 15,000, and what is cut is
lost, since nothing else goes on with it."""


class CombeeReflection:
    """Combee: reflects on groups of records side by side, and integrates what they propose.

    An instruction proposer for ``dspy.GEPA`` and ``AsyncGEPA``. It is synchronous: a step reflects on one large
    minibatch. Source: Combee's map and reduce over about sqrt(n) groups with shuffled copies of the records, as
    FlashEvolve (arXiv 2605.08520) compares itself with.

    Pass it as ``instruction_proposer`` together with ``reflection_minibatch_size=n``.

    Args:
        copies: how often each record is dealt, in shuffled order.
        groups: reflections a component; None for about sqrt(n).
        reduce: integrates the proposals; default :class:`StaleCandidateReflection`.
        seed: of the shuffling.

    Raises:
        ValueError: copies or groups under 1.
    """

    def __init__(
        self, copies: int = 2, groups: int | None = None, reduce: dspy.Module | None = None, seed: int = 0
    ) -> None:
        if copies < 1 or (groups is not None and groups < 1):
            raise ValueError(f"CombeeReflection: copies={copies} and groups={groups}, expected at least 1 of each.")
        self.copies = copies
        self.groups = groups
        self.map = dspy.Predict(ProposeInstruction)
        self.reduce = reduce or StaleCandidateReflection(max_characters=MOST_CHARACTERS)
        self._rng = random.Random(seed)

    def __call__(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Records],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """Return a new instruction for each component, as dspy's ``ProposalFn``; groups are reflected on in threads."""
        texts: dict[str, str] = {}
        for name in self._reflected_on(candidate, reflective_dataset, components_to_update):
            text, groups = candidate[name], self._deal(list(reflective_dataset[name]))
            with ThreadPoolExecutor(len(groups)) as threads:
                maps = [partial(self.map, current_instruction=text, examples_with_feedback=group) for group in groups]
                jobs = [threads.submit(copy_context().run, reflect) for reflect in maps]
                proposals = [str(job.result().new_instruction) for job in jobs]
            answer = self.reduce(**_integration(candidate, name, proposals))
            texts[name] = _reduced_text(answer, name, proposals)
        return texts

    async def acall(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Records],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """As :meth:`__call__`, awaitable."""
        texts: dict[str, str] = {}
        for name in self._reflected_on(candidate, reflective_dataset, components_to_update):
            text, groups = candidate[name], self._deal(list(reflective_dataset[name]))
            maps = [self.map.acall(current_instruction=text, examples_with_feedback=group) for group in groups]
            proposals = [str(reply.new_instruction) for reply in await asyncio.gather(*maps)]
            answer = await self.reduce.acall(**_integration(candidate, name, proposals))
            texts[name] = _reduced_text(answer, name, proposals)
        return texts

    @staticmethod
    def _reflected_on(candidate: dict[str, str], dataset: Mapping[str, Records], components: list[str]) -> list[str]:
        return [name for name in components if name in candidate and dataset.get(name)]

    def _deal(self, records: list[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
        """Deal the records, and shuffled copies of them, to the groups in turn."""
        dealt = [dict(record) for _ in range(self.copies) for record in self._rng.sample(records, len(records))]
        size = self.groups or max(1, round(math.sqrt(len(records))))
        return [group for group in (dealt[start::size] for start in range(size)) if group]


def _integration(candidate: dict[str, str], name: str, proposals: Sequence[str]) -> dict[str, Any]:
    children = [
        StaleChild(number, {name: text}, {name: candidate[name]}, score_before=0.0)
        for number, text in enumerate(proposals, start=1)
    ]
    return {"head": dict(candidate), "children": children}


def _reduced_text(answer: Any, name: str, proposals: Sequence[str]) -> str:
    """Return the reduced text; the first proposal where the reduction could not be read."""
    return str(answer.texts.get(name) or proposals[0])
