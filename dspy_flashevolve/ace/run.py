"""One run of AsyncACE: the step of a sample from the data to the playbook, and validations beside the samples.

.. code-block:: text

    sample -> attempt -> reflect -> curate -> apply (the one writer) -> end
                 ^          |
                 +- wrong --+

Source: ACE (arXiv 2510.04618) section 3; the queue of operations follows FlashEvolve (arXiv 2605.08520).
"""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from dspy.primitives.module import Module

from dspy_flashevolve.ace.learner import AceSettings, Learner, Lesson, Sample, with_playbook
from dspy_flashevolve.ace.playbook import Playbook, PlaybookWriter
from dspy_flashevolve.ace.validations import Validations
from dspy_flashevolve.engine.errors import RunAbortedError
from dspy_flashevolve.engine.steps import End, EndKind, Load, NothingToDoError, Step
from dspy_flashevolve.engine.store import Store, reporting_damage
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.modules.playbook import PlaybookCuration, SampleReflection
from dspy_flashevolve.observe.statistics import AceStats, RunStats, WindowRecord
from dspy_flashevolve.programs.run import DspyRun

logger = logger_named(__name__)

LEARNING_SHARE = 0.75
"""Share of the slots that samples may take while a playbook is validated: their requests go before a validation's,
which at 1 would wait until the last sample has ended. No other value was measured."""


