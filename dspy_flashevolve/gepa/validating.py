"""Validating ordinary children: a prefix that lets selection pick them early, the rest, and the commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gepa.core.state import ValsetEvaluation
from gepa.proposer.base import CandidateProposal

from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.errors import RolloutUnresolvedError
from dspy_flashevolve.engine.events import Speculated, SpeculationEnded
from dspy_flashevolve.engine.gathering import NoLongerWantedError, gather
from dspy_flashevolve.engine.item import End, EndKind, Item
from dspy_flashevolve.engine.speculation import released_at
from dspy_flashevolve.engine.stages import Finish, Forward, Outcome
from dspy_flashevolve.gepa import reports, train_reports
from dspy_flashevolve.gepa.accounts import Account
from dspy_flashevolve.gepa.head_stages import HeadStages
from dspy_flashevolve.gepa.payloads import Commit, Screened, Validated
from dspy_flashevolve.gepa.races import Race, against_best
from dspy_flashevolve.gepa.services import DEPTHS, Services

Evaluation = ValsetEvaluation[Any, Any]


@dataclass(frozen=True, slots=True)
class Finished:
    """One validation.

    Args:
        evaluation: whole; None where it was given up.
        paid: metric calls.
        key: handle under which the candidate can be selected; None where it cannot.
    """

    proposal: CandidateProposal[Any]
    base: int | None
    evaluation: Evaluation | None
    paid: int
    key: int | None


class Validating:
    """The handlers of ordinary children: validation and commit.

    Args:
        services: shared with the other stages.
        heads: may lend what is set aside for the last head; None where there are no heads.
    """

    def __init__(self, services: Services, heads: HeadStages | None) -> None:
        self._on = services
        self._pool = services.pool
        self._heads = heads

    async def validate(self, item: Item[Screened]) -> Outcome:
        """Run each child on the validation examples that gepa's evaluation policy names."""
        proposals, bases = list(item.payload.proposals), list(item.payload.bases)
        account = self._on.accounts[item.ticket.number]
        plans = await self._pool.write(
            lambda: [reports.cached_validation(self._pool, proposal.candidate) for proposal in proposals]
        )

        def unpaid() -> int:
            number = item.ticket.number
            return sum(self._on.unpaid(number, plan.candidate, "val", plan.missing) for plan in plans)

        while not self._affords(account, missing := unpaid()):
            await self._pool.write(self._pool.reject, item.ticket, proposals.pop(), reason="no budget is left for it")
            plans.pop()
            bases.pop()
            if not plans:
                return Finish(End(EndKind.DISCARDED, f"no budget is left for {missing} validation examples"))
        keys: list[int] = []
        try:
            finished = await gather([
                lambda one=one: self._one(item, *one, keys) for one in zip(proposals, bases, plans, strict=True)
            ])  # fmt: skip
        except RolloutUnresolvedError as error:
            await self.withdraw(item.ticket.number, keys, str(error))
            raise
        whole = [one for one in finished if one.evaluation is not None]
        await self._on.count_all_but(item.ticket.number, sum(one.paid for one in whole))
        if not whole:
            return Finish(End(EndKind.REJECTED, "it fell behind the pool's best on its validation"))
        payload = Validated(
            tuple(one.proposal for one in whole),
            tuple(one.evaluation for one in whole if one.evaluation is not None),
            tuple(one.paid for one in whole),
            tuple(one.base for one in whole),
            tuple(one.key for one in whole),
            item.payload.merge,
        )
        return Forward("commit", payload, value=item.value)

    async def commit(self, item: Item[Validated]) -> list[Commit]:
        """Put the children into gepa's pool; one that fell behind its prefix leaves what was made from it stale."""
        commits, ends = await self._pool.write(self._confirm, item)
        for key, end, commit in ends:
            now = self._on.clock()
            self._on.bus.emit(SpeculationEnded(now, item.ticket.number, key, end, commit.score, commit.candidate))
        return commits

    async def withdraw(self, ticket: int, keys: Sequence[int | None], reason: str) -> None:
        """Take speculative candidates back, as if they had never been there; what was made from them is stale."""
        for key in [one for one in keys if one is not None]:
            await self._pool.write(self._take_back, key)
            self._on.bus.emit(SpeculationEnded(self._on.clock(), ticket, key, f"removed: {reason}", None, None))

    def _take_back(self, key: int) -> None:
        if key in self._pool.speculative:  # else it went with one under it
            self._pool.speculative.remove(key)

    async def _one(
        self,
        item: Item[Screened],
        proposal: CandidateProposal[Any],
        base: int | None,
        plan: reports.ValidationPlan,
        keys: list[int],
    ) -> Finished:
        order, share = self._on.order, self._on.speculation.validate
        ids = order.sort(plan.missing) if not self._on.lockstep else plan.missing
        size = released_at(share, len(ids)) if ids else 0
        alone = self._on.lockstep or size == len(ids) or not self._pool.seed_confirmed
        race = Race(self._pool, self._on.speculation.racing, size)
        found: list[int] = []

        async def run(part: list[Any], stage: str) -> tuple[Evaluation, int]:
            claim = Claim(item.ticket.number, stage, DEPTHS[stage], item.value, item.version)
            reservation = self._on.accounts[item.ticket.number].reservation
            return await self._on.evaluations.validation(
                claim, reservation, plan.candidate, part, watch=None if self._on.lockstep else race.watch(part)
            )

        async def prefix() -> tuple[Evaluation, int]:
            fresh, paid = await run(ids[:size], "prefix")
            key = await self._pool.write(self._release, proposal, base, replace(plan, missing=ids[:size]), fresh)
            if key is not None:
                found.append(key)
                keys.append(key)
                self._on.bus.emit(
                    Speculated(
                        self._on.clock(), item.ticket.number, key, *against_best(self._pool, fresh.scores_by_val_id)
                    )
                )
            return fresh, paid

        try:
            if alone:
                fresh, paid = await run(ids, "validate")
            else:
                parts = await gather([prefix, lambda: run(ids[size:], "validate")])
                fresh, paid = train_reports.joined(parts[0][0], parts[1][0]), parts[0][1] + parts[1][1]
            fresh = train_reports.in_order(fresh, plan.missing)
        except NoLongerWantedError:
            await self.withdraw(item.ticket.number, found, "it fell behind the pool's best")
            keys[:] = [key for key in keys if key not in found]
            await self._pool.write(self._pool.reject, item.ticket, proposal, reason="it fell behind the pool's best")
            return Finished(proposal, base, None, 0, None)
        evaluation = await self._pool.write(reports.complete_validation, self._pool, plan, fresh)
        order.record(fresh.scores_by_val_id)
        return Finished(proposal, base, evaluation, paid, found[0] if found else None)

    def _release(
        self, proposal: CandidateProposal[Any], base: int | None, plan: reports.ValidationPlan, fresh: Evaluation
    ) -> int | None:
        """Let selection pick a child whose prefix is above the pool's best; its handle, or None where it is not."""
        known = reports.complete_validation(self._pool, plan, fresh)
        mean, best = against_best(self._pool, known.scores_by_val_id)
        if best is None or mean <= best:
            return None
        if self._pool.state.frontier_type != "instance" and not known.objective_scores_by_val_id:
            return None  # gepa could not place it in the frontier yet
        waiting = self._pool.speculative
        parents = () if base is None or base not in waiting else (base,)
        indices = tuple(proposal.parent_program_ids)
        firm = [self._pool.generations[one] for one in indices]
        generation = 1 + max([*firm, *(waiting[one].generation for one in parents)])
        return waiting.add(proposal.candidate, parents, indices, generation, evaluation=known).key

    def _confirm(self, item: Item[Validated]) -> tuple[list[Commit], list[tuple[int, str, Commit]]]:
        work, waiting = item.payload, self._pool.speculative
        best = self._pool.best_score()
        proposals = [
            proposal if base is None else replace(proposal, parent_program_ids=self._parents(proposal, base))
            for proposal, base in zip(work.proposals, work.bases, strict=True)
        ]
        commits = reports.commit(self._pool, item.ticket, replace(work, proposals=tuple(proposals)))
        ends: list[tuple[int, str, Commit]] = []
        for key, done in zip(work.keys, commits, strict=True):
            if key is None:
                continue
            kept = best is None or done.score >= best
            waiting.confirm_late(key, done.candidate)
            if not kept:
                waiting.fallen.add(key)
            ends.append((key, "confirmed" if kept else "fell behind", done))
        return commits, ends

    def _parents(self, proposal: CandidateProposal[Any], base: int) -> list[int]:
        """Where the parent was speculative: itself if it was confirmed, else what stands for it."""
        return list(self._pool.speculative.resolve((base,))) or list(proposal.parent_program_ids)

    def _affords(self, account: Account, calls: int) -> bool:
        """Whether the validations can be paid: by the budget, or by what is set aside for a head when there is none."""
        if account.cover(calls):
            return True
        return self._heads is not None and self._heads.lend(account.reservation, calls - account.reservation.open)
