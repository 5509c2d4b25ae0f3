"""Whose fault was it: the provider's, the request's, or the program's? The one place that decides.

.. code-block:: text

    LATER    rate limit, timeout, 408, 409, 425, 429, 5xx, lost connection,      tried again outside the slot; a rollout
             a reply that cannot be read or holds no choice                      is no score; where but one example
                                                                                 stays so, it is failure_score for all
    NEVER    401, 402, 403, 404, no such model, no key, no credit                the run ends with the best so far
             (403 and 404 of a request that a candidate wrote: REQUEST, if the
             endpoint has answered others)
    REQUEST  context too long, content filter, another 4xx, a feature that       the candidate's score on the example:
             the model lacks; a reply whose text the adapter cannot parse        failure_score, as in dspy.GEPA
    (None)   an error of the program's, or of the metric's, own code; one that   the same
             kept a request from being sent

dspy's ``LMError`` tree, lm15's, and the errors of litellm's and other providers' SDKs say by themselves what they are,
wherever they stand in a chain of causes or in an exception group. What a hand-written LM raises (``TimeoutError``,
``ConnectionError``, ``httpx`` errors, a ``KeyError`` over a body that has no choices) looks like what a program's own
tool may raise: it is the provider's only where an LM call was recorded to raise it (:func:`recording_lm_calls`), or
where it passed through one. Calls of an LM that is no ``dspy.BaseLM``, or of one that hides them from dspy's callbacks,
are not recorded, and its raw errors count as the program's. What a program catches and makes up for is the program's
own business; where it raises something else in its place, the fault is the recorded one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import http.client
import inspect
import json
import re
import traceback
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from enum import Enum, auto
from typing import Any, cast

import dspy
from dspy import lm15
from dspy.clients.base_lm import BaseLM
from dspy.clients.errors import wrap_error
from dspy.utils.callback import BaseCallback
from dspy.utils.exceptions import (
    AdapterParseError,
    LMError,
    LMInvalidRequestError,
    LMProviderError,
    LMRateLimitError,
    LMServerError,
    LMTimeoutError,
    LMUnexpectedError,
    LMUnsupportedModelError,
    is_retryable_lm_error,
)

from dspy_flashevolve.engine.errors import RunAbortedError, TransientError

ATTEMPTS = "flashevolve_attempts"
"""Attribute of an error: the :class:`Attempts` of its request, where that is not to be made again."""
RECORDED_BY = "flashevolve_recorder"
"""The setting of dspy's with the :class:`LmCalls` that record the calls of paced LMs: it reaches the threads that dspy
starts."""
MAX_ERRORS = 32
"""Errors of LM calls that are kept for a rollout. A round number, above the calls that a program makes side by side:
one that goes on after so many errors has been answered by other calls."""
MAX_LINKS = 100
"""Errors of a chain of causes that are looked at: chains of real libraries have fewer than ten, those of a program that
raises in a retry loop may grow without end."""
SDKS = frozenset({"anthropic", "cohere", "google", "groq", "huggingface_hub", "litellm", "mistralai", "openai"})
"""Packages whose errors come from a provider, whoever called it."""
TRANSPORTS = frozenset({"aiohttp", "h11", "h2", "httpcore", "httpx", "requests", "urllib3"})
"""Packages whose errors come from a provider where an LM call raised them."""
OUT_OF_CONTEXT = re.compile(
    r"context[ _-]?(?:length|window|size|limit)|(?:prompt|input|request) is too long|too many (?:input )?tokens"
    r"|input token count|`inputs` tokens|longer than the model",
    re.IGNORECASE,
)
"""What servers say of a prompt that is too long; some with no code of its own (vLLM, llama.cpp, TGI, Gemini)."""
NO_PROVIDER = "LLM Provider NOT provided"
"""What litellm says, with the status 400, of a model's name that names no provider."""
WAITS = (408, 409, 425, 429)
REFUSALS = (401, 402, 403, 404)
REFUSALS_OF_CONTENT = (403, 404)
"""Out of these, what a gateway also answers to one request for what is in it: OpenRouter a moderated text with 403, a
picture that no endpoint of the model supports with 404."""
TIMEOUTS = (TimeoutError, asyncio.TimeoutError, concurrent.futures.TimeoutError)  # one and the same since Python 3.11
BROKEN = (
    *TIMEOUTS, ConnectionError, http.client.HTTPException, json.JSONDecodeError, EOFError, LookupError, AttributeError,
)  # fmt: skip
"""What an LM raises that lost its connection, or could not find its way in the body of a reply."""


