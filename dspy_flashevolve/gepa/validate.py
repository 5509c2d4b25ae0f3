"""Validating candidates: a prefix that tells early, the rest, and the commit.

A candidate may be selected once its prefix is above the pool's best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gepa.core.state import ValsetEvaluation
from gepa.proposer.base import CandidateProposal

from dspy_flashevolve.engine.budget import Reservation
from dspy_flashevolve.engine.errors import RolloutUnresolvedError, RunAbortedError
from dspy_flashevolve.engine.replay import BEFORE_STEPS
from dspy_flashevolve.engine.rollouts import gather
from dspy_flashevolve.engine.steps import EndKind, Step, StepEnded
from dspy_flashevolve.engine.workflow import ValidationOrder, Workflow, released_at
from dspy_flashevolve.gepa import callbacks
from dspy_flashevolve.gepa.evaluate import Evaluation, Evaluations
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.records import Commit, Screened, Validated
from dspy_flashevolve.programs.run import DspyRun


@dataclass(frozen=True, slots=True)
class _Seed:
    """Who asks for the seed's validation, on which everything waits."""

    number: int = BEFORE_STEPS
    version: int = 0
    value: float = math.inf


class Validation:
    """Validates and commits.

    Args:
        run: slots, budget, events.
        pool: gepa's state.
        evaluations: runs candidates.
        workflow: how long prefixes are.
    """

    def __init__(self, run: DspyRun, pool: Pool, evaluations: Evaluations, workflow: Workflow) -> None:
        self.pool, self.evaluations, self.share = pool, evaluations, workflow.validate
        self._run = run
        perfect = pool.options.perfect_score
        self.order = ValidationOrder(math.inf if perfect is None else perfect, workflow.rounds, pool.options.seed)
        self.set_aside = Reservation(run.budget, 0)
        """Pays for the rest of the last head's validation where the budget has no room left."""

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

    # Other candidates.

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
        except RolloutUnresolvedError:
            await self.withdraw(keys)
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
        return await self.pool.write(self._confirm_children, step, work)

    def _confirm_children(self, step: Step, work: Validated) -> list[Commit]:
        waiting, best = self.pool.speculative, self.pool.best_score()
        proposals = tuple(
            proposal
            if base is None  # a speculative parent: itself if it was confirmed, else what stands for it
            else replace(proposal, parent_program_ids=list(waiting.resolve((base,))) or proposal.parent_program_ids)
            for proposal, base in zip(work.proposals, work.bases, strict=True)
        )
        commits = callbacks.commit(self.pool, step, replace(work, proposals=proposals))
        for key, done in zip(work.keys, commits, strict=True):
            if key is not None:
                waiting.confirm_late(key, done.candidate)
                if best is not None and done.score < best:
                    waiting.fallen.add(key)
        return commits

    async def withdraw(self, keys: Sequence[int | None]) -> None:
        """Take speculative candidates back, as if they had never been there; what was made from them is stale."""

        def take_back() -> None:
            for key in keys:
                if key is not None and key in self.pool.speculative:  # else it went with one under it
                    self.pool.speculative.remove(key)

        await self.pool.write(take_back)

    def _affords(self, step: Step, calls: int) -> bool:
        """Whether the validations can be paid: by the budget, or by what is set aside for a head when there is none."""
        if step.reservation.cover(calls):
            return True
        alone = len(self._run.live) <= 1 and not len(self.pool.speculative)
        return alone and self.set_aside.lend(step.reservation, calls - step.reservation.open)


def against_best(pool: Pool, scores: Mapping[Any, float]) -> tuple[float, float | None]:
    """The mean of a candidate's scores, and that of the pool's best on the same examples.

    Where the best was run on a part of them only, both are of that part. The second is None before the seed is
    confirmed, and where the best was run on none of them.
    """
    theirs: Mapping[Any, float] = {}
    if pool.seed_confirmed:
        theirs = pool.state.prog_candidate_val_subscores[pool.val_evaluation_policy.get_best_program(pool.state)]
    common = [i for i in scores if i in theirs]
    if not common:
        return sum(scores.values()) / max(1, len(scores)), None
    return sum(scores[i] for i in common) / len(common), sum(theirs[i] for i in common) / len(common)


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
