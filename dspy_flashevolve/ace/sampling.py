"""Which training example a step takes: epochs over a set, or windows of a stream."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio

from dspy_flashevolve.ace.playbook import Playbook
from dspy_flashevolve.engine.item import Ticket
from dspy_flashevolve.engine.pipeline import NotNow


@dataclass(frozen=True, slots=True)
class Taken:
    """An example, and where it comes from.

    Args:
        example: the user's.
        index: its place in the data.
        window: number of its window; None where there are none.
        playbook: what it is to be tried with; None for the newest.
    """

    example: Any
    index: int
    window: int | None = None
    playbook: Playbook | None = None


class Epochs:
    """Every example once an epoch, in an order of its own each time.

    Args:
        examples: the training set.
        epochs: times that each is taken.
        seed: of the order.
    """

    def __init__(self, examples: Sequence[Any], epochs: int, seed: int | None) -> None:
        self._examples = examples
        self._epochs = epochs
        self._seed = seed
        self._order: list[int] = []
        self._epoch = 0
        self.failure: Exception | None = None

    def readers(self, wake: Callable[[], object]) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """What reads examples beside the run: nothing, they are at hand."""
        del wake
        return []

    async def take(self, ticket: Ticket, playbook: Playbook) -> Taken | NotNow:
        """The next example."""
        del ticket, playbook
        if not self._order:
            if self._epoch == self._epochs:
                return NotNow.EXHAUSTED
            self._order = list(range(len(self._examples)))
            random.Random(f"{self._seed}/epoch {self._epoch}").shuffle(self._order)
            self._epoch += 1
        index = self._order.pop(0)
        return Taken(self._examples[index], index)

    def ended(self, ticket: Ticket) -> None:
        """A step has ended."""


@dataclass(slots=True)
class Window:
    """A part of a stream, scored before anything was learnt from it.

    Args:
        number: from 0.
        version: of the playbook that it was scored with.
        examples: in it.
        scores: of those that the provider answered, in the order of the answers.
    """

    number: int
    version: int
    examples: int
    scores: list[float] = field(default_factory=list[float])

    @property
    def score(self) -> float | None:
        """The mean of the scores; None where there is none."""
        return sum(self.scores) / len(self.scores) if self.scores else None


class Windows:
    """A stream, window by window: the next one begins when all of the last have been learnt from.

    All of a window are scored with the playbook as it was when the window began. The stream is read beside the run, by
    :meth:`readers`, so that a quiet one holds up neither a stop nor a limit; what was read of a window that had not
    begun by then is lost.

    Args:
        stream: examples; it may have no end.
        size: examples of a window; the last one may have fewer.

    Attributes:
        windows: those that have begun, in order.
        failure: what the stream raised; it ends where it did.
    """

    def __init__(self, stream: AsyncIterator[Any], size: int) -> None:
        self._stream = stream
        self._size = size
        self._left: list[Any] = []
        self._read: list[Any] = []
        self._wanted = anyio.Event()
        self._has_ended = False
        self._playbook: Playbook | None = None
        self._live: set[int] = set()
        self._taken = 0
        self.windows: list[Window] = []
        self.failure: Exception | None = None

    def readers(self, wake: Callable[[], object]) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """What reads the stream: run it beside the evolution, and cancel it at its end.

        Args:
            wake: called when the next window is there.
        """

        async def read() -> None:
            while not self._has_ended:
                await self._wanted.wait()
                await self.fill()
                self._wanted = anyio.Event()
                wake()

        return [read]

    async def take(self, ticket: Ticket, playbook: Playbook) -> Taken | NotNow:
        """The next example of the window; of the next window where none of this one is under way."""
        if not self._left:
            if self._live:
                return NotNow.FULL
            if len(self._read) < self._size and not self._has_ended:
                self._wanted.set()
                return NotNow.WAITING
            if not self._read:
                return NotNow.EXHAUSTED
            self._left, self._read, self._playbook = self._read, [], playbook
            self.windows.append(Window(len(self.windows), playbook.version, len(self._left)))
        self._live.add(ticket.number)
        self._taken += 1
        return Taken(self._left.pop(0), self._taken - 1, len(self.windows) - 1, self._playbook)

    async def fill(self) -> None:
        """Read the next window; what the stream raises is kept as ``failure``, and ends it."""
        try:
            while len(self._read) < self._size:
                self._read.append(await anext(self._stream))
        except StopAsyncIteration:
            self._has_ended = True
        except Exception as error:
            self._has_ended, self.failure = True, error

    def scored(self, window: int, score: float) -> None:
        """An example of a window has its first score."""
        self.windows[window].scores.append(score)

    def ended(self, ticket: Ticket) -> None:
        """A step has ended."""
        self._live.discard(ticket.number)


async def as_async(stream: Any, run_in_thread: Any) -> AsyncIterator[Any]:
    """A stream as an async iterator; what it gives synchronously is waited for in a thread."""
    if hasattr(stream, "__aiter__"):
        async for one in stream:
            yield one
        return
    iterator, end = iter(stream), object()
    while (one := await run_in_thread(next, iterator, end)) is not end:
        yield one
