"""How the run calls the user's LMs: paced, each call counted, and a reply without a message told from an answer.

``dspy.LM`` retries transient errors by itself, inside the slot, and tells nobody of a 429. For the length of a run the
user's LM is of a subclass that has these retries off where the run asks: a request that the provider turns away gives
its slot back, waits as long as the provider said (else exponential backoff with full jitter), and is made again, up to
the LM's own ``num_retries`` and the run's. It is the user's object that programs see and call, with its attributes and
its history; whoever asks it from outside a run notices nothing, several runs may share it, and after the last of them
its class is what it was. Deep copies and pickles of it are of the user's class. The secrets that it holds are taken out
of what it answers and raises inside of a run. What is no ``dspy.LM`` is not paced: it is called as it is, and what it
raises is retried a rollout at a time.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import os
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio
import dspy
from dspy import lm15
from dspy.clients.base_lm import BaseLM
from dspy.primitives.module import Module
from dspy.utils.callback import with_callbacks
from dspy.utils.exceptions import LMTimeoutError
from dspy.utils.usage_tracker import UsageTracker, track_usage

from dspy_flashevolve.engine.endpoint import Endpoint
from dspy_flashevolve.engine.endpoints import Endpoints
from dspy_flashevolve.engine.groups import REPLICA_SEPARATOR
from dspy_flashevolve.engine.learned_rates import Claim
from dspy_flashevolve.engine.loop import LoopPortal
from dspy_flashevolve.engine.rate_headers import MAX_LIMIT, Unit, limits_in_headers
from dspy_flashevolve.engine.rates import RateLimit, TokenEstimate
from dspy_flashevolve.engine.redaction import Redaction, secrets_held_by, without_secrets
from dspy_flashevolve.engine.retries import Responder, TrackedRequest
from dspy_flashevolve.engine.scheduler import Slot, current_slot
from dspy_flashevolve.programs.faults import (
    HollowReplyError,
    chain_of,
    headers_in,
    headers_of_error,
    is_of_request,
    is_paced,
    is_refusal,
    is_timeout,
    mark_asked,
    may_repeat,
    recording_paced_call,
    retry_after_of,
)
from dspy_flashevolve.programs.servers import BalancedLM, arguments_for
from dspy_flashevolve.programs.usage import CountLate, completion_tokens_of, counted_call, slot_here, tokens_of

T = TypeVar("T")
BEGINNING = 20_000
"""So many characters of a prompt's first message tell which have a prefix in common."""
REQUEST_SECONDS = 600.0
"""The longest that a request may take in all where its LM has no ``timeout``."""
LATE_SECONDS = 0.5
"""The LM's own timeout, where it sees one, comes first: it leaves no thread behind."""
CACHED_SECONDS = 0.01
"""An answer that took less and reports no tokens came from a cache, and says nothing of the endpoint."""


def endpoint_of(lm: Any) -> str:
    """Who answers an LM's requests: its address, else its provider's name.

    >>> endpoint_of(dspy.LM("openai/gpt-5", api_base="http://localhost:8000/v1/"))
    'http://localhost:8000/v1'
    >>> endpoint_of(dspy.LM("anthropic/claude-haiku-4-5")), endpoint_of(dspy.LM("gpt-5"))
    ('anthropic', 'openai')
    """
    if isinstance(lm, BalancedLM):
        return REPLICA_SEPARATOR.join(_names_of(lm))
    options: dict[str, Any] = getattr(lm, "kwargs", None) or {}
    address = options.get("api_base") or options.get("base_url")
    if address:
        return without_secrets(str(address))
    model = str(getattr(lm, "model", type(lm).__name__))
    if "/" in model:
        return model.split("/", 1)[0]
    return "openai" if isinstance(getattr(lm, "_engine_spec", None), str) else model


