"""Replies of LMs: those that are a server's failure, and what else of a reply is lost before a program sees it.

A server in trouble may say 200 and send a body without a message, or one that says that it failed. dspy's native engine
reads {}, {"choices": []} and a message whose content is null as a reply with an empty text, and litellm gives no output
at all for the second: the adapter then fails to parse it, which would be a score.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import dspy
from dspy import lm15

from dspy_flashevolve.programs.faults import HollowReplyError, headers_in

MESSAGES = frozenset({"candidates", "content", "generations", "message", "output", "response", "results", "text"})
"""Where the bodies of other dialects than OpenAI's chat completions keep what the model said."""
CONTENTS = ("content", "text", "tool_calls", "function_call", "refusal", "reasoning_content", "reasoning", "audio")
"""What a message may say; an empty text is something that a model may say, null is not."""
NO_MESSAGE = "the reply holds no message"
FAILED = ("error", "abort")
"""Finish reasons of a server that failed half-way: OpenRouter's, vLLM's and SGLang's."""


class ReplyInspection:
    """What one LM call was answered, and whether the user wants it in the histories."""

    def __init__(self, is_recorded: bool) -> None:
        self.is_recorded = is_recorded
        self.failure, self.is_cached = "", False
        self.headers: dict[str, str] = {}

    def inspect(self, entry: dict[str, Any]) -> None:
        """Inspect what dspy writes into the history of a reply."""
        reply = entry.get("response")
        self.failure = self.failure or failure_in(reply)
        cut_off = CUT_OFF.get()
        if cut_off is not None and is_cut_off(reply):
            cut_off.append(entry.get("model") or "the LM")
        usage = reply.usage if isinstance(reply, lm15.Response) else None
        of_cache = usage is not None and bool(usage.total_tokens or usage.output_tokens) and not entry.get("usage")
        self.is_cached = of_cache or getattr(reply, "cache_hit", False) is True
        hidden = getattr(reply, "_hidden_params", None)  # litellm's; dspy's native engine keeps headers of errors alone
        self.headers = headers_in(hidden.get("additional_headers") if isinstance(hidden, Mapping) else None)


INSPECTION: ContextVar[ReplyInspection | None] = ContextVar("flashevolve_reply_inspection", default=None)


@contextmanager
def inspecting_replies() -> Generator[ReplyInspection, None, None]:
    """Inspect the replies of one LM call; dspy shows a reply as it came only to the LM's history."""
    inspection = ReplyInspection(is_recorded=not dspy.settings.disable_history)
    token = INSPECTION.set(inspection)
    try:
        with dspy.context(disable_history=False):
            yield inspection
    finally:
        INSPECTION.reset(token)
    if inspection.failure:
        raise HollowReplyError(inspection.failure)


class CutOffReplyError(ValueError):
    """A reply that ends where its tokens were used up: half a text is no candidate."""

    def __init__(self, model: str) -> None:
        super().__init__(f"a reply of {model} was cut off at its longest length. Give that LM more max_tokens.")


CUT_OFF: ContextVar[list[str] | None] = ContextVar("flashevolve_cut_off", default=None)


@contextmanager
def recording_cut_off_replies() -> Generator[list[str], None, None]:
    """Record the models whose replies inside were cut off at their longest length."""
    models: list[str] = []
    token = CUT_OFF.set(models)
    try:
        yield models
    finally:
        CUT_OFF.reset(token)


def is_cut_off(reply: Any) -> bool:
    """Whether a reply ends where its tokens were used up, and not where the model meant it to."""
    if isinstance(reply, tuple | list):
        return any(map(is_cut_off, cast("Sequence[Any]", reply)))
    choices = _get(reply, "choices") or [reply]
    return any(_get(choice, "finish_reason") == "length" for choice in choices)


def failure_in(reply: Any) -> str:
    """Say in which way a provider's reply is a failure of its server, and no message; empty where it is a message.

    A reply that was cut off at its length or by a content filter, a refusal, reasoning without an answer and an empty
    text are what the model said. A text that is empty since no token was written is not.
    """
    if isinstance(reply, tuple | list):
        return next(filter(None, map(failure_in, cast("Sequence[Any]", reply))), "")
    body = reply
    if isinstance(reply, lm15.Response):
        body = reply.provider_data
        if not isinstance(body, Mapping):
            return ""
    choices = _get(body, "choices")
    if choices is None and isinstance(body, Mapping) and "choices" not in body:
        is_empty = not MESSAGES & body.keys() and not (isinstance(reply, lm15.Response) and reply.tool_calls)
        return NO_MESSAGE if is_empty else ""
    usage = _get(body, "usage")
    is_silent = _get(usage, "completion_tokens") == 0 or getattr(reply, "cache_hit", False) is True
    return next(filter(None, (_failure_in_choice(choice, is_silent) for choice in choices or [None])), "")


def _failure_in_choice(choice: Any, is_silent: bool) -> str:
    """See :func:`failure_in`."""
    reason = _get(choice, "finish_reason")
    if reason in ("length", "content_filter"):
        return ""
    more = _get(choice, "provider_specific_fields") or {}  # where litellm puts what OpenAI's choices do not have
    error = _get(choice, "error") or _get(more, "error")
    if error:
        return f"the reply holds an error: {_get(error, 'message') or error}"
    for failed in (reason, _get(more, "native_finish_reason")):
        if failed in FAILED:
            return f"the reply ended with finish_reason {failed!r}"
    message = _get(choice, "message")
    empty = (None, [], "") if is_silent else (None, [])
    if _get(choice, "text") not in empty:  # a text completion
        return ""
    more = _get(message, "provider_specific_fields") or {}  # where litellm puts a refusal
    is_empty = message is None or all(_get(part, name) in empty for part in (message, more) for name in CONTENTS)
    return NO_MESSAGE if is_empty else ""


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
