"""A repair that may lose what the planner meant is left to an LM."""

from __future__ import annotations

from typing import Any

import pytest

from dspy_flashevolve.evoflux import Execution, NodeRun, ToolSpec
from dspy_flashevolve.evoflux.repair import Repairer
from tests.evoflux.worlds import workflow


def spec(name: str, *required: str) -> ToolSpec:
    schema = {"type": "object", "properties": {key: {"type": "string"} for key in required}, "required": list(required)}
    return ToolSpec(name, "", schema, None, "read", lambda **given: "ok")


TOOLS = {
    each.name: each
    for each in (
        spec("read_query", "query"), spec("write_query", "query"), spec("list_tables"),
        spec("git_status", "repo"), spec("git_commit", "repo", "message"),
    )
}  # fmt: skip


@pytest.mark.parametrize(
    ("tool", "given", "meant"),
    [
        ("write", {"query": "UPDATE"}, "write_query"),
        ("get_read_query", {"query": "SELECT"}, "read_query"),
        ("git", {"repo": "r", "message": "m"}, "git_commit"),
        ("git", {"repo": "r"}, "git"),
        ("run_query", {"query": "UPDATE"}, "run_query"),
        ("list_table", {}, "list_tables"),
    ],
)
def test_a_tool_is_named_right_without_an_lm_only_where_one_is_meant(tool: str, given: Any, meant: str) -> None:
    repaired = Repairer(TOOLS).repaired(workflow(("a", tool, given)))
    assert repaired.nodes[0].tool == meant
    assert set(repaired.nodes[0].parameters) >= set(given)


def returning(name: str, *fields: str, takes: str) -> ToolSpec:
    made = spec(name, takes)
    output = {"type": "object", "properties": {key: {"type": "string"} for key in fields}, "required": list(fields)}
    return ToolSpec(name, "", made.input_schema, output, "read", made.function)


LOOKUPS = {
    each.name: each
    for each in (
        returning("find_item", "sku", takes="name"), returning("find_owner", "sku", "name", takes="name"),
        spec("order_item", "sku", "note"), spec("praise", "name"),
    )
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("tea", {"sku": "tea", "note": "tea"}, {"sku": {"$ref": "a.sku"}, "note": "tea"}),
        ("tea", {"sku": "SKU-9", "note": "soon"}, {"sku": "SKU-9", "note": "soon"}),
        ("", {"sku": "", "note": "soon"}, {"sku": "", "note": "soon"}),
    ],
)
def test_what_was_looked_up_by_a_text_is_taken_in_its_place_and_nothing_else(name: str, given: Any, taken: Any) -> None:
    repaired = Repairer(LOOKUPS).repaired(workflow(("a", "find_item", {"name": name}), ("b", "order_item", given)))
    assert repaired.nodes[1].parameters == taken


def test_a_text_that_two_tools_take_under_the_same_name_stays_a_text() -> None:
    flow = workflow(("a", "find_owner", {"name": "tea"}), ("b", "praise", {"name": "tea"}))
    assert Repairer(LOOKUPS).repaired(flow) == flow


def writing(name: str) -> ToolSpec:
    return ToolSpec(name, "", {"type": "object", "properties": {}}, None, "write", lambda **given: "ok")


def test_a_name_alone_is_not_enough_to_write() -> None:
    tools = {"reset": writing("reset")}
    assert Repairer(tools).repaired(workflow(("a", "set", {"value": 1}))).nodes[0].tool == "set"
    assert Repairer(tools).repaired(workflow(("a", "resets", {}))).nodes[0].tool == "reset"


@pytest.mark.parametrize(
    ("text", "meant"),
    [("Tea", "tea"), ("US", "US"), ("Item", {"$ref": "Item"}), ("milk", "milk"), ("Tell", "Tell")],
)
def test_what_a_tool_that_raised_was_given_is_spelled_as_the_question_does_or_is_the_result_it_names(
    text: str, meant: Any
) -> None:
    flow = workflow(("Item", "list_tables", {}), ("a", "read_query", {"query": text}))
    ran = Execution((
        NodeRun("Item", "list_tables", "ran", "ok"),
        NodeRun("a", "read_query", "failed", fault="exception", error="no"),
    ))  # fmt: skip
    repaired = Repairer(TOOLS, inputs={"question": "Tell us of tea"}).repaired_run(flow, ran)
    assert repaired.nodes[1].parameters == {"query": meant}
