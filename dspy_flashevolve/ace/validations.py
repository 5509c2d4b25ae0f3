"""Validations of a run of AsyncACE: which playbooks are scored, which calls pay for that, and which is the best."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from dspy_flashevolve.ace.learner import AceSettings, Learner
from dspy_flashevolve.ace.playbook import Playbook, PlaybookWriter
from dspy_flashevolve.engine.errors import RolloutUnresolvedError
from dspy_flashevolve.engine.events import Committed
from dspy_flashevolve.engine.steps import Reservation, Step
from dspy_flashevolve.engine.store import BEFORE_STEPS, Store, hash_of, id_text
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.observe.statistics import SnapshotRecord
from dspy_flashevolve.programs.run import DspyRun

logger = logger_named(__name__)
ROLLBACK_ERRORS = 2.0
"""Standard errors by which a validated playbook has to be worse than the best one, example by example, before the run
goes on from that: the usual limit of chance. With 1.0 the searches of docs/ace.md came out alike."""


class Validations:
    """Scores playbooks beside the samples, each version once, or again where the provider gave no answer.

    One validation at a time is made. A playbook that is to be validated meanwhile, or that the budget cannot pay yet,
    waits; a newer one takes its place. The metric calls of the first and the last playbook are set aside from the
    beginning, so that samples cannot take them. ``seconds`` returns how long the run has taken, and ``write_playbook``
    writes the writer's state to the journal.
    """

    def __init__(
        self,
        settings: AceSettings,
        run: DspyRun,
        learner: Learner,
        writer: PlaybookWriter,
        valset: Sequence[Any],
        seconds: Callable[[], float],
        write_playbook: Callable[[], None],
    ) -> None:
        self._settings, self._run, self._learner, self._writer = settings, run, learner, writer
        self._seconds, self._write_playbook = seconds, write_playbook
        self._examples = range(len(valset))
        self._step = Step(BEFORE_STEPS, random.Random(settings.seed), Reservation(run.budget, 0))
        calls, calls_left = 2 * len(valset), run.budget.left
        self._set_aside = Reservation(run.budget, 0)
        # A run that goes on may have less: what was in flight at the crash counts as spent.
        self._set_aside.extend(calls if calls_left is None else min(calls, calls_left))
        self._first = writer.playbook
        self._waiting: Playbook | None = None
        self._validating: Playbook | None = None
        self._open_before: list[Playbook] = []
        """What an interrupted run has left open."""
        self._begun: set[int] = set()
        self._scores: dict[int, Sequence[float]] = {}
        """Version of a playbook -> its score on each example."""
        self.scored: dict[Playbook, SnapshotRecord] = {}
        self.unresolved = 0

    @property
    def is_validating(self) -> bool:
        """Whether a validation is being made."""
        return self._validating is not None

    @property
    def best(self) -> Playbook | None:
        """The earliest of the playbooks with the highest score; None before there is one."""
        scored = list(self.scored.items())
        return max(scored, key=lambda pair: (pair[1].score, -pair[0].version), default=(None, None))[0]

    async def begin(self, first: Playbook) -> None:
        """Start the validation of the first playbook, and of those that an interrupted run left open."""
        self._first, payment = first, Reservation(self._run.budget, 0)
        if self._needs_score(first) and self._set_aside.lend(payment, self._unpaid(first)):
            await self._begin(first, payment)
        for playbook in self._open_before:
            await self._offer(playbook)
        self._open_before = []

    async def after_sample(self) -> None:
        """Let the newest playbook be validated if that is due after so many samples."""
        if self._writer.counts.samples % self._settings.eval_every:
            await self._next()
            return
        await self._offer(self._first)  # again, in case the provider gave its validation no answer
        await self._offer(self._writer.playbook)

    async def finish(self) -> None:
        """Validate the last playbook and the first one, where they have no score yet, and wait for that."""
        self._waiting = None
        self._set_aside.refund()  # no sample is left that could take it
        for playbook in {book.version: book for book in (self._writer.playbook, self._first)}.values():
            payment = Reservation(self._run.budget, 0)
            if self._needs_score(playbook) and payment.extend(self._unpaid(playbook)):
                await self._validate(playbook, payment)

    def _needs_score(self, playbook: Playbook) -> bool:
        """Return whether a playbook has no score; what a rollback made has the texts of one that has."""
        scored = {other.version for other in list(self.scored)}  # other threads ask for statistics meanwhile
        return playbook.version not in scored | {self._writer.rolled_back_version}

    def _unpaid(self, playbook: Playbook) -> int:
        """Return how many rollouts of a playbook's validation the journal does not have yet."""
        candidate = hash_of(self._learner.candidate(playbook.render()))
        return self._run.store.count_missing(BEFORE_STEPS, candidate, "val", self._examples, traced=False)

    async def _offer(self, playbook: Playbook) -> None:
        """Let a playbook wait for its validation, unless that has begun before."""
        if playbook.version not in self._begun and self._needs_score(playbook):
            self._waiting = playbook
            await self._next()
            self._write_open()

    async def _next(self) -> None:
        payment = Reservation(self._run.budget, 0)
        if self._waiting is not None and self._validating is None and payment.extend(self._unpaid(self._waiting)):
            playbook, self._waiting = self._waiting, None
            await self._begin(playbook, payment)

    async def _begin(self, playbook: Playbook, payment: Reservation) -> None:
        """Validate a playbook beside the samples; in lockstep it is done when this returns."""

        async def work() -> None:
            try:
                await self._validate(playbook, payment)
            finally:
                self._validating = None
            self._write_open()
            await self._next()

        self._begun.add(playbook.version)
        self._validating = playbook
        self._write_open()
        await self._run.run_in_background(work)

    async def _validate(self, playbook: Playbook, payment: Reservation) -> None:
        """Score a playbook on the validation set, and write that down."""
        run, version = self._run, playbook.version
        self._step.record_version(version)
        try:
            scores = await self._learner.validate(self._step, playbook, payment)
        except RolloutUnresolvedError as error:
            logger.warning("The validation of version %d has no score: %s", version, error)
            self.unresolved += 1
            self._begun.discard(version)
            return
        finally:
            payment.refund()
        score, tokens = sum(scores) / len(scores), playbook.tokens(self._settings.count_tokens)
        number, seconds = len(self.scored), self._seconds()
        self._roll_back_from(playbook, scores)
        self._scores[version] = scores
        self.scored[playbook] = SnapshotRecord(seconds, version, score, len(playbook), tokens)
        best = max(snapshot.score for snapshot in self.scored.values())
        behind = self._writer.playbook.version - version
        run.bus.emit(Committed(run.clock(), BEFORE_STEPS, version, behind, number, score, best, version))
        texts = self._learner.candidate(playbook.render())
        by_example = {id_text(example): example_score for example, example_score in enumerate(scores)}
        more = {"playbook": playbook.to_dict(), "seconds": seconds, "tokens": tokens}
        run.store.record_commit(BEFORE_STEPS, number, version, texts, [], by_example, score, more)
        await run.store.flush()

    def _roll_back_from(self, playbook: Playbook, scores: Sequence[float]) -> None:
        """Go on from the best validated playbook where this one, which was validated later, is worse beyond chance.

        ACE's reference loop does not, and neither does lockstep. One that is older than the last rollback tells nothing
        of what has been learnt since.
        """
        best, is_new = self.best, playbook.version >= (self._writer.rolled_back_version or 0)
        if best is None or not is_new or len(scores) < 2 or self._settings.schedule == "lockstep":
            return
        losses = [before - after for before, after in zip(self._scores[best.version], scores, strict=True)]
        if statistics.mean(losses) > ROLLBACK_ERRORS * statistics.stdev(losses) / math.sqrt(len(losses)):
            self._writer.roll_back(best)
            self._write_playbook()

    def _write_open(self) -> None:
        """Write to the journal which playbooks are still to be validated."""
        now = [playbook for playbook in (self._validating, self._waiting) if playbook is not None]
        still_open = [*self._open_before, *now]
        self._run.store.set_state("snapshots", lambda: [playbook.to_dict() for playbook in still_open])

    def resume(self, store: Store) -> None:
        """Go on from what the journal says of validations."""
        for row in store.rows("SELECT score, scores, more FROM commits ORDER BY candidate_index"):
            more = json.loads(row["more"])
            book = Playbook.from_dict(more["playbook"])
            self._scores[book.version] = list(json.loads(row["scores"]).values())
            self.scored[book] = SnapshotRecord(more["seconds"], book.version, row["score"], len(book), more["tokens"])
        self._begun = set(self._scores)
        self._open_before = [Playbook.from_dict(data) for data in store.get_state("snapshots") or []]
