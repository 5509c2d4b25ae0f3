"""Evaluating candidates example by example, in the run's slots; parents on their minibatches; what is known already."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import anyio
from gepa.core.adapter import EvaluationBatch
from gepa.core.state import ValsetEvaluation
from gepa.strategies.acceptance import ImprovementOrEqualAcceptance, StrictImprovementAcceptance
from gepa.strategies.proposal_sampling import ProposalTask
from gepa.strategies.proposal_selection import AllImprovements, BestImprovement, TopKImprovements

from dspy_flashevolve.engine.budget import Reservation
from dspy_flashevolve.engine.errors import RolloutUnresolvedError
from dspy_flashevolve.engine.replay import hash_of, id_text
from dspy_flashevolve.engine.rollouts import Granted, NoLongerWantedError, Rollout, RolloutKey, batch
from dspy_flashevolve.engine.scheduler import Requester
from dspy_flashevolve.engine.steps import Step
from dspy_flashevolve.engine.workflow import Workflow, at_most, released_at
from dspy_flashevolve.gepa.options import Parts
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.records import Batch, Candidate, LateRollouts
from dspy_flashevolve.programs.program import DspyProgram
from dspy_flashevolve.programs.records import ProgramRecord
from dspy_flashevolve.programs.run import DspyRun

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
