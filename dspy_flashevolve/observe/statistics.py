"""The figures of a run, in one frozen record."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dspy_flashevolve.engine.events import Committed, Event, StageFinished, TicketClosed, TicketOpened
from dspy_flashevolve.engine.item import EndKind
from dspy_flashevolve.engine.slots import SlotStatistics


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
class AsyncStats:
    """What an AsyncGEPA run did, beside ``DspyGEPAResult``.

    Args:
        schedule: "async" or "lockstep".
        seconds: from the first rollout to the last commit.
        stop_reason: why no more tickets were admitted.
        failed: the run was given up, because tickets failed one after the other.
        tickets: evolution steps opened.
        ended: way -> tickets (committed, rejected, discarded, failed, cancelled).
        end_reasons: reason -> tickets, for all that did not commit.
        proposals: children that the reflection wrote.
        proposals_per_minute: the same over time.
        metric_calls: paid rollouts, the seed's validation included.
        max_metric_calls: the budget; None without one.
        slots: slots there are, at most this many requests in flight.
        peak_slots: the most that were in use at once.
        occupancy: share of slot-seconds in use, 0 to 1.
        busy_seconds_by_stage: slot-seconds.
        worked_seconds_by_stage: summed over a stage's workers, waiting for slots included.
        waited_seconds_by_stage: summed over items, in the stage's queue.
        gaps: place -> gap -> looks (DESIGN: gap = version now less version seen).
        shared_rollouts: rollouts that joined one in flight instead of being paid.
        retried_requests: requests that the provider asked to come back later.
        task_tokens: prompt and completion tokens of rollouts, as the LMs report them.
        reflection_tokens: the same of reflections.
        generations: the most steps from the seed to a candidate.
        commits: every change of the pool, in order.
    """

    schedule: str
    seconds: float
    stop_reason: str
    failed: bool
    tickets: int
    ended: dict[str, int]
    end_reasons: dict[str, int]
    proposals: int
    proposals_per_minute: float
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
    task_tokens: int
    reflection_tokens: int
    generations: int
    commits: list[CommitRecord] = field(default_factory=list[CommitRecord])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


class Recorder:
    """Gathers events while a run goes on.

    Args:
        began: the engine's clock at the start, in seconds.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self.tickets = 0
        self.live = 0
        self.ended: dict[str, int] = {kind.value: 0 for kind in EndKind}
        self.end_reasons: dict[str, int] = {}
        self.worked: dict[str, float] = {}
        self.waited: dict[str, float] = {}
        self.commits: list[CommitRecord] = []

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, TicketOpened):
            self.tickets += 1
            self.live = event.live
        elif isinstance(event, StageFinished):
            self.worked[event.stage] = self.worked.get(event.stage, 0.0) + event.worked_seconds
            self.waited[event.stage] = self.waited.get(event.stage, 0.0) + event.waited_seconds
        elif isinstance(event, TicketClosed):
            self._closed(event)
        elif isinstance(event, Committed):
            self.commits.append(
                CommitRecord(
                    seconds=event.seconds - self._began,
                    candidate=event.candidate,
                    score=event.score,
                    best_score=event.best_score,
                    gap=event.gap,
                    generation=event.generation,
                )
            )

    def _closed(self, event: TicketClosed) -> None:
        self.live = event.live
        self.ended[event.end.kind.value] += 1
        if event.end.kind is not EndKind.COMMITTED:
            self.end_reasons[event.end.reason] = self.end_reasons.get(event.end.reason, 0) + 1

    def stats(
        self,
        *,
        schedule: str,
        seconds: float,
        stop_reason: str,
        failed: bool,
        proposals: int,
        metric_calls: int,
        max_metric_calls: int | None,
        slots: SlotStatistics,
        gaps: dict[str, dict[int, int]],
        shared_rollouts: int,
        retried_requests: int,
        task_tokens: int,
        reflection_tokens: int,
    ) -> AsyncStats:
        """The record of the run so far."""
        minutes = seconds / 60
        return AsyncStats(
            schedule=schedule,
            seconds=seconds,
            stop_reason=stop_reason,
            failed=failed,
            tickets=self.tickets,
            ended=dict(self.ended),
            end_reasons=dict(self.end_reasons),
            proposals=proposals,
            proposals_per_minute=proposals / minutes if minutes else 0.0,
            metric_calls=metric_calls,
            max_metric_calls=max_metric_calls,
            slots=slots.limit,
            peak_slots=slots.peak,
            occupancy=slots.busy_seconds / (slots.limit * seconds) if seconds else 0.0,
            busy_seconds_by_stage=slots.busy_seconds_by_stage,
            worked_seconds_by_stage=dict(self.worked),
            waited_seconds_by_stage=dict(self.waited),
            gaps=gaps,
            shared_rollouts=shared_rollouts,
            retried_requests=retried_requests,
            task_tokens=task_tokens,
            reflection_tokens=reflection_tokens,
            generations=max((commit.generation for commit in self.commits), default=0),
            commits=list(self.commits),
        )
