"""GEPA's stages: rollout, propose, screen, validate, commit. What gepa does in a row, one ticket at a time.

The order of callbacks, log entries, metrics and counts within a ticket is that of gepa 0.1.4
(``ReflectiveMutationProposer.propose`` and ``GEPAEngine``); tickets overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio

from dspy_flashevolve.engine.errors import RolloutUnresolvedError
from dspy_flashevolve.engine.events import Committed, EventBus
from dspy_flashevolve.engine.item import End, EndKind, Item
from dspy_flashevolve.engine.rollouts import Rollouts
from dspy_flashevolve.engine.slots import Claim
from dspy_flashevolve.engine.stages import Finish, Forward, Handler, Outcome
from dspy_flashevolve.engine.staleness import Admit, GapHistogram, StalenessPolicy, gap
from dspy_flashevolve.gepa import reports
from dspy_flashevolve.gepa.acceptance import choose
from dspy_flashevolve.gepa.evaluations import Evaluations, gather
from dspy_flashevolve.gepa.payloads import (
    Batch,
    Children,
    Commit,
    Counts,
    EvolvingProgram,
    MergePlan,
    RolledOut,
    Screened,
    Selected,
    Validated,
)
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.proposing import Proposer
from dspy_flashevolve.gepa.source import Account

DEPTHS = {"rollout": 1, "propose": 2, "screen": 3, "validate": 4, "commit": 5}


@dataclass(frozen=True, slots=True)
class Services:
    """What the stages share.

    Args:
        accounts: ticket number -> its budget; the source keeps it.
        working: tickets that have no child to be validated yet.
        wake: asks the source whether a ticket may start.
        lockstep: one ticket at a time, exactly as gepa.
        staleness: looks at every child after its screen and before it is committed.
        seeded: set when the seed is confirmed.
    """

    pool: Pool
    program: EvolvingProgram
    evaluations: Evaluations
    rollouts: Rollouts
    accounts: dict[int, Account]
    working: set[int]
    wake: Callable[[], None]
    bus: EventBus
    gaps: GapHistogram
    counts: Counts
    seeded: anyio.Event
    lockstep: bool
    staleness: StalenessPolicy
    clock: Callable[[], float] = time.monotonic


def unresolved_fails(handler: Handler) -> Handler:
    """A ticket whose rollout got no answer ends as failed; it is not scored."""

    async def guarded(item: Item[Any]) -> Outcome:
        try:
            return await handler(item)
        except RolloutUnresolvedError as error:
            return Finish(End(EndKind.FAILED, str(error)))

    return guarded


class GepaStages:
    """The handlers of GEPA's stages."""

    def __init__(self, services: Services) -> None:
        self._on = services
        self._pool = services.pool
        self._proposer = Proposer(
            services.pool, services.program, services.rollouts, services.counts, services.lockstep
        )

    def handlers(self) -> dict[str, Handler]:
        """Stage -> handler."""
        stages: dict[str, Handler] = {
            "rollout": self.rollout,
            "propose": self.propose,
            "screen": self.screen,
            "validate": self.validate,
            "commit": self.commit,
        }
        return {name: unresolved_fails(handler) for name, handler in stages.items()}

    async def rollout(self, item: Item[Selected]) -> Outcome:
        """Run each task's parent on its minibatch, with traces."""
        tasks = item.payload.tasks
        if not tasks:
            return Finish(End(EndKind.DISCARDED, "there is nothing to work on within the budget"))
        await self._pool.write(reports.parents_start, self._pool, item.ticket, tasks)
        unique = {reports.task_key(task): task for task in tasks}
        results = await gather(
            [lambda t=task: self._minibatch(item, "rollout", t.parent_candidate, t) for task in unique.values()]
        )
        by_key = dict(zip(unique, results, strict=True))
        paid = sum(calls for _, calls in results)
        evaluations = tuple(by_key[reports.task_key(task)][0] for task in tasks)
        await self._pool.write(reports.parents_end, self._pool, item.ticket, tasks, evaluations, paid)
        self._on.accounts[item.ticket.number].counted += paid
        return Forward("propose", RolledOut(tasks, evaluations))

    async def propose(self, item: Item[RolledOut]) -> Outcome:
        """Let the reflection LM write a child for each task that leaves something to improve."""
        claim = self._claim(item, "propose")
        children, reasons = await self._proposer.propose(claim, item.ticket, item.payload)
        if not children:
            kind = EndKind.FAILED if any(reason.failed for reason in reasons) else EndKind.REJECTED
            return Finish(End(kind, "; ".join(dict.fromkeys(reason.text for reason in reasons))))
        return Forward("screen", Children(tuple(children)))

    async def screen(self, item: Item[Children | MergePlan]) -> Outcome:
        """Run the children on their parents' minibatches, and let gepa's criterion decide."""
        if isinstance(item.payload, MergePlan):
            return await self._screen_merge(item, item.payload)
        children = item.payload.children
        await self._pool.write(reports.children_start, self._pool, item.ticket, children)
        results = await gather(
            [lambda c=child: self._minibatch(item, "screen", c.candidate, c.task) for child in children]
        )
        batches = [batch for batch, _ in results]
        paid = sum(calls for _, calls in results)
        proposals = await self._pool.write(reports.children_end, self._pool, item.ticket, children, batches, paid)
        self._on.accounts[item.ticket.number].counted += paid
        kept = await self._pool.write(choose, self._pool, item.ticket, proposals)
        self._look(item, "screen")
        if not kept:
            return Finish(End(EndKind.REJECTED, "no child passed its screen"))
        value = await self._pool.write(reports.expected_score, self._pool, kept)
        return self._to_validation(item, Screened(tuple(kept)), value)

    async def validate(self, item: Item[Screened]) -> Outcome:
        """Run each child on the validation examples that gepa's evaluation policy names."""
        proposals = item.payload.proposals
        claim = self._claim(item, "validate")
        account = self._on.accounts[item.ticket.number]
        plans = await self._pool.write(
            lambda: [reports.cached_validation(self._pool, proposal.candidate) for proposal in proposals]
        )
        missing = sum(len(plan.missing) for plan in plans)
        if not account.cover(missing):
            return Finish(End(EndKind.DISCARDED, f"no budget is left for {missing} validation examples"))

        async def one(plan: reports.ValidationPlan) -> tuple[Any, int]:
            fresh, paid = await self._on.evaluations.validation(
                claim, account.reservation, plan.candidate, plan.missing
            )
            return await self._pool.write(reports.complete_validation, self._pool, plan, fresh), paid

        results = await gather([lambda plan=plan: one(plan) for plan in plans])
        evaluations = tuple(evaluation for evaluation, _ in results)
        paid = tuple(calls for _, calls in results)
        return Forward("commit", Validated(proposals, evaluations, paid, item.payload.merge), value=item.value)

    async def commit(self, item: Item[Validated]) -> Outcome:
        """Add the children to the pool, one after the other."""
        await self._on.seeded.wait()
        behind = self._look(item, "commit")
        commits = await self._pool.write(reports.commit, self._pool, item.ticket, item.payload)
        self._on.accounts[item.ticket.number].counted += sum(item.payload.paid)
        for commit in commits:
            self._on.bus.emit(self._committed(item, behind, commit))
        return Finish(End(EndKind.COMMITTED, f"candidate {', '.join(str(commit.candidate) for commit in commits)}"))

    async def _screen_merge(self, item: Item[Any], plan: MergePlan) -> Outcome:
        await self._pool.write(reports.merge_start, self._pool, item.ticket, plan)
        account = self._on.accounts[item.ticket.number]
        lookup = await self._pool.write(reports.cached_subsample, self._pool, plan)
        account.cover(len(lookup.missing))
        fresh, paid = await self._on.evaluations.validation(
            self._claim(item, "screen"), account.reservation, plan.candidate, lookup.missing, capture_traces=False
        )
        proposal = await self._pool.write(reports.merge_end, self._pool, item.ticket, plan, lookup, fresh, paid)
        account.counted += paid
        if proposal is None:
            return Finish(End(EndKind.REJECTED, "the merge is worse than one of its parents"))
        value = await self._pool.write(reports.merged_score, self._pool, plan)
        return self._to_validation(item, Screened((proposal,), merge=True), value)

    def _to_validation(self, item: Item[Any], screened: Screened, value: float) -> Forward:
        """The ticket has a child: another may start its work."""
        self._on.working.discard(item.ticket.number)
        self._on.wake()
        return Forward("validate", screened, value=value)

    async def _minibatch(self, item: Item[Any], stage: str, candidate: dict[str, str], task: Any) -> tuple[Batch, int]:
        account = self._on.accounts[item.ticket.number]
        account.cover(len(task.minibatch_ids))
        return await self._on.evaluations.minibatch(
            self._claim(item, stage), account.reservation, candidate, task.minibatch_ids, task.minibatch
        )

    def _claim(self, item: Item[Any], stage: str) -> Claim:
        return Claim(item.ticket.number, stage, DEPTHS[stage], item.value, item.version)

    def _look(self, item: Item[Any], where: str) -> int:
        behind = gap(self._pool.version, item.version)
        self._on.gaps.record(where, behind)
        decision = self._on.staleness.decide(behind)
        assert isinstance(decision, Admit), f"{decision!r} is not a decision that a stage can carry out"
        return behind

    def _committed(self, item: Item[Any], behind: int, commit: Commit) -> Committed:
        return Committed(
            seconds=self._on.clock(),
            ticket=item.ticket.number,
            version=commit.version,
            gap=behind,
            candidate=commit.candidate,
            score=commit.score,
            best_score=commit.best_score,
            generation=commit.generation,
        )