class AceRun:
    """One run of `AsyncACE`, from the first playbook to the best one.

    Samples come from ``trainset``, or in windows from ``stream``. Without a ``valset`` no playbook is validated, and
    the last one is returned.
    """

    def __init__(
        self,
        settings: AceSettings,
        student: Module,
        names: Sequence[str],
        playbook: Playbook,
        trainset: Sequence[Any] | None,
        valset: Sequence[Any] | None,
        *,
        stream: Any = None,
        window: int = 1,
        store: Store | None = None,
    ) -> None:
        self._settings = settings
        self._student, self._names, self._first = student, names, playbook
        modules: dict[str, tuple[Module, Any]] = {
            "reflect": (settings.reflector or SampleReflection(), settings.reflector_lm),
            "curate": (settings.curator or PlaybookCuration(), settings.curator_lm),
        }
        lms = {
            stage: [predictor.lm or lm for predictor in module.predictors()] or [lm]
            for stage, (module, lm) in modules.items()
        }
        stages = {"rollout": [student], **lms, "evaluate": [student]}
        self.run = DspyRun(name="AsyncACE", stages=stages, settings=settings, store=store)
        self._store = self.run.store
        self._writer = PlaybookWriter(playbook, settings.token_budget, settings.count_tokens)
        self._learner = Learner(self.run, settings, modules, student, names, valset or ())
        self._data = (
            Windows(as_async(stream, self.run.threads.run), window, self._wait_for_samples)
            if trainset is None
            else Epochs(trainset, settings.epochs, None if settings.schedule == "lockstep" else settings.seed)
        )
        self._validations = (
            None
            if valset is None
            else Validations(
                settings, self.run, self._learner, self._writer, valset, self._seconds, self._write_playbook
            )
        )
        self._samples_before = self._next = 0
        self._applied: dict[int, str] = {}
        """Number of a step that has been applied -> the kind of its end, until the journal has that end."""
        self._seconds_before = self._last_sample = 0.0
        self.has_begun = self._has_ended = False
        """It has begun, and has statistics, once its journal has been read; it ends after the last validation."""

    def run_sync(self) -> Module:
        """Run to the end on an event loop of its own, and return the best program.

        Raises RunAbortedError: the provider refused for good, no playbook could be validated, or the user's code (a
        stream, a counter of tokens) raised, which is the error's cause.
        """
        with self._handing_over():
            self.run.run_sync(self._evolve)
        return self.program()

    async def run_async(self) -> Module:
        """Do what `run_sync` does on the caller's event loop."""
        with self._handing_over():
            await self.run.run_async(self._evolve)
        return self.program()

    @contextmanager
    def _handing_over(self) -> Generator[None, None, None]:
        """Give every error of the run the best program so far, and end the run."""
        try:
            try:
                yield
            finally:
                self._has_ended = True  # before program() is called: its statistics tell how the run ended
        except Exception as raised:
            if not self.has_begun:
                raise
            message = f"The run ended early, since something raised {type(raised).__name__}: {raised}"
            error = raised if isinstance(raised, RunAbortedError) else RunAbortedError(message)
            error.best_program = self.program() if self.has_result else None
            raise error from (raised.__cause__ if error is raised else raised)

    async def _evolve(self) -> None:
        with reporting_damage(self._store.path):
            await self._resume(self._store)
        self.has_begun = True
        if self._validations is not None:
            await self._validations.begin(self._first)
        await self.run.evolve(self.step, self, calls_per_step=1 + self._settings.max_rounds, first_number=self._next)
        counts = self._writer.counts
        if counts.samples and not counts.operations:
            kinds = dict(counts.problems)
            logger.warning("AsyncACE: no sample changed the playbook. What stood in the way, by kind: %s", kinds)
        if self._validations is not None:
            await self._validations.finish()
        if isinstance(self._data, Windows) and self._data.failure is not None:
            raise self._data.failure  # what came before has been learnt from
        if self.best() is None:
            raise RunAbortedError("No playbook could be validated: the provider answered no validation to its end.")

    def admits(self, load: Load) -> bool:
        """Return whether another sample may start: there are as many as slots, since each has at most one request in
        flight; fewer while a playbook is validated (`LEARNING_SHARE`)."""
        slots = self.run.slots if load.slots is None else load.slots
        if self._validations is not None and self._validations.is_validating:
            slots = max(1, math.ceil(LEARNING_SHARE * slots))
        return load.live < slots

    async def _wait_for_samples(self) -> None:
        while self.run.live:
            await self.run.wait_for_change()

    # The step of a sample.

    async def step(self, step: Step) -> End:
        """Attempt an example, reflect and attempt it again while it is wrong, then curate and apply what was learnt.

        In lockstep it makes the calls of ACE's reference loop, in its order.
        """
        sample = await self._select(step)
        sample = await self._attempt(step, sample)
        for _ in range(self._settings.max_rounds):
            reflection = await self._learner.reflect(step, sample)
            sample = replace(sample, reflections=(*sample.reflections, reflection))
            if not sample.insight or self._is_right(sample):
                break
            sample = await self._attempt(step, sample)
            if self._is_right(sample):
                break
        lesson = Lesson((), sample.playbook.version)  # without an insight there is nothing to curate; the tags count
        if sample.insight and sample.place % self._settings.curator_frequency == 0:
            lesson = await self._learner.curate(step, sample, self._writer.playbook.tagged(sample.tags))
        end = self._apply(step, sample, lesson)
        if self._validations is not None:
            await self._validations.after_sample()
        await self._store.flush()
        return end

    async def _select(self, step: Step) -> Sample:
        """Take the step's example with the newest playbook; a step that runs again has the playbook that it had."""
        sample = await self._data.take(step.number, lambda: self._writer.playbook)
        selection, store = step.recorded, self._store
        if selection is None:
            candidate = store.record_candidate(self._learner.candidate(sample.playbook.render()))
            selection = {"example": sample.index, "playbook": candidate, "version": sample.playbook.version}
        else:
            playbook = self._learner.playbook_of(store.texts[selection["playbook"]], selection["version"])
            sample = replace(sample, playbook=playbook)
        self.run.begin(step, sample.playbook.version, selection=selection)
        return sample

    async def _attempt(self, step: Step, sample: Sample) -> Sample:
        attempt = await self._learner.attempt(step, sample)
        if sample.window is not None and not sample.attempts and isinstance(self._data, Windows):
            self._data.record_score(sample.window, attempt.score)
        return replace(sample, attempts=(*sample.attempts, attempt))

    def _is_right(self, sample: Sample) -> bool:
        return sample.attempts[-1].score >= self._settings.perfect_score

    def _apply(self, step: Step, sample: Sample, lesson: Lesson) -> End:
        """Hand the lesson to the one writer, count the sample, and write both down.

        Nothing is awaited until the playbook is written down, so that no other step writes to the journal in between:
        what the journal has after the playbook's row was made with that playbook.
        """
        writer, counts = self._writer, self._writer.counts
        before = writer.playbook.version
        self.run.gaps["before_commit"][before - lesson.seen] += 1
        writer.note(problem for reflection in sample.reflections for problem in reflection.problems)
        writer.note(lesson.problems)
        writer.tag(sample.tags)
        writer.apply(lesson.operations)
        right = [attempt.score >= self._settings.perfect_score for attempt in sample.attempts]
        counts.samples += 1
        counts.right_at_once += right[0]
        counts.corrected += any(right[1:])
        counts.reflections += len(sample.reflections)
        counts.citations += sum(len(attempt.cited) for attempt in sample.attempts)
        end = End(EndKind.REJECTED, "the playbook stays as it is")
        if writer.playbook.version > before:
            end = End(EndKind.COMMITTED, f"version {writer.playbook.version}")
        live = self.run.live
        self._applied = {number: kind for number, kind in self._applied.items() if number in live}
        self._applied[step.number] = end.kind.value
        self._last_sample = self.run.clock()
        self._write_playbook()
        return end

    # The journal.

    def _seconds(self) -> float:
        """Return the seconds that the run has taken, in this session and those before."""
        return self._seconds_before + self.run.clock() - self.run.clock.began

    def _write_playbook(self) -> None:
        """Write the playbook, its counters and the applied steps to the journal."""
        state = {"applied": list(self._applied.items()), "seconds": self._seconds()}
        self._store.set_state("playbook", lambda: {**self._writer.to_dict(), **state})

    async def _resume(self, store: Store) -> None:
        """Go on from the state in the journal. Steps that were applied without their end being written get it now."""
        first, state = store.get_state("first"), store.get_state("playbook")
        if first is None:
            store.set_state("first", self._first.to_dict)
        else:
            self._first = self._writer.playbook = Playbook.from_dict(first)
        if state is not None:
            self._writer.restore(state)
            self._seconds_before = state["seconds"]
            endless = store.rows("SELECT number FROM steps WHERE number NOT IN (SELECT step FROM ends)")
            for number, kind in state["applied"]:
                if any(row["number"] == number for row in endless):
                    store.record_end(number, kind, "it was applied when the run was killed", before=True)
            await store.flush()
        if self._validations is not None:
            self._validations.resume(store)
        self._samples_before = self._writer.counts.samples
        self._next = store.last_step + 1
        store.load_unfinished(seeded=False)

    # The result, during the run and at its end.

    def best(self) -> Playbook | None:
        """The best validated playbook; the newest one where there is no validation set."""
        return self._writer.playbook if self._validations is None else self._validations.best

    @property
    def has_result(self) -> bool:
        """Whether there is a playbook that could be returned."""
        return self.has_begun and self.best() is not None

    def program(self) -> Module:
        """Return the student with the best playbook; with the newest one where none has been validated."""
        best = self.best()
        playbook = self._writer.playbook if best is None else best  # an empty playbook is false
        program: Any = with_playbook(self._student, self._names, playbook)
        program.async_stats = self.statistics()
        return program

    def statistics(self) -> AceStats:
        """Return the statistics of the run so far."""
        run, counts, validations, best = self.run.statistics(), self._writer.counts, self._validations, self.best()
        minutes = (self._last_sample - self.run.clock.began) / 60
        values: dict[str, Any] = {field.name: getattr(run, field.name) for field in fields(RunStats)}
        values |= {name: dict(count) if isinstance(count, dict) else count for name, count in vars(counts).items()}
        values["first_problems"] = list(counts.first_problems)
        if not self._has_ended:  # the engine's outcome is set before the last validation
            values["outcome"] = "running"
        return AceStats(
            **values,
            samples_per_minute=(counts.samples - self._samples_before) / minutes if minutes > 0 else 0.0,
            version=self._writer.playbook.version,
            best_version=self._writer.playbook.version if best is None else best.version,
            snapshots=[] if validations is None else list(validations.scored.values()),
            unresolved=0 if validations is None else validations.unresolved,
            windows=list(self._data.windows) if isinstance(self._data, Windows) else [],
        )