WRITERS = frozenset({
    "_build_request", "build_request", "build_request_head", "get_optional_params", "parse_url", "urlsplit",
    "write_headers",
})  # fmt: skip
"""Functions (of SDKs, HTTP libraries, litellm and urllib) in which a request is written: what fails there is not sent,
unless a connection was lost."""
WRITING_FILES = frozenset({json.encoder.__file__, copy.__file__})
"""Files of which the same is true: dspy copies the arguments of a request before it sends them."""
MISTAKES = (ImportError, NameError, NotImplementedError)
"""What no provider causes: an LM of the user's own, or a function in the place of one, is wrong."""
UNSENDABLE = frozenset({
    "InvalidHeader", "InvalidSchema", "InvalidURL", "JSONEncodeError", "LocalProtocolError", "MissingSchema",
    "NoTextError", "PydanticSerializationError", "UnicodeEncodeError", "UnsupportedProtocol",
})  # fmt: skip
"""Names of errors (of httpx, requests, h11, orjson and pydantic) over a request that cannot be written or addressed."""


class NoTextError(TypeError):
    """A function in the place of an LM returned what is no text."""


class HollowReplyError(LMServerError):
    """A reply with status 200 was a failure of its server: it held no message, or an error."""


def is_paced(lm: Any) -> bool:
    """Whether a run paces an LM now."""
    return hasattr(type(lm), "original_class")


class LmCalls(BaseCallback):
    """A record of what the LM calls in its context came to, on the loop and in threads."""

    def __init__(self) -> None:
        self.errors: deque[Exception] = deque(maxlen=MAX_ERRORS)
        """What calls raised, in order; a reply without a choice counts as such an error."""
        self.only_paced = True
        """No LM was called that the run does not pace."""
        self.has_answer = False
        """A call was answered."""

    def on_lm_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        """See ``dspy.utils.callback.BaseCallback``."""
        self.only_paced = self.only_paced and is_paced(instance)

    def on_lm_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        """See ``dspy.utils.callback.BaseCallback``."""
        if isinstance(exception, Exception):
            self.errors.append(exception)
        elif exception is None and isinstance(outputs, list) and not outputs:
            self.errors.append(HollowReplyError("the reply holds no choice"))
        elif exception is None:
            self.has_answer = True


@contextmanager
def recording_lm_calls(only_paced: bool = False) -> Generator[LmCalls, None, None]:
    """Record the LM calls that are made inside, of any ``dspy.BaseLM``, beside the callbacks that the user configured.

    Their trace is a list of its own, which ends with them: a long run does not fill the user's.

    Args:
        only_paced: those of paced LMs, which report them. A callback of dspy's records all of them, and makes dspy
            bind the arguments of every call of a module, adapter and LM, which takes a tenth of a millisecond each.
    """
    calls = LmCalls()
    recorder = {RECORDED_BY: calls} if only_paced else {"callbacks": [*dspy.settings.callbacks, calls]}
    with dspy.context(trace=[], **recorder):
        yield calls


@contextmanager
def recording_paced_call() -> Generator[LmCalls, None, None]:
    """Record what a call of a paced LM inside raises; the caller records what it gives."""
    calls: LmCalls = dspy.settings.get(RECORDED_BY) or LmCalls()
    try:
        yield calls
    except Exception as error:
        calls.on_lm_end("", None, error)
        raise


class Fault(Enum):
    """What an error says of the request that led to it."""

    LATER = auto()
    """It may be answered if it is made again."""
    NEVER = auto()
    """Neither it nor any other will be answered."""
    REQUEST = auto()
    """It will not be answered, others may be: it says something of the candidate."""


def fault_of(error: BaseException, lm_errors: Sequence[BaseException] = ()) -> tuple[Fault, BaseException] | None:
    """Classify an error: its fault, and the error of its chain that says so; None for an error of the program's own.

    Args:
        error: what a program, a metric or a proposer raised, with its chain of causes.
        lm_errors: what LM calls raised meanwhile.
    """
    calls = {id(lm_error) for lm_error in lm_errors}
    for link in chain_of(error):
        if isinstance(link, AdapterParseError):
            return None  # a reply came, whatever failed before it
        fault = _fault(link, id(link) in calls or _passed_through_a_call(link))
        if fault is not None:
            return None if was_never_sent(link) else (fault, link)
    for link in reversed(lm_errors):
        if _fault(link, True) in (Fault.LATER, Fault.NEVER) and not was_never_sent(link):
            return Fault.LATER, link  # swallowed on the way, say by a thread pool that reports its own error
    return None


DSPYS_CALL: Any = inspect.unwrap(BaseLM.__call__)
DSPYS_ACALL: Any = inspect.unwrap(BaseLM.acall)
"""dspy's own LM calls, without dspy's callbacks and whatever else may be wrapped around them."""
_CALLS = {DSPYS_CALL.__code__, DSPYS_ACALL.__code__}


