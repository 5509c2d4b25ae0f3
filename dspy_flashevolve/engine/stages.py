"""A stage: a name, a handler, and what may become of an item."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dspy_flashevolve.engine.errors import ConfigurationError, RolloutUnresolvedError
from dspy_flashevolve.engine.item import End, EndKind, Item


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


@dataclass(frozen=True, slots=True)
class Carried:
    """The item rides in the payload of another one, whose outcome will name what becomes of it.

    Args:
        by: number of the ticket whose item carries it.
    """

    by: int


Outcome = Forward | Finish
Outcomes = Outcome | Sequence[tuple[Item[Any], Outcome | Carried]]
"""What becomes of the item; or of each of several items: those of a batch, or those that the item carried."""
Handler = Callable[[Item[Any]], Awaitable[Outcomes]]
BatchHandler = Callable[[list[Item[Any]]], Awaitable[Outcomes]]


@dataclass(frozen=True, slots=True)
class Stage:
    """One kind of work, done by K workers that take items from one queue.

    Args:
        name: unique in a pipeline.
        handler: an async function from an item to its outcome, or from a list of items where ``batch`` is given.
            What it raises ends the run.
        workers: items, or batches, that the stage works on at once; at least 1. The most where a controller decides.
        queue_capacity: items that may wait; at least 1. Producers wait beyond it.
        batch: items that one call of the handler gets at most: those that wait when a worker is free. None for one
            item a call.
        ready: asked with the number of items that wait whether a batch may begin; asked again when one comes in and
            when the pipeline is woken. None begins at once.
        least_workers: workers that a controller leaves the stage. A handler that waits for items behind its own in the
            queue needs as many as may wait at once, and one more.

    Raises:
        ConfigurationError: workers, capacity, batch or least workers under 1, or more least workers than workers.
    """

    name: str
    handler: Handler | BatchHandler
    workers: int
    queue_capacity: int
    batch: int | None = None
    ready: Callable[[int], bool] | None = None
    least_workers: int = 1

    def __post_init__(self) -> None:
        for field in ("workers", "queue_capacity", "batch", "least_workers"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigurationError(f"stage {self.name!r}: {field} is {value}, expected at least 1.")
        if self.least_workers > self.workers:
            raise ConfigurationError(
                f"stage {self.name!r}: least_workers is {self.least_workers}, above workers={self.workers}."
            )


def _nobody(item: Item[Any]) -> Sequence[Item[Any]]:
    del item
    return ()


def unresolved_fails(
    handler: Callable[[Any], Awaitable[Outcomes]], carried: Callable[[Item[Any]], Sequence[Item[Any]]] = _nobody
) -> Callable[[Any], Awaitable[Outcomes]]:
    """A ticket whose request got no answer ends as failed; it is not scored.

    Args:
        handler: of one item, or of a batch.
        carried: the items that an item carries; they fail with it. Default: none.
    """

    async def guarded(work: Any) -> Outcomes:
        try:
            return await handler(work)
        except RolloutUnresolvedError as error:
            failed = Finish(End(EndKind.FAILED, str(error)))
            items: list[Item[Any]] = work if isinstance(work, list) else [work]
            return [(one, failed) for item in items for one in (item, *carried(item))]

    return guarded
