"""Plans as language models write them: straight-line Python, in which each call of a tool is a node.

Models have read far more Python than any notation of ours, so that small ones, too, write ``n1["sku"]`` where a value
comes out of an earlier call, with a third of the tokens that nodes in JSON take. The text is parsed and never run. JSON
is read, too. What a workflow cannot say is refused: a call that is lost or made twice is worse than a reply that is
asked for again.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.texts import without_surrogates
from dspy_flashevolve.evoflux.repair import closest
from dspy_flashevolve.evoflux.tools import ToolSpec, parameters_of, python_name, python_names
from dspy_flashevolve.evoflux.workflow import PARAMETERS, REFERENCE, TEXT, Node, Workflow, is_text, reference_in

LONGEST_PLAN = 20_000
"""Characters of a plan that are read, and size of all its values; a round number, forty times a long plan's."""
MOST_NODES = 100
"""Calls of a plan; a round number, far above what a question needs: a model that writes more repeats itself."""
DEEPEST = 50
"""Values inside each other; a round number."""
_MOST_PROSE = 200
"""Lines that are left out as prose, each by a parse of its own."""
_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_THOUGHTS = re.compile(r"\A.*</think>", re.DOTALL)
"""What a reasoning model thought before it answered, where its server leaves that in the reply."""
_LIST = re.compile(r"(?:[-*•]|\d+[.)])\s+(\S.*)")
_CODE = re.compile(r"\w\(|\w\s*=[^=]")
"""A line that is more than prose: a call or an assignment."""
_CONSTANTS = {"true": True, "false": False, "null": None}
"""JSON's names, as models mix them in."""
_CONVERSIONS = {"int", "float", "bool", "dict", "list"}
"""Calls of Python that stand for their argument: a schema says what type is wanted."""


class PlanError(ValueError):
    """A reply is no plan; the message names the line and says what was expected."""


def as_python(workflow: Workflow, names: Mapping[str, str] | None = None) -> str:
    """Write a workflow as a plan, in the order in which it runs, those of a cycle last; ``names`` says how Python calls
    a tool."""
    ordered = workflow.ordered()
    lines: list[str] = []
    for node in (*ordered, *(node for node in workflow.nodes if node not in ordered)):
        given = [
            f"{name}={_written(value)}" if python_name(name) == name else f"**{{{name!r}: {_written(value)}}}"
            for name, value in node.parameters.items()
        ]
        tool = (names or {}).get(node.tool) or python_name(node.tool)
        lines.append(f"{python_name(node.id)} = {tool}({', '.join(given)})")
    return "\n".join(lines)


def _written(value: Any) -> str:
    reference = reference_in(value)
    if reference is not None and python_name(reference.node) == reference.node:
        parts = (part if re.fullmatch(r"-?\d+", part, re.ASCII) else repr(part) for part in reference.path)
        return reference.node + "".join(f"[{part}]" for part in parts)
    if is_text(value):
        written = [_written(part) for part in value[TEXT]]
        return " + ".join(written if value[TEXT] and isinstance(value[TEXT][0], str) else ["''", *written])
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return "{" + ", ".join(f"{name!r}: {_written(inner)}" for name, inner in fields.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, cast("list[Any]", value))) + "]"
    return repr(value)


def read_plan(text: str, tools: Mapping[str, ToolSpec], inputs: Mapping[str, Any] | None = None) -> Workflow:
    """Read a plan: Python, in a fence or amid prose, or a list of nodes in JSON.

    A name may stand for an earlier result, a field of one, a value, or an input of the question. Texts are joined by
    ``+`` and f-strings. Of a call in an argument a node is made; of one that only reads and that an earlier line makes,
    too, that line's result is taken.

    Raises PlanError: it says something that a workflow cannot, or has no call.
    """
    if len(text) > LONGEST_PLAN:
        raise PlanError(f"the plan has {len(text):,} characters, expected at most {LONGEST_PLAN:,}")
    code = textwrap.dedent(_THOUGHTS.sub("", without_surrogates(text))).strip()
    try:
        if not _is_python(code):
            blocks = [block for block in _FENCE.findall(code) if "(" in block or "{" in block]
            if len(blocks) > 1:
                raise PlanError(f"the plan has {len(blocks)} blocks of code, expected one with all lines")
            around = _FENCE.sub("", code) if blocks else ""
            if any(re.search(rf"\b{re.escape(python_name(tool))}\(", around) for tool in tools):
                raise PlanError("the plan has calls outside of its block of code, expected one block with all lines")
            code = textwrap.dedent(blocks[0]).strip() if blocks else code
        given = _data_in(code)
        if isinstance(given, list) and given and all(isinstance(line, str) for line in given):
            code, given = "\n".join(cast("list[str]", given)), None
        _check_fields(given)
        workflow = Workflow.from_json(given) if given else _Reader(tools, inputs or {}).read(code)
        if any(_depth(node.parameters) > DEEPEST for node in workflow.nodes):
            raise PlanError(f"a value is more than {DEEPEST} levels deep")
    except ConfigurationError as error:
        raise PlanError(str(error)) from None
    except RecursionError:
        raise PlanError("the plan is nested too deeply") from None
    if not workflow.nodes:
        raise PlanError("the plan has no call, expected at least one call of a tool")
    if len(workflow.nodes) > MOST_NODES:
        raise PlanError(f"the plan has {len(workflow.nodes)} calls, expected at most {MOST_NODES}")
    return workflow


