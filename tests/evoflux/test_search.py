"""The search's decisions: what it repairs, asks for and scores."""

from __future__ import annotations

from tests.evoflux.test_program import ask
from tests.evoflux.worlds import ScriptedPlanner


def test_a_check_of_the_goal_chooses_between_workflows_that_run() -> None:
    def say(number: int) -> int:
        return number

    plan = {"nodes": [{"id": "a", "tool": "say", "parameters": {"number": 1}}]}
    edits = [[{"id": "a", "tool": "say", "parameters": {"number": number}}] for number in (2, 3, 4)]
    made = ask(ScriptedPlanner([plan], edits), [say], "read", checks=[lambda outputs: outputs["a"] == 3])
    assert made.execution.outputs == {"a": 3}


def test_an_async_search_begins_with_as_many_plans_as_its_width() -> None:
    plans = [{"nodes": [{"id": "a", "tool": "never", "parameters": {"number": number}}]} for number in range(9)]

    def never(number: int) -> int:
        raise ValueError("no")

    def firsts(width: int) -> list[str]:
        planner = ScriptedPlanner(list(plans), [[]])
        ask(planner, [never], "read", width=width, max_candidates=width)
        return planner.asked

    assert firsts(1).count("plan") == 1
    assert firsts(3)[:3] == ["plan"] * 3


def test_an_edit_that_leaves_out_what_was_planned_ends_no_search_and_is_what_runs_in_the_end() -> None:
    def first() -> str:
        return "one"

    def second(word: str) -> str:
        if word != "right":
            raise ValueError("another word")
        return "two"

    plan = "a = first()\nb = second(word='wrong')"
    dropped, mended = "a = first()", "a = first()\nb = second(word='right')"
    for edits, nodes in (([dropped, mended], 2), ([dropped], 1)):
        made = ask(ScriptedPlanner([plan], edits), [first, second], "read")
        assert made.execution.is_complete
        assert made.is_complete == (nodes == 2)
        assert len(made.workflow.nodes) == nodes
