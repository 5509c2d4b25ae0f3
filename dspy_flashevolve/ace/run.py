"""One run of AsyncACE: its stages on the workbench, the data, the snapshots.

.. code-block:: text

    sample -> rollout -> reflect -> curate -> apply (the one writer) -> end
                 ^          |                  |   ^
                 +- wrong --+                  +---+ reconcile: stale additions, where the policy says so

Source: ACE (arXiv 2510.04618) section 3; the queue of operations and staleness follow FlashEvolve (arXiv 2605.08520).
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from dspy.primitives.module import Module

from dspy_flashevolve.ace.applying import PlaybookWriter
from dspy_flashevolve.ace.arguments import attribute_of, duplicates_of, policy_of
from dspy_flashevolve.ace.learner import Learner, Sample, with_playbook
from dspy_flashevolve.ace.operations import Add, Operation, Problem, Remove
from dspy_flashevolve.ace.playbook import Playbook
from dspy_flashevolve.ace.sampling import Epochs, Taken, Windows
from dspy_flashevolve.ace.similarity import same_words, without_repeats
from dspy_flashevolve.ace.snapshots import Scored, Snapshots, ValidationCalls
from dspy_flashevolve.engine.admission import Load
from dspy_flashevolve.engine.background import Background, run_with
from dspy_flashevolve.engine.budget import Reservation
from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.errors import RolloutUnresolvedError, RunAbortedError
from dspy_flashevolve.engine.events import Committed, Event, Looked
from dspy_flashevolve.engine.item import End, EndKind, Item, Ticket
from dspy_flashevolve.engine.pipeline import NotNow, Opened
from dspy_flashevolve.engine.stages import Finish, Forward, Outcome
from dspy_flashevolve.engine.staleness import (
    Admit,
    Discard,
    Full,
    GapHistogram,
    History,
    Integrate,
    Look,
    StalenessPolicy,
    gap,
)
from dspy_flashevolve.observe.statistics import AceStats, ProblemRecord, RunStats, SnapshotRecord, WindowRecord
from dspy_flashevolve.workbench import Workbench

logger = logging.getLogger(__name__)

STAGES = ("rollout", "reflect", "curate", "reconcile", "apply")
"""In the order of the way; ``apply`` has one worker."""
LEARNING_SHARE = 0.75
"""Of the slots, what samples may take while a playbook is validated."""


@dataclass
class Counts:
    """What happened to samples; see :class:`AceStats`."""

    samples: int = 0
    right_at_once: int = 0
    corrected: int = 0
    reflections: int = 0
    citations: int = 0
    additions: Counter[str] = field(default_factory=Counter[str])


@dataclass
class AceStages:
    """The handlers of the stages.

    Args:
        learner: the program and the language models.
        writer: of the playbook.
        policy: what becomes of stale additions.
        perfect_score: from which an attempt is right.
        max_rounds: reflections a sample, at least 1; each of a wrong attempt is followed by another attempt.
        claim: (item, stage) -> who asks.
        attempted: called with each sample and its first attempt.
        applied: awaited after each sample whose operations came to the playbook.
        emit: takes events.
        clock: seconds.
        gaps: where gaps are counted.
    """

    learner: Learner
    writer: PlaybookWriter
    policy: StalenessPolicy
    perfect_score: float
    max_rounds: int
    claim: Callable[[Item[Any], str], Claim]
    attempted: Callable[[Sample], None]
    applied: Callable[[], Awaitable[None]]
    emit: Callable[[Event], None]
    clock: Callable[[], float]
    gaps: GapHistogram
    counts: Counts = field(default_factory=Counts)
    _discarded: int = 0
    _passed: int = 0

    def handlers(self) -> dict[str, Callable[[Any], Awaitable[Outcome]]]:
        """Stage -> handler."""
        return {name: getattr(self, name) for name in STAGES}

    async def rollout(self, item: Item[Sample]) -> Outcome:
        """Run the program with the playbook; after a reflection with that too."""
        sample = item.payload
        advice = sample.reflections[-1].text if sample.reflections else ""
        attempt = await self.learner.attempt(self.claim(item, "rollout"), sample, advice)
        sample = replace(sample, attempts=(*sample.attempts, attempt))
        self.counts.citations += len(attempt.cited)
        is_right = attempt.score >= self.perfect_score
        if len(sample.attempts) == 1:
            self.attempted(sample)
            self.counts.right_at_once += is_right
            return Forward("reflect", sample)
        self.counts.corrected += is_right
        done = is_right or len(sample.reflections) >= self.max_rounds
        return Forward("curate" if done else "reflect", sample)

    async def reflect(self, item: Item[Sample]) -> Outcome:
        """What went wrong, the right approach, the insight; a tag for each cited bullet."""
        sample = item.payload
        reflection = await self.learner.reflect(self.claim(item, "reflect"), sample)
        self.counts.reflections += 1
        self.writer.note(reflection.problems)
        tags = tuple({**dict(sample.tags), **dict(reflection.tags)}.items())
        sample = replace(sample, reflections=(*sample.reflections, reflection), tags=tags)
        is_wrong = sample.attempts[-1].score < self.perfect_score
        if not reflection.text:  # tags still count; there is nothing to try again with, or to curate
            self.writer.note([Problem("empty reflection")])
            return Forward("apply", sample)
        return Forward("rollout" if is_wrong else "curate", sample)

    async def curate(self, item: Item[Sample]) -> Outcome:
        """Operations, for the playbook as it is now; they stand for what the curator saw."""
        playbook = self.writer.playbook
        operations, problems = await self.learner.curate(self.claim(item, "curate"), item.payload, playbook)
        self.writer.note(problems)
        return Forward("apply", replace(item.payload, operations=tuple(operations)), version=playbook.version)

    async def apply(self, item: Item[Sample]) -> Outcome:
        """The one writer: count the tags, settle what is stale, do the rest."""
        sample = item.payload
        self.gaps.record("before_commit", gap(self.writer.playbook.version, item.version))
        operations = self._settled(item)
        self.writer.tag(sample.tags)
        if operations is None:  # what is no addition need not wait
            additions = tuple(one for one in sample.operations if isinstance(one, Add))
            self.writer.apply([one for one in sample.operations if not isinstance(one, Add)], item.version)
            return Forward("reconcile", replace(sample, tags=(), operations=additions))
        if any(isinstance(one, Add) for one in operations):
            texts = [one.content for one in operations if not isinstance(one, Remove)]
            texts += [one.content for one in self.writer.playbook.bullets]
            self.writer.note(await self.learner.prepare(texts))
        before = self.writer.playbook.version
        applied = self.writer.apply(operations, item.version)
        self.counts.samples += 1
        await self.applied()
        if applied.playbook.version > before:
            return Finish(End(EndKind.COMMITTED, f"version {applied.playbook.version}"))
        return Finish(End(EndKind.REJECTED, "the playbook stays as it is"))

    async def reconcile(self, item: Item[Sample]) -> Outcome:
        """Read stale additions together with the bullets that came between."""
        sample, version = item.payload, self.writer.playbook.version
        additions = [one for one in sample.operations if isinstance(one, Add)]  # all that came here
        newer = self.writer.newer_than(item.version)
        operations, problems = await self.learner.reconcile(self.claim(item, "reconcile"), additions, newer)
        self.writer.note(problems)
        admitted = sum(isinstance(one, Add) for one in operations)
        changed = len(operations) - admitted
        self._count(admitted=admitted, merged=changed, dropped=len(additions) - admitted - changed)
        settled = replace(sample, operations=tuple(operations), is_reconciled=True)
        return Forward("apply", settled, version=version)

    def _settled(self, item: Item[Sample]) -> Sequence[Operation] | None:
        """The operations without stale additions that do not stay; None where a language model has to read them."""
        sample, operations = item.payload, item.payload.operations
        newer = self.writer.newer_than(item.version)
        additions = sum(isinstance(one, Add) for one in operations)
        if not newer or not additions:
            return operations
        if not sample.is_reconciled:
            decision = self._decide(item)
            if isinstance(decision, Integrate):
                return None
            if isinstance(decision, Discard):
                self._count(dropped=additions)
                self.writer.note([Problem("stale addition", decision.reason)] * additions)
                return [one for one in operations if not isinstance(one, Add)]
            if isinstance(self.policy, Full):
                self._count(admitted=additions)
                return operations
        kept, problems, repeated = without_repeats(operations, newer)
        self.writer.note(problems)
        self.writer.tag(tuple((bullet_id, "helpful") for bullet_id in repeated))
        if not sample.is_reconciled:
            self._count(admitted=additions - len(repeated), merged=len(repeated))
        return kept

    def _decide(self, item: Item[Sample]) -> Admit | Discard | Integrate:
        version = self.writer.playbook.version
        history = History(version, self._discarded, self._passed)
        decision = self.policy.decide(Look("before_commit", item.version), history)
        is_discard = isinstance(decision, Discard)
        self._discarded += is_discard
        self._passed += not is_discard
        word = "discard" if is_discard else "integrate" if isinstance(decision, Integrate) else "admit"
        reason = decision.reason if isinstance(decision, Discard) else ""
        number, behind = item.ticket.number, gap(version, item.version)
        self.emit(Looked(self.clock(), number, "before_commit", behind, word, reason))
        return decision

    def _count(self, **additions: int) -> None:
        self.counts.additions.update(additions)


@dataclass(frozen=True)
class SharedWidth:
    """As many live samples as there are slots, each of which has one request in flight at most; fewer, by a share,
    while a playbook is validated: a request of a sample goes before one of a validation, which would wait for ever.

    Args:
        limit: slots at most.
        is_validating: whether a validation is under way.
        share: of the slots that there are now, what samples may take beside a validation; above 0, up to 1.
    """

    limit: int
    is_validating: Callable[[], bool]
    share: float = LEARNING_SHARE

    def admits(self, load: Load) -> bool:
        """See :class:`~dspy_flashevolve.engine.admission.Admission`."""
        slots = self.limit if load.slots is None else min(self.limit, load.slots)
        return load.live < (max(1, math.ceil(self.share * slots)) if self.is_validating() else slots)

    def is_narrowed(self, load: Load) -> bool:
        """See :class:`~dspy_flashevolve.engine.admission.Admission`: never, the budget bounds samples one by one."""
        del load
        return False


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
        duplicates = duplicates_of(optimizer)
        self._writer = PlaybookWriter(
            playbook, optimizer.token_budget, optimizer.count_tokens, duplicates or same_words
        )
        self._learner = Learner(self.bench, optimizer, student, names, valset or (), duplicates)
        self._stages = AceStages(
            learner=self._learner,
            writer=self._writer,
            policy=policy_of(optimizer),
            perfect_score=optimizer.perfect_score,
            max_rounds=optimizer.max_rounds,
            claim=self.bench.claim,
            attempted=self._attempted,
            applied=self._applied,
            emit=self.bench.bus.emit,
            clock=self.bench.clock,
            gaps=self.bench.gaps,
        )
        self._validation_calls = ValidationCalls(self.bench.budget, len(valset or ()))
        self.snapshots = Snapshots(
            optimizer.eval_every,
            optimizer.validations_at_once,
            self._validated,
            self.bench.beside,
            self._validation_calls,
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
        self._validation_calls.set_aside()
        admission = SharedWidth(self.bench.width, lambda: self.snapshots.running > 0)
        source = self.bench.source(self._select, calls=1 + self._of.max_rounds, admission=admission)
        source.on_end = self._ended
        self._learner.reservations = source.reservations
        handlers = self._stages.handlers()
        stages = [self.bench.stage(n, handlers[n], workers=1 if n == "apply" else None) for n in handlers]
        readers = self._data.readers(lambda: self.bench.pipeline and self.bench.pipeline.wake())
        await run_with(Background(), lambda: self.bench.evolve(stages, source), readers)
        if self._stages.counts.samples and not self._writer.operations:
            kinds = dict(self._writer.problems)
            logger.warning("AsyncACE: no sample changed the playbook. What stood in the way, by kind: %s", kinds)
        if self._valset is not None:
            await self.snapshots.finish(self._writer.playbook)

    def _ended(self, ticket: Ticket, end: End) -> None:
        del end
        self._data.ended(ticket)
        if self.snapshots.waits_for_calls:  # before another sample takes what this one gave back
            self._validation_calls.save()

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
        """The student with the best playbook; with the first one where none is validated."""
        best = self.best()
        playbook = self._writer.playbook if best is None else best
        program: Any = with_playbook(self._student, self._names, playbook)
        setattr(program, attribute_of(program), playbook)
        program.async_stats = self.statistics()
        return program

    async def _select(self, ticket: Ticket) -> Opened | NotNow:
        if self._valset is not None:
            await self.snapshots.first(self._writer.playbook)
        taken = await self._data.take(ticket, self._writer.playbook)
        if not isinstance(taken, Taken):
            return taken
        playbook = self._writer.playbook if taken.playbook is None else taken.playbook
        sample = Sample(taken.example, taken.index, playbook, window=taken.window)
        return Opened("rollout", Item(sample, ticket, playbook.version))

    def _attempted(self, sample: Sample) -> None:
        if isinstance(self._data, Windows) and sample.window is not None:
            self._data.scored(sample.window, sample.attempts[0].score)

    async def _applied(self) -> None:
        self._last_sample = self.bench.clock()
        if self._valset is not None:
            await self.snapshots.learnt(self._writer.playbook)

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
        behind = self._writer.playbook.version - playbook.version
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
        run, counts, writer = self.bench.statistics(), self._stages.counts, self._writer
        best = self.best()
        minutes = (self._last_sample - self._began) / 60
        known: dict[str, Any] = {one.name: getattr(run, one.name) for one in fields(RunStats)}
        known |= {**vars(counts), "additions": dict(counts.additions)}
        return AceStats(
            **known,
            samples_per_minute=counts.samples / minutes if minutes > 0 else 0.0,
            version=writer.playbook.version,
            best_version=writer.playbook.version if best is None else best.version,
            operations=dict(writer.operations),
            tags=dict(writer.tags),
            evicted=writer.evicted,
            problems=dict(writer.problems),
            first_problems=[ProblemRecord(one.kind, one.detail) for one in writer.examples],
            snapshots=[
                SnapshotRecord(
                    one.seconds - self._began, one.playbook.version, one.score, len(one.playbook), one.tokens
                )
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
