"""How far a run had come at each moment: the recorder, a gepa callback, and the trajectory that it leaves.

The recorder reads the events of `gepa.core.callbacks`, which dspy.GEPA and AsyncGEPA both send, so the same code
measures both. Only a candidate that was scored on the whole validation set counts for `best_score`.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gepa.core.callbacks import (
    BudgetUpdatedEvent,
    CandidateAcceptedEvent,
    CandidateRejectedEvent,
    OptimizationEndEvent,
    ProposalEndEvent,
    ValsetEvaluatedEvent,
)


@dataclass(frozen=True)
class Spent:
    """What the language models have done so far.

    Attributes:
        lm_calls: Requests that were no rollout's: reflections, integrations.
        task_tokens: Tokens read and written for rollouts.
        reflection_tokens: Tokens read and written for the others.
        read_tokens: Of all these tokens, those that were read.
        task_requests: Requests of rollouts that were answered by the model, and not by a cache.
    """

    lm_calls: int = 0
    task_tokens: int = 0
    reflection_tokens: int = 0
    read_tokens: int = 0
    task_requests: int = 0


@dataclass(frozen=True)
class Point:
    """The state of a run at one moment; every count is a total since the start.

    Attributes:
        seconds: Seconds since the start, in the server's time (real seconds times `time_scale`).
        metric_calls: Metric calls that the optimizer has counted.
        proposals: Reflections that gave a new text.
        accepted: Candidates that entered the pool; the seed is not one.
        rejected: Proposals that were turned down.
        best_score: Best mean over the whole validation set so far; `None` until the seed has one.
        depth: Generations from the seed to the deepest candidate; the seed's is 0.
        true_score: What the program with that best score is to score on examples that nobody saw; `None` where that is
            not known.
        validations: Candidates that were scored on the whole validation set; the seed is one.
        spent: By the language models, where that is known.
    """

    seconds: float = 0.0
    metric_calls: int = 0
    proposals: int = 0
    accepted: int = 0
    rejected: int = 0
    best_score: float | None = None
    depth: int = 0
    true_score: float | None = None
    validations: int = 0
    spent: Spent = Spent()


@dataclass(frozen=True)
class Trajectory:
    """The points of one run, in order of time.

    Example:
        >>> run = Trajectory((Point(1.0, 10, best_score=0.2), Point(3.0, 30, proposals=1, best_score=0.5)))
        >>> run.at(2.9).best_score, run.at(3.0).best_score, run.at(0.5).best_score
        (0.2, 0.5, None)
    """

    points: tuple[Point, ...] = ()

    def at(self, seconds: float) -> Point:
        """The state after `seconds`: the last point not later, or an empty one before the first."""
        found = bisect_right(self.points, seconds, key=lambda point: point.seconds)
        return self.points[found - 1] if found else Point()

    @property
    def end(self) -> Point:
        """The last point, or an empty one."""
        return self.points[-1] if self.points else Point()

    @property
    def seed_score(self) -> float | None:
        """The first validated score, which is the seed program's; `None` if there is none."""
        return next((p.best_score for p in self.points if p.best_score is not None), None)

    @property
    def seed_true_score(self) -> float | None:
        """The seed program's true score; `None` where that is not known."""
        return next((p.true_score for p in self.points if p.true_score is not None), None)

    def compact(self) -> list[list[float | int | None]]:
        """The points where score or depth changed, and the last one, as rows of `Point`'s first fields, for JSON."""
        return [
            [
                round(p.seconds, 3),
                p.metric_calls,
                p.proposals,
                p.accepted,
                p.rejected,
                p.best_score,
                p.depth,
                p.true_score,
            ]
            for p in self._turns
        ]

    def paid(self) -> list[list[int]]:
        """Of the same points the requests of rollouts, and the others, that the model had answered."""
        return [[p.spent.task_requests, p.spent.lm_calls] for p in self._turns]

    @property
    def _turns(self) -> list[Point]:
        return [
            point
            for before, point in zip((Point(), *self.points), self.points, strict=False)
            if (point.best_score, point.depth) != (before.best_score, before.depth) or point is self.points[-1]
        ]


class Recorder:
    """A gepa callback that turns a run's events into a `Trajectory`.

    Args:
        time_scale: Seconds of the server's clock that pass in one real second.
        clock: Gives real seconds.
        true_score: Gives a candidate's true score; `None` where nobody knows it.
        spent: Gives what the language models have done so far; `None` where nobody knows it.
    """

    def __init__(
        self,
        time_scale: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
        true_score: Callable[[Mapping[str, str]], float] | None = None,
        spent: Callable[[], Spent] | None = None,
    ) -> None:
        self._time_scale = time_scale
        self._true_score = true_score
        self._spent = spent
        self._clock = clock
        self._began = clock()
        self._now = Point()
        self._points: list[Point] = []
        self._depths: dict[int, int] = {}

    def start(self) -> None:
        """Set the zero of the trajectory's clock to this moment."""
        self._began = self._clock()

    @property
    def seconds(self) -> float:
        """Seconds since the start, in the server's time."""
        return (self._clock() - self._began) * self._time_scale

    @property
    def trajectory(self) -> Trajectory:
        """What has been recorded so far."""
        return Trajectory(tuple(self._points))

    def on_proposal_end(self, event: ProposalEndEvent) -> None:
        """A reflection gave a new text."""
        self._record(proposals=self._now.proposals + 1)

    def on_candidate_accepted(self, event: CandidateAcceptedEvent) -> None:
        """A candidate entered the pool."""
        self._record(accepted=self._now.accepted + 1)

    def on_candidate_rejected(self, event: CandidateRejectedEvent) -> None:
        """A proposal was turned down."""
        self._record(rejected=self._now.rejected + 1)

    def on_valset_evaluated(self, event: ValsetEvaluatedEvent) -> None:
        """A candidate has validation scores; only a full set of them is compared with the best."""
        depth = self._depth(event["candidate_idx"], event["parent_ids"])
        best, true, validations = self._now.best_score, self._now.true_score, self._now.validations
        if event["num_examples_evaluated"] == event["total_valset_size"]:
            score, validations = float(event["average_score"]), validations + 1
            if best is None or score > best:
                best, true = score, None if self._true_score is None else self._true_score(event["candidate"])
        seed_calls = event["num_examples_evaluated"] if event["candidate_idx"] == 0 else 0
        calls = max(self._now.metric_calls, seed_calls)
        depth = max(self._now.depth, depth)
        self._record(best_score=best, true_score=true, depth=depth, metric_calls=calls, validations=validations)

    def on_budget_updated(self, event: BudgetUpdatedEvent) -> None:
        """The optimizer counted metric calls."""
        self._record(metric_calls=event["metric_calls_used"])

    def on_optimization_end(self, event: OptimizationEndEvent) -> None:
        """The run is over: its own total of metric calls is the last word."""
        self._record(metric_calls=event["total_metric_calls"])

    def _depth(self, candidate: int, parents: Sequence[int | None]) -> int:
        known = [self._depths.get(parent, 0) for parent in parents if parent is not None]
        self._depths[candidate] = 1 + max(known) if known else 0
        return self._depths[candidate]

    def _record(self, **changes: Any) -> None:
        spent = Spent() if self._spent is None else self._spent()
        self._now = replace(self._now, seconds=self.seconds, spent=spent, **changes)
        self._points.append(self._now)
