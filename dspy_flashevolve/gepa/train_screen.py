"""Screening an integrated candidate: beside its base, on the union of its children's minibatches."""

from __future__ import annotations

from typing import Any

import anyio
from gepa.proposer.base import CandidateProposal

from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.events import Speculated
from dspy_flashevolve.engine.gathering import NoLongerWantedError, gather
from dspy_flashevolve.engine.item import Item
from dspy_flashevolve.engine.speculation import released_at
from dspy_flashevolve.gepa import train_reports
from dspy_flashevolve.gepa.evaluations import Watch
from dspy_flashevolve.gepa.gates import Gate, passes_screen, rejects_by_sum
from dspy_flashevolve.gepa.heads import Heads
from dspy_flashevolve.gepa.known_scores import KnownScores
from dspy_flashevolve.gepa.payloads import Batch, Candidate, Train
from dspy_flashevolve.gepa.riding import parent_of
from dspy_flashevolve.gepa.services import DEPTHS, Services


class TrainScreen:
    """Runs the screens of trains.

    Args:
        services: shared with the other stages.
        heads: the line of heads.
        known: scores of rollouts made by the other stages; a base is not run again on what it was run on.
    """

    def __init__(self, services: Services, heads: Heads, known: KnownScores) -> None:
        self._on = services
        self._pool = services.pool
        self._heads = heads
        self._known = known

    async def run(self, item: Item[Train]) -> CandidateProposal[Any] | None:
        """The integrated candidate and its base on the union of the minibatches, as gepa's proposal.

        A head that leads on a part of its screen may be put up for selection before the rest has finished
        (``Speculation.screen``). None where it was given up, since it could not pass any more.
        """
        train = item.payload
        examples = {
            i: example
            for one in train.members
            for child in one.payload.children
            for i, example in zip(child.task.minibatch_ids, child.task.minibatch, strict=True)
        }
        account = self._on.accounts[item.ticket.number]
        known = dict(self._known.of(train.base.candidate))
        missing = [i for i in examples if i not in known]
        if not account.cover(len(examples) + len(missing)):
            # What the budget cannot pay twice is compared where the base was run already.
            examples = {i: example for i, example in examples.items() if i in known}
            missing = []
            if not examples or not account.cover(len(examples)):
                examples = {}
        ids = list(examples)
        await self._pool.write(train_reports.train_starts, self._pool, item.ticket, train, list(examples.values()))
        watched = Watched(self._on, ids, known, self._gate_is_exact())
        if train.key is not None and self._on.speculation.screen < 1 and ids:
            self._on.background.start(lambda: self._land_early(item, watched))
        try:
            await gather([
                lambda: self._evaluate(item, train.base.candidate, missing, examples, watched.base_scored),
                lambda: self._evaluate(item, train.candidate, ids, examples, watched.head_scored),
            ])  # fmt: skip
        except NoLongerWantedError:
            pass
        finally:
            watched.end()
        await self._on.count(item.ticket.number)
        if watched.gate.closed:
            await self._pool.write(train_reports.given_up, self._pool, item.ticket, train, watched.gate.seen)
            return None
        before, after = [watched.before[i] for i in ids], [watched.after[i] for i in ids]
        parents = await self._pool.write(self._parents, train)
        return await self._pool.write(
            train_reports.train_ended, self._pool, item.ticket, train, ids, before, after, parents
        )

    async def _land_early(self, item: Item[Train], watched: Watched) -> None:
        train = item.payload
        assert train.key is not None
        await watched.decided.wait()
        if watched.leads and await self._pool.write(self._heads.land, train.key):
            after, before = watched.means()
            self._on.bus.emit(Speculated(self._on.clock(), item.ticket.number, train.key, after, before))
            self._on.wake()

    def _gate_is_exact(self) -> bool:
        return not self._on.lockstep and rejects_by_sum(self._pool.parts)

    async def _evaluate(
        self, item: Item[Any], candidate: Candidate, ids: list[Any], examples: dict[Any, Any], watch: Watch
    ) -> None:
        if not ids:
            return
        claim = Claim(item.ticket.number, "screen", DEPTHS["screen"], item.value, item.version)
        reservation = self._on.accounts[item.ticket.number].reservation
        batch: Batch
        wanted = [examples[i] for i in ids]
        batch, _ = await self._on.evaluations.minibatch(
            claim, reservation, candidate, ids, wanted, lambda index, score: watch(ids[index], score)
        )
        self._known.put(candidate, ids, batch.scores)

    def _parents(self, train: Train) -> list[int]:
        """The base first, then the children's parents, as far as they are in gepa's pool."""
        if train.key is not None and train.key in self._pool.speculative:
            return self._heads.parents_of(train.key)
        waiting = self._pool.speculative
        theirs = [parent_of(child, waiting) for one in train.members for child in one.payload.children]
        return list(dict.fromkeys([train.base.index, *theirs]))


class Watched:
    """What is known of a screen while it runs.

    Args:
        services: shared with the stages.
        ids: examples of the screen.
        known: scores of the base that are there already.
        exact: whether the head's sum alone decides.
    """

    def __init__(self, services: Services, ids: list[Any], known: dict[Any, float], exact: bool) -> None:
        self._ids = ids
        self._exact = exact
        self._needed = released_at(services.speculation.screen, len(ids)) if ids else 0
        self.before = {i: known[i] for i in ids if i in known}
        self.after: dict[Any, float] = {}
        self.leads = False
        """The head was ahead when enough of the examples had finished."""
        self.decided = anyio.Event()
        passes = passes_screen(services.pool.parts.acceptance, self._base_sum)
        self.gate = Gate(len(ids), passes, lambda: services.evaluations.highest)

    def base_scored(self, example: Any, score: float) -> bool:
        """The base has finished an example."""
        self.before[example] = score
        self._compare()
        return True

    def head_scored(self, example: Any, score: float) -> bool:
        """The head has finished an example; False when it cannot pass any more."""
        self.after[example] = score
        self._compare()
        return not self._exact or self.gate(self._ids.index(example), score)

    def means(self) -> tuple[float, float]:
        """The head's and the base's mean on the examples that both have finished."""
        both = [i for i in self._ids if i in self.before and i in self.after]
        count = max(1, len(both))
        return sum(self.after[i] for i in both) / count, sum(self.before[i] for i in both) / count

    def _compare(self) -> None:
        both = sum(i in self.before for i in self.after)
        if both >= self._needed and not self.decided.is_set():
            after, before = self.means()
            if after > before:
                self.leads = True
                self.decided.set()

    def end(self) -> None:
        """Nothing more is to come."""
        self.decided.set()

    def _base_sum(self) -> float | None:
        return sum(self.before[i] for i in self._ids) if len(self.before) == len(self._ids) else None
