"""What a ticket works on: a merge, or parents and minibatches; after an interruption, what it had selected before."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from dspy_flashevolve.engine.item import Ticket
from dspy_flashevolve.engine.pipeline import Opened
from dspy_flashevolve.gepa.heads import Heads
from dspy_flashevolve.gepa.merging import plan_merge
from dspy_flashevolve.gepa.past import Unfinished
from dspy_flashevolve.gepa.payloads import Base, MergePlan, Selected
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.resuming import GoingOn
from dspy_flashevolve.gepa.selection import Fixed, sample


class Selecting:
    """Selects for tickets, and gives them their randomness.

    Args:
        pool: gepa's state and strategies.
        lockstep: draw from the strategies' shared randomness, as gepa does, instead of the ticket's.
        heads: where tickets start from besides the Pareto frontier; None where there are no heads.
        frontier_share: share of the tickets that start from the Pareto frontier all the same.
    """

    def __init__(self, pool: Pool, lockstep: bool, heads: Heads | None, frontier_share: float) -> None:
        self._pool = pool
        self._lockstep = lockstep
        self._heads = heads
        self._frontier_share = frontier_share
        self._merges_in_flight = 0
        seed = pool.options.seed
        if seed is None and pool.journal is not None:
            seed = pool.journal.journal.kept("seed")
        self._seed = random.SystemRandom().getrandbits(64) if seed is None else seed
        if pool.journal is not None:
            pool.journal.journal.keep("seed", self._seed)
        self._draws: dict[int, tuple[int, float]] = {}
        self._number: int | None = None

    def next_ticket(self, last: int) -> Ticket:
        """The next ticket; the first one's number is above the pool's last, and above ``last``."""
        self._number = max(self._pool.state.i, last) + 1 if self._number is None else self._number + 1
        return self.ticket(self._number)

    def ticket(self, number: int) -> Ticket:
        """A ticket with its own randomness; what selection draws of it is drawn, whether it selects anew or not."""
        ticket = Ticket.create(number, self._seed)
        if not self._lockstep:
            self._draws[number] = ticket.rng.getrandbits(64), ticket.rng.random()
        return ticket

    def forget(self, ticket: Ticket) -> None:
        """It has ended."""
        self._draws.pop(ticket.number, None)

    # The methods below run in the pool's writer.

    def go_on(self, going_on: GoingOn, ticket: Ticket, one: Unfinished) -> Opened:
        """What a ticket of an interrupted run goes on with, and where."""
        self._merges_in_flight += one.kind == "merge"
        return going_on.open(ticket, one)

    def select(self, ticket: Ticket) -> tuple[int, Selected | MergePlan]:
        """What the ticket works on, and the version that it saw."""
        pool = self._pool
        trace = pool.begin_ticket(ticket)
        if not self._lockstep:
            pool.parts.rng.seed(self._draws[ticket.number][0])
        work = self._merge(ticket, trace) or self._sample(ticket)
        if pool.journal is not None:
            pool.journal.opened(ticket, self._seed, pool.version, work)
            pool.keep_strategies()
        return pool.version, work

    def parent_score(self, selected: Selected) -> float:
        """The best validation score among the parents; 0 before the seed is confirmed."""
        if not self._pool.seed_confirmed:
            return 0.0
        return max((self._pool.score_of(task.parent_idx) for task in selected.tasks), default=0.0)

    def merge_ended(self) -> None:
        """A ticket that merges has ended."""
        self._merges_in_flight -= 1

    def _merge(self, ticket: Ticket, trace: dict[str, Any]) -> MergePlan | None:
        merge = self._pool.parts.merge
        if merge is None or not self._pool.seed_confirmed:
            return None
        plan = None
        if merge.last_iter_found_new_program and merge.merges_due > self._merges_in_flight and self._may_merge():
            plan = plan_merge(merge, self._pool.state, trace, ticket.number + 1)
        merge.last_iter_found_new_program = False
        self._merges_in_flight += plan is not None
        return plan

    def _may_merge(self) -> bool:
        """gepa checks ``max_merge_invocations`` only when it schedules; with several in flight that is too early."""
        merge = self._pool.parts.merge
        assert merge is not None
        return self._lockstep or merge.total_merges_tested + self._merges_in_flight < merge.max_merge_invocations

    def _sample(self, ticket: Ticket) -> Selected:
        pool, parts = self._pool, self._pool.parts
        selector = parts.candidate_selector if pool.seed_confirmed else Fixed(0)
        head = self._head(ticket)
        if head is not None:
            selector = Fixed(head.index)
        tasks, bases = sample(
            pool,
            lambda state: parts.sampling_strategy.sample_tasks(state, selector, parts.batch_sampler, pool.trainset),
        )
        if head is not None and head.key is not None:
            for place, task in enumerate(tasks):  # a strategy of the user's may choose parents by itself
                if task.parent_idx == head.index and bases[place] is None:
                    tasks[place] = replace(task, parent_candidate=dict(head.candidate))
                    bases[place] = head.key
        iteration = ticket.number + 1
        for task in tasks:
            pool.notify(
                "on_candidate_selected",
                iteration=iteration,
                candidate_idx=task.parent_idx,
                candidate=task.parent_candidate,
                score=pool.score_of(task.parent_idx),
            )
            pool.notify(
                "on_minibatch_sampled",
                iteration=iteration,
                minibatch_ids=task.minibatch_ids,
                trainset_size=len(pool.trainset),
            )
        return Selected(tuple(tasks), tuple(bases))

    def _head(self, ticket: Ticket) -> Base | None:
        """The head that the ticket starts from; None for the frontier."""
        if self._heads is None or self._draws[ticket.number][1] < self._frontier_share:
            return None
        return self._heads.newest(visible=True)