# Where samples come from.


class Epochs:
    """Gives each step an example: every example once an epoch, shuffled anew for each epoch; in their order without a
    seed.

    The example follows from the step's number alone, so that a run that goes on takes the same ones.
    """

    def __init__(self, examples: Sequence[Any], epochs: int, seed: int | None) -> None:
        self._examples, self._epochs, self._seed = examples, epochs, seed
        self._orders: dict[int, list[int]] = {}

    async def take(self, step: int, newest: Callable[[], Playbook]) -> Sample:
        """Return the example of a step with the newest playbook; raise NothingToDoError when all epochs are over."""
        epoch, place = divmod(step, len(self._examples))
        if epoch >= self._epochs:
            raise NothingToDoError
        if epoch not in self._orders:
            order = list(range(len(self._examples)))
            if self._seed is not None:
                random.Random(f"{self._seed}/epoch {epoch}").shuffle(order)
            self._orders = {epoch: order}
        index = self._orders[epoch][place]
        return Sample(self._examples[index], index, newest(), place + 1, len(self._examples))


class Windows:
    """Gives each step an example of a stream, window by window.

    All examples of a window are scored with the playbook as it was when the window began. The next window begins when
    all of them have been learnt from. An error that the stream raises ends it and is its ``failure``.
    """

    def __init__(self, stream: AsyncIterator[Any], size: int, wait_for_samples: Callable[[], Awaitable[None]]) -> None:
        self._stream, self._size, self._wait_for_samples = stream, size, wait_for_samples
        self._upcoming: list[Sample] = []
        self._has_ended = False
        self.windows: list[WindowRecord] = []
        self.failure: Exception | None = None

    async def take(self, step: int, newest: Callable[[], Playbook]) -> Sample:
        """Return the next example of the window, or wait for the next window and return its first one; raise
        NothingToDoError when the stream has ended."""
        del step
        if not self._upcoming:
            await self._wait_for_samples()
            examples = await self._read()
            if not examples:
                raise NothingToDoError
            first, number, playbook = sum(record.examples for record in self.windows), len(self.windows), newest()
            self._upcoming = [
                Sample(example, index, playbook, index + 1, window=number)
                for index, example in enumerate(examples, start=first)
            ]
            self.windows.append(WindowRecord(number, playbook.version, len(examples), 0, None))
        return self._upcoming.pop(0)

    def record_score(self, window: int, score: float) -> None:
        """Add the score of the first attempt at an example to the mean of its window."""
        before = self.windows[window]
        total = (before.score or 0.0) * before.scored + score
        self.windows[window] = replace(before, scored=before.scored + 1, score=total / (before.scored + 1))

    async def _read(self) -> list[Any]:
        """Read the examples of the next window. An error of the stream ends it and becomes ``failure``."""
        examples: list[Any] = []
        try:
            while len(examples) < self._size and not self._has_ended:
                examples.append(await anext(self._stream))
        except StopAsyncIteration:
            self._has_ended = True
        except Exception as error:
            self._has_ended, self.failure = True, error
        return examples


async def as_async(stream: Any, run_in_thread: Callable[..., Awaitable[Any]]) -> AsyncIterator[Any]:
    """Return a stream as an async iterator. A synchronous one is read in a thread, so that it cannot block the loop."""
    if hasattr(stream, "__aiter__"):
        async for example in stream:
            yield example
        return
    iterator, end = iter(stream), object()
    while (example := await run_in_thread(next, iterator, end)) is not end:
        yield example
