"""GEPA's stages: rollout, propose, screen, validate, commit. What gepa does in a row, one ticket at a time.

The order of callbacks, log entries, metrics and counts within a ticket is that of gepa 0.1.4
(``ReflectiveMutationProposer.propose`` and ``GEPAEngine``); tickets overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import anyio

from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.events import Committed
from dspy_flashevolve.engine.gathering import NoLongerWantedError, gather
from dspy_flashevolve.engine.item import End, EndKind, Item
from dspy_flashevolve.engine.stages import Finish, Forward, Handler, Outcome, Outcomes, unresolved_fails
from dspy_flashevolve.engine.staleness import Discard, Integrate, gap
from dspy_flashevolve.gepa import merge_reports, reports
from dspy_flashevolve.gepa.acceptance import choose
from dspy_flashevolve.gepa.gates import Gate, passes_screen, rejects_by_sum
from dspy_flashevolve.gepa.looking import Lookout
from dspy_flashevolve.gepa.payloads import (
    Batch,
    Child,
    Children,
    Commit,
    Head,
    Late,
    MergePlan,
    RolledOut,
    Screened,
    Selected,
    Train,
    Validated,
    Waiting,
)
from dspy_flashevolve.gepa.proposing import Proposer
from dspy_flashevolve.gepa.riding import bases_of
from dspy_flashevolve.gepa.rolling import ParentRollouts
from dspy_flashevolve.gepa.services import DEPTHS, Services
from dspy_flashevolve.gepa.train_yard import TrainYard
from dspy_flashevolve.gepa.validating import Validating


def _carried(item: Item[Any]) -> Sequence[Item[Any]]:
    """Items that ride in another one's train; they end as it does."""
    return item.payload.members[1:] if isinstance(item.payload, Train) else ()


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
        self._pool = services.pool
        self.looks = Lookout(services, integrates=yard is not None)
        self._parents = ParentRollouts(services, self._remember)
        self._validating = Validating(services, self._heads)
        self._proposer = Proposer(services)

    def handlers(self) -> dict[str, Handler]:
        """Stage -> handler."""
        stages: dict[str, Handler] = {
            "rollout": self.rollout,
            "propose": self.propose,
            "screen": self.screen,
            "validate": self.validate,
            "commit": self.commit,
        }
        return {name: unresolved_fails(handler, _carried) for name, handler in stages.items()}

    async def rollout(self, item: Item[Selected]) -> Outcome:
        """Run each task's parent on its minibatch, with traces."""
        tasks = item.payload.tasks
        if not tasks or not self._parents.affords(item):
            return Finish(End(EndKind.DISCARDED, "there is nothing to work on within the budget"))
        await self._pool.write(reports.parents_start, self._pool, item.ticket, tasks)
        unique = {reports.task_key(task): task for task in tasks}
        whole = self._on.accounts[item.ticket.number].cover(sum(len(one.minibatch_ids) for one in unique.values()))
        results = await gather([lambda t=task: self._parent(item, t, whole) for task in unique.values()])
        by_key = dict(zip(unique, results, strict=True))
        paid = sum(calls for _, calls, _ in results)
        evaluations = tuple(by_key[reports.task_key(task)][0] for task in tasks)
        late = tuple(by_key[reports.task_key(task)][2] for task in tasks)
        await self._pool.write(reports.parents_end, self._pool, item.ticket, tasks, evaluations, paid)
        self._on.accounts[item.ticket.number].counted += paid
        for task, evaluation in zip(tasks, evaluations, strict=True):
            self._remember(task, evaluation)
        decision = self.looks.at(item, "before_propose", item.payload.bases)
        if isinstance(decision, Discard):
            return self._discard(decision)
        return Forward("propose", RolledOut(tasks, evaluations, item.payload.bases, late))

    async def propose(self, item: Item[RolledOut]) -> Outcome:
        """Let the reflection LM write a child for each task that leaves something to improve."""
        claim = self._claim(item, "propose")
        children, reasons = await self._proposer.propose(claim, item.ticket, item.payload)
        if not children:
            kind = EndKind.FAILED if any(one.failed for one in reasons) else EndKind.REJECTED
            return Finish(End(kind, "; ".join(dict.fromkeys(one.text for one in reasons))))
        if self._train is not None:
            children = [child for child in children if child.candidate != child.task.parent_candidate]
            if not children:
                return Finish(End(EndKind.REJECTED, "the reflection changed nothing"))
        decision = self.looks.at(item, "after_propose", bases_of(children))
        if isinstance(decision, Discard):
            return self._discard(decision)
        if isinstance(decision, Integrate):
            return self._to_integration(item, Waiting(tuple(children)))
        return Forward("screen", Children(tuple(children)))

    async def screen(self, item: Item[Any]) -> Outcomes:
        """Run the children on their parents' minibatches, and let gepa's criterion decide."""
        if isinstance(item.payload, MergePlan):
            return await self._screen_merge(item, item.payload)
        if isinstance(item.payload, Train):
            assert self._train is not None
            return await self._train.screen(item)
        children = item.payload.children
        account = self._on.accounts[item.ticket.number]
        number, split = item.ticket.number, self._on.evaluations.train_split
        calls = sum(self._on.unpaid(number, one.candidate, split, one.task.minibatch_ids) for one in children)
        if not account.cover(calls):
            return Finish(End(EndKind.DISCARDED, f"no budget is left for a screen of {calls}"))
        await self._pool.write(reports.children_start, self._pool, item.ticket, children)
        screened = [one for one in await gather([lambda c=child: self._screened(item, c) for child in children]) if one]
        if not screened:
            await self._on.count(item.ticket.number)
            return Finish(End(EndKind.REJECTED, "no child could pass its screen any more"))
        batches = [batch for _, batch in screened]
        children = [child for child, _ in screened]
        paid = account.reservation.settled - account.counted
        account.counted += paid
        proposals = await self._pool.write(reports.children_end, self._pool, item.ticket, children, batches, paid)
        kept = await self._pool.write(choose, self._pool, item.ticket, proposals)
        if not kept:
            return Finish(End(EndKind.REJECTED, "no child passed its screen"))
        child_of = {id(proposal): child for child, proposal in zip(children, proposals, strict=True)}
        passed = [child_of[id(one)] for one in kept]  # a selection strategy may change the order
        bases = bases_of(passed)
        decision = self.looks.at(item, "after_screen", bases)
        if isinstance(decision, Discard):
            return self._discard(decision)
        if isinstance(decision, Integrate):
            return self._to_integration(item, Waiting(tuple(passed), tuple(kept)))
        value = await self._pool.write(reports.expected_score, self._pool, kept)
        return self._to_validation(item, Screened(tuple(kept), bases), value)

    async def validate(self, item: Item[Any]) -> Outcome:
        """Run each child on the validation examples that gepa's evaluation policy names."""
        if isinstance(item.payload, Head):
            assert self._heads is not None
            return await self._heads.validate(item)
        return await self._validating.validate(item)

    async def commit(self, item: Item[Validated]) -> Outcome:
        """Add the children to the pool, one after the other."""
        await self._on.seeded.wait()
        decision = self.looks.at(item, "before_commit", item.payload.bases)
        if isinstance(decision, Discard):
            await self._validating.withdraw(item.ticket.number, item.payload.keys, decision.reason)
            return self._discard(decision)
        behind = gap(self._pool.version, item.version)
        commits: list[Commit] = []
        with anyio.CancelScope(shield=True):  # what enters the pool is told and counted, even if the run ends meanwhile
            if self._heads is not None and item.payload.head is not None:
                commits = await self._heads.commit(item)
            else:
                commits = await self._validating.commit(item)
        self._on.accounts[item.ticket.number].counted += sum(item.payload.paid)
        for commit in commits:
            self._on.bus.emit(self._committed(item, behind, commit))
        return Finish(End(EndKind.COMMITTED, f"candidate {', '.join(str(commit.candidate) for commit in commits)}"))

    async def _screen_merge(self, item: Item[Any], plan: MergePlan) -> Outcome:
        await self._pool.write(merge_reports.merge_start, self._pool, item.ticket, plan)
        account = self._on.accounts[item.ticket.number]
        account.started = True
        lookup = await self._pool.write(reports.cached_subsample, self._pool, plan)
        calls = self._on.unpaid(item.ticket.number, plan.candidate, "val", lookup.missing, traced=False)
        if not account.cover(calls):
            return Finish(End(EndKind.DISCARDED, f"no budget is left for a screen of {calls}"))
        fresh, paid = await self._on.evaluations.validation(
            self._claim(item, "screen"), account.reservation, plan.candidate, lookup.missing, capture_traces=False
        )
        proposal = await self._pool.write(merge_reports.merge_end, self._pool, item.ticket, plan, lookup, fresh, paid)
        account.counted += paid
        if proposal is None:
            return Finish(End(EndKind.REJECTED, "the merge is worse than one of its parents"))
        decision = self.looks.at(item, "after_screen", (), integrates=False)
        if isinstance(decision, Discard):
            return self._discard(decision)
        value = await self._pool.write(merge_reports.merged_score, self._pool, plan)
        return self._to_validation(item, Screened((proposal,), (None,), merge=True), value)

    def _to_integration(self, item: Item[Any], waiting: Waiting) -> Forward:
        return self._with_child(item, Forward("integrate", waiting, value=item.value))

    def _to_validation(self, item: Item[Any], screened: Screened, value: float) -> Forward:
        return self._with_child(item, Forward("validate", screened, value=value))

    def _with_child(self, item: Item[Any], forward: Forward) -> Forward:
        """The ticket has a child: another may start its work."""
        self._on.working.discard(item.ticket.number)
        self._on.wake()
        return forward

    async def _parent(self, item: Item[Any], task: Any, whole: bool) -> tuple[Batch, int, Late | None]:
        """The parent's evaluation on its minibatch, its cost so far, and what is to come; `whole`: all is set aside."""
        self._on.accounts[item.ticket.number].started = True
        if whole and self._parents.releases(task):
            batch, late = await self._parents.run(self._claim(item, "rollout"), task)
            return batch, 0, late  # the background counts its calls
        batch, paid = await self._minibatch(item, "rollout", task.parent_candidate, task)
        return batch, paid, None

    async def _screened(self, item: Item[Any], child: Child) -> tuple[Child, Batch] | None:
        """A child on its parent's minibatch; None where it was given up, since it could not pass any more."""
        whole: Batch | None = child.parent_evaluation if child.late is None else None
        gate: Gate | None = None
        if not self._on.lockstep and rejects_by_sum(self._pool.parts):
            passes = passes_screen(self._pool.parts.acceptance, lambda: None if whole is None else sum(whole.scores))
            gate = Gate(len(child.task.minibatch_ids), passes, lambda: self._on.evaluations.highest)

        async def parent() -> Batch:
            nonlocal whole
            whole = child.parent_evaluation if child.late is None else await child.late.complete()
            return whole

        async def evaluated() -> Batch:
            batch, _ = await self._minibatch(item, "screen", child.candidate, child.task, gate)
            return batch

        async def both() -> Any:
            return await gather([parent, evaluated])

        try:
            full, batch = await both()
        except NoLongerWantedError:
            assert gate is not None
            assert whole is not None
            known = replace(child, parent_evaluation=whole)
            await self._pool.write(reports.given_up, self._pool, item.ticket, known, gate.seen)
            return None
        return replace(child, parent_evaluation=full, late=None), batch

    def _remember(self, task: Any, evaluation: Batch) -> None:
        """Keep scores of training examples, of a whole minibatch or of the part that is there."""
        if self._known is not None and len(evaluation.scores) == len(task.minibatch_ids):
            self._known.put(task.parent_candidate, task.minibatch_ids, evaluation.scores)

    async def _minibatch(
        self, item: Item[Any], stage: str, candidate: dict[str, str], task: Any, gate: Gate | None = None
    ) -> tuple[Batch, int]:
        account = self._on.accounts[item.ticket.number]
        account.started = True
        account.cover(len(task.minibatch_ids))
        return await self._on.evaluations.minibatch(
            self._claim(item, stage), account.reservation, candidate, task.minibatch_ids, task.minibatch, gate
        )

    def _claim(self, item: Item[Any], stage: str) -> Claim:
        return Claim(item.ticket.number, stage, DEPTHS[stage], item.value, item.version)

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
