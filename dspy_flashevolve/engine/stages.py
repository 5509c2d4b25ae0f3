"""A stage: a name, a handler, and what may become of an item."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.item import End, Item


@dataclass(frozen=True, slots=True)
class Forward:
    """The item goes to the queue of another stage.

    Args:
        stage: its name.
        payload: what it works on.
        version: a new version stamp; None keeps the item's.
        value: the item's value from here on.
    """

    stage: str
    payload: Any
    version: int | None = None
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Finish:
    """The item's ticket ends here."""

    end: End


Outcome = Forward | Finish
Handler = Callable[[Item[Any]], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class Stage:
    """One kind of work, done by K workers that take items from one queue.

    Args:
        name: unique in a pipeline.
        handler: an async function from an item to its outcome. What it raises ends the run.
        workers: items that the stage works on at once; at least 1.
        queue_capacity: items that may wait; at least 1. Producers wait beyond it.

    Raises:
        ConfigurationError: workers or capacity under 1.
    """

    name: str
    handler: Handler
    workers: int
    queue_capacity: int

    def __post_init__(self) -> None:
        for field, value in (("workers", self.workers), ("queue_capacity", self.queue_capacity)):
            if value < 1:
                raise ConfigurationError(f"stage {self.name!r}: {field} is {value}, expected at least 1.")
