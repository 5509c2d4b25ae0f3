"""How a run makes the calls of its LMs: each request paced, asked again where need be, and counted.

``dspy.LM`` retries transient errors by itself, inside the slot, and tells nobody of a 429. For the length of a run the
user's LM is of a subclass (:mod:`.paced_lm`) that has these retries off where the run asks: a request that the provider
turns away gives its slot back, waits as long as the provider said (else exponential backoff with full jitter), and is
made again, up to the LM's own ``num_retries`` and the run's. The secrets that the LM holds are taken out of what it
answers and raises inside of a run. What is no ``dspy.LM`` is not paced: it is called as it is, and what it raises is
retried a rollout at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import anyio
import dspy
from dspy.primitives.module import Module
from dspy.utils.exceptions import LMTimeoutError
from dspy.utils.usage_tracker import UsageTracker, track_usage

from dspy_flashevolve.engine.endpoints import Endpoint, Endpoints
from dspy_flashevolve.engine.loop import LoopPortal
from dspy_flashevolve.engine.rates import RateLimit, limits_in_headers
from dspy_flashevolve.engine.redaction import Redaction, secrets_held_by
from dspy_flashevolve.engine.retries import Responder, TrackedRequest
from dspy_flashevolve.engine.scheduler import Slot, current_slot
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.programs.faults import (
    HollowReplyError,
    chain_of,
    headers_of_error,
    is_of_request,
    is_refusal,
    is_timeout,
    mark_asked,
    may_repeat,
    retry_after_of,
)
from dspy_flashevolve.programs.paced_lm import PACED_BY, begin_pacing, end_pacing
from dspy_flashevolve.programs.replies import ReplyInspection, inspecting_replies
from dspy_flashevolve.programs.servers import BalancedLM, account_of, arguments_for, endpoint_of, limits_in_options
from dspy_flashevolve.programs.usage import CountLate, completion_tokens_of, slot_here, tokens_of

logger = logger_named(__name__)

T = TypeVar("T")
REQUEST_SECONDS = 600.0
"""The longest that a request may take in all where its LM has no ``timeout``: the default of openai's client."""
LATE_SECONDS = 0.5
"""How much later than the LM's own timeout a request in a thread is given up: that one, where the LM sees it, leaves no
thread behind. A round number: far above a busy loop's delay, far below any timeout."""
CACHED_SECONDS = 0.01
"""An answer that took less and reports no tokens came from a cache, and says nothing of the endpoint: no server answers
with a model in 10 ms, and dspy's cache in memory takes a tenth of one."""


