"""One frozen record an event, with units, and the bus that carries them.

Subscribers are called on the engine's loop, in order of subscription, with each record as it happens;
they must be quick. A subscriber that raises is reported through :mod:`warnings` once and dropped: an
observer never ends a run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dspy_flashevolve.engine.steps import End


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events.

    Args:
        seconds: the engine's clock when it happened; only differences mean anything.
    """

    seconds: float


@dataclass(frozen=True, slots=True)
class StepOpened(Event):
    """A step has selected what it works on."""

    step: int
    version: int
    live: int


@dataclass(frozen=True, slots=True)
class StageVisited(Event):
    """The requests of a step in one stage have come to their end; see :class:`~.scheduler.StageVisit`."""

    step: int
    stage: str
    queued_seconds: float
    began_seconds: float


@dataclass(frozen=True, slots=True)
class StepClosed(Event):
    """A step ended."""

    step: int
    end: End
    live: int


@dataclass(frozen=True, slots=True)
class RolloutFinished(Event):
    """One rollout was settled.

    Args:
        latency_seconds: from the grant of its slot to its result.
        tokens: prompt and completion tokens that the LMs reported; 0 when they report none.
        cost_dollars: of these tokens; 0 where a price is not known.
    """

    step: int
    stage: str
    score: float
    latency_seconds: float
    tokens: int
    cost_dollars: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestFinished(Event):
    """A request that is no rollout was answered, or failed for good: a reflection, say. Or a rollout came to nothing
    whose LMs had answered some of its calls.

    Args:
        latency_seconds: from the grant of its slot to its answer.
        tokens, cost_dollars: see :class:`RolloutFinished`.
        error: why the answer is of no use, or what was raised in its place; empty when it is of use.
    """

    step: int
    stage: str
    latency_seconds: float
    tokens: int
    cost_dollars: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class LmCallCounted(Event):
    """An LM call was answered that belongs to no rollout and no request whose event counts it: one of a metric's
    feedback, of a thread that a program has started by itself, or of work that was given up.

    Args:
        step, stage: that it was made for, as far as that is known: else -1, and a stage that asks its LM.
        tokens, cost_dollars: see :class:`RolloutFinished`.
    """

    step: int
    stage: str
    tokens: int
    cost_dollars: float = 0.0


@dataclass(frozen=True, slots=True)
class RolloutTimedOut(Event):
    """A run of a rollout was given up: it took longer than the rollout's timeout.

    Args:
        waited_seconds: from the grant of its slot.
        attempt: 1 for the first run of the rollout, 2 for its first retry.
    """

    step: int
    stage: str
    waited_seconds: float
    attempt: int


@dataclass(frozen=True, slots=True)
class Committed(Event):
    """The pool changed.

    Args:
        version: after the change.
        gap: the version before the change less the version that the step saw.
        candidate: index in the pool.
        score: aggregate validation score.
        best_score: the pool's best, after the change.
        generation: steps from the seed along the longest line of parents.
        parents: indices in the pool; the first one is what it was built on.
    """

    step: int
    version: int
    gap: int
    candidate: int
    score: float
    best_score: float
    generation: int
    parents: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SeedValidated(Event):
    """The program that the run began with has its score.

    Args:
        score: aggregate validation score.
        best_score: of the best program so far; of a run that goes on it may be a later one.
    """

    score: float
    best_score: float


@dataclass(frozen=True, slots=True)
class PolicyDecided(Event):
    """A staleness policy looked at an item.

    Args:
        place: where.
        gap: commits that the step has not seen.
        decision: "admit", "discard" or "integrate".
        reason: of a discard.
    """

    step: int
    place: str
    gap: int
    decision: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Integrated(Event):
    """A stale child was read beside what was committed meanwhile, to be repaired.

    Args:
        step: that made the child.
        base: index in the pool of what a repaired child stands on.
        members: steps whose children were read: that one; journals of earlier versions have several.
        verdicts: (step, orthogonal | subsumed | conflicting, reason), one a component.
        failed: why the reply could not be used, so that the child went on as it was; empty where it was.
    """

    step: int
    base: int
    members: tuple[int, ...]
    verdicts: tuple[tuple[int, str, str], ...]
    failed: str = ""


@dataclass(frozen=True, slots=True)
class LimitChanged(Event):
    """An endpoint may be sent more or fewer requests at once, or a stage may have more or fewer slots.

    Args:
        name: the endpoint's address, or the provider's name (several, joined by " + ", where one stage asks them all);
            or the stage.
        before, after: requests in flight.
        reason: "it binds", "refused", "timed out", "throughput stopped growing" or "requests wait in the server"; of a
            stage "the median rule".
    """

    name: str
    before: int
    after: int
    reason: str


@dataclass(frozen=True, slots=True)
class EndpointPaused(Event):
    """An endpoint refused most of what it was sent: nothing is sent to it for a while.

    Args:
        pause_seconds: how long.
    """

    endpoint: str
    pause_seconds: float


@dataclass(frozen=True, slots=True)
class RequestTurnedAway(Event):
    """A request got no answer, and is made again.

    Args:
        endpoint: the endpoint's address, or the provider's name (several, joined by " | " or " + ", where one of them
            or all are asked).
        reason: what the provider said.
    """

    endpoint: str
    reason: str


@dataclass(frozen=True, slots=True)
class ExampleGivenUp(Event):
    """An example gets no answer while others do: it fails without being asked for again.

    Args:
        step, stage: whose rollout it was.
        split, example: which example.
        alone: it was answered for other candidates, and fails for this one alone; else it fails for every candidate.
        reason: what the provider said last.
    """

    step: int
    stage: str
    split: str
    example: Any
    alone: bool
    reason: str


@dataclass(frozen=True, slots=True)
class EndpointAsked(Event):
    """What an endpoint has answered in a run, told once, at its end.

    Args:
        endpoint: its address, or the provider's name.
        answered: requests.
    """

    endpoint: str
    answered: int


@dataclass(frozen=True, slots=True)
class ActorLost(Event):
    """A process that runs rollouts has died, or cannot be reached; its rollouts are asked for again.

    Args:
        reason: what Ray said.
    """

    reason: str


Subscriber = Callable[[Event], None]


class EventBus:
    """Hands each event to every subscriber, in order."""

    def __init__(self, subscribers: Iterable[Subscriber] = ()) -> None:
        self._subscribers: list[Subscriber] = list(subscribers)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call ``subscriber`` with every event from now on."""
        self._subscribers.append(subscriber)

    def emit(self, event: Event) -> None:
        """Hand ``event`` to every subscriber; one that raises is dropped with a warning."""
        for subscriber in list(self._subscribers):
            try:
                subscriber(event)
            except Exception as error:
                self._subscribers.remove(subscriber)
                warnings.warn(
                    f"Event subscriber {subscriber!r} raised {error!r} and is no longer called.", stacklevel=2
                )
