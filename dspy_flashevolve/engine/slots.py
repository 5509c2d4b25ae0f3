"""The run's slots: how many requests may be in flight, and who gets the next one.

A slot is one rollout or LM call in flight. The slots are shared by all stages, so that none is idle
while any stage has work. Requests that wait are grouped by claim (one ticket in one stage), and the
order decides between claims each time a slot comes free. Below the total an endpoint may have a limit of
its own, which may change at any time; claims that wait for one endpoint do not hold up those of another.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from dspy_flashevolve.engine.claims import Claim, DeepestFirst, SlotOrder
from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.leases import Lease, set_current


@dataclass(frozen=True, slots=True)
class SlotStatistics:
    """How the slots were used.

    Args:
        limit: slots there are, over all endpoints.
        busy: slots held now.
        waiting: requests that wait for one now.
        peak: the most that were ever held at once.
        granted: slots given so far; one that was given back for a while counts again.
        busy_seconds: summed over slots and time.
        busy_seconds_by_stage: the same, for each stage.
        limits: endpoint -> slots that it may have now, where that is limited.
        limit_seconds: slots that there were, by both limits, summed over time.
    """

    limit: int
    busy: int
    waiting: int
    peak: int
    granted: int
    busy_seconds: float
    busy_seconds_by_stage: dict[str, float]
    limits: dict[str, int] = field(default_factory=dict[str, int])
    limit_seconds: float = 0.0


@dataclass(slots=True)
class _Endpoint:
    """What is in flight at one endpoint; ``width_seconds`` is ``busy`` summed over the time up to ``since``."""

    since: float
    limit: int | None = None
    busy: int = 0
    pressed: bool = False
    width_seconds: float = 0.0

    @property
    def is_full(self) -> bool:
        return self.limit is not None and self.busy >= self.limit

    def count(self, change: int, now: float) -> None:
        self.width_seconds += self.busy * (now - self.since)
        self.since = now
        self.busy += change


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
        self._limit = _checked(limit)
        self._order: SlotOrder = order or DeepestFirst()
        self._clock = clock
        self._waiting: dict[Claim, deque[anyio.Event]] = {}
        self._held: dict[Claim, int] = {}
        self._busy = self._peak = self._granted = 0
        self._busy_seconds: dict[str, float] = {}
        self._endpoints: dict[str, _Endpoint] = {}
        self._of_stage: dict[str, str] = {}
        self._limit_seconds, self._limit_since = 0.0, 0.0
        self.on_idle: Callable[[], None] | None = None
        """Called each time a slot comes free that nobody waits for."""

    @property
    def limit(self) -> int:
        """Slots there are now, by the total and by what the endpoints that are limited may have together."""
        allowed = [one.limit for one in list(self._endpoints.values()) if one.limit is not None]
        return min(self._limit, sum(allowed)) if allowed else self._limit

    @property
    def idle(self) -> int:
        """Slots that are free, at the endpoint that has the fewest. None is while somebody waits for it."""
        free = [one.limit - one.busy for one in self._endpoints.values() if one.limit is not None]
        return max(0, min([self._limit - self._busy, *free]))

    def assign(self, endpoints: Mapping[str, str]) -> None:
        """Say which endpoint answers a stage's requests: stage -> endpoint. Call it before the first request."""
        self._of_stage = dict(endpoints)
        for name in self._of_stage.values():
            self._at(name)

    def resize(self, limit: int, endpoint: str | None = None) -> None:
        """Have more or fewer slots from now on; with fewer, those who hold one keep it until they are done.

        Args:
            limit: slots, at least 1.
            endpoint: whose; None for the total.

        Raises:
            ConfigurationError: limit under 1.
        """
        self._account_limit()
        if endpoint is None:
            self._limit = _checked(limit)
        else:
            self._at(endpoint).limit = _checked(limit)
        self._hand_on()

    def pressed(self, endpoint: str) -> bool:
        """Whether a request waited for this endpoint's own limit, at any time since this was last asked."""
        at = self._at(endpoint)
        waits = at.is_full and any(self._endpoint_of(claim) == endpoint for claim in self._waiting)
        pressed, at.pressed = at.pressed or waits, False
        return pressed

    def busy_at(self, endpoint: str) -> int:
        """Slots held now by requests of one endpoint."""
        return self._at(endpoint).busy

    def width_seconds(self, endpoint: str) -> float:
        """Slots held by requests of one endpoint, summed over the time so far."""
        at = self._at(endpoint)
        at.count(0, self._clock())
        return at.width_seconds

    @asynccontextmanager
    async def hold(self, claim: Claim) -> AsyncGenerator[Lease, None]:
        """Wait for a slot, hold it for the block, and give it back.

        Code in the block may give it back for a while: see :func:`dspy_flashevolve.engine.leases.paused_slot`.
        """
        since = 0.0

        async def acquire() -> None:
            nonlocal since
            await self._acquire(claim)
            since = self._clock()

        def release() -> None:
            self._busy_seconds[claim.stage] = self._busy_seconds.get(claim.stage, 0.0) + self._clock() - since
            self._release(claim)

        lease = Lease(acquire, release)
        await lease.take()
        outer = set_current(lease)
        try:
            yield lease
        finally:
            set_current(outer)
            lease.close()

    def statistics(self) -> SlotStatistics:
        """How the slots were used so far, from any thread (slots still held count once they are given back)."""
        return SlotStatistics(
            limit=self._limit,
            busy=self._busy,
            waiting=sum(map(len, self._waiting.values())),
            peak=self._peak,
            granted=self._granted,
            busy_seconds=sum(self._busy_seconds.values()),
            busy_seconds_by_stage=dict(self._busy_seconds),
            limits={name: one.limit for name, one in list(self._endpoints.items()) if one.limit is not None},
            limit_seconds=self._all_limit_seconds,
        )

    def _endpoint_of(self, claim: Claim) -> str:
        return claim.endpoint or self._of_stage.get(claim.stage, "")

    def _at(self, endpoint: str) -> _Endpoint:
        if endpoint not in self._endpoints:
            self._endpoints[endpoint] = _Endpoint(self._clock())
        return self._endpoints[endpoint]

    async def _acquire(self, claim: Claim) -> None:
        at = self._at(self._endpoint_of(claim))
        if self._busy < self._limit and not at.is_full:  # nobody waits for what is free: it is handed on at once
            self._grant(claim)
            return
        at.pressed = at.pressed or at.is_full
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
        if not self._granted:
            self._limit_since = self._clock()
        self._held[claim] = self._held.get(claim, 0) + 1
        self._busy += 1
        self._granted += 1
        self._peak = max(self._peak, self._busy)
        self._at(self._endpoint_of(claim)).count(1, self._clock())

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
        self._at(self._endpoint_of(claim)).count(-1, self._clock())
        self._hand_on()

    def _hand_on(self) -> None:
        """Give free slots to those who wait, in order, and say so where some are left."""
        while self._busy < self._limit and (chosen := self._next()) is not None:
            event = self._waiting[chosen][0]
            self._forget(chosen, event)
            self._grant(chosen)
            event.set()
        if self.on_idle is not None and self.idle:
            self.on_idle()

    def _next(self) -> Claim | None:
        return min(
            (claim for claim in self._waiting if not self._at(self._endpoint_of(claim)).is_full),
            key=lambda claim: self._order.key(claim, self._held.get(claim, 0), len(self._waiting[claim])),
            default=None,
        )

    def _account_limit(self) -> None:
        self._limit_seconds, self._limit_since = self._all_limit_seconds, self._clock()

    @property
    def _all_limit_seconds(self) -> float:
        return self._limit_seconds + (self.limit * (self._clock() - self._limit_since) if self._granted else 0.0)


def _checked(limit: int) -> int:
    if limit < 1:
        raise ConfigurationError(f"slots: the limit is {limit}, expected at least 1.")
    return limit
