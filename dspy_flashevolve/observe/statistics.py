"""The figures of a run: frozen records, gathered from its events, and one line at its end."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from dspy_flashevolve.engine.events import (
    Committed,
    EndpointPaused,
    Event,
    ExampleGivenUp,
    HeadEnded,
    HeadLanded,
    Integrated,
    LimitChanged,
    Looked,
    RequestFinished,
    RolloutFinished,
    Speculated,
    SpeculationEnded,
    StageVisited,
    StepClosed,
    StepOpened,
)
from dspy_flashevolve.engine.loop import LoopClock
from dspy_flashevolve.engine.rollouts import Rollouts
from dspy_flashevolve.engine.run import Outcome
from dspy_flashevolve.engine.scheduler import SlotStatistics
from dspy_flashevolve.engine.steps import EndKind

MOST_STAGE_RECORDS = 10_000
"""Of a long run the timeline has the beginning only."""
REFLECTION_STAGES = ("propose", "integrate")
"""GEPA's stages whose requests run no program."""


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """One change of the pool.

    Args:
        seconds: since the run began.
        candidate: its index.
        score: its aggregate validation score.
        best_score: the pool's best after it.
        gap: commits that its step had not seen.
        generation: steps from the seed.
    """

    seconds: float
    candidate: int
    score: float
    best_score: float
    gap: int
    generation: int


@dataclass(frozen=True, slots=True)
class IntegrationRecord:
    """Children that were read together.

    Args:
        seconds: since the run began.
        step: the one that carries the result.
        members: steps whose children were read.
        verdicts: (step, verdict, reason), one a child and component.
        failed: why no reply could be read; empty when one was.
    """

    seconds: float
    step: int
    members: tuple[int, ...]
    verdicts: tuple[tuple[int, str, str], ...]
    failed: str = ""


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """An integrated candidate.

    Args:
        seconds: since the run began, when its screen ended.
        head: its handle.
        base: handle of the head below; None where it stands on a confirmed candidate.
        base_candidate: index of that candidate, or of the head's nearest confirmed ancestor.
        members: steps whose children are in it.
        before, after: summed scores of its base and of itself on the same examples.
        end: "failed its screen", "confirmed", "superseded", "rolled back" or "unfinished".
        score: on the validation examples that decided; None where none did.
        best: the pool's best on these.
        candidate: its index in the pool; None unless it was confirmed.
    """

    seconds: float
    head: int
    base: int | None
    base_candidate: int
    members: tuple[int, ...]
    before: float
    after: float
    end: str
    score: float | None = None
    best: float | None = None
    candidate: int | None = None


@dataclass(frozen=True, slots=True)
class ChangeRecord:
    """Slots that a rule has changed: those of an endpoint, or of a stage.

    Args:
        seconds: since the run began.
        name: the endpoint, or the stage.
        before, after: slots.
        reason: a sentence for people.
    """

    seconds: float
    name: str
    before: int
    after: int
    reason: str


