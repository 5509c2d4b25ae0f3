"""How a planner sees tools, as stubs of Python functions, and how a plan that it writes is read: lines of Python.

Models have read far more Python than any notation of ours, so that small ones, too, write ``n1["sku"]`` where a value
comes out of an earlier call, with a third of the tokens that nodes in JSON take. The text is parsed and never run. What
a workflow cannot say is refused: a call that is lost or made twice is worse than a reply that is asked for again.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, cast

from dspy_flashevolve.engine.texts import without_surrogates
from dspy_flashevolve.evoflux.schemas import Schema, parts_of, properties_of, required_of, resolved, types_of
from dspy_flashevolve.evoflux.tools import ToolSpec
from dspy_flashevolve.evoflux.workflow import REFERENCE, TEXT, Node, Workflow, is_text, python_name, reference_in

LONGEST_PLAN = 20_000
"""Characters of a plan that are read, and size of all its values; a round number, forty times a long plan's."""
MOST_NODES = 100
"""Calls of a plan; a round number, far above what a question needs: a model that writes more repeats itself."""
DEEPEST = 50
"""Values inside each other; a round number."""
_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_THOUGHTS = re.compile(r"\A.*</think>", re.DOTALL)
"""What a reasoning model thought before it answered, where its server leaves that in the reply."""
_CONSTANTS = {"true": True, "false": False, "null": None}
"""JSON's names, as models mix them in."""
_CONVERSIONS = {"int", "float", "bool", "dict", "list"}
"""Calls of Python that stand for their argument: a schema says what type is expected."""


class PlanError(ValueError):
    """A reply is no plan; the message names the line and says what was expected."""


def read_plan(text: str, tools: Mapping[str, ToolSpec], inputs: Mapping[str, Any] | None = None) -> Workflow:
    """Read a plan, lines of Python, alone or in one fence.

    A name may stand for an earlier result, a field of one, a value, or an input of the question. Texts are joined by
    ``+`` and f-strings. Of a call in an argument a node is made.

    Raises PlanError: it says something that a workflow cannot, or has no call.
    """
    if len(text) > LONGEST_PLAN:
        raise PlanError(f"the plan has {len(text):,} characters, expected at most {LONGEST_PLAN:,}")
    code = textwrap.dedent(_THOUGHTS.sub("", without_surrogates(text))).strip()
    reader = _Reader(tools, inputs or {})
    try:
        # A whole reply that is Python has no fence, but a text in it may.
        statements = _parsed(code)
        if isinstance(statements, PlanError) and (blocks := [block for block in _FENCE.findall(code) if "(" in block]):
            if len(blocks) > 1:
                raise PlanError(f"the plan has {len(blocks)} blocks of code, expected one with all lines")
            around = _FENCE.sub("", code)
            if any(re.search(rf"\b{re.escape(python_name(tool))}\(", around) for tool in tools):
                raise PlanError("the plan has calls outside of its block of code, expected one block with all lines")
            statements = _parsed(textwrap.dedent(blocks[0]).strip())
        if isinstance(statements, PlanError):
            raise statements
        for statement in statements:
            reader.read(statement)
        if any(_depth(node.parameters) > DEEPEST for node in reader.nodes):
            raise PlanError(f"a value is more than {DEEPEST} levels deep")
    except RecursionError:
        raise PlanError("the plan is nested too deeply") from None
    if not reader.nodes:
        raise PlanError("the plan has no call, expected at least one call of a tool")
    return Workflow(tuple(reader.nodes))


def _parsed(code: str) -> list[ast.stmt] | PlanError:
    """Parse lines of Python; return the reason where they are none."""
    try:
        return ast.parse(code).body
    except SyntaxError as error:
        lines = code.split("\n")
        number = min(error.lineno or 1, len(lines))
        return PlanError(f"line {number}, {lines[number - 1].strip()[:200]!r}, is no Python: {error.msg}")
    except (ValueError, MemoryError) as error:
        return PlanError(f"the plan is no Python: {error}")


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, cast("Iterable[Any]", inner)), default=0)