class LanguageModels:
    """Calls the LMs of one run.

    Args:
        endpoints: of the run; get the signals.
        redaction: is told the LMs' secrets, and takes them out of what the LMs answer and raise.
        once: each request is made once: whoever asked for the rollout asks again.
        count: takes what calls have used that were made in threads which know no run, of LMs that this run paces; None
            to count nothing of them.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        redaction: Redaction | None = None,
        once: bool = False,
        count: CountLate | None = None,
    ) -> None:
        self.endpoints, self.redaction = endpoints, redaction or Redaction()
        self.once, self.count = once, count
        self.portal: LoopPortal | None = None
        self._paced: dict[int, tuple[Any, Pace]] = {}
        self._warned_of_blocking = False

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of dspy's inside of which the run's requests are made."""
        return {PACED_BY: self}

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say on which loop the run lives; before it, and after :meth:`close`, a paced LM is as the LM itself."""
        self.portal = LoopPortal(loop)
        for lm, _ in list(self._paced.values()):
            begin_pacing(lm, self)

    def close(self) -> None:
        """End the run's pacing: threads that wait to call an LM again get an error."""
        if self.portal is not None:
            self.portal.close()
            for lm, _ in list(self._paced.values()):
                end_pacing(lm, self)
        self.portal = None

    def __deepcopy__(self, memo: dict[int, Any]) -> LanguageModels:
        return self

    def pace(self, lm: Any) -> Any:
        """Let the run make the calls of a ``dspy.LM`` from now on; anything else stays as it is. Gives ``lm`` back."""
        if isinstance(lm, dspy.LM) and id(lm) not in self._paced:
            entry = lm, Pace(self, lm)
            if self._paced.setdefault(id(lm), entry) is entry:  # threads may come at once
                self.redaction.add(secrets_held_by(lm))
                if self.portal is not None:
                    begin_pacing(lm, self)
        return lm

    def pace_of(self, lm: Any) -> Pace:
        """Return what makes an LM's calls; one that a program made itself, as a copy of another, is called alike."""
        _, pace = self._paced.get(id(lm)) or (lm, Pace(self, lm))
        return pace

    def warn_of_blocking(self) -> None:
        """Say, once, that something on the loop calls an LM without awaiting it."""
        if not self._warned_of_blocking:
            self._warned_of_blocking = True
            callers: list[Any] = dspy.settings.caller_modules or []
            name = f"{type(callers[0]).__name__}.aforward" if callers else "A coroutine metric"
            logger.warning(
                "%s blocks the event loop: it calls an LM without awaiting it, and everything else waits for that. "
                "Await predictor.acall(...), or leave aforward out: then rollouts run in threads.", name,
            )  # fmt: skip

    def pace_in(self, program: Module) -> Module:
        """Pace the predictors' own LMs; gives ``program`` back."""
        for predictor in program.predictors():
            self.pace(getattr(predictor, "lm", None))
        return program


class _Target(NamedTuple):
    """Where an LM's requests may go.

    Args:
        endpoint: is asked.
        rate: its limits a minute.
        arguments: of the LM call, by which it is asked.
    """

    endpoint: Endpoint
    rate: RateLimit
    arguments: dict[str, Any]


