"""Reading an OpenAI chat request: what it asks for, in which format, and which part is the instruction.

The formats are those that dspy's ChatAdapter and JSONAdapter write (dspy 3.4, `dspy/adapters/`): the system
message ends in the instruction, the user message holds the inputs in `[[ ## name ## ]]` sections and ends in a
sentence that names the output fields and their types. A reflection prompt is one with the inputs of dspy's
`ProposeInstruction`. Nothing here imports dspy, and no input makes it raise anything but `BadRequest`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

PromptKind = Literal[
    "task", "reflection", "integration", "consolidation", "sample_reflection", "curation", "harness", "other"
]

_OBJECTIVE = "In adhering to this structure, your objective is:"
_CHAT_REQUEST = "Respond with the corresponding output fields, starting with the field"
_JSON_REQUEST = "Respond with a JSON object in the following order of fields:"
_CHAT_FIELD = re.compile(r"`\[\[ ## (\w{1,200}) ## \]\]`(?: \(must be formatted as a valid Python (.+?)\)(?=, |\.))?")
_JSON_FIELD = re.compile(r"`(\w{1,200})`(?: \(must be formatted as a valid Python (.+?)\)(?=, |\.))?")
_SECTION = re.compile(r"^\[\[ ## (\w{1,200}) ## \]\][ \t]*$", re.MULTILINE)
_INPUTS: tuple[tuple[PromptKind, frozenset[str]], ...] = (
    ("integration", frozenset({"head_text", "children"})),
    ("integration", frozenset({"current_instruction", "proposed_instructions"})),
    ("consolidation", frozenset({"evidence", "instruction", "limit"})),
    ("reflection", frozenset({"current_instruction", "examples_with_feedback"})),
    ("sample_reflection", frozenset({"attempt", "feedback", "cited_bullets"})),
    ("curation", frozenset({"playbook", "sections", "reflection"})),
    ("harness", frozenset({"archive_overview", "direction"})),
)
"""The kinds of prompts, each with the inputs by which it is recognized."""


class BadRequest(Exception):
    """The request is not one that an OpenAI server would answer; `param` is the part at fault, or None."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class OutputField:
    """A field that the reply must hold, with its Python type as dspy writes it, such as "Literal['yes', 'no']"."""

    name: str
    type_name: str = "str"


@dataclass(frozen=True)
class ChatRequest:
    """The parts of a request that the simulated model needs.

    Attributes:
        kind: Recognized by its inputs (`_INPUTS`); else "task", a dspy program's prompt, or "other", no dspy format.
        content: Everything that the reply may depend on, as one string: messages, temperature, seed, format.
        instruction: The instruction part of the system message; the whole system message where there is no such part.
        inputs: The sections of the last user message, name to text.
        output_fields: The fields of the reply, in order; empty for kind "other".
        json_reply: True when the reply must be a JSON object.
        prompt_tokens: Characters of all messages / 4, at least 1.
        max_tokens: The request's limit on the output, or None.
        model: The model's name as the request gives it.
    """

    kind: PromptKind
    content: str
    instruction: str
    inputs: Mapping[str, str]
    output_fields: tuple[OutputField, ...]
    json_reply: bool
    prompt_tokens: int
    max_tokens: int | None
    model: str


