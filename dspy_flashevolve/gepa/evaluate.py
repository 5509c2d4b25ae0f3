"""Evaluating candidates example by example, in the run's slots: parents on their minibatches, children on theirs,
candidates on the validation set.

A stage whose items need n rollouts may go on with the first ceil(alpha n) that finish; the others run on. What was
decided on a part is confirmed, or taken back, when the rest is there (FlashEvolve, arXiv 2605.08520, section 3.3). What
is known of a candidate already is not asked for again.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import anyio
from gepa.core.adapter import EvaluationBatch
from gepa.core.state import ValsetEvaluation
from gepa.proposer.base import CandidateProposal
from gepa.strategies.acceptance import ImprovementOrEqualAcceptance, StrictImprovementAcceptance
from gepa.strategies.proposal_sampling import ProposalTask
from gepa.strategies.proposal_selection import AllImprovements, BestImprovement, TopKImprovements

from dspy_flashevolve.engine.endpoints import OUTAGE_SECONDS
from dspy_flashevolve.engine.errors import ConfigurationError, RolloutUnresolvedError, RunAbortedError
from dspy_flashevolve.engine.replay import BEFORE_STEPS, hash_of, id_text
from dspy_flashevolve.engine.rollouts import Granted, NoLongerWantedError, Rollout, RolloutKey, batch, gather
from dspy_flashevolve.engine.scheduler import Requester
from dspy_flashevolve.engine.steps import EndKind, Reservation, Step, StepEnded
from dspy_flashevolve.gepa import callbacks
from dspy_flashevolve.gepa.options import Parts
from dspy_flashevolve.gepa.pool import Batch, Candidate, Commit, LateRollouts, Pool, Screened, Validated
from dspy_flashevolve.programs.program import DspyProgram
from dspy_flashevolve.programs.records import ProgramRecord
from dspy_flashevolve.programs.run import DspyRun

K = TypeVar("K", bound=Hashable)


def released_at(share: float, requests: int) -> int:
    """Requests that have to finish before a stage releases its output: at least one, at most all.

    The product is rounded to a tenth before it is rounded up, so that 0.67 of three are two.

    >>> [released_at(0.67, 3), released_at(0.25, 60), released_at(0.25, 3), released_at(1.0, 7)]
    [2, 15, 1, 7]
    """
    return min(requests, max(1, math.ceil(round(share * requests, 1))))


@dataclass(frozen=True, slots=True)
class Workflow:
    """How steps overlap, and what ends them: how early stages release their output, how many steps there are, whose
    slots they get, how long nobody answers before the run ends, and how long a candidate may be.

    Args:
        rollout: share of a parent's minibatch after which reflection starts, on what is there; above 0, up to 1. The
            others run on: they are paid, remembered, and compared with the child's.
        validate: share of the validation set, the prefix, after which a candidate whose score there is above the pool's
            best on the same examples may be selected; the rest runs on. The default waits for the whole: it made the
            best programs (docs/scheduling.md).
        rounds: an example of the validation set that this many candidates in a row have passed leaves the prefix.
        live_steps: steps at once, counted strictly. Default: as many as keep the slots busy, fewer where the budget of
            metric calls is small, so that steps can build on each other (:func:`~.admission.for_slots`).
        median_seconds: every so many seconds, slots move to the stages that produce less than the others
            (:func:`~.scheduler.median_shares`). None for never: the order of the queues decides, which made the better
            programs.
        max_outage_seconds: a run whose provider answers nothing for so long, and turns away all that it is sent, is
            given up with the best program so far; no Retry-After is waited for longer. None to wait as long as it
            takes; docs/faults.md.
        max_candidate_characters: the most characters of all texts of a candidate together. A longer one ends its step
            before it costs a rollout. None for no limit.

    Raises:
        ConfigurationError: a share outside (0, 1], a count that is no whole number above 0, or seconds that are no
            number above 0.
    """

    rollout: float = 0.67
    validate: float = 1.0
    rounds: int = 3
    live_steps: int | None = None
    median_seconds: float | None = None
    max_outage_seconds: float | None = OUTAGE_SECONDS
    max_candidate_characters: int | None = None

    def __post_init__(self) -> None:
        for name in ("rollout", "validate"):
            share = getattr(self, name)
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
                raise ConfigurationError(f"Workflow: {name} is {share!r}, expected a share above 0 and up to 1.")
        for name in ("rounds", "live_steps", "max_candidate_characters"):
            count = getattr(self, name)
            if count is None and name != "rounds":
                continue
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ConfigurationError(f"Workflow: {name} is {count!r}, expected a whole number of at least 1.")
        for name in ("median_seconds", "max_outage_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and (
                isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf
            ):
                raise ConfigurationError(f"Workflow: {name} is {seconds!r}, expected a number above 0, or None.")


BARRIERS = Workflow(rollout=1.0, validate=1.0)
"""Every stage waits for all of its requests."""


class ValidationOrder:
    """The order in which the examples of a validation are run: those that tell candidates apart come first.

    An example's worth is the variance of its scores over the candidates that were run on it, most first; equals, and
    those that fewer than two candidates were run on, come in an order drawn from the seed. An example that the last
    ``rounds`` candidates passed goes to the end, so that it leaves the prefix; one failure brings it back.

    Every example is still run before a candidate is confirmed: the order changes nothing but what is known sooner.

    Args:
        passing: score from which an example counts as passed.
        rounds: see above.
        seed: of the draw.

    >>> order = ValidationOrder(passing=1.0, rounds=1, seed=0)
    >>> order.record({"told apart": 0.0, "easy": 1.0, "hard": 0.0})
    >>> order.record({"told apart": 1.0, "easy": 1.0, "hard": 0.0})
    >>> order.sort(["easy", "hard", "told apart"])
    ['hard', 'told apart', 'easy']
    >>> order.record({"told apart": 0.0})
    >>> order.sort(["easy", "hard", "told apart"])
    ['told apart', 'hard', 'easy']
    """

    def __init__(self, passing: float, rounds: int, seed: int | None) -> None:
        self._passing = passing
        self._rounds = rounds
        self._seed = seed
        self._sums: dict[Hashable, tuple[int, float, float]] = {}
        self._last: dict[Hashable, deque[bool]] = {}

    def record(self, scores: Mapping[K, float]) -> None:
        """One candidate's scores, on any examples."""
        for example, score in scores.items():
            count, total, squares = self._sums.get(example, (0, 0.0, 0.0))
            self._sums[example] = (count + 1, total + score, squares + score * score)
            self._last.setdefault(example, deque(maxlen=self._rounds)).append(score >= self._passing)

    def sort(self, examples: Sequence[K]) -> list[K]:
        """The examples, those to be run first in front."""
        return sorted(examples, key=self._key)

    def _key(self, example: Hashable) -> tuple[bool, float, float]:
        last = self._last.get(example, ())
        rotated = len(last) == self._rounds and all(last)
        count, total, squares = self._sums.get(example, (0, 0.0, 0.0))
        variance = 0.0 if count < 2 else max(0.0, squares / count - (total / count) ** 2)
        return (rotated, -round(variance, 9), random.Random(f"{self._seed}/prefix/{example}").random())