class Pace:
    """Makes the requests of one LM.

    Args:
        models: of the run.
        original: the LM.
    """

    def __init__(self, models: LanguageModels, original: Any) -> None:
        self.models, self.original = models, original
        of, name = models.endpoints, endpoint_of(original)
        self.servers = of.servers(name) if isinstance(original, BalancedLM) else None
        self.responder: Responder = self.servers or of.endpoint(name)
        options: dict[str, Any] = getattr(original, "kwargs", None) or {}
        deployments = original.deployments if isinstance(original, BalancedLM) else [{}]
        endpoints = self.servers.members if self.servers is not None else [of.endpoint(name)]
        self.targets: dict[str, _Target] = {}
        """Endpoint -> how it is asked."""
        for endpoint, deployment in zip(endpoints, deployments, strict=True):
            rate = of.rate_limit(endpoint.name, account_of(original, endpoint.name, deployment.get("api_key")))
            self.targets[endpoint.name] = _Target(endpoint, rate, arguments_for(deployment))
            limits = limits_in_options({**options, **deployment})
            if models.portal is not None and models.portal.may_block():  # a copy that a program made in a thread
                models.portal.call_soon(rate.add_user_limits, limits)
            else:
                rate.add_user_limits(limits)
        timeout = options.get("timeout")
        timeout = getattr(timeout, "read", timeout)  # an httpx.Timeout
        self.seconds = float(timeout) if isinstance(timeout, int | float) else REQUEST_SECONDS
        """The longest that one request may take in all: an LM's timeout is one between two bytes."""

    def call(self, lm: Any, make: Callable[..., Any]) -> Any:
        """Make a request from a thread, again and again where need be.

        A thread keeps its slot while it waits: it keeps its place in the pool of threads too, and a rollout that got
        the slot could find no thread to run in. Where the run's loop cannot be waited for (on a loop, or after the
        run) the LM makes the request as it would without a run. One that takes too long cannot be ended: what runs
        in the slot is, and the thread, left behind, gets an error instead of its late answer.

        Args:
            lm: the paced LM.
            make: makes it with an LM; ``cache=False`` makes it past dspy's cache.

        Raises:
            LMTimeoutError: the work that this thread was to do has been given up.
            LMError: what the last attempt raised; of an LM class of the user's own any other error too.
        """
        portal, slot = self.models.portal, slot_here()
        if portal is None or not portal.may_block():
            if portal is not None and portal.is_on_loop():
                self.models.warn_of_blocking()
            with self._without_secrets():
                return self.models.redaction.redact_known(make(lm, **self.first_target.arguments))
        request = _Request(self, slot, keeps=True)
        while not _is_given_up(slot):
            try:
                if not request.may_go_at_once(portal.loop.time()):
                    portal.run(request.begin())
                began = portal.loop.time()
                portal.call_soon(request.send)
                with track_usage() as usage, inspecting_replies() as inspection:
                    result = self.models.redaction.redact_known(make(lm, **request.arguments))
            except Exception as error:
                if not portal.run(request.wait_to_retry(error)):
                    raise
            else:
                portal.call_soon(request.record_answer, usage, inspection, portal.loop.time() - began)
                if not _is_given_up(slot):
                    return result
            finally:
                portal.call_soon(request.leave)
        raise LMTimeoutError("what this thread works on took too long, and was given up")

    async def acall(self, lm: Any, make: Callable[..., Awaitable[Any]]) -> Any:
        """Make a request on the run's loop, without the slot while it waits.

        On another loop, say one that a program has begun in its thread, the LM is called as it is, within the time that
        a request may take.
        """
        loop, portal = asyncio.get_running_loop(), self.models.portal
        if portal is None or portal.loop is not loop:
            with self._without_secrets():
                called = make(lm, **self.first_target.arguments)
                return self.models.redaction.redact_known(await (called if portal is None else self._in_time(called)))
        request = _Request(self, current_slot())
        while True:
            try:
                await request.begin()
                began = loop.time()
                request.send()
                with track_usage() as usage, inspecting_replies() as inspection:
                    result = self.models.redaction.redact_known(await self._in_time(make(lm, **request.arguments)))
            except Exception as error:
                if not await request.wait_to_retry(error):
                    raise
            else:
                request.record_answer(usage, inspection, loop.time() - began)
                return result
            finally:
                request.leave()

    @property
    def first_target(self) -> _Target:
        """The target of requests that are not paced, or have no other."""
        return next(iter(self.targets.values()))

    @contextmanager
    def _without_secrets(self) -> Generator[None, None, None]:
        try:
            yield
        except Exception as error:
            self.models.redaction.redact_errors(chain_of(error))
            raise

    async def _in_time(self, request: Awaitable[T]) -> T:
        with anyio.move_on_after(self.seconds):
            return await request
        raise LMTimeoutError(f"no answer within {self.seconds:g} seconds")


