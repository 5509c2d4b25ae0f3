"""One run of AsyncACE: the workbench, ACE's stages, the data and the snapshots, put together."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import fields
from typing import Any

from dspy.primitives.module import Module

from dspy_flashevolve.ace.admission import SharedWidth
from dspy_flashevolve.ace.arguments import attribute_of, policy_of, twins_of
from dspy_flashevolve.ace.learner import DspyLearner, with_playbook
from dspy_flashevolve.ace.ledger import Ledger
from dspy_flashevolve.ace.payloads import Sample
from dspy_flashevolve.ace.playbook import Playbook
from dspy_flashevolve.ace.purse import Purse
from dspy_flashevolve.ace.sampling import Epochs, Taken, Windows
from dspy_flashevolve.ace.similarity import same_words
from dspy_flashevolve.ace.snapshots import Scored, Snapshots
from dspy_flashevolve.ace.stages import AceStages, Services
from dspy_flashevolve.engine.background import Background, run_with
from dspy_flashevolve.engine.budget import Reservation
from dspy_flashevolve.engine.errors import RolloutUnresolvedError, RunAbortedError
from dspy_flashevolve.engine.events import Committed
from dspy_flashevolve.engine.item import End, Item, Ticket
from dspy_flashevolve.engine.pipeline import NotNow, Opened
from dspy_flashevolve.observe.statistics import AceStats, ProblemRecord, RunStats, SnapshotRecord, WindowRecord
from dspy_flashevolve.workbench import Workbench

logger = logging.getLogger(__name__)


class AceRun:
    """Everything that belongs to one run.

    Args:
        optimizer: an AsyncACE; only its arguments are read.
        student: the program; it is not changed.
        names: the predictors that get the playbook.
        playbook: the first one.
        data: where samples come from.
        valset: what snapshots are scored on; None for no snapshots: the last playbook is returned.
    """

    def __init__(
        self,
        optimizer: Any,
        student: Module,
        names: Sequence[str],
        playbook: Playbook,
        data: Epochs | Windows,
        valset: Sequence[Any] | None,
    ) -> None:
        self._of = optimizer
        self._student = student
        self._names = names
        self._data = data
        self._valset = valset
        modules: dict[str, tuple[Module, Any]] = optimizer.modules()
        asked = {
            stage: [one.lm or lm for one in module.predictors()] or [lm] for stage, (module, lm) in modules.items()
        }
        self.bench = Workbench(
            name="AsyncACE",
            lms={"rollout": [student], **asked, "evaluate": [student]},
            num_threads=optimizer.num_threads,
            max_concurrency=optimizer.max_concurrency,
            budget_calls=optimizer.max_metric_calls,
            seed=optimizer.seed,
            schedule=optimizer.schedule,
            max_seconds=optimizer.max_seconds,
            rollout_timeout_seconds=optimizer.rollout_timeout_seconds,
        )
        twins = twins_of(optimizer)
        self._ledger = Ledger(playbook, optimizer.token_budget, optimizer.count_tokens, twins or same_words)
        self._learner = DspyLearner(
            self.bench,
            student,
            names,
            optimizer.metric,
            optimizer.failure_score,
            optimizer.metric_lock,
            valset or (),
            modules,
            optimizer.token_budget,
            optimizer.count_tokens,
            twins,
        )
        self._stages = AceStages(
            Services(
                learner=self._learner,
                ledger=self._ledger,
                policy=policy_of(optimizer),
                perfect_score=optimizer.perfect_score,
                max_rounds=optimizer.max_rounds,
                claim=self.bench.claim,
                attempted=self._attempted,
                merged=self._merged,
                emit=self.bench.bus.emit,
                clock=self.bench.clock,
                gaps=self.bench.gaps,
            )
        )
        self._purse = Purse(self.bench.budget, len(valset or ()))
        self.snapshots = Snapshots(
            optimizer.eval_every, optimizer.validations_at_once, self._validated, self.bench.beside, self._purse
        )
        self._ticket = Ticket.create(0, optimizer.seed)
        self._began = self._last_sample = 0.0
        self._unresolved = 0
        self.has_begun = False
        """Whether :meth:`run` was called."""

    async def run(self) -> Module:
        """Evolve to the end and build the best program.

        Raises:
            RunAbortedError: the provider refused for good, no playbook could be validated, or code of the user's (a
                stream, a policy, a counter of tokens) raised, which is its cause.
        """
        self._began, self.has_begun = self.bench.clock(), True
        try:
            await self._evolved()
        except RunAbortedError as error:
            raise self._with_best(error) from error.__cause__
        except Exception as error:
            said = f"The run ended early, since something raised {type(error).__name__}: {error}"
            raise self._with_best(RunAbortedError(said)) from error
        if self._data.failure is not None:
            error = self._data.failure
            said = f"The stream raised {type(error).__name__}: {error}. What came before it has been learnt from."
            raise self._with_best(RunAbortedError(said)) from error
        if self.best() is None:
            raise RunAbortedError("No playbook could be validated: the provider answered no validation to its end.")
        return self.program()

    async def _evolved(self) -> None:
        self._purse.open()
        admission = SharedWidth(self.bench.width, lambda: self.snapshots.running > 0)
        source = self.bench.source(self._select, calls=1 + self._of.max_rounds, admission=admission)
        source.on_end = self._ended
        self._learner.reservations = source.reservations
        handlers = self._stages.handlers()
        stages = [self.bench.stage(n, handlers[n], workers=1 if n == "merge" else None) for n in handlers]
        readers = self._data.readers(self._wake)
        await run_with(Background(), lambda: self.bench.evolve(stages, source), readers)
        if self._stages.counts.merged and not self._ledger.operations:
            kinds = dict(self._ledger.problems)
            logger.warning("AsyncACE: no sample changed the playbook. What stood in the way, by kind: %s", kinds)
        if self._valset is not None:
            await self.snapshots.finish(self._ledger.playbook)

    def _wake(self) -> None:
        if self.bench.pipeline is not None:
            self.bench.pipeline.wake()

    def _ended(self, ticket: Ticket, end: End) -> None:
        del end
        self._data.ended(ticket)
        if self.snapshots.waits_for_calls:  # before another sample takes what this one gave back
            self._purse.save()

    def _with_best(self, error: RunAbortedError) -> RunAbortedError:
        error.best_program = self.program() if self.has_result else None
        return error

    def best(self) -> Playbook | None:
        """The best validated playbook; the newest one where there is no validation set."""
        if self._valset is None:
            return self._ledger.playbook
        return None if self.snapshots.best is None else self.snapshots.best.playbook

    @property
    def has_result(self) -> bool:
        """Whether there is a program to be returned by now."""
        return self.has_begun and self.best() is not None

    def program(self) -> Module:
        """The student with the best playbook; with the first one where none is validated."""
        best = self.best()
        playbook = self._ledger.playbook if best is None else best
        program: Any = with_playbook(self._student, self._names, playbook)
        setattr(program, attribute_of(program), playbook)
        program.async_stats = self.statistics()
        return program

    async def _select(self, ticket: Ticket) -> Opened | NotNow:
        if self._valset is not None:
            await self.snapshots.first(self._ledger.playbook)
        taken = await self._data.take(ticket, self._ledger.playbook)
        if not isinstance(taken, Taken):
            return taken
        playbook = self._ledger.playbook if taken.playbook is None else taken.playbook
        sample = Sample(taken.example, taken.index, playbook, window=taken.window)
        return Opened("rollout", Item(sample, ticket, playbook.version))

    def _attempted(self, sample: Sample) -> None:
        if isinstance(self._data, Windows) and sample.window is not None:
            self._data.scored(sample.window, sample.attempts[0].score)

    async def _merged(self) -> None:
        self._last_sample = self.bench.clock()
        if self._valset is not None:
            await self.snapshots.merged(self._ledger.playbook)

    async def _validated(self, playbook: Playbook, pays: Reservation) -> Scored | None:
        """A playbook with its score; None where the provider gave no answer."""
        claim = self.bench.claim(Item(playbook, self._ticket, playbook.version), "evaluate")
        try:
            score = await self._learner.validate(claim, playbook, pays)
        except RolloutUnresolvedError as error:
            logger.warning("The validation of version %d has no score: %s", playbook.version, error)
            self._unresolved += 1
            return None
        scored = Scored(playbook, score, self.bench.clock(), playbook.tokens(self._of.count_tokens))
        best = max([score, *(one.score for one in self.snapshots.scored)])
        behind = self._ledger.playbook.version - playbook.version
        self.bench.bus.emit(
            Committed(
                seconds=scored.seconds,
                ticket=self._ticket.number,
                version=playbook.version,
                gap=behind,
                candidate=len(self.snapshots.scored),
                score=score,
                best_score=best,
                generation=playbook.version,
            )
        )
        return scored

    def statistics(self) -> AceStats:
        """What the run has done so far."""
        run, counts, ledger = self.bench.statistics(), self._stages.counts, self._ledger
        best = self.best()
        minutes = (self._last_sample - self._began) / 60
        return AceStats(
            **{one.name: getattr(run, one.name) for one in fields(RunStats)},
            samples=counts.merged,
            samples_per_minute=counts.merged / minutes if minutes > 0 else 0.0,
            right_at_once=counts.right,
            corrected=counts.corrected,
            reflections=counts.reflections,
            citations=counts.citations,
            version=ledger.playbook.version,
            best_version=ledger.playbook.version if best is None else best.version,
            operations=dict(ledger.operations),
            tags=dict(ledger.tags),
            additions=dict(counts.additions),
            evicted=ledger.evicted,
            problems=dict(ledger.problems),
            first_problems=[ProblemRecord(one.kind, one.detail) for one in ledger.examples],
            snapshots=[self._snapshot(one) for one in self.snapshots.scored],
            superseded=self.snapshots.superseded,
            unpaid=self.snapshots.unpaid,
            unresolved=self._unresolved,
            windows=[
                WindowRecord(one.number, one.version, one.examples, len(one.scores), one.score)
                for one in (self._data.windows if isinstance(self._data, Windows) else [])
            ],
        )

    def _snapshot(self, one: Scored) -> SnapshotRecord:
        book = one.playbook
        return SnapshotRecord(one.seconds - self._began, book.version, one.score, len(book), one.tokens)


async def as_async(stream: Any, run_in_thread: Any) -> AsyncIterator[Any]:
    """A stream as an async iterator; what it gives synchronously is waited for in a thread."""
    if hasattr(stream, "__aiter__"):
        async for one in stream:
            yield one
        return
    iterator, end = iter(stream), object()
    while (one := await run_in_thread(next, iterator, end)) is not end:
        yield one
