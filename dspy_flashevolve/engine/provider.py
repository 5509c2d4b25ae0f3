"""Who answers a run's requests, and the life of a request from its first attempt to its answer, a 429 included.

.. code-block:: text

    Attempts.begin        choose one of the provider's servers; wait for the end of its pause, and for its token bucket
    Attempts.send         it goes out
    Attempts.try_again    it got no answer: whose fault is it, is the server paused, does the provider still answer
                          anybody; wait as long as it said, else with backoff and jitter; False where it is given up
    Attempts.answered     it was answered: the server's limit may grow

Two loops make attempts: ``Pace.call`` and ``Pace.acall`` (programs/lm.py) for each call of a ``dspy.LM``, and
``Requests._answer_in_slot`` (requests.py) for a whole request, whose LMs may be of the user's own kind.

A request that fails while most others are answered is at fault itself: its attempts count, and after the last one it is
given up alone. Where most others fail too, the provider is in trouble: attempts do not count, and the run ends when the
provider has answered nothing for :attr:`RetryPolicy.outage_seconds` (docs/guide/resume-stop-faults.md).

A server has a circuit breaker, and a limit on its requests in flight that adapts (``limits.py``); an account at it has
token buckets (``rates.py``). Requests of one stage may ask several servers within one slot, and several stages one
server: these share one queue in the scheduler, which has as many slots as its most limited part takes. Everything here
happens on the run's loop.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import anyio

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.events import EndpointPaused, EventBus, LimitChanged, RequestTurnedAway
from dspy_flashevolve.engine.limits import AdaptiveLimit, Bounds
from dspy_flashevolve.engine.loop import EARLY_SECONDS
from dspy_flashevolve.engine.rates import RateLimit
from dspy_flashevolve.engine.scheduler import Scheduler, Slot
from dspy_flashevolve.engine.texts import logger_named

logger = logger_named(__name__)

OUTAGE_SECONDS = 60.0
"""Default for how long a run waits for a provider that answers nothing. A limit a minute is over after that time, and
an unattended run should not hang for hours on a dead server; ``max_outage_seconds`` is the user's own choice."""
COMPARED = 32
"""Number of other requests whose last outcome is compared with that of a failing one. A majority of 32 is wrong about a
provider that fails a third of its requests once in 27 times (binomial); 16 once in 8 times, and 64 notices an outage
only after twice as many failures."""
PATIENT_SECONDS = 60.0
"""A rate limit, a timeout or a lost connection says "later" and nothing about the request: it counts as an attempt only
from this long after the request's first failure. Providers count their limits by the minute; with less than a minute,
requests that a limit turned away are given up before it is over."""
ISOLATED_BACKOFF_SECONDS = 2.0
"""Longest backoff of a request that fails while others are answered. Backoff spares a provider in trouble, and this one
is not: a longer wait only delays the step. Not tuned."""
SILENT_FAILURES = 5
"""A provider is called silent in the log after this many failures without an answer in between: where a fifth of the
requests is refused at random, so many follow each other once in 3,000."""
SILENT_SECONDS = 10.0
"""With requests under way it is called so only after this time: one that is sent more than it takes at once turns some
away while it works on the others. Not tuned."""
WARNING_SECONDS = 60.0
"""Shortest time between two warnings about one provider, so that an outage does not flood the log."""
REASON_CHARACTERS = 300
"""Characters of a provider's error that are kept: enough for its message, not for a page of HTML."""
REFUSALS_IN_A_ROW = 5
"""Refusals are the rule where so many requests that were sent one after another are refused. Where a fifth of the
requests is refused at random that is so once in 4,000 requests, with four once in 800; with six a server that is full
is asked once more in vain."""
ENOUGH_ANSWERS = 16
"""A pause is twice as long as the last one unless so many requests were answered in between, so that at most about a
quarter of the requests is refused by a provider that takes so many a minute and does not say how many. Not tuned."""
LONGEST_PAUSE_SECONDS = 8.0
"""A pause that no Retry-After names: with 30 seconds half of a minute's limit may be over before it is asked again,
with 4 seconds twice as many requests are refused where a bucket is refilled with two a second."""
MAX_PAUSES = 20
"""A request waits for the end of this many pauses in a row, and is then sent all the same, so that none waits for ever
at a server that pauses again and again. Not tuned."""
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
"""Stands between the names of servers in the name of the provider that has one model on all of them."""
OPTIONAL_STAGES = {"integrate"}
"""A run goes on without them: where no other stage asks the same provider, its silence ends no run."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with full jitter.

    Args:
        attempts: requests in all, at least 1, of those that count: see :meth:`Attempts.try_again`.
        first_seconds, most_seconds: upper bounds of the first wait and, but for a longer Retry-After, of every wait.
        outage_seconds: the run ends when a provider has answered nothing for this long and turned away everything
            that it was sent; no Retry-After is waited for longer. None waits as long as it takes.

    Raises:
        ConfigurationError: attempts is less than 1.
    """

    attempts: int = 6
    first_seconds: float = 1.0
    most_seconds: float = 30.0
    outage_seconds: float | None = OUTAGE_SECONDS

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigurationError(f"retries: attempts is {self.attempts}, expected at least 1.")

    def wait_seconds(self, attempt: int, retry_after_seconds: float | None, chance: float) -> float:
        """Return how long to wait after failed attempt number ``attempt`` (from 0); ``chance``, a draw from [0, 1),
        spreads out requests that failed together.

        >>> RetryPolicy().wait_seconds(2, None, chance=0.5)
        2.0
        >>> RetryPolicy().wait_seconds(0, 10.0, chance=0.5), RetryPolicy().wait_seconds(0, 3600.0, chance=0.5)
        (10.5, 60.5)
        """
        if retry_after_seconds is not None:
            return self.capped(retry_after_seconds) + self.first_seconds * chance
        return self.backoff_seconds(attempt) * chance

    def backoff_seconds(self, attempt: int) -> float:
        """Return the upper bound of the wait after failed attempt number ``attempt`` (from 0)."""
        exponent = min(attempt, 32)  # 2**1024 is no float, and the minimum makes 32 as good as any
        return min(self.most_seconds, self.first_seconds * 2**exponent)

    def capped(self, retry_after_seconds: float) -> float:
        """Return how much of a Retry-After is waited for."""
        return retry_after_seconds if self.outage_seconds is None else min(retry_after_seconds, self.outage_seconds)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt got no answer, as far as another one makes sense.

    Args:
        reason: in the provider's words.
        is_of_request: the fault may well be this request's alone: an error inside the server, an empty reply.
        retry_after_seconds: when the provider wants to be asked again; None where it did not say.
        overload: "refused" or "timed out" where it says that the server has too much to do; else empty.
    """

    reason: str
    is_of_request: bool = False
    retry_after_seconds: float | None = None
    overload: str = ""


class CircuitBreaker:
    """Says when a server turns away most of what it is sent, and for how long it is left alone then.

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

    def record_sent(self) -> int:
        """Return the number of a request that is sent."""
        self._sent += 1
        return self._sent

    def record_answer(self) -> None:
        """Record an answer, which closes it."""
        self._answers += 1

    def record_refusal(self, number: int, sent_seconds: float, retry_after_seconds: float | None) -> bool:
        """Record that a request was refused; return whether it opens now, for as long as the provider said, or longer
        where that was too short the last time."""
        if sent_seconds <= self._opened:  # it was sent before the last pause
            return False
        self._refused.append(number)
        are_in_a_row = max(self._refused) - min(self._refused) < REFUSALS_IN_A_ROW <= len(self._refused)
        if not are_in_a_row and not (self._tries_one and self.is_half_open):
            return False
        self._opened = self._clock()
        self._openings = 1 if self._answers >= ENOUGH_ANSWERS else self._openings + 1
        self._answers = 0
        backoff = min(LONGEST_PAUSE_SECONDS, self._policy.backoff_seconds(self._openings - 1))
        if retry_after_seconds is not None:
            backoff = retry_after_seconds if self._openings == 1 else max(backoff, retry_after_seconds)
        self.open_until = self._opened + backoff
        self._refused.clear()
        return True