def _names_of(lm: BalancedLM) -> list[str]:
    """The endpoints of one model, each with a name of its own: an address may be there with several keys."""
    names: list[str] = []
    for one in lm.deployments:
        address = without_secrets(str(one["api_base"]))
        same = sum(name.partition(" #")[0] == address for name in names)
        names.append(f"{address} #{same + 1}" if same else address)
    return names


def limits_in_options(options: Mapping[str, Any]) -> dict[Unit, float]:
    """The limits among an LM's options, in litellm's words: ``rpm`` and ``tpm``."""
    said: dict[Unit, float] = {}
    for unit, name in (("requests", "rpm"), ("tokens", "tpm")):
        value = options.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_LIMIT:
            said[unit] = float(value)
    return said


def account_of(lm: Any, endpoint: str, key: str | None = None) -> str:
    """Whose limits an LM's requests count against: the endpoint, the model and the key, as a hash that tells none.

    Args:
        key: of the deployment; default: the LM's, else the one of its provider in the environment.
    """
    options: dict[str, Any] = getattr(lm, "kwargs", None) or {}
    model = str(getattr(lm, "model", type(lm).__name__))
    key = key or str(options.get("api_key") or os.environ.get(f"{model.split('/', 1)[0].upper()}_API_KEY", ""))
    return hashlib.sha256("\0".join((endpoint, model, key)).encode("utf-8", "replace")).hexdigest()[:32]


def limits_folder() -> Path | None:
    """Where runs on the same key tell each other what they have sent: in the user's cache; None without a home."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return cache / "dspy-flashevolve" / "limits"


# Paced LMs


class LanguageModels:
    """Calls the LMs of one run.

    Args:
        endpoints: of the run; get the signals.
        redaction: is told the LMs' secrets, and takes them out of what the LMs answer and raise.
        folder: where runs on one key tell each other what they have sent; None for nowhere.
        once: each request is made once: whoever asked for the rollout asks again.
        count: takes what calls have used that were made in threads which know no run, of LMs that this run paces; None
            to count nothing of them.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        redaction: Redaction | None = None,
        folder: Path | None = None,
        once: bool = False,
        count: CountLate | None = None,
    ) -> None:
        self.endpoints, self.redaction = endpoints, redaction or Redaction()
        self.folder, self.once, self.count = folder, once, count
        self.waits: LoopPortal | None = None
        self._paced: dict[int, tuple[Any, Pace]] = {}

    @property
    def settings(self) -> dict[str, Any]:
        """Of dspy's, inside of which the run's requests are made."""
        return {PACED_BY: self}

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say on which loop the run lives; before it, and after :meth:`close`, a paced LM is as the LM itself."""
        self.waits = LoopPortal(loop)
        for lm, _ in list(self._paced.values()):
            _begin(lm, self)

    def close(self) -> None:
        """The run has ended: threads that wait to call an LM again get an error."""
        if self.waits is not None:
            self.waits.close()
            for lm, _ in list(self._paced.values()):
                _end(lm, self)
        self.waits = None

    def __deepcopy__(self, memo: dict[int, Any]) -> LanguageModels:
        return self

    def pace(self, lm: Any) -> Any:
        """The run calls a ``dspy.LM`` in its own way from now on; anything else stays as it is. Gives ``lm`` back."""
        if isinstance(lm, dspy.LM) and id(lm) not in self._paced:
            mine = lm, Pace(self, lm)
            if self._paced.setdefault(id(lm), mine) is mine:  # threads may come at once
                self.redaction.add(secrets_held_by(lm))
                if self.waits is not None:
                    _begin(lm, self)
        return lm

    def pace_of(self, lm: Any) -> Pace:
        """How the run calls an LM; one that a program made itself, as a copy of another, is called alike."""
        _, pace = self._paced.get(id(lm)) or (lm, Pace(self, lm))
        return pace

    def pace_in(self, program: Module) -> Module:
        """Pace the predictors' own LMs; gives ``program`` back."""
        for predictor in program.predictors():
            self.pace(getattr(predictor, "lm", None))
        return program