def at_most(scores: Sequence[float | None], highest: float) -> float:
    """The largest sum that the scores can still come to when none is above ``highest``; None stands for one to come.

    It is exact in floating point as well: added in the same order, larger terms never give a smaller sum. (From Python
    3.12 on ``sum`` compensates; terms under 1e-30 beside large ones may cost it the last bit there.)

    >>> at_most([0.5, None], 1.0)
    1.5
    """
    return sum(highest if score is None else score for score in scores)


Watch = Callable[[int, float], bool]
Evaluation = ValsetEvaluation[Any, Any]
REMEMBERED = 32
"""Candidates whose scores on training examples are kept, so that a base is not run again on what it was run on."""


class Gate:
    """Watches the scores of one evaluation, and closes once their sum can no longer pass.

    It rests on ``perfect_score``, the highest score there is, as dspy.GEPA has it.

    Args:
        requests: examples of the evaluation.
        passes: whether a sum passes; monotone.
        highest: the highest score that an example can have; asked each time.
    """

    def __init__(self, requests: int, passes: Callable[[float], bool], highest: Callable[[], float]) -> None:
        self._scores: list[float | None] = [None] * requests
        self._passes = passes
        self._highest = highest
        self.closed = False

    def __call__(self, index: int, score: float) -> bool:
        """Take the score of example number ``index``; False from when the sum cannot pass any more."""
        self._scores[index] = score
        self.closed = self.closed or not self._passes(at_most(self._scores, self._highest()))
        return not self.closed

    @property
    def seen(self) -> list[float]:
        """The scores that are there, in the order of the examples."""
        return [score for score in self._scores if score is not None]