class Queue:
    """Servers that share the slots of one queue in the scheduler: as many as their most limited part takes.

    Args:
        name: of the servers, joined by " + "; the scheduler knows the queue by it.
        bounds: of the adaptive limit that the servers share; None where the run's number of slots is the only limit.
        is_scheduled: a stage asks it; else only the user's own code asks it, without a slot that is known to be for it.
    """

    def __init__(self, name: str, providers: Providers, bounds: Bounds | None, is_scheduled: bool = True) -> None:
        self.name, self.is_scheduled, self.scheduler = name, is_scheduled, providers.scheduler
        self._providers = providers
        self.servers: list[Server] = []
        self.models: list[Provider] = []
        """Providers whose servers have limits of their own."""
        self.sees_lm_calls = False
        """An LM call was paced here, so that limits need no signals from whole rollouts."""
        self._slots: int | None = None
        self.limit = None if bounds is None else self.adapt(name, bounds, partial(self.scheduler.take_pressure, name))

    def adapt(self, name: str, bounds: Bounds, take_pressure: Callable[[], bool]) -> AdaptiveLimit:
        """Make an adaptive limit, whose changes change the queue's slots and are told to the observers."""
        run = self._providers

        def on_change(before: int, after: int, reason: str) -> None:
            self.update_slots()
            run.bus.emit(LimitChanged(run.clock(), name, before, after, reason))

        return AdaptiveLimit(bounds, run.clock, take_pressure, on_change)

    def update_slots(self) -> None:
        """Give the queue as many slots as its most limited part takes."""
        limits = [max(1, sum(server.slots for server in model.servers)) for model in self.models]
        limits += [] if self.limit is None else [self.limit.limit]
        if limits and self._slots != min(limits) and self.is_scheduled:
            self._slots = min(limits)
            self.scheduler.resize(self._slots, self.name)


