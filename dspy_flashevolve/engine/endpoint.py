"""One endpoint, an address or a provider's name: when it may be asked, and the signals that its limit adapts to.

It pauses as a whole when it refuses most of what it is sent. Everything here happens on the run's loop.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from functools import partial

from dspy_flashevolve.engine.events import EndpointPaused
from dspy_flashevolve.engine.groups import EndpointGroup
from dspy_flashevolve.engine.learned_rates import Claim
from dspy_flashevolve.engine.limits import AdaptiveLimit
from dspy_flashevolve.engine.rates import RateLimit
from dspy_flashevolve.engine.retries import Responder, Retries, TrackedRequest
from dspy_flashevolve.engine.slot import Slot

BURST_SECONDS = 1.0
BURST_REFUSALS = 3
"""This many refusals within :data:`BURST_SECONDS`, if they outnumber the answers, pause the endpoint. One or two may
concern single requests; with ten, an endpoint that takes few requests at once is never paused. Round numbers: a pause
costs the first backoff, a second, and a burst that is missed costs one refusal more for each slot."""
MAX_PAUSES = 20
"""A request waits for the end of this many pauses in a row, and is then sent all the same, so that none waits for ever
at an endpoint that pauses again and again. With pauses of at most 30 seconds that is ten minutes, which is also the
longest that an LM call may take."""


class Endpoint(Responder):
    """One address. Made by :class:`~.endpoints.Endpoints`.

    Args:
        name: its address without secrets, or the provider's name.
        retries: of the run.
        group: whose slots its requests hold.
        is_optional: see :class:`Responder`.
    """

    def __init__(self, name: str, retries: Retries, group: EndpointGroup, is_optional: bool = False) -> None:
        super().__init__(name, retries, is_optional)
        self._group = group
        self.answered_requests = 0
        self._recent_refusals: deque[tuple[float, bool]] = deque()
        """Time of each answer and refusal within the last :data:`BURST_SECONDS`, and whether it was a refusal."""
        self._pauses_in_a_row = 0
        self.paused_until = 0.0
        """Time until which nothing is sent."""

    @property
    def _limit(self) -> AdaptiveLimit | None:
        return self._group.limit

    @property
    def _width(self) -> int:
        """Requests in flight that the limit is about."""
        return self._group.width

    @property
    def _width_seconds(self) -> float:
        """The width, integrated over the time so far."""
        return self._group.width_seconds

    async def admit(
        self,
        slot: Slot | None,
        rate_limit: RateLimit | None = None,
        claim: Claim | None = None,
        keep_slot: bool = False,
    ) -> None:
        """Wait for the end of a pause, and until the provider's limits a minute let a request through.

        Args:
            slot, keep_slot: see :meth:`~.retries.Retries.sleep`.
            rate_limit, claim: the limits a minute, and the request as they count it; None for one that counts against
                none.
        """
        retries = self.retries
        for _ in range(MAX_PAUSES):
            left = self.paused_until - retries.clock()
            if left <= 0 or retries.is_hurried:
                break
            jitter = retries.chance() * retries.policy.first_seconds
            await retries.sleep(slot, left + jitter, keep_slot)
        if slot is not None:
            await slot.take()
            slot.mark_arrived()
        if rate_limit is not None and claim is not None:
            # The wait for a limit is the queue of the provider, and must not count against the request's timeout.
            with nullcontext() if slot is None or not rate_limit.is_known else slot.paused(is_retry=False):
                await rate_limit.admit(claim, partial(retries.sleep, None))

    def record_sent(self, request: TrackedRequest) -> None:
        """Record that a request goes out now."""
        self.begin(request)
        self._group.mark_lm_call()
        request.record_width(self._width_seconds)

    def record_reply(self, request: TrackedRequest, tokens: int) -> None:
        """Record that a request was answered with so many completion tokens."""
        self.leave(request)
        self.answered_requests += 1
        self.record_answer(request)
        self._pauses_in_a_row = 0
        self._note(refused=False)
        latency = self.retries.clock() - request.sent_seconds
        width = (self._width_seconds - request.width_seconds) / latency if latency > 0 else None
        if (limit := self._limit) is not None:
            limit.record_answer(latency, tokens, width)

    def record_refusal(self, request: TrackedRequest, retry_after_seconds: float | None) -> None:
        """Record a 429 or a Retry-After; most others refused, too, the endpoint pauses."""
        if not self.is_isolated(request):
            self._note(refused=True)
        retry_after = self.capped_retry_after(retry_after_seconds)
        if (limit := self._limit) is not None:
            limit.record_refusal(retry_after, request.sent_seconds, self._width)
        refusals = [is_refusal for _, is_refusal in self._recent_refusals]
        if sum(refusals) >= BURST_REFUSALS and 2 * sum(refusals) > len(refusals):
            self._pause(retry_after)

    def record_timeout(self, request: TrackedRequest) -> None:
        """Record that a request was not answered in time."""
        if (limit := self._limit) is not None:
            limit.record_timeout(request.sent_seconds, self._width)

    def record_no_reply(self) -> None:
        """Record that a request failed without a refusal. Replicas alone mind."""

    def record_gauge(self, waiting: float, running: float, cache_use: float) -> None:
        """Record what the server said of itself; see :class:`~.limits.Gauge`."""
        if (limit := self._limit) is not None:
            limit.record_gauge(waiting, running, cache_use)

    def is_isolated(self, request: TrackedRequest) -> bool:
        """Whether a request fails here while this endpoint answers others."""
        return request.is_isolated

    def capped_retry_after(self, retry_after_seconds: float | None) -> float | None:
        """Return how much of a Retry-After is waited for; None where there is none."""
        return None if retry_after_seconds is None else self.retries.policy.capped_retry_after(retry_after_seconds)

    def _note(self, refused: bool) -> None:
        now = self.retries.clock()
        self._recent_refusals.append((now, refused))
        while self._recent_refusals[0][0] < now - BURST_SECONDS:
            self._recent_refusals.popleft()

    def _pause(self, retry_after_seconds: float | None) -> None:
        """Send nothing for a while: as long as the provider said, else with exponential backoff."""
        now, policy = self.retries.clock(), self.retries.policy
        if now < self.paused_until:  # refusals of what was sent before the pause
            return
        backoff = min(policy.most_seconds, policy.first_seconds * 2**self._pauses_in_a_row)
        pause_seconds = backoff if retry_after_seconds is None else retry_after_seconds
        self._pauses_in_a_row += 1
        self.paused_until = now + pause_seconds
        self._recent_refusals.clear()
        self.retries.bus.emit(EndpointPaused(now, self.name, pause_seconds))
