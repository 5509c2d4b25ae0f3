"""JSON Schema: errors of a value, what a schema says of a field, and whether one schema's values can fit another.

Servers and outputs of tools give schemas and values, and may be hostile: the library jsonschema works without limit on
some, and its patterns backtrack. Here a check counts its steps, and patterns are matched in linear time. It knows what
a planner gets wrong; any other keyword says nothing, since a server checks its arguments itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, cast
from urllib.parse import unquote

from pydantic_core import SchemaError, SchemaValidator, core_schema

Schema = dict[str, Any]
Path = tuple[str | int, ...]
Fault = tuple[Path, str]
"""Where in a value something is wrong, and what."""

MOST_FAULTS = 20
"""Faults of a value that are listed; a round number, more than a planner mends at once."""
MOST_STEPS = 100_000
"""Values that a check looks at, with the keywords and lists of their schemas: some tenths of a second. Not tuned."""
LARGEST_SCHEMA = 100_000
"""Characters of a tool's schema as JSON; a round number, ten times the schema of a large API call."""
DEEPEST_SCHEMA = 100
"""Lists and objects of a schema inside each other: two for each level of a value, and far below Python's recursion."""
_MAX_DEPTH = 32
"""References to references that are followed; a schema that refers to itself ends there."""
_KINDS: dict[str, Any] = {
    "string": str, "number": int | float, "integer": int | float, "boolean": bool, "null": type(None), "array": list,
    "object": dict,
}  # fmt: skip
_MESSAGES = {
    "type": "{value} is not of type {expected}", "enum": "{value} is not one of {expected}",
    "const": "{expected} was expected", "pattern": "{value} does not match {expected}",
    "anyOf": "{value} is not valid under any of the given schemas", "required": "is required, and missing",
    "additionalProperties": "is not a field of the tool: it has {expected}",
}  # fmt: skip
_CLASS_STATES = 20
"""States of a class such as ``\\w``, which has the letters of all languages; not tuned."""


class TooMuchWorkError(ValueError):
    """A check came to MOST_STEPS before its end."""


class _Work:
    """Counts the steps of checks."""

    def __init__(self) -> None:
        self._steps = 0

    def count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MOST_STEPS:
            raise TooMuchWorkError(f"the check takes more than {MOST_STEPS:,} steps")


_WORK: ContextVar[_Work | None] = ContextVar("work", default=None)


@contextmanager
def limited_work() -> Generator[_Work]:
    """Count the steps of all checks in the block together; a block inside another one shares its limit."""
    work = _WORK.get() or _Work()
    token = _WORK.set(work)
    try:
        yield work
    finally:
        _WORK.reset(token)


def fault_of_schema(schema: Schema | None) -> str:
    """Say why a schema is not applied; empty where it is."""
    inner: list[Any] = [schema]
    for _ in range(DEEPEST_SCHEMA):
        values = (value.values() if isinstance(value, dict) else value for value in inner)
        inner = [child for each in values if each for child in each if isinstance(child, dict | list)]
    if inner:
        return f"its schema is more than {DEEPEST_SCHEMA} levels deep"
    size = len(json.dumps(schema, default=str))
    return f"its schema has {size:,} characters, more than {LARGEST_SCHEMA:,}" if size > LARGEST_SCHEMA else ""


def faults_of(value: Any, schema: Schema, opaque: Sequence[Path] = ()) -> list[Fault]:
    """List where a value does not satisfy a JSON Schema (draft 2020-12), at most the first MOST_FAULTS.

    Nothing is said of values at ``opaque`` paths, which are not known yet, nor of what depends on them.

    Raises TooMuchWorkError: this takes too many steps.
    """
    unknown, around = set(opaque), {path[:length] for path in opaque for length in range(len(path) + 1)}
    faults: dict[Fault, None] = {}
    with limited_work() as work:
        try:
            for path, keyword, wrong, expected in _faults(value, schema, schema, (), work):
                place = path[:-1] if keyword == "required" else path
                is_unknown = any(place[:length] in unknown for length in range(len(place) + 1))
                is_unknown = is_unknown or (keyword != "required" and place in around)
                if keyword == "additionalProperties" or not is_unknown:
                    expected = sorted(expected) if keyword == "additionalProperties" else expected
                    message = _MESSAGES.get(keyword, "{value} does not satisfy {keyword}: {expected}")
                    shown = {"value": repr(wrong)[:150], "keyword": keyword, "expected": repr(expected)[:150]}
                    faults[path, message.format(**shown)] = None
                if len(faults) >= MOST_FAULTS:
                    break
        except (RecursionError, ArithmeticError) as error:
            return [((), f"the schema cannot be applied: {type(error).__name__}: {error!s:.120}")]
    return list(faults)


