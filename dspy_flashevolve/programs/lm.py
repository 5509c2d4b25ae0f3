"""How a run makes the calls of its LMs: each request paced, asked again where need be, and counted.

``dspy.LM`` retries transient errors by itself, inside the slot, and tells nobody of a 429. For the length of a run the
user's LM is of a subclass that has these retries off inside of the run: a request that the provider turns away gives
its slot back, waits as long as the provider said (else exponential backoff with full jitter), and is made again, up to
the LM's own ``num_retries`` and the run's. It is the user's object that programs call, with its attributes and history:
several runs may share it, and deep copies and pickles of it are of the user's class. The secrets that the LM holds are
taken out of what it answers and raises inside of a run. What is no ``dspy.LM`` is called as it is, and what it raises
is retried a rollout at a time.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import anyio
import dspy
from dspy.primitives.module import Module
from dspy.utils.callback import with_callbacks
from dspy.utils.exceptions import LMTimeoutError, LMTransportError
from dspy.utils.usage_tracker import UsageTracker, track_usage

from dspy_flashevolve.engine.loop import LoopPortal
from dspy_flashevolve.engine.provider import Attempts, Failure, Providers
from dspy_flashevolve.engine.rates import RateLimit, limits_in_headers
from dspy_flashevolve.engine.redaction import Redaction, secrets_held_by
from dspy_flashevolve.engine.scheduler import Slot, current_slot
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.programs.faults import (
    ATTEMPTS,
    DSPYS_ACALL,
    DSPYS_CALL,
    HollowReplyError,
    chain_of,
    headers_of_error,
    is_of_request,
    is_paced,
    is_refusal,
    is_timeout,
    may_repeat,
    recording_paced_call,
    retry_after_of,
)
from dspy_flashevolve.programs.replies import INSPECTION, ReplyInspection, inspecting_replies
from dspy_flashevolve.programs.servers import BalancedLM, account_of, arguments_for, endpoint_of, limits_in_options
from dspy_flashevolve.programs.usage import CountLate, completion_tokens_of, counted_call, slot_here, tokens_of

logger = logger_named(__name__)

T = TypeVar("T")
PACED_BY = "flashevolve_models"
"""The setting of dspy's that says which run a call is made in: it reaches the threads that dspy starts."""


_RUNS: dict[int, list[LanguageModels]] = {}
"""LM (its id) -> the runs that pace it now."""
_CLASSES = threading.Lock()


def begin_pacing(lm: Any, models: LanguageModels) -> None:
    """Let a run make an LM's calls; the first one gives the LM its subclass."""
    with _CLASSES:
        _RUNS.setdefault(id(lm), []).append(models)
        if not is_paced(lm):
            object.__setattr__(lm, "__class__", _paced_class(type(lm)))


def end_pacing(lm: Any, models: LanguageModels) -> None:
    """Let a run make an LM's calls no more; the last one gives the LM its class back."""
    with _CLASSES:
        _RUNS[id(lm)].remove(models)
        if not _RUNS[id(lm)]:
            del _RUNS[id(lm)]
            object.__setattr__(lm, "__class__", type(lm).original_class)


def _counters_of_stray_call(lm: Any) -> list[CountLate]:
    """Return who counts a call that knows no run: every run that paces its LM, where a program of it may make the call.

    A thread that a program starts has none of the settings that say which run it works for. The main thread, and the
    one of a run's loop, are no such threads.
    """
    if threading.current_thread() is threading.main_thread():
        return []
    runs = [models for models in _RUNS.get(id(lm), ()) if models.portal is not None and not models.portal.is_on_loop()]
    return [models.count for models in runs if models.count is not None]