PACED_BY = "flashevolve_models"
"""The setting of dspy's that says which run a call is made in: it reaches the threads that dspy starts."""
_RUNS: dict[int, list[LanguageModels]] = {}
"""LM (its id) -> the runs that pace it now."""
_CLASSES = threading.Lock()


def _begin(lm: Any, models: LanguageModels) -> None:
    with _CLASSES:
        _RUNS.setdefault(id(lm), []).append(models)
        if not is_paced(lm):
            object.__setattr__(lm, "__class__", paced_class(type(lm)))


def _end(lm: Any, models: LanguageModels) -> None:
    with _CLASSES:
        _RUNS[id(lm)].remove(models)
        if not _RUNS[id(lm)]:
            del _RUNS[id(lm)]
            object.__setattr__(lm, "__class__", type(lm).original_class)


def _counts_of_strangers(lm: Any) -> list[CountLate]:
    """Who counts a call that knows no run: every run that paces its LM, where a program of it may make the call.

    A thread that a program starts has none of the settings that say which run it works for. The main thread, and the
    one of a run's loop, are no such threads.
    """
    if threading.current_thread() is threading.main_thread():
        return []
    runs = [models for models in _RUNS.get(id(lm), ()) if models.waits is not None and not models.waits.is_on_loop()]
    return [models.count for models in runs if models.count is not None]


@dataclass(frozen=True)
class _Place:
    """Where an LM's requests may go: who is asked, within which limits, which of these the user said, and by which
    arguments of the call."""

    endpoint: Endpoint
    rate: RateLimit
    said: dict[str, float]
    arguments: dict[str, Any]


def _places(models: LanguageModels, lm: Any, name: str) -> Iterator[_Place]:
    of, folder = models.endpoints, models.folder
    options: dict[str, Any] = getattr(lm, "kwargs", None) or {}
    if not isinstance(lm, BalancedLM):
        yield _Place(
            of.endpoint(name), of.rate_limit(name, account_of(lm, name), folder), limits_in_options(options), {}
        )
        return
    for one, deployment in zip(of.replicas(name).members, lm.deployments, strict=True):
        rate = of.rate_limit(one.name, account_of(lm, one.name, deployment.get("api_key")), folder)
        yield _Place(one, rate, limits_in_options({**options, **deployment}), arguments_for(deployment))


