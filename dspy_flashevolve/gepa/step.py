"""One step of GEPA, from its selection to its end: what gepa does in a row, while other steps do the same.

    select -> rollout -> propose --(stale)--> repair -> screen -> validate -> commit (version + 1)

A staleness policy says which children are repaired (repair.py). The search says where a step starts, whether its child
is screened, and whether it joins others (search.py); what is validated beside children says ending.py.

The order of callbacks, log entries, metrics and counts within a step is that of gepa 0.1.4
(``ReflectiveMutationProposer.propose`` and ``GEPAEngine``); steps overlap.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from typing import Any

import anyio
from dspy.primitives import Module

from dspy_flashevolve.engine.errors import ConfigurationError, NoLongerWantedError, RolloutUnresolvedError
from dspy_flashevolve.engine.events import PolicyDecided, SeedValidated
from dspy_flashevolve.engine.requests import gather
from dspy_flashevolve.engine.staleness import Discard, History, Integrate, Look, Place, StalenessPolicy, Texts
from dspy_flashevolve.engine.steps import Admission, End, EndKind, Reservation, Step, StepEnded
from dspy_flashevolve.engine.store import BEFORE_STEPS, hash_of, id_text, reporting_damage
from dspy_flashevolve.gepa import resume
from dspy_flashevolve.gepa.admission import GENERATIONS, PERFECT, ReflectionCalls, SearchWidth, Spending, alone_width
from dspy_flashevolve.gepa.edits import is_too_long
from dspy_flashevolve.gepa.ending import Ending, PendingValidation
from dspy_flashevolve.gepa.evaluate import Evaluations
from dspy_flashevolve.gepa.iterations import Iterations
from dspy_flashevolve.gepa.options import has_foreign
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.propose import EditProposer, Proposing
from dspy_flashevolve.gepa.records import (
    Batch,
    Child,
    Commit,
    Crossover,
    Parent,
    Proposal,
    Screened,
    Selected,
    Task,
    Validated,
    task_key,
)
from dspy_flashevolve.gepa.repair import Repairs
from dspy_flashevolve.gepa.reports import figures, gepa_logger
from dspy_flashevolve.gepa.screening import Screening
from dspy_flashevolve.gepa.search import Search
from dspy_flashevolve.gepa.select import Selection
from dspy_flashevolve.gepa.settings import MINIBATCH
from dspy_flashevolve.programs.program import ProgramRunner
from dspy_flashevolve.programs.run import DspyRun


class GepaLoop:
    """Takes the steps of one run of GEPA; :meth:`step` is the picture above as code.

    Args:
        search: where steps start, what joins.
        ending: what is validated beside the children of steps.
        calls: counts those of the reflection LM.
        policy: looks at children where it says.
        repairing: the module that repairs stale children.
    """

    def __init__(
        self,
        run: DspyRun,
        pool: Pool,
        iterations: Iterations,
        program: ProgramRunner,
        search: Search,
        ending: Ending,
        calls: ReflectionCalls,
        policy: StalenessPolicy,
        repairing: Module,
    ) -> None:
        settings = self._settings = pool.settings
        self._run, self._pool, self._iterations, self._policy = run, pool, iterations, policy
        self._search, self._ending, self._calls = search, ending, calls
        code: list[str] = list(program.adapter._flex_paths)  # pyright: ignore[reportPrivateUsage]
        self._evaluations = Evaluations(run, program, pool, iterations, search)
        self._proposing = Proposing(run, pool, iterations, program, search, calls, self._end_if_over)
        self._repairs = Repairs(run, pool, repairing, code, calls)
        self._screening = Screening()
        self._selection = Selection(pool, iterations, search, self._unanswerable, self._most_examples)
        minibatch = min(settings.minibatch_size, len(pool.trainset))
        few = min(minibatch, MINIBATCH) if settings.sizes_minibatches else minibatch
        self._spending = Spending(run, pool, search, ending, calls, self._evaluations.set_aside, minibatch, few)
        slots, workflow = run.slots, settings.workflow
        self._admission: Admission = alone_width(workflow, slots, burst := min(minibatch, slots))
        if search.come_together is not False:
            expects_edits = isinstance(program.adapter.custom_instruction_proposer, EditProposer)
            self._admission = SearchWidth(workflow, slots, burst, search, self._spending, expects_edits)
        self._counts_from = 0
        """Number from which on a step is an iteration to stoppers that count those without improvement."""
        self._seeded = anyio.Event()

    @property
    def discarded_share(self) -> float:
        """Of the children that the staleness policy looked at, the share that it or a repair discarded."""
        decisions = self._run.policy_decisions
        return (decisions["discard"] + self._repairs.dropped) / max(1, decisions.total())

    def statistics(self) -> dict[str, Any]:
        """Return what :class:`AsyncStats` says of the loop: calls of the reflection LM, and what came of them."""
        return {
            "proposals": self._proposing.proposals,
            "reflection_calls": self._calls.total,
            "integration_calls": self._calls.integrations,
            "changes": self._search.changes(),
            "unconsolidated": self._ending.why_grown,
        }

    async def evolve(self) -> None:
        """Run to the end; the pool holds the result.

        Raises:
            RunAbortedError: the provider refused for good, or the seed could not be validated.
            Exception: what a selector, a stopper or a user's strategy raised.
        """
        run, pool = self._run, self._pool
        is_seeded = await pool.write(pool.start)
        with reporting_damage(run.store.path):
            await pool.write(resume.take_up, run.store, pool, is_seeded)
            run.budget.spent = run.store.spent
            candidates = pool.state.program_candidates
            grown = [(candidates[index], names) for index, names in pool.grown.items()]
            await pool.write(self._search.restore, run.store, grown)
        if is_seeded:
            run.budget.spent = pool.state.total_num_evals
            self._ending.restored()
            gepa_logger.info(f"Going on: {run.budget.spent} metric calls of earlier sessions are counted.")
            for scores in pool.state.prog_candidate_val_subscores:
                self._search.record_validation(scores)
                self._evaluations.record_score(max(scores.values(), default=float("-inf")))
            await self._record_seed()
            if not run.store.unfinished and await pool.write(pool.should_stop):  # gepa asks its stoppers between steps
                self._stop()
        else:
            unpaid = len(self._evaluations.seed_examples()) - run.store.paid[BEFORE_STEPS]
            reservation = run.budget.reserve(unpaid)
            if not self._search.overlaps or has_foreign(pool.parts):  # a strategy of the user's may look at its scores
                await self._seed(reservation)
            else:
                await run.run_in_background(lambda: self._seed(reservation))
        await run.evolve(
            self.step,
            self._admission,
            calls_per_step=self._spending.calls_per_task,
            reserve=self._spending.reserve,
            stop_reason=self._spending.why_none_opens,
            on_end=self._ended,
            first_number=max(pool.state.i, run.store.last_step) + 1,
            watchers=self._search.watchers(run),
        )
        self._evaluations.set_aside.refund()
        await pool.write(self._ending.keep)

    async def step(self, step: Step) -> End:
        """Take one step. A part of it that finds nothing to go on with ends it by raising :class:`StepEnded`."""
        candidates, pending = list[Screened](), await self._ending.take(step)
        if pending is not None:
            self._run.begin(step, self._pool.version, math.inf, selection=[])
        elif isinstance(work := await self._select(step), Crossover):
            candidates = await self._crossed(step, work)
        else:
            parents = await self._rolled_out(step, work)
            try:
                children = await self._proposed(step, parents)
                candidates = await self._screened(step, children)
            except StepEnded:  # the step may be the one that validates what the search has composed meanwhile
                is_paid = self._spending.pays_beyond_validation and step.reservation.cover(len(self._pool.loader))
                pending = await self._ending.due(step, is_paid)
                if pending is None:
                    await self._ending.cancel_validation(step, is_timed=False)
                    raise
        if pending is not None:
            found = await self._pool.write(self._ending.begin, step, pending)
            candidates = await self._ending.rewritten(step, found, pending)
        return await self._validated(step, candidates, pending)

    def _end_if_over(self) -> None:
        """End a step that cannot find anything better, or whose child would come too late.

        Raises:
            StepEnded: the best candidate has the perfect score on every validation example, or the last one before
                ``max_seconds`` is being validated.
        """
        if self._ending.is_perfect:
            raise StepEnded(EndKind.REJECTED, PERFECT)
        if self._ending.has_ended:
            raise StepEnded(EndKind.DISCARDED, "max_seconds are nearly over, and the last head is being validated")

    async def _select(self, step: Step) -> Selected | Crossover:
        """Choose parents and minibatches, or two candidates to cross; of an interrupted run, what was chosen then."""
        run, pool, selection = self._run, self._pool, None
        if step.recorded is None:
            version, value, work = await pool.write(self._selection.select, step)
            await pool.write(self._ending.keep)  # it knows what a variant is made of, if the run is killed
            selection = resume.selection_of(run.store, work)
        else:
            with reporting_damage(run.store.path):
                work = await pool.write(resume.selected_again, run.store, pool, step.recorded)
            await pool.write(self._selection.runs_again, step, isinstance(work, Crossover))
            version, value = step.version, await pool.write(self._selection.parent_score, work)
        run.begin(step, version, value, selection)
        self._end_if_over()
        if isinstance(work, Crossover):
            return work
        tasks = list(work.tasks)
        self._spending.widen(max((len(task.minibatch_ids) for task in tasks), default=0))
        calls = self._spending.calls_per_task
        while step.recorded is None and tasks and not step.reservation.cover(len(tasks) * calls):
            tasks.pop()  # a sampling strategy asked for more than the budget holds
        return Selected(tuple(tasks), work.bases[: len(tasks)])

    async def _rolled_out(self, step: Step, work: Selected) -> list[Parent]:
        """Run each task's parent on its minibatch, with traces."""
        pool, tasks = self._pool, work.tasks
        unpaid = sum(
            self._evaluations.unpaid(step, task.parent_candidate, task.minibatch_ids, train=True, reflected=True)
            for task in tasks
        )
        if not tasks or (step.recorded is not None and not step.reservation.cover(unpaid)):
            raise StepEnded(EndKind.DISCARDED, "there is nothing to work on within the budget")
        begins = pool.reports.evaluation_begins
        await pool.write(lambda: [begins(step, task.minibatch, [], task.parent_idx) for task in tasks])
        unique = {task_key(task): task for task in tasks}

        async def evaluated(task: Task) -> Batch:
            return await self._evaluations.minibatch(
                "rollout", step, task.parent_candidate, task.minibatch_ids, task.minibatch, reflected=True
            )

        done = await gather([lambda task=task: evaluated(task) for task in unique.values()])
        by_key = dict(zip(unique, done, strict=True))
        parents = [
            Parent(index, task, by_key[task_key(task)], base)
            for index, (task, base) in enumerate(zip(tasks, work.bases, strict=True))
        ]
        await pool.write(self._iterations.record_parents, step, tasks, [parent.evaluation for parent in parents])
        self._look(step, "before_propose", work.bases)
        return parents

    async def _proposed(self, step: Step, parents: Sequence[Parent]) -> list[Child]:
        """Let the reflection LM write a child for each task that leaves something to improve; repair what is stale."""
        self._end_if_over()
        pool, most = self._pool, self._settings.workflow.max_candidate_characters
        written = await self._proposing.propose(step, parents)
        changed = await self._ending.record_children(step, written)
        await self._spending.release()
        await pool.write(pool.keep_strategies)
        if not changed:
            raise StepEnded(EndKind.REJECTED, "the reflection changed nothing")
        children = [child for child in changed if not is_too_long(child.candidate, most)]
        if not children:
            raise StepEnded(EndKind.REJECTED, f"longer than max_candidate_characters={most}")
        is_stale = self._look(step, "after_propose", [child.base for child in children])
        self._end_if_over()
        if is_stale or self._repairs.are_paid(step, children):
            children = await self._repairs.repaired(step, children)
            self._end_if_over()
        return children

    async def _screened(self, step: Step, children: Sequence[Child]) -> list[Screened]:
        """Run the children on their parents' minibatches, and let gepa's criterion decide.

        A patched child is compared with what it was patched onto, which is run there as well; it is always screened.

        Returns:
            Those that are to be validated by themselves.
        """
        pool, patched = self._pool, [child for child in children if child.patched is not None]
        may_skip = step.recorded is None and not patched
        is_skipped = may_skip and not await self._search.needs_screen(step, self._screening)
        if is_skipped:
            self._look(step, "after_screen", [child.base for child in children])
            children = [child for child in children if not await pool.write(self._joins, step, child)]
            if not children:
                raise StepEnded(EndKind.JOINED, "its edits are in the head, as those of nearly all children before")
        runs = [(child, child.candidate) for child in children] + [(child, child.source) for child in patched]
        calls = sum(
            self._evaluations.unpaid(step, texts, child.parent.task.minibatch_ids, train=True) for child, texts in runs
        )
        if not step.reservation.cover(calls):
            raise StepEnded(EndKind.DISCARDED, f"no budget is left for a screen of {calls}")
        with self._screening.running():
            passed = await self._passed(step, children)
        self._look(step, "after_screen", [child.base for child, _ in passed], counts=not is_skipped)
        alone = passed
        if type(self._search).joins is not Search.joins:
            alone = [
                pair
                for pair in passed
                if not await pool.write(self._joins, step, *pair) or self._ending.is_doubted(step)
            ]
        if not alone:
            raise StepEnded(EndKind.JOINED, "its changes are in the head")
        proposals = [proposal for _, proposal in alone]
        step.record_version(step.version, await pool.write(self._iterations.expected_score, proposals))
        self._end_if_over()
        return [Screened(proposal, child.base) for child, proposal in alone]

    async def _passed(self, step: Step, children: Sequence[Child]) -> list[tuple[Child, Proposal]]:
        """Run children on their parents' minibatches, and find those that gepa's criterion accepts.

        Raises:
            StepEnded: there is none.
        """
        pool = self._pool
        begins, tasks = pool.reports.evaluation_begins, [child.parent.task for child in children]
        await pool.write(lambda: [begins(step, task.minibatch, [task.parent_idx]) for task in tasks])
        outcomes = await gather([lambda child=child: self._run_child(step, child) for child in children])
        screened = [outcome for outcome in outcomes if outcome is not None]
        passed = await pool.write(self._iterations.judge_children, step, screened) if screened else []
        if not any(child.patched for child in children):
            self._screening.record(passed=bool(passed))
        indices = {child.parent.index for child, _ in passed}
        for child in children:
            if child.patched is not None:
                self._repairs.record_use(child.parent.index in indices)
        if not screened:
            await pool.write(pool.count_calls)
            raise StepEnded(EndKind.REJECTED, "no child could pass its screen any more")
        if not passed:
            raise StepEnded(EndKind.REJECTED, "no child passed its screen")
        return passed

    def _joins(self, step: Step, child: Child, proposal: Proposal | None = None) -> bool:
        """Let the search take a child in; False where it stands for itself. Runs in the pool's writer."""
        ids = [] if proposal is None else proposal.subsample_indices or []
        scores = [] if proposal is None else proposal.subsample_scores_after or []
        self._search.catch_up()
        is_taken = self._search.joins(
            step.number, child, {id_text(example): score for example, score in zip(ids, scores, strict=True)}
        )
        if is_taken:
            self._ending.keep()
        return is_taken

    async def _run_child(self, step: Step, child: Child) -> tuple[Child, Batch] | None:
        """Run a child on its parent's minibatch; None where it was given up, since it could not pass any more."""
        parent, task, ids = child.parent, child.parent.task, child.parent.task.minibatch_ids
        whole: Batch | None = parent.evaluation if child.patched is None else None
        gate = self._evaluations.gate(len(ids), lambda: None if whole is None else sum(whole.scores))

        async def base() -> Batch:
            nonlocal whole
            if whole is None:
                whole = await self._evaluations.minibatch("screen", step, child.source, ids, task.minibatch)
            return whole

        async def evaluated() -> Batch:
            return await self._evaluations.minibatch("screen", step, child.candidate, ids, task.minibatch, watch=gate)

        try:
            full, batch = await gather([base, evaluated])
        except NoLongerWantedError:
            assert gate is not None
            assert whole is not None
            rejected = replace(child, parent=replace(parent, evaluation=whole))
            await self._pool.write(self._iterations.give_up, step, rejected.proposal(step), gate.seen, len(ids))
            return None
        return replace(child, parent=replace(parent, evaluation=full)), batch

    async def _crossed(self, step: Step, plan: Crossover) -> list[Screened]:
        """Run the child of two parents on validation examples that both were run on: gepa's merge."""
        pool, most = self._pool, self._settings.workflow.max_candidate_characters
        if is_too_long(plan.candidate, most):
            raise StepEnded(EndKind.REJECTED, f"longer than max_candidate_characters={most}")
        examples, parents = pool.loader.fetch(list(plan.ids)), list(plan.parents)
        await pool.write(pool.reports.evaluation_begins, step, examples, parents, traced=False)
        lookup = await pool.write(self._evaluations.plan, plan.candidate, plan.ids)
        calls = self._evaluations.unpaid(step, plan.candidate, lookup.missing, traced=False)
        if not step.reservation.cover(calls):
            raise StepEnded(EndKind.DISCARDED, f"no budget is left for a screen of {calls}")
        fresh = await self._evaluations.validation("screen", step, plan.candidate, lookup.missing, traced=False)
        proposal = await pool.write(
            lambda: self._iterations.judge_crossover(step, plan, self._evaluations.complete(lookup, fresh))
        )
        if proposal is None:
            raise StepEnded(EndKind.REJECTED, "the merge is worse than one of its parents")
        self._look(step, "after_screen", ())
        step.record_version(step.version, await pool.write(lambda: max(map(pool.score_of, plan.parents))))
        return [Screened(proposal)]

    async def _validated(self, step: Step, candidates: Sequence[Screened], pending: PendingValidation | None) -> End:
        """Validate candidates, and commit them.

        Args:
            pending: where they come from, unless the step has made them.
        """
        is_timed = pending is not None and pending.is_timed
        try:
            if self._ending.is_perfect and (pending is None or not pending.is_last):
                raise StepEnded(EndKind.REJECTED, PERFECT)
            if not candidates:
                raise StepEnded(EndKind.REJECTED, "no new text came of the best one")
            self._run.mark_child_made(step)
            began = self._run.clock()
            done = await self._evaluations.validate(step, candidates, is_last=is_timed)
            self._ending.time.record(self._run.clock() - began)
            return await self._committed(step, await self._pool.write(self._ending.preferred, step, done))
        except (StepEnded, RolloutUnresolvedError):
            await self._ending.cancel_validation(step, is_timed)
            raise

    async def _committed(self, step: Step, work: Sequence[Validated]) -> End:
        """Add the candidates to the pool, one after the other, in its writer."""
        step.mark_blocked_by(BEFORE_STEPS)
        await self._seeded.wait()
        step.mark_blocked_by(None)
        try:
            self._look(step, "before_commit", [validated.base for validated in work])
        except StepEnded:
            await self._pool.write(self._pool.speculative.withdraw, [validated.key for validated in work])
            raise
        commits: list[Commit] = []
        with anyio.CancelScope(shield=True):  # what enters the pool is told and counted, even if the run ends meanwhile
            commits = await self._pool.write(self._commit, step, work)
            await self._pool.write(self._ending.learn, commits)
            await self._ending.look_for_perfect(self._evaluations.highest)
            for commit in commits:
                self._run.commit(step, **asdict(commit))
        return End(EndKind.COMMITTED, f"candidate {', '.join(str(commit.candidate) for commit in commits)}")

    def _commit(self, step: Step, work: Sequence[Validated]) -> list[Commit]:
        """Add candidates to the pool, and note which of their texts have grown. Runs in the pool's writer."""
        self._pool.mark_grown([self._search.grown_in(validated.proposal.candidate) for validated in work])
        return self._iterations.commit(step, work)

    # The staleness policy.

    def _look(self, step: Step, place: Place, bases: Collection[int | None], counts: bool = True) -> bool:
        """Ask the policy, where it wants to be asked, what becomes of a step whose children were made from ``bases``,
        speculative candidates; gaps are recorded at every place. Returns whether to repair the children.

        Raises:
            StepEnded: it is discarded.
            ConfigurationError: it is to be repaired at another place than after its proposal.
        """
        run, pool, policy = self._run, self._pool, self._policy
        if counts and place != "before_commit":
            run.gaps[place][pool.version - step.version] += 1
        if place not in policy.looks:
            return False
        orphaned = any(base in pool.speculative.fallen for base in bases)
        look = Look(place, step.version, orphaned)
        decision = policy.decide(look, History(pool.version))
        reason = decision.reason if isinstance(decision, Discard) else None
        is_repaired = isinstance(decision, Integrate)
        word = "integrate" if is_repaired else "admit" if reason is None else "discard"
        run.policy_decisions[word] += 1
        run.bus.emit(PolicyDecided(run.clock(), step.number, place, pool.version - step.version, word, reason or ""))
        if reason is not None:
            raise StepEnded(EndKind.DISCARDED, f"stale: {reason}")
        if is_repaired and place != "after_propose":
            raise ConfigurationError(
                f"{policy!r} says Integrate() {place}: children are repaired after_propose, elsewhere admit or discard."
            )
        return is_repaired

    # The seed, and how steps end.

    async def _seed(self, reservation: Reservation | None) -> None:
        began = self._run.clock()
        await self._evaluations.seed(reservation)
        self._ending.time.record(self._run.clock() - began)
        await self._pool.write(self._pool.count_calls)
        if await self._pool.write(self._pool.should_stop):
            self._stop()
        await self._record_seed()

    async def _record_seed(self) -> None:
        """Take in that the seed's scores, or an earlier session's, are in the pool."""
        await self._ending.look_for_perfect(self._evaluations.highest)
        seed, best = self._pool.score_of(0), self._pool.best_score
        self._run.bus.emit(SeedValidated(self._run.clock(), seed, seed if best is None else best))
        self._ending.time.record_seed()
        if not self._run.live:
            await self._ending.refresh()
        self._seeded.set()

    async def _ended(self, step: Step, end: End) -> None:
        pool = self._pool
        await pool.write(self._selection.ended, step)
        committed = end.kind is EndKind.COMMITTED
        # Steps overlap: to who counts them, those are iterations that came one after the other, or were committed.
        counts = committed or (step.number >= self._counts_from and (self._ending.may_validate))
        if counts:
            self._counts_from = max(self._run.live, default=step.number) + 1
        has_joined = end.kind is EndKind.JOINED
        if await pool.write(self._iterations.end, step, committed, counts, has_joined):
            self._stop()
        await self._spending.release()
        if self._run.live == [step.number]:
            await self._ending.refresh()
        self.track(step.number + 1, gap=pool.version - step.version - committed)

    def track(self, iteration: int, **more: float) -> None:
        """Send the figures of the run so far to the tracker, where there is one.

        Args:
            more: figures beside those of :func:`figures`.
        """
        run, tracker = self._run, self._pool.parts.tracker
        if tracker.thread is not None:
            busy = run.scheduler.statistics().busy
            tracker.log_metrics({**figures(run.statistics(), busy, self._calls.integrations), **more}, step=iteration)

    def _stop(self) -> None:
        """Stop the run, as one of gepa's or the user's stoppers says."""
        stopper = self._pool.parts.stopper
        self._run.stop(stopper.reason, "finished" if stopper.budget_spent else "stopped")

    def _most_examples(self) -> int | None:
        """Return how many examples a reflection reads at most: where the run may choose, GEPA's three for children that
        are whole texts and, with a small budget, for the first ones; None for as many as the sampler draws."""
        if not self._settings.sizes_minibatches:
            return None
        joins, limit = self._search.come_together, self._run.budget.limit
        is_small = limit is not None and limit < GENERATIONS * self._spending.calls_alone
        return MINIBATCH if joins is False or (joins is None and is_small) else None

    def _unanswerable(self, candidate: Texts) -> set[Any]:
        """Find training examples that get no answer for a candidate."""
        return self._run.requests.unanswered_examples(hash_of(candidate), self._evaluations.train_split)
