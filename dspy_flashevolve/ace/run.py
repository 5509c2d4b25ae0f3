"""One run of AsyncACE: a sample's way from the data to the playbook, and snapshots that are validated beside it.

.. code-block:: text

    sample -> attempt -> reflect -> curate -> apply (the one writer) -> end
                 ^          |          |        ^
                 +- wrong --+          +--------+ reconcile: stale additions, where the policy says so

Source: ACE (arXiv 2510.04618) section 3; the queue of operations and staleness follow FlashEvolve (arXiv 2605.08520).
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import anyio
from dspy.primitives.module import Module

from dspy_flashevolve.ace.applying import PlaybookWriter
from dspy_flashevolve.ace.arguments import attribute_of, duplicates_of, policy_of
from dspy_flashevolve.ace.learner import Learner, Lesson, Sample, with_playbook
from dspy_flashevolve.ace.operations import Add, Operation, Problem, Remove
from dspy_flashevolve.ace.playbook import Playbook
from dspy_flashevolve.ace.sampling import Epochs, Windows, as_async
from dspy_flashevolve.ace.similarity import same_words, without_repeats
from dspy_flashevolve.ace.snapshots import Scored, Snapshots, ValidationCalls
from dspy_flashevolve.engine.admission import Load
from dspy_flashevolve.engine.budget import Reservation
from dspy_flashevolve.engine.errors import RolloutUnresolvedError, RunAbortedError
from dspy_flashevolve.engine.events import Committed, Looked
from dspy_flashevolve.engine.replay import BEFORE_STEPS, RunJournal, hash_of, id_text
from dspy_flashevolve.engine.staleness import Admit, Discard, Full, History, Integrate, Look, gap
from dspy_flashevolve.engine.steps import End, EndKind, Step
from dspy_flashevolve.observe.statistics import AceStats, ProblemRecord, RunStats, SnapshotRecord, WindowRecord
from dspy_flashevolve.programs.run import DspyRun

logger = logging.getLogger(__name__)

OPTIONS = (
    "num_threads", "max_concurrency", "max_metric_calls", "max_seconds", "schedule", "rollout_timeout_seconds", "seed",
    "max_outage_seconds",
)  # fmt: skip
"""Arguments that AsyncACE hands on to its run."""
LEARNING_SHARE = 0.75
"""Of the slots, what samples may take while a playbook is validated."""


@dataclass(frozen=True)
class LearningShare:
    """As many live samples as there are slots, each of which has one request in flight at most; fewer, by a share,
    while a playbook is validated: a request of a sample goes before one of a validation, which would wait for ever.

    Args:
        limit: slots at most.
        is_validating: whether a validation is under way.
    """

    limit: int
    is_validating: Callable[[], bool]

    def admits(self, load: Load) -> bool:
        """See :class:`~dspy_flashevolve.engine.admission.Admission`."""
        slots = self.limit if load.slots is None else min(self.limit, load.slots)
        return load.live < (max(1, math.ceil(LEARNING_SHARE * slots)) if self.is_validating() else slots)


class AceRun:
    """Everything that belongs to one run.

    Args:
        optimizer: an AsyncACE; only its arguments are read.
        student: the program; it is not changed.
        names: the predictors that get the playbook.
        playbook: the first one.
        trainset: the samples; None for a stream.
        valset: what snapshots are scored on; None for no snapshots: the last playbook is returned.
        stream, window: where samples come from without a training set, and how many examples a window has.
        journal: where the run is written down; None for nowhere.
    """

    def __init__(
        self,
        optimizer: Any,
        student: Module,
        names: Sequence[str],
        playbook: Playbook,
        trainset: Sequence[Any] | None,
        valset: Sequence[Any] | None,
        *,
        stream: Any = None,
        window: int = 1,
        journal: RunJournal | None = None,
    ) -> None:
        self._of, self._student, self._names, self._valset, self._journal = optimizer, student, names, valset, journal
        modules: dict[str, tuple[Module, Any]] = optimizer.modules()
        asked = {
            stage: [one.lm or lm for one in module.predictors()] or [lm] for stage, (module, lm) in modules.items()
        }
        self.run = DspyRun(
            name="AsyncACE",
            stages={"rollout": [student], **asked, "evaluate": [student]},
            journal=journal,
            **{name: getattr(optimizer, name) for name in OPTIONS},
        )
        duplicates = duplicates_of(optimizer)
        self._writer = PlaybookWriter(
            playbook, optimizer.token_budget, optimizer.count_tokens, duplicates or same_words
        )
        self._learner = Learner(self.run, optimizer, student, names, valset or (), duplicates)
        self._data = (
            Windows(as_async(stream, self.run.threads.run), window, self._window_over)
            if trainset is None
            else Epochs(trainset, optimizer.epochs, optimizer.seed)
        )
        self._calls = ValidationCalls(self.run.budget, len(valset or ()), self._unpaid)
        self.snapshots = Snapshots(
            optimizer.eval_every,
            optimizer.validations_at_once,
            self._validated,
            self.run.beside,
            self._calls,
            self._keep_snapshots,
        )
        self._first, self._policy, self._writing = playbook, policy_of(optimizer), anyio.Lock()
        self._validating = Step(BEFORE_STEPS, random.Random(optimizer.seed), Reservation(self.run.budget, 0))
        self._discarded = self._passed = self._unresolved = self._samples_before = self._commits = self._next = 0
        self._applied: dict[int, str] = {}
        """Step that has been applied -> the way of its end, until that is written down."""
        self._half: set[int] = set()
        """Steps whose additions are still to come: the rest of what they asked for has been applied."""
        self._seconds_before = self._last_sample = 0.0
        self.has_begun = False
        """Whether :meth:`main` was called."""

    async def main(self) -> Module:
        """Evolve to the end and build the best program.

        Raises:
            RunAbortedError: the provider refused for good, no playbook could be validated, or code of the user's (a
                stream, a policy, a counter of tokens) raised, which is its cause.
        """
        if self._journal is not None:
            await self._take_up(self._journal)
        self.has_begun = True
        try:
            await self._evolved()
        except RunAbortedError as error:
            raise self._with_best(error) from error.__cause__
        except Exception as error:
            said = f"The run ended early, since something raised {type(error).__name__}: {error}"
            raise self._with_best(RunAbortedError(said)) from error
        if isinstance(self._data, Windows) and (error := self._data.failure) is not None:
            said = f"The stream raised {type(error).__name__}: {error}. What came before it has been learnt from."
            raise self._with_best(RunAbortedError(said)) from error
        if self.best() is None:
            raise RunAbortedError("No playbook could be validated: the provider answered no validation to its end.")
        return self.program()

    async def _evolved(self) -> None:
        if self._valset is not None:
            self._calls.set_aside()
            await self.snapshots.begin(self._first)
        admission = LearningShare(self.run.slots, lambda: self.snapshots.running > 0)
        await self.run.evolve(self.step, admission, calls=1 + self._of.max_rounds, ended=self._ended, first=self._next)
        counts = self._writer.counts
        if counts.samples and not counts.operations:
            kinds = dict(counts.problems)
            logger.warning("AsyncACE: no sample changed the playbook. What stood in the way, by kind: %s", kinds)
        if self._valset is not None:
            await self.snapshots.finish(self._writer.playbook)

    async def _ended(self, step: Step, end: End) -> None:
        del step, end
        if self.snapshots.waits_for_calls:  # before another sample takes what this one gave back
            self._calls.save()

    async def _window_over(self) -> None:
        while self.run.live:
            await self.run.changed()

    # A sample's way.

    async def step(self, step: Step) -> End:
        """Try an example, again after each reflection while it is wrong, and turn what was learnt into operations."""
        sample = await self._select(step)
        sample = await self._attempt(step, sample)
        for _ in range(self._of.max_rounds):
            reflection = await self._learner.reflect(step, sample)
            sample = replace(sample, reflections=(*sample.reflections, reflection))
            if not sample.insight or self._is_right(sample):
                break
            sample = await self._attempt(step, sample)
            if self._is_right(sample):
                break
        lesson = Lesson((), sample.playbook.version)  # tags count all the same
        if sample.insight:
            lesson = await self._learner.curate(step, sample, self._writer.playbook)
        end = await self._learn(step, sample, lesson)
        if self._journal is not None:
            await self._journal.journal.flush()
        return end

    async def _select(self, step: Step) -> Sample:
        """The step's example with the newest playbook; with the one that it had, where it runs again."""
        taken = await self._data.take(step.number, lambda: self._writer.playbook)
        playbook, selection, journal = taken.playbook, step.recorded, self._journal
        if journal is not None and selection is None:
            candidate = journal.candidate(self._learner.candidate(playbook.render()))
            selection = {"example": taken.index, "playbook": candidate, "version": playbook.version}
        elif journal is not None:
            playbook = self._learner.playbook_of(journal.texts[selection["playbook"]], selection["version"])
        self.run.begin(step, playbook.version, selection=selection)
        return Sample(taken.example, taken.index, playbook, taken.window)

    async def _attempt(self, step: Step, sample: Sample) -> Sample:
        attempt = await self._learner.attempt(step, sample)
        if sample.window is not None and not sample.attempts and isinstance(self._data, Windows):
            self._data.windows[sample.window].scores.append(attempt.score)
        return replace(sample, attempts=(*sample.attempts, attempt))

    def _is_right(self, sample: Sample) -> bool:
        return sample.attempts[-1].score >= self._of.perfect_score

    async def _learn(self, step: Step, sample: Sample, lesson: Lesson) -> End:
        """The one writer: count the tags, settle what is stale, do the rest."""
        writer = self._writer
        async with self._writing:
            operations = self._settled(step, lesson)
            if operations is not None:
                self._count_tags(sample, lesson)
                return await self._apply(step, sample, operations, lesson.seen)
            if step.number not in self._half:  # what is no addition need not wait
                self._count_tags(sample, lesson)
                writer.apply([one for one in lesson.operations if not isinstance(one, Add)], lesson.seen)
                self._half.add(step.number)
                self._keep()
        additions = [one for one in lesson.operations if isinstance(one, Add)]
        newer, version = writer.newer_than(lesson.seen), writer.playbook.version
        read = await self._learner.reconcile(step, additions, newer, version)
        async with self._writing:
            writer.note(read.problems)
            admitted = sum(isinstance(one, Add) for one in read.operations)
            merged = len(read.operations) - admitted
            dropped = len(additions) - admitted - merged
            writer.counts.additions.update(admitted=admitted, merged=merged, dropped=dropped)
            operations = read.operations
            if admitted and (newer := writer.newer_than(read.seen)):
                operations = self._without_repeats(operations, newer)
            return await self._apply(step, sample, operations, read.seen)

    def _count_tags(self, sample: Sample, lesson: Lesson) -> None:
        self._writer.note([*(problem for one in sample.reflections for problem in one.problems), *lesson.problems])
        self._writer.tag(sample.tags)

    def _settled(self, step: Step, lesson: Lesson) -> Sequence[Operation] | None:
        """The operations without stale additions that do not stay; None where a language model has to read them."""
        if step.number in self._half:
            return None
        writer, operations = self._writer, lesson.operations
        newer = writer.newer_than(lesson.seen)
        additions = sum(isinstance(one, Add) for one in operations)
        if not newer or not additions:
            return operations
        decision = self._decide(step, lesson.seen)
        if isinstance(decision, Integrate):
            return None
        if isinstance(decision, Discard):
            writer.counts.additions["dropped"] += additions
            writer.note([Problem("stale addition", decision.reason)] * additions)
            return [one for one in operations if not isinstance(one, Add)]
        if not isinstance(self._policy, Full):
            operations = self._without_repeats(operations, newer)
        admitted = sum(isinstance(one, Add) for one in operations)
        writer.counts.additions.update(admitted=admitted, merged=additions - admitted)
        return operations

    def _without_repeats(self, operations: Sequence[Operation], newer: Sequence[Any]) -> list[Operation]:
        kept, problems, repeated = without_repeats(operations, newer)
        self._writer.note(problems)
        self._writer.tag(tuple((bullet_id, "helpful") for bullet_id in repeated))
        return kept

    def _decide(self, step: Step, seen: int) -> Admit | Discard | Integrate:
        version = self._writer.playbook.version
        decision = self._policy.decide(Look("before_commit", seen), History(version, self._discarded, self._passed))
        is_discard = isinstance(decision, Discard)
        self._discarded += is_discard
        self._passed += not is_discard
        word = "discard" if is_discard else "integrate" if isinstance(decision, Integrate) else "admit"
        reason = decision.reason if isinstance(decision, Discard) else ""
        self.run.bus.emit(Looked(self.run.clock(), step.number, "before_commit", gap(version, seen), word, reason))
        return decision

    async def _apply(self, step: Step, sample: Sample, operations: Sequence[Operation], seen: int) -> End:
        """Change the playbook and write it down, with no wait between: what comes later in the journal stands on it."""
        writer, counts = self._writer, self._writer.counts
        if any(isinstance(one, Add) for one in operations):
            texts = [one.content for one in operations if not isinstance(one, Remove)]
            writer.note(await self._learner.prepare([*texts, *(one.content for one in writer.playbook.bullets)]))
        before = writer.playbook.version
        self.run.gaps.record("before_commit", gap(before, seen))
        writer.apply(operations, seen)
        right = [attempt.score >= self._of.perfect_score for attempt in sample.attempts]
        counts.samples += 1
        counts.right_at_once += right[0]
        counts.corrected += any(right[1:])
        counts.reflections += len(sample.reflections)
        counts.citations += sum(len(attempt.cited) for attempt in sample.attempts)
        end = End(EndKind.REJECTED, "the playbook stays as it is")
        if writer.playbook.version > before:
            end = End(EndKind.COMMITTED, f"version {writer.playbook.version}")
        self._half.discard(step.number)
        live = self.run.live
        self._applied = {number: way for number, way in self._applied.items() if number in live}
        self._applied[step.number] = end.kind.value
        self._last_sample = self.run.clock()
        self._keep()
        if self._valset is not None:
            await self.snapshots.learnt(writer.playbook)
        return end

    # Snapshots.

    def _unpaid(self, playbook: Playbook) -> int:
        """Rollouts of a playbook's validation that are still to be paid."""
        examples = range(len(self._valset or ()))
        if self._journal is None:
            return len(examples)
        candidate = hash_of(self._learner.candidate(playbook.render()))
        return self._journal.missing(BEFORE_STEPS, candidate, "val", examples, traced=False)

    async def _validated(self, playbook: Playbook, pays: Reservation) -> Scored | None:
        """A playbook with its score; None where the provider gave no answer."""
        self._validating.saw(playbook.version)
        try:
            scores = await self._learner.validate(self._validating, playbook, pays)
        except RolloutUnresolvedError as error:
            logger.warning("The validation of version %d has no score: %s", playbook.version, error)
            self._unresolved += 1
            return None
        score, tokens = sum(scores) / len(scores), playbook.tokens(self._of.count_tokens)
        scored, number, version = Scored(playbook, score, self._seconds(), tokens), self._commits, playbook.version
        self._commits += 1
        best = max([score, *(one.score for one in self.snapshots.scored)])
        behind = self._writer.playbook.version - version
        change = (version, behind, number, score, best, version)
        self.run.bus.emit(Committed(self.run.clock(), BEFORE_STEPS, *change))
        if self._journal is not None:
            texts = self._learner.candidate(playbook.render())
            by_example = {id_text(example): one for example, one in enumerate(scores)}
            more = {"playbook": playbook.to_dict(), "seconds": scored.seconds, "tokens": tokens}
            self._journal.committed(BEFORE_STEPS, number, version, texts, [], by_example, score, more)
            await self._journal.journal.flush()
        return scored

    def _seconds(self) -> float:
        """Since the run began, in this session and those before."""
        return self._seconds_before + self.run.clock() - self.run.clock.began

    # What is written down, and read by a run that goes on.

    def _keep(self) -> None:
        """Write down what has been learnt; what the journal has before this row is part of it, and nothing after."""
        if self._journal is None:
            return
        live = self.run.live
        kept = {
            "applied": [[number, way] for number, way in self._applied.items()],
            "half": [number for number in self._half if number in live],
            "looks": [self._discarded, self._passed],
            "seconds": self._seconds(),
        }
        self._journal.journal.keep("playbook", {**self._writer.to_dict(), **kept})

    def _keep_snapshots(self) -> None:
        if self._journal is not None:
            unscored = [one.to_dict() for one in self.snapshots.open]
            self._journal.journal.keep("snapshots", {"open": unscored, "superseded": self.snapshots.superseded})

    async def _take_up(self, journal: RunJournal) -> None:
        """Put the run where its journal says that it was; steps that were applied and have no end get one."""
        log = journal.journal
        first, kept, open_ones = log.kept("first"), log.kept("playbook"), log.kept("snapshots") or {}
        if first is None:
            log.keep("first", self._first.to_dict())
        else:
            self._first = self._writer.playbook = Playbook.from_dict(first)
        if kept is not None:
            self._writer.restore(kept)
            self._half = set(kept["half"])
            (self._discarded, self._passed), self._seconds_before = kept["looks"], kept["seconds"]
            endless = log.rows("SELECT number FROM steps WHERE number NOT IN (SELECT step FROM ends)")
            for number, way in kept["applied"]:
                if any(row["number"] == number for row in endless):
                    journal.ended(number, way, "it was applied when the run was killed", before=True)
            await log.flush()
        scored: list[Scored] = []
        for row in log.rows("SELECT score, more FROM commits ORDER BY candidate_index"):
            more = json.loads(row["more"])
            scored.append(Scored(Playbook.from_dict(more["playbook"]), row["score"], more["seconds"], more["tokens"]))
        unscored = [Playbook.from_dict(one) for one in open_ones.get("open", [])]
        self._samples_before, self._commits = self._writer.counts.samples, len(scored)
        self.snapshots.restore(scored, unscored, self._samples_before, open_ones.get("superseded", 0))
        self._next = journal.last_step + 1
        journal.take_up(seeded=False)

    # What there is, now and at the end.

    def _with_best(self, error: RunAbortedError) -> RunAbortedError:
        error.best_program = self.program() if self.has_result else None
        return error

    def best(self) -> Playbook | None:
        """The best validated playbook; the newest one where there is no validation set."""
        if self._valset is None:
            return self._writer.playbook
        return None if self.snapshots.best is None else self.snapshots.best.playbook

    @property
    def has_result(self) -> bool:
        """Whether there is a program to be returned by now."""
        return self.has_begun and self.best() is not None

    def program(self) -> Module:
        """The student with the best playbook; with the newest one where none is validated."""
        best = self.best()
        playbook = self._writer.playbook if best is None else best
        program: Any = with_playbook(self._student, self._names, playbook)
        setattr(program, attribute_of(program), playbook)
        program.async_stats = self.statistics()
        return program

    def statistics(self) -> AceStats:
        """What the run has done so far."""
        run, writer, best = self.run.statistics(), self._writer, self.best()
        minutes = (self._last_sample - self.run.clock.began) / 60
        counts = {name: dict(one) if isinstance(one, dict) else one for name, one in vars(writer.counts).items()}
        counts["first_problems"] = [ProblemRecord(one.kind, one.detail) for one in writer.counts.first_problems]
        known: dict[str, Any] = {one.name: getattr(run, one.name) for one in fields(RunStats)} | counts
        return AceStats(
            **known,
            samples_per_minute=(writer.counts.samples - self._samples_before) / minutes if minutes > 0 else 0.0,
            version=writer.playbook.version,
            best_version=writer.playbook.version if best is None else best.version,
            snapshots=[
                SnapshotRecord(one.seconds, one.playbook.version, one.score, len(one.playbook), one.tokens)
                for one in self.snapshots.scored
            ],
            superseded=self.snapshots.superseded,
            unpaid=self.snapshots.unpaid,
            unresolved=self._unresolved,
            windows=[
                WindowRecord(one.number, one.version, one.examples, len(one.scores), one.score)
                for one in (self._data.windows if isinstance(self._data, Windows) else [])
            ],
        )