class Server:
    """One address, or what stands for all that a stage asks: its circuit breaker, its limit and its latency.

    Args:
        bounds: of a limit of its own; None for that of its queue.
        is_one_of_several: others have the same model, so that it is left out while it fails.
    """

    def __init__(self, name: str, providers: Providers, queue: Queue, bounds: Bounds | None, is_one_of_several: bool):
        self.name, self.queue, self._providers, self.is_one_of_several = name, queue, providers, is_one_of_several
        self.breaker = CircuitBreaker(providers.policy, providers.clock, tries_one=is_one_of_several)
        self._was_full = False
        own = None if bounds is None or not is_one_of_several else queue.adapt(name, bounds, self._take_pressure)
        self.limit = queue.limit if own is None else own
        """The adaptive limit that its requests count against; None where none adapts."""
        self.under_way: set[Attempts] = set()
        """Requests that it works on now, or is about to get."""
        self._answered_seconds, self._measured = -math.inf, 0
        self.latency_seconds: float | None = None
        """Mean latency of its last answers; None before the first."""

    @property
    def slots(self) -> int:
        """Requests that it may have in flight: none in a pause, and one after it until it has answered."""
        if self.breaker.open_until > self._providers.clock():
            return 0
        if self.breaker.is_half_open:
            return 1
        return self.queue.scheduler.limit if self.limit is None else self.limit.limit

    @property
    def has_room(self) -> bool:
        """Whether it may be asked now."""
        return self.slots > len(self.under_way)

    @property
    def is_forgotten(self) -> bool:
        """Whether its latency was measured so long ago that it has to be asked again."""
        return not self.under_way and self._providers.clock() > self._answered_seconds + FORGET_SECONDS

    def expected_latency(self, mean_seconds: float) -> float:
        """Return the seconds that one more request is expected to take: as the last ones (the mean of all servers
        before the first), or as long as it has answered nothing of what it has; none where it is forgotten."""
        if self.is_forgotten:
            return 0.0
        now = self._providers.clock()
        oldest = min((request.sent_seconds for request in self.under_way), default=now)
        silent_seconds = now - max(oldest, self._answered_seconds)
        return max(mean_seconds if self.latency_seconds is None else self.latency_seconds, silent_seconds)

    def begin(self, request: Attempts) -> None:
        """Count a request as under way here; it goes out now, or soon."""
        self._measured = 0 if self.is_forgotten else self._measured
        if request not in self.under_way:
            request.number = self.breaker.record_sent()
            self.under_way.add(request)
        request.sent_seconds = self._providers.clock()
        self._was_full = self._was_full or not self.has_room

    def record_answer(self, request: Attempts) -> None:
        """Record that a request was answered."""
        self.under_way.discard(request)
        self.breaker.record_answer()
        if self.limit is not None:
            self.limit.record_answer()
        self._answered_seconds = self._providers.clock()
        latency = self._answered_seconds - request.sent_seconds
        before = latency if self.latency_seconds is None else self.latency_seconds
        self._measured = min(LATENCY_ANSWERS, self._measured + 1)
        self.latency_seconds = before + (latency - before) / self._measured
        self.queue.update_slots()  # it is half open no more

    def record_failure(self, request: Attempts, overload: str, retry_after_seconds: float | None) -> None:
        """Record that a request got no answer. Where refusals and timeouts (and of one of several servers, failures)
        are the rule, it pauses; at an ``overload`` its limit shrinks then."""
        if not overload and not self.is_one_of_several:
            return
        if request.counted_failures:
            retry_after_seconds = None  # it is waited for already, in vain
        elif retry_after_seconds is not None:
            retry_after_seconds = self._providers.policy.capped(retry_after_seconds)
        # Where nothing was answered since the last cut, fewer requests at once would be refused as well.
        was_half_open = self.breaker.is_half_open
        if not self.breaker.record_refusal(request.number, request.sent_seconds, retry_after_seconds):
            return
        now = self._providers.clock()
        self._providers.bus.emit(EndpointPaused(now, self.name, self.breaker.open_until - now))
        self.queue.update_slots()
        if overload and self.limit is not None and not was_half_open:
            # What was sent with this request or later may be refused, too.
            servers = {server for server in self.queue.servers if server.limit is self.limit} | {self}
            under_way = [other for server in servers for other in server.under_way]
            self.limit.cut(sum(other.sent_seconds < request.sent_seconds for other in under_way), overload)

    def _take_pressure(self) -> bool:
        was_full, self._was_full = self._was_full, False
        return was_full


