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

    @property
    def kind(self) -> str:
        """Name of the kind of event."""
        return type(self).__name__

    @property
    def fields(self) -> dict[str, Any]:
        """What the kinds of events do not share: field -> value."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("seconds", "step")}


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
    """One rollout was settled, so long after it had its slot. Tokens are those that the LMs reported; dollars are 0
    where a price is not known."""

    step: int
    stage: str
    score: float
    latency_seconds: float
    tokens: int
    cost_dollars: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestFinished(Event):
    """A request that is no rollout (a reflection, say) was answered, or failed for good; or a rollout came to nothing
    whose LMs had answered some of its calls. ``error`` says why the answer is of no use, or what was raised."""

    step: int
    stage: str
    latency_seconds: float
    tokens: int
    cost_dollars: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class LmCallCounted(Event):
    """An LM call was answered that belongs to no rollout and no request whose event counts it: one of a metric's
    feedback, of a thread that a program has started by itself, or of work that was given up. Where its step is not
    known it is -1, and the stage one that asks its LM."""

    step: int
    stage: str
    tokens: int
    cost_dollars: float = 0.0


@dataclass(frozen=True, slots=True)
class RolloutTimedOut(Event):
    """An attempt at a rollout, the first is 1, was given up: it took longer than the rollout's timeout."""

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
        candidate, parents: indices in the pool; the first parent is what it was built on.
        score: aggregate validation score; ``best_score`` is the pool's best, after the change.
        generation: steps from the seed along the longest line of parents.
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
    """The program that the run began with has its score; ``best_score`` is that of a run that goes on."""

    score: float
    best_score: float


@dataclass(frozen=True, slots=True)
class PolicyDecided(Event):
    """A staleness policy looked at an item that has not seen ``gap`` commits, and decided "admit", "discard" (for a
    reason) or "integrate"."""

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
    """An endpoint, by its address or its provider's name (several are joined by " + "), may be sent more or fewer
    requests at once, or a stage may have more or fewer slots. A stage's reason is "the median rule"."""

    name: str
    before: int
    after: int
    reason: str


@dataclass(frozen=True, slots=True)
class EndpointPaused(Event):
    """An endpoint refused most of what it was sent: nothing is sent to it for so long."""

    endpoint: str
    pause_seconds: float


@dataclass(frozen=True, slots=True)
class RequestTurnedAway(Event):
    """A request got no answer for a reason that its provider gave, and is made again."""

    endpoint: str
    reason: str


@dataclass(frozen=True, slots=True)
class ExampleGivenUp(Event):
    """An example gets no answer while others do: it fails for every candidate, or, where others were answered on it,
    for one candidate alone. The reason is what the provider said last."""

    step: int
    stage: str
    split: str
    example: Any
    alone: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ActorLost(Event):
    """A process that runs rollouts has died, or cannot be reached; its rollouts are asked for again."""

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
