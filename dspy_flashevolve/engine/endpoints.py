"""Who answers the run's requests: when they may be asked, and how much at once.

An endpoint is an address, or a provider's name. It pauses as a whole when it refuses most of what it is sent, and is
given up when it answers nothing for long. A request that gets no answer while others do is one that cannot be answered.
Endpoints that one stage asks within one slot share a limit; so do stages that ask the same endpoint.

Everything here happens on the run's loop.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import anyio

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.events import EndpointAsked, EndpointPaused, EventBus, LimitChanged, RequestTurnedAway
from dspy_flashevolve.engine.limits import AdaptiveLimit, Bounds
from dspy_flashevolve.engine.rates import Claim, RateLimit, SharedTimes
from dspy_flashevolve.engine.scheduler import Scheduler, Slot

logger = logging.getLogger(__name__)

BURST_SECONDS = 1.0
BURST_REFUSALS = 3
"""So many refusals within that time, and more than answers, are a burst: the endpoint pauses."""
OUTAGE_SECONDS = 60.0
"""So long a run waits for an answer of a provider that gives none, unless it is told otherwise."""
MOST_PAUSES = 20
"""A request waits for the end of so many pauses in a row, and is then sent all the same."""
COMPARED = 32
"""What became of so many other requests last tells whether it is a request, or who is asked, that is in trouble."""
PATIENT_SECONDS = 60.0
"""So long a refusal, a timeout or a lost connection says "later", and nothing of the request: only from then on do they
count as its attempts."""
ODD_SECONDS = 2.0
"""The longest backoff of a request that is turned away while others are answered: nobody is spared by a longer one."""
EARLY_SECONDS = 0.01
"""A timer may wake so much too early."""
SILENT_SECONDS = 10.0
"""From so long a silence on, an endpoint counts as in trouble although requests are under way that it may answer: one
that is asked for more than it takes at once refuses some while it is at work on the others."""
SPARE_STAGES = {"integrate"}
"""A run goes on without them: where nobody else asks who is asked there, its silence ends no run."""
FAILURES = 2
"""So many requests in a row that one of several endpoints does not answer leave it out."""
SILENT_LATENCIES = 5.0
"""One of several endpoints that answers nothing for so many times the time that others take is not asked."""
PREFERRED = 1.25
"""One of several endpoints takes so much of its share at most because it knows the beginning of a prompt."""
SLOWER = 1.5
"""Endpoints of one model count as equally fast up to this ratio of their latencies, and a slower one has to be faster
by it than the wait for a fast one. With 1 the chance lengths of replies would tear apart requests that begin alike, and
batches would end with requests at the slow one; with 2 one that is twice as slow would be used as the fast one."""
LATENCIES = 16
"""The latency of one of several endpoints is the mean of about so many answers: reply lengths differ by half of their
mean, so this is right to within an eighth."""
FORGET_LEAST = 256
"""Answers after which the least latency is believed no more: a server may have become slower for good."""
UNKNOWN = 8
"""Requests at most that one of several endpoints has under way before its first answer. Without this bound 32 of 64
slots wait for a slow one; a fast one gives its first answer within seconds."""
REPLICA_SEPARATOR = " | "
"""Between the names of endpoints that serve one model."""
SAID = 300
"""Characters that are kept of what a provider said."""
SAY_AGAIN_SECONDS = 60.0
"""An endpoint in trouble is logged at most this often."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with full jitter.

    Args:
        attempts: requests in all, at least 1, as far as they count: see :meth:`Responder.record_failure`.
        first_seconds: the longest first wait.
        most_seconds: the longest wait, unless the provider's Retry-After is longer.
        outage_seconds: the run is given up when an endpoint has answered nothing for so long, and has turned away all
            that it was sent; no Retry-After is waited for longer. None to wait as long as it takes.

    Raises:
        ConfigurationError: attempts under 1.
    """

    attempts: int = 6
    first_seconds: float = 1.0
    most_seconds: float = 30.0
    outage_seconds: float | None = OUTAGE_SECONDS

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigurationError(f"retries: attempts is {self.attempts}, expected at least 1.")

    def wait_seconds(self, attempt: int, retry_after_seconds: float | None, chance: float) -> float:
        """How long to wait after failed attempt number ``attempt`` (from 0).

        Args:
            chance: a draw from [0, 1); spreads out requests that failed together.

        >>> RetryPolicy().wait_seconds(2, None, chance=0.5)
        2.0
        >>> RetryPolicy().wait_seconds(0, 10.0, chance=0.5), RetryPolicy().wait_seconds(0, 3600.0, chance=0.5)
        (10.5, 60.5)
        """
        if retry_after_seconds is not None:
            return self.capped_retry_after(retry_after_seconds) + self.first_seconds * chance
        return min(self.most_seconds, self.first_seconds * 2 ** min(attempt, COMPARED)) * chance

    def capped_retry_after(self, retry_after_seconds: float) -> float:
        """What is waited of a Retry-After."""
        return retry_after_seconds if self.outage_seconds is None else min(retry_after_seconds, self.outage_seconds)


@dataclass(eq=False, slots=True)
class TrackedRequest:
    """A request, as often as it is sent.

    Args:
        seconds: when it was sent last.
        width_seconds: what :meth:`Scheduler.width_seconds` said then.
        faults: times that it was turned away.
        counted: those of them that count as attempts.
        since: requests that had come to an end before it was turned away first; since_seconds: when that was.
        is_odd: it was turned away last while others were answered: it is the request that gets no answer.
        said: why it was turned away last.
    """

    sent_seconds: float = 0.0
    width_seconds: float = 0.0
    failures: int = 0
    counted_failures: int = 0
    first_failure_index: int = 0
    first_failure_seconds: float = 0.0
    is_isolated: bool = False
    reason: str = ""


class Responder:
    """Who is answered, and who is not: is it a request, or who is asked, that is in trouble? Made by
    :class:`Endpoints`, for each endpoint, and for the stages that ask the same."""

    def __init__(self, name: str, of: Endpoints) -> None:
        self.name = name
        self._of = of
        self._under_way: set[TrackedRequest] = set()
        self._odd: set[TrackedRequest] = set()
        """Those that wait though others are answered: they are soon given up, and what waits with them may go on."""
        self._last: dict[TrackedRequest, tuple[int, bool]] = {}
        """Request -> when it came to an end last, in requests, and whether it was answered; the latest are last."""
        self._count = 0
        self._silent_since: float | None = None
        self._turned_away = 0
        self._said_seconds = -math.inf
        self._is_spare = of.is_spare(name)

    def begin(self, sent: TrackedRequest) -> None:
        """A request goes out."""
        sent.sent_seconds = self._of.clock()
        self._under_way.add(sent)

    def leave(self, sent: TrackedRequest) -> None:
        """It is not under way any more, whatever became of it."""
        self._under_way.discard(sent)

    def record_answer(self, sent: TrackedRequest) -> None:
        """It was answered."""
        self._note_end(sent, fine=True)
        self._silent_since, self._turned_away = None, 0

    def record_failure(self, sent: TrackedRequest, said: str, of_request: bool = False) -> None:
        """It was not answered. That counts as one of its attempts

        - where the fault may well be the request's alone, unless most others are turned away, too;
        - else (a rate limit, say) where others are answered, and it was not for :data:`PATIENT_SECONDS`;
        - where nothing is waited for, or the run can do without it.

        Args:
            said: the reason, for people.
            of_request: the fault may well be the request's alone (an error inside the server, a reply that holds
                nothing). It is compared with what became of others since it was turned away first, and such a one,
                where nobody else asked meanwhile, with what became of others before.
        """
        now = self._of.clock()
        if not sent.failures:
            sent.first_failure_index, sent.first_failure_seconds = self._count, now
        sent.failures += 1
        sent.reason = said[:SAID]
        others = since = [
            fine for one, (at, fine) in self._last.items() if one is not sent and at >= sent.first_failure_index
        ]
        if of_request and not since:
            others = [fine for one, (_, fine) in self._last.items() if one is not sent]
        answered, away = others.count(True), others.count(False)
        sent.is_isolated = answered > away
        its_own = (
            answered >= away if of_request else sent.is_isolated and now >= sent.first_failure_seconds + PATIENT_SECONDS
        )
        sent.counted_failures += its_own or self._of.is_hurried or self._is_spare
        self._note_end(sent, fine=False)
        if not sent.is_isolated or not since:  # others that were answered since say more of who is asked
            self._silent_since = now if self._silent_since is None else self._silent_since
            self._turned_away += 1
        if not sent.is_isolated:
            self._tell(now, sent)

    def _note_end(self, sent: TrackedRequest, fine: bool) -> None:
        self.leave(sent)
        self._last.pop(sent, None)
        self._last[sent] = self._count, fine
        if len(self._last) > COMPARED:
            del self._last[next(iter(self._last))]
        self._count += 1

    def may_retry(self, sent: TrackedRequest, attempts: int) -> bool:
        """Whether a request that was turned away is made again."""
        return not self._of.outage and sent.counted_failures < attempts

    async def pause_before_retry(
        self, slot: Slot | None, sent: TrackedRequest, retry_after_seconds: float | None, keep_slot: bool = False
    ) -> None:
        """Wait before a request is made again; see :meth:`RetryPolicy.wait_seconds`.

        Args:
            slot, keeps: see :meth:`Endpoints.sleep`.
        """
        retry = self._of.retry
        self._of.retried += 1
        self._of.bus.emit(RequestTurnedAway(self._of.clock(), self.name, sent.reason))
        if (
            sent.counted_failures
            and retry_after_seconds is not None
            and retry_after_seconds > retry.capped_retry_after(retry_after_seconds)
        ):
            retry_after_seconds = None  # as long as is waited for it was waited
        seconds = retry.wait_seconds(sent.failures - 1, retry_after_seconds, self._of.chance())
        if sent.is_isolated and retry_after_seconds is None:
            seconds = min(seconds, ODD_SECONDS)
        if self._silent_since is not None and retry.outage_seconds is not None:
            left = self._silent_since + retry.outage_seconds - self._of.clock()
            seconds = min(seconds, left) if left > 0 else seconds  # the last attempt decides what is given up
        if sent.is_isolated:
            self._odd.add(sent)
        try:
            await self._of.sleep(slot, seconds, keep_slot)
        finally:
            self._odd.discard(sent)

    def _tell(self, now: float, sent: TrackedRequest) -> None:
        assert self._silent_since is not None
        if self._of.outage:
            return
        most, silent, said = self._of.retry.outage_seconds, now - self._silent_since, sent.reason
        limit = math.inf if most is None else most
        is_asked = self._under_way or self._odd
        # Where one request hung for all that time, and nothing else was asked, one more decides.
        is_sure = now - sent.sent_seconds <= limit or self._turned_away > 2
        if is_sure and silent >= limit - EARLY_SECONDS and not is_asked and not self._is_spare:
            self._of.outage = (
                f"{self.name} has answered nothing for {silent:.0f} seconds, and turned away all that it was sent; "
                f"the last: {said}"
            )
            self._of.give_up(self._of.outage)
        elif (
            self._turned_away >= 2
            and (not self._under_way or silent >= SILENT_SECONDS)
            and now >= self._said_seconds + SAY_AGAIN_SECONDS
        ):
            self._said_seconds = now
            until = "until it answers" if limit == math.inf else f"for up to {limit:g} seconds"
            logger.warning("%s does not answer (%s): it is asked again, %s.", self.name, said, until)


class Endpoint(Responder):
    """One address. Made by :class:`Endpoints`.

    Args:
        several: those of one model that it is one of; then it has a limit of its own, and is left out while it fails.
    """

    def __init__(self, name: str, of: Endpoints, several: Replicas | None = None) -> None:
        super().__init__(name, of)
        self.answered_requests = 0
        self._several = several
        self._limited = of.group_of(name) if several is None else name
        """What its adaptive limit is called."""
        self._recent: deque[tuple[float, bool]] = deque()
        self._pauses = self._failures = 0
        self._width_seconds, self._counted = 0.0, of.clock()
        self.last_answer_seconds = self._counted
        """When it answered last, or was sent something while nothing was in flight."""
        self.is_pressed = False
        """All of the several were full."""
        self.is_on_trial = False
        """It was left out, and has not answered since."""
        self.paused_until = 0.0
        """Nothing is sent before."""
        self.latency_seconds: float | None = None
        """Of its last answers; None before the first."""
        self._latencies = 0
        self._latency_width = 1.0
        """Requests in flight beside these answers."""
        self._least_seconds = math.inf
        """The latency without company, as far as that was seen."""

    @property
    def in_flight(self) -> int:
        """Requests."""
        return len(self._under_way)

    @property
    def limit(self) -> int:
        """Of requests in flight; without one, as many as the run has slots."""
        return self._of.scheduler.limit if self._adaptive is None else self._adaptive.limit

    @property
    def capacity(self) -> int:
        """Requests that one of several may have in flight: few before its first answer."""
        is_unknown = self.latency_seconds is None and self._several is not None and len(self._several.members) > 1
        return min(self.limit, UNKNOWN) if is_unknown else self.limit

    def next_latency(self, assumed: float) -> float:
        """Seconds that one more request is expected to take once it has a place: less with less company.

        Args:
            assumed: while nothing was answered, at least; the age of the oldest request is known, too.
        """
        if self.latency_seconds is None:
            oldest = min((sent.sent_seconds for sent in self._under_way), default=self._of.clock())
            return max(assumed, self._of.clock() - oldest)
        share = min(1.0, (self.in_flight + 1) / self._latency_width)
        return max(self._least_seconds, share * self.latency_seconds)

    def _learn_latency(self, latency: float, width: float) -> None:
        """Learn from an answer, with so many requests in flight on average over its life."""
        self._latencies += 1
        share = 1 / min(LATENCIES, self._latencies)
        self.latency_seconds = (1 - share) * (self.latency_seconds or 0.0) + share * latency
        self._latency_width = (1 - share) * self._latency_width + share * max(1.0, width)
        least = min(self._least_seconds, self.latency_seconds)
        if self._latencies < LATENCIES / 2:  # the first to be answered are the shortest
            least = self.latency_seconds
        self._least_seconds = least + (self.latency_seconds - least) / FORGET_LEAST

    @property
    def _adaptive(self) -> AdaptiveLimit | None:
        return self._of.limits.get(self._limited)

    def begin(self, sent: TrackedRequest) -> None:
        """A request goes out now, or soon."""
        self._measure()
        if not self._under_way:
            self.last_answer_seconds = self._counted
        super().begin(sent)

    def leave(self, sent: TrackedRequest) -> None:
        """See :class:`Responder`."""
        self._measure()
        super().leave(sent)
        if self._several is not None:
            self._several.leave(sent)

    def _measure(self) -> None:
        now = self._of.clock()
        self._width_seconds += len(self._under_way) * (now - self._counted)
        self._counted = now

    def _width(self) -> float:
        """Requests in flight, summed over the time so far."""
        if self._several is None:
            return self._of.scheduler.width_seconds(self._limited)
        self._measure()
        return self._width_seconds

    async def admit(self, slot: Slot | None, claim: Claim | None = None, keep_slot: bool = False) -> None:
        """Wait for the end of a pause, and until the provider's limits let a request through.

        Args:
            slot, keeps: see :meth:`Endpoints.sleep`.
            claim: the request; None for one that no limit is asked for.
        """
        for _ in range(MOST_PAUSES):
            left = self.paused_until - self._of.clock()
            if left <= 0 or self._of.is_hurried:
                break
            await self._of.sleep(slot, left + self._of.chance() * self._of.retry.first_seconds, keep_slot)
        if slot is not None:
            await slot.take()
            slot.mark_arrived()
        if claim is not None:
            with nullcontext() if slot is None or not claim.rate.is_known else slot.paused(rests=False):
                await claim.rate.admit(claim, partial(self._of.sleep, None))

    def record_sent(self, sent: TrackedRequest) -> None:
        """A request goes out now."""
        self.begin(sent)
        self._of.heard.add(self._of.group_of(self.name))
        sent.width_seconds = self._width()
        if self._several is not None:
            self._several.begin(sent)
            self._several.note_pressure()

    def record_reply(self, sent: TrackedRequest, tokens: int) -> None:
        """It was answered."""
        self.leave(sent)
        self.answered_requests += 1
        self._answers.record_answer(sent)
        self._pauses = self._failures = 0
        self._note(refused=False)
        self.last_answer_seconds = self._of.clock()
        latency = self.last_answer_seconds - sent.sent_seconds
        if self._several is not None:
            is_first = self.latency_seconds is None
            self._learn_latency(latency, (self._width() - sent.width_seconds) / latency if latency > 0 else 1.0)
            self._several.heard(self, latency)
            if is_first:
                self._of.fit(self._several.name)
        if (limit := self._adaptive) is not None:
            width = self._width() - sent.width_seconds
            limit.record_answer(latency, tokens, width / latency if latency > 0 else None)

    @property
    def _answers(self) -> Responder:
        return self if self._several is None else self._several

    def record_refusal(self, sent: TrackedRequest, retry_after_seconds: float | None) -> None:
        """It was refused: 429, or a Retry-After. Others that are answered meanwhile need no pause."""
        if not self.is_isolated(sent):
            self._note(refused=True)
        told = self.capped_retry_after(retry_after_seconds)
        if (limit := self._adaptive) is not None:
            limit.record_refusal(told, sent.sent_seconds, self._busy)
        answers = [refused for _, refused in self._recent]
        if sum(answers) >= BURST_REFUSALS and 2 * sum(answers) > len(answers):
            self._pause(told)

    def is_isolated(self, sent: TrackedRequest) -> bool:
        """Whether a request is turned away while this endpoint answers others; of several, others may answer them."""
        return sent.is_isolated and self._several is None

    def capped_retry_after(self, retry_after_seconds: float | None) -> float | None:
        """What is waited of a Retry-After; None where there is none."""
        return None if retry_after_seconds is None else self._of.retry.capped_retry_after(retry_after_seconds)

    def record_timeout(self, sent: TrackedRequest) -> None:
        """There was no answer in time."""
        if (limit := self._adaptive) is not None:
            limit.record_timeout(sent.sent_seconds, self._busy)

    def record_no_reply(self) -> None:
        """One of several did not answer a request: at the second in a row it is left out for a while, and then tried
        by one request at a time."""
        self._failures += 1
        if self._several is not None and (self.is_on_trial or self._failures >= FAILURES):
            self.is_on_trial = True
            self._pause(None)
            self._of.fit(self._several.name)

    @property
    def _busy(self) -> int:
        return self._of.scheduler.busy_at(self._limited) if self._several is None else self.in_flight

    def record_gauge(self, waiting: float, running: float, cache_use: float) -> None:
        """The server was asked how it is."""
        if (limit := self._adaptive) is not None:
            limit.record_gauge(waiting, running, cache_use)

    def _note(self, refused: bool) -> None:
        now = self._of.clock()
        self._recent.append((now, refused))
        while self._recent[0][0] < now - BURST_SECONDS:
            self._recent.popleft()

    def _pause(self, retry_after_seconds: float | None) -> None:
        now, retry = self._of.clock(), self._of.retry
        if now < self.paused_until:  # refusals of what was sent before the pause
            return
        backoff = min(retry.most_seconds, retry.first_seconds * 2**self._pauses)
        pause = backoff if retry_after_seconds is None else retry_after_seconds
        self._pauses += 1
        self.paused_until = now + pause
        self._recent.clear()
        self._of.bus.emit(EndpointPaused(now, self.name, pause))


class Replicas(Responder):
    """Endpoints that serve one model, of which each request asks one. Made by :class:`Endpoints`.

    A request goes to one that is expected to answer it soonest, or in little more than that time. A slow one gets its
    share while so much waits that the fast ones need longer for all of it than the slow one for one request, and none
    of the last requests. Among those, requests with the same key go to the same one, as far as that loads it by a
    quarter more than its share at most (consistent hashing with bounded loads, arXiv 1608.01350): what it keeps of
    their common prefix is of use to them.
    """

    def __init__(self, name: str, of: Endpoints) -> None:
        super().__init__(name, of)
        self.members = [Endpoint(one, of, self) for one in members_of(name)]
        self._answered_seconds = -math.inf
        self._latency = 0.0

    def choose(
        self,
        sent: TrackedRequest,
        key: str,
        is_full: Callable[[Endpoint], bool] = lambda one: False,
        exclude: Endpoint | None = None,
    ) -> Endpoint:
        """Whom to ask; the request counts there from now on.

        Args:
            key: of requests that have a prefix in common.
            is_full: whether an endpoint's requests wait for another reason than its adaptive limit.
            but: has just turned the request away.
        """
        self._of.fit(self.name)
        chosen = self._chosen(key, is_full, exclude)
        chosen.begin(sent)
        return chosen

    def _chosen(self, key: str, is_full: Callable[[Endpoint], bool], but: Endpoint | None) -> Endpoint:
        now = self._of.clock()
        is_open = [one for one in self.members if one.paused_until <= now]
        for one in is_open:
            if one.is_on_trial and not one.in_flight:
                return one
        ready = [one for one in is_open if not one.is_on_trial and not self._is_silent(one, now)]
        if not ready:
            return min(is_open or self.members, key=lambda one: (one.paused_until, one.in_flight / one.limit))
        ready = [member for member in ready if member is not but] or ready
        ready = [member for member in ready if not is_full(member)] or ready
        waiting = self._of.scheduler.waiting_at(self._of.group_of(self.name))
        assumed = min((member.latency_seconds for member in ready if member.latency_seconds is not None), default=0.0)
        latencies = {member: member.next_latency(assumed) for member in ready}
        least = min(latencies.values())
        expected = {
            member: expected_seconds(latencies[member], least, member.in_flight, member.capacity, waiting)
            for member in ready
        }
        best = min(ready, key=lambda member: expected[member])
        for member in ready:  # where the fastest is full its limit binds, whatever room a slower one has
            member.is_pressed |= member.in_flight >= member.capacity and member.latency_seconds == assumed
        if best.in_flight >= best.capacity:
            return best
        soon = [member for member in ready if expected[member] <= SLOWER * expected[best]]
        fitting = [member for member in soon if member.in_flight < member.capacity]
        asked, limits = 1 + sum(member.in_flight for member in fitting), sum(member.limit for member in fitting)
        bounded = [
            member for member in fitting if member.in_flight < math.ceil(PREFERRED * asked * member.limit / limits)
        ]
        return max(bounded or fitting, key=lambda member: member.limit / -math.log(_draw(key, member.name)))

    @property
    def has_room(self) -> bool:
        """Whether one that answers may be asked now."""
        now = self._of.clock()
        return any(one.paused_until <= now and not one.is_on_trial for one in self.members)

    @property
    def limit(self) -> int:
        """Requests in flight, over all that are not left out."""
        now = self._of.clock()
        fit = [1 if one.is_on_trial else one.capacity for one in self.members if one.paused_until <= now]
        return max(1, sum(fit))

    def note_pressure(self) -> None:
        """A request was sent: where all are full now, their limits bind."""
        now = self._of.clock()
        ready = [one for one in self.members if one.paused_until <= now and not one.is_on_trial]
        if all(one.in_flight >= one.limit for one in ready):
            for one in ready:
                one.is_pressed = True

    def heard(self, endpoint: Endpoint, latency_seconds: float) -> None:
        """One of them has answered."""
        self._answered_seconds = self._of.clock()
        self._latency += (latency_seconds - self._latency) / 8
        if endpoint.is_on_trial:
            endpoint.is_on_trial = False
            self._of.fit(self.name)

    def _is_silent(self, one: Endpoint, now: float) -> bool:
        """Whether one has requests and answers none for long, while others answer."""
        since = self._answered_seconds - one.last_answer_seconds
        return one.in_flight > 0 and since > max(SILENT_SECONDS, SILENT_LATENCIES * self._latency)


def expected_seconds(latency: float, least_latency: float, in_flight: int, places: int, waiting: int) -> float:
    """Until one of several endpoints would have answered one more request, as it is compared with the others.

    Where all places are taken, the request goes behind those in flight. Those that wait for a slot are counted, too:
    while they last, a slower endpoint helps. It has to be faster than that by far, since some requests take longer
    than others, and the last one of a batch is what its step waits for.

    Args:
        latency: that is expected of it, once the request has a place.
        least_latency: of all endpoints.
        in_flight, places: of this endpoint.
        waiting: requests that wait for a slot of any of them.

    >>> expected_seconds(1.0, 1.0, in_flight=3, places=8, waiting=0)
    1.0
    >>> expected_seconds(1.0, 1.0, in_flight=8, places=8, waiting=39), expected_seconds(4.0, 1.0, 3, 8, 39)
    (6.0, 6.0)
    """
    if in_flight >= places:
        latency *= (in_flight + 1 + waiting) / places
    elif latency > SLOWER * least_latency:
        latency *= SLOWER
    return latency


def _draw(key: str, name: str) -> float:
    """A number above 0 and below 1 that depends on both and nothing else."""
    return (1 + int.from_bytes(sha256(f"{key}\0{name}".encode("utf-8", "replace")).digest()[:6], "big")) / (2**48 + 2)


def members_of(name: str) -> list[str]:
    """The endpoints of one model that a name stands for; one where it stands for itself."""
    return name.split(REPLICA_SEPARATOR)


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
        give_up: called with the reason when an endpoint is gone; see :class:`RetryPolicy`.
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
        give_up: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.scheduler, self.bus, self.clock, self.retry = scheduler, bus, clock, retry
        self.chance: Callable[[], float] = rng.random
        """A draw from [0, 1)."""
        self.give_up = give_up
        self.outage = ""
        """Why the run was given up; empty while every endpoint may still answer."""
        self.is_hurried = False
        """Nothing is waited for any more, and every attempt counts."""
        self.retried = 0
        """Requests that were made again."""
        self._sleeping: set[anyio.CancelScope] = set()
        self._groups: dict[str, Responder] = {}
        self.limits: dict[str, AdaptiveLimit] = {}
        """Group of endpoints that share a limit -> the limit, where it adapts."""
        self.heard: set[str] = set()
        """Groups that get their signals from LM calls, so that those from whole rollouts are not needed."""
        self._several: dict[str, Replicas] = {}
        self._fitted: dict[str, int] = {}
        """Group -> the slots that it was last given."""
        self._rates: dict[str, dict[str, RateLimit]] = {}
        """Group -> account -> its limits."""
        self._endpoints: dict[str, Endpoint] = {}
        self._asked, self._group_of_stage = {stage: set(names) for stage, names in asked.items()}, groups_of(asked)
        self._group_of_name = {name: self._group_of_stage[stage] for stage, names in asked.items() for name in names}
        for group in sorted(set(self._group_of_stage.values())):
            names = [name for name, of in self._group_of_name.items() if of == group]
            several = [name for name in names if REPLICA_SEPARATOR in name]
            alone = set(names) - {*several, *_all_of(several)}
            if adaptive is not None and alone:
                self.limits[group] = self._adapting(
                    group, group, adaptive, lambda g=group: self.scheduler.take_pressure(g)
                )
            for name in several:
                self._adapts_each(name, group, adaptive)
            self.fit(group)

    @property
    def names(self) -> list[str]:
        """The endpoints that stages are known to ask, each by itself."""
        return sorted(_all_of(self._group_of_name))

    def emit_totals(self) -> None:
        """Tell what each endpoint has answered, at the end of a run."""
        for name, endpoint in self._endpoints.items():
            if endpoint.answered_requests:
                self.bus.emit(EndpointAsked(self.clock(), name, endpoint.answered_requests))

    def is_spare(self, name: str) -> bool:
        """Whether only stages that a run can do without ask an endpoint, or a group of them."""
        group_of = self._group_of_stage
        stages = {one for one, names in self._asked.items() if name in names or name == group_of.get(one, one)}
        return bool(stages) and stages <= SPARE_STAGES

    def endpoint(self, name: str) -> Endpoint:
        """The endpoint of that name, one a name."""
        if name not in self._endpoints:
            self._endpoints[name] = Endpoint(name, self)
        return self._endpoints[name]

    def replicas(self, name: str) -> Replicas:
        """The endpoints of one model, by their common name."""
        if name not in self._several:
            self._several[name] = Replicas(name, self)
            self._endpoints.update({one.name: one for one in self._several[name].members})
        return self._several[name]

    def fit(self, name: str) -> None:
        """Let a group have as many slots as the endpoints that it asks take together, and as those of one model."""
        group = self.group_of(name)
        limits = [one.limit for one in self._several.values() if self.group_of(one.name) == group]
        own = self.limits.get(group)
        limits += [] if own is None else [own.limit]
        if limits and self._fitted.get(group) != min(limits) and group in self._group_of_stage.values():
            self._fitted[group] = min(limits)
            self.scheduler.resize(min(limits), group)

    def rate_limit(self, name: str, account: str, folder: Path | None = None) -> RateLimit:
        """The limits of an account at an endpoint, one an account; see :class:`RateLimit`.

        Args:
            folder: where several runs on one account tell each other what they have sent; None for nowhere.
        """
        group = self.group_of(name)

        def shared() -> SharedTimes | None:
            ahead = time.time() - self.clock()
            return None if folder is None else SharedTimes(folder / account, lambda: self.clock() + ahead)

        rates = self._rates.setdefault(group, {})
        return rates.setdefault(account, RateLimit(self.clock, shared, lambda: self._make_room(group)))

    def _make_room(self, group: str) -> None:
        """Let as many requests come as their limits can use: what waits for long waits for a slot, in its order."""
        if group not in self._group_of_stage.values():
            return
        rates = self._rates[group].values()
        known = [one for one in rates if one.is_known]
        if len(known) < len(rates) and REPLICA_SEPARATOR in group:
            known = []  # what one of several has no room for, another takes
        self.scheduler.set_room(sum(max(0, one.ahead - one.waiting) for one in known) if known else None, group)

    def responder_of_stage(self, name: str) -> Responder:
        """Whole requests of a stage, and of those that ask the same: what is left of faults when the endpoints' own
        requests were made again."""
        group = self._group_of_stage.get(name, name)
        return self._groups.setdefault(group, Responder(group, self))

    async def sleep(self, slot: Slot | None, seconds: float, keep_slot: bool = False) -> None:
        """Wait, until :meth:`hurry` at the latest; from then on for a moment only.

        Args:
            slot: given back meanwhile, and taken again; None for none.
            keeps: it is not given back: a thread waits.
        """
        async with nullcontext() if slot is None else slot.released(keep_slot):
            with anyio.CancelScope() as scope:
                self._sleeping.add(scope)
                try:
                    await anyio.sleep(min(seconds, self.retry.first_seconds) if self.is_hurried else seconds)
                finally:
                    self._sleeping.discard(scope)

    def hurry(self) -> None:
        """The run is to end: who waits is asked for again at once."""
        self.is_hurried = True
        for scope in self._sleeping:
            scope.cancel()

    def group_of(self, name: str) -> str:
        """The group that an endpoint shares a limit with; one that no stage is known to ask has no limit."""
        return self._group_of_name.get(name, name)

    def rollout_limit(self, stage: str) -> AdaptiveLimit | None:
        """The limit of a stage whose LM calls cannot be seen (an LM of the user's own kind): it is to hear what becomes
        of whole rollouts. None where it hears of LM calls, or there is none."""
        group = self._group_of_stage.get(stage, "")
        return None if group in self.heard else self.limits.get(group)

    def _adapts_each(self, name: str, group: str, adaptive: Bounds | None) -> None:
        """Endpoints of one model have a limit each, which adapts even where the run's number of slots is given."""
        slots, names = self.scheduler.statistics().limit, members_of(name)
        bounds = adaptive or Bounds(start=math.ceil(slots / len(names)), high=slots)
        self._group_of_name.update(dict.fromkeys(names, group))
        for one in self.replicas(name).members:

            def pressed(one: Endpoint = one) -> bool:
                was, one.is_pressed = one.is_pressed, False
                return was

            self.limits[one.name] = self._adapting(one.name, group, bounds, pressed)

    def _adapting(self, name: str, group: str, bounds: Bounds, pressed: Callable[[], bool]) -> AdaptiveLimit:
        def changed(before: int, after: int, reason: str) -> None:
            self.fit(group)
            self.bus.emit(LimitChanged(self.clock(), name, before, after, reason))

        return AdaptiveLimit(bounds, self.clock, pressed, changed)


def groups_of(asked: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Stage -> the name of the group of endpoints that it asks: those with an endpoint in common are one group.

    >>> groups_of({"rollout": ["a", "b"], "propose": ["c"], "validate": ["b", "d"]})
    {'rollout': 'a + b + d', 'propose': 'c', 'validate': 'a + b + d'}
    >>> groups_of({"rollout": ["a | b"], "propose": ["b"]})["rollout"]
    'a | b + b'
    """
    united: list[frozenset[str]] = []
    for names in map(frozenset, asked.values()):
        touching = [other for other in united if _all_of(other) & _all_of(names)]
        united = [other for other in united if other not in touching] + [names.union(*touching)]
    group = {name: " + ".join(sorted(names)) for names in united for name in names}
    return {stage: group[name] for stage, names in asked.items() for name in list(names)[:1]}


def _all_of(names: Iterable[str]) -> set[str]:
    return {one for name in names for one in members_of(name)}
