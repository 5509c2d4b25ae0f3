"""Which training example a step takes: epochs over a set, or windows of a stream."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspy_flashevolve.ace.playbook import Playbook
from dspy_flashevolve.engine.steps import NothingToDoError


@dataclass(frozen=True, slots=True)
class Taken:
    """An example, and where it comes from.

    Args:
        example: the user's.
        index: its place in the data.
        playbook: what it is to be tried with.
        window: number of its window; None where there are none.
    """

    example: Any
    index: int
    playbook: Playbook
    window: int | None = None


class Epochs:
    """Every example once an epoch, in an order of its own each time; which one a step takes follows from its number.

    Args:
        examples: the training set.
        epochs: times that each is taken.
        seed: of the order.
    """

    def __init__(self, examples: Sequence[Any], epochs: int, seed: int | None) -> None:
        self._examples, self._epochs, self._seed = examples, epochs, seed
        self._orders: dict[int, list[int]] = {}

    async def take(self, step: int, newest: Callable[[], Playbook]) -> Taken:
        """The example of a step.

        Args:
            newest: the playbook as it is.

        Raises:
            NothingToDoError: all were taken.
        """
        epoch, place = divmod(step, len(self._examples))
        if epoch >= self._epochs:
            raise NothingToDoError
        if epoch not in self._orders:
            order = list(range(len(self._examples)))
            random.Random(f"{self._seed}/epoch {epoch}").shuffle(order)
            self._orders = {epoch: order}
        index = self._orders[epoch][place]
        return Taken(self._examples[index], index, newest())


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

    All of a window are scored with the playbook as it was when the window began. What was read of a window that had not
    begun at a stop is lost.

    Args:
        stream: examples; it may have no end.
        size: examples of a window; the last one may have fewer.
        over: waits until no step of the last window is left.

    Attributes:
        windows: those that have begun, in order.
        failure: what the stream raised; it ends where it did.
    """

    def __init__(self, stream: AsyncIterator[Any], size: int, over: Callable[[], Awaitable[None]]) -> None:
        self._stream, self._size, self._over = stream, size, over
        self._left: list[Taken] = []
        self._has_ended = False
        self.windows: list[Window] = []
        self.failure: Exception | None = None

    async def take(self, step: int, newest: Callable[[], Playbook]) -> Taken:
        """The next example of the window; else of the next window, once it is there.

        Raises:
            NothingToDoError: the stream has ended.
        """
        del step
        if not self._left:
            await self._over()
            examples = await self._read()
            if not examples:
                raise NothingToDoError
            first, number, playbook = sum(one.examples for one in self.windows), len(self.windows), newest()
            self._left = [Taken(one, first + place, playbook, number) for place, one in enumerate(examples)]
            self.windows.append(Window(number, playbook.version, len(examples)))
        return self._left.pop(0)

    async def _read(self) -> list[Any]:
        """The next window; what the stream raises is kept as ``failure``, and ends it."""
        examples: list[Any] = []
        try:
            while len(examples) < self._size and not self._has_ended:
                examples.append(await anext(self._stream))
        except StopAsyncIteration:
            self._has_ended = True
        except Exception as error:
            self._has_ended, self.failure = True, error
        return examples


async def as_async(stream: Any, run_in_thread: Any) -> AsyncIterator[Any]:
    """A stream as an async iterator; what it gives synchronously is waited for in a thread."""
    if hasattr(stream, "__aiter__"):
        async for one in stream:
            yield one
        return
    iterator, end = iter(stream), object()
    while (one := await run_in_thread(next, iterator, end)) is not end:
        yield one
