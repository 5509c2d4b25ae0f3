"""Children as a train carries them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
from gepa.proposer.base import CandidateProposal

from dspy_flashevolve.engine.integration import StaleChild
from dspy_flashevolve.engine.item import Item
from dspy_flashevolve.engine.staleness import gap
from dspy_flashevolve.gepa.payloads import Child, Waiting
from dspy_flashevolve.gepa.speculative import SpeculativeCandidates


def stale_child(number: int, item: Item[Waiting], child: Child, version: int) -> StaleChild:
    """A child as an integration reads it.

    Args:
        number: names it in verdicts.
        version: the pool's, now.
    """
    before, parent = child.parent_evaluation.scores, child.task.parent_candidate
    names = [name for name, text in child.candidate.items() if text != parent[name]]
    after = next((one for one in item.payload.proposals if one.candidate == child.candidate), None)
    scores = None if after is None else after.subsample_scores_after or []
    return StaleChild(
        number=number,
        texts={name: child.candidate[name] for name in names},
        parent_texts={name: parent[name] for name in names},
        score_before=sum(before) / max(1, len(before)),
        score_after=None if scores is None else sum(scores) / max(1, len(scores)),
        feedback=child.feedback,
        behind=gap(version, item.version),
    )


def changed_components(children: Sequence[Child]) -> tuple[str, ...]:
    """The components that children changed, sorted."""
    return tuple(
        sorted(
            {n for child in children for n, text in child.candidate.items() if text != child.task.parent_candidate[n]}
        )
    )


def parent_of(child: Child, waiting: SpeculativeCandidates) -> int:
    """Its parent in gepa's pool: itself where it was speculative and is confirmed by now, else what stands for it."""
    bases = () if child.base is None else (child.base,)
    return (*waiting.resolve(bases), child.task.parent_idx)[0]


def bases_of(children: Sequence[Child]) -> tuple[int | None, ...]:
    """The speculative candidates that children were made from."""
    return tuple(child.base for child in children)


def sums(proposal: CandidateProposal[Any]) -> tuple[float, float]:
    """Summed scores of the base and of the candidate."""
    return sum(proposal.subsample_scores_before or []), sum(proposal.subsample_scores_after or [])


class all_of:  # reads as a phrase: async with _all_of(locks)
    """Holds several locks, taken in one order everywhere."""

    def __init__(self, locks: list[anyio.Lock]) -> None:
        self._locks = locks

    async def __aenter__(self) -> None:
        for lock in self._locks:
            await lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        for lock in self._locks:
            lock.release()
