"""One model on several servers: which replica a request asks, and which are left out.

A request goes to the replica that is expected to answer it soonest, or to one that needs little longer. A slow replica
gets its share while so much waits that the fast ones need longer for all of it than the slow one for one request, and
none of the last requests. Among the replicas that remain, requests with the same key go to the same one, unless that
loads it by more than :data:`MAX_LOAD_FACTOR` times its share (consistent hashing with bounded loads, arXiv 1608.01350):
what its prefix cache keeps of their common beginning is of use to them.

Measured, two servers of unequal speed make all of the sum of what each makes alone (docs/scheduling.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from hashlib import sha256

from dspy_flashevolve.engine.endpoint import Endpoint
from dspy_flashevolve.engine.groups import EndpointGroup, members_of
from dspy_flashevolve.engine.limits import AdaptiveLimit, Bounds
from dspy_flashevolve.engine.retries import SILENT_SECONDS, Responder, Retries, TrackedRequest

MAX_FAILURES = 2
"""This many requests in a row that a replica does not answer leave it out. One may be the request's fault; with three,
each outage costs one more timeout of up to minutes."""
SILENT_LATENCIES = 5.0
"""A replica is not asked while it has requests and has answered nothing for this many times the mean latency. Latencies
are spread about exponentially, and e**-5 is under one percent."""
MAX_LOAD_FACTOR = 1.25
"""A replica takes at most this many times its share because it knows the beginning of a prompt. With 1 the hash decides
nothing once all are busy, with 2 one replica may have a queue while another is idle."""
SLOWER = 1.5
"""Replicas count as equally fast up to this ratio of their latencies, and a slower one has to be faster than the wait
for a fast one by it. With 1 the chance lengths of replies would tear apart requests that begin alike, and batches would
end with requests at the slow one; with 2 one that is twice as slow would be used as the fast one."""
LATENCY_ANSWERS = 16
"""A replica's latency is the mean of about this many answers: reply lengths differ by half of their mean, so this is
right to within an eighth."""
FORGET_ANSWERS = 256
"""Answers after which the least latency is mostly forgotten, since a server may have become slower for good. A round
number: with half of it a busy phase is sooner taken for the speed of an idle server, with double a lasting change is
noticed later."""
RECHECK_LATENCIES = 16.0
"""A replica that is left idle because it was slow is asked once after this many times its latency, since servers are
slow while they start. Each time that it is slow again it waits twice as long: an answer in sixteen, and soon far fewer,
comes late."""
MAX_UNPROVEN = 8
"""Requests at most that a replica has under way before its first answer. Without this bound 32 of 64 slots wait for a
slow one; a fast one gives its first answer within seconds."""


class Replica(Endpoint):
    """One server of a model. It has a limit of its own, and is left out while it fails.

    Args:
        name: its address without secrets.
        replicas: those of the model, of which it is one.
        bounds: of its limit; None where the run's number of slots is the only limit.
    """

    def __init__(self, name: str, replicas: Replicas, bounds: Bounds | None) -> None:
        super().__init__(name, replicas.retries, replicas.group)
        self._replicas = replicas
        self.adaptive_limit = None if bounds is None else replicas.group.adapt(name, bounds, self.take_pressure)
        self._failures_in_a_row = 0
        self.is_on_trial = False
        """It was left out and has not answered since: it gets one request at a time."""
        self._under_pressure = False
        self._own_width_seconds, self._measured_seconds = 0.0, self.retries.clock()
        self.last_answer_seconds = self._measured_seconds
        """Time of its last answer, or of its last request that found nothing else in flight."""
        self.latency_seconds: float | None = None
        """Mean latency of its last answers; None before the first."""
        self._answers = 0
        self._latency_width = 1.0
        """Mean number of requests in flight beside these answers."""
        self._least_latency_seconds = math.inf
        """Latency without company, as far as that was observed."""
        self.recheck_latencies = RECHECK_LATENCIES
        """Idle time, in its latencies, after which it is asked again though it was slow."""

    @property
    def in_flight(self) -> int:
        """Requests that it works on now, or is about to get."""
        return len(self._under_way)

    @property
    def limit(self) -> int:
        """Requests that it may have in flight: by its adaptive limit, else as many as the run has slots."""
        return self._group.run_limit if self.adaptive_limit is None else self.adaptive_limit.limit

    @property
    def capacity(self) -> int:
        """Requests that it gets: its limit, but few before its first answer where others could be asked."""
        is_unproven = self.latency_seconds is None and len(self._replicas.members) > 1
        return min(self.limit, MAX_UNPROVEN) if is_unproven else self.limit

    @property
    def is_at_capacity(self) -> bool:
        """Whether one more request would have to wait."""
        return self.in_flight >= self.capacity

    def take_pressure(self) -> bool:
        """Return whether all replicas were at their limits at any time since this was last called."""
        was_under_pressure, self._under_pressure = self._under_pressure, False
        return was_under_pressure

    def mark_pressure(self) -> None:
        """Record that a request would have gone here if its limit were higher."""
        self._under_pressure = True

    def next_latency(self, assumed: float) -> float:
        """Return the seconds that one more request is expected to take here: fewer with less company.

        Args:
            assumed: latency of a replica that has answered nothing; the age of its oldest request counts, if higher.
        """
        if self.latency_seconds is None:
            now = self.retries.clock()
            oldest = min((request.sent_seconds for request in self._under_way), default=now)
            return max(assumed, now - oldest)
        share = min(1.0, (self.in_flight + 1) / self._latency_width)
        return max(self._least_latency_seconds, share * self.latency_seconds)

    @property
    def is_outdated(self) -> bool:
        """Whether it has been idle for so long that its latency has to be measured anew."""
        idle_seconds = self.retries.clock() - self.last_answer_seconds
        return not self.in_flight and idle_seconds > self.recheck_latencies * (self.latency_seconds or math.inf)

    def begin_recheck(self) -> None:
        """Let the next answer outweigh those before; the next recheck comes later."""
        self.recheck_latencies *= 2
        self._answers = 0

    # What an endpoint does, for one of several.

    @property
    def _limit(self) -> AdaptiveLimit | None:
        return self.adaptive_limit

    @property
    def _width(self) -> int:
        return self.in_flight

    @property
    def _width_seconds(self) -> float:
        self._measure()
        return self._own_width_seconds

    def _measure(self) -> None:
        """Integrate the number of requests in flight up to now; before that number changes."""
        now = self.retries.clock()
        self._own_width_seconds += self.in_flight * (now - self._measured_seconds)
        self._measured_seconds = now

    def begin(self, request: TrackedRequest) -> None:
        """Count a request as under way here; it goes out now, or soon."""
        self._measure()
        if not self._under_way:
            self.last_answer_seconds = self._measured_seconds
        super().begin(request)

    def leave(self, request: TrackedRequest) -> None:
        """See :meth:`Responder.leave`."""
        self._measure()
        super().leave(request)
        self._replicas.leave(request)

    def record_sent(self, request: TrackedRequest) -> None:
        """See :meth:`Endpoint.record_sent`."""
        super().record_sent(request)
        self._replicas.begin(request)
        self._replicas.mark_pressure()

    def record_answer(self, request: TrackedRequest) -> None:
        """Record that a request was answered, by one of the replicas: which of them is no matter."""
        self._replicas.record_answer(request)

    def record_reply(self, request: TrackedRequest, tokens: int) -> None:
        """See :meth:`Endpoint.record_reply`."""
        super().record_reply(request, tokens)
        self._failures_in_a_row = 0
        self.last_answer_seconds = self.retries.clock()
        latency = self.last_answer_seconds - request.sent_seconds
        is_first = self.latency_seconds is None
        width = (self._width_seconds - request.width_seconds) / latency if latency > 0 else 1.0
        self._learn_latency(latency, width)
        self._replicas.record_latency(latency)
        if self.is_on_trial or is_first:
            self.is_on_trial = False
            self._replicas.group.update_slots()

    def record_no_reply(self) -> None:
        """Record that it did not answer a request: after :data:`MAX_FAILURES` in a row it is left out for a while, and
        then tried by one request at a time."""
        self._failures_in_a_row += 1
        if self.is_on_trial or self._failures_in_a_row >= MAX_FAILURES:
            self.is_on_trial = True
            self._pause(None)
            self._replicas.group.update_slots()

    def is_isolated(self, request: TrackedRequest) -> bool:
        """Never: where one replica refuses a request, another may answer it."""
        return False

    def _learn_latency(self, latency: float, width: float) -> None:
        """Learn from an answer that had so many requests beside it on average."""
        self._answers += 1
        weight = 1 / min(LATENCY_ANSWERS, self._answers)
        self.latency_seconds = (1 - weight) * (self.latency_seconds or 0.0) + weight * latency
        self._latency_width = (1 - weight) * self._latency_width + weight * max(1.0, width)
        least = min(self._least_latency_seconds, self.latency_seconds)
        if self._answers < LATENCY_ANSWERS / 2:  # the first to end are the shortest replies, not the speed
            least = self.latency_seconds
        self._least_latency_seconds = least + (self.latency_seconds - least) / FORGET_ANSWERS


class Replicas(Responder):
    """The servers of one model, of which each request asks one. Made by :class:`~.endpoints.Endpoints`.

    Args:
        name: of the model's endpoint: the servers' names with :data:`REPLICA_SEPARATOR` between them.
        retries: of the run.
        group: whose slots the requests hold.
        bounds: of each replica's limit; None where the run's number of slots is the only limit.
        is_optional: see :class:`Responder`.
    """

    def __init__(
        self, name: str, retries: Retries, group: EndpointGroup, bounds: Bounds | None, is_optional: bool = False
    ) -> None:
        super().__init__(name, retries, is_optional)
        self.group = group
        self.members = [Replica(member, self, bounds) for member in members_of(name)]
        self._last_answer_seconds = -math.inf
        self._latency_seconds = 0.0
        group.add_model(self)

    def choose(
        self,
        request: TrackedRequest,
        key: str,
        is_full: Callable[[Replica], bool] = lambda replica: False,
        exclude: Endpoint | None = None,
    ) -> Replica:
        """Decide which replica to ask; the request counts as under way there from now on.

        Args:
            key: the same for requests that have a prefix in common.
            is_full: whether a replica's requests wait for another reason than its adaptive limit.
            exclude: the replica that has just turned the request away.
        """
        self.group.update_slots()  # the end of a pause has no event of its own
        chosen = self._chosen(key, is_full, exclude)
        chosen.begin(request)
        return chosen

    @property
    def has_room(self) -> bool:
        """Whether a replica that answers may be asked now."""
        return bool(self._healthy())

    @property
    def limit(self) -> int:
        """Requests in flight, over all replicas that are not left out."""
        return max(1, sum(1 if replica.is_on_trial else replica.capacity for replica in self._open()))

    def mark_pressure(self) -> None:
        """Where all replicas are full after a request was sent, record that their limits bind."""
        healthy = self._healthy()
        if all(replica.in_flight >= replica.limit for replica in healthy):
            for replica in healthy:
                replica.mark_pressure()

    def record_latency(self, latency_seconds: float) -> None:
        """Record the latency of an answer, for :data:`SILENT_LATENCIES`."""
        self._last_answer_seconds = self.retries.clock()
        self._latency_seconds += (latency_seconds - self._latency_seconds) / 8

    def _open(self) -> list[Replica]:
        """The replicas that are not in a pause."""
        now = self.retries.clock()
        return [replica for replica in self.members if replica.paused_until <= now]

    def _healthy(self) -> list[Replica]:
        return [replica for replica in self._open() if not replica.is_on_trial]

    def _is_silent(self, replica: Replica) -> bool:
        """Whether a replica has requests and has answered none for long, while others answer."""
        silence = self._last_answer_seconds - replica.last_answer_seconds
        return replica.in_flight > 0 and silence > max(SILENT_SECONDS, SILENT_LATENCIES * self._latency_seconds)

    def _chosen(self, key: str, is_full: Callable[[Replica], bool], exclude: Endpoint | None) -> Replica:
        open_replicas = self._open()
        for replica in open_replicas:
            if replica.is_on_trial and not replica.in_flight:
                return replica
        ready = [replica for replica in self._healthy() if not self._is_silent(replica)]
        if not ready:
            candidates = open_replicas or self.members
            return min(candidates, key=lambda replica: (replica.paused_until, replica.in_flight / replica.limit))
        ready = [replica for replica in ready if replica is not exclude] or ready
        ready = [replica for replica in ready if not is_full(replica)] or ready
        latencies = [replica.latency_seconds for replica in ready if replica.latency_seconds is not None]
        fastest = min(latencies, default=0.0)
        expected = self._expected_seconds(ready, fastest)
        best = min(ready, key=lambda replica: expected[replica])
        for replica in ready:  # where the fastest is full its limit binds, whatever room a slower one has
            if replica.is_at_capacity and replica.latency_seconds == fastest:
                replica.mark_pressure()
        if best.is_at_capacity:
            return best
        soon = [replica for replica in ready if expected[replica] <= SLOWER * expected[best]]
        for replica in ready:
            if replica in soon:
                replica.recheck_latencies = RECHECK_LATENCIES
            elif replica.is_outdated:
                replica.begin_recheck()
                return replica
        return _preferred(key, [replica for replica in soon if not replica.is_at_capacity])

    def _expected_seconds(self, ready: Sequence[Replica], fastest: float) -> dict[Replica, float]:
        waiting = self.group.waiting
        latencies = {replica: replica.next_latency(fastest) for replica in ready}
        least = min(latencies.values())
        return {
            replica: expected_seconds(latencies[replica], least, replica.in_flight, replica.capacity, waiting)
            for replica in ready
        }


def _preferred(key: str, replicas: Sequence[Replica]) -> Replica:
    """The replica that a hash of the key says, among those that are not loaded above their share (rendezvous hashing
    with weights: each has its share of the keys by its limit, and keeps its keys when another comes or goes)."""
    requests = 1 + sum(replica.in_flight for replica in replicas)
    limits = sum(replica.limit for replica in replicas)
    bounded = [
        replica
        for replica in replicas
        if replica.in_flight < math.ceil(MAX_LOAD_FACTOR * requests * replica.limit / limits)
    ]
    return max(bounded or replicas, key=lambda replica: replica.limit / -math.log(_draw(key, replica.name)))


def expected_seconds(latency: float, least_latency: float, in_flight: int, capacity: int, waiting: int) -> float:
    """Return the seconds until a replica would have answered one more request, as it is compared with the others.

    Where the replica is full, the request goes behind those in flight. Requests that wait for a slot are counted, too:
    while they last, a slower replica helps. It has to be faster than that by far, since some requests take longer than
    others, and the last request of a batch is what its step waits for.

    Args:
        latency: of a request that has a place at the replica.
        least_latency: of all replicas.
        in_flight, capacity: of this replica.
        waiting: requests that wait for a slot of any of them.

    >>> expected_seconds(1.0, 1.0, in_flight=3, capacity=8, waiting=0)
    1.0
    >>> expected_seconds(1.0, 1.0, in_flight=8, capacity=8, waiting=39), expected_seconds(4.0, 1.0, 3, 8, 39)
    (6.0, 6.0)
    """
    if in_flight >= capacity:
        latency *= (in_flight + 1 + waiting) / capacity
    elif latency > SLOWER * least_latency:
        latency *= SLOWER
    return latency


def _draw(key: str, name: str) -> float:
    """Return a number above 0 and below 1 that depends on both arguments and nothing else."""
    return (1 + int.from_bytes(sha256(f"{key}\0{name}".encode("utf-8", "replace")).digest()[:6], "big")) / (2**48 + 2)