@dataclass(frozen=True, slots=True)
class StageRecord:
    """A step's time in one stage, from its first request there to its last.

    Args:
        step: its number.
        stage: the stage's name.
        queued: when its first request came into the stage's queue, in seconds since the run began.
        began: when that had a slot.
        ended: when the last one was done.
    """

    step: int
    stage: str
    queued: float
    began: float
    ended: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStats:
    """What a run on the engine did, whatever it evolved.

    Args:
        schedule: "async" or "lockstep".
        seconds: from the start of the run to its end.
        stop_reason: why no more steps were admitted, or what ended the run.
        failed: the run was given up, because steps failed one after the other.
        outcome: how the run ended, in one word:
            "finished": there was nothing more to do, or one of its limits was reached (metric calls, seconds, dollars,
            reflections).
            "stopped": somebody asked for it before: Ctrl-C, SIGTERM, a stopper, the file gepa.stop.
            "failed": it was given up, the best so far was returned.
            "aborted": an exception ended it, the second Ctrl-C and a cancelled ``acompile`` too.
        steps: evolution steps that began.
        ended: way -> steps (committed, rejected, discarded, failed, cancelled).
        end_reasons: reason -> steps, for all that did not commit.
        metric_calls: paid rollouts, the seed's validation included.
        max_metric_calls: the budget; None without one.
        slots: slots there are, at most this many requests in flight.
        peak_slots: the most that were in use at once.
        occupancy: share of slot-seconds in use, 0 to 1, of the slots that there were by the limits of their time.
        busy_seconds_by_stage: slot-seconds.
        waited_seconds_by_stage: summed over requests, in the stage's queue.
        gaps: place -> gap (version now less version seen) -> looks.
        shared_rollouts: rollouts that joined one in flight instead of being paid.
        retried_requests: requests that the provider asked to come back later.
        unanswered_examples: those that got no answer while others did, and score ``failure_score``: for every
            candidate, or for one alone where they were answered for others.
        timed_out_rollouts: runs of rollouts that took longer than rollout_timeout_seconds.
        requests_by_stage: rollouts and other requests that were answered.
        tokens_by_stage: prompt and completion tokens of them, as the LMs report them.
        cost_dollars: of all LM calls whose model is in litellm's cost map; worked out only for a run that asks for it
            (``max_cost``), else 0.
        generations: the most steps from the seed to a candidate, along its parents.
        commits: every change of the pool, in order.
        looks: decision -> items that the staleness policy looked at.
        limit_changes: every change of an endpoint's or a stage's slots, in order; none with a fixed number of slots.
        pauses: times that an endpoint refused most of what it was sent, and was left alone for a while.
        stages: what each step did when, by end: the run's timeline. Of a long run the first 10,000 records.
    """

    schedule: str
    seconds: float
    stop_reason: str
    failed: bool
    outcome: Outcome
    steps: int
    ended: dict[str, int]
    end_reasons: dict[str, int]
    metric_calls: int
    max_metric_calls: int | None
    slots: int
    peak_slots: int
    occupancy: float
    busy_seconds_by_stage: dict[str, float]
    waited_seconds_by_stage: dict[str, float]
    gaps: dict[str, dict[int, int]]
    shared_rollouts: int
    retried_requests: int
    timed_out_rollouts: int
    unanswered_examples: int
    requests_by_stage: dict[str, int]
    tokens_by_stage: dict[str, int]
    cost_dollars: float
    generations: int
    commits: list[CommitRecord] = field(default_factory=list[CommitRecord])
    looks: dict[str, int] = field(default_factory=dict[str, int])
    limit_changes: list[ChangeRecord] = field(default_factory=list[ChangeRecord])
    pauses: int = 0
    stages: list[StageRecord] = field(default_factory=list[StageRecord])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncStats(RunStats):
    """What an AsyncGEPA run did, beside ``DspyGEPAResult``; see :class:`RunStats` for the rest.

    Args:
        proposals: children that the reflection wrote.
        proposals_per_minute: the same over time.
        task_tokens: prompt and completion tokens of rollouts, as the LMs report them.
        reflection_tokens: the same of reflections and integrations.
        reflection_calls: reflections and integrations asked for.
        integration_calls: LM calls of integrations.
        verdicts: orthogonal, subsumed, conflicting -> children judged so.
        integrations: every integration, in order, with the verdicts and their reasons.
        heads: every integrated candidate that was screened as a head, in order, with what became of it.
        speculated: candidates that could be selected before their validation was done, heads before their screen was.
        speculation_ends: confirmed, fell behind, removed -> speculative candidates that are no heads.
    """

    proposals: int
    proposals_per_minute: float
    task_tokens: int
    reflection_tokens: int
    reflection_calls: int
    integration_calls: int
    verdicts: dict[str, int] = field(default_factory=dict[str, int])
    integrations: list[IntegrationRecord] = field(default_factory=list[IntegrationRecord])
    heads: list[HeadRecord] = field(default_factory=list[HeadRecord])
    speculated: int = 0
    speculation_ends: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def head_ends(self) -> dict[str, int]:
        """confirmed, superseded, rolled back, failed its screen, unfinished -> heads."""
        return dict(Counter(head.end for head in self.heads))


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A playbook that was validated.

    Args:
        seconds: since the run began, when its score was known.
        version: of the playbook.
        score: mean over the validation set.
        bullets: in it.
        tokens: of its text.
    """

    seconds: float
    version: int
    score: float
    bullets: int
    tokens: int


@dataclass(frozen=True, slots=True)
class WindowRecord:
    """A window of a stream, scored before anything was learnt from it.

    Args:
        window: from 0.
        version: of the playbook that it was scored with.
        examples: in it.
        scored: of these, those that the provider answered.
        score: their mean; None where there is none.
    """

    window: int
    version: int
    examples: int
    scored: int
    score: float | None


@dataclass(frozen=True, slots=True)
class ProblemRecord:
    """Something in a reply that could not be used.

    Args:
        kind: problems are counted by it.
        detail: the beginning of what it was.
    """

    kind: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AceStats(RunStats):
    """What an AsyncACE run did; see :class:`RunStats` for the rest.

    Args:
        samples: training examples that came through to the playbook.
        samples_per_minute: the same over the time until the last of them.
        right_at_once: samples whose first attempt was right.
        corrected: samples that became right after a reflection.
        reflections: asked for.
        citations: bullets cited by attempts.
        version: of the last playbook: how often its texts changed.
        best_version: of the playbook that is returned.
        operations: add, update, merge, remove -> operations done.
        tags: helpful, harmful, neutral -> tags counted.
        additions: admitted, merged, dropped -> stale additions.
        evicted: bullets that the token budget drove out.
        problems: kind -> how often a reply asked for what could not be done, or could not be read.
        first_problems: the first of them.
        snapshots: every playbook that was validated, in the order in which their scores came.
        superseded: snapshots that a newer one replaced before their validation began.
        unpaid: snapshots that the budget could not pay.
        unresolved: snapshots whose validation the provider did not answer; they have no score.
        windows: of a stream, in order.
    """

    samples: int
    samples_per_minute: float
    right_at_once: int
    corrected: int
    reflections: int
    citations: int
    version: int
    best_version: int
    operations: dict[str, int]
    tags: dict[str, int]
    additions: dict[str, int]
    evicted: int
    problems: dict[str, int]
    first_problems: list[ProblemRecord]
    snapshots: list[SnapshotRecord] = field(default_factory=list[SnapshotRecord])
    superseded: int = 0
    unpaid: int = 0
    unresolved: int = 0
    windows: list[WindowRecord] = field(default_factory=list[WindowRecord])


class Recorder:
    """Gathers events while a run goes on.

    Args:
        clock: the run's.
    """

    def __init__(self, clock: LoopClock) -> None:
        self.clock = clock
        self.steps = 0
        self.ended: dict[str, int] = {kind.value: 0 for kind in EndKind}
        self.end_reasons = Counter[str]()
        self.requests = Counter[str]()
        self.tokens = Counter[str]()
        self.cost_dollars = 0.0
        self.commits: list[CommitRecord] = []
        self.looks = Counter[str]()
        self.integrations: list[IntegrationRecord] = []
        self.heads: dict[int, HeadRecord] = {}
        self.speculated = 0
        self.speculation_ends = Counter[str]()
        self.limit_changes: list[ChangeRecord] = []
        self.pauses = 0
        self.unanswered_examples = 0
        self.stages: list[StageRecord] = []

    def __call__(self, event: Event) -> None:
        """Take one event."""
        seconds = event.seconds - self.clock.began
        if isinstance(event, RolloutFinished | RequestFinished):
            self.requests[event.stage] += 1
            self.tokens[event.stage] += event.tokens
            self.cost_dollars += event.cost_dollars
        elif isinstance(event, StepOpened):
            self.steps += 1
        elif isinstance(event, StageVisited):
            if len(self.stages) < MOST_STAGE_RECORDS:
                queued, began = event.queued_seconds - self.clock.began, event.began_seconds - self.clock.began
                self.stages.append(StageRecord(event.step, event.stage, queued, began, ended=seconds))
        elif isinstance(event, StepClosed):
            self.ended[event.end.kind.value] += 1
            if event.end.kind is not EndKind.COMMITTED:
                self.end_reasons[event.end.reason] += 1
        elif isinstance(event, Committed):
            self.commits.append(
                CommitRecord(seconds, event.candidate, event.score, event.best_score, event.gap, event.generation)
            )
        elif isinstance(event, Speculated):
            self.speculated += 1
        elif isinstance(event, SpeculationEnded):
            self.speculation_ends[event.end.split(":")[0]] += 1
        elif isinstance(event, LimitChanged):
            self.limit_changes.append(ChangeRecord(seconds, event.name, event.before, event.after, event.reason))
        elif isinstance(event, ExampleGivenUp):
            self.unanswered_examples += 1
        elif isinstance(event, EndpointPaused):
            self.pauses += 1
        elif isinstance(event, Looked):
            self.looks[event.decision] += 1
        elif isinstance(event, Integrated):
            self.integrations.append(
                IntegrationRecord(seconds, event.step, event.members, event.verdicts, event.failed)
            )
        elif isinstance(event, HeadLanded):
            self.heads[event.head] = HeadRecord(
                seconds,
                event.head,
                event.base,
                event.base_candidate,
                event.members,
                event.before,
                event.after,
                end="unfinished" if event.passed else "failed its screen",
            )
        elif isinstance(event, HeadEnded) and event.head in self.heads:
            self.heads[event.head] = replace(
                self.heads[event.head], end=event.end, score=event.score, best=event.best, candidate=event.candidate
            )

    def stats(
        self,
        *,
        schedule: str,
        seconds: float,
        stop_reason: str,
        outcome: Outcome,
        metric_calls: int,
        max_metric_calls: int | None,
        slots: SlotStatistics,
        gaps: dict[str, dict[int, int]],
        rollouts: Rollouts,
        retried_requests: int,
    ) -> RunStats:
        """The record of the run so far."""
        return RunStats(
            schedule=schedule,
            seconds=seconds,
            stop_reason=stop_reason,
            failed=outcome == "failed",
            outcome=outcome,
            steps=self.steps,
            ended=dict(self.ended),
            end_reasons=dict(self.end_reasons),
            metric_calls=metric_calls,
            max_metric_calls=max_metric_calls,
            slots=slots.limit,
            peak_slots=slots.peak,
            occupancy=slots.busy_seconds / slots.limit_seconds if slots.limit_seconds else 0.0,
            busy_seconds_by_stage={name: one.served_seconds for name, one in slots.stages.items()},
            waited_seconds_by_stage={name: one.waited_seconds for name, one in slots.stages.items()},
            gaps=gaps,
            shared_rollouts=rollouts.shared,
            retried_requests=retried_requests,
            unanswered_examples=self.unanswered_examples,
            timed_out_rollouts=rollouts.timed_out,
            requests_by_stage=dict(self.requests),
            tokens_by_stage=dict(self.tokens),
            cost_dollars=self.cost_dollars,
            generations=max((commit.generation for commit in self.commits), default=0),
            commits=list(self.commits),
            looks=dict(self.looks),
            limit_changes=list(self.limit_changes),
            pauses=self.pauses,
            stages=list(self.stages),
        )

    def async_stats(
        self,
        of_run: RunStats,
        *,
        proposals: int,
        reflection_calls: int,
        integration_calls: int,
    ) -> AsyncStats:
        """The same with what is GEPA's own.

        Args:
            of_run: what :meth:`stats` says.
            proposals: children that the reflection wrote.
            reflection_calls: reflections and integrations asked for.
            integration_calls: LM calls of integrations.
        """
        minutes = of_run.seconds / 60
        reflection = sum(self.tokens[stage] for stage in REFLECTION_STAGES)
        return AsyncStats(
            **{one.name: getattr(of_run, one.name) for one in fields(of_run)},
            proposals=proposals,
            proposals_per_minute=proposals / minutes if minutes else 0.0,
            task_tokens=sum(self.tokens.values()) - reflection,
            reflection_tokens=reflection,
            reflection_calls=reflection_calls,
            integration_calls=integration_calls,
            verdicts=dict(Counter(verdict for one in self.integrations for _, verdict, _ in one.verdicts)),
            integrations=list(self.integrations),
            heads=list(self.heads.values()),
            speculated=self.speculated,
            speculation_ends=dict(self.speculation_ends),
        )


WORDS = {
    "finished": "finished",
    "stopped": "was stopped",
    "failed": "gave up, and returns the best program so far",
    "aborted": "was aborted",
}


def log_summary(
    logger: logging.Logger,
    stats: RunStats,
    best_score: float | None,
    error: bool = False,
    *,
    name: str = "AsyncGEPA",
    made: str = "",
) -> None:
    """Say how a run ended, what it has found and what it has spent.

    INFO where it came to its end, WARNING where it was cancelled, ERROR where it failed or an error ended it.

    Args:
        best_score: the pool's best; None where the seed was not validated.
        error: what aborted the run was an error.
        name: of the optimizer.
        made: what it has made, such as "12 proposals"; default its steps.
    """
    level = logging.ERROR if stats.failed or error else logging.INFO
    level = logging.WARNING if stats.outcome == "aborted" and not error else level
    logger.log(
        level,
        "%s %s: %s, %d accepted, best score %s, %d of %s metric calls, %.1f s; %s.",
        name,
        WORDS[stats.outcome],
        made or f"{stats.steps} steps",
        stats.ended["committed"],
        "unknown" if best_score is None else f"{best_score:.4g}",
        stats.metric_calls,
        "unlimited" if stats.max_metric_calls is None else stats.max_metric_calls,
        stats.seconds,
        stats.stop_reason.rstrip("."),
    )
