"""Is there anything in a reply? A server in trouble may say 200 and send a body without a message.

dspy's native engine reads ``{}``, ``{"choices": []}`` and a message whose content is null as a reply with an empty
text, and litellm gives no output at all for the second: the adapter then fails to parse it, which would be a score.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dspy import lm15

MESSAGES = frozenset({"candidates", "content", "generations", "message", "output", "response", "results", "text"})
"""Where the bodies of other dialects than OpenAI's chat completions keep what the model said."""
SAID = ("content", "text", "tool_calls", "function_call", "refusal", "reasoning_content", "reasoning", "audio")
"""What a message may say; an empty text is something that a model may say, null is not."""


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
        return any(map(is_hollow, _each(reply)))
    if isinstance(reply, lm15.Response):
        body = reply.provider_data
        return isinstance(body, Mapping) and not reply.tool_calls and _is_hollow_body(body)
    return _is_hollow_body(reply)


def checked_texts(texts: Mapping[str, Any]) -> dict[str, str]:
    """New texts of components, if a program can be built with them.

    Raises:
        TypeError: one is no text.
        ValueError: one has half a character in it (a lone surrogate), which no provider can receive.
    """
    for name, text in texts.items():
        if not isinstance(text, str):
            raise TypeError(f"the proposal for {name!r} is {text!r}, expected a text.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the proposal for {name!r} is not valid Unicode: {error.reason}.") from None
    return dict(texts)


def _each(replies: Any) -> Iterator[Any]:
    yield from replies


def _is_hollow_body(body: Any) -> bool:
    choices = _in(body, "choices")
    if choices is None and isinstance(body, Mapping) and "choices" not in body:
        return not MESSAGES & body.keys()
    return not choices or any(map(_is_hollow_choice, _each(choices)))


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
