"""GEPA's stages: rollout, propose, screen, validate, commit. What gepa does in a row, one ticket at a time.

The order of callbacks, log entries, metrics and counts within a ticket is that of gepa 0.1.4
(``ReflectiveMutationProposer.propose`` and ``GEPAEngine``); tickets overlap.
"""

from __future__ import annotations

from typing import Any

from dspy_flashevolve.engine.errors import ConfigurationError, RolloutUnresolvedError
from dspy_flashevolve.engine.events import Committed, Looked
from dspy_flashevolve.engine.item import End, EndKind, Item
from dspy_flashevolve.engine.slots import Claim
from dspy_flashevolve.engine.stages import Finish, Forward, Handler, Outcome, Outcomes
from dspy_flashevolve.engine.staleness import Admit, Decision, Discard, History, Integrate, Look, Place, gap
from dspy_flashevolve.gepa import merge_reports, reports
from dspy_flashevolve.gepa.acceptance import choose
from dspy_flashevolve.gepa.evaluations import gather
from dspy_flashevolve.gepa.payloads import (
    Batch,
    Children,
    Commit,
    Head,
    MergePlan,
    RolledOut,
    Screened,
    Selected,
    Train,
    Validated,
    Waiting,
)
from dspy_flashevolve.gepa.proposing import Proposer
from dspy_flashevolve.gepa.services import DEPTHS, Services
from dspy_flashevolve.gepa.source import Account
from dspy_flashevolve.gepa.train_yard import TrainYard


def unresolved_fails(handler: Handler) -> Handler:
    """A ticket whose rollout got no answer ends as failed, with those that it carries; it is not scored."""

    async def guarded(item: Item[Any]) -> Outcomes:
        try:
            return await handler(item)
        except RolloutUnresolvedError as error:
            failed = Finish(End(EndKind.FAILED, str(error)))
            carried = item.payload.members[1:] if isinstance(item.payload, Train) else ()
            return [(one, failed) for one in (item, *carried)]

    return guarded


