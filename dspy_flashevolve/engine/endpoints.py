"""Who answers the run's requests: endpoints, several servers of one model, and what endpoints share.

Requests of one stage may ask several endpoints within one slot, and several stages one endpoint: such endpoints are a
group, which has one queue in the scheduler and one adaptive limit. A server of several that have one model has a limit
of its own.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial

from dspy_flashevolve.engine.events import EndpointPaused, EventBus, LimitChanged
from dspy_flashevolve.engine.limits import AdaptiveLimit, Bounds
from dspy_flashevolve.engine.loop import EARLY_SECONDS
from dspy_flashevolve.engine.rates import RateLimit
from dspy_flashevolve.engine.retries import Responder, Retries, RetryPolicy, TrackedRequest
from dspy_flashevolve.engine.scheduler import Scheduler, Slot

REFUSALS_IN_A_ROW = 5
"""Refusals are the rule where so many requests that were sent one after another are refused. Where a fifth of the
requests is refused at random that is so once in 4,000 requests, with four once in 800; with six an endpoint that is
full is asked once more in vain."""
ENOUGH_ANSWERS = 16
"""A pause is twice as long as the last one unless so many requests were answered in between, so that at most about a
quarter of the requests is refused by a provider that takes so many a minute and does not say how many. Not tuned."""
LONGEST_PAUSE_SECONDS = 8.0
"""A pause that no Retry-After names: with 30 seconds half of a minute's limit may be over before it is asked again,
with 4 seconds twice as many requests are refused where a bucket is refilled with two a second."""
MAX_PAUSES = 20
"""A request waits for the end of this many pauses in a row, and is then sent all the same, so that none waits for ever
at an endpoint that pauses again and again. Not tuned."""
LATENCY_ANSWERS = 16
"""A server's latency is an exponential mean over about this many answers: reply lengths differ by half of their mean,
so this is right to within an eighth."""
SLOWER = 1.5
"""Servers are about as fast up to this ratio of their latencies: at 1 the chance lengths of replies would tell them
apart, and at 2 half as fast a one would have a third of the requests."""
FORGET_SECONDS = 60.0
"""A server that was left idle for so long is asked once, however slow it was, since servers are slow while they start.
Not tuned: one request a minute."""
SERVER_SEPARATOR = " | "
"""Stands between the names of servers in the name of their model's endpoint."""
OPTIONAL_STAGES = {"integrate"}
"""A run goes on without them: where no other stage asks the same endpoint, its silence ends no run."""


class CircuitBreaker:
    """Says when an endpoint turns away most of what it is sent, and for how long it is left alone then.

    Unlike a request's own backoff it holds up everything, so a single refusal never opens it; unlike an adaptive
    limit it is all or nothing. After a pause it is half open until something is answered; with ``tries_one`` it then
    sends one request at a time, whose refusal opens it again.
    """

    def __init__(self, policy: RetryPolicy, clock: Callable[[], float], tries_one: bool = False) -> None:
        self._policy, self._clock, self._tries_one = policy, clock, tries_one
        self._refused: deque[int] = deque(maxlen=REFUSALS_IN_A_ROW)
        """Numbers of the last requests that were refused, in the order in which requests were sent: a refusal comes
        back sooner than an answer, so that the order of ends would say too much."""
        self._sent = 0
        self._opened = -math.inf
        self._openings = self._answers = 0
        self.open_until = -math.inf
        """Time until which nothing is sent."""

    @property
    def is_half_open(self) -> bool:
        """Whether nothing was answered since it was opened."""
        return self._openings > 0 and not self._answers

    def record_sent(self, request: TrackedRequest) -> None:
        """Number a request."""
        self._sent += 1
        request.number = self._sent

    def record_answer(self) -> None:
        """Record an answer, which closes it."""
        self._answers += 1

    def record_refusal(self, request: TrackedRequest, retry_after_seconds: float | None) -> bool:
        """Record a refusal; return whether it opens now."""
        if request.sent_seconds <= self._opened:  # it was sent before the last pause
            return False
        self._refused.append(request.number)
        are_in_a_row = max(self._refused) - min(self._refused) < REFUSALS_IN_A_ROW <= len(self._refused)
        if not are_in_a_row and not (self._tries_one and self.is_half_open):
            return False
        self._open(retry_after_seconds)
        return True

    def _open(self, retry_after_seconds: float | None) -> None:
        """Send nothing for as long as the provider said, or longer where that was too short the last time."""
        self._opened = self._clock()
        self._openings = 1 if self._answers >= ENOUGH_ANSWERS else self._openings + 1
        self._answers = 0
        backoff = min(LONGEST_PAUSE_SECONDS, self._policy.backoff_seconds(self._openings - 1))
        if retry_after_seconds is not None:
            backoff = retry_after_seconds if self._openings == 1 else max(backoff, retry_after_seconds)
        self.open_until = self._opened + backoff
        self._refused.clear()