class Provider:
    """Who is asked: one server, or several that have one model, of which each request asks one.

    It compares the outcomes of its requests, to tell a faulty request from a provider in trouble. Where the run can do
    without it (``is_optional``) its silence ends nothing.
    """

    def __init__(self, name: str, providers: Providers, servers: list[Server], is_optional: bool) -> None:
        self.name, self.providers, self.servers, self._is_optional = name, providers, servers, is_optional
        self.sent: set[Attempts] = set()
        """Requests that were sent, and have not ended; those that wait to be sent are no sign of life."""
        self.isolated: set[Attempts] = set()
        """Requests that wait although others are answered. They are given up soon; those that wait with them may go on,
        so no outage is declared before."""
        self._outcomes: dict[Attempts, tuple[int, bool]] = {}
        """Request -> its place in the order of ends, and whether it was answered; the latest stand last. The order and
        not the clock, since in virtual time many requests end at one moment."""
        self._ended = 0
        self._silent_since: float | None = None
        self._failures_in_silence = 0
        self._warned_seconds = -math.inf

    def choose(self, request: Attempts) -> Server:
        """Decide which server a request asks, and count it as under way there.

        The least loaded of those that are about as fast as the fastest is asked, by its latency times its requests
        (Finagle's Peak EWMA), but not the one that has just turned the request away; a slower one where the fast ones
        have as many as their limits allow, in flight or a minute.
        """
        if len(self.servers) == 1:
            return self.servers[0]
        self.servers[0].queue.update_slots()  # the end of a pause has no event of its own
        ready = [server for server in self.servers if server.has_room]
        refuser = request.server if request.failures else None
        ready = [server for server in ready if server is not refuser] or ready
        measured = [server.latency_seconds for server in ready if server.latency_seconds is not None]
        mean = sum(measured) / max(1, len(measured))
        latencies = {server: server.expected_latency(mean) + request.rate_wait_seconds(server) for server in ready}
        fastest = min(latencies.values(), default=0.0)
        alike = [server for server in ready if latencies[server] <= SLOWER * fastest]
        if alike:
            chosen = min(
                alike, key=lambda server: (latencies[server] * (len(server.under_way) + 1), len(server.under_way))
            )
        else:
            chosen = min(self.servers, key=lambda server: (server.breaker.open_until, len(server.under_way)))
        chosen.begin(request)
        return chosen

    def record_answer(self, request: Attempts) -> None:
        """Record that a request was answered."""
        self._record_outcome(request, answered=True)
        self._silent_since, self._failures_in_silence = None, 0

    def record_failure(self, request: Attempts, failure: Failure) -> None:
        """Record that a request got no answer, and decide whether that counts as one of its attempts. It does

        - where the fault may well be the request's alone, unless most others fail, too: those that ended since its
        first failure, or those before where none did;
        - else (a rate limit, say) where most others are answered, and it was not for :data:`PATIENT_SECONDS`;
        - where nothing is waited for any more, or the run can do without the answer.
        """
        now = self.providers.clock()
        if not request.failures:
            request.first_failure_index, request.first_failure_seconds = self._ended, now
        request.failures += 1
        request.reason = failure.reason[:REASON_CHARACTERS]
        others = [outcome for other, outcome in self._outcomes.items() if other is not request]
        since = [answered for index, answered in others if index >= request.first_failure_index]
        compared = [answered for _, answered in others] if failure.is_of_request and not since else since
        answers, failures = compared.count(True), compared.count(False)
        request.is_isolated = answers > failures
        if failure.is_of_request:
            is_own_fault = answers >= failures
        else:
            is_own_fault = request.is_isolated and now >= request.first_failure_seconds + PATIENT_SECONDS
        request.counted_failures += is_own_fault or self.providers.is_hurried or self._is_optional
        self._record_outcome(request, answered=False)
        if not request.is_isolated or not since:  # answers to others since then say more about the provider
            self._silent_since = now if self._silent_since is None else self._silent_since
            self._failures_in_silence += 1
        if not request.is_isolated:
            self._report_silence(now, request)

    def seconds_to_outage(self) -> float:
        """Return the seconds after which it is given up, if it answers nothing; infinite while it answers."""
        outage_seconds = self.providers.policy.outage_seconds
        if self._silent_since is None or outage_seconds is None:
            return math.inf
        return self._silent_since + outage_seconds - self.providers.clock()

    def _record_outcome(self, request: Attempts, answered: bool) -> None:
        self._outcomes.pop(request, None)  # so that it moves to the end of the dict
        self._outcomes[request] = self._ended, answered
        if len(self._outcomes) > COMPARED:
            del self._outcomes[next(iter(self._outcomes))]
        self._ended += 1

    def _report_silence(self, now: float, request: Attempts) -> None:
        """Log that nobody is answered; after :attr:`RetryPolicy.outage_seconds` of that, end the run."""
        assert self._silent_since is not None
        if self.providers.outage:
            return
        silent_seconds, failures = now - self._silent_since, self._failures_in_silence
        outage_seconds = self.providers.policy.outage_seconds
        limit = math.inf if outage_seconds is None else outage_seconds
        # Where a single request hung for all that time, and nothing else was asked, one more request decides.
        is_certain = now - request.sent_seconds <= limit or failures > 2
        is_over = silent_seconds >= limit - EARLY_SECONDS and not (self.sent or self.isolated)
        if is_over and is_certain and not self._is_optional:
            self.providers.give_up(
                f"{self.name} has answered nothing for {silent_seconds:.0f} seconds, and turned away all that it was "
                f"sent; the last: {request.reason}"
            )
        elif (
            failures >= SILENT_FAILURES
            and (not self.sent or silent_seconds >= SILENT_SECONDS)
            and now >= self._warned_seconds + WARNING_SECONDS
        ):
            self._warned_seconds = now
            until = "until it answers" if limit == math.inf else f"for up to {limit:g} seconds"
            logger.warning("%s does not answer (%s): it is asked again, %s.", self.name, request.reason, until)