class GepaStages:
    """The handlers of GEPA's stages.

    Args:
        services: what they share.
        yard: integrates; None where the policy never asks for it.
    """

    def __init__(self, services: Services, yard: TrainYard | None = None) -> None:
        self._on = services
        self._train = None if yard is None else yard.train
        self._heads = None if yard is None else yard.heads
        self._known = None if yard is None else yard.known
        self._passed = self._discarded = 0
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

    @property
    def discarded_share(self) -> float:
        """Of the items that the policy looked at, the share that it discarded."""
        return self._discarded / max(1, self._discarded + self._passed)

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
        if self._known is not None:
            for task, evaluation in zip(tasks, evaluations, strict=True):
                self._known.put(task.parent_candidate, task.minibatch_ids, evaluation.scores)
        decision = self._look(item, "before_propose")
        if isinstance(decision, Discard):
            return self._discard(decision)
        return Forward("propose", RolledOut(tasks, evaluations, item.payload.head))

    async def propose(self, item: Item[RolledOut]) -> Outcome:
        """Let the reflection LM write a child for each task that leaves something to improve."""
        claim = self._claim(item, "propose")
        children, reasons = await self._proposer.propose(claim, item.ticket, item.payload)
        if not children:
            kind = EndKind.FAILED if any(reason.failed for reason in reasons) else EndKind.REJECTED
            return Finish(End(kind, "; ".join(dict.fromkeys(reason.text for reason in reasons))))
        head = item.payload.head
        if self._train is not None:
            children = [child for child in children if child.candidate != child.task.parent_candidate]
            if not children:
                return Finish(End(EndKind.REJECTED, "the reflection changed nothing"))
        decision = self._look(item, "after_propose")
        if isinstance(decision, Discard):
            return self._discard(decision)
        if isinstance(decision, Integrate):
            return self._to_integration(item, Waiting(tuple(children), head=head))
        return Forward("screen", Children(tuple(children), head))

    async def screen(self, item: Item[Any]) -> Outcomes:
        """Run the children on their parents' minibatches, and let gepa's criterion decide."""
        if isinstance(item.payload, MergePlan):
            return await self._screen_merge(item, item.payload)
        if isinstance(item.payload, Train):
            assert self._train is not None
            return await self._train.screen(item)
        children = item.payload.children
        account = self._on.accounts[item.ticket.number]
        if not account.cover(calls := sum(len(child.task.minibatch_ids) for child in children)):
            return Finish(End(EndKind.DISCARDED, f"no budget is left for a screen of {calls}"))
        await self._pool.write(reports.children_start, self._pool, item.ticket, children)
        results = await gather(
            [lambda c=child: self._minibatch(item, "screen", c.candidate, c.task) for child in children]
        )
        batches = [batch for batch, _ in results]
        paid = sum(calls for _, calls in results)
        proposals = await self._pool.write(reports.children_end, self._pool, item.ticket, children, batches, paid)
        self._on.accounts[item.ticket.number].counted += paid
        kept = await self._pool.write(choose, self._pool, item.ticket, proposals)
        if not kept:
            return Finish(End(EndKind.REJECTED, "no child passed its screen"))
        decision = self._look(item, "after_screen")
        if isinstance(decision, Discard):
            return self._discard(decision)
        if isinstance(decision, Integrate):
            passed = [child for child in children if any(child.candidate == one.candidate for one in kept)]
            return self._to_integration(item, Waiting(tuple(passed), tuple(kept), item.payload.head))
        value = await self._pool.write(reports.expected_score, self._pool, kept)
        return self._to_validation(item, Screened(tuple(kept)), value)

    async def validate(self, item: Item[Any]) -> Outcome:
        """Run each child on the validation examples that gepa's evaluation policy names."""
        if isinstance(item.payload, Head):
            assert self._heads is not None
            return await self._heads.validate(item)
        proposals = list(item.payload.proposals)
        claim = self._claim(item, "validate")
        account = self._on.accounts[item.ticket.number]
        plans = await self._pool.write(
            lambda: [reports.cached_validation(self._pool, proposal.candidate) for proposal in proposals]
        )
        while not self._affords(account, missing := sum(len(plan.missing) for plan in plans)):
            await self._pool.write(self._pool.reject, item.ticket, proposals.pop(), reason="no budget is left for it")
            plans.pop()
            if not plans:
                return Finish(End(EndKind.DISCARDED, f"no budget is left for {missing} validation examples"))

        async def one(plan: reports.ValidationPlan) -> tuple[Any, int]:
            fresh, paid = await self._on.evaluations.validation(
                claim, account.reservation, plan.candidate, plan.missing
            )
            return await self._pool.write(reports.complete_validation, self._pool, plan, fresh), paid

        results = await gather([lambda plan=plan: one(plan) for plan in plans])
        evaluations = tuple(evaluation for evaluation, _ in results)
        paid = tuple(calls for _, calls in results)
        return Forward("commit", Validated(tuple(proposals), evaluations, paid, item.payload.merge), value=item.value)

    async def commit(self, item: Item[Validated]) -> Outcome:
        """Add the children to the pool, one after the other."""
        await self._on.seeded.wait()
        decision = self._look(item, "before_commit")
        if isinstance(decision, Discard):
            return self._discard(decision)
        behind = gap(self._pool.version, item.version)
        if self._heads is not None and item.payload.head is not None:
            commits = await self._heads.commit(item)
        else:
            commits = await self._pool.write(reports.commit, self._pool, item.ticket, item.payload)
        self._on.accounts[item.ticket.number].counted += sum(item.payload.paid)
        for commit in commits:
            self._on.bus.emit(self._committed(item, behind, commit))
        return Finish(End(EndKind.COMMITTED, f"candidate {', '.join(str(commit.candidate) for commit in commits)}"))

    async def _screen_merge(self, item: Item[Any], plan: MergePlan) -> Outcome:
        await self._pool.write(merge_reports.merge_start, self._pool, item.ticket, plan)
        account = self._on.accounts[item.ticket.number]
        account.started = True
        lookup = await self._pool.write(reports.cached_subsample, self._pool, plan)
        if not account.cover(len(lookup.missing)):
            return Finish(End(EndKind.DISCARDED, f"no budget is left for a screen of {len(lookup.missing)}"))
        fresh, paid = await self._on.evaluations.validation(
            self._claim(item, "screen"), account.reservation, plan.candidate, lookup.missing, capture_traces=False
        )
        proposal = await self._pool.write(merge_reports.merge_end, self._pool, item.ticket, plan, lookup, fresh, paid)
        account.counted += paid
        if proposal is None:
            return Finish(End(EndKind.REJECTED, "the merge is worse than one of its parents"))
        decision = self._look(item, "after_screen", integrates=False)
        if isinstance(decision, Discard):
            return self._discard(decision)
        value = await self._pool.write(merge_reports.merged_score, self._pool, plan)
        return self._to_validation(item, Screened((proposal,), merge=True), value)

    def _to_integration(self, item: Item[Any], waiting: Waiting) -> Forward:
        """The ticket's child waits for others: another may start its work."""
        self._on.working.discard(item.ticket.number)
        self._on.wake()
        return Forward("integrate", waiting, value=item.value)

    def _to_validation(self, item: Item[Any], screened: Screened, value: float) -> Forward:
        """The ticket has a child: another may start its work."""
        self._on.working.discard(item.ticket.number)
        self._on.wake()
        return Forward("validate", screened, value=value)

    def _affords(self, account: Account, calls: int) -> bool:
        """Whether the validations can be paid: by the budget, or by what is set aside for a head when there is none."""
        if account.cover(calls):
            return True
        return self._heads is not None and self._heads.lend(account.reservation, calls - account.reservation.open)

    async def _minibatch(self, item: Item[Any], stage: str, candidate: dict[str, str], task: Any) -> tuple[Batch, int]:
        account = self._on.accounts[item.ticket.number]
        account.started = True
        account.cover(len(task.minibatch_ids))
        return await self._on.evaluations.minibatch(
            self._claim(item, stage), account.reservation, candidate, task.minibatch_ids, task.minibatch
        )

    def _claim(self, item: Item[Any], stage: str) -> Claim:
        return Claim(item.ticket.number, stage, DEPTHS[stage], item.value, item.version)

    def _look(self, item: Item[Any], place: Place, *, integrates: bool = True) -> Decision:
        """Ask the policy, where it wants to be asked; gaps are recorded at every place.

        Args:
            integrates: False for merges, which stand on two validated candidates: they are admitted instead.
        """
        behind = gap(self._pool.version, item.version)
        self._on.gaps.record(place, behind)
        if place not in self._on.staleness.looks:
            return Admit()
        history = History(self._pool.version, self._discarded, self._passed)
        decision = self._on.staleness.decide(Look(place, item.version), history)
        if isinstance(decision, Integrate) and not integrates:
            decision = Admit()
        if isinstance(decision, Integrate) and (self._train is None or place not in ("after_propose", "after_screen")):
            raise ConfigurationError(
                f"{self._on.staleness!r} wants to integrate {place}, where there is no integration."
            )
        self._discarded += isinstance(decision, Discard)
        self._passed += not isinstance(decision, Discard)
        reason = decision.reason if isinstance(decision, Discard) else ""
        word = type(decision).__name__.lower()
        self._on.bus.emit(Looked(self._on.clock(), item.ticket.number, place, behind, word, reason))
        return decision

    @staticmethod
    def _discard(decision: Discard) -> Finish:
        return Finish(End(EndKind.DISCARDED, f"stale: {decision.reason}"))

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
            parents=commit.parents,
        )