class Pace:
    """Makes the requests of one LM.

    Args:
        models: of the run.
        original: the LM.
    """

    def __init__(self, models: LanguageModels, original: Any) -> None:
        self.models, self.original = models, original
        of, name = models.endpoints, endpoint_of(original)
        self.several = of.replicas(name) if isinstance(original, BalancedLM) else None
        self.answers: Responder = self.several or of.endpoint(name)
        self.places = {one.endpoint.name: one for one in _places(models, original, name)}
        for place in self.places.values():
            waits = models.waits
            if waits is not None and waits.may_block():  # a copy that a program made in a thread
                waits.call_soon(place.rate.add_user_limits, place.said)
            else:
                place.rate.add_user_limits(place.said)
        options: dict[str, Any] = getattr(original, "kwargs", None) or {}
        most = options.get("max_tokens") or options.get("max_completion_tokens")
        self.most_written = most if isinstance(most, int) else None
        timeout = options.get("timeout")
        timeout = getattr(timeout, "read", timeout)  # an httpx.Timeout
        self.seconds = float(timeout) if isinstance(timeout, int | float) else REQUEST_SECONDS
        """The longest that one request may take in all: an LM's timeout is one between two bytes."""

    def call(self, lm: Any, request: Callable[..., Any], asked: object = None) -> Any:
        """Make a request from a thread, again and again where need be.

        A thread keeps its slot while it waits: it keeps its place in the pool of threads too, and a rollout that got
        the slot could find no thread to run in. Where the run's loop cannot be waited for (on a loop, or after the
        run) the LM makes the request as it would without a run. One that takes too long cannot be ended: what runs
        in the slot is, and the thread, left behind, gets an error instead of its late answer.

        Args:
            lm: the paced LM.
            request: makes it with an LM; ``cache=False`` makes it past dspy's cache.
            asked: its arguments, of which its length is told.

        Raises:
            LMTimeoutError: the work that this thread was to do has been given up.
            LMError: what the last attempt raised; of an LM class of the user's own any other error too.
        """
        waits, slot = self.models.waits, slot_here()
        if waits is None or not waits.may_block():
            with self._without_secrets():
                return self.models.redaction.redact_known(request(lm, **self.anywhere.arguments))
        one = _Request(self, asked, slot, keeps=True)
        while not _is_given_up(slot):
            try:
                if one.goes_at_once(waits.loop.time()):
                    one.estimate()
                else:
                    waits.run(one.begin())
                began = waits.loop.time()
                waits.call_soon(one.send)
                with track_usage() as usage, _looking_at_replies() as look:
                    result = self.models.redaction.redact_known(request(lm, **one.arguments))
            except Exception as error:
                if not waits.run(one.waits_again(error)):
                    raise
            else:
                waits.call_soon(one.answered, usage, look, waits.loop.time() - began)
                if not _is_given_up(slot):
                    return result
            finally:
                waits.call_soon(one.leave)
        raise LMTimeoutError("what this thread works on took too long, and was given up")

    async def acall(self, lm: Any, request: Callable[..., Awaitable[Any]], asked: object = None) -> Any:
        """The same on the run's loop, without the slot while it waits; on another loop, say one that a program has
        begun in its thread, the LM is called as it is, within the time that a request may take."""
        loop, waits = asyncio.get_running_loop(), self.models.waits
        if waits is None or waits.loop is not loop:
            with self._without_secrets():
                called = request(lm, **self.anywhere.arguments)
                return self.models.redaction.redact_known(await (called if waits is None else self._in_time(called)))
        one = _Request(self, asked, current_slot())
        while True:
            try:
                await one.begin()
                began = loop.time()
                one.send()
                with track_usage() as usage, _looking_at_replies() as look:
                    result = self.models.redaction.redact_known(await self._in_time(request(lm, **one.arguments)))
            except Exception as error:
                if not await one.waits_again(error):
                    raise
            else:
                one.answered(usage, look, loop.time() - began)
                return result
            finally:
                one.leave()

    @property
    def anywhere(self) -> _Place:
        """Where a request goes that is not paced, or has no other place to go."""
        return next(iter(self.places.values()))

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
    """One request, as often as it is sent. Used on the run's loop, but for what a thread may do by itself.

    Args:
        pace: of its LM.
        asked: the arguments of the call.
        slot: in which it is made; None outside of any.
        keeps: it keeps the slot while it waits, and ends what runs there when it takes too long: a thread makes it.
    """

    def __init__(self, pace: Pace, asked: object, slot: Slot | None, keeps: bool = False) -> None:
        self._pace, self._asked, self._slot, self._keeps = pace, asked, slot, keeps
        self._at, self._sent = pace.anywhere, TrackedRequest()
        self._claim = Claim(0.0)
        self._refused_by: set[RateLimit] = set()
        self._cache: dict[str, Any] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the call, beside its own: whom to ask, and past dspy's cache where that may keep a bad reply."""
        return {**self._cache, **self._at.arguments}

    def goes_at_once(self, now: float) -> bool:
        """Whether :meth:`begin` has nothing to choose or to wait for; a thread may ask."""
        return self._pace.several is None and self._at.endpoint.paused_until <= now and not self._at.rate.is_known

    def estimate(self) -> None:
        """What it will cost, by others of its stage, and its characters: none are counted without a limit."""
        rate = self._at.rate
        self._estimate = rate.estimates.setdefault(
            "" if self._slot is None else self._slot.step_and_stage[1], TokenEstimate()
        )
        self._characters = sum(map(len, _texts(self._asked))) if rate.is_known else 0
        tokens = self._estimate.expected_tokens(self._characters, self._pace.most_written)
        self._claim = Claim(tokens, rate in self._refused_by)

    async def begin(self) -> None:
        """Choose whom of several to ask, but not who has just turned it away, and wait until that may be."""
        several = self._pace.several
        if several is not None:
            but = self._at.endpoint if self._sent.failures else None
            beginning = next(filter(None, _texts(self._asked)), "")[:BEGINNING]  # where an instruction stands
            self._at = self._pace.places[several.choose(self._sent, beginning, self._is_full, but).name]
        self.estimate()
        await self._at.endpoint.admit(self._slot, self._at.rate, self._claim, self._keeps)

    def _is_full(self, one: Endpoint) -> bool:
        rate = self._pace.places[one.name].rate
        return rate.is_known and rate.waiting >= rate.ahead

    def send(self) -> None:
        """It goes out now."""
        self._at.rate.record_sent(self._claim)
        self._at.endpoint.record_sent(self._sent)
        bound = _bound_of(self._slot) if self._keeps else None
        if bound is not None:
            self._timer = asyncio.get_running_loop().call_later(self._pace.seconds + LATE_SECONDS, bound.cancel)

    def leave(self) -> None:
        """It is not under way any more, whatever became of it."""
        if self._timer is not None:
            self._timer.cancel()
        self._at.endpoint.leave(self._sent)
        self._at.rate.leave(self._claim)

    async def waits_again(self, error: Exception) -> bool:
        """Take note of an error of the request, and wait until it is made again; False where it is not.

        What was streamed may have been seen, and is not asked for twice.
        """
        if self._timer is not None:
            self._timer.cancel()
        pace, sent, endpoint = self._pace, self._sent, self._at.endpoint
        pace.models.redaction.redact_errors(chain_of(error))
        retry_after = retry_after_of(error)
        self._at.rate.record_reported_limits(limits_in_headers(headers_of_error(error)))
        if pace.models.once:
            return False
        if may_repeat(error):
            pace.answers.record_failure(sent, str(error) or type(error).__name__, is_of_request(error))
        if is_refusal(error):
            if not pace.models.endpoints.retries.is_hurried:  # then nothing is waited for
                self._at.rate.record_refusal(
                    self._claim, endpoint.capped_retry_after(retry_after), endpoint.is_isolated(sent)
                )
            self._refused_by.add(self._at.rate)
            endpoint.record_refusal(sent, retry_after)
        elif is_timeout(error):
            endpoint.record_timeout(sent)
        if not may_repeat(error):
            return False
        if not is_refusal(error):
            endpoint.record_no_reply()
        attempts = pace.original.num_retries + pace.models.endpoints.retries.policy.attempts
        if dspy.settings.send_stream is not None or not pace.answers.may_retry(sent, attempts):
            mark_asked(error, sent)
            return False
        if pace.several is None or not pace.several.has_room:
            await pace.answers.pause_before_retry(self._slot, sent, retry_after, self._keeps)
        self._cache = {"cache": False} if isinstance(error, HollowReplyError) else {}
        return True

    def answered(self, usage: UsageTracker, look: _Look, seconds: float) -> None:
        """It was answered, after so many seconds."""
        written, total, rate = completion_tokens_of(usage.usage_data), tokens_of(usage), self._at.rate
        if look.is_cached or not (written or seconds > CACHED_SECONDS):
            rate.refund(self._claim)
            return
        self._at.endpoint.record_reply(self._sent, written)
        rate.settle(self._claim, total or None)
        rate.record_reported_limits(limits_in_headers(look.headers))
        if total and self._characters:
            self._estimate.record_usage(self._characters, total - written, written)


