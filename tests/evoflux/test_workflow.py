"""The workflow: its JSON, what its check promises, and what is repaired without an LM."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspy_flashevolve import ConfigurationError
from dspy_flashevolve.engine.loop import Threads
from dspy_flashevolve.evoflux import Workflow
from dspy_flashevolve.evoflux.execution import Executor
from dspy_flashevolve.evoflux.repair import repaired
from dspy_flashevolve.evoflux.tools import Effect, ToolSpec, spec_of
from tests.evoflux.worlds import find_city, weather


def workflow(*nodes: tuple[str, str, dict[str, Any]]) -> Workflow:
    """A workflow of (identifier, tool, parameters)."""
    return Workflow.from_json([{"id": id, "tool": tool, "parameters": given} for id, tool, given in nodes])


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


async def order(city_id: int, kind: str, notes: list[str] | None = None) -> dict[str, int]:
    """Order something for a city."""
    return {"number": 5}


TOOLS: dict[str, ToolSpec] = {spec.name: spec for spec in map(spec_of, (find_city, weather, order))}
FIELDS = st.lists(st.sampled_from(["id", "number", "0"]), max_size=2)
REFERENCES = st.builds(lambda node, path: {"$ref": ".".join([node, *path])}, st.sampled_from("abc"), FIELDS)
VALUES: Any = JSON | REFERENCES
CALLS: Any = st.tuples(
    st.sampled_from([*TOOLS, "nothing"]),
    st.dictionaries(st.sampled_from(["name", "city_id", "unit", "kind", "notes", "value"]), VALUES, max_size=3),
)
WORKFLOWS: Any = st.lists(CALLS, max_size=4).map(
    lambda calls: workflow(*((id, tool, parameters) for id, (tool, parameters) in zip("abcd", calls, strict=False)))
)


@settings(deadline=None, max_examples=40)
@given(WORKFLOWS)
def test_a_workflow_comes_back_from_its_json(flow: Workflow) -> None:
    assert Workflow.from_json(flow.as_json()) == Workflow.from_json(flow.as_json()["nodes"]) == flow


@settings(deadline=None, max_examples=60)
@given(WORKFLOWS)
def test_a_workflow_that_passes_the_check_never_fails_for_a_static_reason(flow: Workflow) -> None:
    """Literal parameters, tools and the nodes' order are as they have to be: only values that came from a run fail."""
    if flow.check(TOOLS):
        return

    async def run() -> Any:
        threads = Threads(1, "test")
        try:
            return await Executor(TOOLS, lambda call: call(), threads).run(flow, final=True)
        finally:
            threads.close()

    made = asyncio.run(run())
    assert len(made.runs) == len(flow.nodes)
    for node in made.runs:
        assert node.fault not in ("tool", "size", "budget")
        bound = [path for path, _ in next(each for each in flow.nodes if each.id == node.node).references]
        is_dynamic = any(node.path[: len(path)] == path or path[: len(node.path)] == node.path for path in bound)
        assert node.fault != "arguments" or is_dynamic


@settings(deadline=None, max_examples=40)
@given(WORKFLOWS)
def test_a_repair_of_a_sound_workflow_changes_nothing_and_any_repair_ends(flow: Workflow) -> None:
    mended = repaired(flow, TOOLS, {})
    assert flow.check(TOOLS) or mended == flow


@pytest.mark.parametrize(
    ("flow", "complaint"),
    [
        (workflow(), "node '', field 'nodes': the workflow has no node"),
        (workflow(("a", "nothing", {})), "node 'a', field 'tool': there is no tool 'nothing'"),
        (workflow(("a", "weather", {})), "node 'a', field 'city_id': is required, and missing"),
        (workflow(("a", "weather", {"city_id": "7"})), "node 'a', field 'city_id': '7' is not of type 'integer'"),
        (workflow(("a", "find_city", {"name": "x", "nam": 1})), "node 'a', field 'nam': is not a field of the tool"),
        (workflow(("a", "weather", {"city_id": {"$ref": "b.id"}})), "node 'a', field 'city_id': there is no node 'b'"),
        (
            workflow(("b", "weather", {"city_id": 1}), ("a", "weather", {"city_id": {"$ref": "b"}})),
            "node 'a', field 'city_id': {'$ref': 'b'} is object, expected integer",
        ),
        (
            workflow(("a", "weather", {"city_id": {"$ref": "b"}}), ("b", "weather", {"city_id": 1})),
            "node 'a', field 'city_id': there is no node 'b' before it, but []",
        ),
        (
            workflow(("a", "order", {"city_id": 1, "kind": "x", "notes": ["a", 3]})),
            "node 'a', field 'notes': ['a', 3] is not valid under any of the given schemas",
        ),
    ],
)
def test_a_complaint_names_node_and_field(flow: Workflow, complaint: str) -> None:
    assert any(str(each).startswith(complaint) for each in flow.check(TOOLS)), flow.check(TOOLS)


A = {"id": "a", "tool": "x"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (5, "no list"), ({"node": []}, "no list"), ({"nodes": [5]}, "nodes|0"), ([{"tool": 5}], "id"),
        ([A | {"parameters": []}], "parameters"), ([A | {"parameters": {"$ref": "b"}}], "a value for each name"),
        ([A | {"id": "a b"}], "'a b' is no identifier"), ([A, A], "several nodes"), ([A | {"after": ["b"]}], "after"),
    ],
)  # fmt: skip
def test_what_has_not_the_shape_of_a_workflow_is_refused_with_the_place(data: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Workflow.from_json(data)


def spec(name: str, *required: str, effect: Effect = "read") -> ToolSpec:
    schema = {"type": "object", "properties": {key: {"type": "string"} for key in required}, "required": list(required)}
    return ToolSpec(name, "", schema, None, effect, lambda **given: "ok")


QUERIES = {
    each.name: each
    for each in (
        spec("read_query", "query"), spec("write_query", "query"), spec("list_tables"),
        spec("git_status", "repo"), spec("git_commit", "repo", "message"), spec("reset", effect="write"),
    )
}  # fmt: skip


@pytest.mark.parametrize(
    ("tool", "parameters", "meant"),
    [
        ("write", {"query": "UPDATE"}, "write_query"),
        ("get_read_query", {"query": "SELECT"}, "read_query"),
        ("git", {"repo": "r", "message": "m"}, "git_commit"),
        ("git", {"repo": "r"}, "git"),
        ("run_query", {"query": "UPDATE"}, "run_query"),
        ("list_table", {}, "list_tables"),
        ("resets", {}, "reset"),
        ("set", {"value": 1}, "set"),
    ],
)
def test_a_tool_is_named_right_without_an_lm_only_where_one_is_meant_and_never_by_its_name_alone_to_write(
    tool: str, parameters: dict[str, Any], meant: str
) -> None:
    node = repaired(workflow(("a", tool, parameters)), QUERIES, {}).nodes[0]
    assert node.tool == meant
    assert set(node.parameters) >= set(parameters)
