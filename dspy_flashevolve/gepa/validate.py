"""Validating children and heads: a prefix that tells early, the rest, and the commit.

An ordinary child may be selected once its prefix is above the pool's best. A head is rolled back where its prefix is
below; the rest of its validation runs where slots or calls allow, and a later head, once it is confirmed, makes it
needless.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio
from gepa.core.state import ValsetEvaluation
from gepa.proposer.base import CandidateProposal

from dspy_flashevolve.engine.budget import Reservation
from dspy_flashevolve.engine.errors import RolloutUnresolvedError, RunAbortedError
from dspy_flashevolve.engine.events import HeadEnded, Speculated, SpeculationEnded
from dspy_flashevolve.engine.replay import BEFORE_STEPS
from dspy_flashevolve.engine.rollouts import NoLongerWantedError, gather
from dspy_flashevolve.engine.steps import EndKind, Step, StepEnded
from dspy_flashevolve.engine.workflow import SAVING_PREFIX, ValidationOrder, Workflow, released_at
from dspy_flashevolve.gepa import callbacks
from dspy_flashevolve.gepa.evaluate import Evaluation, Evaluations, Gate
from dspy_flashevolve.gepa.heads import Heads, PrefixVerdict, against_best, best_scores
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.records import Commit, Screened, Validated
from dspy_flashevolve.programs.run import DspyRun

GONE = "it was superseded, or went with the one under it"


@dataclass(frozen=True, slots=True)
class _Seed:
    """Who asks for the seed's validation, on which everything waits."""

    number: int = BEFORE_STEPS
    version: int = 0
    value: float = math.inf


class _OutOfBudgetError(NoLongerWantedError):
    """What is set aside for the last head does not pay this one's validation."""


