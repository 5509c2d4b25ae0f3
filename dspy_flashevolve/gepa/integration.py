"""Integration: one LM call joins the changes of several children on the head, the newest integrated candidate.

    children of many steps -> batch -> integrate -> screen (union of minibatches, beside the base) -> head
        -> visible to selection -> validation prefix -> the rest -> commit

A patch is an integration of one child that makes no head: it is screened on its child's minibatch and validated like
any other candidate. What an integration does not take in goes on by itself, waits for the next one, or ends, as the
policy says; a reply that cannot be read, and a call that gets no answer, cost the children nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import anyio
from dspy.primitives import Module
from gepa.proposer.base import CandidateProposal

from dspy_flashevolve.engine.batcher import Batcher
from dspy_flashevolve.engine.errors import RolloutUnresolvedError
from dspy_flashevolve.engine.events import HeadLanded, Integrated
from dspy_flashevolve.engine.rollouts import NoLongerWantedError, gather
from dspy_flashevolve.engine.staleness import (
    VERDICTS,
    Fate,
    Integration,
    IntegrationRequest,
    Judgement,
    Reflective,
    StaleChild,
    Texts,
    gap,
)
from dspy_flashevolve.engine.steps import End, EndKind, Step, StepEnded
from dspy_flashevolve.gepa import callbacks, resume
from dspy_flashevolve.gepa.evaluate import Evaluations, Gate, passes_screen, rejects_by_sum
from dspy_flashevolve.gepa.heads import Heads
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.records import Base, Candidate, Child, Screened
from dspy_flashevolve.gepa.validate import Validation
from dspy_flashevolve.programs.program import checked_texts
from dspy_flashevolve.programs.records import Asked
from dspy_flashevolve.programs.run import DspyRun


@dataclass(frozen=True, slots=True)
class Waiting:
    """Children of one step that wait to be integrated.

    Args:
        children: as proposed.
        proposals: those of them that passed their screen; empty where they were not screened.
    """

    children: tuple[Child, ...]
    proposals: tuple[CandidateProposal[Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Head:
    """An integrated candidate that passed its screen: it is to be validated."""

    key: int
    proposal: CandidateProposal[Any]


@dataclass(frozen=True, slots=True)
class _Left:
    """No integration took the children in."""

    fate: Fate
    reason: str


@dataclass(eq=False)
class _Landing:
    """An integrated candidate on its way through its screen; its first member brings it there, the others wait.

    Args:
        key: its handle as a head; None for a patch.
        version: the pool's, that the integration read.
        left: what becomes of the others once it is done; None where they are in it.
    """

    candidate: Candidate
    base: Base
    key: int | None
    version: int
    members: list[tuple[Step, Waiting]]
    done: anyio.Event = field(default_factory=anyio.Event)
    left: _Left | None = None


_Outcome = _Left | End | _Landing


class Integrations:
    """Integrates what steps hand in.

    Args:
        run: slots, budget, events.
        pool: gepa's state.
        evaluations: runs candidates.
        heads: the line of heads.
        policy: how many at once, and what becomes of what was not taken in.
        validation: hears of heads that are taken back.
        module: a dspy module with the signature of ``StaleCandidateReflection``.
        lm: what it asks, unless its predictors have LMs of their own.
        code_components: components that hold Python source.
    """

    def __init__(
        self,
        run: DspyRun,
        pool: Pool,
        evaluations: Evaluations,
        heads: Heads,
        policy: Reflective,
        validation: Validation,
        module: Module,
        lm: Any,
        code_components: Sequence[str],
    ) -> None:
        self._run, self._pool, self._evaluations, self._heads = run, pool, evaluations, heads
        self._policy, self._validation = policy, validation
        self._module, self._lm, self._code = module, lm, list(code_components)
        self._batcher = Batcher[Waiting, _Outcome](run, policy.batch, policy.integrators, self._integrate)
        self._lines = {name: anyio.Lock() for name in pool.seed_candidate}
        self.calls = 0
        """LM calls of integrations."""

    async def watch(self) -> None:
        """Begin integrations as they become due; runs beside the steps."""
        await self._batcher.watch()

    async def take_in(self, step: Step, waiting: Waiting) -> Head | Screened | None:
        """Have a step's children integrated.

        Returns:
            A head, or a screened patch, that the step is to bring to its end; None where the children go on by
            themselves.

        Raises:
            StepEnded: the children are in a candidate that another step brings to its end, or go no further.
        """
        retried = False
        while True:
            outcome = await self._batcher.hand_in(step, waiting)
            if isinstance(outcome, End):
                raise StepEnded(outcome.kind, outcome.reason)
            if isinstance(outcome, _Landing):
                if outcome.members[0][0] is step:
                    screened = await self._screen(step, outcome)
                    if screened is not None:
                        return screened
                await outcome.done.wait()
                if outcome.left is None:
                    raise StepEnded(EndKind.INTEGRATED, self._where(outcome))
                outcome = outcome.left
            if outcome.fate == "alone":
                return None
            if outcome.fate == "drop" or retried:
                raise StepEnded(EndKind.REJECTED, outcome.reason)
            retried = True

    def _where(self, landing: _Landing) -> str:
        number = landing.members[0][0].number
        if landing.key is None:
            return f"in the candidate of step {number}"
        return f"in head {landing.key}, of step {number}"

    # Integrating.

    async def _integrate(self, batch: Sequence[tuple[Step, Waiting]]) -> list[_Outcome]:
        """Integrate a batch: one call for each set of components that its children changed."""
        groups: dict[tuple[str, ...], list[tuple[Step, Waiting]]] = {}
        for step, waiting in batch:
            groups.setdefault(changed_components(waiting.children), []).append((step, waiting))
        outcomes = await gather(
            [lambda names=names, group=group: self._guarded(names, group) for names, group in groups.items()]
        )
        found = {step.number: outcome for group in outcomes for step, outcome in group}
        return [found[step.number] for step, _ in batch]

    async def _guarded(
        self, components: tuple[str, ...], group: list[tuple[Step, Waiting]]
    ) -> list[tuple[Step, _Outcome]]:
        """One integration after the other for a component; a patch makes no head, and has no order to keep."""
        async with AsyncExitStack() as locks:
            for name in components if self._policy.heads else ():
                await locks.enter_async_context(self._lines[name])
            try:
                return await self._group(group)
            except RolloutUnresolvedError as error:
                return [(step, _Left("alone", f"integration: {error}")) for step, _ in group]

    async def _group(self, group: list[tuple[Step, Waiting]]) -> list[tuple[Step, _Outcome]]:
        base, version = await self._pool.write(self._base)
        numbered = [(step, child) for step, waiting in group for child in waiting.children]
        seen = min(step.version for step, _ in group)
        waiting_of = {step.number: waiting for step, waiting in group}
        request = IntegrationRequest(
            head=base.candidate,
            children=[
                stale_child(number, child, waiting_of[step.number].proposals, gap(version, step.version))
                for number, (step, child) in enumerate(numbered, start=1)
            ],
            commits=await self._pool.write(self._pool.commits_since, seen),
        )
        lead = group[0][0]
        made = await self._asked(lead, request)
        self.calls += made.calls
        owner = {number: step.number for number, (step, _) in enumerate(numbered, start=1)}
        self._run.bus.emit(
            Integrated(
                self._run.clock(),
                lead.number,
                base.key,
                base.index,
                tuple(step.number for step, _ in group),
                tuple((owner[one.child], one.verdict, one.reason) for one in made.judgements),
                made.failed,
            )
        )
        if made.failed:
            left = _Left(self._policy.unreadable, f"the integration could not be read: {made.failed}")
            return [(step, left) for step, _ in group]
        return await self._composed(group, owner, base, version, made)

    def _base(self) -> tuple[Base, int]:
        """What the integration stands on, and the pool's version that it reads."""
        base = self._heads.newest(visible=False) if self._policy.heads else self._heads.confirmed_base()
        return base, self._pool.version

    async def _asked(self, lead: Step, request: IntegrationRequest) -> Integration:
        inputs: dict[str, Any] = {
            "head": dict(request.head),
            "children": list(request.children),
            "commits": list(request.commits),
            "code_components": self._code,
        }
        record = None if self._run.journal is None else _IntegrationRecord(request)
        asked: Asked[Integration] = await self._run.asked(
            "integrate", lead, self._module, inputs, lm=self._lm, read=lambda one: read_answer(one, request),
            record=record,
        )  # fmt: skip
        made = asked.answer or Integration({}, (), failed=asked.spent.error or "no answer")
        return Integration(made.texts, made.judgements, max(1, asked.calls), failed=made.failed)

    async def _composed(
        self,
        group: list[tuple[Step, Waiting]],
        owner: dict[int, int],
        base: Base,
        version: int,
        made: Integration,
    ) -> list[tuple[Step, _Outcome]]:
        """Sort the children by verdict, and put the candidate with those that were taken in on its way.

        The new text decides: a child that was not judged, of those that were shown, is taken for being in it; where it
        is the base's, none is. Children of which the reply says nothing that holds are left as if it were unreadable.
        """
        outcomes: list[tuple[Step, _Outcome]] = []
        members: list[tuple[Step, Waiting]] = []
        shown = len(owner) <= getattr(self._module, "max_children", len(owner))
        texts = {name: text for name, text in made.texts.items() if text != base.candidate[name]}
        for step, waiting in group:
            mine = {number for number, one in owner.items() if one == step.number}
            reason = {one.verdict: one.reason for one in made.judgements if one.child in mine}
            if texts and ("orthogonal" in reason or (not reason and shown)):
                members.append((step, waiting))
            elif "conflicting" in reason:
                outcomes.append((step, self._left_out(f"conflicting: {reason['conflicting']}")))
            elif "subsumed" in reason:
                outcomes.append((step, End(EndKind.DISCARDED, f"subsumed: {reason['subsumed']}")))
            else:
                outcomes.append((step, _Left(self._policy.unreadable, "it is not in the integrated text")))
        if not members:
            return outcomes
        if await self._pool.write(self._heads.is_known, {**base.candidate, **texts}):
            same = End(EndKind.DISCARDED, "the integrated text is a candidate already")
            return [*outcomes, *((step, same) for step, _ in members)]
        return [*outcomes, *await self._departed(members, texts, base, version)]

    async def _departed(
        self, members: list[tuple[Step, Waiting]], texts: Texts, base: Base, version: int
    ) -> list[tuple[Step, _Outcome]]:
        candidate, key = {**base.candidate, **texts}, None
        if self._policy.heads:
            children = [child for _, waiting in members for child in waiting.children]
            others = tuple(dict.fromkeys(self._parent_of(child) for child in children))
            begun = await self._pool.write(self._heads.begin, texts, base, others)
            if begun is None:  # another head was made on the same one meanwhile: the change must not be lost
                return [(step, _Left("retry", "the head has moved on twice")) for step, _ in members]
            key, candidate, base = begun
        for step, _ in members[1:]:
            step.reservation.refund()
        landing = _Landing(candidate, base, key, version, members)
        return [(step, landing) for step, _ in members]

    def _parent_of(self, child: Child) -> int:
        """A child's parent in gepa's pool; where it was speculative and did not last, what stands for it."""
        bases = () if child.parent.base is None else (child.parent.base,)
        return (*self._pool.speculative.resolve(bases), child.parent.task.parent_idx)[0]

    def _left_out(self, reason: str) -> _Left:
        assert self._policy.left_out is not None
        return _Left(self._policy.left_out, reason)

    # Screening what was integrated.

    async def _screen(self, step: Step, landing: _Landing) -> Head | Screened | None:
        """Run an integrated candidate on the union of its children's minibatches, beside its base.

        Returns:
            What passed; None where it did not, and ``landing.left`` says what becomes of its members.
        """
        if landing.key is None:
            step.saw(landing.version)  # a patch has read what was committed until then
        landing.left = _Left("alone", "the screen of the integrated candidate came to no end")
        try:
            return await self._screened(step, landing)
        except RolloutUnresolvedError:
            if landing.key is not None:
                await self._validation.drop(step.number, landing.key)
            return None
        finally:
            landing.done.set()

    async def _screened(self, step: Step, landing: _Landing) -> Head | Screened | None:
        members = [one for one, _ in landing.members]
        integrated = callbacks.Integrated(
            landing.candidate, landing.base, landing.key, tuple(one.number for one in members)
        )
        proposal = await self._compared(step, landing, integrated)
        passed = proposal is not None and await self._pool.write(
            callbacks.integrated_passes, self._pool, step, proposal
        )
        if proposal is not None and not passed:
            await self._pool.write(self._pool.reject, step, proposal)
        if landing.key is None:
            if proposal is None or not passed:
                landing.left = self._left_out("the patch failed its screen")
                return None
            landing.left = None
            step.saw(step.version, await self._pool.write(callbacks.expected_score, self._pool, [proposal]))
            return Screened((proposal,), (None,))
        landed = passed and await self._pool.write(self._heads.land, landing.key)
        if landed and proposal is not None and self._run.journal is not None:
            base = landing.base
            resume.write_head(
                self._run.journal, step.number, landing.key, base.key, base.generation + 1, proposal, integrated.members
            )
        before, after = (0.0, 0.0) if proposal is None else sums(proposal)
        self._run.bus.emit(
            HeadLanded(
                self._run.clock(), step.number, landing.key, landing.base.key, landing.base.index,
                integrated.members, landed, before, after,
            )
        )  # fmt: skip
        if proposal is None or not landed:
            await self._validation.drop(step.number, landing.key, landed=False)
            landing.left = self._left_out(
                f"the integrated candidate failed with {'the head under it' if passed else 'its screen'}"
            )
            return None
        landing.left = None
        step.saw(step.version, await self._pool.write(callbacks.expected_score, self._pool, [proposal]))
        self._run.tell()
        return Head(landing.key, proposal)

    async def _compared(
        self, step: Step, landing: _Landing, integrated: callbacks.Integrated
    ) -> CandidateProposal[Any] | None:
        """The candidate and its base on the same examples, as a proposal; None where it could not pass any more."""
        base = landing.base.candidate
        examples = {
            i: example
            for _, waiting in landing.members
            for child in waiting.children
            for i, example in zip(child.parent.task.minibatch_ids, child.parent.task.minibatch, strict=True)
        }
        before = {i: score for i, score in self._evaluations.known(base).items() if i in examples}
        missing = [i for i in examples if i not in before]
        if not step.reservation.cover(len(examples) + len(missing)):
            # What the budget cannot pay twice is compared where the base was run already.
            examples, missing = {i: examples[i] for i in before}, []
            if not step.reservation.cover(len(examples)):
                examples = {}
        ids, after = list(examples), dict[Any, float]()
        before = {i: before[i] for i in ids if i in before}
        await self._pool.write(callbacks.integrated_starts, self._pool, step, integrated, list(examples.values()))
        whole = len(ids)
        passes = passes_screen(
            self._pool.parts.acceptance,
            lambda: sum(before[i] for i in ids) if len(before) == whole else None,
        )
        gate = Gate(whole, passes, lambda: self._evaluations.highest)
        exact = rejects_by_sum(self._pool.parts)

        def base_scored(index: int, score: float) -> bool:
            before[missing[index]] = score
            return True

        def scored(index: int, score: float) -> bool:
            after[ids[index]] = score
            return not exact or gate(index, score)

        async def evaluate(candidate: Candidate, wanted: list[Any], watch: Any) -> None:
            if wanted:
                rows = [examples[i] for i in wanted]
                await self._evaluations.minibatch("screen", step, candidate, wanted, rows, watch=watch)

        with suppress(NoLongerWantedError):
            await gather([
                lambda: evaluate(base, missing, base_scored), lambda: evaluate(landing.candidate, ids, scored)
            ])  # fmt: skip
        await self._pool.write(self._pool.count_calls)
        if gate.closed:
            await self._pool.write(callbacks.integrated_given_up, self._pool, step, integrated, gate.seen)
            return None
        parents = await self._pool.write(self._parents, landing)
        return await self._pool.write(
            callbacks.integrated_ended, self._pool, step, integrated, ids, [before[i] for i in ids],
            [after[i] for i in ids], parents,
        )  # fmt: skip

    def _parents(self, landing: _Landing) -> list[int]:
        """The base first, then the children's parents, as far as they are in gepa's pool."""
        if landing.key is not None and landing.key in self._pool.speculative:
            return self._heads.parents_of(landing.key)
        theirs = [self._parent_of(child) for _, waiting in landing.members for child in waiting.children]
        return list(dict.fromkeys([landing.base.index, *theirs]))


