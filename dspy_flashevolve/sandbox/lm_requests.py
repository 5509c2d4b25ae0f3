"""LM calls that a child asks the host to make, checked: what it may ask for, and what it may not.

The host makes the call with its own keys and from its own machine. So a child can neither name another address nor a
key, nor a file or an address to read a picture from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from dspy_flashevolve.sandbox.wire import WireError

NUMBERS = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (0, 2**31),
    "rollout_id": (0, 2**31),
    "max_tokens": (1, 1 << 15),
    "n": (1, 64),
}
"""Options with the least and the largest value that they may have; those of whole bounds only are whole numbers."""
WHOLE = frozenset({"seed", "rollout_id", "max_tokens", "n"})
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


@dataclass(frozen=True)
class LmRequest:
    """One LM call that a child asks for.

    Args:
        messages: as in OpenAI's chat API; texts, and pictures that are in the message itself.
        options: of sampling only.
    """

    messages: list[dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def replies(self) -> int:
        """How many replies it asks for."""
        return int(self.options.get("n", 1))


def parse_request(message: Any) -> LmRequest:
    """What a child asked for.

    Raises:
        WireError: it is no LM request, or asks for what a candidate may not ask for.

    >>> parse_request({"messages": [{"role": "user", "content": "Hello"}], "options": {"api_base": "http://x"}})
    Traceback (most recent call last):
    dspy_flashevolve.sandbox.wire.WireError: the LM option 'api_base' is not one that a candidate may set
    """
    if not isinstance(message, dict):
        raise WireError("an LM request that is no object")
    request = cast("dict[str, Any]", message)
    messages, options = request.get("messages"), request.get("options", {})
    if not isinstance(messages, list) or not messages or not isinstance(options, dict):
        raise WireError("an LM request without messages or with options that are no object")
    given = cast("dict[str, Any]", options)
    return LmRequest(
        [_message(one) for one in cast("list[Any]", messages)],
        {name: _option(name, value) for name, value in given.items()},
    )


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise WireError("a message that is no object")
    fields = cast("dict[str, Any]", message)
    role, content = fields.get("role"), fields.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise WireError(f"a message with the role {role!r:.40}")
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not isinstance(content, list):
        raise WireError("a message whose content is neither a text nor a list")
    return {"role": role, "content": [_part(part) for part in cast("list[Any]", content)]}


def _part(part: Any) -> dict[str, Any]:
    fields = cast("dict[str, Any]", part if isinstance(part, dict) else {})
    if fields.get("type") == "text" and isinstance(fields.get("text"), str):
        return {"type": "text", "text": fields["text"]}
    picture = fields.get("image_url")
    url = cast("dict[str, Any]", picture).get("url") if isinstance(picture, dict) else None
    if fields.get("type") == "image_url" and isinstance(url, str) and url.startswith("data:image/"):
        return {"type": "image_url", "image_url": {"url": url}}
    raise WireError("a part of a message that is neither a text nor a picture in a data: URL")


def _option(name: str, value: Any) -> Any:
    if name == "stop":
        stops = cast("list[Any]", value if isinstance(value, list) else [value])
        if len(stops) <= 16 and all(isinstance(stop, str) for stop in stops):
            return stops
    elif name in NUMBERS:
        low, high = NUMBERS[name]
        kinds = int if name in WHOLE else int | float
        if isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high:
            return value
    else:
        raise WireError(f"the LM option {name!r:.40} is not one that a candidate may set")
    raise WireError(f"the LM option {name} is {value!r:.40}")
