"""The run's slots: how many requests may be in flight, and who gets the next one.

A slot is one rollout or LM call in flight. The slots are shared by all stages, so that none is idle
while any stage has work. Requests that wait are grouped by claim (one ticket in one stage), and the
order decides between claims each time a slot comes free.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import anyio

from dspy_flashevolve.engine.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Claim:
    """Who asks for a slot: one ticket in one stage.

    Args:
        ticket: number of the ticket.
        stage: name of the stage.
        depth: position of the stage in the pipeline; deeper is nearer to a commit.
        value: what finishing the item is thought to be worth.
        version: the pool's version that the ticket saw.
        rank: goes before the value among claims of one stage; higher goes first.
    """

    ticket: int
    stage: str
    depth: int
    value: float = 0.0
    version: int = 0
    rank: float = 0.0


SlotKey = tuple[float, ...]


class SlotOrder(Protocol):
    """Decides which waiting claim gets the next free slot."""

    def key(self, claim: Claim, held: int, waiting: int) -> SlotKey:
        """The claim with the smallest key goes first; of equal claims the one that asked first.

        Args:
            claim: who asks.
            held: slots that the claim holds now.
            waiting: requests of the claim that wait for one.
        """
        ...


class DeepestFirst:
    """Small claims first; then the deepest stage, the highest value, the freshest version.

    A claim with few requests left delays a large one by little, and a large one delays it by much. So a
    validation of 300 examples, deep as it is, leaves the next slots to a screen of 3, and still takes
    every slot that nobody else wants. Large claims of one stage do not share: the most valuable one gets
    all it can use, so that it ends soon, instead of all ending late.

    Args:
        small: requests, held and waiting, up to which a claim is small.
    """

    def __init__(self, small: int = 8) -> None:
        self._small = small

    def key(self, claim: Claim, held: int, waiting: int) -> SlotKey:
        """See :meth:`SlotOrder.key`."""
        large = held + waiting > self._small
        return (
            float(large),
            -float(claim.depth),
            -claim.rank,
            -claim.value,
            -float(claim.version),
            float(claim.ticket),
        )


@dataclass(frozen=True, slots=True)
class SlotStatistics:
    """How the slots were used.

    Args:
        limit: slots there are.
        busy: slots held now.
        waiting: requests that wait for one now.
        peak: the most that were ever held at once.
        granted: slots given so far.
        busy_seconds: summed over slots and time.
        busy_seconds_by_stage: the same, for each stage.
    """

    limit: int
    busy: int
    waiting: int
    peak: int
    granted: int
    busy_seconds: float
    busy_seconds_by_stage: dict[str, float]


class Slots:
    """A work-conserving semaphore with an order.

    Args:
        limit: slots, at least 1.
        order: who goes first; default :class:`DeepestFirst`.
        clock: seconds; injected for tests.

    Raises:
        ConfigurationError: limit under 1.
    """

    def __init__(self, limit: int, order: SlotOrder | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        if limit < 1:
            raise ConfigurationError(f"slots: the limit is {limit}, expected at least 1.")
        self._limit = limit
        self._order: SlotOrder = order or DeepestFirst()
        self._clock = clock
        self._waiting: dict[Claim, deque[anyio.Event]] = {}
        self._held: dict[Claim, int] = {}
        self._busy = self._peak = self._granted = 0
        self._busy_seconds: dict[str, float] = {}
        self.on_idle: Callable[[], None] | None = None
        """Called each time a slot comes free that nobody waits for."""

    @property
    def idle(self) -> int:
        """Slots that are free. None is while somebody waits."""
        return self._limit - self._busy

    @asynccontextmanager
    async def hold(self, claim: Claim) -> AsyncGenerator[None, None]:
        """Wait for a slot, hold it for the block, and give it back."""
        await self._acquire(claim)
        since = self._clock()
        try:
            yield
        finally:
            self._busy_seconds[claim.stage] = self._busy_seconds.get(claim.stage, 0.0) + self._clock() - since
            self._release(claim)

    def statistics(self) -> SlotStatistics:
        """How the slots were used so far (slots still held count once they are given back)."""
        return SlotStatistics(
            limit=self._limit,
            busy=self._busy,
            waiting=sum(map(len, self._waiting.values())),
            peak=self._peak,
            granted=self._granted,
            busy_seconds=sum(self._busy_seconds.values()),
            busy_seconds_by_stage=dict(self._busy_seconds),
        )

    async def _acquire(self, claim: Claim) -> None:
        if self._busy < self._limit:  # free slots mean that nobody waits: releases hand slots on at once
            self._grant(claim)
            return
        event = anyio.Event()
        self._waiting.setdefault(claim, deque()).append(event)
        try:
            await event.wait()
        except BaseException:
            if event.is_set():
                self._release(claim)
            else:
                self._forget(claim, event)
            raise

    def _grant(self, claim: Claim) -> None:
        self._held[claim] = self._held.get(claim, 0) + 1
        self._busy += 1
        self._granted += 1
        self._peak = max(self._peak, self._busy)

    def _forget(self, claim: Claim, event: anyio.Event) -> None:
        line = self._waiting[claim]
        line.remove(event)
        if not line:
            del self._waiting[claim]

    def _release(self, claim: Claim) -> None:
        self._held[claim] -= 1
        if not self._held[claim]:
            del self._held[claim]
        self._busy -= 1
        while self._waiting and self._busy < self._limit:
            chosen = self._next()
            event = self._waiting[chosen][0]
            self._forget(chosen, event)
            self._grant(chosen)
            event.set()
        if self.on_idle is not None and self.idle:
            self.on_idle()

    def _next(self) -> Claim:
        return min(
            self._waiting,
            key=lambda claim: self._order.key(claim, self._held.get(claim, 0), len(self._waiting[claim])),
        )