class _IntegrationRecord:
    """How an integration is written down and read again; equal questions have one position."""

    def __init__(self, request: IntegrationRequest) -> None:
        asked = json.dumps([dict(request.head), [one.texts for one in request.children]], sort_keys=True)
        self.position = hashlib.sha256(asked.encode()).hexdigest()[:16]

    def write(self, answer: Asked[Integration]) -> str | None:
        made = answer.answer
        return None if made is None else json.dumps(asdict(made))

    def read(self, text: str) -> Asked[Integration]:
        kept = json.loads(text)
        judgements = tuple(Judgement(**one) for one in kept["judgements"])
        return Asked(Integration(kept["texts"], judgements, failed=kept["failed"]))


def read_answer(answer: Any, request: IntegrationRequest) -> Integration:
    """What the module said; a component whose text could not be read is left as it is in the head."""
    changed = {name for child in request.children for name in child.texts}
    texts = {name: str(text) for name, text in dict(answer.texts).items() if name in changed and text}
    numbers = {child.number for child in request.children}
    judgements = tuple(
        Judgement(one.child, one.verdict, str(one.reason))
        for one in answer.verdicts
        if one.child in numbers and one.verdict in VERDICTS
    )
    failed = dict(getattr(answer, "failed", None) or {})
    problem = "; ".join(f"{name}: {why}" for name, why in failed.items())  # a part of it would lose the rest
    if not problem and not texts and not judgements:
        problem = "the module returned neither text nor verdict"
    return Integration(checked_texts(texts), judgements, failed=problem[:300])


