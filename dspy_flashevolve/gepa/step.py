"""One step of GEPA, from its selection to its end: what gepa does in a row, while other steps do the same.

    select -> rollout -> propose -> screen ----------> validate -> commit (version + 1)
                                       \\                 /
                                        +- integrate ---+   joins the changes of many steps; see integration.py

The order of callbacks, log entries, metrics and counts within a step is that of gepa 0.1.4
(``ReflectiveMutationProposer.propose`` and ``GEPAEngine``); steps overlap.
"""

from __future__ import annotations

import json
import math
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median_low
from typing import Any

import anyio
from dspy.primitives import Module
from dspy.utils.exceptions import AdapterParseError

from dspy_flashevolve.engine.errors import ConfigurationError, FlashEvolveError, RolloutUnresolvedError
from dspy_flashevolve.engine.events import SeedValidated
from dspy_flashevolve.engine.replay import BEFORE_STEPS, hash_of, id_text
from dspy_flashevolve.engine.rollouts import NoLongerWantedError, RequestCost, gather
from dspy_flashevolve.engine.staleness import (
    Discard,
    Integrate,
    Look,
    Place,
    Reflective,
    StalenessPolicy,
    Texts,
)
from dspy_flashevolve.engine.steps import End, EndKind, LiveSteps, Load, Reservation, Step, StepEnded
from dspy_flashevolve.gepa import resume
from dspy_flashevolve.gepa.changes import is_too_long, never_edited
from dspy_flashevolve.gepa.credit import Credit, Head
from dspy_flashevolve.gepa.edits import EditProposer
from dspy_flashevolve.gepa.evaluate import Evaluations, Workflow
from dspy_flashevolve.gepa.integration import Integrations
from dspy_flashevolve.gepa.options import gepa_logger, has_foreign
from dspy_flashevolve.gepa.pool import (
    Batch,
    Child,
    Commit,
    Crossover,
    Parent,
    Pool,
    Proposal,
    Screened,
    Selected,
    Validated,
    task_key,
)  # fmt: skip
from dspy_flashevolve.gepa.screening import Screening
from dspy_flashevolve.gepa.select import Selection
from dspy_flashevolve.gepa.tracker import figures
from dspy_flashevolve.modules.consolidate import Consolidation
from dspy_flashevolve.observe.statistics import ONLY_TESTED, PERFECT_MINIBATCH, REFLECTION_STAGES, ChangeRecord
from dspy_flashevolve.programs.program import ProgramRunner
from dspy_flashevolve.programs.records import ReplyText
from dspy_flashevolve.programs.reflection import Reflection, checked_texts
from dspy_flashevolve.programs.run import DspyRun

DOUBTED, PATIENCE, ALONE_EVERY = 0.5, 8, 3
"""Where half of the metric calls, and half of those of eight validations, were spent since the last better candidate,
every third step validates its own child, though its changes are in the head."""
HEADS_SHARE = 0.25
"""Share of the metric calls spent that validations of heads may cost, before the last one."""
LAST_MARGIN, LAST_SHARE = 1.25, 0.25
"""A last head's validation begins so many times what a validation takes before ``max_seconds``, and not before their
last quarter."""
TIMED_VALIDATIONS = 5
"""What a validation takes is the median over so many: one answer that hangs makes none of them long."""
GENERATIONS, GENERATIONS_OF_CHANGES = 12.0, 6.0
"""A limited budget is spread over at least this many generations (:class:`LiveSteps`); fewer where the work of many
steps comes together in one head."""
NOTHING = {
    "no_trajectories": "no example of its minibatch could be run",
    "all_scores_perfect": PERFECT_MINIBATCH,
}
"""gepa's words for why there is nothing to reflect on -> ours."""
LEAST_EDITS, GROWN_EDITS = 6, 20
"""So many edits in one text have it written anew before the last validation, and before another one. A text of 24
unconsolidated reflections scored .29, the same written anew .50 (docs/benchmarks.md)."""
CONSOLIDATION = "consolidation"
"""Tag of a proposal that is the head, written anew by the reflection LM."""
ROOM_FOR_TWO = 8
"""A budget of so many validations keeps two of them for the end: of the head, and of the same text written anew."""
SHOWN_CHARACTERS = 300
"""Of an error in the log and in a step's reason: whole replies made 2,848 lines of 13 failed steps."""
ATTEMPTS = 2
"""gepa asks a reflection that raised once more, then skips the task."""


