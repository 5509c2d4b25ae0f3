"""Plans as language models write them: straight-line Python, in which each call of a tool is a node.

Models have read far more Python than any notation of ours, so that small ones, too, write ``n1["sku"]`` where a value
comes out of an earlier call, with a third of the tokens that nodes in JSON take. The text is parsed and never run. JSON
is read, too.
"""

from __future__ import annotations

import ast
import contextlib
import json
import keyword
import math
import re
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, cast

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.evoflux.repair import closest
from dspy_flashevolve.evoflux.schemas import Schema, field_schema, properties_of, types_of
from dspy_flashevolve.evoflux.tools import ToolSpec
from dspy_flashevolve.evoflux.workflow import REFERENCE, TEXT, Node, Workflow, reference_in

LONGEST_PLAN = 50_000
"""Characters of a plan that are read; a round number, a hundred times the length of a long one."""
_MOST_PROSE = 200
"""Lines that are left out as prose, each by a parse of its own."""
_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_LIST = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+`?(.*?)`?\s*$|^`([^`].*)`\s*$")
"""A line of a list, or in backticks: ``- n1 = find(...)``."""
_TYPES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
_SAID_BY_TYPE = {
    "type", "properties", "required", "items", "enum", "const", "anyOf", "default", "title", "additionalProperties",
    "description",
}  # fmt: skip
_CONVERSIONS = {"int", "float", "bool", "dict", "list", "print"}
"""Calls of Python that stand for their argument: a schema says what type is wanted."""


class PlanError(ValueError):
    """A reply is no plan; the message names the line and says what was expected."""


def python_name(tool: str) -> str:
    """Write the name of a tool as Python can: ``get-time`` as ``get_time``."""
    name = re.sub(r"\W", "_", tool, flags=re.ASCII)
    return f"_{name}" if not name.isidentifier() else f"{name}_" if keyword.iskeyword(name) else name


def stub_of(spec: ToolSpec) -> str:
    """Describe a tool for a planner, as the stub of a Python function with a comment."""
    fields, required = properties_of(spec.input_schema), spec.input_schema.get("required") or []
    parameters: list[str] = []
    notes = [f"[{spec.effect}] {spec.description}".strip()]
    # What has a default comes last, as Python wants it.
    for name in sorted(fields, key=lambda name: name not in required):
        schema = _followed(spec.input_schema, (name,))
        default = "" if name in required else f" = {schema['default']!r}" if "default" in schema else " = ..."
        is_plain = name.isidentifier() and not keyword.iskeyword(name)
        kind = _type_of(spec.input_schema, (name,))
        parameters.append(f"{name}: {kind}{default}" if is_plain else f"**{{{name!r}: {kind}{default}}}")
        rest = {key: value for key, value in schema.items() if key not in _SAID_BY_TYPE}
        inside = {key: schema[key] for key in ("properties", "items", "anyOf") if key in schema}
        rest |= inside if '"description"' in json.dumps(inside) else {}
        told = " ".join(str(schema.get("description") or "").split())
        note = f"{told} {json.dumps(rest, ensure_ascii=False) if rest else ''}".strip()
        notes += [f"{name}: {note}"] if note else []
    given = "" if spec.output_schema is None else f" -> {_type_of(spec.output_schema, ())}"
    return f"def {python_name(spec.name)}({', '.join(parameters)}){given}: ...  # " + "\n    # ".join(notes)


def _followed(schema: Schema, path: tuple[str | int, ...]) -> Schema:
    found = field_schema(schema, path)
    return found if isinstance(found, dict) else {}


def _type_of(root: Schema, path: tuple[str | int, ...], depth: int = 4) -> str:
    """Write what a schema says of the value at a path as a Python type."""
    schema = _followed(root, path)
    choices = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if choices:
        return f"Literal[{', '.join(map(repr, cast('list[Any]', choices)))}]"
    kinds = sorted(types_of(schema), key=lambda kind: (kind == "null", kind))
    if kinds == ["object"] and (fields := properties_of(schema)) and depth:
        inner = (f"{name!r}: {_type_of(root, (*path, name), depth - 1)}" for name in fields)
        return "{" + ", ".join(inner) + "}"
    if kinds == ["array"]:
        return f"list[{_type_of(root, (*path, 0), depth - 1)}]" if depth and schema.get("items") else "list"
    return " | ".join(_TYPES.get(kind, "list" if kind == "array" else "dict") for kind in kinds) or "Any"


def as_python(workflow: Workflow) -> str:
    """Write a workflow as a plan, in the order in which it runs, those of a cycle last.

    >>> print(as_python(Workflow.from_json([
    ...     {"id": "a", "tool": "find", "parameters": {"name": "tea"}},
    ...     {"id": "b", "tool": "price", "parameters": {"id": {"$ref": "a.rows.0.id"}}},
    ... ])))
    a = find(name='tea')
    b = price(id=a['rows'][0]['id'])
    """
    ordered = workflow.ordered()
    lines: list[str] = []
    for node in (*ordered, *(node for node in workflow.nodes if node not in ordered)):
        given = [
            f"{name}={_written(value)}"
            if name.isidentifier() and not keyword.iskeyword(name)
            else f"**{{{name!r}: {_written(value)}}}"
            for name, value in node.parameters.items()
        ]
        lines.append(f"{node.id} = {python_name(node.tool)}({', '.join(given)})")
    return "\n".join(lines)


def _written(value: Any) -> str:
    reference = reference_in(value)
    if reference is not None:
        return reference.node + "".join(f"[{part if part.isdigit() else repr(part)}]" for part in reference.path)
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        if set(fields) == {TEXT} and isinstance(fields[TEXT], list):
            parts = [_written(part) for part in fields[TEXT]]
            return " + ".join(parts if isinstance(fields[TEXT][0], str) else ["''", *parts])
        return "{" + ", ".join(f"{name!r}: {_written(inner)}" for name, inner in fields.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, cast("list[Any]", value))) + "]"
    return repr(value)


def read_plan(text: str, tools: Mapping[str, ToolSpec], inputs: Mapping[str, Any] | None = None) -> Workflow:
    """Read a plan: Python, in fences or amid prose, or a list of nodes in JSON.

    A name may stand for an earlier result, a field of one, a value, or an input of the question. Texts are joined by
    ``+`` and f-strings. Of a call in an argument a node is made, unless an earlier line is the same call.

    Raises:
        PlanError: it says something that a workflow cannot, or has no call.
    """
    text = _sendable(text)
    if len(text) > LONGEST_PLAN:
        raise PlanError(f"the plan has {len(text):,} characters, expected at most {LONGEST_PLAN:,}")
    code = textwrap.dedent("\n".join(_FENCE.findall(text)) or text).strip()
    given: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        given = json.loads(code)
    if isinstance(given, list) and all(isinstance(line, str) for line in cast("list[Any]", given)):
        code = "\n".join(cast("list[str]", given))
    try:
        workflow = Workflow.from_json(code)
    except ConfigurationError:
        workflow = _Reader(tools, inputs or {}).read(code)
    if not workflow.nodes:
        raise PlanError("the plan has no call, expected at least one call of a tool")
    return workflow


class _Reader:
    """Reads one plan.

    Args:
        tools: what may be called.
        inputs: of the question, by name.
    """

    def __init__(self, tools: Mapping[str, ToolSpec], inputs: Mapping[str, Any]) -> None:
        self._tools = {python_name(name): name for name in tools} | {name: name for name in tools}
        self._fields = {name: list(properties_of(spec.input_schema)) for name, spec in tools.items()}
        self._values: dict[str, Any] = dict(inputs)
        self._words = {word for text in inputs.values() if isinstance(text, str) for word in re.findall(r"\w+", text)}
        self._nodes: list[Node] = []

    def read(self, code: str) -> Workflow:
        """Read the calls of a plan."""
        for statement in self._parsed(code).body:
            self._read(statement)
        return Workflow(tuple(self._nodes))

    def _parsed(self, code: str) -> ast.Module:
        """Parse the plan, without the lines of prose."""
        lines = [_LIST.sub(r"\1\2", line) for line in code.splitlines()]
        for _ in range(_MOST_PROSE):
            try:
                return ast.parse("\n".join(lines))
            except SyntaxError as error:
                number = min(error.lineno or 1, len(lines)) - 1
                line = lines[number].strip()
                if isinstance(error, IndentationError) and lines[number] != line:
                    lines[number] = line
                    continue
                if not line or any(re.search(rf"\b{re.escape(name)}\s*\(", line) for name in self._tools):
                    raise PlanError(f"line {number + 1}, {line[:200]!r}, is no Python: {error.msg}") from None
                lines[number] = ""
            except (ValueError, RecursionError, MemoryError) as error:
                raise PlanError(f"the plan is no Python: {error}") from None
        raise PlanError("the plan is prose, expected lines of Python, each a call of a tool")

    def _read(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if statement.value is None:
                return
            if len(names) != len(targets):
                raise self._refused(statement, "a result is assigned to a name")
            value = self._value(statement.value, names[0])
            self._values |= dict.fromkeys(names, value)
        elif isinstance(statement, ast.Expr):
            if not isinstance(statement.value, ast.Constant | ast.Name):
                self._value(statement.value, "")
        elif isinstance(statement, ast.Return):
            if statement.value is not None:
                self._value(statement.value, "")
        elif isinstance(statement, ast.Try):
            for inner in statement.body:
                self._read(inner)
        elif any(self._is_of_a_tool(inner) for inner in ast.walk(statement)):
            raise self._refused(statement, "a plan has calls of tools only, no loops, conditions or functions")

    def _is_of_a_tool(self, place: ast.AST) -> bool:
        return isinstance(place, ast.Call) and isinstance(place.func, ast.Name) and place.func.id in self._tools

    def _value(self, given: ast.expr, name: str | None = None) -> Any:
        """Read an expression as a parameter's value, with references; of calls in it nodes are made.

        Args:
            name: of the result that a line assigns; empty where it assigns none, None inside another expression.
        """
        if isinstance(given, ast.Await):
            return self._value(given.value, name)
        if isinstance(given, ast.Call):
            return self._called(given, name)
        if isinstance(given, ast.Constant) and _is_plain(given.value):
            # A text that is an earlier result's name, and no word of the question, is that name in quotes.
            value = _sendable(given.value) if isinstance(given.value, str) else given.value
            is_name = any(node.id == value for node in self._nodes) and value not in self._words
            return {REFERENCE: value} if is_name else value
        if isinstance(given, ast.Name):
            # A word of the question that is like no result's name is a text without its quotes.
            is_text = given.id in self._words and closest(given.id, [node.id for node in self._nodes]) is None
            return self._values.get(given.id, given.id if is_text else {REFERENCE: given.id})
        if isinstance(given, ast.Attribute):
            return self._field(given, given.attr)
        if isinstance(given, ast.Subscript):
            part = self._value(given.slice) if not isinstance(given.slice, ast.Slice) else None
            return self._field(given, part)
        if isinstance(given, ast.List | ast.Tuple | ast.Set):
            return [self._value(item) for item in given.elts]
        if isinstance(given, ast.Dict) and all(isinstance(key, ast.Constant) for key in given.keys):
            keys = [str(cast(ast.Constant, key).value) for key in given.keys]
            return {key: self._value(item) for key, item in zip(keys, given.values, strict=True)}
        if isinstance(given, ast.JoinedStr):
            return _joined(map(self._value, given.values))
        if isinstance(given, ast.FormattedValue):
            return self._value(given.value)
        if isinstance(given, ast.BinOp) and isinstance(given.op, ast.Add):
            parts = [self._value(given.left), self._value(given.right)]
            if any(isinstance(part, str) or _is_text(part) for part in parts) and not any(map(_is_number, parts)):
                return _joined(parts)
        if isinstance(given, ast.UnaryOp) and isinstance(given.op, ast.USub | ast.UAdd):
            value = self._value(given.operand)
            if _is_number(value):
                return -value if isinstance(given.op, ast.USub) else value
        raise self._refused(given, "a value is written out, or is a field of an earlier result")

    def _called(self, call: ast.Call, name: str | None) -> Any:
        function = call.func
        if isinstance(function, ast.Attribute):
            if function.attr == "get" and call.args and not isinstance(function.value, ast.Constant):
                return self._field(function, self._value(call.args[0]))
            if not isinstance(function.value, ast.Name) or function.value.id in self._values:
                raise self._refused(call, "values cannot be worked on: only tools are called")
        elif not isinstance(function, ast.Name):
            raise self._refused(call, "only tools are called")
        called = function.attr if isinstance(function, ast.Attribute) else function.id  # tools.find(...) is find(...)
        tool = self._tools.get(called, called)
        if tool not in self._fields:
            if called in _CONVERSIONS and len(call.args) == 1:
                return self._value(call.args[0])
            if called in ("str", "print"):
                return _joined(map(self._value, call.args))
        fields = self._fields.get(tool, [])
        parameters: dict[str, Any] = {}
        for number, argument in enumerate(call.args):
            if isinstance(argument, ast.Starred):
                raise self._refused(call, "arguments are written one by one")
            parameters[fields[number] if number < len(fields) else f"argument_{number + 1}"] = self._value(argument)
        for each in call.keywords:
            if isinstance(each.value, ast.Constant) and each.value.value is ...:
                continue  # a stub's default, copied
            value = self._value(each.value)
            if each.arg is not None:
                parameters[each.arg] = value
            elif isinstance(value, dict) and reference_in(value) is None:
                parameters |= cast("dict[str, Any]", value)
            else:
                raise self._refused(call, "arguments are written one by one")
        same = (node for node in self._nodes if (node.tool, node.parameters) == (tool, parameters))
        if name is None and (earlier := next(same, None)) is not None:
            return {REFERENCE: earlier.id}
        taken = {node.id for node in self._nodes}
        free = (f"{name or 'n'}{number}" for number in range(1 if not name else 2, len(taken) + 3))
        id = name if name and name not in taken else next(each for each in free if each not in taken)
        self._nodes.append(Node(id=id, tool=tool, parameters=parameters))
        return {REFERENCE: id}

    def _field(self, place: ast.Attribute | ast.Subscript, part: Any) -> Any:
        """Read a field of an earlier result, or of a value that is written out."""
        source = place.value
        is_unknown = isinstance(source, ast.Name) and source.id not in self._values
        value = {REFERENCE: cast(ast.Name, source).id} if is_unknown else self._value(source)
        reference = reference_in(value)
        if isinstance(part, str | int) and reference is not None:
            return {REFERENCE: ".".join((reference.node, *reference.path, str(part)))}
        try:
            return cast(Any, value)[part]
        except (KeyError, IndexError, TypeError):
            raise self._refused(place, "a field is named by a text or a number") from None

    def _refused(self, place: ast.stmt | ast.expr, expected: str) -> PlanError:
        try:
            text = ast.unparse(place)
        except (RecursionError, ValueError):
            text = type(place).__name__
        return PlanError(f"line {place.lineno}, {text[:200]!r}: {expected}")


def _sendable(text: str) -> str:
    """Replace halves of emojis, with which no request can be sent."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _is_plain(value: object) -> bool:
    """Whether JSON has a constant of Python, too."""
    return value is None or isinstance(value, str | bool) or _is_number(value)


def _is_number(value: object) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and value.bit_length() <= 64  # larger ones are no longer numbers of JSON
    return isinstance(value, float) and math.isfinite(value)


def _is_text(value: object) -> bool:
    """Whether a value is a text that is joined once its references are known."""
    return isinstance(value, dict) and set(cast("dict[str, Any]", value)) == {TEXT}


def _joined(parts: Iterable[Any]) -> Any:
    """Join texts and references into one text."""
    flat: list[Any] = []
    for part in parts:
        for each in part[TEXT] if _is_text(part) else [part]:
            if reference_in(each) is None and not isinstance(each, str):
                each = json.dumps(each, ensure_ascii=False)
            if flat and isinstance(flat[-1], str) and isinstance(each, str):
                flat[-1] += each
            else:
                flat.append(each)
    return flat[0] if len(flat) == 1 and isinstance(flat[0], str) else {TEXT: flat}
