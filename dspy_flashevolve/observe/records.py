"""The figures of a run: frozen records."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["finished", "stopped", "failed", "aborted"]
"""How a run ended; see :class:`RunStats`."""


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """One change of the pool.

    Args:
        seconds: since the run began.
        candidate: its index.
        score: its aggregate validation score.
        best_score: the pool's best after it.
        gap: commits that its ticket had not seen.
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
        ticket: the one that carries the result.
        members: tickets whose children were read.
        verdicts: (ticket, verdict, reason), one a child and component.
        failed: why no reply could be read; empty when one was.
    """

    seconds: float
    ticket: int
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
        members: tickets whose children are in it.
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
    """A width that a rule has changed: the workers of a stage, or the slots of an endpoint.

    Args:
        seconds: since the run began.
        name: the stage, or the endpoint.
        before, after: workers, or slots.
        reason: a sentence for people.
    """

    seconds: float
    name: str
    before: int
    after: int
    reason: str


@dataclass(frozen=True, slots=True)
class StageRecord:
    """A ticket's time in one stage.

    Args:
        ticket: its number.
        stage: the stage's name.
        queued: when it came into the stage's queue, in seconds since the run began.
        began: when a worker took it.
        ended: when the stage was done with it. Of tickets that were worked on together each has its share of the time.
    """

    ticket: int
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
        stop_reason: why no more tickets were admitted, or what ended the run.
        failed: the run was given up, because tickets failed one after the other.
        outcome: how the run ended, in one word:
            "finished": there was nothing more to do, or one of its limits was reached (metric calls, seconds, dollars,
            reflections).
            "stopped": somebody asked for it before: Ctrl-C, SIGTERM, a stopper, the file gepa.stop.
            "failed": it was given up, the best so far was returned.
            "aborted": an exception ended it, the second Ctrl-C and a cancelled ``acompile`` too.
        tickets: evolution steps opened.
        ended: way -> tickets (committed, rejected, discarded, failed, cancelled).
        end_reasons: reason -> tickets, for all that did not commit.
        metric_calls: paid rollouts, the seed's validation included.
        max_metric_calls: the budget; None without one.
        slots: slots there are, at most this many requests in flight.
        peak_slots: the most that were in use at once.
        occupancy: share of slot-seconds in use, 0 to 1, of the slots that there were by the limits of their time.
        busy_seconds_by_stage: slot-seconds.
        worked_seconds_by_stage: summed over a stage's workers, waiting for slots included.
        waited_seconds_by_stage: summed over items, in the stage's queue.
        gaps: place -> gap -> looks (DESIGN: gap = version now less version seen).
        shared_rollouts: rollouts that joined one in flight instead of being paid.
        retried_requests: requests that the provider asked to come back later.
        timed_out_rollouts: runs of rollouts that took longer than rollout_timeout_seconds.
        duplicated_rollouts: rollouts that were begun a second time.
        requests_by_stage: rollouts and other requests that were answered.
        tokens_by_stage: prompt and completion tokens of them, as the LMs report them.
        cost_dollars: of all LM calls whose model is in litellm's cost map; worked out only for a run that asks for it
            (``max_cost``), else 0.
        generations: the most steps from the seed to a candidate, along its parents.
        commits: every change of the pool, in order.
        looks: decision -> items that the staleness policy looked at.
        worker_changes: every change of a stage's workers, in order; none without a controller.
        limit_changes: every change of an endpoint's slots, in order; none with a fixed number of slots.
        pauses: times that an endpoint refused most of what it was sent, and was left alone for a while.
        stages: what each ticket did when, by end: the run's timeline. Of a long run the first 10,000 records.
    """

    schedule: str
    seconds: float
    stop_reason: str
    failed: bool
    outcome: Outcome
    tickets: int
    ended: dict[str, int]
    end_reasons: dict[str, int]
    metric_calls: int
    max_metric_calls: int | None
    slots: int
    peak_slots: int
    occupancy: float
    busy_seconds_by_stage: dict[str, float]
    worked_seconds_by_stage: dict[str, float]
    waited_seconds_by_stage: dict[str, float]
    gaps: dict[str, dict[int, int]]
    shared_rollouts: int
    retried_requests: int
    timed_out_rollouts: int
    duplicated_rollouts: int
    requests_by_stage: dict[str, int]
    tokens_by_stage: dict[str, int]
    cost_dollars: float
    generations: int
    commits: list[CommitRecord] = field(default_factory=list[CommitRecord])
    looks: dict[str, int] = field(default_factory=dict[str, int])
    worker_changes: list[ChangeRecord] = field(default_factory=list[ChangeRecord])
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
        ends: dict[str, int] = {}
        for head in self.heads:
            ends[head.end] = ends.get(head.end, 0) + 1
        return ends
