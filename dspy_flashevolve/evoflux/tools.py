"""A tool as a workflow sees it: its schemas, what it does to the world, and the one way in which it is called."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

import anyio
import dspy
from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.loop import Threads
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.evoflux.schemas import Schema, fault_of_schema, types_of

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
    described = tool if isinstance(tool, dspy.Tool) else dspy.Tool(tool)
    try:
        signature = dict(inspect.signature(described.func).parameters)
    except (TypeError, ValueError):  # a builtin may have none
        signature = {}
    many = {name for name, each in signature.items() if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    parameters = {name: cast(Schema, schema) for name, schema in (described.args or {}).items() if name not in many}

    def is_required(name: str) -> bool:
        if name in signature:
            return signature[name].default is inspect.Parameter.empty
        # dspy keeps what an MCP server or LangChain requires in the description only.
        return "(Required)" in (described.arg_desc or {}).get(name, "") or (
            not many and "default" not in parameters[name]
        )

    schema: Schema = {
        "type": "object",
        "properties": parameters,
        "required": list(filter(is_required, parameters)),
        "additionalProperties": described.has_kwargs,
    }
    description = " ".join(str(described.desc or "").split())
    # Arguments were checked before: dspy's own check of a server's schema may take for ever.
    described = described.model_copy(update={"args": {name: {} for name in described.args or {}}})
    function = described.acall if inspect.iscoroutinefunction(described.func) else described
    return ToolSpec(str(described.name), description, schema, _returned(described.func), effect or "write", function)


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
    contents: list[Any] = []
    for content in result.content:
        holder = getattr(content, "resource", content)
        text, kind = getattr(holder, "text", None), getattr(holder, "mimeType", None)
        contents.append(text if isinstance(text, str) else {"type": content.type, "mimeType": kind})
    if result.isError:
        raise RuntimeError("; ".join(map(str, contents))[:2000] or "the server reported an error without a text")
    return contents[0] if len(contents) == 1 else contents


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
    tools: Sequence[Any], effects: Mapping[str, Effect] | Effect | None = None
) -> dict[str, ToolSpec]:
    """List the tools there are now: of dspy, functions, specifications, and those of MCP sessions.

    A tool whose schema is too large or too deep is left out, with a warning that names it. ``effects`` go before a
    server's annotations.

    Raises ConfigurationError: two tools of one name, or an effect that does not exist; RuntimeError: a session did not
    list its tools in time.
    """
    for effect in effects.values() if isinstance(effects, Mapping) else filter(None, [effects]):
        if effect not in get_args(Effect):
            raise ConfigurationError(f"effects has {effect!r}, expected one of {get_args(Effect)}.")

    def effect_of(name: str) -> Effect | None:
        return effects.get(name) if isinstance(effects, Mapping) else effects

    specs: list[ToolSpec] = []
    for tool in tools:
        if isinstance(tool, ToolSpec):
            specs.append(tool)
        elif hasattr(tool, "list_tools"):
            try:
                with anyio.fail_after(LIST_SECONDS):
                    listed = await tools_of(tool)
            except TimeoutError:
                message = f"{type(tool).__name__} did not list its tools within {LIST_SECONDS:g} seconds."
                raise RuntimeError(message) from None
            specs += [spec_of_mcp(tool, each, effect_of(each.name)) for each in listed]
        else:
            described = tool if isinstance(tool, dspy.Tool) else dspy.Tool(tool)
            specs.append(spec_of(described, effect_of(str(described.name))))
    names = [spec.name for spec in specs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigurationError(f"tools: {repeated} are there more than once; give them other names.")
    catalogue: dict[str, ToolSpec] = {}
    for spec in specs:
        if fault := fault_of_schema(spec.input_schema) or fault_of_schema(spec.output_schema):
            logger.warning("The tool %.200r is left out: %s.", spec.name, fault)
        else:
            catalogue[spec.name] = spec
    return catalogue