def parse_chat_request(body: bytes) -> ChatRequest:
    """Read the body of a POST to /v1/chat/completions.

    Raises:
        BadRequest: If it is no JSON object, or `messages`, `max_tokens`, `n`, `stream` or `model` is not usable.
    """
    try:
        payload: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    if not isinstance(payload, dict):
        raise BadRequest("the body must be a JSON object")
    payload = cast("dict[str, Any]", payload)
    messages = _messages(payload.get("messages"))
    if payload.get("n") not in (None, 1):
        raise BadRequest(f"n must be 1 here, got {_shown(payload['n'])}", "n")
    system = "\n".join(text for role, text in messages if role in ("system", "developer"))
    user = next((text for role, text in reversed(messages) if role == "user"), "")
    chat, as_json = user.rfind(_CHAT_REQUEST), user.rfind(_JSON_REQUEST)
    request = max(chat, as_json)  # where the sentence begins that asks for the outputs; below 0 where there is none
    inputs = _sections(user if request < 0 else user[:request])
    found = (_CHAT_FIELD if chat > as_json else _JSON_FIELD).findall(user[request:]) if request >= 0 else []
    fields = tuple(OutputField(name, type_name or "str") for name, type_name in found if name != "completed")
    kinds: list[PromptKind] = [kind for kind, names in _INPUTS if inputs.keys() >= names]
    if _value(payload, "stream", bool, "true or false"):
        raise BadRequest("stream must be false here", "stream")
    response_format = payload.get("response_format")
    formats = ("json_object", "json_schema")
    return ChatRequest(
        kind="other" if not fields else kinds[0] if kinds else "task",
        content=_content(messages, payload),
        instruction=_instruction(system),
        inputs=inputs,
        output_fields=fields,
        json_reply=as_json > chat or (isinstance(response_format, dict) and response_format.get("type") in formats),
        prompt_tokens=max(1, sum(len(text) for _, text in messages) // 4),
        max_tokens=_max_tokens(payload),
        model=_value(payload, "model", str, "a string") or "",
    )


def _value(payload: dict[str, Any], name: str, kind: type, expected: str) -> Any:
    """Return a value of the request, which has to be of a kind where it is there."""
    value = payload.get(name)
    if value is not None and type(value) is not kind:  # True is an int, too
        raise BadRequest(f"{name} must be {expected}, got {_shown(value)}", name)
    return value


def _max_tokens(payload: dict[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = _value(payload, name, int, "a whole number")
        if value is not None and value < 1:
            raise BadRequest(f"{name} must be at least 1, got {value}", name)
        if value is not None:
            return value
    return None


def _shown(value: object) -> str:
    return type(value).__name__ if isinstance(value, dict | list) else repr(value)[:80]


def _messages(value: object) -> list[tuple[str, str]]:
    if not isinstance(value, list) or not value:
        raise BadRequest("messages must be a list with at least one message", "messages")
    messages: list[tuple[str, str]] = []
    for index, message in enumerate(cast("list[Any]", value)):
        place = f"messages[{index}]"
        if not isinstance(message, dict):
            raise BadRequest(f"{place} must be an object, got {_shown(message)}", place)
        message = cast("dict[str, Any]", message)
        if not isinstance(role := message.get("role"), str):
            raise BadRequest(f"{place}.role must be a string, got {_shown(role)}", f"{place}.role")
        content: Any = message.get("content") or ""
        if isinstance(content, list):  # an image counts as no text
            texts = [part.get("text") for part in cast("list[Any]", content) if isinstance(part, dict)]
            content = "\n".join(text for text in texts if isinstance(text, str))
        if not isinstance(content, str):
            raise BadRequest(f"{place}.content must be a string or a list", f"{place}.content")
        messages.append((role, content))
    return messages


def _content(messages: list[tuple[str, str]], payload: dict[str, Any]) -> str:
    sampling = {name: payload.get(name) for name in ("temperature", "seed", "response_format")}
    try:
        return json.dumps([messages, sampling], sort_keys=True)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request is nested too deeply: {error}") from None


def _instruction(system: str) -> str:
    _, marker, objective = system.partition(_OBJECTIVE)
    if not marker:
        return system
    return "\n".join(line.removeprefix(" " * 8).rstrip() for line in objective.splitlines()).strip()


def _sections(text: str) -> dict[str, str]:
    """Return input name -> text."""
    headers = list(_SECTION.finditer(text))
    ends = [*(header.start() for header in headers[1:]), len(text)]
    sections: dict[str, str] = {}
    for header, stop in zip(headers, ends, strict=False):
        sections.setdefault(header.group(1), text[header.end() : stop].strip())
    return sections
