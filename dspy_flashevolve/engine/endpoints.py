"""Who answers the run's requests: when they may be asked, and how much at once.

An endpoint is an address, or a provider's name. It pauses as a whole when it refuses most of what it is sent.
Endpoints that one stage asks within one slot share a limit; so do stages that ask the same endpoint.

Everything here happens on the run's loop.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio

from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.endpoint_events import EndpointPaused, LimitChanged
from dspy_flashevolve.engine.errors import TransientError
from dspy_flashevolve.engine.events import Event, EventBus, RolloutFinished
from dspy_flashevolve.engine.leases import Lease, paused_slot
from dspy_flashevolve.engine.limiter import Limiter
from dspy_flashevolve.engine.limits import AdaptiveLimit
from dspy_flashevolve.engine.rollouts import RetryPolicy
from dspy_flashevolve.engine.slots import Slots

BURST_SECONDS = 1.0
BURST_REFUSALS = 3
"""So many refusals within that time, and more than answers, are a burst: the endpoint pauses."""
MOST_WAITS = 20
"""A request waits for the end of so many pauses in a row, and is then sent all the same."""


@dataclass(slots=True)
class Sent:
    """A request under way.

    Args:
        seconds: when it was sent.
        width_seconds: what :meth:`Slots.width_seconds` said then.
    """

    seconds: float = 0.0
    width_seconds: float = 0.0


class Group:
    """Endpoints that share a limit; what :class:`Slots` calls one endpoint."""

    def __init__(self, name: str, limiter: Limiter | None = None) -> None:
        self.name = name
        self.limiter = limiter
        self.is_heard = False
        """It gets its signals from LM calls, so that those from whole rollouts are not needed."""


class Endpoint:
    """One address. Made by :class:`Endpoints`."""

    def __init__(self, name: str, of: Endpoints) -> None:
        self.name = name
        self._of = of
        self._recent: deque[tuple[float, bool]] = deque()
        self._pauses = 0
        self.open_seconds = 0.0
        """Nothing is sent before."""

    async def admit(self, lease: Lease | None) -> None:
        """Wait, without a slot, for the end of a pause; then have the slot."""
        for _ in range(MOST_WAITS):
            left = self.open_seconds - self._of.clock()
            if left <= 0:
                break
            async with paused_slot(lease):
                await anyio.sleep(left + self._of.chance() * self._of.retry.first_seconds)
        if lease is not None:
            await lease.take()

    async def rest(self, lease: Lease | None, attempt: int, retry_after_seconds: float | None) -> None:
        """Wait, without a slot, before an attempt is repeated; see :meth:`RetryPolicy.wait_seconds`."""
        self._of.retried += 1
        async with paused_slot(lease):
            await anyio.sleep(self._of.retry.wait_seconds(attempt, retry_after_seconds, self._of.chance()))

    def send(self, sent: Sent) -> None:
        """A request goes out now."""
        group = self._of.group_of(self.name)
        group.is_heard = True
        sent.seconds, sent.width_seconds = self._of.clock(), self._of.slots.width_seconds(group.name)

    def finished(self, sent: Sent, tokens: int) -> None:
        """It was answered."""
        self._pauses = 0
        self._note(refused=False)
        group = self._of.group_of(self.name)
        latency = self._of.clock() - sent.seconds
        if group.limiter is not None:
            width = self._of.slots.width_seconds(group.name) - sent.width_seconds
            group.limiter.finished(latency, tokens, width / latency if latency > 0 else None)

    def refused(self, sent: Sent, retry_after_seconds: float | None) -> None:
        """It was refused: 429, or a Retry-After."""
        self._note(refused=True)
        group = self._of.group_of(self.name)
        if group.limiter is not None:
            group.limiter.refused(retry_after_seconds, sent.seconds, self._of.slots.busy_at(group.name))
        answers = [refused for _, refused in self._recent]
        if sum(answers) >= BURST_REFUSALS and 2 * sum(answers) > len(answers):
            self._pause(retry_after_seconds)

    def timed_out(self, sent: Sent) -> None:
        """There was no answer in time."""
        group = self._of.group_of(self.name)
        if group.limiter is not None:
            group.limiter.timed_out(sent.seconds, self._of.slots.busy_at(group.name))

    def gauge(self, waiting: float, running: float, cache_use: float) -> None:
        """The server was asked how it is."""
        limiter = self._of.group_of(self.name).limiter
        if limiter is not None:
            limiter.gauge(waiting, running, cache_use)

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
        self._of.emit(EndpointPaused(now, self.name, pause))


class Endpoints:
    """All endpoints of a run.

    Args:
        adaptive: how their limits adapt; None for no limit but that of the run.
        retry: backoff where a provider does not say when to come back.
        rng: jitter.
    """

    def __init__(
        self, adaptive: AdaptiveLimit | None, retry: RetryPolicy | None = None, rng: random.Random | None = None
    ) -> None:
        self._adaptive = adaptive
        self.retry = retry or RetryPolicy()
        self.chance: Callable[[], float] = (rng or random.Random()).random
        """A draw from [0, 1)."""
        self._endpoints: dict[str, Endpoint] = {}
        self._group_of_stage: dict[str, str] = {}
        self._groups: dict[str, Group] = {}
        self._group_of_name: dict[str, str] = {}
        self._bus: EventBus | None = None
        self.slots = Slots(1)
        self.clock: Callable[[], float] = anyio.current_time
        self.retried = 0
        self.watchers: list[Callable[[], Coroutine[Any, Any, None]]] = []
        """What runs beside the run, such as the reading of a server's gauges."""

    def endpoint(self, name: str) -> Endpoint:
        """The endpoint of that name, one a name."""
        return self._endpoints.setdefault(name, Endpoint(name, self))

    @property
    def names(self) -> list[str]:
        """The endpoints that stages are known to ask."""
        return sorted(self._group_of_name)

    def assign(self, stages: Mapping[str, Iterable[str]]) -> None:
        """Say which endpoints a stage's requests ask: stage -> names. Call it before :meth:`attach`."""
        together = _united([frozenset(names) for names in stages.values()])
        self._group_of_name = {name: " + ".join(sorted(names)) for names in together for name in names}
        self._group_of_stage = {
            stage: self._group_of_name[next(iter(names))] for stage, names in stages.items() if names
        }

    def attach(self, slots: Slots, bus: EventBus, clock: Callable[[], float]) -> None:
        """Begin: give the endpoints their limits in ``slots``, and tell ``bus`` of every change."""
        self.slots, self._bus, self.clock = slots, bus, clock
        slots.assign(self._group_of_stage)
        if self._adaptive is not None:
            bus.subscribe(self._heard_rollout)
        for name in sorted(set(self._group_of_stage.values())):
            self._groups[name] = Group(name, self._limiter(name))

    def group_of(self, name: str) -> Group:
        """The group of an endpoint; one that no stage is known to ask has no limit."""
        group = self._group_of_name.get(name, name)
        if group not in self._groups:
            self._groups[group] = Group(group)
        return self._groups[group]

    def emit(self, event: Event) -> None:
        """Tell the run's observers."""
        if self._bus is not None:
            self._bus.emit(event)

    def _limiter(self, name: str) -> Limiter | None:
        if self._adaptive is None:
            return None

        def changed(before: int, after: int, reason: str) -> None:
            self.slots.resize(after, name)
            self.emit(LimitChanged(self.clock(), name, before, after, reason))

        self.slots.resize(self._adaptive.start, name)
        return Limiter(self._adaptive, self.clock, lambda: self.slots.pressed(name), changed)

    def heard_retry(self, claim: Claim, error: TransientError) -> None:
        """A whole rollout is made again, where its LM calls cannot be seen (an LM of the user's own kind)."""
        limiter = self._unheard(claim.stage)
        if limiter is not None:
            limiter.refused(error.retry_after_seconds)

    def _heard_rollout(self, event: Event) -> None:
        limiter = self._unheard(event.stage) if isinstance(event, RolloutFinished) else None
        if limiter is not None and isinstance(event, RolloutFinished):
            limiter.finished(event.latency_seconds, event.tokens)

    def _unheard(self, stage: str) -> Limiter | None:
        """The limiter of a stage's endpoint that gets no signals from LM calls."""
        group = self._groups.get(self._group_of_stage.get(stage, ""))
        return None if group is None or group.is_heard else group.limiter


def _united(sets: list[frozenset[str]]) -> list[frozenset[str]]:
    """Sets that have an element in common become one.

    >>> [sorted(one) for one in _united([frozenset("ab"), frozenset("c"), frozenset("bd")])]
    [['c'], ['a', 'b', 'd']]
    """
    united: list[frozenset[str]] = []
    for one in sets:
        touching = [other for other in united if other & one]
        united = [other for other in united if not other & one] + [one.union(*touching)]
    return united