def stale_child(number: int, child: Child, proposals: Sequence[CandidateProposal[Any]], behind: int) -> StaleChild:
    """A child as an integration reads it.

    Args:
        number: names it in verdicts.
        proposals: those of its step that passed their screen.
        behind: commits that it has not seen.
    """
    before, parent = child.parent.evaluation.scores, child.parent.task.parent_candidate
    names = [name for name, text in child.candidate.items() if text != parent[name]]
    after = next((one for one in proposals if one.candidate == child.candidate), None)
    scores = None if after is None else after.subsample_scores_after or []
    return StaleChild(
        number=number,
        texts={name: child.candidate[name] for name in names},
        parent_texts={name: parent[name] for name in names},
        score_before=sum(before) / max(1, len(before)),
        score_after=None if scores is None else sum(scores) / max(1, len(scores)),
        feedback=child.feedback,
        behind=behind,
    )


def changed_components(children: Sequence[Child]) -> tuple[str, ...]:
    """The components that children changed, sorted."""
    parent = [(child.candidate, child.parent.task.parent_candidate) for child in children]
    return tuple(sorted({name for mine, theirs in parent for name, text in mine.items() if text != theirs[name]}))


def sums(proposal: CandidateProposal[Any]) -> tuple[float, float]:
    """Summed scores of the base and of the candidate."""
    return sum(proposal.subsample_scores_before or []), sum(proposal.subsample_scores_after or [])