class _Reader:
    """Reads the lines of one plan into ``nodes``."""

    def __init__(self, tools: Mapping[str, ToolSpec], inputs: Mapping[str, Any]) -> None:
        self._specs = tools
        self._tools = {name: tool for tool, name in python_names(tools).items()} | {name: name for name in tools}
        self._values: dict[str, Any] = dict(inputs)
        self._size = 0
        self.nodes: list[Node] = []

    def read(self, statement: ast.stmt) -> None:
        """Read a line: a call, a name that is given to a value, or an import, which does nothing."""
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if len(names) != len(targets):
                raise self._refused(statement, "a result is assigned to a name")
            self._values |= dict.fromkeys(names, self._value(statement.value, names[0]))
        elif isinstance(statement, ast.Expr):
            if isinstance(statement.value, ast.Call):
                self._call(statement.value, "")
            elif not isinstance(statement.value, ast.Constant | ast.Name):
                raise self._refused(statement, "a line is a call of a tool, or assigns a value to a name")
        elif not isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass):
            raise self._refused(statement, "a plan has calls of tools only, no loops, conditions or functions")

    def _value(self, place: ast.expr, name: str = "") -> Any:
        """Read an expression as a parameter's value, with references; of calls in it nodes are made.

        ``name`` is that of the result that a line assigns; empty where it assigns none.
        """
        if isinstance(place, ast.Call):
            return self._call(place, name)
        if isinstance(place, ast.Constant) and _is_plain(place.value):
            return without_surrogates(place.value) if isinstance(place.value, str) else place.value
        if isinstance(place, ast.Name):
            return self._values.get(place.id, _CONSTANTS.get(place.id, {REFERENCE: place.id}))
        if isinstance(place, ast.Attribute):
            return self._field(place, place.attr)
        if isinstance(place, ast.Subscript):
            return self._field(place, None if isinstance(place.slice, ast.Slice) else self._value(place.slice))
        if isinstance(place, ast.List | ast.Tuple):
            return self._sized(place, [self._value(item) for item in place.elts])
        if isinstance(place, ast.Dict) and all(isinstance(key, ast.Constant) for key in place.keys):
            keys = [without_surrogates(str(cast(ast.Constant, key).value)) for key in place.keys]
            return self._sized(place, dict(zip(keys, map(self._value, place.values), strict=True)))
        if isinstance(place, ast.JoinedStr):
            return self._sized(place, _joined(map(self._value, place.values)))
        if isinstance(place, ast.FormattedValue):
            if place.format_spec is not None or place.conversion not in (-1, ord("s")):
                raise self._refused(place, "a result stands in a text as it is, without a format")
            return self._value(place.value)
        if isinstance(place, ast.BinOp) and isinstance(place.op, ast.Add):
            parts = [self._value(place.left), self._value(place.right)]
            if any(isinstance(part, str) or is_text(part) for part in parts) and not any(map(_is_number, parts)):
                return self._sized(place, _joined(parts))
        if isinstance(place, ast.UnaryOp) and isinstance(place.op, ast.USub | ast.UAdd):
            value = self._value(place.operand)
            if _is_number(value):
                return -value if isinstance(place.op, ast.USub) else value
        raise self._refused(place, "a value is written out, or is a field of an earlier result")

    def _call(self, call: ast.Call, name: str) -> Any:
        function = call.func.id if isinstance(call.func, ast.Name) else ""
        if not function:
            raise self._refused(call, "only tools are called, and values cannot be worked on")
        if function not in self._tools and hasattr(builtins, function):
            is_conversion = function in _CONVERSIONS and len(call.args) == 1
            if call.keywords or not (is_conversion or function in ("str", "print")):
                raise self._refused(call, "only tools are called")
            values = [self._value(each) for each in call.args]
            return values[0] if is_conversion else self._sized(call, _joined(values))
        tool = self._tools.get(function, function)
        parameters = self._arguments(call, tool)
        if len(self.nodes) >= MOST_NODES:
            raise PlanError(f"the plan has more than {MOST_NODES} calls")
        first, taken = python_name(name or "n"), {node.id for node in self.nodes}
        numbered = (f"{first}{number}" for number in range(2 if name else 1, len(taken) + 3))
        id = first if name and first not in taken else next(each for each in numbered if each not in taken)
        self.nodes.append(Node(id=id, tool=tool, parameters=parameters))
        return {REFERENCE: id}

    def _arguments(self, call: ast.Call, tool: str) -> dict[str, Any]:
        """Read the arguments of a call; those without names are in the order of the tool's stub."""
        names = _parameters_of(self._specs[tool]) if tool in self._specs else []
        parameters: dict[str, Any] = {}
        for number, argument in enumerate(call.args):
            if isinstance(argument, ast.Starred):
                raise self._refused(call, "arguments are written one by one")
            parameters[names[number] if number < len(names) else f"argument_{number + 1}"] = self._value(argument)
        for keyword in call.keywords:
            value = self._value(keyword.value)
            if keyword.arg is None and (not isinstance(value, dict) or reference_in(value) is not None):
                raise self._refused(call, "arguments are written one by one")
            added = {keyword.arg: value} if keyword.arg is not None else cast("dict[str, Any]", value)
            if repeated := sorted(added.keys() & parameters.keys()):
                raise self._refused(call, f"{repeated} are given twice")
            parameters |= added
        return parameters

    def _field(self, place: ast.Attribute | ast.Subscript, part: Any) -> Any:
        """Read a field of an earlier result, or of a value that is written out."""
        value = self._value(place.value)
        reference = reference_in(value)
        if isinstance(part, bool) or (isinstance(part, str) and "." in part):
            raise self._refused(place, "a field whose name has a dot cannot be referred to")
        if isinstance(part, str | int) and reference is not None:
            return {REFERENCE: ".".join((reference.node, *reference.path, str(part)))}
        try:
            return value[part]
        except (KeyError, IndexError, TypeError):
            raise self._refused(place, "a field is named by a text or a number") from None

    def _sized(self, place: ast.expr, value: Any) -> Any:
        """Return a value, unless all values of the plan become too large: ``s = s + s`` doubles with each line."""
        pending = [value]
        while pending and self._size <= LONGEST_PLAN:
            each = pending.pop()
            self._size += len(each) if isinstance(each, str | list | dict) else 1
            pending += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        if pending or self._size > LONGEST_PLAN:
            raise self._refused(place, f"all values together have at most {LONGEST_PLAN:,} characters")
        return value

    def _refused(self, place: ast.stmt | ast.expr, expected: str) -> PlanError:
        try:
            text = ast.unparse(place)
        except (RecursionError, ValueError):
            text = type(place).__name__
        return PlanError(f"line {place.lineno}, {text[:200]!r}: {expected}")


