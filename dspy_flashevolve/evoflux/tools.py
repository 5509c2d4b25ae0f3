"""A tool as a workflow sees it: its schemas, what it does to the world, and the one way in which it is called."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import keyword
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal, cast, get_args

import anyio
import dspy
from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.loop import Threads
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.evoflux.schemas import (
    Schema,
    fault_of_schema,
    parts_of,
    properties_of,
    required_of,
    resolved,
    types_of,
)

Effect = Literal["read", "idempotent", "write"]
"""What a call does: nothing; the same as two calls do; or something that must not happen twice."""
LIST_SECONDS = 60.0
"""The longest that a session may take to list its tools; a round number, above the start of two slow servers."""
MOST_PAGES = 100
"""Pages of tools that a session may list; a round number, ten times what a server of a thousand tools needs."""
_LONGEST_TEXT = 200_000
"""Characters of a text output that is read as JSON; a longer one stays a text. A round number."""

logger = logger_named(__name__)


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool of the catalogue.

    Args:
        name: by which workflows name it.
        description: for the planner.
        input_schema: JSON Schema of its parameters, an object.
        output_schema: JSON Schema of its output; None where it is not known.
        effect: see :data:`Effect`.
        function: is called with the parameters by name; a coroutine function, or one that runs in a thread.
    """

    name: str
    description: str
    input_schema: Schema
    output_schema: Schema | None
    effect: Effect
    function: Callable[..., Any]

    async def call(self, arguments: Mapping[str, Any], threads: Threads) -> Any:
        """Call the tool and return its output. A sync function runs in a thread.

        A thread cannot be ended: a call that hangs is left behind in it, and what it gives late is dropped.
        """
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**arguments)
        return await threads.run(partial(_called, self.function, arguments))


