"""The run's view of the LMs that it calls: retries that hold no slot, and signals for the endpoint's limit.

``dspy.LM`` retries transient errors by itself, inside the slot, and tells nobody of a 429. The run calls twins of
the user's LMs instead, with these retries off: a request that the provider turns away gives its slot back, waits as
long as the provider said (else exponential backoff with full jitter), and is made again, up to the LM's own
``num_retries`` and the run's. The user's LM is not changed. A twin shares its history, its callbacks, its connections
and its cache keys; deep copies and pickles of a twin are plain LMs again. An LM that is no ``dspy.LM`` has no twin.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

import dspy
from dspy.primitives.module import Module
from dspy.utils.exceptions import LMError
from dspy.utils.usage_tracker import UsageTracker, track_usage

from dspy_flashevolve.engine.endpoints import Endpoint, Endpoints, Sent
from dspy_flashevolve.engine.leases import current_lease
from dspy_flashevolve.engine.threads import LoopWaits
from dspy_flashevolve.programs.faults import is_refusal, is_timeout, mark_attempts, may_repeat, retry_after_of
from dspy_flashevolve.programs.twins import HollowReplyError, replies_looked_at, twin_class

CACHED_SECONDS = 0.01
"""An answer that took less and reports no tokens came from a cache, and says nothing of the endpoint."""


def endpoint_of(lm: Any) -> str:
    """Who answers an LM's requests: its address, else its provider's name.

    >>> endpoint_of(dspy.LM("openai/gpt-5", api_base="http://localhost:8000/v1/"))
    'http://localhost:8000/v1'
    >>> endpoint_of(dspy.LM("anthropic/claude-haiku-4-5")), endpoint_of(dspy.LM("gpt-5"))
    ('anthropic', 'openai')
    """
    options: dict[str, Any] = getattr(lm, "kwargs", None) or {}
    address = options.get("api_base") or options.get("base_url")
    if address:
        parts = urlsplit(str(address))
        if not parts.hostname:
            return str(address).rstrip("/")
        place = parts.netloc.rpartition("@")[2]  # without a user's name and password
        return f"{parts.scheme}://{place}{parts.path}".rstrip("/")
    model = str(getattr(lm, "model", type(lm).__name__))
    if "/" in model:
        return model.split("/", 1)[0]
    return "openai" if isinstance(getattr(lm, "_engine_spec", None), str) else model


class LanguageModels:
    """Makes the twins of one run.

    Args:
        endpoints: of the run; get the signals.
    """

    def __init__(self, endpoints: Endpoints) -> None:
        self.endpoints = endpoints
        self.waits: LoopWaits | None = None
        self._twins: dict[int, tuple[Any, Any]] = {}

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say on which loop the run lives; before it, and after :meth:`close`, a twin is as the LM itself."""
        self.waits = LoopWaits(loop)

    def close(self) -> None:
        """The run has ended: threads that wait to call an LM again get an error."""
        if self.waits is not None:
            self.waits.close()
        self.waits = None

    def __deepcopy__(self, memo: dict[int, Any]) -> LanguageModels:
        return self

    def twin(self, lm: Any) -> Any:
        """The run's twin of a ``dspy.LM``, one an LM; anything else is given back as it is."""
        if not isinstance(lm, dspy.LM):
            return lm
        if hasattr(type(lm), "original_class"):
            pace: Any = getattr(lm, "pace", None)
            if pace is None or pace.models is self:
                return lm
            lm = pace.original  # the twin of a run that this one runs inside of
        if id(lm) not in self._twins:
            twin: Any = copy.copy(lm)  # shares what it refers to
            twin.__class__ = twin_class(type(lm))
            twin.num_retries = 0
            twin.pace = Pace(self, self.endpoints.endpoint(endpoint_of(lm)), lm.num_retries, lm)
            self._twins[id(lm)] = lm, twin
        return self._twins[id(lm)][1]

    def replace_in(self, program: Module) -> Module:
        """Give the predictors of ``program``, which is changed, the twins of their own LMs."""
        for predictor in program.predictors():
            if getattr(predictor, "lm", None) is not None:
                predictor.lm = self.twin(predictor.lm)
        return program


def endpoints_of(predictors: Iterable[Any], default: Any) -> set[str]:
    """The endpoints that predictors ask, with the LM ``default`` for those without one of their own."""
    lms = [getattr(predictor, "lm", None) or default for predictor in predictors]
    return {endpoint_of(lm) for lm in lms if lm is not None}


