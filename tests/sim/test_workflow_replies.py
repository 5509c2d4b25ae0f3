"""The simulated planner of Evoflux: which steps it writes, and which nodes it cites."""

from __future__ import annotations

from dspy_flashevolve.sim.replies import FLAWS, workflow_fields
from dspy_flashevolve.sim.words import Choices

RIGHT = {"find": 'find = find_city(name="Oslo")', "now": 'now = weather(city_id=find["id"])'}
QUESTION = "\n".join(["Do it.", *(f"Step {line}" for line in RIGHT.values())])


def _lines(seed: int, **inputs: str) -> dict[str, str]:
    """Identifier -> line of the plan that is written."""
    fields = workflow_fields(
        {"question": QUESTION, "tools": "find_city, weather", **inputs}, ["plan"], Choices(seed, "")
    )
    assert fields is not None
    return {line.split(" = ")[0]: line for line in fields["plan"].splitlines()}


def test_a_plan_has_the_questions_steps_in_order_and_each_is_flawed_at_the_known_rate() -> None:
    flawed = 0
    for seed in range(400):
        lines = _lines(seed)
        assert list(lines) == ["find", "now"]
        flawed += sum(line != RIGHT[id] for id, line in lines.items())
    assert abs(flawed / 800 - FLAWS) < 0.06


def test_an_edit_writes_the_steps_anew_that_the_feedback_complains_of_and_keeps_the_others() -> None:
    feedback = "node 'find': {\"id\": 7}\ncheck: node 'now', parameter city: not known"
    workflow = "find = find_town(name='Oslo')\nnow = wether()"
    for seed in range(20):
        changed = _lines(seed, feedback=feedback, workflow=workflow)
        assert list(changed) == ["find", "now"]
        assert changed["find"] == "find = find_town(name='Oslo')"
        assert "wether" not in changed["now"]


def test_an_answer_cites_the_nodes_that_ran_and_tells_what_they_returned() -> None:
    evidence = 'find | find_city | {"id": 7}\nnow | weather | DID NOT RUN: it hangs'
    fields = workflow_fields({"evidence": evidence}, ["answer", "citations"], Choices(0, ""))
    assert fields == {"answer": 'find: {"id": 7}', "citations": ["find"]}