def _passed_through_a_call(error: BaseException) -> bool:
    """Whether an LM call raised an error, as its traceback tells."""
    return any(frame.f_code in _CALLS for frame, _ in traceback.walk_tb(error.__traceback__))


def may_repeat(error: BaseException) -> bool:
    """Whether a request may be made again whose LM call raised ``error``."""
    return _fault(error, True) is Fault.LATER and not was_never_sent(error)


def was_never_sent(error: BaseException) -> bool:
    """Whether a request could not be written down (an argument that is no JSON) or addressed, so that nobody was asked,
    or an LM of the user's own has a mistake in its code.

    Such an error may look like a provider's: litellm calls it an internal server error, with the status 500.
    """
    for number, link in enumerate(chain_of(error)):
        if number and isinstance(link, LMError):
            return False  # of an earlier call, say the one that an adapter makes up for with this one
        if isinstance(link, MISTAKES) or type(link).__name__ in UNSENDABLE or _passed_through_writing(link):
            return True
    return False


def _passed_through_writing(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return False
    codes = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(code.co_filename in WRITING_FILES or code.co_name in WRITERS for code in codes)


def is_refusal(error: BaseException) -> bool:
    """Whether the provider asked for fewer requests."""
    return isinstance(error, LMRateLimitError) or _status_of(error) == 429 or retry_after_of(error) is not None


def is_of_request(error: BaseException) -> bool:
    """Whether a fault may be one request's alone: an error inside the server, or a reply that cannot be read. One that
    is busy, restarts, or is not there turns every request away."""
    status = _status_of(error)
    if status is not None:
        return status == 500 or status < 400
    broken = (LookupError, AttributeError, ValueError, EOFError, LMUnexpectedError, HollowReplyError)
    lost = isinstance(error.__cause__, ConnectionError)  # of an LM of the user's own, which dspy does not tell apart
    return not lost and (isinstance(error, broken) or type(error) is LMProviderError)


def is_out_of_context(error: BaseException) -> bool:
    """Whether a request was refused since its prompt is longer than the model's context."""
    for link in chain_of(error):
        if isinstance(link, AdapterParseError):
            return False  # its message quotes a reply
        names = {kind.__name__ for kind in type(link).__mro__}
        if names & {"ContextWindowExceededError", "ContextLengthError"}:
            return True
        if _status_of(link) in (None, 400, 413, 422) and OUT_OF_CONTEXT.search(str(link)):
            return True
    return False


def is_timeout(error: BaseException) -> bool:
    """Whether there was no answer in time."""
    return isinstance(error, (LMTimeoutError, *TIMEOUTS)) or _status_of(error) == 408


def raise_provider_fault(
    error: Exception, lm_errors: Sequence[BaseException] = (), *, others_answered: bool = False
) -> None:
    """Raise for what says nothing of the candidate; return for errors of the program or of its request.

    Args:
        lm_errors: see :func:`fault_of`.
        others_answered: the candidate wrote the request, and its endpoint has answered others: a refusal that may be
            for its content (403, 404) is of the request.

    Raises:
        TransientError: see LATER above. It is tried again, outside the score.
        RunAbortedError: see NEVER above. Nothing that follows could succeed.
    """
    fault = fault_of(error, lm_errors)
    if fault is None or fault[0] is Fault.REQUEST:
        return
    kind, culprit = fault
    if others_answered and kind is Fault.NEVER and _status_of(culprit) in REFUSALS_OF_CONTENT:
        return
    message = str(culprit) or type(culprit).__name__
    if kind is Fault.LATER:
        attempts = getattr(culprit, ATTEMPTS, None)
        raise TransientError(message, retry_after_of(culprit), is_of_request(culprit), attempts) from error
    if isinstance(culprit, LMUnsupportedModelError) or _status_of(culprit) == 404 or NO_PROVIDER in message:
        raise RunAbortedError(
            f"The LM provider does not have what was asked for: {message}. Check the model's name and the address "
            "(api_base), then run again."
        ) from error
    raise RunAbortedError(
        f"The LM provider refused: {message}. Check the API key and the account, then run again."
    ) from error


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, what it groups, and what led to it, nearest first."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < MAX_LINKS:
        link = waiting.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        cause = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
        grouped: Any = getattr(link, "exceptions", None)
        waiting += [] if cause is None else [cause]
        if isinstance(grouped, tuple | list):
            waiting += [each for each in reversed(cast("Sequence[Any]", grouped)) if isinstance(each, BaseException)]


NEVER_ANSWERED = frozenset({
    "BudgetExceededError", "LMAuthError", "LMBillingError", "LMConfigurationError", "LMUnsupportedModelError",
})  # fmt: skip
"""Names of dspy's and litellm's errors after which no request is answered."""
ANSWERED_LATER = frozenset({
    "APIConnectionError", "APIResponseValidationError", "APITimeoutError", "LMUnexpectedError", "RouterRateLimitError",
})  # fmt: skip
"""Names of dspy's and of SDKs' errors that carry no status, beside those that dspy itself retries."""


def _fault(error: BaseException, is_of_call: bool) -> Fault | None:
    if isinstance(error, lm15.LM15Error):
        error = wrap_error(error, model="")
    package, status = type(error).__module__.partition(".")[0], _status_of(error)
    if not isinstance(error, LMError) and package not in SDKS:
        if not is_of_call:
            return None
        if status is not None:
            return _of_status(status)
        return Fault.LATER if package in TRANSPORTS or isinstance(error, BROKEN) else None
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error.__cause__, lm15.ToolDerivationError):
        return Fault.REQUEST  # a tool that cannot be described is the program's
    if names & NEVER_ANSWERED or NO_PROVIDER in str(error) or _code_of(error) == "insufficient_quota":
        return Fault.NEVER
    if names & ANSWERED_LATER or (isinstance(error, Exception) and is_retryable_lm_error(error)):
        return Fault.LATER
    if isinstance(error, LMError) and not isinstance(error, LMProviderError):
        return Fault.REQUEST
    if status is not None:
        return _of_status(status)
    # dspy's own of no kind is most often about a body that is not JSON.
    is_vague = isinstance(error, LMProviderError) and not isinstance(error, LMInvalidRequestError)
    return Fault.LATER if is_vague else Fault.REQUEST


