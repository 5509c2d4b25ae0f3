"""Evaluating candidates example by example, in the run's slots: parents on their minibatches, children on theirs,
candidates on the validation set.

What is known of a candidate already is not asked for again.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio
from gepa.core.adapter import EvaluationBatch
from gepa.core.state import ValsetEvaluation
from gepa.strategies.acceptance import ImprovementOrEqualAcceptance, StrictImprovementAcceptance
from gepa.strategies.proposal_selection import AllImprovements, BestImprovement, TopKImprovements

from dspy_flashevolve.engine.errors import NoLongerWantedError, RolloutUnresolvedError, RunAbortedError
from dspy_flashevolve.engine.requests import OnGranted, Rollout, RolloutCall, RolloutKey, batch, gather
from dspy_flashevolve.engine.steps import EndKind, Reservation, Step, StepEnded, step_rng
from dspy_flashevolve.engine.store import BEFORE_STEPS, hash_of, id_text
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.gepa.heads import COMPARED, CONSOLIDATION, is_surely_better
from dspy_flashevolve.gepa.iterations import Iterations
from dspy_flashevolve.gepa.options import Parts
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.records import Batch, Candidate, Screened, Validated, ValidationPlan, evaluation_of
from dspy_flashevolve.gepa.search import Observation, Search
from dspy_flashevolve.programs.program import ProgramRunner, announce_evaluation
from dspy_flashevolve.programs.records import ProgramRecord
from dspy_flashevolve.programs.run import DspyRun

logger = logger_named(__name__)

Watch = Callable[[int, Rollout], bool]


class Gate:
    """Watches the scores of one evaluation, and closes once their sum can no longer pass.

    It rests on ``perfect_score``, the highest score there is, as dspy.GEPA has it.

    Args:
        requests: examples of the evaluation.
        criterion: one of gepa's own.
        before: the parent's sum; None as long as it is not known.
        highest: the highest score that an example can have; asked each time.
    """

    def __init__(
        self, requests: int, criterion: Any, before: Callable[[], float | None], highest: Callable[[], float]
    ) -> None:
        self._scores: list[float | None] = [None] * requests
        self._is_strict = type(criterion) is StrictImprovementAcceptance
        self._before, self._highest = before, highest
        self.closed = False

    def __call__(self, index: int, rollout: Rollout) -> bool:
        """Take the score of example number ``index``; False from when the sum cannot pass any more."""
        self._scores[index] = rollout.score
        # Exact in floating point as well: added in the same order, larger terms never give a smaller sum.
        highest, needed = self._highest(), self._before()
        most = sum(highest if score is None else score for score in self._scores)
        if needed is not None:
            self.closed |= not (most > needed if self._is_strict else most >= needed)
        return not self.closed

    @property
    def seen(self) -> list[float]:
        """The scores that are there, in the order of the examples."""
        return [score for score in self._scores if score is not None]


def rejects_by_sum(parts: Parts) -> bool:
    """Say whether the summed score alone can refuse a child: gepa's own strategies and criteria let it."""
    return type(parts.selection_strategy) in (AllImprovements, BestImprovement, TopKImprovements) and type(
        parts.acceptance_criterion
    ) in (StrictImprovementAcceptance, ImprovementOrEqualAcceptance)


