"""A repair that may lose what the planner meant is left to an LM."""

from __future__ import annotations

from typing import Any

import pytest

from dspy_flashevolve.evoflux import ToolSpec
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


def writing(name: str) -> ToolSpec:
    return ToolSpec(name, "", {"type": "object", "properties": {}}, None, "write", lambda **given: "ok")


def test_a_name_alone_is_not_enough_to_write() -> None:
    tools = {"reset": writing("reset")}
    assert Repairer(tools).repaired(workflow(("a", "set", {"value": 1}))).nodes[0].tool == "set"
    assert Repairer(tools).repaired(workflow(("a", "resets", {}))).nodes[0].tool == "reset"