def _of_status(status: int) -> Fault:
    """Classify an HTTP status; one under 400 comes with a body that could not be read."""
    if status in REFUSALS:
        return Fault.NEVER
    return Fault.LATER if status in WAITS or status < 400 or status >= 500 else Fault.REQUEST


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an error of any library carries."""
    of_reply = getattr(getattr(error, "response", None), "status_code", None)
    code = getattr(error, "code", None)  # urllib's
    for status in (getattr(error, "status_code", None), getattr(error, "status", None), of_reply, code):
        if isinstance(status, int) and not isinstance(status, bool) and 100 <= status <= 599:
            return status
    return None


def _code_of(error: BaseException) -> str | None:
    """Return the provider's own code for what went wrong."""
    body = getattr(error, "body", None)
    detail = cast("Mapping[str, Any]", body).get("error", body) if isinstance(body, Mapping) else None
    code = getattr(error, "code", None) or (detail.get("code") if isinstance(detail, Mapping) else None)
    return code if isinstance(code, str) else None


def headers_of_error(error: BaseException) -> dict[str, str]:
    """Collect the headers of limits, and of when to come back, of the replies that led to an error."""
    headers: dict[str, str] = {}
    for link in chain_of(error):
        headers = _headers_with(link) | headers
    return headers


def _headers_with(error: BaseException) -> dict[str, str]:
    of_reply = getattr(getattr(error, "response", None), "headers", None)
    ours, litellms = (getattr(error, name, None) for name in ("rate_limit_headers", "litellm_response_headers"))
    return headers_in(of_reply) | headers_in(litellms) | headers_in(ours)


def headers_in(held: Any) -> dict[str, str]:
    """Pick the headers of limits, and of when to come back, by their names in lower case; the last of several."""
    read: dict[str, str] = {}
    for name, value in cast("Mapping[Any, Any]", held).items() if isinstance(held, Mapping) else ():
        value = value[-1] if isinstance(value, list | tuple) and value else value
        name = str(name).lower()
        if isinstance(value, str | int | float) and ("ratelimit" in name or name == "retry-after"):
            read[name.removeprefix("llm_provider-")] = str(value)
    return read


def retry_after_of(error: BaseException) -> float | None:
    """Return when the provider wants to be asked again, in seconds; None where it did not say.

    dspy reads it from the reply itself. Behind litellm it is lost on the way, and found in the headers that an error
    further down the chain has kept.
    """
    for link in chain_of(error):
        seconds = getattr(link, "retry_after", None)
        if isinstance(seconds, int | float) and not isinstance(seconds, bool):
            return float(seconds)
        if (seconds := _seconds_in(_headers_with(link).get("retry-after", ""))) is not None:
            return seconds
    return None


def _seconds_in(value: str) -> float | None:
    """Read seconds or a date, as HTTP has it; None for anything else."""
    try:
        if "." in value or value.strip().isdigit():
            return max(0.0, float(value))
        when = parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return None
    when = when if when.tzinfo is not None else when.replace(tzinfo=timezone.utc)
    return max(0.0, (when - datetime.now(timezone.utc)).total_seconds())
