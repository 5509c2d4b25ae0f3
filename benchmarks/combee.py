"""CombeeReflection: reflects on groups of records side by side, and merges what they propose."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any

import dspy
from dspy.teleprompt.gepa.instruction_proposal import ProposeInstruction
from dspy.utils.exceptions import AdapterParseError

Records = Sequence[Mapping[str, Any]]


class MergeProposals(dspy.Signature):
    """Several new versions of one instruction were proposed side by side, each after reading other examples of the same
    task. Merge them into one instruction. Keep what every version has learnt, in full detail; where two of them
    contradict each other, keep the more specific advice."""

    current_instruction: str = dspy.InputField(desc="The instruction that all of them start from.")
    proposed_instructions: str = dspy.InputField(desc="The proposed versions.")
    new_instruction: str = dspy.OutputField(desc="The merged instruction, and nothing else.")


class CombeeReflection:
    """Combee (arXiv 2604.04247): reflects on groups of records side by side, and merges what they propose.

    An instruction proposer for ``dspy.GEPA`` and ``AsyncGEPA``. It is synchronous: a step reflects on one large
    minibatch. It is Combee's parallel scan over shuffled copies: each of n records is copied and all copies are
    shuffled, floor(sqrt(n)) groups of them are reflected on side by side, and one more request merges the proposals.
    With fewer than four records there is one group, without copies and without a merge. Combee's controller of the
    batch size is not here: you choose n, as FlashEvolve (arXiv 2605.08520) does with K = 10 and 40.

    Pass it as ``instruction_proposer`` together with ``reflection_minibatch_size=n``.

    Args:
        copies: how often each record is dealt.
        groups: reflections a component; None for floor(sqrt(n)).
        reduce: merges the proposals; takes the inputs of :class:`MergeProposals`, which is the default, and returns
            its ``new_instruction``.
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
        self.reduce = reduce or dspy.Predict(MergeProposals)
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
            texts[name] = proposals[0]
            if len(proposals) > 1:
                with suppress(AdapterParseError):  # the first proposal counts where the merged text cannot be read
                    texts[name] = str(self.reduce(**_merge_inputs(text, proposals)).new_instruction)
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
            texts[name] = proposals[0]
            if len(proposals) > 1:
                with suppress(AdapterParseError):
                    texts[name] = str((await self.reduce.acall(**_merge_inputs(text, proposals))).new_instruction)
        return texts

    @staticmethod
    def _reflected_on(candidate: dict[str, str], dataset: Mapping[str, Records], components: list[str]) -> list[str]:
        return [name for name in components if name in candidate and dataset.get(name)]

    def _deal(self, records: list[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
        """Deal the records, shuffled with their copies, to the groups in turn; a lone group gets them once."""
        groups = self.groups or math.isqrt(len(records))
        if groups == 1:
            return [[dict(record) for record in records]]
        dealt = [dict(record) for _ in range(self.copies) for record in records]
        self._rng.shuffle(dealt)
        return [group for group in (dealt[start::groups] for start in range(groups)) if group]


def _merge_inputs(text: str, proposals: Sequence[str]) -> dict[str, str]:
    shown = "\n\n".join(f"### Proposal {number}\n{proposal}" for number, proposal in enumerate(proposals, start=1))
    return {"current_instruction": text, "proposed_instructions": shown}