@dataclass(eq=False)
class Attempts:
    """One request over all of its attempts.

    Args:
        provider: who is asked.
        slot: the slot in which it is made, which it gives back while it waits, unless a thread waits with it
            (``keeps_slot``); None for none.
        rates: server -> the limits a minute that it counts against there.
        stage: whose requests cost about as many tokens.
        is_whole: a whole request, of whose LM calls the server may hear by themselves.
        most: attempts that may count, as :meth:`Provider.record_failure` counts them.
    """

    provider: Provider
    slot: Slot | None = None
    keeps_slot: bool = False
    rates: Mapping[str, RateLimit] = field(default_factory=dict[str, RateLimit])
    stage: str = ""
    is_whole: bool = False
    most: int | None = None
    sent_seconds: float = field(default=0.0, init=False)
    number: int = field(default=0, init=False)
    """Of its last attempt: when it was sent, and its place in the order in which its server was sent requests."""
    failures: int = field(default=0, init=False)
    counted_failures: int = field(default=0, init=False)
    """Attempts without an answer; those that count."""
    first_failure_index: int = field(default=0, init=False)
    first_failure_seconds: float = field(default=0.0, init=False)
    """How many requests had ended at its provider before its first failure, and when that was."""
    is_isolated: bool = field(default=False, init=False)
    """It failed last while most others were answered, so that the fault is its own."""
    reason: str = field(default="", init=False)
    """Why it failed last."""
    expected_tokens: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.server = self.provider.servers[0]

    @property
    def rate(self) -> RateLimit | None:
        """The limits a minute at its server; None for none."""
        return self.rates.get(self.server.name)

    def rate_wait_seconds(self, server: Server) -> float:
        """Return how long it would wait for the limits a minute at a server."""
        return rate.wait_seconds if (rate := self.rates.get(server.name)) is not None else 0.0

    def may_go_at_once(self, now: float) -> bool:
        """Whether :meth:`begin` has nothing to choose or to wait for; a thread may ask."""
        is_free = self.server.breaker.open_until <= now and not (self.rate is not None and self.rate.is_known)
        return len(self.provider.servers) == 1 and is_free

    async def begin(self) -> None:
        """Choose a server, and wait for the end of its pause, and until the limits a minute let the request through."""
        run = self.provider.providers
        self.server = self.provider.choose(self)
        for pauses in range(MAX_PAUSES):
            seconds, spread = self.server.breaker.open_until - run.clock(), run.policy.first_seconds
            # Requests that have waited together go one by one, so that the first of them may open the breaker again.
            if run.is_hurried or seconds <= (0.0 if pauses else -spread):
                break
            slot = self.slot if seconds > 0 else None
            await run.sleep(slot, max(0.0, seconds) + run.chance() * spread, self.keeps_slot, is_retry=False)
        if self.slot is not None:
            await self.slot.take()
        if self.rate is not None:
            self.expected_tokens = self.rate.expected_tokens(self.stage)
            # The wait for a limit is the queue of the provider, and must not count against the request's timeout.
            with nullcontext() if self.slot is None or not self.rate.is_known else self.slot.paused(is_retry=False):
                await self.rate.admit(self.expected_tokens, partial(run.sleep, None))

    def send(self) -> None:
        """Record that it goes out now."""
        self.server.begin(self)
        self.provider.sent.add(self)
        self.server.queue.sees_lm_calls = self.server.queue.sees_lm_calls or not self.is_whole

    def leave(self) -> None:
        """Record that it is under way no more, whatever became of it."""
        self.server.under_way.discard(self)
        self.provider.sent.discard(self)

    def answered(self, tokens: int = 0) -> None:
        """Record that it was answered, and what that cost in tokens."""
        self.leave()
        self.provider.record_answer(self)
        if not (self.is_whole and self.server.queue.sees_lm_calls):
            self.server.record_answer(self)
        if self.rate is not None and tokens:
            self.rate.record_cost(self.stage, tokens, self.expected_tokens)

    async def try_again(self, failure: Failure) -> bool:
        """Record that its attempt got no answer, and wait for the next one; False where there is none.

        An own attempt counts as :meth:`Provider.record_failure` says. It waits as long as the provider asked
        for, else with exponential backoff; where another server is ready it does not wait.
        """
        self.leave()
        provider, run = self.provider, self.provider.providers
        provider.record_failure(self, failure)
        retry_after_seconds = failure.retry_after_seconds
        if failure.overload == "refused" and self.rate is not None:
            self.rate.record_refusal(retry_after_seconds)
        if not (self.is_whole and self.server.queue.sees_lm_calls):
            self.server.record_failure(self, failure.overload, retry_after_seconds)
        if run.outage or self.counted_failures >= (run.policy.attempts if self.most is None else self.most):
            return False
        if len(provider.servers) > 1 and any(server.has_room for server in provider.servers):
            return True
        run.retried += 1
        run.bus.emit(RequestTurnedAway(run.clock(), provider.name, self.reason))
        if self.counted_failures and retry_after_seconds != run.policy.capped(retry_after_seconds or 0.0):
            retry_after_seconds = None  # the longest wait is over already, and brought nothing
        seconds = run.policy.wait_seconds(self.failures - 1, retry_after_seconds, run.chance())
        if self.is_isolated and retry_after_seconds is None:
            seconds = min(seconds, ISOLATED_BACKOFF_SECONDS)
        if (to_outage := provider.seconds_to_outage()) > 0:
            seconds = min(seconds, to_outage)  # one last attempt decides whether this is an outage
        if self.is_isolated:
            provider.isolated.add(self)
        try:
            await run.sleep(self.slot, seconds, self.keeps_slot)
        finally:
            provider.isolated.discard(self)
        return True