class _Request:
    """One request, from its choice of a target to its answer, as often as it is sent.

    It is used on the run's loop, but for what a thread may do by itself.

    Args:
        pace: of its LM.
        slot: in which it is made; None outside of any.
        keeps: it keeps the slot while it waits, and ends what runs there when it takes too long: a thread makes it.
    """

    def __init__(self, pace: Pace, slot: Slot | None, keeps: bool = False) -> None:
        self._pace, self._slot, self._keeps = pace, slot, keeps
        self._target, self._tracked = pace.first_target, TrackedRequest()
        self._stage = "" if slot is None else slot.step_and_stage[1]
        self._tokens = 0.0
        self._cache_arguments: dict[str, Any] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments beside the call's own: whom to ask, and past dspy's cache where that may keep a bad reply."""
        return {**self._cache_arguments, **self._target.arguments}

    def may_go_at_once(self, now: float) -> bool:
        """Whether :meth:`begin` has nothing to choose or to wait for; a thread may ask."""
        target = self._target
        return self._pace.servers is None and target.endpoint.paused_until <= now and not target.rate.is_known

    async def begin(self) -> None:
        """Choose whom of several to ask, but not who has just turned it away, and wait until it may be sent."""
        servers = self._pace.servers
        if servers is not None:
            refuser = self._target.endpoint if self._tracked.failures else None
            self._target = self._pace.targets[servers.choose(self._tracked, self._is_full, refuser).name]
        self._tokens = self._target.rate.expected_tokens(self._stage)
        await self._target.endpoint.admit(self._slot, self._target.rate, self._tokens, self._keeps)

    def _is_full(self, endpoint: Endpoint) -> bool:
        rate = self._pace.targets[endpoint.name].rate
        return rate.is_known and rate.waiting >= rate.ahead

    def send(self) -> None:
        """Record that it goes out now, and bound its time in a thread."""
        self._target.endpoint.record_sent(self._tracked)
        bound = _bound_of(self._slot) if self._keeps else None
        if bound is not None:
            self._timer = asyncio.get_running_loop().call_later(self._pace.seconds + LATE_SECONDS, bound.cancel)

    def leave(self) -> None:
        """Record that it is not under way any more, whatever became of it."""
        if self._timer is not None:
            self._timer.cancel()
        self._target.endpoint.leave(self._tracked)

    async def wait_to_retry(self, error: Exception) -> bool:
        """Record an error of the request, and wait until it is made again; False where it is not.

        What was streamed may have been seen, and is not asked for twice.
        """
        if self._timer is not None:
            self._timer.cancel()
        self._target.endpoint.leave(self._tracked)
        pace, sent, endpoint, rate = self._pace, self._tracked, self._target.endpoint, self._target.rate
        pace.models.redaction.redact_errors(chain_of(error))
        retries, retry_after = pace.models.endpoints.retries, retry_after_of(error)
        rate.record_reported_limits(limits_in_headers(headers_of_error(error)))
        if pace.models.once:
            return False
        is_temporary = may_repeat(error)
        if is_temporary:
            pace.responder.record_failure(sent, str(error) or type(error).__name__, is_of_request(error))
        if is_refusal(error):
            rate.record_refusal(retry_after)
            endpoint.record_refusal(sent, retry_after)
        elif is_timeout(error):
            endpoint.record_refusal(sent, None, "timed out")
        elif is_temporary:
            endpoint.record_no_reply(sent)
        if not is_temporary:
            return False
        attempts = pace.original.num_retries + retries.policy.attempts
        if dspy.settings.send_stream is not None or not pace.responder.may_retry(sent, attempts):
            mark_asked(error, sent)
            return False
        if pace.servers is None or not pace.servers.has_room:
            await pace.responder.pause_before_retry(self._slot, sent, retry_after, self._keeps)
        self._cache_arguments = {"cache": False} if isinstance(error, HollowReplyError) else {}
        return True

    def record_answer(self, usage: UsageTracker, inspection: ReplyInspection, seconds: float) -> None:
        """Record its answer, which took so many seconds."""
        written, total, rate = completion_tokens_of(usage.usage_data), tokens_of(usage), self._target.rate
        if inspection.is_cached or not (written or seconds > CACHED_SECONDS):
            rate.correct(-1.0, -self._tokens)
            return
        self._target.endpoint.record_reply(self._tracked)
        if total:
            rate.record_cost(self._stage, total, self._tokens)
        rate.record_reported_limits(limits_in_headers(inspection.headers))


def _bound_of(slot: Slot | None) -> anyio.CancelScope | None:
    """Return what ends the work in a slot that takes too long."""
    return None if slot is None else slot.shield_scope or slot.time_scope


def _is_given_up(slot: Slot | None) -> bool:
    """Whether the work in a slot took too long: a thread that was left behind with it asks nothing more."""
    bound = _bound_of(slot)
    return bound is not None and bound.cancel_called