def rejects_by_sum(parts: Parts) -> bool:
    """Whether a child whose summed score cannot pass is refused, whatever else is known of it: by gepa's selection
    strategies and criteria it is."""
    return type(parts.selection_strategy) in (AllImprovements, BestImprovement, TopKImprovements) and type(
        parts.acceptance
    ) in (StrictImprovementAcceptance, ImprovementOrEqualAcceptance)


def passes_screen(criterion: Any, before: Callable[[], float | None]) -> Callable[[float], bool]:
    """gepa's built-in criteria as a question to the child's sum.

    Args:
        before: the parent's sum; None as long as it is not known.
    """
    strict = type(criterion) is StrictImprovementAcceptance

    def passes(total: float) -> bool:
        needed = before()
        return needed is None or (total > needed if strict else total >= needed)

    return passes


class Evaluations:
    """Runs candidates on minibatches and on the validation set.

    Args:
        run: slots, budget, journal.
        program: runs a candidate on one example.
        pool: gepa's state; only its data and options are read.
        workflow: when a parent's minibatch is released.
        same_data: the training set is the validation set, so that equal ids mean equal examples.
        hears: told of every rollout that was answered: the hash of its candidate, the split, the example, the score.
    """

    def __init__(
        self,
        run: DspyRun,
        program: DspyProgram,
        pool: Pool,
        workflow: Workflow,
        same_data: bool,
        hears: Callable[[str, str, str, float], None] | None = None,
    ) -> None:
        self._run, self._program, self._pool, self._workflow = run, program, pool, workflow
        perfect = pool.options.perfect_score
        self.highest = math.inf if perfect is None else perfect
        """The highest score that an example can have; infinity once one above it was seen."""
        self.train_split = "val" if same_data else "train"
        self._known: OrderedDict[str, dict[Any, float]] = OrderedDict()
        self._hears = hears or (lambda candidate, split, example, score: None)

    def saw(self, score: float) -> None:
        """Take note of a score: a metric that does not keep to its bound lets nothing be told early."""
        if score > self.highest:
            self.highest = math.inf

    def known(self, candidate: Candidate) -> dict[Any, float]:
        """Training example -> score of a candidate, as far as it was run lately."""
        return dict(self._known.get(hash_of(candidate), {}))

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
        """How many metric calls an evaluation may cost: of an interrupted run's step, some are paid already.

        Args:
            train: on training examples; else on validation examples.
            reflected: the traces are about to be reflected on.
        """
        journal = self._run.journal
        if journal is None or step.recorded is None:
            return len(ids)
        split = self.train_split if train else "val"
        needs = reflected and not self._is_proposed(step)
        return journal.missing(step.number, hash_of(candidate), split, ids, traced=traced, needs_trace=needs)

    async def minibatch(
        self,
        stage: str,
        step: Step,
        candidate: Candidate,
        ids: Sequence[Any],
        examples: Sequence[Any],
        *,
        pays: Reservation | None = None,
        watch: Watch | None = None,
        reflected: bool = False,
    ) -> Batch:
        """Evaluate on training examples, with traces.

        Args:
            pays: default: what is set aside for the step.
            watch: told the position and the score of each example that has finished; False gives up the others.
            reflected: the traces are about to be reflected on.

        Raises:
            NoLongerWantedError: ``watch`` said no.
            RolloutUnresolvedError: the provider gave no answer for an example.
        """
        rollouts = await self._evaluated(
            stage, step, candidate, self.train_split, ids, examples, pays or step.reservation, True, watch=watch,
            needs_trace=reflected and not self._is_proposed(step),
        )  # fmt: skip
        self._remember(candidate, ids, [one.score for one in rollouts])
        return as_batch(rollouts)

    async def validation(
        self,
        stage: str,
        step: Requester,
        pays: Reservation,
        candidate: Candidate,
        ids: Sequence[Any],
        *,
        traced: bool = True,
        watch: Watch | None = None,
    ) -> Evaluation:
        """Evaluate on validation examples. The traces are dropped: a validation may be long, and nobody reads them.

        Args:
            traced: as dspy.GEPA does: False for the seed and for crossovers, where a failed example's output is an
                empty prediction instead of None.
            watch: see :meth:`minibatch`.

        Raises:
            NoLongerWantedError: ``watch`` said no.
            RolloutUnresolvedError: the provider gave no answer for an example.
        """
        examples = self._pool.loader.fetch(list(ids))
        rollouts = await self._evaluated(stage, step, candidate, "val", ids, examples, pays, traced, watch=watch)
        done = as_batch(rollouts)
        objectives = done.objective_scores
        return Evaluation(
            outputs_by_val_id=dict(zip(ids, done.outputs, strict=True)),
            scores_by_val_id=dict(zip(ids, done.scores, strict=True)),
            objective_scores_by_val_id=None if objectives is None else dict(zip(ids, objectives, strict=True)),
        )

    def first_rollouts(self, count: int) -> None:
        """See :meth:`ProgramRunner.first_rollouts`."""
        self._program.first_rollouts(count)

    async def announced(
        self, candidate: Candidate, ids: Sequence[Any], validate: Callable[[], Awaitable[Evaluation]]
    ) -> Evaluation:
        """A full validation, of which dspy's callbacks hear as of one of ``dspy.Evaluate``.

        Args:
            ids: of its validation examples.
            validate: makes it.
        """

        def results(found: Evaluation) -> list[tuple[Any, float]]:
            return [(found.outputs_by_val_id[i], found.scores_by_val_id[i]) for i in ids]

        if not ids:
            return await validate()
        return await self._program.announced(candidate, self._pool.loader.fetch(list(ids)), validate, results)

    async def parent(self, step: Step, task: ProposalTask[Any, Any], whole: bool) -> tuple[Batch, LateRollouts | None]:
        """A task's parent on its minibatch, until enough of it has finished to reflect on; the rest runs on beside.

        The rest has a budget of its own, so that the step may end before it does.

        Args:
            whole: all of it is set aside; else nothing is released early.

        Returns:
            The evaluation of the part that is there, in the order of the minibatch, and the rest; None where all is.

        Raises:
            RolloutUnresolvedError: the provider gave no answer, and what is there is not enough.
        """
        size, candidate = len(task.minibatch_ids), task.parent_candidate
        needed = released_at(self._workflow.rollout, size)
        if self._run.lockstep or not whole or needed == size:
            done = self.minibatch("rollout", step, candidate, task.minibatch_ids, task.minibatch, reflected=True)
            return await done, None
        pays = step.reservation.split(size)
        found: dict[int, Rollout] = {}
        enough, late = anyio.Event(), LateRollouts()

        def finished(index: int, rollout: Rollout) -> None:
            found[index] = rollout
            if len(found) >= needed and self._worth_reflecting(found.values()):
                enough.set()

        async def rest() -> None:
            done, failure = None, None
            try:
                rollouts = await self._evaluated(
                    "rollout", step, candidate, self.train_split, task.minibatch_ids, task.minibatch, pays, True,
                    needs_trace=not self._is_proposed(step), finished=finished,
                )  # fmt: skip
                self._remember(candidate, task.minibatch_ids, [one.score for one in rollouts])
                done = as_batch(rollouts)
            except RolloutUnresolvedError as error:
                failure = error
            finally:
                pays.refund()
                late.end(done, failure)
                enough.set()

        await self._run.beside(rest)
        await enough.wait()
        if len(found) < needed or not self._worth_reflecting(found.values()):
            await late.complete()  # raises where the others had no answer
        return as_batch([found[index] for index in sorted(found)]), late

    def _worth_reflecting(self, rollouts: Any) -> bool:
        """Whether there is a trace, and a score that could be better where perfect ones are skipped."""
        options, there = self._pool.options, list(rollouts)
        perfect = options.perfect_score if options.skip_perfect_score else None
        traced = any(rollout.trajectory is not None for rollout in there)
        return traced and (perfect is None or any(rollout.score < perfect for rollout in there))

    def _is_proposed(self, step: Step) -> bool:
        """Whether an interrupted run had the step's proposals already, so that nobody reflects on its traces."""
        journal = self._run.journal
        return journal is not None and journal.reply(step.number, "propose", "0") is not None

    def _remember(self, candidate: Candidate, ids: Sequence[Any], scores: Sequence[float]) -> None:
        self._known.setdefault(name := hash_of(candidate), {}).update(zip(ids, scores, strict=True))
        self._known.move_to_end(name)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    async def _evaluated(
        self,
        stage: str,
        step: Requester,
        candidate: Candidate,
        split: str,
        ids: Sequence[Any],
        examples: Sequence[Any],
        pays: Reservation,
        traced: bool,
        *,
        needs_trace: bool = False,
        watch: Watch | None = None,
        finished: Callable[[int, Rollout], None] = lambda index, rollout: None,
    ) -> list[Rollout]:
        run, program = self._run, self._program
        name = hash_of(candidate) if run.journal is None else run.journal.candidate(candidate)
        keeps_trace = split != "val" or self.train_split == "val"
        scope, left, decided = anyio.CancelScope(), len(ids), False

        def failed(reason: str) -> Rollout:
            return program.failed(reason, capture_traces=traced)

        async def one(index: int, granted: Granted) -> Rollout:
            nonlocal left, decided

            async def call() -> Rollout:
                if decided:
                    raise NoLongerWantedError("its outcome is known, or nobody wants it any more")
                rollout = await program.rollout(candidate, examples[index], capture_traces=traced)
                return rollout if keeps_trace else replace(rollout, trajectory=None)

            record = None
            if run.journal is not None:
                record = ProgramRecord(program.records, candidate, examples[index], traced and keeps_trace, needs_trace)
            key = RolloutKey(name, split, ids[index], traced)
            behind = len(ids) - index - 1
            rollout, _ = await run.rollouts.rollout(
                key, stage, step, pays, call, record, failed=failed, behind=behind, granted=granted
            )
            self.saw(rollout.score)
            if not run.rollouts.is_unanswered(key):
                self._hears(name, split, id_text(ids[index]), rollout.score)
            finished(index, rollout)
            left -= 1
            if watch is not None and not watch(index, rollout.score) and left:
                decided = True
                if program.interruptible:
                    scope.cancel()
            return rollout

        with scope:
            return await batch(len(ids), one)
        raise NoLongerWantedError("its outcome is known")


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