def _is_python(code: str) -> bool:
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        ast.parse(code)
        return True
    return False


def _is_open(code: str) -> bool:
    """Whether code ends inside a bracket or a text."""
    try:
        ast.parse(code)
    except SyntaxError as error:
        return "never closed" in error.msg or "unterminated" in error.msg or "unexpected EOF" in error.msg
    return False


def _data_in(code: str) -> Any:
    """Read text that is all data, JSON or as Python writes it; None where it is none."""
    for read in (json.loads, ast.literal_eval) if code.startswith(("[", "{")) else ():
        with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError):
            return json.loads(without_surrogates(json.dumps(read(code), ensure_ascii=False)))
    return None


def _check_fields(given: Any) -> None:
    """Refuse nodes in JSON that say more than is read, which would be lost, or that have numbers that are none of
    JSON."""
    nodes = cast("dict[str, Any]", given).get("nodes") if isinstance(given, dict) else given
    for node in cast("list[Any]", nodes) if isinstance(nodes, list) else []:
        fields = cast("dict[str, Any]", node) if isinstance(node, dict) else {}
        if len(PARAMETERS & fields.keys()) > 1:
            raise PlanError(f"a node has {sorted(PARAMETERS & fields.keys())}, expected only 'parameters'")
        for name, value in fields.items():
            if name not in {*PARAMETERS, "id", "tool", "after"} and isinstance(value, dict | list) and value:
                raise PlanError(f"a node has {name!r}, expected 'id', 'tool', 'parameters' and 'after'")
            if any(isinstance(each, int | float) and not _is_plain(each) for each in _leaves(value)):
                raise PlanError(f"{name!r} has a number that is none of JSON, or has more than 64 bits")


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for inner in cast("Iterable[Any]", value.values() if isinstance(value, dict) else value):
            yield from _leaves(inner)
    else:
        yield value


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, cast("Iterable[Any]", inner)), default=0)


