"""Validating heads: a prefix that decides, the rest where slots or calls allow, and the commit.

A later head, once it is confirmed, makes the validations under it needless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import anyio
from gepa.core.state import ValsetEvaluation

from dspy_flashevolve.engine.budget import Reservation
from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.errors import RolloutUnresolvedError
from dspy_flashevolve.engine.events import HeadEnded
from dspy_flashevolve.engine.gathering import NoLongerWantedError, gather
from dspy_flashevolve.engine.item import End, EndKind, Item, Ticket
from dspy_flashevolve.engine.speculation import SAVING_PREFIX, released_at
from dspy_flashevolve.engine.stages import Finish, Forward, Outcome
from dspy_flashevolve.engine.staleness import Reflective
from dspy_flashevolve.gepa import reports, train_reports
from dspy_flashevolve.gepa.gates import Gate
from dspy_flashevolve.gepa.heads import Heads, PrefixVerdict
from dspy_flashevolve.gepa.payloads import Candidate, Commit, Head, Validated
from dspy_flashevolve.gepa.races import Race, best_scores
from dspy_flashevolve.gepa.services import DEPTHS, Services

GONE = "it was superseded, or went with the one under it"


class OutOfBudgetError(NoLongerWantedError):
    """What is set aside for the last head does not pay this one's validation."""