@lru_cache(maxsize=64)
def _paced_class(kind: type[Any]) -> type[Any]:
    """Make a subclass whose calls a run makes; callbacks are told of a call once, however often it is made."""

    def paced_call(self: Any, call: Any, args: Any, kwargs: Any) -> Any:
        models: LanguageModels | None = dspy.settings.get(PACED_BY)
        if models is None:
            with counted_call(_counters_of_stray_call(self)):
                return call(self, *args, **kwargs)
        with recording_paced_call() as calls, counted_call():
            result = models.pace_of(self).call(self, lambda lm, **more: call(lm, *args, **{**kwargs, **more}))
            calls.on_lm_end("", result)
            return result

    async def paced_acall(self: Any, acall: Any, args: Any, kwargs: Any) -> Any:
        models: LanguageModels | None = dspy.settings.get(PACED_BY)
        if models is None:
            with counted_call(_counters_of_stray_call(self)):
                return await acall(self, *args, **kwargs)
        with recording_paced_call() as calls, counted_call():
            result = await models.pace_of(self).acall(self, lambda lm, **more: acall(lm, *args, **{**kwargs, **more}))
            calls.on_lm_end("", result)
            return result

    # dspy gives callbacks a call's arguments by the names in its signature.
    @with_callbacks
    def named_call(self: Any, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        return paced_call(self, DSPYS_CALL, (prompt,), {"messages": messages, **kwargs})

    @with_callbacks
    async def named_acall(self: Any, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        return await paced_acall(self, DSPYS_ACALL, (prompt,), {"messages": messages, **kwargs})

    # Looked up at each call, since instrumentation wraps and unwraps the calls of dspy's classes at any time.
    def call_now(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = dspy.LM.__call__ if kind.__call__ is BalancedLM.__call__ else kind.__call__
        return named_call(self, *args, **kwargs) if _is_dspys(call) else paced_call(self, call, args, kwargs)

    async def acall_now(self: Any, *args: Any, **kwargs: Any) -> Any:
        acall = dspy.LM.acall if kind.acall is BalancedLM.acall else kind.acall
        calling = named_acall(self, *args, **kwargs) if _is_dspys(acall) else paced_acall(self, acall, args, kwargs)
        return await calling

    def update_history(self: Any, entry: dict[str, Any]) -> None:
        inspection = INSPECTION.get()
        if inspection is not None:
            inspection.inspect(entry)
        if inspection is None or inspection.is_recorded:
            kind.update_history(self, entry)

    # dspy would retry inside the slot, and tell nobody.
    def num_retries(self: Any) -> int:
        return vars(self)["num_retries"] if INSPECTION.get() is None else 0

    def set_num_retries(self: Any, value: int) -> None:
        vars(self)["num_retries"] = value

    members: dict[str, Any] = {
        "__call__": call_now,
        "acall": acall_now,
        "update_history": update_history,
        "__reduce_ex__": lambda self, protocol: (copy.copy, (_plain(self),)),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "num_retries": property(num_retries, set_num_retries),
        "original_class": kind,
    }
    return type(kind.__name__, (kind,), members)


def _is_dspys(call: Any) -> bool:
    """Whether a call is dspy's own, with nothing around it but dspy's callbacks."""
    return getattr(call, "__wrapped__", None) in (DSPYS_CALL, DSPYS_ACALL)


def _plain(paced: Any) -> Any:
    """A shallow copy, of the user's class."""
    lm = copy.copy(paced)
    object.__setattr__(lm, "__class__", type(paced).original_class)
    return lm


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
        providers: of the run; hear what becomes of each request.
        redaction: is told the LMs' secrets, and takes them out of what the LMs answer and raise.
        once: each request is made once: whoever asked for the rollout asks again.
        count: takes what calls have used that were made in threads which know no run, of LMs that this run paces; None
            to count nothing of them.
    """

    def __init__(
        self,
        providers: Providers,
        redaction: Redaction | None = None,
        once: bool = False,
        count: CountLate | None = None,
    ) -> None:
        self.providers, self.redaction = providers, redaction or Redaction()
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


class Pace:
    """Makes the requests of one LM."""

    def __init__(self, models: LanguageModels, original: Any) -> None:
        self.models, self.original = models, original
        self.provider = models.providers.provider(endpoint_of(original))
        options: dict[str, Any] = getattr(original, "kwargs", None) or {}
        deployments = original.deployments if isinstance(original, BalancedLM) else [{}]
        self.rates: dict[str, RateLimit] = {}
        """Server -> its limits a minute for the LM's account there."""
        self.arguments: dict[str, dict[str, Any]] = {}
        """Server -> how it is asked."""
        for server, deployment in zip(self.provider.servers, deployments, strict=True):
            account = account_of(original, server.name, deployment.get("api_key"))
            self.rates[server.name] = rate = models.providers.rate_limit(account)
            self.arguments[server.name] = arguments_for(deployment)
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
        """
        portal, slot = self.models.portal, slot_here()
        if portal is None or not portal.may_block():
            if portal is not None and portal.is_on_loop():
                self.models.warn_of_blocking()
            with self._without_secrets():
                return self.models.redaction.redact_known(make(lm, **self.arguments[self.provider.servers[0].name]))
        request = _Request(self, slot, keeps_slot=True)
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
                called = make(lm, **self.arguments[self.provider.servers[0].name])
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
    def most_attempts(self) -> int:
        """Attempts of a request that count: the LM's own and the run's."""
        return self.original.num_retries + self.models.providers.policy.attempts

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


class _Request(Attempts):
    """An LM call, as often as it is made. It is used on the run's loop, but for what a thread may do by itself."""

    def __init__(self, pace: Pace, slot: Slot | None, keeps_slot: bool = False) -> None:
        stage, most = "" if slot is None else slot.step_and_stage[1], pace.most_attempts
        super().__init__(pace.provider, slot, keeps_slot, pace.rates, stage, most=most)
        self._pace = pace
        self._cache_arguments: dict[str, Any] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments beside the call's own: whom to ask, and past dspy's cache where that may keep a bad reply."""
        return {**self._cache_arguments, **self._pace.arguments[self.server.name]}

    async def begin(self) -> None:
        """See :meth:`Attempts.begin`; LMTransportError where its provider was given up meanwhile."""
        await super().begin()
        if outage := self.provider.providers.outage:
            raise LMTransportError(outage)

    def send(self) -> None:
        """Record that it goes out now, and bound its time in a thread."""
        super().send()
        bound = _bound_of(self.slot) if self.keeps_slot else None
        if bound is not None:
            self._timer = asyncio.get_running_loop().call_later(self._pace.seconds + LATE_SECONDS, bound.cancel)

    def leave(self) -> None:
        """Record that it is not under way any more, whatever became of it."""
        super().leave()
        if self._timer is not None:
            self._timer.cancel()

    async def wait_to_retry(self, error: Exception) -> bool:
        """Record an error of the request, and wait until it is made again; False where it is not.

        What was streamed may have been seen, and is not asked for twice.
        """
        self.leave()
        self._pace.models.redaction.redact_errors(chain_of(error))
        if self.rate is not None:
            self.rate.record_reported_limits(limits_in_headers(headers_of_error(error)))
        if self._pace.models.once or not may_repeat(error):
            return False
        overload = "refused" if is_refusal(error) else "timed out" if is_timeout(error) else ""
        reason = str(error) or type(error).__name__
        self.most = 0 if dspy.settings.send_stream is not None else self.most
        if not await self.try_again(Failure(reason, is_of_request(error), retry_after_of(error), overload)):
            setattr(error, ATTEMPTS, self)
            return False
        self._cache_arguments = {"cache": False} if isinstance(error, HollowReplyError) else {}
        return True

    def record_answer(self, usage: UsageTracker, inspection: ReplyInspection, seconds: float) -> None:
        """Record its answer, which took so many seconds."""
        written, rate = completion_tokens_of(usage.usage_data), self.rate
        if inspection.is_cached or not (written or seconds > CACHED_SECONDS):
            if rate is not None:
                rate.correct(-1.0, -self.expected_tokens)
            return
        self.answered(tokens_of(usage))
        if rate is not None:
            rate.record_reported_limits(limits_in_headers(inspection.headers))


def _bound_of(slot: Slot | None) -> anyio.CancelScope | None:
    """Return what ends the work in a slot that takes too long."""
    return None if slot is None else slot.shield_scope or slot.time_scope


def _is_given_up(slot: Slot | None) -> bool:
    """Whether the work in a slot took too long: a thread that was left behind with it asks nothing more."""
    bound = _bound_of(slot)
    return bound is not None and bound.cancel_called