class GepaLoop:
    """GEPA over one pool.

    Args:
        run: slots, budget, journal.
        pool: gepa's state and strategies.
        program: the program under optimization.
        optimizer: an AsyncGEPA; its workflow and limits are read.
        policy: looks at children where it says.
        integrating: the module that integrates.
        initial: candidates to begin from beside the seed; each has a step that validates it.
    """

    def __init__(
        self,
        run: DspyRun,
        pool: Pool,
        program: ProgramRunner,
        optimizer: Any,
        policy: StalenessPolicy,
        integrating: Module,
        initial: Sequence[Texts] = (),
    ) -> None:
        self._run, self._pool, self._program, self._policy = run, pool, program, policy
        self._max_reflection_calls, self._max_cost = optimizer.max_reflection_calls, optimizer.max_cost
        self._initial, most = list(initial), optimizer.workflow.max_candidate_characters
        self._most_characters: int | None = most
        # dspy's InstructionProposer keeps its replies to max_chars; what is joined of them keeps to it as well.
        each: int | None = getattr(optimizer.custom_instruction_proposer, "max_chars", None)
        self._most_each = each
        self._minibatch: int = min(optimizer.reflection_minibatch_size or 3, len(pool.trainset))
        """Training examples a task, for the estimate of a step's cost."""
        burst = min(self._minibatch, run.slots)
        joined, alone = admission_of(optimizer.workflow, run.slots, burst)
        self._admission = alone
        reflective = policy if isinstance(policy, Reflective) and not run.lockstep else None
        code: list[str] = list(program.adapter._flex_paths)  # pyright: ignore[reportPrivateUsage]
        self._asks_for_edits = isinstance(program.adapter.custom_instruction_proposer, EditProposer)
        self._credit: Credit | None = None
        if reflective is not None and reflective.changes:
            scale = abs(pool.perfect_score or 1.0)
            proposer = program.adapter.custom_instruction_proposer
            edits = proposer.is_edited if isinstance(proposer, EditProposer) else never_edited
            self._credit = Credit(pool.seed_candidate, code, reflective.undecided, scale, most, each, edits)
            self._admission = AsChildrenCome(joined, alone, lambda: self._joins, self._calls_alone)
        hears = None if self._credit is None else self._credit.saw
        self._evaluations = Evaluations(run, program, pool, optimizer.workflow, hears)
        self._integrations: Integrations | None = None
        if reflective is not None:
            lm = optimizer.reflection_lm
            self._integrations = Integrations(
                run, pool, self._evaluations, reflective, integrating, lm, code, most, each
            )
        self._validating: set[int] = set()
        self._validation_calls = 0
        self._is_last = False
        self._timely: int | None = None
        """The step that validates the last head before ``max_seconds``."""
        self._timely_failed = False
        self._took = deque[float](maxlen=TIMED_VALIDATIONS)
        """Seconds of the last validations."""
        self._seeded_at = (0, 0.0)
        """Metric calls and their seconds in slots when the seed's scores were there; a cache may have had those."""
        self._improved_at = 0
        """Metric calls that were spent when the pool's best candidate became better last."""
        self._ends_with_perfect = (
            not run.lockstep
            and optimizer.skip_perfect_score
            and pool.frontier_type == "instance"  # a frontier of objectives can still grow
            and not optimizer.gepa_kwargs.get("stop_callbacks")  # whoever gives stoppers says when a run ends
        )
        """A candidate with the perfect score on every validation example ends the run; dspy.GEPA goes on, and asks its
        LM's cache, since all of its steps start from that candidate. Ours start from variants, which are paid."""
        self._is_perfect = False
        """There is such a candidate."""
        self._asking = self._counts_from = 0
        share = 1.0 if reflective is None else reflective.frontier_share
        self._selection = Selection(pool, self._credit, share, self._unanswerable)
        self._seeded = anyio.Event()
        run.used_shares.append(lambda: max(self._limits().values(), default=0.0))
        self._reflections = 0
        self._screening = Screening()
        self._reflection_lm = optimizer.reflection_lm
        self.proposals = 0
        """Children that the reflection wrote."""

    @property
    def reflection_calls(self) -> int:
        """Reflections and integrations asked for."""
        return self._reflections + self.integration_calls

    @property
    def integration_calls(self) -> int:
        """LM calls of integrations."""
        return 0 if self._integrations is None else self._integrations.calls

    @property
    def discarded_share(self) -> float:
        """Of the children that the staleness policy looked at, the share that it discarded."""
        return self._run.policy_decisions["discard"] / max(1, self._run.policy_decisions.total())

    def changes(self) -> list[ChangeRecord]:
        """What reflections added to the head, and what it is worth."""
        return [] if self._credit is None else self._credit.records()

    async def evolve(self) -> None:
        """Run to the end; the pool holds the result.

        Raises:
            RunAbortedError: the provider refused for good, or the seed could not be validated.
            Exception: what a selector, a stopper or a user's strategy raised.
        """
        run, pool = self._run, self._pool
        is_seeded = await pool.write(pool.start)
        if run.journal is not None:
            await pool.write(resume.take_up, run.journal, pool, is_seeded)
            run.budget.spent = run.journal.spent
            if self._credit is not None:
                await pool.write(resume.restore_credit, run.journal, self._credit)
        if is_seeded:
            run.budget.spent = self._improved_at = pool.state.total_num_evals
            gepa_logger.info(f"Going on: {run.budget.spent} metric calls of earlier sessions are counted.")
            for scores in pool.state.prog_candidate_val_subscores:
                self._evaluations.order.record(scores)
                self._evaluations.saw(max(scores.values(), default=float("-inf")))
            await pool.write(self._note_perfect)
            self._seed_is_there()
            goes_on = run.journal is not None and bool(run.journal.unfinished)
            if not goes_on and await pool.write(pool.should_stop):  # gepa asks its stoppers between steps
                self._stop()
        else:
            paid = 0 if run.journal is None else run.journal.paid[BEFORE_STEPS]
            pays = run.budget.reserve(len(self._evaluations.seed_examples()) - paid)
            if run.lockstep or has_foreign(pool.parts):  # a strategy of the user's may look at the seed's scores
                await self._seed(pays)
            else:
                await run.run_in_background(lambda: self._seed(pays))
        last = -1 if run.journal is None else run.journal.last_step
        await run.evolve(
            self.step,
            self._admission,
            calls_per_step=self._most_calls,
            reserve=self._reserve,
            stop_reason=self._may_open,
            on_end=self._ended,
            first_number=max(pool.state.i, last) + 1,
            watchers=[] if self._integrations is None else [self._integrations.watch],
        )
        self._evaluations.set_aside.refund()
        if self._credit is not None:
            await pool.write(self._keep, self._credit)

    async def step(self, step: Step) -> End:
        """One step. A part of it that finds nothing to go on with ends the step by raising :class:`StepEnded`."""
        given = await self._pool.write(self._given, step)
        if given is not None:
            self._run.begin(step, self._pool.version, math.inf, selection=[])
            heads = await self._pool.write(self._takes, step, *given)
            return await self.validated(step, await self._consolidated(step, heads, is_last=given[1] is not None))
        work = await self.select(step)
        if isinstance(work, Crossover):
            found = await self.screen_crossover(step, work)
        else:
            parents = await self.rollout(step, work)
            try:
                found = await self.children(step, parents)
            except StepEnded:
                found = await self._pool.write(self._head_to_validate, step, 0.01)
                if not found:
                    raise
                found = await self._consolidated(step, found)
        return await self.validated(step, found)

    async def validated(self, step: Step, found: Sequence[Screened]) -> End:
        """The rest of a step: validate and commit what was found."""
        try:
            self._end_if_perfect()
            self._run.mark_child_made(step)
            began = self._run.clock()
            done = await self._evaluations.validate(step, found, is_last=step.number == self._timely)
            self._took.append(self._run.clock() - began)
            done.sort(key=lambda one: one.proposal.tag != CONSOLIDATION)  # gepa returns the first of equal candidates
            return await self.commit(step, done)
        except (StepEnded, RolloutUnresolvedError):
            await self._pool.write(self._not_validated, step)
            raise
        finally:
            self._validating.discard(step.number)

    async def children(self, step: Step, parents: list[Parent]) -> list[Screened]:
        """What the step's reflections make of its parents, as far as it is to be validated by itself.

        Raises:
            StepEnded: nothing is.
        """
        self._end_if_perfect()
        credit = self._credit
        if credit is None:
            return await self.screen(step, await self.propose(step, parents))
        self._asking += 1
        try:
            may_ask = self._screening.children_help or await self._pool.write(credit.may_ask, self._asking - 1)
            if step.recorded is None and not may_ask:
                raise StepEnded(EndKind.REJECTED, ONLY_TESTED)
            return await self.screen(step, await self.propose(step, parents))
        finally:
            self._asking -= 1

    def _end_if_perfect(self) -> None:
        """End a step that cannot find anything better.

        Raises:
            StepEnded: the best candidate has the perfect score on every validation example.
        """
        if self._is_perfect:
            raise StepEnded(EndKind.REJECTED, "the best candidate has the perfect score on every validation example")

    def _note_perfect(self) -> None:
        """Find out whether the best candidate can still be beaten; in the pool's writer."""
        self._is_perfect = self._ends_with_perfect and self._pool.is_perfect(self._evaluations.highest)

    async def _consolidated(self, step: Step, heads: list[Screened], is_last: bool = False) -> list[Screened]:
        """A head that is about to be validated, or the same written anew by the reflection LM, or both.

        Before the last validation the new text stands beside the head. Before, it takes the head's place where this has
        grown long; the new text is what further edits are put on, if its validation is not worse.

        Args:
            heads: the head.
            is_last: whether it is the last head of the run.
        """
        credit, run = self._credit, self._run
        if credit is None or not heads or not self._asks_for_edits or (is_last and step.number == self._timely):
            return heads
        most, texts = self._max_reflection_calls, heads[0].proposal.candidate
        grown = await self._pool.write(credit.grown, texts, LEAST_EDITS if is_last else GROWN_EDITS)
        if not grown or (most is not None and self.reflection_calls >= most):
            return heads
        inputs = {"texts": {name: texts[name] for name in grown}, "effects": grown}
        record = ReplyText(hash_of({"consolidate": json.dumps(inputs["texts"], sort_keys=True)}))
        try:
            asked = await run.call_module(
                "integrate", step, Consolidation(), inputs, lm=self._reflection_lm, read=clean_texts, record=record
            )
        except RolloutUnresolvedError:
            return heads
        self._reflections += asked.calls
        clean = {**texts, **(asked.answer or {})}
        if clean == texts or is_too_long(clean, self._most_characters, self._most_each, texts):
            return heads
        anew = Screened(replace(heads[0].proposal, candidate=clean, tag=CONSOLIDATION))
        return [*heads, anew] if is_last else [anew]

    def _due(self, least: float, last: bool = False) -> Head | None:
        """The head, where it is worth a validation now; in the pool's writer, or where nothing else is under way.

        Args:
            least: that it has to gain, as a share of the range of scores.
            last: whatever share of the metric calls validations have had.
        """
        credit, pool = self._credit, self._pool
        if credit is None or not pool.seed_confirmed:
            return None
        if not last and not self._may_validate():
            return None
        head = credit.head()
        return None if head.gain <= least * credit.scale or head.candidate in pool.state.program_candidates else head

    def _due_last(self) -> Head | None:
        """The head, where it is better than what was validated and time has not ended the run with its validation."""
        return None if self._ends_with_head else self._due(0.0, last=True)

    @property
    def _ends_with_head(self) -> bool:
        """Whether the last head's validation before ``max_seconds`` has begun, and has not failed."""
        return self._timely is not None and not self._timely_failed

    def _seconds_left(self) -> float:
        run = self._run
        return math.inf if run.max_seconds is None else run.clock.began + run.max_seconds - run.clock()

    def _validation_seconds(self) -> float:
        """What a validation takes: as the last ones did, and not less than its rollouts in all slots; those of a
        session before took another time, and a cache's none."""
        (spent, seconds), slots = self._seeded_at, self._run.scheduler.limit
        each = (self._served_seconds() - seconds) / max(1, self._run.budget.spent - spent)
        return max(median_low(self._took) if self._took else 0.0, each * len(self._pool.loader) / max(1, slots))

    def _served_seconds(self) -> float:
        """That rollouts had a slot."""
        stages = self._run.scheduler.statistics().stages
        return sum(one.served_seconds for name, one in stages.items() if name not in REFLECTION_STAGES)

    def _ends_soon(self) -> bool:
        """Whether the time that is left is just what a last head's validation takes, and it has not begun."""
        run = self._run
        if run.max_seconds is None or run.lockstep or self._timely is not None:
            return False
        return self._seconds_left() <= min(LAST_MARGIN * self._validation_seconds(), LAST_SHARE * run.max_seconds)

    def _may_validate(self) -> bool:
        """Whether another head's validation keeps to its share of the metric calls."""
        return self._validation_calls + len(self._pool.loader) <= HEADS_SHARE * self._run.budget.spent

    def _head_to_validate(self, step: Step, least: float) -> list[Screened]:
        """The head, where it is worth a validation now; see :meth:`_due`."""
        credit, head = self._credit, self._due(least)
        if credit is None or head is None:
            return []
        credit.tries(step.number, head)
        self._keep(credit)
        return self._begin_validation(step, head.candidate, credit)

    def _given(self, step: Step) -> tuple[Texts, Head | None] | None:
        """What a step validates without having made it: the last head, the next candidate to begin from; where it runs
        again, that or the head that it was about to validate.

        Raises:
            StepEnded: the last head is worth no validation any more.
        """
        journal, credit = self._run.journal, self._credit
        left = [one for one in self._initial if one not in self._pool.state.program_candidates]
        if step.recorded is None:
            timely = self._ends_soon()
            head = self._due_last() if self._is_last or timely else None
            if head is None and self._is_last:
                raise StepEnded(EndKind.REJECTED, "the last head is worth no validation any more")
            if head is None and not left:
                return None
            self._pool.begin_step(step)
            if head is None:
                return left[0], None
            if timely:
                self._timely = step.number
            return head.candidate, head
        kept = None if journal is None else journal.journal.get_state(_head_of(step))
        candidate = None if journal is None or kept is None else dict(journal.texts[kept])
        if candidate is None or (credit is None and candidate not in left):
            return None
        self._selection.runs_again(step, False)
        return candidate, None

    def _takes(self, step: Step, candidate: Texts, head: Head | None) -> list[Screened]:
        """Begin the validation of what a step was given."""
        credit = self._credit
        if head is None and candidate in self._initial:
            self._initial.remove(candidate)
            return self._to_validate(step, candidate, 0, "initial")
        assert credit is not None
        if head is not None:
            credit.tries(step.number, head)
            self._keep(credit)
        return self._begin_validation(step, candidate, credit)

    def _begin_validation(self, step: Step, head: Texts, credit: Credit) -> list[Screened]:
        self._validating.add(step.number)
        self._validation_calls += len(self._pool.loader)
        return self._to_validate(step, head, credit.parent, "head")

    def _to_validate(self, step: Step, candidate: Texts, parent: int, tag: str) -> list[Screened]:
        if self._run.journal is not None:
            self._run.journal.journal.set_state(_head_of(step), self._run.journal.record_candidate(candidate))
        step.record_version(self._pool.version, math.inf)  # every later step builds on what it finds: it goes first
        proposal = Proposal(
            candidate=dict(candidate), parent_program_ids=[parent], subsample_indices=[], subsample_scores_before=[],
            subsample_scores_after=[], tag=tag, metadata={},
        )  # fmt: skip
        return [Screened(proposal)]

    def _keep(self, credit: Credit) -> None:
        """Write the changes down, and what they stand on."""
        if self._run.journal is not None:
            self._run.journal.journal.set_state("credit", credit.kept())

    def _not_validated(self, step: Step) -> None:
        """A head's validation came to nothing: it may be tried again."""
        if self._credit is not None and step.number in self._validating:
            self._credit.gives_up(step.number)
            self._keep(self._credit)
            self._timely_failed |= step.number == self._timely

    def _learn(self, step: Step, commits: Sequence[Commit], clean: Collection[int] = ()) -> None:
        """Changes go onto the best candidate there is: the head that was validated, or one that beats it."""
        credit, pool = self._credit, self._pool
        if credit is None:
            return
        for one in commits:
            texts, best = pool.state.program_candidates[one.candidate], pool.score_of(credit.parent)
            if one.score >= one.best_score:
                self._improved_at = self._run.budget.spent
            if not credit.is_made_of_changes(texts):
                is_clean = one.candidate in clean
                if one.score >= best if is_clean else one.score > best + max(0.0, credit.head().gain):
                    credit.stand_on(texts, one.candidate)
            elif one.score >= best:
                credit.validated(texts, one.candidate)
        self._keep(credit)

    async def select(self, step: Step) -> Selected | Crossover:
        """Choose parents and minibatches, or two candidates to cross; of an interrupted run, what was chosen then."""
        run, pool, selection = self._run, self._pool, None
        if step.recorded is None:
            version, value, work = await pool.write(self._selection.select, step)
            if run.journal is not None:
                selection = resume.selection_of(run.journal, work)
        else:
            assert run.journal is not None
            work = await pool.write(resume.selected_again, run.journal, pool, step.recorded)
            await pool.write(self._selection.runs_again, step, isinstance(work, Crossover))
            version, value = step.version, await pool.write(self._selection.parent_score, work)
        run.begin(step, version, value, selection)
        if isinstance(work, Crossover):
            return work
        tasks = list(work.tasks)
        self._minibatch = max([self._minibatch, *(len(task.minibatch_ids) for task in tasks)])
        while step.recorded is None and tasks and not step.reservation.cover(len(tasks) * self._most_calls):
            tasks.pop()  # a sampling strategy asked for more than the budget holds
        return Selected(tuple(tasks), work.bases[: len(tasks)])

    async def rollout(self, step: Step, work: Selected) -> list[Parent]:
        """Run each task's parent on its minibatch, with traces."""
        pool, tasks = self._pool, work.tasks
        unpaid = sum(
            self._evaluations.unpaid(step, one.parent_candidate, one.minibatch_ids, train=True, reflected=True)
            for one in tasks
        )
        if not tasks or (step.recorded is not None and not step.reservation.cover(unpaid)):
            raise StepEnded(EndKind.DISCARDED, "there is nothing to work on within the budget")
        await pool.write(pool.parents_start, step, tasks)
        unique = {task_key(task): task for task in tasks}
        whole = step.reservation.cover(sum(len(one.minibatch_ids) for one in unique.values()))
        done = await gather([lambda t=task: self._evaluations.parent(step, t, whole) for task in unique.values()])
        by_key = dict(zip(unique, done, strict=True))
        parents = [
            Parent(index, task, *by_key[task_key(task)], base)
            for index, (task, base) in enumerate(zip(tasks, work.bases, strict=True))
        ]
        await pool.write(pool.parents_end, step, tasks, [one.evaluation for one in parents])
        self._look(step, "before_propose", work.bases)
        return parents

    async def propose(self, step: Step, parents: Sequence[Parent]) -> list[Child]:
        """Let the reflection LM write a child for each task that leaves something to improve."""
        prepared = [await self._prepared(step, parent) for parent in parents]
        if self._run.lockstep:
            written = [await self._reflected(step, one) for one in prepared]
        else:
            written = await gather([lambda one=one: self._reflected(step, one) for one in prepared])
        children = [one for one in written if isinstance(one, Child)]
        for child in children:
            await self._pool.write(self._pool.proposed, step, child.texts)
            self.proposals += 1
        if self._credit is not None and children:
            await self._pool.write(self._sees, step, children)
        await self._pool.write(self._pool.keep_strategies)
        if not children:
            ends = [one for one in written if isinstance(one, End)]
            kind = EndKind.FAILED if any(one.kind is EndKind.FAILED for one in ends) else EndKind.REJECTED
            raise StepEnded(kind, "; ".join(dict.fromkeys(one.reason for one in ends)))
        if self._integrations is not None:
            children = [one for one in children if one.candidate != one.parent.task.parent_candidate]
            if not children:
                raise StepEnded(EndKind.REJECTED, "the reflection changed nothing")
        if all(is_too_long(one.candidate, self._most_characters) for one in children):
            raise StepEnded(EndKind.REJECTED, f"longer than max_candidate_characters={self._most_characters}")
        children = [one for one in children if not is_too_long(one.candidate, self._most_characters)]
        self._look(step, "after_propose", [one.parent.base for one in children])
        return children

    def _sees(self, step: Step, children: Sequence[Child]) -> None:
        assert self._credit is not None
        self._credit.sees(step.number, [(one.parent.task.parent_candidate, one.candidate) for one in children])
        self._keep(self._credit)

    async def _prepared(self, step: Step, parent: Parent) -> _Prepared | End:
        """What reflection reads of a parent, or why there is nothing to reflect on."""
        pool, task, evaluation = self._pool, parent.task, parent.evaluation
        journal = self._run.journal
        if journal is not None and journal.find_reply(step.number, "propose", str(parent.index)) is not None:
            return _Prepared(parent, [], {}, is_paid=True)
        reason = await pool.write(pool.nothing_to_improve, step, task, evaluation)
        if reason is not None:  # without a trajectory nothing was paid, and such steps must not go on for ever
            return End(EndKind.REJECTED if evaluation.trajectories else EndKind.FAILED, NOTHING.get(reason, reason))
        components = await pool.write(pool.choose_components, step, task, evaluation)
        rng = None if self._run.lockstep else step.rng
        try:
            # Feedback comes from the metric, which may ask an LM: it takes a slot.
            ask = partial(self._run.rollouts.request, "propose", step)
            dataset = await self._program.reflection.dataset(task.parent_candidate, evaluation, components, rng, ask)
        except FlashEvolveError:
            raise
        except Exception as error:
            if error is self._program.mistakes.error:
                raise
            self._log(f"Iteration {step.number + 1}: Exception building reflective dataset: {error}", error)
            return End(EndKind.FAILED, f"no reflective dataset: {shortened(error)}")
        await pool.write(pool.reflection_starts, step, task, components, dataset)
        return _Prepared(parent, components, dataset)

    async def _reflected(self, step: Step, one: _Prepared | End) -> Child | End:
        """The child that a reflection writes.

        Raises:
            AssertionError: a text for a component that the parent does not have (as gepa).
        """
        if isinstance(one, End):
            return one
        parent_texts, record, reason = one.parent.task.parent_candidate, _ProposalRecord(one), ""
        for attempt in range(ATTEMPTS):
            self._reflections += not one.is_paid
            try:
                made = await self._run.rollouts.request(
                    "propose",
                    step,
                    lambda: self._program.reflection.propose(parent_texts, one.dataset, one.components),
                    lambda reflection: RequestCost(reflection.tokens, reflection.cost_dollars),
                    record,
                )
            except FlashEvolveError:
                raise
            except Exception as error:
                if error is self._program.mistakes.error:
                    raise
                self._log(f"Reflection failed (attempt {attempt + 1} of {ATTEMPTS}): {shortened(error)}", error)
                reason = f"reflection failed: {shortened(error)}"
                continue
            if not made.texts:
                return End(EndKind.REJECTED, "reflection returned no text")
            for name in made.texts:
                assert name in parent_texts, f"{name} missing in candidate"
            return Child(one.parent, made.texts, record.feedback)
        return End(EndKind.FAILED, reason)

    async def screen(self, step: Step, children: Sequence[Child]) -> list[Screened]:
        """Run the children on their parents' minibatches, and let gepa's criterion decide."""
        pool = self._pool
        if self._credit is not None and step.recorded is None and not self._screening.is_needed(step.number):
            children = [one for one in children if not await pool.write(self._joins_head, step, one)]
            if not children:
                raise StepEnded(EndKind.INTEGRATED, "its edits are in the head, as those of nearly all children before")
        calls = sum(
            self._evaluations.unpaid(step, one.candidate, one.parent.task.minibatch_ids, train=True) for one in children
        )
        if not step.reservation.cover(calls):
            raise StepEnded(EndKind.DISCARDED, f"no budget is left for a screen of {calls}")
        await pool.write(pool.children_start, step, children)
        screened = [one for one in await gather([lambda c=child: self._screened(step, c) for child in children]) if one]
        if not screened:
            self._screening.record(passed=False)
            await pool.write(pool.count_calls)
            raise StepEnded(EndKind.REJECTED, "no child could pass its screen any more")
        passed = await pool.write(pool.children_end, step, screened)
        self._screening.record(passed=bool(passed))
        if not passed:
            raise StepEnded(EndKind.REJECTED, "no child passed its screen")
        if self._credit is not None:
            passed = [
                one for one in passed if not await pool.write(self._joins_head, step, *one) or self._doubts_head(step)
            ]
            if not passed:
                raise StepEnded(EndKind.INTEGRATED, "its changes are in the head")
        if self._look(step, "after_screen", [child.parent.base for child, _ in passed]):
            assert self._integrations is not None
            self._run.mark_child_made(step)
            integrated = await self._integrations.take_in(step, passed)
            if integrated is not None:
                return [integrated]
        step.record_version(step.version, await pool.write(pool.expected_score, [one for _, one in passed]))
        return [Screened(one, child.parent.base) for child, one in passed]

    def _doubts_head(self, step: Step) -> bool:
        """Whether a step validates its own child, though its changes are in the head: heads bring nothing of late."""
        spent = self._run.budget.spent
        since = spent - self._improved_at
        doubts = since > DOUBTED * max(spent, PATIENCE * len(self._pool.loader)) and step.number % ALONE_EVERY == 0
        stages = self._run.scheduler.statistics().stages
        requests = sum(stages[name].waiting + stages[name].running for name in ("prefix", "validate") if name in stages)
        validations = 2 + requests / len(self._pool.loader)  # its own, the last head's, and what shares the slots
        return doubts and self._seconds_left() > validations * self._validation_seconds()

    def _joins_head(self, step: Step, child: Child, proposal: Proposal | None = None) -> bool:
        """Put a child's changes to the others, where it can be taken apart; in the pool's writer."""
        assert self._credit is not None
        ids = [] if proposal is None else proposal.subsample_indices or []
        scores = [] if proposal is None else proposal.subsample_scores_after or []
        is_taken = self._credit.take(
            step.number, child.parent.task.parent_candidate, child.candidate, self._evaluations.train_split,
            {id_text(one): score for one, score in zip(ids, scores, strict=True)},
        )  # fmt: skip
        if is_taken:
            self._keep(self._credit)
        return is_taken

    async def _screened(self, step: Step, child: Child) -> tuple[Child, Batch] | None:
        """A child on its parent's minibatch; None where it was given up, since it could not pass any more."""
        parent, task = child.parent, child.parent.task
        whole: Batch | None = parent.evaluation if parent.late is None else None
        gate = self._evaluations.gate(len(task.minibatch_ids), lambda: None if whole is None else sum(whole.scores))

        async def rest_of_parent() -> Batch:
            nonlocal whole
            whole = parent.evaluation if parent.late is None else await parent.late()
            return whole

        async def evaluated() -> Batch:
            return await self._evaluations.minibatch(
                "screen", step, child.candidate, task.minibatch_ids, task.minibatch, watch=gate
            )

        try:
            full, batch = await gather([rest_of_parent, evaluated])
        except NoLongerWantedError:
            assert gate is not None
            assert whole is not None
            known = replace(child, parent=replace(parent, evaluation=whole))
            await self._pool.write(self._pool.give_up, step, known.proposal(step), gate.seen, len(task.minibatch_ids))
            return None
        return replace(child, parent=replace(parent, evaluation=full, late=None)), batch

    async def screen_crossover(self, step: Step, plan: Crossover) -> list[Screened]:
        """Run the child of two parents on validation examples that both were run on: gepa's merge."""
        pool = self._pool
        if is_too_long(plan.candidate, self._most_characters):
            raise StepEnded(EndKind.REJECTED, f"longer than max_candidate_characters={self._most_characters}")
        await pool.write(pool.crossover_starts, step, plan)
        lookup = await pool.write(pool.lookup, plan.candidate, plan.ids)
        calls = self._evaluations.unpaid(step, plan.candidate, lookup.missing, traced=False)
        if not step.reservation.cover(calls):
            raise StepEnded(EndKind.DISCARDED, f"no budget is left for a screen of {calls}")
        fresh = await self._evaluations.validation("screen", step, plan.candidate, lookup.missing, traced=False)
        proposal = await pool.write(pool.crossover_ended, step, plan, lookup, fresh)
        if proposal is None:
            raise StepEnded(EndKind.REJECTED, "the merge is worse than one of its parents")
        self._look(step, "after_screen", (), integrates=False)
        step.record_version(step.version, await pool.write(lambda: max(map(pool.score_of, plan.parents))))
        return [Screened(proposal)]

    async def commit(self, step: Step, work: Sequence[Validated]) -> End:
        """Add the candidates to the pool, one after the other: the one writer."""
        step.mark_blocked_by(BEFORE_STEPS)
        await self._seeded.wait()
        step.mark_blocked_by(None)
        try:
            self._look(step, "before_commit", [one.base for one in work])
        except StepEnded:
            await self._pool.write(self._pool.withdraw, [one.key for one in work])
            raise
        commits: list[Commit] = []
        with anyio.CancelScope(shield=True):  # what enters the pool is told and counted, even if the run ends meanwhile
            commits = await self._pool.write(self._pool.commit, step, work)
            await self._pool.write(self._learn, step, commits)
            await self._pool.write(self._note_perfect)

            clean = [one.candidate for one, its in zip(commits, work, strict=True) if its.proposal.tag == CONSOLIDATION]
            await self._pool.write(self._learn, step, commits, clean)
            for one in commits:
                self._run.commit(step, **asdict(one))
        return End(EndKind.COMMITTED, f"candidate {', '.join(str(one.candidate) for one in commits)}")

    # The staleness policy.

    def _look(self, step: Step, place: Place, bases: Collection[int | None], *, integrates: bool = True) -> bool:
        """Ask the policy, where it wants to be asked, what becomes of a step; gaps are recorded at every place.

        Args:
            bases: the speculative candidates that it was made from.
            integrates: False for crossovers, which stand on two validated candidates: they are admitted instead.

        Returns:
            Whether to integrate.

        Raises:
            StepEnded: it is discarded.
        """
        run, pool, policy = self._run, self._pool, self._policy
        if place != "before_commit":
            run.gaps[place][pool.version - step.version] += 1
        if place not in policy.looks:
            return False
        orphaned = any(base in pool.speculative.fallen for base in bases)
        look = Look(place, step.version, orphaned)
        decision = run.ask_policy(step, policy, look, pool.version, integrates=integrates)
        if isinstance(decision, Discard):
            raise StepEnded(EndKind.DISCARDED, f"stale: {decision.reason}")
        joins = isinstance(decision, Integrate) and integrates
        if joins and (self._integrations is None or place != "after_screen"):
            raise ConfigurationError(f"{policy!r} wants to integrate {place}, where there is no integration.")
        return joins

    # The budget, and how steps end.

    @property
    def _most_calls(self) -> int:
        """Metric calls that are set aside for one task: the most that it can cost.

        Where changes are tested, validations are paid apart.
        """
        if self._credit is not None:
            return 2 * self._minibatch
        return self._calls_alone()

    @property
    def _joins(self) -> bool | None:
        """Whether what steps find comes together in one head; None where that is not known yet."""
        if self._credit is None:
            return False
        return (
            self._credit.is_of_use if self._credit.is_of_use is not None else (True if self._asks_for_edits else None)
        )

    def _reserve(self) -> Reservation | None:
        """Set a step's calls aside, and beside them a validation for the last head where changes come together."""
        aside, budget = self._evaluations.set_aside, self._run.budget
        pays = None
        if self._spent_up() is None:
            if not self._joins or aside.extend(max(0, self._kept_aside - aside.open)):
                pays = budget.reserve(self._most_calls) if self._pays_alone else None
            if pays is None and not self._run.live and aside.open and self._due_last() is None:
                aside.refund()  # nothing was found that is worth a last validation: its calls pay further steps
                pays = budget.reserve(self._most_calls) if self._pays_alone else None
            if pays is not None:
                self._is_last = False  # the refunded calls pay an ordinary step
            if pays is not None or self._run.live:
                return pays
        self._is_last = not self._is_last and not self._run.live and self._due_last() is not None
        return budget.reserve(0) if self._is_last else None

    @property
    def _kept_aside(self) -> int:
        """Metric calls that are kept for the end: a second validation where there is something to write anew."""
        validation, limit, credit = len(self._pool.loader), self._run.budget.limit, self._credit
        is_grown = self._asks_for_edits and credit is not None and credit.head_changes >= LEAST_EDITS
        return validation * (2 if is_grown and limit is not None and limit >= ROOM_FOR_TWO * validation else 1)

    @property
    def _pays_alone(self) -> bool:
        """Whether what is left pays a step with a validation of its own, where its child may need one."""
        left = self._run.budget.left
        return bool(self._joins) or left is None or left >= self._calls_alone()

    def _calls_alone(self) -> int:
        """The most that a step costs whose child stands for itself."""
        return 2 * self._minibatch + len(self._pool.loader)

    def _may_open(self) -> str | None:
        """Why no further step may start; None while one may, or the last head is to be validated."""
        if self._is_perfect:
            return "the best candidate has the perfect score on every validation example: nothing can be better"
        aside = self._evaluations.set_aside
        if aside.open and self._joins is False and self._due_last() is None:
            aside.refund()  # for a head that is not there
        reason = self._spent_up()
        waits = self._run.live or (not self._is_last and self._due_last() is not None)
        return None if reason is None or (self._credit is not None and waits) else reason

    def _spent_up(self) -> str | None:
        run, budget = self._run, self._run.budget
        if self._ends_with_head:
            return f"max_seconds={run.max_seconds:g} is nearly over, and the last head is validated"
        if self._seeded.is_set() and not (run.is_busy or run.lockstep or self._pays_alone):
            return (
                f"max_metric_calls={budget.limit}: the {budget.left} calls left cannot pay a step, which may cost "
                f"{self._calls_alone()}"
            )
        return next((f"{limit} is spent" for limit, share in self._limits().items() if share >= 1), None)

    def _limits(self) -> dict[str, float]:
        """What bounds the run beside time and metric calls -> the share of it that is used."""
        run, journal, found = self._run, self._run.journal, dict[str, float]()
        if (most := self._max_reflection_calls) is not None:
            calls = self.reflection_calls + (0 if journal is None else journal.requests_before)
            found[f"max_reflection_calls={most}"] = calls / most
        if (most := self._max_cost) is not None:
            cost = run.dollars + (0.0 if journal is None else journal.dollars_before)
            found[f"max_cost={most:g} dollars"] = cost / most
        return found

    async def _seed(self, pays: Reservation | None) -> None:
        began = self._run.clock()
        await self._evaluations.seed(pays)
        self._took.append(self._run.clock() - began)
        await self._pool.write(self._pool.count_calls)
        if await self._pool.write(self._pool.should_stop):
            self._stop()
        await self._pool.write(self._note_perfect)
        self._seed_is_there()

    def _seed_is_there(self) -> None:
        seed, best = self._pool.score_of(0), self._pool.best_score()
        self._run.bus.emit(SeedValidated(self._run.clock(), seed, seed if best is None else best))
        self._seeded_at = (self._run.budget.spent, self._served_seconds())
        self._seeded.set()

    async def _ended(self, step: Step, end: End) -> None:
        pool = self._pool
        await pool.write(self._selection.ended, step)
        committed = end.kind is EndKind.COMMITTED
        # Steps overlap: to who counts them, those are iterations that came one after the other, or were committed.
        counts = committed or (step.number >= self._counts_from and (self._credit is None or self._may_validate()))
        if counts:
            self._counts_from = max(self._run.live, default=step.number) + 1
        if await pool.write(pool.end_step, step, committed, counts or self._run.lockstep):
            self._stop()
        self.track(step.number + 1, gap=pool.version - step.version - committed)

    def track(self, iteration: int, **more: float) -> None:
        """Send the figures of the run so far to the tracker, where there is one.

        Args:
            more: figures beside those of :func:`figures`.
        """
        run, tracker = self._run, self._pool.parts.tracker
        if tracker.thread is not None:
            busy = run.scheduler.statistics().busy
            tracker.log_metrics({**figures(run.statistics(), busy, self.integration_calls), **more}, step=iteration)

    def _stop(self) -> None:
        """A stopper said stop: of the user's, or gepa's for the budget."""
        stopper = self._pool.parts.stopper
        self._run.stop(stopper.said, "finished" if stopper.budget_spent else "stopped")

    def _unanswerable(self, candidate: Texts) -> set[Any]:
        """Training examples that a candidate's minibatches avoid; in lockstep they are dspy.GEPA's."""
        if self._run.lockstep:
            return set()
        return self._run.rollouts.unanswered_examples(hash_of(candidate), self._evaluations.train_split)

    def _log(self, message: str, error: Exception) -> None:
        gepa_logger.info(message)
        if not isinstance(error, AdapterParseError):  # a reply that cannot be read is no fault of any line of code
            gepa_logger.info(traceback.format_exc())


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A task that is ready to be reflected on; one whose child was written before an interruption is paid."""

    parent: Parent
    components: list[str]
    dataset: Any
    is_paid: bool = False


class _ProposalRecord:
    """How a proposal is written down and read again, with the feedback that it was made from."""

    def __init__(self, one: _Prepared) -> None:
        self.position = str(one.parent.index)
        rows = [record for records in one.dataset.values() for record in records]
        # What the metric said, one text an example; dspy's adapter keeps it under "Feedback".
        self.feedback = tuple(dict.fromkeys(str(record["Feedback"]) for record in rows if record.get("Feedback")))

    def write(self, answer: Reflection) -> str | None:
        return json.dumps({"texts": answer.texts, "feedback": self.feedback}) if answer.texts else None

    def read(self, text: str) -> Reflection:
        kept = json.loads(text)
        self.feedback = tuple(kept["feedback"])
        return Reflection(kept["texts"], 0)


def shortened(error: Exception) -> str:
    """An error in one line of at most `SHOWN_CHARACTERS`: one of dspy's adapters holds the whole reply.

    >>> shortened(ValueError("no\\nfield"))
    'no field'
    """
    line = " ".join(str(error).split())
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]}..."


def clean_texts(answer: Any) -> dict[str, str]:
    """The texts that a consolidation wrote."""
    return checked_texts(dict(answer.texts))


def _head_of(step: Step) -> str:
    """Under this the journal has the head, or the candidate to begin from, that a step validates."""
    return f"head of step {step.number}"


def admission_of(workflow: Workflow, slots: int, burst: int) -> tuple[LiveSteps, LiveSteps]:
    """When a step may start, where children come together in a head, and where each stands for itself: as many as the
    workflow says, else a bound that follows from slots and budget.

    Three quarters of the slots live, three in sixteen of them at work: a working step keeps one to three slots busy, a
    validation as many as it has examples. More steps make more proposals a minute and fewer generations. Where children
    come together all steps are short, and each does one step's work.
    """
    if workflow.live_steps is not None:
        given = LiveSteps(workflow.live_steps, strict=True)
        return given, given
    live, working = max(2, math.ceil(3 * slots / 4)), max(2, math.ceil(3 * slots / 16))
    return (
        LiveSteps(live, None, GENERATIONS_OF_CHANGES, burst, slots),
        LiveSteps(live, working, GENERATIONS, burst, slots),
    )


@dataclass(frozen=True, slots=True)
class AsChildrenCome:
    """Admission by whether what steps find comes together.

    Where each child stands for itself, steps that ran at once have made siblings of which one is used, and each that
    passes its screen costs a validation. While that is not known, a run with a budget of metric calls has one step more
    than have ended.

    Args:
        joined, alone: see :func:`admission_of`.
        joins: whether children come together; None where that is not known yet.
        calls_alone: what a step costs at most where they do not.
    """

    joined: LiveSteps
    alone: LiveSteps
    joins: Callable[[], bool | None]
    calls_alone: Callable[[], int]

    def admits(self, load: Load) -> bool:
        """See :meth:`Admission.admits`."""
        joins = self.joins()
        if joins is False:
            return self.alone.admits(replace(load, calls_per_step=max(load.calls_per_step, self.calls_alone())))
        if joins is None and load.calls_left is not None and not self.joined.strict:
            return replace(self.joined, limit=min(self.joined.limit, 1 + load.ended)).admits(load)
        return self.joined.admits(load)
