"""A repair that may lose what the planner meant is left to an LM."""

from __future__ import annotations

import random
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


@pytest.mark.parametrize("given", [{}, {"repo": "r"}])
def test_no_edit_takes_a_tool_that_needs_less_where_a_parameter_is_missing(given: dict[str, Any]) -> None:
    flow = workflow(("a", "git_commit", given))
    ran = Execution(
        (NodeRun("a", "git_commit", "failed", fault="arguments", error="message: is required", path=("message",)),)
    )
    edits = list(Repairer(TOOLS).edits(flow, ran, random.Random(0)))
    assert all(edited.nodes[-1].tool == "git_commit" for edited in edits)


def test_an_edit_swaps_a_tool_that_raised_for_those_that_take_all_that_it_was_given() -> None:
    flow = workflow(("a", "git_status", {"repo": "r"}))
    ran = Execution((NodeRun("a", "git_status", "failed", fault="exception", error="no"),))
    edits = Repairer(TOOLS).edits(flow, ran, random.Random(0))
    assert {edited.nodes[-1].tool for edited in edits} == {"git_commit"}
