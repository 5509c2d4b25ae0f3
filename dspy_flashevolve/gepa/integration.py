"""The train: stale children are integrated onto the head, screened together, and validated as heads.

    proposals or screened children -> [q] -> integrate -> screen (union of minibatches, against the base)
        -> head, visible to selection -> validation prefix -> the rest -> commit

A patch is a train of one child that becomes no head: it is screened on its child's minibatch and validated like any
other candidate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio
from gepa.proposer.base import CandidateProposal

from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.errors import RolloutUnresolvedError
from dspy_flashevolve.engine.events import HeadLanded, Integrated
from dspy_flashevolve.engine.flights import Spent
from dspy_flashevolve.engine.gathering import gather
from dspy_flashevolve.engine.integration import Integration, IntegrationRequest, Integrator, Texts
from dspy_flashevolve.engine.item import End, EndKind, Item
from dspy_flashevolve.engine.stages import Carried, Finish, Forward, Outcome
from dspy_flashevolve.engine.staleness import Reflective, Untaken
from dspy_flashevolve.gepa import reports, train_reports
from dspy_flashevolve.gepa.head_stages import HeadStages
from dspy_flashevolve.gepa.heads import Heads
from dspy_flashevolve.gepa.known_scores import KnownScores
from dspy_flashevolve.gepa.payloads import (
    Base,
    Child,
    Children,
    Head,
    Screened,
    Train,
    Waiting,
)
from dspy_flashevolve.gepa.riding import all_of, bases_of, changed_components, parent_of, stale_child, sums
from dspy_flashevolve.gepa.services import DEPTHS, Services
from dspy_flashevolve.gepa.train_screen import TrainScreen

Pairs = list[tuple[Item[Any], Outcome | Carried]]


class TrainStages:
    """The handlers of integration, and of the screen of what was integrated.

    Args:
        services: shared with the other stages.
        policy: how trains are made.
        integrator: reads the children.
        heads: the line of heads.
        known: scores of rollouts made by the other stages.
        validating: hears of heads that are taken back.
    """

    def __init__(
        self,
        services: Services,
        policy: Reflective,
        integrator: Integrator,
        heads: Heads,
        known: KnownScores,
        validating: HeadStages,
    ) -> None:
        self._on = services
        self._pool = services.pool
        self._policy = policy
        self._integrator = integrator
        self._heads = heads
        self._screen = TrainScreen(services, heads, known)
        self._validating = validating
        self._lines = {name: anyio.Lock() for name in services.pool.seed_candidate}

    async def integrate(self, items: list[Item[Waiting]]) -> Pairs:
        """Integrate what waits: one train for each set of components that its children changed."""
        groups: dict[tuple[str, ...], list[Item[Waiting]]] = {}
        for item in items:
            groups.setdefault(changed_components(item.payload.children), []).append(item)
        outcomes = await gather(
            [lambda names=names, group=group: self._guarded(names, group) for names, group in groups.items()]
        )
        return [pair for pairs in outcomes for pair in pairs]

    async def screen(self, item: Item[Train]) -> Pairs:
        """Run the integrated candidate on the union of its children's minibatches, beside its base."""
        train = item.payload
        try:
            proposal = await self._screen.run(item)
        except RolloutUnresolvedError:
            if train.key is not None:
                await self._validating.drop(item.ticket.number, train.key)
            raise
        passed = proposal is not None and await self._pool.write(
            train_reports.passes, self._pool, item.ticket, proposal
        )
        if proposal is not None and not passed:
            await self._pool.write(self._pool.reject, item.ticket, proposal)
        if train.key is None:
            return await self._patch_screened(item, train, proposal, passed)
        landed = passed and await self._pool.write(self._heads.land, train.key)
        if landed and proposal is not None and self._on.journal is not None:
            self._on.journal.landed(item.ticket.number, train, proposal)
        self._on.bus.emit(
            HeadLanded(
                self._on.clock(),
                item.ticket.number,
                train.key,
                train.base.key,
                train.base.index,
                tuple(one.ticket.number for one in train.members),
                landed,
                *((0.0, 0.0) if proposal is None else sums(proposal)),
            )
        )
        if proposal is None or not landed:
            reason = "its screen" if not passed else "the head under it"
            await self._validating.drop(item.ticket.number, train.key, landed=False)
            return [(one, self._untaken(one, f"the train failed with {reason}")) for one in train.members]
        ridden = Finish(End(EndKind.INTEGRATED, f"in head {train.key}, carried by ticket {item.ticket.number}"))
        value = await self._pool.write(reports.expected_score, self._pool, [proposal])
        forward = Forward("validate", Head(train.key, proposal), value=value)
        self._on.wake()
        return [(item, forward), *((one, ridden) for one in train.members[1:])]

    async def _guarded(self, components: tuple[str, ...], group: list[Item[Waiting]]) -> Pairs:
        """One train; a call that got no answer fails its tickets."""
        try:
            if not self._policy.train:  # a patch makes no head: there is no line to keep in order
                return await self._train(group)
            async with all_of([self._lines[name] for name in components]):
                return await self._train(group)
        except RolloutUnresolvedError as error:
            return [(item, Finish(End(EndKind.FAILED, f"integration: {error}"))) for item in group]

    async def _train(self, group: list[Item[Waiting]]) -> Pairs:
        base, version = await self._pool.write(self._base)
        numbered = [(item, child) for item in group for child in item.payload.children]
        request = IntegrationRequest(
            head=base.candidate,
            children=[stale_child(number, *pair, version) for number, pair in enumerate(numbered, start=1)],
            commits=await self._pool.write(self._pool.commits_since, min(item.version for item in group)),
        )
        lead = group[0]
        claim = Claim(lead.ticket.number, "integrate", DEPTHS["integrate"], lead.value, lead.version)
        integration = await self._on.rollouts.request(
            claim,
            lambda: self._integrator.integrate(request),
            lambda made: Spent(made.tokens, made.cost_dollars or 0.0, made.failed),
        )
        self._on.counts.reflection_calls += integration.calls
        self._on.counts.integration_calls += integration.calls
        self._on.counts.reflection_tokens += integration.tokens
        self._on.counts.cost_dollars += integration.cost_dollars or 0.0
        tickets = {number: item.ticket.number for number, (item, _) in enumerate(numbered, start=1)}
        self._on.bus.emit(
            Integrated(
                self._on.clock(),
                lead.ticket.number,
                base.key,
                base.index,
                tuple(item.ticket.number for item in group),
                tuple((tickets[one.child], one.verdict, one.reason) for one in integration.judgements),
                integration.failed,
            )
        )
        if integration.failed:
            reason = f"the integration could not be read: {integration.failed}"
            return [(item, self._left(item, self._policy.unreadable, reason)) for item in group]
        return await self._composed(group, numbered, base, version, integration)

    async def _composed(
        self,
        group: list[Item[Waiting]],
        numbered: list[tuple[Item[Waiting], Child]],
        base: Base,
        version: int,
        integration: Integration,
    ) -> Pairs:
        """Sort the children by verdict, and put the train of those that were taken on its way."""
        left: Pairs = []
        members: list[Item[Waiting]] = []
        taken = integration.of("orthogonal")
        for item in group:
            mine = {number for number, (owner, _) in enumerate(numbered, start=1) if owner is item}
            reason = {one.verdict: one.reason for one in integration.judgements if one.child in mine}
            if mine & taken:
                members.append(item)
            elif "conflicting" in reason:
                left.append((item, self._untaken(item, f"conflicting: {reason['conflicting']}")))
            elif "subsumed" in reason:
                left.append((item, Finish(End(EndKind.DISCARDED, f"subsumed: {reason['subsumed']}"))))
            else:
                left.append((item, self._untaken(item, "the integration did not judge it")))
        if not members:
            return left
        texts = {name: text for name, text in integration.texts.items() if text != base.candidate[name]}
        if await self._pool.write(self._heads.is_known, {**base.candidate, **texts}):
            same = Finish(End(EndKind.DISCARDED, "the integrated text is a candidate already"))
            return [*left, *((item, same) for item in members)]
        return [*left, *await self._departed(members, texts, base, version)]

    async def _departed(self, members: list[Item[Waiting]], texts: Texts, base: Base, version: int) -> Pairs:
        lead, key = members[0], None
        candidate = {**base.candidate, **texts}
        if self._policy.train:
            children = [child for item in members for child in item.payload.children]
            others = tuple(dict.fromkeys(parent_of(child, self._pool.speculative) for child in children))
            begun = await self._pool.write(self._heads.begin, texts, base, others)
            if begun is None:  # another train left from the same head: its change must not be lost
                return [(item, self._left(item, "retry", "the line has moved on twice")) for item in members]
            key, candidate, base = begun
        for item in members[1:]:
            self._on.accounts[item.ticket.number].reservation.refund()
        train = Train(candidate, base, key, tuple(members))
        stamp = version if key is None else None  # a patch has read what was committed until then
        carried: Pairs = [(item, Carried(lead.ticket.number)) for item in members[1:]]
        return [(lead, Forward("screen", train, stamp, lead.value)), *carried]

    def _base(self) -> tuple[Base, int]:
        """What the integration stands on, and the pool's version that it reads."""
        base = self._heads.newest(visible=False) if self._policy.train else self._heads.confirmed_base()
        return base, self._pool.version

    async def _patch_screened(
        self, item: Item[Train], train: Train, proposal: CandidateProposal[Any] | None, passed: bool
    ) -> Pairs:
        if proposal is None or not passed:
            return [(one, self._untaken(one, "the patch failed its screen")) for one in train.members]
        value = await self._pool.write(reports.expected_score, self._pool, [proposal])
        ridden = Finish(End(EndKind.INTEGRATED, f"in the candidate of ticket {item.ticket.number}"))
        rest = [(one, ridden) for one in train.members[1:]]
        return [(item, Forward("validate", Screened((proposal,), (None,)), value=value)), *rest]

    def _untaken(self, item: Item[Waiting], reason: str) -> Outcome:
        """What the policy says of a child that no head took in."""
        assert self._policy.untaken is not None
        return self._left(item, self._policy.untaken, reason)

    def _left(self, item: Item[Waiting], fate: Untaken, reason: str) -> Outcome:
        waiting = item.payload
        if fate == "retry" and waiting.attempts == 0:
            return Forward("integrate", replace(waiting, attempts=1), item.version, item.value)
        return self._alone(item) if fate == "alone" else Finish(End(EndKind.REJECTED, reason))

    def _alone(self, item: Item[Waiting]) -> Outcome:
        """The children go on as if there were no train."""
        waiting = item.payload
        if waiting.proposals:
            return Forward("validate", Screened(waiting.proposals, bases_of(waiting.children)), value=item.value)
        return Forward("screen", Children(waiting.children), value=item.value)