def _called(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function in a thread; StopIteration would never reach who waits for it."""
    try:
        return function(**arguments)
    except StopIteration as error:
        raise RuntimeError(f"StopIteration: {error}") from error


def as_json(value: Any) -> Any:
    """Return a tool's output as JSON's types; text that is a JSON or Python object or list is read as one.

    Raises ValueError: JSON cannot say it, or it contains NaN, an infinity or itself.
    """
    value = to_jsonable_python(value)
    text = value.strip() if isinstance(value, str) else ""
    if text.startswith(("{", "[")) and len(text) <= _LONGEST_TEXT:
        for read in (json.loads, ast.literal_eval):  # mcp-server-sqlite answers with the text of a Python list
            try:
                return json.loads(json.dumps(read(text), allow_nan=False))
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                continue
    return json.loads(json.dumps(value, allow_nan=False))


def spec_of(tool: Any, effect: Effect | None = None) -> ToolSpec:
    """Describe a ``dspy.Tool``, or a function with type hints; without an effect it counts as "write", which is
    safe."""
    made = tool if isinstance(tool, dspy.Tool) else dspy.Tool(tool)
    try:
        signature = dict(inspect.signature(made.func).parameters)
    except (TypeError, ValueError):  # a builtin may have none
        signature = {}
    many = {name for name, each in signature.items() if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    parameters = {name: cast(Schema, given) for name, given in (made.args or {}).items() if name not in many}

    def is_required(name: str) -> bool:
        if name in signature:
            return signature[name].default is inspect.Parameter.empty
        # dspy keeps what an MCP server or LangChain requires in the description only.
        return "(Required)" in (made.arg_desc or {}).get(name, "") or (not many and "default" not in parameters[name])

    schema: Schema = {
        "type": "object",
        "properties": parameters,
        "required": list(filter(is_required, parameters)),
        "additionalProperties": made.has_kwargs,
    }
    description = " ".join(str(made.desc or "").split())
    # Arguments were checked before: dspy's own check of a server's schema may take for ever.
    made = made.model_copy(update={"args": {name: {} for name in made.args or {}}})
    function = made.acall if inspect.iscoroutinefunction(made.func) else made
    return ToolSpec(str(made.name), description, schema, _returned(made.func), effect or "write", function)


def _returned(function: Callable[..., Any]) -> Schema | None:
    try:
        hint = inspect.signature(function, eval_str=True).return_annotation
        if hint in (inspect.Signature.empty, Any, None):
            return None
        schema = TypeAdapter(hint).json_schema()
    except Exception:  # a hint that pydantic cannot describe says nothing
        return None
    # Text may be read as JSON (see as_json), so that its type is not known before.
    return None if "string" in types_of(schema) else schema


def spec_of_mcp(session: Any, tool: Any, effect: Effect | None = None) -> ToolSpec:
    """Describe a tool of an MCP session by its own specification, which ``dspy.Tool`` does not keep."""

    async def call(**arguments: Any) -> Any:
        return await call_mcp(session, tool.name, arguments)

    hints = tool.annotations
    annotated: Effect = "write"
    if hints is not None and (hints.readOnlyHint or hints.idempotentHint):
        annotated = "read" if hints.readOnlyHint else "idempotent"
    description = " ".join((tool.description or "").split())
    return ToolSpec(tool.name, description, tool.inputSchema, tool.outputSchema, effect or annotated, call)


async def tools_of(session: Any) -> list[Any]:
    """List the tools of an MCP session, of all its pages."""
    page = await session.list_tools()
    tools = list(page.tools)
    for _ in range(MOST_PAGES):
        cursor = getattr(page, "nextCursor", None)
        if not cursor:
            return tools
        page = await session.list_tools(cursor)
        tools += page.tools
    raise RuntimeError(f"{type(session).__name__} lists more than {MOST_PAGES} pages of tools, expected an end.")


async def call_mcp(session: Any, name: str, arguments: Mapping[str, Any]) -> Any:
    """Call a tool of an MCP session; return its structured content, else its text; of what is no text, its kind.

    Raises RuntimeError: the server reported an error of the tool.
    """
    result = await result_of(session, name, arguments)
    if result.structuredContent is not None and not result.isError:
        return result.structuredContent
    found: list[Any] = []
    for content in result.content:
        holder = getattr(content, "resource", content)
        text, kind = getattr(holder, "text", None), getattr(holder, "mimeType", None)
        found.append(text if isinstance(text, str) else {"type": content.type, "mimeType": kind})
    if result.isError:
        raise RuntimeError("; ".join(map(str, found))[:2000] or "the server reported an error without a text")
    return found[0] if len(found) == 1 else found


async def result_of(session: Any, name: str, arguments: Mapping[str, Any]) -> Any:
    """Call a tool of an MCP session, without the SDK's own check of the output, which may take for ever."""
    if not hasattr(session, "send_request"):
        return await session.call_tool(name, arguments=dict(arguments))
    types = importlib.import_module("mcp.types")
    call = types.CallToolRequest(
        method="tools/call", params=types.CallToolRequestParams(name=name, arguments=dict(arguments))
    )
    return await session.send_request(types.ClientRequest(call), types.CallToolResult)


async def catalogue_of(
    given: Sequence[Any], effects: Mapping[str, Effect] | Effect | None = None
) -> dict[str, ToolSpec]:
    """List the tools there are now: of dspy, functions, specifications, and those of MCP sessions.

    A tool whose schema is too large or too deep is left out, with a warning that names it. ``effects`` go before a
    server's annotations.

    Raises ConfigurationError: two tools of one name, or an effect that does not exist; RuntimeError: a session did not
    list its tools in time.
    """
    known = get_args(Effect)
    for effect in effects.values() if isinstance(effects, Mapping) else filter(None, [effects]):
        if effect not in known:
            raise ConfigurationError(f"effects has {effect!r}, expected one of {known}.")

    def effect_of(name: str) -> Effect | None:
        return effects.get(name) if isinstance(effects, Mapping) else effects

    tools: list[ToolSpec] = []
    for tool in given:
        if isinstance(tool, ToolSpec):
            tools.append(tool)
        elif hasattr(tool, "list_tools"):
            try:
                with anyio.fail_after(LIST_SECONDS):
                    listed = await tools_of(tool)
            except TimeoutError:
                message = f"{type(tool).__name__} did not list its tools within {LIST_SECONDS:g} seconds."
                raise RuntimeError(message) from None
            tools += [spec_of_mcp(tool, each, effect_of(each.name)) for each in listed]
        else:
            made = tool if isinstance(tool, dspy.Tool) else dspy.Tool(tool)
            tools.append(spec_of(made, effect_of(str(made.name))))
    names = [tool.name for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(f"tools: {twice} are there more than once; give them other names.")
    catalogue = {spec.name: spec for spec in tools}
    for name, spec in list(catalogue.items()):
        if fault := fault_of_schema(spec.input_schema) or fault_of_schema(spec.output_schema):
            logger.warning("The tool %.200r is left out: %s.", name, fault)
            del catalogue[name]
    return catalogue


MOST_CHARACTERS = 2000
"""Characters of one parameter's type or notes; a round number, about 500 tokens."""
LONGEST_STUB = 20_000
"""Characters of all that is said of a tool; a round number, about 5,000 tokens."""
_DEPTH = 3
"""Levels of a type that are written out."""
_MOST_PARTS = 50
"""Fields or branches of one type that are written out, and twenty times as many types of a stub: a schema that refers
to itself has more of them than can be written."""
_TYPES = {
    "string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None", "array": "list",
    "object": "dict",
}  # fmt: skip
_SAID_BY_TYPE = {
    "type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf", "allOf", "default", "title",
    "additionalProperties", "description", "$ref", "$defs",
}  # fmt: skip
_PARTS = ("properties", "required", "items", "anyOf", "oneOf", "allOf")
_MORE_THAN_TYPES = re.compile(r'"(description|\$ref|default|minimum|pattern|required)":')
"""What parts of a schema say that their types do not show."""


def python_name(name: str) -> str:
    """Write a name as Python can: ``get-time`` as ``get_time``."""
    made = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"_{made}" if not made.isidentifier() else f"{made}_" if keyword.iskeyword(made) else made


def python_names(tools: Iterable[str]) -> dict[str, str]:
    """Name each tool as Python can: tool -> name, no two of them equal."""
    made: dict[str, str] = {}
    for tool in sorted(tools, key=lambda tool: python_name(tool) != tool):  # who has such a name keeps it
        name = python_name(tool)
        while name in made.values():
            name += "_"
        made[tool] = name
    return made


def parameters_of(spec: ToolSpec) -> list[str]:
    """List a tool's parameters in the order of its stub: what may be left out comes last, as Python wants it."""
    required = required_of(spec.input_schema)
    return sorted(properties_of(spec.input_schema), key=lambda name: name not in required)


def stub_of(spec: ToolSpec, name: str | None = None) -> str:
    """Describe a tool for a planner, as the stub of a Python function with a comment."""
    root, fields = spec.input_schema, properties_of(spec.input_schema)
    required, parts = required_of(root), iter(range(20 * _MOST_PARTS))
    parameters: list[str] = []
    notes = [" ".join(f"[{spec.effect}] {spec.description}".split())]
    for field in parameters_of(spec):
        schema = resolved(fields[field], root)
        default = (
            f" = {_cut(repr(schema['default'])) if 'default' in schema else '...'}" if field not in required else ""
        )
        kind = _type_of(schema, root, parts)
        is_plain = python_name(field) == field
        parameters.append(f"{field}: {kind}{default}" if is_plain else f"**{{{field!r}: {kind}{default}}}")
        rest = {key: value for key, value in schema.items() if key not in _SAID_BY_TYPE}
        inside = {key: schema[key] for key in _PARTS if key in schema}
        rest |= inside if _MORE_THAN_TYPES.search(json.dumps(inside)) else {}
        told = " ".join(str(schema.get("description") or "").split())
        note = f"{told} {json.dumps(rest, ensure_ascii=False) if rest else ''}".strip()
        notes += [f"{field}: {_cut(note)}"] if note else []
    others = root.get("additionalProperties")
    if others is True or (isinstance(others, dict) and others):
        parameters.append("**others: Any" if others is True else f"**others: {_type_of(others, root, parts)}")
    unsaid = {key: value for key, value in root.items() if key in ("anyOf", "oneOf", "allOf", "$ref", "$defs")}
    notes += [_cut(json.dumps(unsaid, ensure_ascii=False))] if unsaid else []
    output = spec.output_schema
    given = "" if output is None else f" -> {_type_of(output, output, parts)}"
    stub = f"def {name or python_name(spec.name)}({', '.join(parameters)}){given}: ...  # " + "\n    # ".join(notes)
    return _cut(stub, LONGEST_STUB)


def _cut(text: str, length: int = MOST_CHARACTERS) -> str:
    return text if len(text) <= length else f"{text[:length]}…"


def _type_of(given: Any, root: Schema, parts: Iterator[int], depth: int = _DEPTH) -> str:
    """Write what a schema says of a value as a Python type; ``parts`` ends where enough of the stub's is written."""
    if next(parts, None) is None:
        return "Any"
    schema = resolved(given, root)
    branches = parts_of(schema, "anyOf") or parts_of(schema, "oneOf") or parts_of(schema, "allOf")
    choices = parts_of(schema, "enum") or ([schema["const"]] if "const" in schema else [])
    if choices:
        return _cut(f"Literal[{', '.join(map(repr, choices))}]")
    if branches and depth and "properties" not in schema:
        several = islice(branches, _MOST_PARTS)
        joined = list(dict.fromkeys(_type_of(branch, root, parts, depth - 1) for branch in several))
        return _cut((" & " if "allOf" in schema and len(joined) > 1 else " | ").join(joined))
    kinds = types_of(schema) or ({"object"} if "properties" in schema else set[str]())
    fields, others, required = properties_of(schema), schema.get("additionalProperties"), required_of(schema)
    written: list[str] = []
    for kind in sorted(kinds, key=lambda kind: (kind == "null", kind)):
        if kind == "object" and fields and depth:
            inner = (
                f"{key!r}{'' if key in required else '?'}: {_type_of(field, root, parts, depth - 1)}"
                for key, field in islice(fields.items(), _MOST_PARTS)
            )
            written.append("{" + ", ".join(inner) + "}")
        elif kind == "object" and isinstance(others, dict) and others and depth:
            written.append(f"dict[str, {_type_of(others, root, parts, depth - 1)}]")
        elif kind == "array" and schema.get("items") and depth:
            written.append(f"list[{_type_of(schema['items'], root, parts, depth - 1)}]")
        else:
            written.append(_TYPES.get(kind, kind))
    return _cut(" | ".join(written)) or "Any"
