"""Gathers the figures of a run from its events."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Protocol

from dspy_flashevolve.engine.endpoint_events import EndpointPaused, LimitChanged
from dspy_flashevolve.engine.events import (
    Committed,
    Event,
    HeadEnded,
    HeadLanded,
    Integrated,
    Looked,
    RequestFinished,
    RolloutFinished,
    Speculated,
    SpeculationEnded,
    StageFinished,
    TicketClosed,
    TicketOpened,
    WorkersChanged,
)
from dspy_flashevolve.engine.item import EndKind
from dspy_flashevolve.engine.slots import SlotStatistics
from dspy_flashevolve.observe.records import (
    AsyncStats,
    ChangeRecord,
    CommitRecord,
    HeadRecord,
    IntegrationRecord,
    Outcome,
    RunStats,
)


class Requests(Protocol):
    """How requests went, in counts."""

    @property
    def shared(self) -> int: ...
    @property
    def timed_out(self) -> int: ...
    @property
    def duplicated(self) -> int: ...


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
        self.requests: dict[str, int] = {}
        self.tokens: dict[str, int] = {}
        self.cost_dollars = 0.0
        self.commits: list[CommitRecord] = []
        self.looks: dict[str, int] = {}
        self.integrations: list[IntegrationRecord] = []
        self.heads: dict[int, HeadRecord] = {}
        self.speculated = 0
        self.speculation_ends: dict[str, int] = {}
        self.worker_changes: list[ChangeRecord] = []
        self.limit_changes: list[ChangeRecord] = []
        self.pauses = 0

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, RolloutFinished | RequestFinished):
            self.requests[event.stage] = self.requests.get(event.stage, 0) + 1
            self.tokens[event.stage] = self.tokens.get(event.stage, 0) + event.tokens
            self.cost_dollars += event.cost_dollars
        elif isinstance(event, TicketOpened):
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
        elif isinstance(event, Speculated):
            self.speculated += 1
        elif isinstance(event, SpeculationEnded):
            end = event.end.split(":")[0]
            self.speculation_ends[end] = self.speculation_ends.get(end, 0) + 1
        elif isinstance(event, WorkersChanged):
            self.worker_changes.append(self._change(event, event.stage))
        elif isinstance(event, LimitChanged):
            self.limit_changes.append(self._change(event, event.endpoint))
        elif isinstance(event, Looked):
            self.looks[event.decision] = self.looks.get(event.decision, 0) + 1
        elif isinstance(event, Integrated):
            seconds = event.seconds - self._began
            self.integrations.append(
                IntegrationRecord(seconds, event.ticket, event.members, event.verdicts, event.failed)
            )
        elif isinstance(event, HeadLanded):
            self._landed(event)
        elif isinstance(event, HeadEnded) and event.head in self.heads:
            self.heads[event.head] = replace(
                self.heads[event.head], end=event.end, score=event.score, best=event.best, candidate=event.candidate
            )
        elif isinstance(event, EndpointPaused):
            self.pauses += 1

    def _landed(self, event: HeadLanded) -> None:
        self.heads[event.head] = HeadRecord(
            seconds=event.seconds - self._began,
            head=event.head,
            base=event.base,
            base_candidate=event.base_candidate,
            members=event.members,
            before=event.before,
            after=event.after,
            end="unfinished" if event.passed else "failed its screen",
        )

    def _change(self, event: WorkersChanged | LimitChanged, name: str) -> ChangeRecord:
        return ChangeRecord(event.seconds - self._began, name, event.before, event.after, event.reason)

    def _verdicts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for integration in self.integrations:
            for _, verdict, _ in integration.verdicts:
                counts[verdict] = counts.get(verdict, 0) + 1
        return counts

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
        outcome: Outcome,
        metric_calls: int,
        max_metric_calls: int | None,
        slots: SlotStatistics,
        gaps: dict[str, dict[int, int]],
        rollouts: Requests,
        retried_requests: int,
        cost_dollars: float | None = None,
    ) -> RunStats:
        """The record of the run so far.

        Args:
            cost_dollars: of all LM calls; None for what the events of requests say.
        """
        return RunStats(
            schedule=schedule,
            seconds=seconds,
            stop_reason=stop_reason,
            failed=failed,
            outcome=outcome,
            tickets=self.tickets,
            ended=dict(self.ended),
            end_reasons=dict(self.end_reasons),
            metric_calls=metric_calls,
            max_metric_calls=max_metric_calls,
            slots=slots.limit,
            peak_slots=slots.peak,
            occupancy=slots.busy_seconds / slots.limit_seconds if slots.limit_seconds else 0.0,
            busy_seconds_by_stage=slots.busy_seconds_by_stage,
            worked_seconds_by_stage=dict(self.worked),
            waited_seconds_by_stage=dict(self.waited),
            gaps=gaps,
            shared_rollouts=rollouts.shared,
            retried_requests=retried_requests,
            timed_out_rollouts=rollouts.timed_out,
            duplicated_rollouts=rollouts.duplicated,
            requests_by_stage=dict(self.requests),
            tokens_by_stage=dict(self.tokens),
            cost_dollars=self.cost_dollars if cost_dollars is None else cost_dollars,
            generations=max((commit.generation for commit in self.commits), default=0),
            commits=list(self.commits),
            looks=dict(self.looks),
            worker_changes=list(self.worker_changes),
            limit_changes=list(self.limit_changes),
            pauses=self.pauses,
        )

    def async_stats(
        self,
        of_run: RunStats,
        *,
        proposals: int,
        task_tokens: int,
        reflection_tokens: int,
        reflection_calls: int,
        integration_calls: int,
    ) -> AsyncStats:
        """The same with what is GEPA's own.

        Args:
            of_run: what :meth:`stats` says.
        """
        minutes = of_run.seconds / 60
        return AsyncStats(
            **{one.name: getattr(of_run, one.name) for one in fields(of_run)},
            proposals=proposals,
            proposals_per_minute=proposals / minutes if minutes else 0.0,
            task_tokens=task_tokens,
            reflection_tokens=reflection_tokens,
            reflection_calls=reflection_calls,
            integration_calls=integration_calls,
            verdicts=self._verdicts(),
            integrations=list(self.integrations),
            heads=list(self.heads.values()),
            speculated=self.speculated,
            speculation_ends=dict(self.speculation_ends),
        )