def _is_plain(value: object) -> bool:
    """Whether JSON has a constant of Python, too."""
    return value is None or isinstance(value, str | bool) or _is_number(value)


def _is_number(value: object) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and value.bit_length() <= 64  # larger ones are no longer numbers of JSON
    return isinstance(value, float) and math.isfinite(value)


def _joined(parts: Iterable[Any]) -> Any:
    """Join texts and references into one text."""
    flat: list[Any] = []
    for part in parts:
        for each in part[TEXT] if is_text(part) else [part]:
            if reference_in(each) is None and not isinstance(each, str):
                each = json.dumps(each, ensure_ascii=False)
            if flat and isinstance(flat[-1], str) and isinstance(each, str):
                flat[-1] += each
            else:
                flat.append(each)
    return {TEXT: flat} if any(not isinstance(each, str) for each in flat) else "".join(flat)


# Stubs

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


def python_names(tools: Iterable[str]) -> dict[str, str]:
    """Name each tool as Python can: tool -> name, no two of them equal."""
    names: dict[str, str] = {}
    for tool in sorted(tools, key=lambda tool: python_name(tool) != tool):  # who has such a name keeps it
        name = python_name(tool)
        while name in names.values():
            name += "_"
        names[tool] = name
    return names


def _parameters_of(spec: ToolSpec) -> list[str]:
    """List a tool's parameters in the order of its stub: what may be left out comes last, as Python demands."""
    required = required_of(spec.input_schema)
    return sorted(properties_of(spec.input_schema), key=lambda name: name not in required)


def stub_of(spec: ToolSpec, name: str) -> str:
    """Describe a tool for a planner, as the stub of a Python function of a name, with a comment."""
    root, fields = spec.input_schema, properties_of(spec.input_schema)
    required, parts = required_of(root), iter(range(20 * _MOST_PARTS))
    parameters: list[str] = []
    notes = [" ".join(f"[{spec.effect}] {spec.description}".split())]
    for field in _parameters_of(spec):
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
        description = " ".join(str(schema.get("description") or "").split())
        note = f"{description} {json.dumps(rest, ensure_ascii=False) if rest else ''}".strip()
        notes += [f"{field}: {_cut(note)}"] if note else []
    others = root.get("additionalProperties")
    if others is True or (isinstance(others, dict) and others):
        parameters.append("**others: Any" if others is True else f"**others: {_type_of(others, root, parts)}")
    unsaid = {key: value for key, value in root.items() if key in ("anyOf", "oneOf", "allOf", "$ref", "$defs")}
    notes += [_cut(json.dumps(unsaid, ensure_ascii=False))] if unsaid else []
    output = spec.output_schema
    returned = "" if output is None else f" -> {_type_of(output, output, parts)}"
    stub = f"def {name}({', '.join(parameters)}){returned}: ...  # " + "\n    # ".join(notes)
    return _cut(stub, LONGEST_STUB)


def _cut(text: str, length: int = MOST_CHARACTERS) -> str:
    return text if len(text) <= length else f"{text[:length]}…"


def _type_of(part: Any, root: Schema, parts: Iterator[int], depth: int = _DEPTH) -> str:
    """Write what a schema says of a value as a Python type; ``parts`` ends where enough of the stub's is written."""
    if next(parts, None) is None:
        return "Any"
    schema = resolved(part, root)
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
