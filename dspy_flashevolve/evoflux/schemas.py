"""JSON Schema: errors of a value, what a schema says of a field, and whether one schema's values can fit another."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

Schema = dict[str, Any]
Path = tuple[str | int, ...]
Fault = tuple[Path, str]
"""Where in a value something is wrong, and what."""

_NO_REMOTE: Registry[Any] = Registry()
"""Resolves references inside a schema only: a server's schema must not make this process ask other hosts."""
_MAX_DEPTH = 32
"""References to references that are followed; a schema that refers to itself ends there."""


def valid_schema(schema: object) -> Schema | None:
    """Return what is a valid JSON Schema of an object's kind; None for anything else."""
    with contextlib.suppress(SchemaError):
        Draft202012Validator.check_schema(cast(Schema, schema))
        return cast(Schema, schema) if isinstance(schema, dict) else None


def faults_of(value: Any, schema: Schema, opaque: Sequence[Path] = ()) -> list[Fault]:
    """List where a value does not satisfy a schema.

    Args:
        value: of JSON's types.
        schema: a JSON Schema, draft 2020-12.
        opaque: paths of values that are not known yet: nothing is said of them, nor of what depends on them.
    """
    validator = Draft202012Validator(schema, registry=_NO_REMOTE)
    try:
        faults = [fault for error in validator.iter_errors(value) for fault in _read(error, opaque)]
    except re.error:
        return []  # a pattern of another language, as servers in JavaScript have, says nothing here
    except (Unresolvable, RecursionError, ArithmeticError, ValueError) as error:
        return [((), f"the schema cannot be applied: {type(error).__name__}: {error!s:.120}")]
    return list(dict.fromkeys(faults))  # jsonschema reports each missing field by an error of its own


def _read(error: ValidationError, opaque: Sequence[Path]) -> Iterator[Fault]:
    path: Path = tuple(error.absolute_path)
    fields = cast("dict[str, Any]", error.instance) if isinstance(error.instance, dict) else {}
    if error.validator == "required":
        if not any(path[: len(known)] == known for known in opaque):
            missing = [name for name in cast("list[str]", error.validator_value) if name not in fields]
            yield from (((*path, name), "is required, and missing") for name in missing)
    elif error.validator in ("additionalProperties", "unevaluatedProperties"):
        names = properties_of(cast("Schema", error.schema))
        message = f"is not a field of the tool: it has {sorted(names)}"
        yield from (((*path, name), message) for name in fields if name not in names)
    elif not any(known[: len(path)] == path or path[: len(known)] == known for known in opaque):
        yield path, error.message[:300]


def properties_of(schema: Schema | None) -> dict[str, Schema]:
    """Return the named fields of an object's schema; empty where it says none. A field may be anything by ``true``."""
    fields = cast("dict[str, Any]", (schema or {}).get("properties") or {})
    return {name: cast(Schema, given) if isinstance(given, dict) else {} for name, given in fields.items()}


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
    resolver = _NO_REMOTE.with_resource("", DRAFT202012.create_resource(root)).resolver()
    try:
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return cast(Schema, schema) if isinstance(schema, dict) else {}
            schema = resolver.lookup(str(cast(Schema, schema)["$ref"])).contents
    except Unresolvable:
        pass
    return {}


def types_of(schema: Schema) -> set[str]:
    """Return the types that a schema allows by ``type`` or ``anyOf``; empty where it says none."""
    given = schema.get("type")
    if given is not None:
        return {given} if isinstance(given, str) else set(cast("list[str]", given))
    branches = cast("list[Any]", schema.get("anyOf") or [])
    kinds = [types_of(cast(Schema, branch)) if isinstance(branch, dict) else set[str]() for branch in branches]
    return set[str]().union(*kinds) if all(kinds) else set()


def can_fit(given: Schema, wanted: Schema) -> bool:
    """Whether some value of one schema may be one of the other, by type; True where either says nothing.

    >>> can_fit({"type": "integer"}, {"type": "number"}), can_fit({"type": "string"}, {"type": "number"})
    (True, False)
    """
    offered, accepted, numbers = types_of(given), types_of(wanted), {"integer", "number"}
    if not offered or not accepted or offered & accepted:
        return True
    return bool(offered & numbers and accepted & numbers)  # every integer is a number, and some numbers are integers
