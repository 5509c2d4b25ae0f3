"""What happens to an endpoint: frozen records, as in :mod:`dspy_flashevolve.engine.events`."""

from __future__ import annotations

from dataclasses import dataclass

from dspy_flashevolve.engine.events import Event


@dataclass(frozen=True, slots=True)
class LimitChanged(Event):
    """An endpoint may be sent more or fewer requests at once.

    Args:
        endpoint: its address, or the provider's name; several, joined by " + ", where one stage asks them all.
        before, after: requests in flight.
        reason: "it binds", "refused", "timed out", "throughput stopped growing" or "requests wait in the server".
    """

    endpoint: str
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