class Endpoint(Responder):
    """One address, or what stands for all that a stage asks; its requests hold slots of ``group``."""

    def __init__(self, name: str, retries: Retries, group: EndpointGroup, is_optional: bool = False) -> None:
        super().__init__(name, retries, is_optional)
        self.group = group
        self._breaker = CircuitBreaker(retries.policy, retries.clock)

    @property
    def limit(self) -> AdaptiveLimit | None:
        """The adaptive limit that its requests count against."""
        return self.group.limit

    @property
    def paused_until(self) -> float:
        """Time until which nothing is sent."""
        return self._breaker.open_until

    @property
    def in_flight(self) -> int:
        """Requests that it works on now, or is about to get."""
        return len(self._under_way)

    async def admit(
        self, slot: Slot | None, rate_limit: RateLimit | None = None, tokens: float = 0.0, keep_slot: bool = False
    ) -> None:
        """Wait for the end of a pause, and until the limits a minute let a request of so many tokens through."""
        retries = self.retries
        for pauses in range(MAX_PAUSES):
            left, spread = self.paused_until - retries.clock(), retries.policy.first_seconds
            # Requests that have waited together go one by one, so that the first of them may open the breaker again.
            if retries.is_hurried or left <= (0.0 if pauses else -spread):
                break
            await retries.sleep(
                slot if left > 0 else None, max(0.0, left) + retries.chance() * spread, keep_slot, is_retry=False
            )
        if slot is not None:
            await slot.take()
            slot.mark_arrived()
        if rate_limit is not None:
            # The wait for a limit is the queue of the provider, and must not count against the request's timeout.
            with nullcontext() if slot is None or not rate_limit.is_known else slot.paused(is_retry=False):
                await rate_limit.admit(tokens, partial(retries.sleep, None))

    def begin(self, request: TrackedRequest) -> None:
        """Count a request as under way here; it goes out now, or soon."""
        if request not in self._under_way:
            self._breaker.record_sent(request)
        super().begin(request)

    def record_sent(self, request: TrackedRequest) -> None:
        """Record that an LM call goes out now."""
        self.begin(request)
        self.group.sees_lm_calls = True

    def record_reply(self, request: TrackedRequest) -> None:
        """Record that a request was answered."""
        self.leave(request)
        self.record_answer(request)
        self._breaker.record_answer()
        if (limit := self.limit) is not None:
            limit.record_answer()

    def record_refusal(
        self, request: TrackedRequest, retry_after_seconds: float | None, reason: str = "refused"
    ) -> None:
        """Record a 429, a Retry-After or a timeout; where they are the rule it pauses and its limit shrinks."""
        if retry_after_seconds is not None:
            retry_after_seconds = self.retries.policy.capped_retry_after(retry_after_seconds)
        # Where nothing was answered since the last cut, fewer requests at once would be refused as well.
        was_half_open, limit = self._breaker.is_half_open, self.limit
        if self._opens(request, retry_after_seconds) and limit is not None and not was_half_open:
            # What was sent with this request or later may be refused, too.
            endpoints = {each for each in self.group.endpoints if each.limit is limit} | {self}
            under_way = [other for each in endpoints for other in each._under_way]
            limit.cut(sum(other.sent_seconds < request.sent_seconds for other in under_way), reason)

    def record_no_reply(self, request: TrackedRequest) -> None:
        """Record that a request failed without a refusal. Only one of several servers minds."""

    def _opens(self, request: TrackedRequest, retry_after_seconds: float | None) -> bool:
        """Tell the breaker of a request that was turned away; return whether it opens now."""
        if request.counted_failures:
            retry_after_seconds = None  # it is waited for already, in vain
        if not self._breaker.record_refusal(request, retry_after_seconds):
            return False
        now = self.retries.clock()
        self.retries.bus.emit(EndpointPaused(now, self.name, self.paused_until - now))
        if not self.retries.is_hurried:
            self._hold()
        return True

    def _hold(self) -> None:
        """Leave requests in their queue for the length of a pause."""
        self.group.hold(self.paused_until)


