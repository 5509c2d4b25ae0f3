"""Checks of values against schemas, beside the library jsonschema, which has no limit to its work."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from dspy_flashevolve.evoflux.schemas import fault_of_schema, faults_of, field_schema, types_of

NAMES = st.sampled_from(["a", "b", "ab"])
SCALARS = st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from([0.5, 1.0, "", "a", "ab", "b1"])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)
TYPES = st.sampled_from(["string", "number", "integer", "boolean", "null", "array", "object"])
FLAT = {
    "type": TYPES | st.lists(TYPES, min_size=1, max_size=2, unique=True),
    "enum": st.lists(VALUES, min_size=1, max_size=3), "const": VALUES,
    "pattern": st.sampled_from(["^a", "b$", "^[ab]+$", r"\d"]),
    "required": st.lists(NAMES, max_size=2, unique=True), "$ref": st.sampled_from(["#/$defs/x", "#/$defs/y"]),
}  # fmt: skip


def deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    parts, fields = st.lists(inner, min_size=1, max_size=2), st.dictionaries(NAMES, inner, max_size=2)
    nested = {"anyOf": parts, "allOf": parts, "items": inner, "properties": fields, "additionalProperties": inner}
    return st.fixed_dictionaries({}, optional=FLAT | nested)


SCHEMAS = st.recursive(st.booleans() | st.fixed_dictionaries({}, optional=FLAT), deeper, max_leaves=5)


@given(SCHEMAS, VALUES)
@settings(max_examples=100)
def test_a_value_has_faults_where_the_library_finds_some(schema: Any, value: Any) -> None:
    parts = {"x": {"type": ["string", "array"]}, "y": {"enum": [1, 2, "a"]}}
    whole = {"properties": {"v": schema}, "$defs": parts}
    assert bool(faults_of({"v": value}, whole)) != Draft202012Validator(whole).is_valid({"v": value})


JUNK = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*FLAT, "items"]), inner),
    max_leaves=9,
)


@given(
    st.dictionaries(st.sampled_from([*FLAT, "properties", "anyOf", "items", "additionalProperties", "if"]), JUNK),
    VALUES,
)
def test_a_malformed_schema_is_no_error(schema: Any, value: Any) -> None:
    faults_of(value, schema)
    types_of(schema)
    field_schema(schema, ("a", 0))
    assert fault_of_schema(schema) == ""
