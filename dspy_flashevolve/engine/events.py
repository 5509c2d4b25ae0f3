"""One frozen record an event, with units, and the bus that carries them.

Subscribers are called on the engine's loop, in order of subscription, with each record as it happens;
they must be quick. A subscriber that raises is reported through :mod:`warnings` once and dropped: an
observer never ends a run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from dspy_flashevolve.engine.item import End


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events.

    Args:
        seconds: the engine's clock when it happened; only differences mean anything.
    """

    seconds: float


@dataclass(frozen=True, slots=True)
class TicketOpened(Event):
    """A ticket was admitted and has selected what it works on."""

    ticket: int
    version: int
    live: int


@dataclass(frozen=True, slots=True)
class StageFinished(Event):
    """A stage is done with an item.

    Args:
        waited_seconds: in the stage's queue, before a worker took it.
        worked_seconds: in the handler.
    """

    ticket: int
    stage: str
    waited_seconds: float
    worked_seconds: float


@dataclass(frozen=True, slots=True)
class TicketClosed(Event):
    """A ticket ended."""

    ticket: int
    end: End
    live: int


@dataclass(frozen=True, slots=True)
class RolloutFinished(Event):
    """One rollout was settled.

    Args:
        latency_seconds: from the grant of its slot to its result.
        tokens: prompt and completion tokens that the LMs reported; 0 when they report none.
    """

    ticket: int
    stage: str
    score: float
    latency_seconds: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Committed(Event):
    """The pool changed.

    Args:
        version: after the change.
        gap: the version before the change less the version that the ticket saw.
        candidate: index in the pool.
        score: aggregate validation score.
        best_score: the pool's best, after the change.
        generation: steps from the seed along the longest line of parents.
    """

    ticket: int
    version: int
    gap: int
    candidate: int
    score: float
    best_score: float
    generation: int


Subscriber = Callable[[Event], None]


class EventBus:
    """Hands each event to every subscriber."""

    def __init__(self) -> None:
        self._subscribers: list[Subscriber] = []

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
