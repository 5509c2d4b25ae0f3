"""Bounded, closable queues between stages."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import anyio

from dspy_flashevolve.engine.errors import ConfigurationError, QueueClosedError
from dspy_flashevolve.engine.item import Item

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """What a queue has seen.

    Args:
        size: items in it now.
        capacity: the most it holds.
        largest: the most it ever held.
        put: items that came in.
        taken: items that went out.
        waiting_getters: workers that wait for an item now.
        waiting_putters: producers that wait for room now.
        waited_seconds: summed over the items taken, between put and get.
    """

    size: int
    capacity: int
    largest: int
    put: int
    taken: int
    waiting_getters: int
    waiting_putters: int
    waited_seconds: float


class StageQueue(Generic[P]):
    """The input of a stage: the freshest item first, then the oldest ticket.

    Args:
        name: for messages.
        capacity: items it holds before ``put`` waits; at least 1.
        clock: seconds; injected so that tests need no real time.

    Raises:
        ConfigurationError: capacity under 1.
    """

    def __init__(self, name: str, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        if capacity < 1:
            raise ConfigurationError(f"queue {name!r}: capacity is {capacity}, expected at least 1.")
        self.name = name
        self._capacity = capacity
        self._clock = clock
        self._heap: list[tuple[float, float, int, int, float, Item[P]]] = []
        self._getters: deque[anyio.Event] = deque()
        self._putters: deque[anyio.Event] = deque()
        self._closed = False
        self._sequence = self._largest = self._taken = 0
        self._waited_seconds = 0.0

    async def put(self, item: Item[P]) -> None:
        """Add an item, waiting for room.

        Raises:
            QueueClosedError: the queue is closed, before or while waiting.
        """
        while len(self._heap) >= self._capacity and not self._closed:
            await self._wait_in(self._putters)
        if self._closed:
            raise QueueClosedError(f"queue {self.name!r} is closed; ticket {item.ticket.number} cannot enter.")
        key = (-float(item.version), -item.value, item.ticket.number, self._sequence)
        heapq.heappush(self._heap, (*key, self._clock(), item))
        self._sequence += 1
        self._largest = max(self._largest, len(self._heap))
        self._wake_one(self._getters)

    def __len__(self) -> int:
        return len(self._heap)

    async def get(self, ready: Callable[[int], bool] | None = None) -> tuple[Item[P], float]:
        """The freshest item, and the seconds that it waited here.

        Args:
            ready: asked with the number of items; nothing is taken before it says yes. It is asked again when an item
                comes in, at :meth:`poke`, and never once the queue is closed.

        Raises:
            QueueClosedError: the queue is closed and empty.
        """
        taken = await self.get_while(lambda: True, ready)
        assert taken is not None
        return taken

    async def get_while(
        self, stays: Callable[[], bool], ready: Callable[[int], bool] | None = None
    ) -> tuple[Item[P], float] | None:
        """As :meth:`get`; None, with nothing taken, where the getter is wanted no more.

        Args:
            stays: whether the getter is wanted; asked whenever ``ready`` would be.
            ready: see :meth:`get`.

        Raises:
            QueueClosedError: the queue is closed and empty.
        """
        while not self._closed:
            if not stays():
                if self._heap:  # what woke this getter may have been an item, which another has to take now
                    self._wake_one(self._getters)
                return None
            if self._heap and (ready is None or ready(len(self._heap))):
                break
            await self._wait_in(self._getters)
        if not self._heap:
            raise QueueClosedError(f"queue {self.name!r} is closed and empty.")
        return self._take()

    def get_more(self, most: int) -> list[tuple[Item[P], float]]:
        """Up to ``most`` items that are there now, freshest first; none when the queue is empty."""
        return [self._take() for _ in range(min(most, len(self._heap)))]

    def _take(self) -> tuple[Item[P], float]:
        *_, put_at, item = heapq.heappop(self._heap)
        waited = self._clock() - put_at
        self._taken += 1
        self._waited_seconds += waited
        self._wake_one(self._putters)
        return item, waited

    def poke(self) -> None:
        """Ask the getters that wait to look again."""
        for event in self._getters:
            event.set()

    def close(self) -> None:
        """Take no more items; those inside can still be taken."""
        self._closed = True
        for line in (self._getters, self._putters):
            for event in line:
                event.set()

    async def _wait_in(self, line: deque[anyio.Event]) -> None:
        """Wait to be woken. One item wakes one worker: a queue may have many that wait."""
        event = anyio.Event()
        line.append(event)
        try:
            await event.wait()
        except BaseException:
            if event.is_set():
                self._wake_one(line)
            raise
        finally:
            if event in line:
                line.remove(event)

    @staticmethod
    def _wake_one(line: deque[anyio.Event]) -> None:
        if line:
            line.popleft().set()

    def statistics(self) -> QueueStatistics:
        """What the queue has seen so far."""
        return QueueStatistics(
            size=len(self._heap),
            capacity=self._capacity,
            largest=self._largest,
            put=self._sequence,
            taken=self._taken,
            waiting_getters=len(self._getters),
            waiting_putters=len(self._putters),
            waited_seconds=self._waited_seconds,
        )
