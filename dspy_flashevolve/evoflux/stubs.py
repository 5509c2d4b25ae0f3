"""Tools as a planner sees them: stubs of Python functions, a fraction of the tokens of their JSON Schemas."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from dspy_flashevolve.evoflux.schemas import Schema, parts_of, properties_of, required_of, resolved, types_of
from dspy_flashevolve.evoflux.tools import ToolSpec

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
    """Describe a tool for a planner, as the stub of a Python function with a comment.

    Args:
        name: how Python calls it; default as :func:`python_name` says.
    """
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
