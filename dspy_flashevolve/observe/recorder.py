"""The recorder: gathers the statistics of a run from its events while the run goes on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import fields, replace
from textwrap import shorten
from typing import Any

from dspy_flashevolve.engine.events import (
    Committed,
    EndpointPaused,
    Event,
    ExampleGivenUp,
    Integrated,
    LimitChanged,
    LmCallCounted,
    PolicyDecided,
    RequestFinished,
    RequestTurnedAway,
    RolloutFinished,
    SeedValidated,
    StageVisited,
    StepClosed,
    StepOpened,
)
from dspy_flashevolve.engine.loop import LoopClock
from dspy_flashevolve.engine.run import EvolutionRun
from dspy_flashevolve.engine.scheduler import StageVisit
from dspy_flashevolve.engine.steps import EndKind
from dspy_flashevolve.observe.statistics import REFLECTION_STAGES, AsyncStats, RunStats

MOST_STAGE_VISITS = 10_000
"""Visits of steps to stages that are kept: about a megabyte, and more than a plot of a timeline can show."""
SHOWN_REASON, MOST_REASONS = 100, 1000
"""Characters of a provider's reason, and how many different reasons, are kept: enough to tell a rate limit from a dead
server, and few enough that messages with a time or a request's number in them do not fill the memory."""


class Recorder:
    """A subscriber of the run's events that counts them.

    Args:
        clock: the clock of the run.
    """

    def __init__(self, clock: LoopClock) -> None:
        self.clock = clock
        self.steps = self.pauses = 0
        self.end_reasons, self.looks = Counter[str](), Counter[str]()
        self.requests, self.tokens = Counter[str](), Counter[str]()
        self.dollars = defaultdict[str, float](float)
        """Stage -> dollars, as far as prices are known."""
        self.turned_away = Counter[str]()
        """Reason in the provider's words -> requests that were sent again."""
        self.unanswered_examples = 0
        self.seed_score: float | None = None
        """Validation score of the program that the run began with; None until it is known."""
        self._first_best_score: float | None = None
        self.commits: list[Committed] = []
        self.integrations: list[Integrated] = []
        self.limit_changes: list[LimitChanged] = []
        self.stages: list[StageVisit] = []

    def __call__(self, event: Event) -> None:
        """Count an event."""
        # The engine's clock counts from anywhere; users count from the start of the run.
        event = replace(event, seconds=event.seconds - self.clock.began)
        if isinstance(event, RolloutFinished | RequestFinished | LmCallCounted):
            # An LM call outside of any request has tokens and dollars, but is no request that was answered.
            self.requests[event.stage] += not isinstance(event, LmCallCounted)
            self.tokens[event.stage] += event.tokens
            self.dollars[event.stage] += event.cost_dollars
        elif isinstance(event, StepOpened):
            self.steps += 1
        elif isinstance(event, StageVisited):
            if len(self.stages) < MOST_STAGE_VISITS:
                queued, began = event.queued_seconds - self.clock.began, event.began_seconds - self.clock.began
                self.stages.append(StageVisit(event.step, event.stage, queued, began, ended=event.seconds))
        elif isinstance(event, StepClosed):
            if event.end.kind is not EndKind.COMMITTED:
                self.end_reasons[event.end.reason] += 1
        elif isinstance(event, SeedValidated):
            self.seed_score, self._first_best_score = event.score, event.best_score
        elif isinstance(event, Committed):
            self.commits.append(event)
        elif isinstance(event, LimitChanged):
            self.limit_changes.append(event)
        elif isinstance(event, ExampleGivenUp):
            self.unanswered_examples += 1
        elif isinstance(event, RequestTurnedAway):
            # In the provider's own words: whether it is a limit, a dead server or a bad request, it says best itself.
            reason = shorten(event.reason, SHOWN_REASON, placeholder=" ...")
            if reason in self.turned_away or len(self.turned_away) < MOST_REASONS:
                self.turned_away[reason] += 1
        elif isinstance(event, EndpointPaused):
            self.pauses += 1
        elif isinstance(event, PolicyDecided):
            self.looks[event.decision] += 1
        elif isinstance(event, Integrated):
            self.integrations.append(event)

    @property
    def best_score(self) -> float | None:
        """The best validation score so far; None until there is one."""
        return self.commits[-1].best_score if self.commits else self._first_best_score

    def stats(self, run: EvolutionRun, unpriced: Collection[str], **figures: Any) -> RunStats:
        """Return the statistics of the run so far.

        Args:
            unpriced: stages that ask a model whose price is not known.
            figures: the fields of :class:`RunStats` that follow neither from events nor from ``run``.
        """
        slots = run.scheduler.statistics()
        return RunStats(
            outcome=run.outcome,
            steps=self.steps,
            ended=dict(run.ended),
            end_reasons=dict(self.end_reasons),
            slots=slots.limit,
            peak_slots=slots.peak,
            occupancy=slots.busy_seconds / slots.limit_seconds if slots.limit_seconds else 0.0,
            busy_seconds_by_stage={name: stage.served_seconds for name, stage in slots.stages.items()},
            gaps={place: dict(sorted(counts.items())) for place, counts in list(run.gaps.items())},
            shared_rollouts=run.rollouts.joined,
            retried_requests=run.endpoints.retries.count,
            unanswered_examples=self.unanswered_examples,
            timed_out_rollouts=run.rollouts.timed_out,
            requests_by_stage=dict(self.requests),
            tokens_by_stage=dict(self.tokens),
            # Where one stage has no price the sum of the others would be taken for the whole: it is unknown.
            cost_dollars=None if any(stage in unpriced for stage in self.requests) else sum(self.dollars.values()),
            dollars_by_stage={stage: None if stage in unpriced else self.dollars[stage] for stage in self.requests},
            generations=max((commit.generation for commit in self.commits), default=0),
            commits=list(self.commits),
            looks=dict(self.looks),
            limit_changes=list(self.limit_changes),
            pauses=self.pauses,
            stages=list(self.stages),
            turned_away=dict(self.turned_away),
            **figures,
        )

    def async_stats(self, of_run: RunStats, **figures: Any) -> AsyncStats:
        """Add to the statistics of a run those that only AsyncGEPA has.

        Args:
            of_run: the result of :meth:`stats`.
            figures: the fields of :class:`AsyncStats` that do not follow from events.
        """
        minutes = of_run.seconds / 60
        reflection = sum(self.tokens[stage] for stage in REFLECTION_STAGES)
        return AsyncStats(
            **{field.name: getattr(of_run, field.name) for field in fields(of_run)},
            **figures,
            proposals_per_minute=figures["proposals"] / minutes if minutes else 0.0,
            task_tokens=sum(self.tokens.values()) - reflection,
            reflection_tokens=reflection,
            verdicts=dict(
                Counter(verdict for integration in self.integrations for _, verdict, _ in integration.verdicts)
            ),
            integrations=list(self.integrations),
        )
