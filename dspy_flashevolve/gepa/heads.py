"""The heads: integrated candidates, each built on the one before, until a validation confirms them.

Everything here runs in the pool's writer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gepa.proposer.base import CandidateProposal

from dspy_flashevolve.engine.staleness import Texts
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.records import Base, Candidate


def best_scores(pool: Pool) -> dict[Any, float]:
    """The validation scores of the pool's best candidate; none before the seed is confirmed."""
    if not pool.seed_confirmed:
        return {}
    return pool.state.prog_candidate_val_subscores[pool.val_evaluation_policy.get_best_program(pool.state)]


def against_best(pool: Pool, scores: Mapping[Any, float]) -> tuple[float, float | None]:
    """The mean of a candidate's scores, and that of the pool's best on the same examples.

    Where the best was run on a part of them only, both are of that part. The second is None before the seed is
    confirmed, and where the best was run on none of them.
    """
    theirs = best_scores(pool)
    common = [i for i in scores if i in theirs]
    if not common:
        return sum(scores.values()) / max(1, len(scores)), None
    return sum(scores[i] for i in common) / len(common), sum(theirs[i] for i in common) / len(common)


@dataclass(frozen=True, slots=True)
class PrefixVerdict:
    """What a head's validation prefix says.

    Args:
        score: the head's mean on the prefix; None where the rest of it was not needed to say no.
        best: of the pool's best on the same examples; None before there is one.
        removed: heads that go because of it, it first; empty when it stays.
    """

    score: float | None
    best: float | None
    removed: tuple[int, ...] = ()


class Heads:
    """The line of heads.

    Args:
        pool: keeps the speculative candidates.
        margin: how far a head's score may lie under the pool's best.
    """

    def __init__(self, pool: Pool, margin: float) -> None:
        self._pool = pool
        self._margin = margin
        self._line: list[int] = []
        self._passed: set[int] = set()

    def newest(self, *, visible: bool) -> Base:
        """The head: the newest of the line, or the pool's best candidate when none waits.

        Args:
            visible: leave out heads that are still being screened.
        """
        waiting = self._pool.speculative
        self._line = [key for key in self._line if key in waiting]
        for key in reversed(self._line):
            if waiting[key].visible or not visible:
                return self._base(key)
        return self.confirmed_base()

    def confirmed_base(self) -> Base:
        """The pool's best validated candidate; the seed before it is validated."""
        pool = self._pool
        index = pool.val_evaluation_policy.get_best_program(pool.state) if pool.seed_confirmed else 0
        return Base(pool.state.program_candidates[index], index, None, pool.generations[index])

    def is_known(self, candidate: Candidate) -> bool:
        """Whether the pool holds the same texts already."""
        waiting = (entry.candidate for entry in self._pool.speculative.all())
        return any(candidate == other for other in (*self._pool.state.program_candidates, *waiting))

    def begin(self, texts: Texts, base: Base, others: tuple[int, ...]) -> tuple[int, Candidate, Base] | None:
        """Put an integrated candidate at the end of the line, to be screened.

        Args:
            texts: the components that change.
            base: what they were integrated onto. Where the line has moved on in other components only, they are put
                onto the newest head instead.
            others: parents of its children in gepa's pool.

        Returns:
            Its key, the candidate and what it stands on; None when the line has moved on in the same components.
        """
        newest = self.newest(visible=False)
        if any(newest.candidate[name] != base.candidate[name] for name in texts):
            return None
        base = newest
        candidate = {**base.candidate, **texts}
        parents = () if base.key is None else (base.key,)
        firm = (base.index,) if base.key is None else ()
        indices = (*firm, *(index for index in others if index not in firm))
        entry = self._pool.speculative.add(candidate, parents, indices, base.generation + 1, visible=False)
        self._line.append(entry.key)
        return entry.key, candidate, base

    def restore(self, proposal: CandidateProposal[Any], base: int | None, generation: int) -> int:
        """Put a head of an interrupted run back at the end of the line; returns its key."""
        parents = (base,) if base is not None and base in self._pool.speculative else ()
        indices = tuple(proposal.parent_program_ids)
        entry = self._pool.speculative.add(proposal.candidate, parents, () if parents else indices, generation)
        self._line.append(entry.key)
        return entry.key

    def land(self, key: int) -> bool:
        """It passed its screen: selection may pick it. False when it went with one that it stands on."""
        if key not in self._pool.speculative:
            return False
        self._pool.speculative.show(key)
        return True

    def drop(self, key: int) -> tuple[int, ...]:
        """Take it back with what stands on it; returns the heads that went, it first."""
        waiting = self._pool.speculative
        if key not in waiting:
            return ()
        return tuple(entry.key for entry in waiting.remove(key, self._passed) if entry.evaluation is None)

    def judge_prefix(self, key: int, scores: dict[Any, float]) -> PrefixVerdict:
        """Compare a head with the pool's best on the same validation examples, and roll it back where it is worse."""
        mean, best = against_best(self._pool, scores)
        if best is not None and mean < best - self._margin:
            return PrefixVerdict(mean, best, self.drop(key))
        self._passed.add(key)
        return PrefixVerdict(mean, best)

    def parents_of(self, key: int) -> list[int]:
        """Its parents in gepa's pool: confirmed ones, in place of those that did not last."""
        return list(self._pool.speculative.resolve((key,))) or [0]

    def confirmed(self, key: int, index: int) -> tuple[int, ...]:
        """It is in gepa's pool at ``index``; returns the heads under it, which are superseded."""
        waiting = self._pool.speculative
        if key not in waiting:
            return ()  # rolled back with one under it while it was on its way: an ordinary candidate
        under = tuple(waiting.ancestors(key))
        for ancestor in reversed(under):
            waiting.supersede(ancestor)
        waiting.confirm(key, index)
        return under

    def _base(self, key: int) -> Base:
        entry = self._pool.speculative[key]
        nearest = self.parents_of(key)
        return Base(entry.candidate, nearest[0], key, entry.generation)