class Server(Endpoint):
    """One of several servers of a model: it has a limit of its own, and is left out while it fails."""

    def __init__(self, name: str, servers: Servers, bounds: Bounds | None) -> None:
        super().__init__(name, servers.retries, servers.group)
        self._breaker = CircuitBreaker(self.retries.policy, self.retries.clock, tries_one=True)
        self._servers = servers
        self._own_limit = None if bounds is None else self.group.adapt(name, bounds, self._take_pressure)
        self.group.endpoints.append(self)
        self._was_full = False
        self._answered_seconds, self._measured = -math.inf, 0
        self.latency_seconds: float | None = None
        """Mean latency of its last answers; None before the first."""

    @property
    def limit(self) -> AdaptiveLimit | None:
        """See :class:`Endpoint`; of one server alone the group's."""
        return self.group.limit if self._own_limit is None else self._own_limit

    @property
    def slots(self) -> int:
        """Requests that it may have in flight: none in a pause, and one after it until it has answered."""
        if self.paused_until > self.retries.clock():
            return 0
        return (
            1 if self._breaker.is_half_open else self.group.scheduler.limit if self.limit is None else self.limit.limit
        )

    @property
    def is_forgotten(self) -> bool:
        """Whether its latency was measured so long ago that it has to be asked again."""
        return not self._under_way and self.retries.clock() > self._answered_seconds + FORGET_SECONDS

    def expected_latency(self, mean_seconds: float) -> float:
        """Return the seconds that one more request is expected to take: as the last ones (the mean of all servers
        before the first), or as long as it has answered nothing of what it has; none where it is forgotten."""
        if self.is_forgotten:
            return 0.0
        now = self.retries.clock()
        oldest = min((request.sent_seconds for request in self._under_way), default=now)
        silent_seconds = now - max(oldest, self._answered_seconds)
        return max(mean_seconds if self.latency_seconds is None else self.latency_seconds, silent_seconds)

    def begin(self, request: TrackedRequest) -> None:
        """See :meth:`Endpoint.begin`."""
        self._measured = 0 if self.is_forgotten else self._measured
        super().begin(request)
        self._was_full = self._was_full or self.in_flight >= self.slots

    def leave(self, request: TrackedRequest) -> None:
        """See :meth:`Responder.leave`."""
        super().leave(request)
        self._servers.leave(request)

    def record_sent(self, request: TrackedRequest) -> None:
        """See :meth:`Endpoint.record_sent`."""
        super().record_sent(request)
        self._servers.begin(request)

    def record_answer(self, request: TrackedRequest) -> None:
        """Record that a request was answered, by one of the servers: which of them is no matter."""
        self._servers.record_answer(request)

    def record_reply(self, request: TrackedRequest) -> None:
        """See :meth:`Endpoint.record_reply`."""
        super().record_reply(request)
        self._answered_seconds = self.retries.clock()
        latency = self._answered_seconds - request.sent_seconds
        before = latency if self.latency_seconds is None else self.latency_seconds
        self._measured = min(LATENCY_ANSWERS, self._measured + 1)
        self.latency_seconds = before + (latency - before) / self._measured
        self.group.update_slots()  # it is half open no more

    def _hold(self) -> None:
        """See :class:`Endpoint`: only where all servers pause."""
        self.group.update_slots()
        self.group.hold(min(server.paused_until for server in self._servers.members))

    def record_no_reply(self, request: TrackedRequest) -> None:
        """Record that it did not answer a request, which another server may."""
        self._opens(request, None)

    def _take_pressure(self) -> bool:
        was_full, self._was_full = self._was_full, False
        return was_full


class Servers(Responder):
    """The servers of one model, of which each request asks one.

    The least loaded of those that are about as fast as the fastest is asked, by its latency times its requests
    (Finagle's Peak EWMA); a slower one where the fast ones have as many as their limits allow.
    """

    def __init__(
        self, name: str, retries: Retries, group: EndpointGroup, bounds: Bounds | None, is_optional: bool = False
    ) -> None:
        super().__init__(name, retries, is_optional)
        self.group = group
        self.members = [Server(member, self, bounds) for member in members_of(name)]
        if bounds is not None:
            group.models.append(self)

    @property
    def limit(self) -> int:
        """Requests in flight, over all servers."""
        return max(1, sum(server.slots for server in self.members))

    @property
    def has_room(self) -> bool:
        """Whether a server that answers may be asked now."""
        return any(server.slots > server.in_flight for server in self.members)

    def choose(
        self,
        request: TrackedRequest,
        is_full: Callable[[Server], bool] = lambda server: False,
        exclude: Endpoint | None = None,
    ) -> Server:
        """Decide which server to ask, and count the request as under way there: none that is full by its limits a
        minute, nor the one that has just turned it away (``exclude``), where others are ready."""
        self.group.update_slots()  # the end of a pause has no event of its own
        ready = [server for server in self.members if server.slots > server.in_flight]
        ready = [server for server in ready if server is not exclude] or ready
        ready = [server for server in ready if not is_full(server)] or ready
        measured = [server.latency_seconds for server in ready if server.latency_seconds is not None]
        latencies = {server: server.expected_latency(sum(measured) / max(1, len(measured))) for server in ready}
        fastest = min(latencies.values(), default=0.0)
        alike = [server for server in ready if latencies[server] <= SLOWER * fastest]
        if alike:
            chosen = min(alike, key=lambda server: (latencies[server] * (server.in_flight + 1), server.in_flight))
        else:
            chosen = min(self.members, key=lambda server: (server.paused_until, server.in_flight))
        chosen.begin(request)
        return chosen