class Providers:
    """All providers of a run, and what ends all of their waits at once.

    Args:
        asked: stage -> the names of the providers that its requests ask.
        adaptive: how the servers' limits adapt; None for no limit but that of the run.
        on_outage: called once, with the reason, when a provider is given up and the run has to end.
    """

    def __init__(
        self,
        asked: Mapping[str, Iterable[str]],
        adaptive: Bounds | None,
        scheduler: Scheduler,
        bus: EventBus,
        clock: Callable[[], float],
        policy: RetryPolicy,
        rng: random.Random,
        on_outage: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.scheduler, self.bus, self.clock, self.policy = scheduler, bus, clock, policy
        self.chance: Callable[[], float] = rng.random
        """A draw from [0, 1)."""
        self._on_outage = on_outage
        self.outage = ""
        """Why the run ends: the provider that was given up. Empty while every provider may still answer."""
        self.is_hurried = False
        """The run is about to end: waits are cut short, and every failure counts as an attempt."""
        self.retried = 0
        """Requests that were made again."""
        self._sleeping: set[anyio.CancelScope] = set()
        self._asked = {stage: set(names) for stage, names in asked.items()}
        self._queue_names = queues_of(self._asked)
        self._queues: dict[str, Queue] = {}
        """Server -> its queue."""
        self._servers: dict[str, Server] = {}
        self._providers: dict[str, Provider] = {}
        self._stages: dict[str, Provider] = {}
        self._rates: dict[Hashable, RateLimit] = {}
        for queue_name in sorted(set(self._queue_names.values())):
            stages = [stage for stage, name in self._queue_names.items() if name == queue_name]
            names = {name for stage in stages for name in self._asked[stage]}
            models = {name for name in names if SERVER_SEPARATOR in name}
            bounds = adaptive if names - models - each_by_itself(models) else None
            queue = Queue(queue_name, self, bounds)
            self._queues.update(dict.fromkeys(each_by_itself(names), queue))
            for name in sorted(models):  # their servers have limits of their own, also where they are asked alone
                model = self.provider(name, adaptive)
                queue.models += [] if adaptive is None else [model]
            queue.update_slots()

    def provider(self, name: str, bounds: Bounds | None = None, as_one: bool = False) -> Provider:
        """Return the provider of that name, one object a name; the name of several servers has each of them, unless
        somebody else chooses between them (``as_one``)."""
        if name not in self._providers:
            members = [name] if as_one else members_of(name)
            servers = [self._server(member, bounds, len(members) > 1) for member in members]
            self._providers[name] = Provider(name, self, servers, self._is_optional(name))
        return self._providers[name]

    def of_stage(self, stage: str) -> Provider:
        """Return the provider of a stage's whole requests, the same for all stages of a queue. Its requests fail when
        those of their LMs were made again in vain, so that outcomes are compared apart from those of LM calls."""
        name = self._queue_names.get(stage, stage)
        if name not in self._stages:
            asked = min(each_by_itself(self._asked.get(stage) or {stage}))
            server = Server(name, self, self._queue(asked), None, is_one_of_several=False)
            self._stages[name] = Provider(name, self, [server], self._is_optional(name))
        return self._stages[name]

    def rate_limit(self, account: Hashable) -> RateLimit:
        """Return the limits a minute of an account at a server, one object an account."""
        return self._rates.setdefault(account, RateLimit(self.clock))

    async def sleep(self, slot: Slot | None, seconds: float, keep_slot: bool = False, is_retry: bool = True) -> None:
        """Wait without the slot (unless a thread waits: ``keep_slot``), at most until :meth:`hurry`; once the run is
        hurried, for a moment only."""
        async with nullcontext() if slot is None else slot.released(keep_slot, is_retry):
            with anyio.CancelScope() as scope:
                self._sleeping.add(scope)
                try:
                    await anyio.sleep(min(seconds, self.policy.first_seconds) if self.is_hurried else seconds)
                finally:
                    self._sleeping.discard(scope)

    def hurry(self) -> None:
        """Cut all waits short, now and from now on, since the run is to end."""
        self.is_hurried = True
        for scope in self._sleeping:
            scope.cancel()

    def give_up(self, outage: str) -> None:
        """End the run, since a provider does not answer."""
        self.outage = outage
        self._on_outage(outage)

    def _server(self, name: str, bounds: Bounds | None, is_one_of_several: bool) -> Server:
        if name not in self._servers:
            queue = self._queue(members_of(name)[0])
            self._servers[name] = Server(name, self, queue, bounds, is_one_of_several)
            queue.servers.append(self._servers[name])
        return self._servers[name]

    def _queue(self, server: str) -> Queue:
        if server not in self._queues:
            self._queues[server] = Queue(server, self, None, is_scheduled=False)
        return self._queues[server]

    def _is_optional(self, name: str) -> bool:
        """Whether only stages that a run can do without ask a provider, or a queue of them."""
        stages = {
            stage
            for stage, names in self._asked.items()
            if name in names or name == self._queue_names.get(stage, stage)
        }
        return bool(stages) and stages <= OPTIONAL_STAGES


def queues_of(asked: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return stage -> the name of the queue of its requests: stages that ask a server in common share one.

    >>> queues_of({"rollout": ["a", "b"], "propose": ["c"], "validate": ["b", "d"]})
    {'rollout': 'a + b + d', 'propose': 'c', 'validate': 'a + b + d'}
    >>> queues_of({"rollout": ["a | b"], "propose": ["b"]})["rollout"]
    'a | b + b'
    """
    united: list[frozenset[str]] = []
    for names in map(frozenset, asked.values()):
        touching = [other for other in united if each_by_itself(other) & each_by_itself(names)]
        united = [other for other in united if other not in touching] + [names.union(*touching)]
    queue = {name: " + ".join(sorted(names)) for names in united for name in names}
    return {stage: queue[name] for stage, names in asked.items() for name in list(names)[:1]}


def members_of(name: str) -> list[str]:
    """Return the names of the servers that a provider's name stands for."""
    return name.split(SERVER_SEPARATOR)


def each_by_itself(names: Iterable[str]) -> set[str]:
    """Return the names of single servers among, or in, some names."""
    return {member for name in names for member in members_of(name)}
