"""Who answers the run's requests: when they may be asked, and how much at once.

An endpoint is an address, or a provider's name. It pauses as a whole when it refuses most of what it is sent.
Endpoints that one stage asks within one slot share a limit; so do stages that ask the same endpoint.

Everything here happens on the run's loop.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

import anyio

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.events import EndpointPaused, EventBus, LimitChanged
from dspy_flashevolve.engine.limits import AdaptiveLimit, Bounds
from dspy_flashevolve.engine.scheduler import Scheduler, Slot

BURST_SECONDS = 1.0
BURST_REFUSALS = 3
"""So many refusals within that time, and more than answers, are a burst: the endpoint pauses."""
MOST_PAUSES = 20
"""A request waits for the end of so many pauses in a row, and is then sent all the same."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with full jitter.

    Args:
        attempts: requests in all, at least 1.
        first_seconds: the longest first wait.
        most_seconds: the longest wait, unless the provider's Retry-After is longer.

    Raises:
        ConfigurationError: attempts under 1.
    """

    attempts: int = 6
    first_seconds: float = 1.0
    most_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigurationError(f"retries: attempts is {self.attempts}, expected at least 1.")

    def wait_seconds(self, attempt: int, retry_after_seconds: float | None, chance: float) -> float:
        """How long to wait after failed attempt number ``attempt`` (from 0).

        Args:
            chance: a draw from [0, 1); spreads out requests that failed together.

        >>> RetryPolicy().wait_seconds(2, None, chance=0.5)
        2.0
        >>> RetryPolicy().wait_seconds(0, 10.0, chance=0.5)
        10.5
        """
        backoff = min(self.most_seconds, self.first_seconds * 2**attempt) * chance
        return backoff if retry_after_seconds is None else retry_after_seconds + self.first_seconds * chance


@dataclass(slots=True)
class Sent:
    """An LM call under way.

    Args:
        seconds: when it was sent.
        width_seconds: what :meth:`Scheduler.width_seconds` said then.
    """

    seconds: float = 0.0
    width_seconds: float = 0.0


class Endpoint:
    """One address. Made by :class:`Endpoints`."""

    def __init__(self, name: str, of: Endpoints) -> None:
        self.name = name
        self._of = of
        self._recent: deque[tuple[float, bool]] = deque()
        self._pauses = 0
        self.open_seconds = 0.0
        """Nothing is sent before."""

    async def admit(self, slot: Slot | None) -> None:
        """Wait for the end of a pause.

        Args:
            slot: given back meanwhile, and taken again; None where the caller keeps what it has.
        """
        for _ in range(MOST_PAUSES):
            left = self.open_seconds - self._of.clock()
            if left <= 0:
                break
            await self._sleep(slot, left + self._of.chance() * self._of.retry.first_seconds)
        if slot is not None:
            await slot.take()

    async def rest(self, slot: Slot | None, attempt: int, retry_after_seconds: float | None) -> None:
        """Wait before an attempt is repeated; see :meth:`RetryPolicy.wait_seconds`, and :meth:`admit` for the slot."""
        self._of.retried += 1
        await self._sleep(slot, self._of.retry.wait_seconds(attempt, retry_after_seconds, self._of.chance()))

    async def _sleep(self, slot: Slot | None, seconds: float) -> None:
        async with AsyncExitStack() as stack:
            if slot is not None:
                await stack.enter_async_context(slot.released())
            await anyio.sleep(seconds)

    def send(self, sent: Sent) -> None:
        """A request goes out now."""
        group = self._of.group_of(self.name)
        self._of.heard.add(group)
        sent.seconds, sent.width_seconds = self._of.clock(), self._of.scheduler.width_seconds(group)

    def finished(self, sent: Sent, tokens: int) -> None:
        """It was answered."""
        self._pauses = 0
        self._note(refused=False)
        group = self._of.group_of(self.name)
        limit, latency = self._of.limits.get(group), self._of.clock() - sent.seconds
        if limit is not None:
            width = self._of.scheduler.width_seconds(group) - sent.width_seconds
            limit.finished(latency, tokens, width / latency if latency > 0 else None)

    def refused(self, sent: Sent, retry_after_seconds: float | None) -> None:
        """It was refused: 429, or a Retry-After."""
        self._note(refused=True)
        group = self._of.group_of(self.name)
        limit = self._of.limits.get(group)
        if limit is not None:
            limit.refused(retry_after_seconds, sent.seconds, self._of.scheduler.busy_at(group))
        answers = [refused for _, refused in self._recent]
        if sum(answers) >= BURST_REFUSALS and 2 * sum(answers) > len(answers):
            self._pause(retry_after_seconds)

    def timed_out(self, sent: Sent) -> None:
        """There was no answer in time."""
        group = self._of.group_of(self.name)
        limit = self._of.limits.get(group)
        if limit is not None:
            limit.timed_out(sent.seconds, self._of.scheduler.busy_at(group))

    def gauge(self, waiting: float, running: float, cache_use: float) -> None:
        """The server was asked how it is."""
        limit = self._of.limits.get(self._of.group_of(self.name))
        if limit is not None:
            limit.gauge(waiting, running, cache_use)

    def _note(self, refused: bool) -> None:
        now = self._of.clock()
        self._recent.append((now, refused))
        while self._recent[0][0] < now - BURST_SECONDS:
            self._recent.popleft()

    def _pause(self, retry_after_seconds: float | None) -> None:
        now, retry = self._of.clock(), self._of.retry
        if now < self.open_seconds:  # refusals of what was sent before the pause
            return
        backoff = min(retry.most_seconds, retry.first_seconds * 2**self._pauses)
        pause = backoff if retry_after_seconds is None else retry_after_seconds
        self._pauses += 1
        self.open_seconds = now + pause
        self._recent.clear()
        self._of.bus.emit(EndpointPaused(now, self.name, pause))


class Endpoints:
    """All endpoints of a run, and their limits in its slots.

    Args:
        asked: stage -> the names of the endpoints that its requests ask.
        adaptive: how their limits adapt; None for no limit but that of the run.
        scheduler: gets the limits.
        bus: told of every change.
        clock: seconds.
        retry: backoff where a provider does not say when to come back.
        rng: jitter.
    """

    def __init__(
        self,
        asked: Mapping[str, Iterable[str]],
        adaptive: Bounds | None,
        scheduler: Scheduler,
        bus: EventBus,
        clock: Callable[[], float],
        retry: RetryPolicy,
        rng: random.Random,
    ) -> None:
        self.scheduler, self.bus, self.clock, self.retry = scheduler, bus, clock, retry
        self.chance: Callable[[], float] = rng.random
        """A draw from [0, 1)."""
        self.retried = 0
        self.limits: dict[str, AdaptiveLimit] = {}
        """Group of endpoints that share a limit -> the limit, where it adapts."""
        self.heard: set[str] = set()
        """Groups that get their signals from LM calls, so that those from whole rollouts are not needed."""
        self._endpoints: dict[str, Endpoint] = {}
        self._group_of_stage = groups_of(asked)
        self._group_of_name = {name: self._group_of_stage[stage] for stage, names in asked.items() for name in names}
        for group in sorted(set(self._group_of_stage.values())) if adaptive is not None else ():
            assert adaptive is not None
            self.limits[group] = self._adapting(group, adaptive)

    @property
    def names(self) -> list[str]:
        """The endpoints that stages are known to ask."""
        return sorted(self._group_of_name)

    def endpoint(self, name: str) -> Endpoint:
        """The endpoint of that name, one a name."""
        return self._endpoints.setdefault(name, Endpoint(name, self))

    def group_of(self, name: str) -> str:
        """The group that an endpoint shares a limit with; one that no stage is known to ask has no limit."""
        return self._group_of_name.get(name, name)

    def answered(self, stage: str, latency_seconds: float, tokens: int) -> None:
        """A whole rollout of a stage was answered, whose LM calls could not be seen (an LM of the user's own kind)."""
        limit = self._unheard(stage)
        if limit is not None:
            limit.finished(latency_seconds, tokens)

    def turned_away(self, stage: str, retry_after_seconds: float | None) -> None:
        """As :meth:`answered`, of one that has to be made again."""
        limit = self._unheard(stage)
        if limit is not None:
            limit.refused(retry_after_seconds)

    def _unheard(self, stage: str) -> AdaptiveLimit | None:
        group = self._group_of_stage.get(stage, "")
        return None if group in self.heard else self.limits.get(group)

    def _adapting(self, group: str, bounds: Bounds) -> AdaptiveLimit:
        def changed(before: int, after: int, reason: str) -> None:
            self.scheduler.resize(after, group)
            self.bus.emit(LimitChanged(self.clock(), group, before, after, reason))

        self.scheduler.resize(bounds.start, group)
        return AdaptiveLimit(bounds, self.clock, lambda: self.scheduler.pressed(group), changed)


def groups_of(asked: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Stage -> the name of the group of endpoints that it asks: those with an endpoint in common are one group.

    >>> groups_of({"rollout": ["a", "b"], "propose": ["c"], "validate": ["b", "d"]})
    {'rollout': 'a + b + d', 'propose': 'c', 'validate': 'a + b + d'}
    """
    united: list[frozenset[str]] = []
    for names in map(frozenset, asked.values()):
        touching = [other for other in united if other & names]
        united = [other for other in united if not other & names] + [names.union(*touching)]
    group = {name: " + ".join(sorted(names)) for names in united for name in names}
    return {stage: group[name] for stage, names in asked.items() for name in list(names)[:1]}