class EndpointGroup:
    """Endpoints that share the slots of one queue in the scheduler: as many as its most limited part takes.

    Args:
        name: of the endpoints, joined by " + "; the scheduler knows the group by it.
        bounds: of the adaptive limit that the endpoints share; None where the run's number of slots is the only limit.
        is_scheduled: a stage asks it; else only the user's own code asks it, without a slot that is known to be for it.
    """

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        bus: EventBus,
        clock: Callable[[], float],
        bounds: Bounds | None = None,
        is_scheduled: bool = True,
    ) -> None:
        self.name, self._is_scheduled = name, is_scheduled
        self.scheduler, self._bus, self._clock = scheduler, bus, clock
        self.endpoints: list[Endpoint] = []
        self.models: list[Servers] = []
        """Models whose servers have limits of their own."""
        self._slots: int | None = None
        self._held_until = -math.inf
        self._rate_limits: dict[object, RateLimit] = {}
        self.sees_lm_calls = False
        """An LM call was paced here, so that limits need no signals from whole rollouts."""
        self.limit = None if bounds is None else self.adapt(name, bounds, partial(scheduler.take_pressure, name))

    def adapt(self, name: str, bounds: Bounds, take_pressure: Callable[[], bool]) -> AdaptiveLimit:
        """Make an adaptive limit, whose changes change the group's slots and are told to the observers."""

        def on_change(before: int, after: int, reason: str) -> None:
            self.update_slots()
            self._bus.emit(LimitChanged(self._clock(), name, before, after, reason))

        return AdaptiveLimit(bounds, self._clock, take_pressure, on_change)

    def update_slots(self) -> None:
        """Give the group as many slots as its most limited part takes."""
        limits = [part.limit for part in (*self.models, self.limit) if part is not None]
        if limits and self._slots != min(limits) and self._is_scheduled:
            self._slots = min(limits)
            self.scheduler.resize(self._slots, self.name)

    def rate_limit(self, account: object) -> RateLimit:
        """Return the limits a minute of an account, one object an account."""
        if account not in self._rate_limits:
            self._rate_limits[account] = RateLimit(self._clock, self.update_room)
        return self._rate_limits[account]

    def hold(self, until: float) -> None:
        """Leave requests in the queue until then: in slots they would only wait, and no longer in the run's order."""
        self._held_until = max(self._held_until, until)
        self.update_room()
        asyncio.get_running_loop().call_later(max(0.0, until - self._clock()), self.update_room)

    def release(self) -> None:
        """Hold requests back no longer, since the run is to end."""
        self._held_until = -math.inf
        self.update_room()

    def update_room(self) -> None:
        """Let no more requests into slots than their limits a minute can use soon: what waits for long waits in its
        queue, in the run's order."""
        if not self._is_scheduled:
            return
        if self._clock() < self._held_until - EARLY_SECONDS:
            self.scheduler.set_room(0, self.name)
            return
        rate_limits = self._rate_limits.values()
        binding = [rate_limit for rate_limit in rate_limits if rate_limit.is_known]
        if len(binding) < len(rate_limits) and SERVER_SEPARATOR in self.name:
            binding = []  # what one server has no room for, another takes
        room = sum(max(0, rate_limit.ahead - rate_limit.waiting) for rate_limit in binding) if binding else None
        self.scheduler.set_room(room, self.name)


