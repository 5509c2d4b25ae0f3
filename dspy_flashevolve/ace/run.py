"""One run of AsyncACE: a sample's way from the data to the playbook, and snapshots that are validated beside it.

.. code-block:: text

    sample -> attempt -> reflect -> curate -> apply (the one writer) -> end
                 ^          |
                 +- wrong --+

Source: ACE (arXiv 2510.04618) section 3; the queue of operations and staleness follow FlashEvolve (arXiv 2605.08520).
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import anyio
from dspy.primitives.module import Module

from dspy_flashevolve.ace.learner import Learner, Lesson, Sample, with_playbook
from dspy_flashevolve.ace.operations import Add, Operation, PlaybookWriter, Remove
from dspy_flashevolve.ace.playbook import Bullet, Playbook
from dspy_flashevolve.ace.similarity import EmbeddingDuplicates, closest, same_words
from dspy_flashevolve.ace.snapshots import Snapshots
from dspy_flashevolve.engine.errors import ConfigurationError, RolloutUnresolvedError, RunAbortedError
from dspy_flashevolve.engine.events import Committed
from dspy_flashevolve.engine.replay import BEFORE_STEPS, RunJournal, hash_of, id_text
from dspy_flashevolve.engine.staleness import (
    Discard,
    Full,
    Guarded,
    Integrate,
    Look,
    Reflective,
    StalenessPolicy,
)
from dspy_flashevolve.engine.steps import End, EndKind, Load, NothingToDoError, Reservation, Step
from dspy_flashevolve.observe.statistics import AceStats, Problem, RunStats, SnapshotRecord, WindowRecord
from dspy_flashevolve.programs.run import DspyRun

logger = logging.getLogger(__name__)

OPTIONS = (
    "num_threads", "max_concurrency", "max_metric_calls", "max_seconds", "schedule", "rollout_timeout_seconds", "seed",
    "max_outage_seconds", "rollouts",
)  # fmt: skip
"""Arguments that AsyncACE hands on to its run."""
POLICIES: dict[str, StalenessPolicy] = {
    "full": Full(looks=("before_commit",)),
    "guarded": Guarded(max_gap=64, looks=("before_commit",)),
}
"""What the names of ``staleness`` stand for."""
LEARNING_SHARE = 0.75
"""Of the slots, what samples may take while a playbook is validated."""


def policy_of(staleness: Any) -> StalenessPolicy:
    """The policy that a name stands for, or the policy itself.

    Raises:
        ConfigurationError: no such name, and no policy that could be one of AsyncACE's.
    """
    if isinstance(staleness, str) and staleness in POLICIES:
        return POLICIES[staleness]
    if isinstance(staleness, str | type | Reflective) or not callable(getattr(staleness, "decide", None)):
        raise ConfigurationError(
            f"staleness is {staleness!r}, expected 'full', 'guarded', or a policy: an object with "
            "decide(look, history) that admits or discards. In place of 'reflective' and Reflective use 'guarded'."
        )
    return staleness


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
        modules: dict[str, tuple[Module, Any]] = {
            "reflect": (optimizer.reflector, optimizer.reflector_lm),
            "curate": (optimizer.curator, optimizer.curator_lm),
        }
        asked = {
            stage: [one.lm or lm for one in module.predictors()] or [lm] for stage, (module, lm) in modules.items()
        }
        self.run = DspyRun(
            name="AsyncACE",
            stages={"rollout": [student], **asked, "evaluate": [student]},
            journal=journal,
            **{name: getattr(optimizer, name) for name in OPTIONS},
        )
        threshold = optimizer.deduplicate
        duplicates = None if threshold is None else EmbeddingDuplicates(optimizer.embedder, threshold)
        self._writer = PlaybookWriter(
            playbook, optimizer.token_budget, optimizer.count_tokens, duplicates or same_words
        )
        self._learner = Learner(self.run, optimizer, modules, student, names, valset or (), duplicates)
        self._data = (
            Windows(as_async(stream, self.run.threads.run), window, self._window_over)
            if trainset is None
            else Epochs(trainset, optimizer.epochs, optimizer.seed)
        )
        self.snapshots = Snapshots(
            optimizer.eval_every,
            optimizer.validations_at_once,
            self.run.budget,
            len(valset or ()),
            self._unpaid,
            self._validated,
            self.run.beside,
            self._keep_snapshots,
        )
        self._first, self._policy, self._writing = playbook, policy_of(optimizer.staleness), anyio.Lock()
        self._validating = Step(BEFORE_STEPS, random.Random(optimizer.seed), Reservation(self.run.budget, 0))
        self._unresolved = self._samples_before = self._commits = self._next = 0
        self._applied: dict[int, str] = {}
        """Step that has been applied -> the way of its end, until that is written down."""
        self._seconds_before = self._last_sample = 0.0
        self.has_begun = False
        """Whether there is something to tell of it."""
        self._has_ended = False

    def run_sync(self) -> Module:
        """Evolve to the end on a loop of its own, and build the best program; see :meth:`EvolutionRun.run_sync`.

        Raises:
            RunAbortedError: the provider refused for good, no playbook could be validated, or code of the user's (a
                stream, a policy, a counter of tokens) raised, which is its cause.
        """
        with self._handing_over():
            self.run.run_sync(self._evolved)
        return self.program()

    async def run_async(self) -> Module:
        """The same on the caller's loop."""
        with self._handing_over():
            await self.run.run_async(self._evolved)
        return self.program()

    @contextmanager
    def _handing_over(self) -> Generator[None, None, None]:
        """What the run raises holds the best program."""
        try:
            try:
                yield
            finally:
                self._has_ended = True
        except Exception as raised:
            if not self.has_begun:
                raise
            said = f"The run ended early, since something raised {type(raised).__name__}: {raised}"
            error = raised if isinstance(raised, RunAbortedError) else RunAbortedError(said)
            error.best_program = self.program() if self.has_result else None
            raise error from (raised.__cause__ if error is raised else raised)

    async def _evolved(self) -> None:
        if self._journal is not None:
            await self._take_up(self._journal)
        self.has_begun = True
        if self._valset is not None:
            await self.snapshots.begin(self._first)
        await self.run.evolve(self.step, self, calls=1 + self._of.max_rounds, ended=self._ended, first=self._next)
        counts = self._writer.counts
        if counts.samples and not counts.operations:
            kinds = dict(counts.problems)
            logger.warning("AsyncACE: no sample changed the playbook. What stood in the way, by kind: %s", kinds)
        if self._valset is not None:
            await self.snapshots.finish(self._writer.playbook)
        if isinstance(self._data, Windows) and self._data.failure is not None:
            raise self._data.failure  # what came before has been learnt from
        if self.best() is None:
            raise RunAbortedError("No playbook could be validated: the provider answered no validation to its end.")

    def admits(self, load: Load) -> bool:
        """As many live samples as there are slots, each of which has one request in flight at most; fewer, by a share,
        while a playbook is validated: a request of a sample goes before one of a validation, which would wait for ever.
        """
        slots = self.run.slots if load.slots is None else load.slots
        return load.live < (max(1, math.ceil(LEARNING_SHARE * slots)) if self.snapshots.running else slots)

    async def _ended(self, step: Step, end: End) -> None:
        del step, end
        self.snapshots.save_up()

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
        sample = await self._data.take(step.number, lambda: self._writer.playbook)
        selection, journal = step.recorded, self._journal
        if journal is not None and selection is None:
            candidate = journal.candidate(self._learner.candidate(sample.playbook.render()))
            selection = {"example": sample.index, "playbook": candidate, "version": sample.playbook.version}
        elif journal is not None:
            playbook = self._learner.playbook_of(journal.texts[selection["playbook"]], selection["version"])
            sample = replace(sample, playbook=playbook)
        self.run.begin(step, sample.playbook.version, selection=selection)
        return sample

    async def _attempt(self, step: Step, sample: Sample) -> Sample:
        attempt = await self._learner.attempt(step, sample)
        if sample.window is not None and not sample.attempts and isinstance(self._data, Windows):
            self._data.scored(sample.window, attempt.score)
        return replace(sample, attempts=(*sample.attempts, attempt))

    def _is_right(self, sample: Sample) -> bool:
        return sample.attempts[-1].score >= self._of.perfect_score

    async def _learn(self, step: Step, sample: Sample, lesson: Lesson) -> End:
        """The one writer: count the tags, settle what is stale, do the rest."""
        async with self._writing:
            operations = self._settled(step, lesson)
            self._writer.note([*(problem for one in sample.reflections for problem in one.problems), *lesson.problems])
            self._writer.tag(sample.tags)
            return await self._apply(step, sample, operations, lesson.seen)

    def _settled(self, step: Step, lesson: Lesson) -> Sequence[Operation]:
        """The operations without stale additions that do not stay."""
        writer, operations = self._writer, lesson.operations
        newer = writer.newer_than(lesson.seen)
        additions = sum(isinstance(one, Add) for one in operations)
        if not newer or not additions:
            return operations
        decision = self.run.look(step, self._policy, Look("before_commit", lesson.seen), writer.playbook.version)
        if isinstance(decision, Integrate):
            raise ConfigurationError(f"{self._policy!r} wants to integrate, where AsyncACE can admit or discard.")
        if isinstance(decision, Discard):
            writer.counts.additions["dropped"] += additions
            writer.note([Problem("stale addition", decision.reason)] * additions)
            return [one for one in operations if not isinstance(one, Add)]
        if not isinstance(self._policy, Full):
            operations = [one for one in operations if not self._is_repeat(one, newer)]
        admitted = sum(isinstance(one, Add) for one in operations)
        writer.counts.additions.update(admitted=admitted, merged=additions - admitted)
        return operations

    def _is_repeat(self, operation: Operation, newer: Sequence[Bullet]) -> bool:
        """Whether an addition nearly repeats a newer bullet, into which it is merged: it speaks for that."""
        bullet = closest(operation.content, newer) if isinstance(operation, Add) else None
        if bullet is not None:
            self._writer.note([Problem("repeats a newer bullet", f"{bullet.id}: {bullet.content}"[:200])])
            self._writer.tag([(bullet.id, "helpful")])
        return bullet is not None

    async def _apply(self, step: Step, sample: Sample, operations: Sequence[Operation], seen: int) -> End:
        """Change the playbook and write it down, with no wait between: what comes later in the journal stands on it."""
        writer, counts = self._writer, self._writer.counts
        if any(isinstance(one, Add) for one in operations):
            texts = [one.content for one in operations if not isinstance(one, Remove)]
            writer.note(await self._learner.prepare([*texts, *(one.content for one in writer.playbook.bullets)]))
        before = writer.playbook.version
        self.run.gaps["before_commit"][before - seen] += 1
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
        live = self.run.live
        self._applied = {number: way for number, way in self._applied.items() if number in live}
        self._applied[step.number] = end.kind.value
        self._last_sample = self.run.clock()
        self._keep()
        if self._valset is not None:
            await self.snapshots.learnt(writer.playbook, counts.samples)
        return end

    # Snapshots.

    def _unpaid(self, playbook: Playbook) -> int:
        """Rollouts of a playbook's validation that are still to be paid."""
        examples = range(len(self._valset or ()))
        if self._journal is None:
            return len(examples)
        candidate = hash_of(self._learner.candidate(playbook.render()))
        return self._journal.missing(BEFORE_STEPS, candidate, "val", examples, traced=False)

    async def _validated(self, playbook: Playbook, pays: Reservation) -> SnapshotRecord | None:
        """A playbook's score; None where the provider gave no answer."""
        self._validating.saw(playbook.version)
        try:
            scores = await self._learner.validate(self._validating, playbook, pays)
        except RolloutUnresolvedError as error:
            logger.warning("The validation of version %d has no score: %s", playbook.version, error)
            self._unresolved += 1
            return None
        score, tokens = sum(scores) / len(scores), playbook.tokens(self._of.count_tokens)
        number, version = self._commits, playbook.version
        scored = SnapshotRecord(self._seconds(), version, score, len(playbook), tokens)
        self._commits += 1
        best = max([score, *(one.score for one in self.snapshots.scored.values())])
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
        kept = {
            "applied": [[number, way] for number, way in self._applied.items()],
            "looks": self.run.looks,
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
            self.run.looks.update(kept["looks"])
            self._seconds_before = kept["seconds"]
            endless = log.rows("SELECT number FROM steps WHERE number NOT IN (SELECT step FROM ends)")
            for number, way in kept["applied"]:
                if any(row["number"] == number for row in endless):
                    journal.ended(number, way, "it was applied when the run was killed", before=True)
            await log.flush()
        scored: dict[Playbook, SnapshotRecord] = {}
        for row in log.rows("SELECT score, more FROM commits ORDER BY candidate_index"):
            more = json.loads(row["more"])
            book = Playbook.from_dict(more["playbook"])
            scored[book] = SnapshotRecord(more["seconds"], book.version, row["score"], len(book), more["tokens"])
        unscored = [Playbook.from_dict(one) for one in open_ones.get("open", [])]
        self._samples_before, self._commits = self._writer.counts.samples, len(scored)
        self.snapshots.restore(scored, unscored, open_ones.get("superseded", 0))
        self._next = journal.last_step + 1
        journal.take_up(seeded=False)

    # What there is, now and at the end.

    def best(self) -> Playbook | None:
        """The best validated playbook; the newest one where there is no validation set."""
        return self._writer.playbook if self._valset is None else self.snapshots.best

    @property
    def has_result(self) -> bool:
        """Whether there is a program to be returned by now."""
        return self.has_begun and self.best() is not None

    def program(self) -> Module:
        """The student with the best playbook; with the newest one where none is validated."""
        best = self.best()
        playbook = self._writer.playbook if best is None else best
        program: Any = with_playbook(self._student, self._names, playbook)
        program.async_stats = self.statistics()
        return program

    def statistics(self) -> AceStats:
        """What the run has done so far."""
        run, writer, best = self.run.statistics(), self._writer, self.best()
        minutes = (self._last_sample - self.run.clock.began) / 60
        counts = {name: dict(one) if isinstance(one, dict) else one for name, one in vars(writer.counts).items()}
        counts["first_problems"] = list(writer.counts.first_problems)
        known: dict[str, Any] = {one.name: getattr(run, one.name) for one in fields(RunStats)} | counts
        known |= {} if self._has_ended else {"outcome": "running"}  # the last playbook is validated after all steps
        return AceStats(
            **known,
            samples_per_minute=(writer.counts.samples - self._samples_before) / minutes if minutes > 0 else 0.0,
            version=writer.playbook.version,
            best_version=writer.playbook.version if best is None else best.version,
            snapshots=list(self.snapshots.scored.values()),
            superseded=self.snapshots.superseded,
            unpaid=self.snapshots.unpaid,
            unresolved=self._unresolved,
            windows=list(self._data.windows) if isinstance(self._data, Windows) else [],
        )


# Where samples come from.


class Epochs:
    """Every example once an epoch, in an order of its own each time; which one a step takes follows from its number.

    Args:
        examples: the training set.
        epochs: times that each is taken.
        seed: of the order.
    """

    def __init__(self, examples: Sequence[Any], epochs: int, seed: int | None) -> None:
        self._examples, self._epochs, self._seed = examples, epochs, seed
        self._orders: dict[int, list[int]] = {}

    async def take(self, step: int, newest: Callable[[], Playbook]) -> Sample:
        """The example of a step.

        Args:
            newest: the playbook as it is.

        Raises:
            NothingToDoError: all were taken.
        """
        epoch, place = divmod(step, len(self._examples))
        if epoch >= self._epochs:
            raise NothingToDoError
        if epoch not in self._orders:
            order = list(range(len(self._examples)))
            random.Random(f"{self._seed}/epoch {epoch}").shuffle(order)
            self._orders = {epoch: order}
        index = self._orders[epoch][place]
        return Sample(self._examples[index], index, newest())


class Windows:
    """A stream, window by window: the next one begins when all of the last have been learnt from.

    All of a window are scored with the playbook as it was when the window began. What was read of a window that had not
    begun at a stop is lost.

    Args:
        stream: examples; it may have no end.
        size: examples of a window; the last one may have fewer.
        over: waits until no step of the last window is left.

    Attributes:
        windows: those that have begun, in order.
        failure: what the stream raised; it ends where it did.
    """

    def __init__(self, stream: AsyncIterator[Any], size: int, over: Callable[[], Awaitable[None]]) -> None:
        self._stream, self._size, self._over = stream, size, over
        self._left: list[Sample] = []
        self._has_ended = False
        self.windows: list[WindowRecord] = []
        self.failure: Exception | None = None

    async def take(self, step: int, newest: Callable[[], Playbook]) -> Sample:
        """The next example of the window; else of the next window, once it is there.

        Raises:
            NothingToDoError: the stream has ended.
        """
        del step
        if not self._left:
            await self._over()
            examples = await self._read()
            if not examples:
                raise NothingToDoError
            first, number, playbook = sum(one.examples for one in self.windows), len(self.windows), newest()
            self._left = [Sample(one, first + place, playbook, number) for place, one in enumerate(examples)]
            self.windows.append(WindowRecord(number, playbook.version, len(examples), 0, None))
        return self._left.pop(0)

    def scored(self, window: int, score: float) -> None:
        """An example of a window was tried for the first time."""
        before = self.windows[window]
        total = (before.score or 0.0) * before.scored + score
        self.windows[window] = replace(before, scored=before.scored + 1, score=total / (before.scored + 1))

    async def _read(self) -> list[Any]:
        """The next window; what the stream raises is kept as ``failure``, and ends it."""
        examples: list[Any] = []
        try:
            while len(examples) < self._size and not self._has_ended:
                examples.append(await anext(self._stream))
        except StopAsyncIteration:
            self._has_ended = True
        except Exception as error:
            self._has_ended, self.failure = True, error
        return examples


async def as_async(stream: Any, run_in_thread: Any) -> AsyncIterator[Any]:
    """A stream as an async iterator; what it gives synchronously is waited for in a thread."""
    if hasattr(stream, "__aiter__"):
        async for one in stream:
            yield one
        return
    iterator, end = iter(stream), object()
    while (one := await run_in_thread(next, iterator, end)) is not end:
        yield one
