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
_LISTED_FIELD = re.compile(r"^\d+\. `(\w{1,200})` \((.+?)\):", re.MULTILINE)
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
    """The request is not one that an OpenAI server would answer.

    Attributes:
        param: The part of the request at fault, or None.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class OutputField:
    """A field that the reply must hold.

    Attributes:
        name: Its name.
        type_name: Its Python type as dspy writes it ("str", "list[str]", "Literal['yes', 'no']", ...).
    """

    name: str
    type_name: str = "str"


@dataclass(frozen=True)
class ChatRequest:
    """The parts of a request that the simulated model needs.

    Attributes:
        kind: "task" (a dspy program's prompt), "reflection" (a proposer's), "integration" (of stale children, those of
            `StaleCandidateReflection`, or of Combee's proposals), "sample_reflection" and "curation"
            (those of a playbook, of `modules.playbook`), "harness" (a proposer's of modules, `AsyncMetaHarness`) or
            "other" (no dspy format).
        content: Everything that the reply may depend on, as one string: messages, temperature, seed, format.
        instruction: The instruction part of the system message; the whole system message where there is no such part.
        inputs: The sections of the last user message, name to text.
        output_fields: The fields of the reply, in order; empty for kind "other".
        json_reply: True when the reply must be a JSON object.
        prompt_tokens: Characters of all messages / 4, at least 1.
        max_tokens: The request's limit on the output, or None.
        stream: True when the reply is wanted as server-sent events.
        include_usage: True when a stream must end in a chunk with the usage.
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
    stream: bool
    include_usage: bool
    model: str


def parse_chat_request(body: bytes) -> ChatRequest:
    """Read the body of a POST to /v1/chat/completions.

    Raises:
        BadRequest: If it is no JSON object, or `messages`, `max_tokens`, `n` or `stream` is not usable.

    Examples:
        >>> parse_chat_request(b'{"messages": [{"role": "user", "content": "Hello"}]}').kind
        'other'
    """
    payload = _load(body)
    messages = _messages(payload.get("messages"))
    if payload.get("n") not in (None, 1):
        raise BadRequest(f"n must be 1 here, got {_shown(payload['n'])}", "n")
    system = "\n".join(text for role, text in messages if role in ("system", "developer"))
    user = next((text for role, text in reversed(messages) if role == "user"), "")
    inputs = _sections(user)
    fields = _output_fields(system, user, payload.get("response_format"))
    options = payload.get("stream_options")
    return ChatRequest(
        kind=_kind(inputs, fields),
        content=_content(messages, payload),
        instruction=_instruction(system),
        inputs=inputs,
        output_fields=fields,
        json_reply=_json_wanted(user, payload.get("response_format")),
        prompt_tokens=max(1, sum(len(text) for _, text in messages) // 4),
        max_tokens=_max_tokens(payload),
        stream=_flag(payload, "stream"),
        include_usage=isinstance(options, dict) and cast("dict[str, Any]", options).get("include_usage") is True,
        model=_model(payload.get("model", "")),
    )


def _load(body: bytes) -> dict[str, Any]:
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    if not isinstance(payload, dict):
        raise BadRequest("the body must be a JSON object")
    return cast("dict[str, Any]", payload)


def _shown(value: object) -> str:
    return type(value).__name__ if isinstance(value, dict | list) else repr(value)[:80]


def _messages(value: object) -> list[tuple[str, str]]:
    if not isinstance(value, list) or not value:
        raise BadRequest("messages must be a list with at least one message", "messages")
    messages: list[tuple[str, str]] = []
    for index, item in enumerate(cast("list[object]", value)):
        if not isinstance(item, dict):
            raise BadRequest(f"messages[{index}] must be an object, got {_shown(item)}", f"messages[{index}]")
        message = cast("dict[str, Any]", item)
        role = message.get("role")
        if not isinstance(role, str):
            raise BadRequest(f"messages[{index}].role must be a string, got {_shown(role)}", f"messages[{index}].role")
        messages.append((role, _text(message.get("content"), index)))
    return messages


def _text(content: object, index: int) -> str:
    """The text of a message: a string, or the text parts of a list (an image counts as no text)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"messages[{index}].content must be a string or a list", f"messages[{index}].content")
    parts = [cast("dict[str, Any]", part) for part in cast("list[object]", content) if isinstance(part, dict)]
    return "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))


def _content(messages: list[tuple[str, str]], payload: dict[str, Any]) -> str:
    sampling = {name: payload.get(name) for name in ("temperature", "seed", "response_format")}
    try:
        return json.dumps([messages, sampling], sort_keys=True)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request is nested too deeply: {error}") from None


def _model(value: object) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"model must be a string, got {_shown(value)}", "model")
    return value


def _max_tokens(payload: dict[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = payload.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadRequest(f"{name} must be a whole number of at least 1, got {_shown(value)}", name)
        return value
    return None


def _flag(payload: dict[str, Any], name: str) -> bool:
    value = payload.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false, got {_shown(value)}", name)
    return value is True


def _instruction(system: str) -> str:
    _, marker, objective = system.partition(_OBJECTIVE)
    if not marker:
        return system
    return "\n".join(line.removeprefix(" " * 8).rstrip() for line in objective.splitlines()).strip()


def _sections(user: str) -> dict[str, str]:
    """Input name to text; the sentence that asks for the outputs is not part of the last input."""
    end = max(user.rfind(_CHAT_REQUEST), user.rfind(_JSON_REQUEST))
    text = user if end < 0 else user[:end]
    headers = list(_SECTION.finditer(text))
    ends = [*(header.start() for header in headers[1:]), len(text)]
    sections: dict[str, str] = {}
    for header, stop in zip(headers, ends, strict=False):
        sections.setdefault(header.group(1), text[header.end() : stop].strip())
    return sections


def _schema_fields(response_format: object) -> dict[str, Any]:
    """The properties of a json_schema response format; empty for any other."""
    node: Any = response_format
    for name in ("json_schema", "schema", "properties"):
        node = cast("dict[str, Any]", node).get(name) if isinstance(node, dict) else None
    return cast("dict[str, Any]", node) if isinstance(node, dict) else {}


def _output_fields(system: str, user: str, response_format: object) -> tuple[OutputField, ...]:
    """From the request in the user message, which has the types; else the schema; else the system message."""
    chat, as_json = user.rfind(_CHAT_REQUEST), user.rfind(_JSON_REQUEST)
    if chat >= 0 or as_json >= 0:
        pattern = _CHAT_FIELD if chat > as_json else _JSON_FIELD
        output_fields = [
            OutputField(name, type_name or "str") for name, type_name in pattern.findall(user[max(chat, as_json) :])
        ]
        return tuple(field for field in output_fields if field.name != "completed")
    schema = _schema_fields(response_format)
    if schema:
        return tuple(OutputField(name, _schema_type(part)) for name, part in schema.items())
    listed = system.partition(_OBJECTIVE)[0].partition("Your output fields are:")[2]
    return tuple(OutputField(name, type_name) for name, type_name in _LISTED_FIELD.findall(listed))


def _schema_type(part: object) -> str:
    names = {"integer": "int", "number": "float", "boolean": "bool", "array": "list", "object": "dict"}
    if not isinstance(part, dict):
        return "str"
    schema = cast("dict[str, Any]", part)
    options = schema.get("enum")
    if isinstance(options, list) and options and isinstance(options[0], str | int):
        return f"Literal[{options[0]!r}]"
    return names.get(str(schema.get("type")), "str")


def _json_wanted(user: str, response_format: object) -> bool:
    if isinstance(response_format, dict) and cast("dict[str, Any]", response_format).get("type") in (
        "json_object",
        "json_schema",
    ):
        return True
    return user.rfind(_JSON_REQUEST) > user.rfind(_CHAT_REQUEST)


def _kind(inputs: Mapping[str, str], fields: tuple[OutputField, ...]) -> PromptKind:
    if not fields:
        return "other"
    kinds: list[PromptKind] = [kind for kind, names in _INPUTS if inputs.keys() >= names]
    return kinds[0] if kinds else "task"