def _bound_of(slot: Slot | None) -> anyio.CancelScope | None:
    """What ends the work in a slot that takes too long."""
    return None if slot is None else slot.shield_scope or slot.time_scope


def _is_given_up(slot: Slot | None) -> bool:
    """Whether the work in a slot took too long: a thread that was left behind with it asks nothing more."""
    bound = _bound_of(slot)
    return bound is not None and bound.cancel_called


@lru_cache(maxsize=64)
def paced_class(kind: type[Any]) -> type[Any]:
    """A subclass whose calls are paced inside of a run. Callbacks hear of a call once, however often it is made."""
    call, acall = kind.__call__, kind.acall
    if issubclass(kind, BalancedLM) and call is BalancedLM.__call__ and acall is BalancedLM.acall:
        call, acall = BaseLM.__call__, BaseLM.acall  # the run says which of its servers is asked
    as_dspys = call is BaseLM.__call__ and acall is BaseLM.acall  # else the user's class has calls of its own
    if as_dspys:
        call, acall = getattr(call, "__wrapped__", call), getattr(acall, "__wrapped__", acall)

    def paced_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        models: LanguageModels | None = dspy.settings.get(PACED_BY)
        if models is None:
            with counted_call(_counts_of_strangers(self)):
                return call(self, *args, **kwargs)
        with recording_paced_call() as calls, counted_call():
            result = models.pace_of(self).call(
                self, lambda lm, **again: call(lm, *args, **{**kwargs, **again}), (args, kwargs)
            )
            calls.on_lm_end("", result)
            return result

    async def paced_acall(self: Any, *args: Any, **kwargs: Any) -> Any:
        models: LanguageModels | None = dspy.settings.get(PACED_BY)
        if models is None:
            with counted_call(_counts_of_strangers(self)):
                return await acall(self, *args, **kwargs)
        with recording_paced_call() as calls, counted_call():
            result = await models.pace_of(self).acall(
                self, lambda lm, **again: acall(lm, *args, **{**kwargs, **again}), (args, kwargs)
            )
            calls.on_lm_end("", result)
            return result

    # Callbacks hear of a call's arguments by their names.
    def heard_call(self: Any, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        return paced_call(self, prompt, messages=messages, **kwargs)

    async def heard_acall(self: Any, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        return await paced_acall(self, prompt, messages=messages, **kwargs)

    def update_history(self: Any, entry: dict[str, Any]) -> None:
        look = _LOOK.get()
        if look is not None:
            look.see(entry)
        if look is None or look.kept:
            kind.update_history(self, entry)

    def num_retries(self: Any) -> int:
        return vars(self)["num_retries"] if _LOOK.get() is None else 0

    def set_num_retries(self: Any, value: int) -> None:
        vars(self)["num_retries"] = value

    members: dict[str, Any] = {
        "__call__": with_callbacks(heard_call) if as_dspys else paced_call,
        "acall": with_callbacks(heard_acall) if as_dspys else paced_acall,
        "update_history": update_history,
        "__reduce_ex__": lambda self, protocol: (_unchanged, (_plain(self),)),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "num_retries": property(num_retries, set_num_retries),
        "original_class": kind,
    }
    return type(kind.__name__, (kind,), members)


def _plain(paced: Any) -> Any:
    """A shallow copy, of the user's class."""
    lm = copy.copy(paced)
    object.__setattr__(lm, "__class__", type(paced).original_class)
    return lm


def _unchanged(value: Any) -> Any:
    return value


# Replies that hold no message: a server in trouble may say 200 and send a body without one. dspy's native engine reads
# {}, {"choices": []} and a message whose content is null as a reply with an empty text, and litellm gives no output at
# all for the second: the adapter then fails to parse it, which would be a score.

MESSAGES = frozenset({"candidates", "content", "generations", "message", "output", "response", "results", "text"})
"""Where the bodies of other dialects than OpenAI's chat completions keep what the model said."""
SAID = ("content", "text", "tool_calls", "function_call", "refusal", "reasoning_content", "reasoning", "audio")
"""What a message may say; an empty text is something that a model may say, null is not."""


class _Look:
    """What one LM call was answered, and whether the user wants it in the histories."""

    def __init__(self, kept: bool) -> None:
        self.kept = kept
        self.hollow = self.is_cached = False
        self.headers: dict[str, str] = {}

    def see(self, entry: dict[str, Any]) -> None:
        """What dspy writes into the history of a reply."""
        reply = entry.get("response")
        self.hollow = self.hollow or is_hollow(reply)
        usage = reply.usage if isinstance(reply, lm15.Response) else None
        of_cache = usage is not None and bool(usage.total_tokens or usage.output_tokens) and not entry.get("usage")
        self.is_cached = of_cache or getattr(reply, "cache_hit", False) is True
        hidden = getattr(
            reply, "_hidden_params", None
        )  # litellm's; dspy's native engine shows the headers of errors alone
        self.headers = headers_in(hidden.get("additional_headers") if isinstance(hidden, Mapping) else None)


_LOOK: ContextVar[_Look | None] = ContextVar("flashevolve_look", default=None)


@contextmanager
def _looking_at_replies() -> Generator[_Look, None, None]:
    """Look at the replies of one LM call; dspy shows a reply as it came only to the LM's history.

    Raises:
        HollowReplyError: a reply held no message.
    """
    look = _Look(kept=not dspy.settings.disable_history)
    token = _LOOK.set(look)
    try:
        with dspy.context(disable_history=False):
            yield look
    finally:
        _LOOK.reset(token)
    if look.hollow:
        raise HollowReplyError("the reply holds no message")


def is_hollow(reply: Any) -> bool:
    """Whether a provider's reply holds no message: no choices, no message in them, or one without any content.

    A reply that was cut off at its length or by a content filter, a refusal, reasoning without an answer and an empty
    text are what the model said.

    Args:
        reply: an lm15 ``Response``, a tuple of them, or an object shaped as OpenAI's.

    >>> is_hollow({"choices": []}), is_hollow({"choices": [{"message": {"content": ""}}]})
    (True, False)
    """
    if isinstance(reply, tuple | list):
        return any(map(is_hollow, cast("Sequence[Any]", reply)))
    if isinstance(reply, lm15.Response):
        body = reply.provider_data
        return isinstance(body, Mapping) and not reply.tool_calls and _is_hollow_body(body)
    return _is_hollow_body(reply)


def _is_hollow_body(body: Any) -> bool:
    choices = _in(body, "choices")
    if choices is None and isinstance(body, Mapping) and "choices" not in body:
        return not MESSAGES & body.keys()
    return not choices or any(map(_is_hollow_choice, choices))


def _is_hollow_choice(choice: Any) -> bool:
    if _in(choice, "finish_reason") in ("length", "content_filter"):
        return False
    if _in(choice, "text") is not None:  # a text completion
        return False
    message = _in(choice, "message")
    more = _in(message, "provider_specific_fields") or {}  # where litellm puts a refusal
    return message is None or all(_in(one, name) in (None, []) for one in (message, more) for name in SAID)


def _in(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _texts(asked: object) -> Iterator[str]:
    """The texts of a prompt, in order, in the arguments of an LM call."""
    if isinstance(asked, str):
        yield asked
    elif isinstance(asked, lm15.Request):
        yield str(asked.system or "")
        yield from (message.text or "" for message in asked.messages)
    elif isinstance(asked, Mapping):
        options = cast("Mapping[str, Any]", asked)
        yield from _texts([options.get(name) for name in ("messages", "prompt", "content", "text")])
    elif isinstance(asked, tuple | list):
        for one in cast("Sequence[Any]", asked):
            yield from _texts(one)