class Evaluations:
    """Runs candidates on minibatches and on the validation set.

    Args:
        run: slots, budget, Store.
        program: runs a candidate on one example.
        pool: gepa's state.
        search: learns from rollouts, and says whether a candidate may be selected on a part of its validation.
    """

    def __init__(
        self, run: DspyRun, program: ProgramRunner, pool: Pool, iterations: Iterations, search: Search
    ) -> None:
        self._run, self._program, self._search = run, program, search
        self._pool, self._iterations, self._settings = pool, iterations, pool.settings
        self.highest = math.inf if pool.settings.perfect_score is None else pool.settings.perfect_score
        """The highest score that an example can have; infinity once one above it was seen."""
        self._has_warned = False
        """Of a score outside of the scale: once a run."""
        self.set_aside = Reservation(run.budget, 0)
        """Pays for the rest of the last head's validation where the budget has no room left."""
        self.train_split = "val" if pool.trainset is pool.loader else "train"  # else equal ids are different examples

    def record_score(self, score: float) -> None:
        """Watch the scale of scores: warn once of one outside; reject nothing early after one above its end.

        The scale is as wide as ``perfect_score`` is large (1 where it is 0), and ends there: 0 to 1 by default.
        """
        perfect, problem = self._settings.perfect_score, ""
        lowest = -math.inf if perfect is None else perfect - abs(perfect or 1.0)
        if perfect is not None and score > perfect:
            skips = "A minibatch of such scores counts as perfect and is not reflected on. "
            skips = skips if self._settings.skip_perfect_score else ""
            problem = (
                f"{skips}The effects of changes are estimated on too small a scale. Pass the best score that your "
                "metric can give as perfect_score= (perfect_score=100 for scores of 0 to 100), or return scores of 0 "
                "to 1."
            )
        elif score < lowest:
            problem = (
                "One such score outweighs all others in the means by which candidates are compared. Return "
                f"{lowest:g} for the worst, for failures too (failure_score= is what a failed rollout scores)."
            )
        if problem and not self._has_warned:
            self._has_warned = True
            finding = f"A rollout scored {score:g}, outside of {lowest:g} to perfect_score={perfect:g}."
            logger.warning("%s %s", finding, problem)
        if score > self.highest:
            self.highest = math.inf

    def gate(self, requests: int, before: Callable[[], float | None]) -> Gate | None:
        """Make what gives a screen up once its sum cannot pass; None where more than the sum decides."""
        if not self._search.spares_calls or not rejects_by_sum(self._pool.parts):
            return None
        return Gate(requests, self._pool.parts.acceptance_criterion, before, lambda: self.highest)

    def unpaid(
        self,
        step: Step,
        candidate: Candidate,
        ids: Sequence[Any],
        *,
        train: bool = False,
        traced: bool = True,
        reflected: bool = False,
    ) -> int:
        """Count the metric calls that an evaluation may cost; an interrupted run's step has paid some already.

        ``reflected``: the traces are about to be reflected on.
        """
        if step.recorded is None:
            return len(ids)
        split = self.train_split if train else "val"
        needs = reflected and not self._is_proposed(step)
        return self._run.store.count_missing(
            step.number, hash_of(candidate), split, ids, traced=traced, needs_trace=needs
        )

    async def minibatch(
        self,
        stage: str,
        step: Step,
        candidate: Candidate,
        ids: Sequence[Any],
        examples: Sequence[Any],
        *,
        watch: Watch | None = None,
        reflected: bool = False,
    ) -> Batch:
        """Evaluate on training examples, with traces, which are ``reflected`` on or not.

        ``watch`` is told the position and the rollout of each example that has finished; False gives up the others.

        Raises:
            NoLongerWantedError: ``watch`` said no.
            RolloutUnresolvedError: the provider gave no answer for an example.
        """
        rollouts = await self._evaluated(
            stage, step, candidate, self.train_split, ids, examples, True, watch=watch,
            needs_trace=reflected and not self._is_proposed(step),
        )  # fmt: skip
        return as_batch(rollouts)

    async def validation(
        self, stage: str, step: Step, candidate: Candidate, ids: Sequence[Any], *, traced: bool = True
    ) -> dict[Any, Rollout]:
        """Evaluate on validation examples; as in dspy.GEPA not ``traced`` for the seed and for crossovers, where a
        failed example's output is an empty prediction instead of None.

        Raises:
            RolloutUnresolvedError: the provider gave no answer for an example.
        """
        examples = self._pool.loader.fetch(list(ids))
        rollouts = await self._evaluated(stage, step, candidate, "val", ids, examples, traced)
        return dict(zip(ids, rollouts, strict=True))

    def _is_proposed(self, step: Step) -> bool:
        """Whether an interrupted run had the step's proposals already, so that nobody reflects on its traces."""
        return self._run.store.find_reply(step.number, "propose", "0") is not None

    async def _evaluated(
        self,
        stage: str,
        step: Step,
        candidate: Candidate,
        split: str,
        ids: Sequence[Any],
        examples: Sequence[Any],
        traced: bool,
        *,
        needs_trace: bool = False,
        watch: Watch | None = None,
    ) -> list[Rollout]:
        run, program = self._run, self._program
        name = run.store.record_candidate(candidate)
        keeps_trace = split != "val" or self.train_split == "val"
        scope, rollouts_left, decided = anyio.CancelScope(), len(ids), False

        async def evaluate_one(index: int, granted: OnGranted) -> Rollout:
            nonlocal rollouts_left, decided

            async def call() -> Rollout:
                if decided:
                    raise NoLongerWantedError("its outcome is known, or nobody wants it any more")
                rollout = await program.rollout(candidate, examples[index], capture_traces=traced)
                return rollout if keeps_trace else replace(rollout, trajectory=None)

            record = ProgramRecord(program.records, candidate, examples[index], traced and keeps_trace, needs_trace)
            key = RolloutKey(name, split, ids[index], traced)
            rollout_call = RolloutCall(
                key=key, stage=stage, step=step, reservation=step.reservation, make=call, written=record,
                make_failure=lambda reason: program.failed_rollout(reason, traced),
                followers=len(ids) - index - 1, on_granted=granted,
            )  # fmt: skip
            rollout = await run.requests.answer(rollout_call)
            self.record_score(rollout.score)
            if not run.requests.is_unanswered(key):
                self._search.observe(Observation(candidate, name, split, id_text(ids[index]), rollout.score))
            rollouts_left -= 1
            if watch is not None and not watch(index, rollout) and rollouts_left:
                decided = True
                if program.interruptible:
                    scope.cancel()
            return rollout

        with scope:
            return await batch(len(ids), evaluate_one)
        raise NoLongerWantedError("its outcome is known")

    # The seed: nothing can be compared before it.

    def seed_examples(self) -> list[Any]:
        """List the validation examples of the seed: all, unless the evaluation policy wants fewer."""
        narrow = getattr(self._pool.parts.val_evaluation_policy, "get_seed_eval_batch", None)
        return list(self._pool.loader.all_ids() if narrow is None else narrow(self._pool.loader))

    async def seed(self, reservation: Reservation | None) -> None:
        """Validate the seed before every other candidate, and confirm it.

        Args:
            reservation: was set aside before any step; None where it did not fit.

        Raises:
            RunAbortedError: there is no room in the budget, or the provider gave no answer.
        """
        pool, ids = self._pool, self.seed_examples()
        if reservation is None:
            raise RunAbortedError(
                f"The budget of {self._run.budget.limit} metric calls cannot hold the seed's validation of {len(ids)} "
                "examples."
            )
        seed, step = pool.seed_candidate, Step(BEFORE_STEPS, step_rng(BEFORE_STEPS, self._settings.seed), reservation)
        step.record_version(0, math.inf)  # everything waits for it
        self._program.mistakes.watch_rollouts(len(ids))
        self._program.mistakes.watch_steps()
        try:
            rollouts = await self._announced(
                seed, ids, lambda: self.validation("validate", step, seed, ids, traced=False)
            )
        except RolloutUnresolvedError as error:
            raise RunAbortedError(f"The seed program could not be validated: {error}") from error
        finally:
            reservation.refund()
        await pool.write(pool.confirm_seed, evaluation_of(rollouts))
        self._search.record_validation({i: rollout.score for i, rollout in rollouts.items()})

    # Other candidates.

    async def validate(self, step: Step, screened: Sequence[Screened], is_last: bool = False) -> list[Validated]:
        """Run each child on the validation examples that gepa's evaluation policy names.

        Args:
            is_last: it is the last head: what is set aside pays it, though other steps still run.
        """
        children = list(screened)
        plans = await self._pool.write(lambda: [self.plan(child.proposal.candidate) for child in children])

        def unpaid() -> int:
            return sum(self.unpaid(step, plan.candidate, plan.missing) for plan in plans)

        begun: dict[Any, Rollout] = {}
        while not begun and not self._affords(step, missing := unpaid(), is_last):
            worse = len(children) - 1
            if len(children) == 2 and children[1].proposal.tag == CONSOLIDATION:
                worse, begun = await self._compared(step, plans, is_last)
            lost = "of the best text and the same written anew, this one is no better on the first examples"
            reason = lost if begun else "no budget is left for it"
            await self._pool.write(self._iterations.reject, step, children.pop(worse).proposal, reason=reason)
            plans.pop(worse)
            if not plans:
                raise StepEnded(EndKind.DISCARDED, f"no budget is left for {missing} validation examples")
        keys: list[int] = []
        try:
            return await gather([
                lambda pair=pair: self._validated(step, *pair, keys, begun)
                for pair in zip(children, plans, strict=True)
            ])  # fmt: skip
        except RolloutUnresolvedError:
            await self._pool.write(self._pool.speculative.withdraw, keys)
            raise

    async def _compared(
        self, step: Step, plans: Sequence[ValidationPlan], is_last: bool
    ) -> tuple[int, dict[Any, Rollout]]:
        """Run a head and the same text written anew on the first validation examples, since both cannot be paid whole.

        Returns:
            The place of the one to leave out, and the rollouts of the other. Without any where there is no budget for
            that: then the head is kept.
        """
        shared = [i for i in plans[0].missing if i in plans[1].missing]
        # Drawn, since examples may be sorted by class; the same again where an interrupted run goes on.
        first = step_rng(step.number, self._settings.seed).sample(shared, math.ceil(COMPARED * len(shared)))
        rest = [[i for i in plan.missing if i not in first] for plan in plans]
        calls = sum(self.unpaid(step, plan.candidate, first) for plan in plans)
        calls += max(self.unpaid(step, plan.candidate, ids) for plan, ids in zip(plans, rest, strict=True))
        if not first or not self._affords(step, calls, is_last):
            return 1, {}
        head, clean = await gather([
            lambda plan=plan: self.validation("validate", step, plan.candidate, first) for plan in plans
        ])  # fmt: skip
        is_head = is_surely_better([head[i].score - clean[i].score for i in first], len(shared))
        return (1, head) if is_head else (0, clean)

    async def _validated(
        self, step: Step, child: Screened, plan: ValidationPlan, keys: list[int], begun: Mapping[Any, Rollout]
    ) -> Validated:
        """Validate one child.

        Args:
            keys: gets the handle under which it can be selected meanwhile.
            begun: what it was run on already.
        """
        ids = [i for i in plan.missing if i not in begun]
        key: int | None = None

        async def part(stage: str, part_ids: list[Any]) -> dict[Any, Rollout]:
            return await self.validation(stage, step, plan.candidate, part_ids)

        async def release(rollouts: dict[Any, Rollout]) -> None:
            nonlocal key
            key = await self._pool.write(self._release, child, replace(plan, missing=list(rollouts)), rollouts)
            if key is not None:
                keys.append(key)

        async def joined() -> dict[Any, Rollout]:
            if not self._pool.seed_confirmed:  # there is nothing to compare a prefix with
                return {**begun, **await part("validate", ids)}
            return {**begun, **await self._search.validated(ids, part, release)}

        rollouts = await self._announced(plan.candidate, plan.missing, joined)
        evaluation = await self._pool.write(self.complete, plan, rollouts)
        self._search.record_validation({i: rollout.score for i, rollout in rollouts.items()})
        return Validated(child.proposal, evaluation, len(plan.missing), child.base, key)

    def plan(self, candidate: Candidate, ids: Sequence[Any] | None = None) -> ValidationPlan:
        """Plan a validation, by default on the examples that the policy names: what gepa's cache has, and what is to be
        run. Runs in the pool's writer."""
        pool, cache = self._pool, self._pool.state.evaluation_cache
        chosen = pool.parts.val_evaluation_policy.get_eval_batch(pool.loader, pool.state) if ids is None else ids
        cached, missing = ({}, list(chosen)) if cache is None else cache.get_batch(candidate, list(chosen))
        return ValidationPlan(candidate, cached, missing)

    def complete(self, plan: ValidationPlan, rollouts: Mapping[Any, Rollout]) -> ValsetEvaluation[Any, Any]:
        """Join fresh results with the cached ones, and cache them; the order in which they came leaves no trace. Runs
        in the pool's writer."""
        cache, fresh = self._pool.state.evaluation_cache, evaluation_of({i: rollouts[i] for i in plan.missing})
        objectives = fresh.objective_scores_by_val_id
        if cache is not None and plan.missing:
            cache.put_batch(
                plan.candidate,
                plan.missing,
                [fresh.outputs_by_val_id[i] for i in plan.missing],
                [fresh.scores_by_val_id[i] for i in plan.missing],
                None if objectives is None else [objectives[i] for i in plan.missing],
            )
        cached = {i: entry.objective_scores for i, entry in plan.cached.items() if entry.objective_scores is not None}
        return ValsetEvaluation(
            outputs_by_val_id={**{i: e.output for i, e in plan.cached.items()}, **fresh.outputs_by_val_id},
            scores_by_val_id={**{i: e.score for i, e in plan.cached.items()}, **fresh.scores_by_val_id},
            objective_scores_by_val_id={**cached, **(objectives or {})} or None,
        )

    def _release(self, child: Screened, plan: ValidationPlan, rollouts: Mapping[Any, Rollout]) -> int | None:
        """Let selection pick a child whose validation is there in part; see :meth:`SpeculativeCandidates.release`."""
        pool = self._pool
        return pool.speculative.release(child, self.complete(plan, rollouts), pool.state, pool.best_index)

    async def _announced(
        self, candidate: Candidate, ids: Sequence[Any], validate: Callable[[], Awaitable[dict[Any, Rollout]]]
    ) -> dict[Any, Rollout]:
        """Run a full validation, which dspy's callbacks are told of as of one of ``dspy.Evaluate``."""

        def results(rollouts: Mapping[Any, Rollout]) -> list[tuple[Any, float]]:
            return [(rollouts[i].output, rollouts[i].score) for i in ids]

        if not ids:
            return await validate()
        examples, adapter = self._pool.loader.fetch(list(ids)), self._program.adapter
        return await announce_evaluation(adapter, self._run.threads, candidate, examples, validate, results)

    def _affords(self, step: Step, calls: int, is_last: bool) -> bool:
        """Whether the validations can be paid: by the budget, or by what is set aside for a head when there is none."""
        if step.reservation.cover(calls):
            return True
        alone = len(self._run.live) <= 1 and self._pool.seed_confirmed and not self._pool.speculative.entries
        return (alone or is_last) and self.set_aside.lend(step.reservation, calls - step.reservation.open)


def as_batch(rollouts: Sequence[Rollout]) -> Batch:
    """Put rollouts together as dspy's adapter does."""
    objectives = [dict(rollout.objective_scores) for rollout in rollouts]
    return EvaluationBatch(
        outputs=[rollout.output for rollout in rollouts],
        scores=[rollout.score for rollout in rollouts],
        trajectories=[
            {**rollout.trajectory, "example_ind": index}
            for index, rollout in enumerate(rollouts)
            if rollout.trajectory is not None
        ],
        objective_scores=objectives if any(objectives) else None,
    )