_Found = Iterator[tuple[Path, str, Any, Any]]


def _faults(value: Any, schema: Any, root: Schema, path: Path, work: _Work) -> _Found:
    """Yield each fault as its path, the keyword, the value there, and what was expected."""
    work.count(1)
    if schema is False:
        yield path, "false", value, "no value"
    if not isinstance(schema, dict) or not schema:
        return
    keywords = cast(Schema, schema).items()
    work.count(len(keywords) + sum(len(cast("list[Any]", part)) for _, part in keywords if isinstance(part, list)))

    def inside(part: Any, value: Any = value, *names: str | int) -> _Found:
        return _faults(value, part, root, (*path, *names), work)

    of, kinds = cast(Schema, schema).get, _kinds(schema)
    reference, pattern = of("$ref"), of("pattern")
    if isinstance(reference, str) and f"{reference}/".startswith("#/"):
        work.count(len(reference) // 100)
        target = _target(reference, root)
        yield from [(path, "$ref", value, reference)] if target is None else inside(target)
    if kinds and not any(_is(value, kind) for kind in kinds):
        yield path, "type", value, kinds[0] if len(kinds) == 1 else kinds
    for keyword, choices in (("enum", parts_of(schema, "enum")), ("const", [of("const")] if "const" in schema else [])):
        # In Python, unlike in JSON, True is 1.
        if choices and not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in choices):
            yield path, keyword, value, schema[keyword]
    for part in parts_of(schema, "allOf"):
        yield from inside(part)
    for keyword in ("anyOf", "oneOf"):
        if (parts := parts_of(schema, keyword)) and all(next(inside(part), None) is not None for part in parts):
            yield path, "anyOf", value, parts
    if isinstance(pattern, str) and isinstance(value, str) and _matches(pattern, value, work) is False:
        yield path, "pattern", value, pattern
    if isinstance(value, list):
        first = len(parts_of(schema, "prefixItems"))
        for place, item in enumerate(cast("list[Any]", value)[first:], first):
            yield from inside(of("items", True), item, place)
    if isinstance(value, dict):
        fields, named = cast("dict[str, Any]", value), _object(schema, "properties")
        for name in required_of(schema):
            if name not in fields:
                yield (*path, name), "required", value, name
        others = True if "patternProperties" in schema else of("additionalProperties", True)
        for name, field in fields.items():
            if name not in named and others is False:
                yield (*path, name), "additionalProperties", field, named
            else:
                yield from inside(named.get(name, others), field, name)


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """The names of the types in ``type``; none where one of them is unknown."""
    kinds = schema.get("type")
    names = cast("list[Any]", kinds if isinstance(kinds, list) else [kinds])
    return names if all(isinstance(name, str) and name in _KINDS for name in names) else []