class Validation:
    """Validates and commits.

    Args:
        run: slots, budget, events.
        pool: gepa's state.
        evaluations: runs candidates.
        workflow: how long prefixes are.
        heads: the line of heads; None where there are none.
        margin: how far a head may lie under the pool's best.
        saves_calls: whether metric calls are scarcer than slots, so that none is spent which a later head may make
            needless.
    """

    def __init__(
        self,
        run: DspyRun,
        pool: Pool,
        evaluations: Evaluations,
        workflow: Workflow,
        heads: Heads | None,
        margin: float,
        saves_calls: Callable[[], bool],
    ) -> None:
        self.pool, self.evaluations, self.share, self.margin = pool, evaluations, workflow.validate, margin
        self._run, self._heads, self._saves_calls = run, heads, saves_calls
        perfect = pool.options.perfect_score
        self.order = ValidationOrder(math.inf if perfect is None else perfect, workflow.rounds, pool.options.seed)
        self.set_aside = Reservation(run.budget, 0)
        """Pays for the rest of the last head's validation where the budget has no room left."""
        self._resting: dict[int, anyio.Event] = {}

    # The seed: nothing can be compared before it.

    def seed_examples(self) -> list[Any]:
        """The validation examples of the seed: all, unless the evaluation policy wants fewer."""
        narrow = getattr(self.pool.val_evaluation_policy, "get_seed_eval_batch", None)
        return list(self.pool.loader.all_ids() if narrow is None else narrow(self.pool.loader))

    async def seed(self, pays: Reservation | None) -> None:
        """Validate the seed before every other candidate, and confirm it.

        Args:
            pays: was set aside before any step; None where it did not fit.

        Raises:
            RunAbortedError: there is no room in the budget, or the provider gave no answer.
        """
        pool, ids = self.pool, self.seed_examples()
        if pays is None:
            raise RunAbortedError(
                f"The budget of {self._run.budget.limit} metric calls cannot hold the seed's validation of {len(ids)} "
                "examples."
            )
        seed = pool.seed_candidate

        async def validate() -> Evaluation:
            return await self.evaluations.validation("validate", _Seed(), pays, seed, ids, traced=False)

        self.evaluations.first_rollouts(len(ids))
        try:
            evaluation = await self.evaluations.announced(seed, ids, validate)
        except RolloutUnresolvedError as error:
            raise RunAbortedError(f"The seed program could not be validated: {error}") from error
        finally:
            pays.refund()
        await pool.write(pool.confirm_seed, evaluation)
        self.order.record(evaluation.scores_by_val_id)

    # Ordinary children.

    async def children(self, step: Step, screened: Screened) -> Validated:
        """Run each child on the validation examples that gepa's evaluation policy names."""
        proposals, bases = list(screened.proposals), list(screened.bases)
        plans = await self.pool.write(
            lambda: [callbacks.cached_validation(self.pool, proposal.candidate) for proposal in proposals]
        )

        def unpaid() -> int:
            return sum(self.evaluations.unpaid(step, plan.candidate, plan.missing) for plan in plans)

        while not self._affords(step, missing := unpaid()):
            await self.pool.write(self.pool.reject, step, proposals.pop(), reason="no budget is left for it")
            plans.pop()
            bases.pop()
            if not plans:
                raise StepEnded(EndKind.DISCARDED, f"no budget is left for {missing} validation examples")
        keys: list[int] = []
        try:
            found = await gather([
                lambda one=one: self._child(step, *one, keys) for one in zip(proposals, bases, plans, strict=True)
            ])  # fmt: skip
        except RolloutUnresolvedError as error:
            await self.withdraw(step, keys, str(error))
            raise
        evaluations, handles = zip(*found, strict=True)
        calls = tuple(len(plan.missing) for plan in plans)
        return Validated(tuple(proposals), evaluations, calls, tuple(bases), handles, screened.merge)

    async def _child(
        self,
        step: Step,
        proposal: CandidateProposal[Any],
        base: int | None,
        plan: callbacks.ValidationPlan,
        keys: list[int],
    ) -> tuple[Evaluation, int | None]:
        """One child's validation, and the handle under which it can be selected meanwhile; None where it cannot."""
        ids = plan.missing if self._run.lockstep else self.order.sort(plan.missing)
        size = released_at(self.share, len(ids)) if ids else 0
        key: int | None = None

        async def run(part: list[Any], stage: str) -> Evaluation:
            return await self.evaluations.validation(stage, step, step.reservation, plan.candidate, part)

        async def prefix() -> Evaluation:
            nonlocal key
            fresh = await run(ids[:size], "prefix")
            key = await self.pool.write(self._release, proposal, base, replace(plan, missing=ids[:size]), fresh)
            if key is not None:
                keys.append(key)
                mean, best = against_best(self.pool, fresh.scores_by_val_id)
                self._run.bus.emit(Speculated(self._run.clock(), step.number, key, mean, best))
            return fresh

        async def validate() -> Evaluation:
            if self._run.lockstep or size == len(ids) or not self.pool.seed_confirmed:
                return await run(ids, "validate")
            return joined(*await gather([prefix, lambda: run(ids[size:], "validate")]))

        fresh = await self.evaluations.announced(plan.candidate, plan.missing, validate)
        evaluation = await self.pool.write(
            callbacks.complete_validation, self.pool, plan, in_order(fresh, plan.missing)
        )
        self.order.record(fresh.scores_by_val_id)
        return evaluation, key

    def _release(
        self, proposal: CandidateProposal[Any], base: int | None, plan: callbacks.ValidationPlan, fresh: Evaluation
    ) -> int | None:
        """Let selection pick a child whose prefix is above the pool's best; its handle, or None where it is not."""
        known = callbacks.complete_validation(self.pool, plan, fresh)
        mean, best = against_best(self.pool, known.scores_by_val_id)
        if best is None or mean <= best:
            return None
        if self.pool.state.frontier_type != "instance" and not known.objective_scores_by_val_id:
            return None  # gepa could not place it in the frontier yet
        waiting = self.pool.speculative
        parents = () if base is None or base not in waiting else (base,)
        indices = tuple(proposal.parent_program_ids)
        firm = [self.pool.generations[one] for one in indices]
        generation = 1 + max([*firm, *(waiting[one].generation for one in parents)])
        return waiting.add(proposal.candidate, parents, indices, generation, evaluation=known).key

    async def commit_children(self, step: Step, work: Validated) -> list[Commit]:
        """Put children into gepa's pool; one that fell behind its prefix leaves what was made from it stale."""
        commits, ends = await self.pool.write(self._confirm_children, step, work)
        for key, end, done in ends:
            self._run.bus.emit(SpeculationEnded(self._run.clock(), step.number, key, end, done.score, done.candidate))
        return commits

    def _confirm_children(self, step: Step, work: Validated) -> tuple[list[Commit], list[tuple[int, str, Commit]]]:
        waiting, best = self.pool.speculative, self.pool.best_score()
        proposals = tuple(
            proposal
            if base is None  # a speculative parent: itself if it was confirmed, else what stands for it
            else replace(proposal, parent_program_ids=list(waiting.resolve((base,))) or proposal.parent_program_ids)
            for proposal, base in zip(work.proposals, work.bases, strict=True)
        )
        commits = callbacks.commit(self.pool, step, replace(work, proposals=proposals))
        ends: list[tuple[int, str, Commit]] = []
        for key, done in zip(work.keys, commits, strict=True):
            if key is not None:
                waiting.confirm_late(key, done.candidate)
                kept = best is None or done.score >= best
                if not kept:
                    waiting.fallen.add(key)
                ends.append((key, "confirmed" if kept else "fell behind", done))
        return commits, ends

    async def withdraw(self, step: Step, keys: Sequence[int | None], reason: str) -> None:
        """Take speculative candidates back, as if they had never been there; what was made from them is stale."""

        def take_back(key: int) -> None:
            if key in self.pool.speculative:  # else it went with one under it
                self.pool.speculative.remove(key)

        for key in [one for one in keys if one is not None]:
            await self.pool.write(take_back, key)
            self._run.bus.emit(SpeculationEnded(self._run.clock(), step.number, key, f"removed: {reason}", None, None))

    def _affords(self, step: Step, calls: int) -> bool:
        """Whether the validations can be paid: by the budget, or by what is set aside for a head when there is none."""
        if step.reservation.cover(calls):
            return True
        alone = len(self._run.live) <= 1 and not len(self.pool.speculative)
        return alone and self.set_aside.lend(step.reservation, calls - step.reservation.open)

    # Heads.

    async def head(self, step: Step, key: int, proposal: CandidateProposal[Any]) -> Validated:
        """Validate a head: a prefix that it has to pass, and the rest, unless a later head is confirmed first.

        The rest takes the slots that nobody else wants, beside the prefix; where metric calls are scarcer than slots
        it waits until the prefix is passed and nothing else is left to do.
        """
        plan = await self.pool.write(callbacks.cached_validation, self.pool, proposal.candidate)
        validating = _HeadValidation(self, step, key, plan, self._saves_calls())
        try:
            fresh = await self.evaluations.announced(plan.candidate, plan.missing, validating.run)
        except RolloutUnresolvedError:
            await self.drop(step.number, key)
            raise
        except _OutOfBudgetError as error:
            await self.drop(step.number, key)
            raise StepEnded(EndKind.DISCARDED, str(error)) from None
        except NoLongerWantedError:
            raise StepEnded(EndKind.INTEGRATED, f"head {key} is validated no further: {GONE}") from None
        finally:
            self._resting.pop(key, None)
            validating.give_back()
            await self.pool.write(self.pool.count_calls)
        known = await self.pool.write(callbacks.complete_validation, self.pool, plan, in_order(fresh, plan.missing))
        self.order.record(known.scores_by_val_id)
        return Validated((proposal,), (known,), (len(plan.missing),), (None,), (None,), head=key)

    async def commit_head(self, step: Step, work: Validated) -> list[Commit]:
        """Put a validated head into gepa's pool; the heads under it need no validation of their own."""
        key = work.head
        assert key is not None
        commits, others, best = await self.pool.write(self._confirm_head, step, work, key)
        score, index = commits[0].score, commits[0].candidate
        end = "confirmed" if best is None or score >= best - self.margin else "rolled back"
        self._run.bus.emit(HeadEnded(self._run.clock(), step.number, key, end, score, best, index))
        self._settle(step.number, others, "superseded" if end == "confirmed" else "rolled back")
        return commits

    def _confirm_head(self, step: Step, work: Validated, key: int) -> tuple[list[Commit], Sequence[int], float | None]:
        """Commit; where the full validation lies under the pool's best, the head is an ordinary candidate from now on.

        Returns:
            The commit, the heads that it supersedes or takes along, and the pool's best before it.
        """
        assert self._heads is not None
        best = self.pool.best_score()
        proposal = replace(work.proposals[0], parent_program_ids=self._heads.parents_of(key))
        commits = callbacks.commit(self.pool, step, replace(work, proposals=(proposal,)))
        if best is not None and commits[0].score < best - self.margin:
            return commits, [one for one in self._heads.drop(key) if one != key], best
        return commits, self._heads.confirmed(key, commits[0].candidate), best

    async def drop(self, step: int, key: int, *, landed: bool = True) -> None:
        """Take a head back, with those that stand on it and have no evidence of their own.

        Args:
            landed: False for one that never was a head, which has been said already.
        """
        assert self._heads is not None
        removed = await self.pool.write(self._heads.drop, key)
        self._settle(step, [one for one in removed if landed or one != key], "rolled back")

    def _settle(self, step: int, keys: Sequence[int], end: str) -> None:
        """Heads that need no more validation: say so, and let those that rest go."""
        for key in keys:
            self._run.bus.emit(HeadEnded(self._run.clock(), step, key, end))
            if key in self._resting:
                self._resting[key].set()

    async def rest(self, step: Step, key: int) -> None:
        """A head's validation waits until nothing else is left to do, or a later head makes it needless."""
        resting = [other for other, event in self._resting.items() if not event.is_set()]
        event = self._resting[key] = anyio.Event()  # whoever settles it from here on finds it
        self._settle(step.number, await self.pool.write(self._supersede, key, resting), "superseded")
        if key not in self.pool.speculative:
            raise NoLongerWantedError(GONE)
        await self._run.rest(step, event, rank=key)

    def _supersede(self, key: int, resting: list[int]) -> list[int]:
        """Of the heads that rest, those under ``key`` go; ``key`` itself where it stands under one of them."""
        waiting = self.pool.speculative
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

    async def judge_prefix(self, step: Step, key: int, scores: dict[Any, float]) -> None:
        """Roll a head back whose prefix is under the pool's best on the same examples.

        Raises:
            NoLongerWantedError: the head is gone by now.
            StepEnded: it was rolled back.
        """
        assert self._heads is not None
        if key not in self.pool.speculative:
            raise NoLongerWantedError(GONE)
        verdict = await self.pool.write(self._heads.judge_prefix, key, scores)
        if verdict.removed:
            self._rolled_back(step, verdict)

    async def fails_prefix(self, step: Step, key: int, prefix: Sequence[Any]) -> None:
        """Roll a head back whose prefix can no longer reach what it has to; raises as :meth:`judge_prefix`."""
        assert self._heads is not None
        removed = await self.pool.write(self._heads.drop, key)
        if not removed:
            raise NoLongerWantedError(GONE)
        self._rolled_back(step, PrefixVerdict(None, self.prefix_best(prefix), removed))

    def _rolled_back(self, step: Step, verdict: PrefixVerdict) -> None:
        key, *others = verdict.removed
        score, best = verdict.score, verdict.best
        self._run.bus.emit(HeadEnded(self._run.clock(), step.number, key, "rolled back", score, best))
        self._settle(step.number, others, "rolled back")
        mine, theirs = ("-" if one is None else f"{one:.3f}" for one in (score, best))
        raise StepEnded(EndKind.REJECTED, f"head {key} rolled back: {mine} on its prefix, under {theirs}")

    def prefix_best(self, prefix: Sequence[Any]) -> float | None:
        """The mean of the pool's best on the prefix; None where it was not run on all of it."""
        theirs = best_scores(self.pool)
        return sum(theirs[i] for i in prefix) / len(prefix) if all(i in theirs for i in prefix) else None