class _Reader:
    """Reads one plan."""

    def __init__(self, tools: Mapping[str, ToolSpec], inputs: Mapping[str, Any]) -> None:
        self._specs = tools
        self._tools = {name: tool for tool, name in python_names(tools).items()} | {name: name for name in tools}
        self._values: dict[str, Any] = dict(inputs)
        self._words = {word for text in inputs.values() if isinstance(text, str) for word in re.findall(r"\w+", text)}
        self._nodes: list[Node] = []
        self._size = 0

    def read(self, code: str) -> Workflow:
        """Read the calls of a plan."""
        for statement in self._parsed(code).body:
            self._read(statement)
        return Workflow(tuple(self._nodes))

    def _parsed(self, code: str) -> ast.Module:
        """Parse the plan, without the lines of prose and the marks of a list."""
        lines = code.replace("\r\n", "\n").split("\n")
        for _ in range(_MOST_PROSE):
            try:
                return ast.parse("\n".join(lines))
            except SyntaxError as error:
                number = min(error.lineno or 1, len(lines)) - 1
                line = lines[number].strip()
                bare = line.strip("`")
                bare = (item.group(1) if (item := _LIST.fullmatch(bare)) else bare).strip("`").strip()
                is_inside = _is_open("\n".join(lines[:number]))
                if bare and bare != lines[number] and not is_inside:
                    lines[number] = bare
                elif not line or is_inside or _CODE.search(line):
                    raise PlanError(f"line {number + 1}, {line[:200]!r}, is no Python: {error.msg}") from None
                else:
                    lines[number] = ""
            except (ValueError, MemoryError) as error:
                raise PlanError(f"the plan is no Python: {error}") from None
        raise PlanError("the plan is prose, expected lines of Python, each a call of a tool")

    def _read(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if len(names) != len(targets):
                raise self._refused(statement, "a result is assigned to a name")
            value = self._value(statement.value, names[0])
            self._values |= dict.fromkeys(names, value)
        elif isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            name = statement.target
            added = ast.BinOp(ast.Name(name.id), statement.op, statement.value)
            self._values[name.id] = self._value(ast.fix_missing_locations(ast.copy_location(added, statement)), name.id)
        elif isinstance(statement, ast.Expr):
            value = statement.value
            while isinstance(value, ast.UnaryOp):  # the dash of a list, "- find(...)", or two
                value = value.operand
            written = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
            if any(isinstance(each, ast.Dict) for each in written):
                raise self._refused(statement, "calls are lines of Python, or all of them nodes in JSON")
            if not isinstance(value, ast.Constant | ast.Name):
                self._value(value, "")
        elif isinstance(statement, ast.Return) and statement.value is not None:
            self._value(statement.value, "")
        elif isinstance(statement, ast.Try):
            for handler in statement.handlers:
                self._leave_out(handler)
            for inner in (*statement.body, *statement.orelse, *statement.finalbody):
                self._read(inner)
        else:
            self._leave_out(statement)

    def _leave_out(self, place: ast.stmt | ast.ExceptHandler) -> None:
        """Leave out what does nothing that a workflow has; refuse what calls a tool, sets a name or ends the plan."""
        for inner in ast.walk(place):
            is_call = isinstance(inner, ast.Call) and not (
                isinstance(inner.func, ast.Name)
                and inner.func.id not in self._tools
                and hasattr(builtins, inner.func.id)
            )
            is_set = isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
            is_set = is_set and not isinstance(place, ast.AnnAssign)  # "Note: text" sets nothing
            if is_call or is_set or isinstance(inner, ast.Raise | ast.Return | ast.Break | ast.Continue | ast.Assert):
                raise self._refused(place, "a plan has calls of tools only, no loops, conditions or functions")

    def _value(self, given: ast.expr, name: str | None = None) -> Any:
        """Read an expression as a parameter's value, with references; of calls in it nodes are made.

        ``name`` is that of the result that a line assigns; empty where it assigns none, None inside another expression.
        """
        if isinstance(given, ast.Await):
            return self._value(given.value, name)
        if isinstance(given, ast.Call):
            return self._called(given, name)
        if isinstance(given, ast.Constant) and _is_plain(given.value):
            return without_surrogates(given.value) if isinstance(given.value, str) else given.value
        if isinstance(given, ast.Name):
            if given.id in self._values or given.id in _CONSTANTS:
                return self._values.get(given.id, _CONSTANTS.get(given.id))
            # A word of the question that is like no result's name is a text without its quotes.
            is_word = given.id in self._words and closest(given.id, [node.id for node in self._nodes]) is None
            return given.id if is_word else {REFERENCE: given.id}
        if isinstance(given, ast.Attribute):
            return self._field(given, given.attr)
        if isinstance(given, ast.Subscript):
            return self._field(given, None if isinstance(given.slice, ast.Slice) else self._value(given.slice))
        if isinstance(given, ast.List | ast.Tuple | ast.Set):
            return self._sized(given, [self._value(item) for item in given.elts])
        if isinstance(given, ast.Dict) and all(isinstance(key, ast.Constant) for key in given.keys):
            keys = [without_surrogates(str(cast(ast.Constant, key).value)) for key in given.keys]
            return self._sized(given, dict(zip(keys, map(self._value, given.values), strict=True)))
        if isinstance(given, ast.JoinedStr):
            return self._sized(given, _joined(map(self._value, given.values)))
        if isinstance(given, ast.FormattedValue):
            return self._formatted(given)
        if isinstance(given, ast.BinOp) and isinstance(given.op, ast.Add):
            parts = [self._value(given.left), self._value(given.right)]
            if any(isinstance(part, str) or is_text(part) for part in parts) and not any(map(_is_number, parts)):
                return self._sized(given, _joined(parts))
        if isinstance(given, ast.UnaryOp) and isinstance(given.op, ast.USub | ast.UAdd):
            value = self._value(given.operand)
            if _is_number(value):
                return -value if isinstance(given.op, ast.USub) else value
        raise self._refused(given, "a value is written out, or is a field of an earlier result")

    def _formatted(self, given: ast.FormattedValue) -> Any:
        """Read what stands in the braces of an f-string."""
        value = self._value(given.value)
        if given.format_spec is None and given.conversion in (-1, ord("s")):
            return value
        if given.conversion == -1 and _is_plain(value):
            wanted = self._value(cast(ast.expr, given.format_spec))
            if isinstance(wanted, str) and not re.search(r"\d{4}", wanted):  # a width of millions
                with contextlib.suppress(ValueError, TypeError):
                    return format(value, wanted)
        raise self._refused(given, "a result stands in a text as it is, without a format")

    def _called(self, call: ast.Call, name: str | None) -> Any:
        function = call.func
        is_lookup = isinstance(function, ast.Attribute) and function.attr == "get" and "get" not in self._tools
        if isinstance(function, ast.Attribute) and is_lookup and len(call.args) == 1 and not call.keywords:
            return self._field(function, self._value(call.args[0]))
        if isinstance(function, ast.Attribute):  # tools.find(...) is find(...)
            owner = function.value.id if isinstance(function.value, ast.Name) else None
            is_of_tools = owner is not None and owner not in {*self._values, *sys.stdlib_module_names}
            if not is_of_tools or function.attr not in self._tools:
                raise self._refused(call, "only tools are called, and values cannot be worked on")
            called = function.attr
        elif isinstance(function, ast.Name):
            called = function.id
        else:
            raise self._refused(call, "only tools are called")
        if called not in self._tools and hasattr(builtins, called):
            is_conversion = called in _CONVERSIONS and len(call.args) == 1
            if call.keywords or not (is_conversion or called in ("str", "print")):
                raise self._refused(call, "only tools are called")
            values = [self._value(each) for each in call.args]
            return values[0] if is_conversion else self._sized(call, _joined(values))
        tool = self._tools.get(called, called)
        parameters = self._arguments(call, tool)
        since = [number for number, node in enumerate(self._nodes) if not self._reads(node.tool)]
        recent = self._nodes[since[-1] + 1 if since else 0 :]  # what was read before a write is another state
        same = (node for node in recent if (node.tool, node.parameters) == (tool, parameters))
        if name is None and self._reads(tool) and (earlier := next(same, None)) is not None:
            return {REFERENCE: earlier.id}
        if len(self._nodes) >= MOST_NODES:
            raise PlanError(f"the plan has more than {MOST_NODES} calls")
        taken = {node.id for node in self._nodes}
        wanted = python_name(name or "n")
        free = (f"{wanted}{number}" for number in range(2 if name else 1, len(taken) + 3))
        id = wanted if name and wanted not in taken else next(each for each in free if each not in taken)
        self._nodes.append(Node(id=id, tool=tool, parameters=parameters))
        return {REFERENCE: id}

    def _reads(self, tool: str) -> bool:
        return tool in self._specs and self._specs[tool].effect == "read"

    def _arguments(self, call: ast.Call, tool: str) -> dict[str, Any]:
        """Read the arguments of a call; those without names are in the order of the tool's stub."""
        names = parameters_of(self._specs[tool]) if tool in self._specs else []
        parameters: dict[str, Any] = {}
        for number, argument in enumerate(call.args):
            if isinstance(argument, ast.Starred):
                raise self._refused(call, "arguments are written one by one")
            parameters[names[number] if number < len(names) else f"argument_{number + 1}"] = self._value(argument)
        for each in call.keywords:
            if isinstance(each.value, ast.Constant) and each.value.value is ...:
                continue  # a stub's default, copied
            value = self._value(each.value)
            if each.arg is not None:
                given: dict[str, Any] = {each.arg: value}
            elif isinstance(value, dict) and reference_in(value) is None:
                given = cast("dict[str, Any]", value)
            else:
                raise self._refused(call, "arguments are written one by one")
            if given.keys() & parameters.keys():
                raise self._refused(call, f"{sorted(given.keys() & parameters.keys())} are given twice")
            parameters |= given
        return parameters

    def _field(self, place: ast.Attribute | ast.Subscript, part: Any) -> Any:
        """Read a field of an earlier result, or of a value that is written out."""
        source = place.value
        is_unknown = isinstance(source, ast.Name) and source.id not in self._values
        value = {REFERENCE: cast(ast.Name, source).id} if is_unknown else self._value(source)
        reference = reference_in(value)
        if isinstance(part, bool) or (isinstance(part, str) and "." in part):
            raise self._refused(place, "a field whose name has a dot cannot be referred to")
        if isinstance(part, str | int) and reference is not None:
            return {REFERENCE: ".".join((reference.node, *reference.path, str(part)))}
        try:
            return cast(Any, value)[part]
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

    def _refused(self, place: ast.stmt | ast.expr | ast.ExceptHandler, expected: str) -> PlanError:
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