class Pace:
    """Makes the requests of one LM.

    Args:
        models: of the run.
        endpoint: whom the LM asks.
        own_retries: the LM's ``num_retries``.
        original: the LM.
    """

    def __init__(self, models: LanguageModels, endpoint: Endpoint, own_retries: int, original: Any) -> None:
        self._models = self.models = models
        self.original = original
        self._endpoint = endpoint
        self.own_retries = own_retries

    def call(self, request: Callable[..., Any]) -> Any:
        """Make a request from a thread, again and again where need be.

        A thread keeps its slot while it waits: it keeps its place in the pool of threads too, and a rollout that got
        the slot could find no thread to run in. Where the run's loop cannot be waited for (on a loop, or after the
        run), it is as in ``dspy.LM``.

        Args:
            request: makes it; ``cache=False`` makes it past dspy's cache.

        Raises:
            LMError: what the last attempt raised; of an LM class of the user's own any other error too.
        """
        waits, endpoint, attempt, again = self._models.waits, self._endpoint, 0, dict[str, Any]()
        if waits is None or not waits.is_foreign():
            return self._call_as_dspy(request)
        while True:
            if endpoint.open_seconds > waits.loop.time():
                waits.wait(endpoint.admit(None))
            sent, began = Sent(), waits.loop.time()
            waits.call(endpoint.send, sent)
            try:
                with track_usage() as usage, replies_looked_at():
                    result = request(**again)
            except Exception as error:
                waits.call(self._tell, error, sent)
                if not self._goes_on(error, attempt):
                    raise
                waits.wait(endpoint.rest(None, attempt, retry_after_of(error)))
                attempt, again = attempt + 1, _afresh(error)
            else:
                if _tokens(usage) or waits.loop.time() - began > CACHED_SECONDS:
                    waits.call(endpoint.finished, sent, _tokens(usage))
                return result

    async def acall(self, request: Callable[..., Awaitable[Any]]) -> Any:
        """The same on the run's loop; on another loop as in ``dspy.LM``."""
        endpoint, lease = self._endpoint, current_lease()
        loop, waits = asyncio.get_running_loop(), self._models.waits
        attempt, again = 0, dict[str, Any]()
        if waits is None or waits.loop is not loop:
            return await self._acall_as_dspy(request)
        while True:
            await endpoint.admit(lease)
            sent, began = Sent(), loop.time()
            endpoint.send(sent)
            try:
                with track_usage() as usage, replies_looked_at():
                    result = await request(**again)
            except Exception as error:
                self._tell(error, sent)
                if not self._goes_on(error, attempt):
                    raise
                await endpoint.rest(lease, attempt, retry_after_of(error))
                attempt, again = attempt + 1, _afresh(error)
            else:
                if _tokens(usage) or loop.time() - began > CACHED_SECONDS:
                    endpoint.finished(sent, _tokens(usage))
                return result

    def _call_as_dspy(self, request: Callable[[], Any]) -> Any:
        attempt = 0
        while True:
            try:
                return request()
            except LMError as error:
                if attempt >= self.own_retries or not _may_repeat(error):
                    raise
                time.sleep(_delay(error, attempt))
                attempt += 1

    async def _acall_as_dspy(self, request: Callable[[], Awaitable[Any]]) -> Any:
        attempt = 0
        while True:
            try:
                return await request()
            except LMError as error:
                if attempt >= self.own_retries or not _may_repeat(error):
                    raise
                await asyncio.sleep(_delay(error, attempt))
                attempt += 1

    def _goes_on(self, error: Exception, attempt: int) -> bool:
        if not _may_repeat(error):
            return False
        if attempt < self.own_retries + self._models.endpoints.retry.attempts - 1:
            return True
        mark_attempts(error, attempt + 1)
        return False

    def _tell(self, error: Exception, sent: Sent) -> None:
        if is_refusal(error):
            self._endpoint.refused(sent, retry_after_of(error))
        elif is_timeout(error):
            self._endpoint.timed_out(sent)


def _may_repeat(error: Exception) -> bool:
    """Whether a request may be made again; what was streamed may have been seen, and is not asked for twice."""
    return may_repeat(error) and dspy.settings.send_stream is None


def _afresh(error: Exception) -> dict[str, Any]:
    """How to ask again: past dspy's cache, if what it may have kept is a reply without a message."""
    return {"cache": False} if isinstance(error, HollowReplyError) else {}


def _delay(error: LMError, attempt: int) -> float:
    retry_after = retry_after_of(error)
    return min(2.0**attempt, 60.0) if retry_after is None else retry_after


def _tokens(usage: UsageTracker) -> int:
    counts = (entry.get("completion_tokens") for entries in usage.usage_data.values() for entry in entries)
    return sum(count for count in counts if isinstance(count, int))