class HeadStages:
    """The handlers of heads: validation and commit.

    Args:
        services: shared with the other stages.
        policy: how long the prefix is.
        heads: the line of heads.
        purse: pays for the rest of a head's validation where the budget has no room left.
    """

    def __init__(self, services: Services, policy: Reflective, heads: Heads, purse: Reservation) -> None:
        self._on = services
        self._pool = services.pool
        self._policy = policy
        self._heads = heads
        self._purse = purse
        self._resting: dict[int, anyio.Event] = {}

    async def validate(self, item: Item[Head]) -> Outcome:
        """Validate a head: a prefix that it has to pass, and the rest, unless a later head is confirmed first.

        The rest takes the slots that nobody else wants, beside the prefix; where metric calls are scarcer than slots
        it waits until the prefix is passed and nothing else is left to do.
        """
        key, proposal = item.payload.key, item.payload.proposal
        plan = await self._pool.write(reports.cached_validation, self._pool, proposal.candidate)
        account = self._on.accounts[item.ticket.number]

        def unpaid(ids: list[Any]) -> int:
            return self._on.unpaid(item.ticket.number, proposal.candidate, "val", ids)

        saves = self._on.saves_calls() or not account.cover(unpaid(plan.missing))
        parts = self._split(plan.missing, saves)
        short = saves and not account.cover(unpaid(parts[0]))
        done: list[tuple[ValsetEvaluation[Any, Any], int] | None] = [None, None]
        ended: list[Outcome] = []
        borrowed = 0
        race = Race(self._pool, self._on.speculation.racing, len(parts[0]))

        def pay(calls: int) -> None:
            nonlocal borrowed
            if key not in self._pool.speculative:
                raise NoLongerWantedError(GONE)
            if not account.cover(calls):
                missing = calls - account.reservation.open
                if not self._purse.lend(account.reservation, missing):
                    raise OutOfBudgetError("no budget is left for its validation")
                borrowed += missing

        async def prefix() -> None:
            if short:
                await self._rest_allowed(item, key)
                pay(unpaid(parts[0]))
            gate = self._gate(plan, parts[0])
            try:
                done[0] = await self._run(item, key, plan.candidate, parts[0], "prefix", race, gate)
            except NoLongerWantedError:
                if gate is None or not gate.closed or key not in self._pool.speculative:
                    raise
                removed = await self._pool.write(self._heads.drop, key)
                if not removed:
                    raise NoLongerWantedError(GONE) from None
                ended.append(self._rolled_back(item, PrefixVerdict(None, self._prefix_best(parts[0]), removed)))
                return
            known = await self._pool.write(
                reports.complete_validation, self._pool, replace(plan, missing=parts[0]), done[0][0]
            )
            if key not in self._pool.speculative:
                raise NoLongerWantedError(GONE)
            verdict = await self._pool.write(self._heads.judge_prefix, key, known.scores_by_val_id)
            if verdict.removed:
                ended.append(self._rolled_back(item, verdict))
            elif saves and not short and parts[1]:
                await self._rest_allowed(item, key)

        async def rest() -> None:
            pay(unpaid(parts[1]))
            done[1] = await self._run(item, key, plan.candidate, parts[1], "validate", race)

        try:
            if saves:
                await prefix()
                await gather([] if ended else [rest])
            else:
                await gather([prefix, rest])
        except RolloutUnresolvedError:
            await self.drop(item.ticket.number, key)
            raise
        except OutOfBudgetError as error:
            await self.drop(item.ticket.number, key)
            ended.append(Finish(End(EndKind.DISCARDED, str(error))))
        except NoLongerWantedError:
            if key in self._pool.speculative:  # it gave up itself
                await self.drop(item.ticket.number, key)
                ended.append(Finish(End(EndKind.REJECTED, f"head {key} fell behind the pool's best")))
            else:
                ended.append(Finish(End(EndKind.INTEGRATED, f"head {key} is validated no further: {GONE}")))
        finally:
            self._resting.pop(key, None)
            account.reservation.lend(self._purse, min(borrowed, account.reservation.open))
        first, last = done
        if ended or first is None or last is None:
            await self._on.count(item.ticket.number)
            return ended[0]
        fresh = train_reports.in_order(train_reports.joined(first[0], last[0]), plan.missing)
        known = await self._pool.write(reports.complete_validation, self._pool, plan, fresh)
        self._on.order.record(known.scores_by_val_id)
        payload = Validated((proposal,), (known,), (first[1] + last[1],), (None,), (None,), head=key)
        return Forward("commit", payload, value=item.value)

    async def commit(self, item: Item[Validated]) -> list[Commit]:
        """Put a validated head into gepa's pool; the heads under it need no validation of their own."""
        key = item.payload.head
        assert key is not None
        commits, others, best = await self._pool.write(self._confirm, item.ticket, item.payload, key)
        score, index = commits[0].score, commits[0].candidate
        kept = best is None or score >= best - self._policy.rollback_margin
        end = "confirmed" if kept else "rolled back"
        self._on.bus.emit(HeadEnded(self._on.clock(), item.ticket.number, key, end, score, best, index))
        self.settle(item.ticket.number, others, "superseded" if kept else "rolled back")
        return commits

    def _confirm(self, ticket: Ticket, work: Validated, key: int) -> tuple[list[Commit], tuple[int, ...], float | None]:
        """Commit; where the full validation lies under the pool's best, the head is an ordinary candidate from now on.

        Returns:
            The commit, the heads that it supersedes or takes along, and the pool's best before it.
        """
        best = self._pool.best_score()
        proposal = replace(work.proposals[0], parent_program_ids=self._heads.parents_of(key))
        commits = reports.commit(self._pool, ticket, replace(work, proposals=(proposal,)))
        if best is not None and commits[0].score < best - self._policy.rollback_margin:
            return commits, tuple(one for one in self._heads.drop(key) if one != key), best
        return commits, self._heads.confirmed(key, commits[0].candidate), best

    @property
    def resting(self) -> int:
        """Heads whose validation waits to be made needless."""
        return sum(not event.is_set() for event in self._resting.values())

    def lend(self, reservation: Reservation, calls: int) -> bool:
        """Let an ordinary candidate have what is set aside for the last head; False while there may be a head."""
        alone = len(self._on.accounts) <= 1 and not len(self._pool.speculative)
        return alone and self._purse.lend(reservation, calls)

    async def drop(self, ticket: int, key: int, *, landed: bool = True) -> None:
        """Take a head back, with those that stand on it and have no evidence of their own.

        Args:
            landed: False for one that never was a head, which has been said already.
        """
        removed = await self._pool.write(self._heads.drop, key)
        self.settle(ticket, [one for one in removed if landed or one != key], "rolled back")

    def settle(self, ticket: int, keys: Sequence[int], end: str) -> None:
        """Heads that need no more validation: say so, and let those that rest go."""
        for key in keys:
            self._on.bus.emit(HeadEnded(self._on.clock(), ticket, key, end))
            if key in self._resting:
                self._resting[key].set()

    def finish_resting(self) -> None:
        """Nothing else is under way and nothing more can start: the newest head that rests is validated to its end."""
        if self.resting and self.resting >= len(self._on.accounts):
            self._resting[max(key for key, event in self._resting.items() if not event.is_set())].set()

    def _split(self, ids: list[Any], saves: bool) -> tuple[list[Any], list[Any]]:
        """The prefix, and the rest."""
        share = self._on.speculation.validate
        size = released_at(min(share, SAVING_PREFIX) if saves else share, len(ids)) if ids else 0
        order = self._on.order.sort(ids)
        return order[:size], order[size:]

    async def _run(
        self,
        item: Item[Head],
        key: int,
        candidate: Candidate,
        ids: list[Any],
        stage: str,
        race: Race,
        gate: Gate | None = None,
    ) -> tuple[Any, int]:
        account = self._on.accounts[item.ticket.number]
        newest_first = float(key)
        claim = Claim(item.ticket.number, stage, DEPTHS[stage], item.value, item.version, newest_first)
        runs = race.watch(ids)

        def watch(index: int, score: float) -> bool:
            return (gate is None or gate(index, score)) and (runs is None or runs(index, score))

        return await self._on.evaluations.validation(
            claim, account.reservation, candidate, ids, wanted=lambda: key in self._pool.speculative, watch=watch
        )

    def _gate(self, plan: reports.ValidationPlan, prefix: list[Any]) -> Gate | None:
        """Closes when the prefix can no longer reach what it has to; None where its sum alone does not decide."""
        if plan.cached or not prefix:
            return None

        def passes(total: float) -> bool:
            best = self._prefix_best(prefix)
            return best is None or total / len(prefix) >= best - self._policy.rollback_margin

        return Gate(len(prefix), passes, lambda: self._on.evaluations.highest)

    def _prefix_best(self, prefix: list[Any]) -> float | None:
        """The mean of the pool's best on the prefix; None where it was not run on all of it."""
        theirs = best_scores(self._pool)
        return sum(theirs[i] for i in prefix) / len(prefix) if all(i in theirs for i in prefix) else None

    async def _rest_allowed(self, item: Item[Head], key: int) -> None:
        """The rest of a validation waits until nothing else is left to do, or a later head makes it needless."""
        resting = [other for other, event in self._resting.items() if not event.is_set()]
        event = self._resting[key] = anyio.Event()  # whoever settles it from here on finds it
        self.settle(item.ticket.number, await self._pool.write(self._supersede, key, resting), "superseded")
        if key not in self._pool.speculative:
            raise NoLongerWantedError(GONE)
        self._on.wake()
        await event.wait()

    def _supersede(self, key: int, resting: list[int]) -> list[int]:
        """Of the heads that rest, those under ``key`` go; ``key`` itself where it stands under one of them."""
        waiting = self._pool.speculative
        if key not in waiting:
            return []
        if any(other in waiting and key in waiting.ancestors(other) for other in resting):
            under = [key]
        else:
            ancestors = waiting.ancestors(key)
            under = [other for other in resting if other in ancestors]
        for one in under:
            waiting.supersede(one)
        return under

    def _rolled_back(self, item: Item[Head], verdict: PrefixVerdict) -> Outcome:
        key, *others = verdict.removed
        score, best = verdict.score, verdict.best
        self._on.bus.emit(HeadEnded(self._on.clock(), item.ticket.number, key, "rolled back", score, best))
        self.settle(item.ticket.number, others, "rolled back")
        mine, theirs = ("-" if one is None else f"{one:.3f}" for one in (score, best))
        return Finish(End(EndKind.REJECTED, f"head {key} rolled back: {mine} on its prefix, under {theirs}"))