class Endpoints:
    """All endpoints of a run.

    Args:
        asked: stage -> the names of the endpoints that its requests ask.
        adaptive: how their limits adapt; None for no limit but that of the run.
        on_outage: called with the reason when a provider is given up; see :class:`RetryPolicy`.
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
        on_outage: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.retries = Retries(retry, clock, rng, bus, on_outage)
        self._scheduler, self._bus, self._clock = scheduler, bus, clock
        self._asked = {stage: set(names) for stage, names in asked.items()}
        self._group_names = groups_of(self._asked)
        self._groups: dict[str, EndpointGroup] = {}
        """Endpoint -> the group that it belongs to."""
        self._stages: dict[str, Endpoint] = {}
        self._endpoints: dict[str, Endpoint] = {}
        self._models: dict[str, Servers] = {}
        for group_name in sorted(set(self._group_names.values())):
            stages = [stage for stage, name in self._group_names.items() if name == group_name]
            names = {name for stage in stages for name in self._asked[stage]}
            models = {name for name in names if SERVER_SEPARATOR in name}
            bounds = adaptive if names - models - each_by_itself(models) else None
            group = EndpointGroup(group_name, scheduler, bus, clock, bounds)
            self._groups.update(dict.fromkeys({*names, *each_by_itself(models)}, group))
            for name in sorted(models):
                self._add_servers(name, group, adaptive)
            group.update_slots()

    @property
    def limits(self) -> dict[str, AdaptiveLimit]:
        """Name of a group, or of a server -> its limit, where that adapts."""
        limits = {group.name: group.limit for group in self._groups.values()}
        limits.update({server.name: server.limit for model in self._models.values() for server in model.members})
        return {name: limit for name, limit in limits.items() if limit is not None}

    def endpoint(self, name: str) -> Endpoint:
        """Return the endpoint of that name, one object a name."""
        if name not in self._endpoints:
            group = self._group(name)
            self._endpoints[name] = Endpoint(name, self.retries, group, self._is_optional(name))
            group.endpoints.append(self._endpoints[name])
        return self._endpoints[name]

    def servers(self, name: str) -> Servers:
        """Return the servers of a model, by their common name."""
        if name not in self._models:
            self._add_servers(name, self._group(name), None)
        return self._models[name]

    def of_stage(self, stage: str) -> Endpoint:
        """Return what stands for all that a stage asks, and for others that ask the same: it compares the outcomes of
        whole requests, when the endpoints' own requests were made again already."""
        name = self._group_names.get(stage, stage)
        if name not in self._stages:
            names = self._asked.get(stage) or {stage}
            self._stages[name] = Endpoint(name, self.retries, self._group(min(names)), self._is_optional(name))
        return self._stages[name]

    def rate_limit(self, name: str, account: object) -> RateLimit:
        """Return the limits a minute of an account at an endpoint, one object an account."""
        return self._group(name).rate_limit(account)

    def hurry(self) -> None:
        """Cut all waits short, now and from now on, since the run is to end."""
        self.retries.hurry()
        for group in set(self._groups.values()):
            group.release()

    def _group(self, name: str) -> EndpointGroup:
        if name not in self._groups:
            self._groups[name] = EndpointGroup(name, self._scheduler, self._bus, self._clock, is_scheduled=False)
        return self._groups[name]

    def _add_servers(self, name: str, group: EndpointGroup, bounds: Bounds | None) -> None:
        self._models[name] = Servers(name, self.retries, group, bounds, self._is_optional(name))
        self._endpoints.update({server.name: server for server in self._models[name].members})

    def _is_optional(self, name: str) -> bool:
        """Whether only stages that a run can do without ask an endpoint, or a group of them."""
        stages = {
            stage
            for stage, names in self._asked.items()
            if name in names or name == self._group_names.get(stage, stage)
        }
        return bool(stages) and stages <= OPTIONAL_STAGES


def groups_of(asked: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return stage -> the name of the group of endpoints that it asks: those with an endpoint in common are one group.

    >>> groups_of({"rollout": ["a", "b"], "propose": ["c"], "validate": ["b", "d"]})
    {'rollout': 'a + b + d', 'propose': 'c', 'validate': 'a + b + d'}
    >>> groups_of({"rollout": ["a | b"], "propose": ["b"]})["rollout"]
    'a | b + b'
    """
    united: list[frozenset[str]] = []
    for names in map(frozenset, asked.values()):
        touching = [other for other in united if each_by_itself(other) & each_by_itself(names)]
        united = [other for other in united if other not in touching] + [names.union(*touching)]
    group = {name: " + ".join(sorted(names)) for names in united for name in names}
    return {stage: group[name] for stage, names in asked.items() for name in list(names)[:1]}


def members_of(name: str) -> list[str]:
    """Return the names of the servers that a name stands for; the name itself where it stands for one endpoint."""
    return name.split(SERVER_SEPARATOR)


def each_by_itself(names: Iterable[str]) -> set[str]:
    """Return the names of single endpoints among, or in, some names."""
    return {member for name in names for member in members_of(name)}
