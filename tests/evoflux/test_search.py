"""The search's decisions: what it repairs, asks for and scores."""

from __future__ import annotations

import pytest

from dspy_flashevolve.evoflux import Execution, NodeRun
from dspy_flashevolve.evoflux.program import (
    evidence,
)
from tests.evoflux.test_program import ask
from tests.evoflux.worlds import ScriptedPlanner


def test_leaving_a_planned_node_out_is_no_evidence() -> None:
    ran = Execution((NodeRun("a", "t", "ran"),))
    assert evidence(ran, planned=1) == 1
    assert evidence(ran, planned=2) == 0.5
    assert evidence(Execution((NodeRun("a", "t", "failed", fault="output"),)), planned=1) == 0.5


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


def test_an_edit_that_was_tried_before_is_told_so() -> None:
    def never(number: int) -> int:
        raise ValueError("no")

    plan = "a = never(number=1)"
    planner = ScriptedPlanner([plan], [plan, "a = never(number=2)"])
    ask(planner, [never], "read", max_candidates=2)
    asked = [each for kind, each in zip(planner.asked, planner.prompts, strict=True) if kind == "edit"]
    assert ["tried before" in each for each in asked] == [False, True]


@pytest.mark.parametrize(("own", "then"), [(0.0, 1.0), (None, 1.0), (0.3, 0.3)])
def test_further_requests_are_made_at_the_planners_own_temperature_if_it_has_one(
    own: float | None, then: float
) -> None:
    def never(number: int) -> int:
        raise ValueError("no")

    planner = ScriptedPlanner(["a = never(number=1)"], ["a = never(number=2)"])
    planner.lm.kwargs["temperature"] = own
    ask(planner, [never], "read", max_candidates=2)
    assert planner.asked[1] == "edit"
    assert planner.lm.history[1]["kwargs"]["temperature"] == then
