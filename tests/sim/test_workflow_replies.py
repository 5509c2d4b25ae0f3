"""The simulated planner of Evoflux: which steps it writes, and which nodes it cites."""

from __future__ import annotations

from typing import Any

from dspy_flashevolve.sim.reply_model import Choices
from dspy_flashevolve.sim.workflow_replies import FLAWS, workflow_fields

QUESTION = 'Do it.\nStep find: find_city {"name": "Oslo"}\nStep now: weather {"city_id": {"$ref": "find.id"}}'
RIGHT = {
    "find": {"id": "find", "tool": "find_city", "parameters": {"name": "Oslo"}, "after": []},
    "now": {"id": "now", "tool": "weather", "parameters": {"city_id": {"$ref": "find.id"}}, "after": []},
}


def _nodes(seed: int, names: list[str], **inputs: str) -> list[dict[str, Any]]:
    fields = workflow_fields({"question": QUESTION, "tools": "find_city, weather", **inputs}, names, Choices(seed, ""))
    assert fields is not None
    return fields["nodes"]


def test_a_plan_has_the_questions_steps_in_order_and_each_is_flawed_at_the_known_rate() -> None:
    flawed = 0
    for seed in range(400):
        nodes = _nodes(seed, ["nodes"])
        assert [node["id"] for node in nodes] == ["find", "now"]
        flawed += sum(node != RIGHT[node["id"]] for node in nodes)
    assert abs(flawed / 800 - FLAWS) < 0.06


def test_a_flaw_is_one_wrong_name_of_a_tool_or_of_a_parameter() -> None:
    for seed in range(50):
        for node in _nodes(seed, ["nodes"]):
            right = RIGHT[node["id"]]
            assert (node["tool"] != right["tool"]) + (node["parameters"] != right["parameters"]) <= 1
            assert list(node["parameters"].values()) == list(right["parameters"].values())


def test_an_edit_writes_only_the_steps_that_the_feedback_complains_of() -> None:
    feedback = "node 'find': {\"id\": 7}\ncheck: node 'now', parameter city: not known"
    assert [node["id"] for node in _nodes(0, ["nodes", "removed"], feedback=feedback)] == ["now"]
    assert [node["id"] for node in _nodes(0, ["nodes", "removed"], feedback="nothing ran")] == ["find", "now"]


def test_an_answer_cites_the_nodes_that_ran_and_tells_what_they_returned() -> None:
    evidence = 'find | find_city | {"id": 7}\nnow | weather | DID NOT RUN: it hangs'
    fields = workflow_fields({"evidence": evidence}, ["answer", "citations"], Choices(0, ""))
    assert fields == {"answer": 'find: {"id": 7}', "citations": ["find"]}


def test_other_prompts_are_not_its_own() -> None:
    assert workflow_fields({"question": QUESTION}, ["nodes"], Choices(0, "")) is None
    assert workflow_fields({"tools": "find_city"}, ["answer"], Choices(0, "")) is None