class _HeadValidation:
    """One head's validation: its prefix and the rest, and what is borrowed for it."""

    def __init__(self, of: Validation, step: Step, key: int, plan: callbacks.ValidationPlan, saves: bool) -> None:
        self._of, self._step, self._key, self._plan = of, step, key, plan
        self._borrowed = 0
        self._saves = saves or not step.reservation.cover(self._unpaid(plan.missing))
        share = min(of.share, SAVING_PREFIX) if self._saves else of.share
        size = released_at(share, len(plan.missing)) if plan.missing else 0
        order = of.order.sort(plan.missing)
        self._parts = order[:size], order[size:]
        self._is_short = self._saves and not step.reservation.cover(self._unpaid(self._parts[0]))

    async def run(self) -> Evaluation:
        """The results on both parts.

        Raises:
            NoLongerWantedError: the head is gone.
            StepEnded: it was rolled back.
        """
        if self._saves:
            first = await self._prefix()
            return joined(first, await self._rest())
        return joined(*await gather([self._prefix, self._rest]))

    def give_back(self) -> None:
        """What was borrowed and not spent."""
        pays = self._step.reservation
        pays.lend(self._of.set_aside, min(self._borrowed, pays.open))

    async def _prefix(self) -> Evaluation:
        of, prefix = self._of, self._parts[0]
        if self._is_short:
            await of.rest(self._step, self._key)
            self._pay(self._unpaid(prefix))
        gate = self._gate(prefix)
        try:
            fresh = await self._evaluate(prefix, "prefix", gate)
        except NoLongerWantedError:
            if gate is None or not gate.closed or not self._is_there():
                raise
            await of.fails_prefix(self._step, self._key, prefix)
            raise
        pool = of.pool
        known = await pool.write(callbacks.complete_validation, pool, replace(self._plan, missing=prefix), fresh)
        await of.judge_prefix(self._step, self._key, known.scores_by_val_id)
        if self._saves and not self._is_short and self._parts[1]:
            await of.rest(self._step, self._key)
        return fresh

    async def _rest(self) -> Evaluation:
        self._pay(self._unpaid(self._parts[1]))
        return await self._evaluate(self._parts[1], "validate")

    def _pay(self, calls: int) -> None:
        """Have so many calls set aside: by the budget, else out of what is set aside for the last head."""
        if not self._is_there():
            raise NoLongerWantedError(GONE)
        pays = self._step.reservation
        if not pays.cover(calls):
            missing = calls - pays.open
            if not self._of.set_aside.lend(pays, missing):
                raise _OutOfBudgetError("no budget is left for its validation")
            self._borrowed += missing

    async def _evaluate(self, ids: list[Any], stage: str, gate: Gate | None = None) -> Evaluation:
        newest_first = float(self._key)
        return await self._of.evaluations.validation(
            stage, self._step, self._step.reservation, self._plan.candidate, ids,
            rank=newest_first, wanted=self._is_there, watch=gate,
        )  # fmt: skip

    def _gate(self, prefix: list[Any]) -> Gate | None:
        """Closes when the prefix can no longer reach what it has to; None where its sum alone does not decide."""
        of = self._of
        if self._plan.cached or not prefix:
            return None

        def passes(total: float) -> bool:
            best = of.prefix_best(prefix)
            return best is None or total / len(prefix) >= best - of.margin

        return Gate(len(prefix), passes, lambda: of.evaluations.highest)

    def _is_there(self) -> bool:
        return self._key in self._of.pool.speculative

    def _unpaid(self, ids: Sequence[Any]) -> int:
        return self._of.evaluations.unpaid(self._step, self._plan.candidate, ids)


def joined(first: Evaluation, last: Evaluation) -> Evaluation:
    """Two parts of one validation; a part in which no example has objective scores has empty ones."""
    objectives = {**(first.objective_scores_by_val_id or {}), **(last.objective_scores_by_val_id or {})}
    scores = {**first.scores_by_val_id, **last.scores_by_val_id}
    return ValsetEvaluation(
        outputs_by_val_id={**first.outputs_by_val_id, **last.outputs_by_val_id},
        scores_by_val_id=scores,
        objective_scores_by_val_id={i: objectives.get(i, {}) for i in scores} if objectives else None,
    )


def in_order(evaluation: Evaluation, ids: Sequence[Any]) -> Evaluation:
    """The results in the order of ``ids``: the order in which they were run leaves no trace, not even in a sum."""
    objectives = evaluation.objective_scores_by_val_id
    return ValsetEvaluation(
        outputs_by_val_id={i: evaluation.outputs_by_val_id[i] for i in ids},
        scores_by_val_id={i: evaluation.scores_by_val_id[i] for i in ids},
        objective_scores_by_val_id=None if objectives is None else {i: objectives[i] for i in ids},
    )