def _is(value: Any, kind: str) -> bool:
    is_kind = isinstance(value, _KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool))
    return is_kind and (kind != "integer" or value == value // 1)


def _matches(pattern: str, text: str, work: _Work) -> bool | None:
    """Whether a pattern is found in a text; None where it is none that is matched in linear time.

    The engine is Rust's, by pydantic: its time is the product of the text's length and the pattern's states.
    """
    states = len(pattern) + sum(int(count[:9]) for count in re.findall(r"\d+", pattern))
    states *= _CLASS_STATES if re.search(r"\\[wWdDsSpP]", pattern) else 1
    work.count(states * (len(text) + 50) // 20)  # 50 more for the making of the automaton
    matcher = _matcher(pattern)
    return None if matcher is None else matcher.isinstance_python(text)


@lru_cache(256)
def _matcher(pattern: str) -> SchemaValidator | None:
    if re.search(r"[^\w\].]\{\d", pattern):  # a group that is repeated a number of times, and in it perhaps another one
        return None
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError:  # it looks around or back, or is of another language
        return None


def _object(schema: Mapping[str, Any], keyword: str) -> dict[str, Any]:
    """The value of a keyword that has to be an object; empty where it is none."""
    value = schema.get(keyword)
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def parts_of(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    """Return the value of a keyword that has to be a list; empty where it is none."""
    value = schema.get(keyword)
    return cast("list[Any]", value) if isinstance(value, list) else []


def required_of(schema: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields that an object must have."""
    return [name for name in parts_of(schema, "required") if isinstance(name, str)]


def properties_of(schema: Schema | None) -> dict[str, Schema]:
    """Return the named fields of an object's schema; empty where it says none. A field may be anything by ``true``."""
    fields = _object(schema or {}, "properties")
    return {name: cast(Schema, field) if isinstance(field, dict) else {} for name, field in fields.items()}


def field_schema(schema: Schema, path: Path) -> Schema | str:
    """Return what a schema says of the value at a path: its schema, ``{}`` for nothing, or why it cannot exist.

    >>> rows = {"type": "object", "properties": {"rows": {"type": "array", "items": {"type": "integer"}}}}
    >>> field_schema(rows, ("rows", 0)), field_schema(rows, ("row",))
    ({'type': 'integer'}, "has no field 'row', but ['rows']")
    """
    place = resolved(schema, schema)
    for part in path:
        kinds, fields = types_of(place), properties_of(place)
        # A schema that names its fields means these, unless it says that there may be others.
        others = place.get("additionalProperties", not fields)
        if re.fullmatch(r"-?\d+", str(part), re.ASCII) and "array" in (kinds or {"array"}):
            place = resolved(place.get("items", {}), schema)
        elif kinds and "object" not in kinds:
            return f"is of type {sorted(kinds)}, which has no {part!r}"
        elif part not in fields and others is False and "patternProperties" not in place:
            return f"has no field {part!r}, but {sorted(fields)}"
        else:
            place = resolved(fields.get(str(part), others), schema)
    return place


def resolved(schema: Any, root: Schema) -> Schema:
    """Follow references inside ``root`` from a schema to the one that they stand for; ``{}`` where there is none."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return cast(Schema, schema) if isinstance(schema, dict) else {}
        schema = _target(str(cast(Schema, schema)["$ref"]), root)
    return {}


def _target(reference: str, root: Schema) -> Any:
    """The part of a schema that a reference such as ``#/$defs/row`` names; None where it names none."""
    first, *names = reference.split("/")
    place: Any = root if first == "#" else None
    for name in names:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and name.isdecimal():
            items = cast("list[Any]", place)
            place = items[int(name)] if len(name) < 9 and int(name) < len(items) else None
        else:
            place = cast(Schema, place).get(name) if isinstance(place, dict) else None
    return place


def types_of(schema: Schema) -> set[str]:
    """Return the types that a schema allows by ``type`` or ``anyOf``; empty where it says none."""
    if schema.get("type") is not None:
        return set(_kinds(schema))
    kinds = [
        types_of(cast(Schema, part)) if isinstance(part, dict) else set[str]() for part in parts_of(schema, "anyOf")
    ]
    return set[str]().union(*kinds) if all(kinds) else set()


def can_fit(source: Schema, target: Schema) -> bool:
    """Whether some value of one schema may be one of the other, by type; True where either says nothing.

    >>> can_fit({"type": "integer"}, {"type": "number"}), can_fit({"type": "string"}, {"type": "number"})
    (True, False)
    """
    offered, accepted, numbers = types_of(source), types_of(target), {"integer", "number"}
    if not offered or not accepted or offered & accepted:
        return True
    return bool(offered & numbers and accepted & numbers)  # every integer is a number, and some numbers are integers
