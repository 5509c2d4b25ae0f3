"""Evoflux as a module: used as dspy.ReAct is, its limits, what it cites, and inside another run."""

from __future__ import annotations

import anyio
import dspy
import pytest

from dspy_flashevolve import ConfigurationError
from dspy_flashevolve.evoflux import Evoflux
from dspy_flashevolve.sim.virtual import run
from tests.evoflux.worlds import GOOD, READS, TOOLS, Ledger, ScriptedPlanner, good


def ask(planner: ScriptedPlanner, tools: list = TOOLS, effects: object = READS, **options: object) -> dspy.Prediction:  # type: ignore[type-arg]
    """Ask how warm it is in Oslo, in virtual time."""
    program = Evoflux("question -> answer", tools=tools, effects=effects, **options)  # type: ignore[arg-type]
    with dspy.context(lm=planner.lm):
        return run(lambda: program.acall(question="How warm is it in Oslo?"))


def test_a_plan_that_runs_is_answered_from_what_it_gave() -> None:
    planner = ScriptedPlanner([GOOD])
    made = ask(planner)
    assert made.answer == "4 degrees"
    assert made.is_complete
    assert made.execution.outputs == {"city": {"id": 7, "country": "Norway"}, "now": {"temperature": 4.0}}
    assert planner.asked == ["plan", "answer"]
    assert made.stats.tool_calls == 2


@pytest.mark.parametrize(
    "flaw",
    [
        {"tool": "wether"},
        {"parameters": {"city_id": {"$ref": "city.city_id"}}},
        {"parameters": {"city_id": {"$ref": "town.id"}}},
        {"parameters": {}},
        {"parameters": {"city_id": "7"}},
    ],
    ids=["tool", "field", "node", "missing", "type"],
)
def test_flaws_that_schemas_and_outputs_explain_are_repaired_without_an_lm(flaw: dict[str, object]) -> None:
    planner = ScriptedPlanner([good(**flaw)])
    made = ask(planner)
    assert made.is_complete
    assert planner.asked == ["plan", "answer"]
    assert made.execution.outputs["now"] == {"temperature": 4.0}


def test_an_lm_edits_what_nothing_else_repairs_and_reads_the_feedback_of_the_run() -> None:
    planner = ScriptedPlanner([{"nodes": [{"id": "city", "tool": "find_city", "parameters": {"name": "Olso"}}]}])
    planner.edits = [[{"id": "city", "tool": "find_city", "parameters": {"name": "Oslo"}}]]
    made = ask(planner, width=1)
    assert made.is_complete
    assert planner.asked == ["plan", "edit", "answer"]
    assert "KeyError: 'olso'" in planner.prompts[1]


def test_a_prefix_that_ran_is_not_run_again() -> None:
    calls: list[str] = []

    def find(name: str) -> dict[str, int]:
        calls.append(name)
        return {"id": 7}

    def use(id: int, word: str) -> str:
        if word != "right":
            raise ValueError("another word")
        return "done"

    first = {"id": "a", "tool": "find", "parameters": {"name": "Oslo"}}
    plan = {"nodes": [first, {"id": "b", "tool": "use", "parameters": {"id": {"$ref": "a.id"}, "word": "wrong"}}]}
    planner = ScriptedPlanner(
        [plan], [[{"id": "b", "tool": "use", "parameters": {"id": {"$ref": "a.id"}, "word": "right"}}]]
    )
    made = ask(planner, [find, use], "read")
    assert made.is_complete
    assert calls == ["Oslo"]
    assert made.stats.reused >= 1


def test_a_writing_tool_is_called_once_and_only_when_all_else_is_in_order() -> None:
    sent: list[str] = []

    def send(text: str) -> str:
        sent.append(text)
        return "ok"

    plan = good(tool="nothing like it", parameters={"x": 1})
    plan["nodes"].append({"id": "out", "tool": "send", "parameters": {"text": "warm"}, "after": ["now"]})
    planner = ScriptedPlanner([plan], [[GOOD["nodes"][1]]])
    made = ask(planner, [*TOOLS[:2], send], READS)
    assert made.is_complete
    assert sent == ["warm"]


def test_what_comes_after_a_writing_call_waits_with_it_for_the_final_run() -> None:
    """It may need what is written, so that it is no evidence against the workflow that it would fail before."""
    notes: dict[str, str] = {}

    def write(name: str) -> str:
        notes[name] = "text"
        return "ok"

    def read(name: str) -> str:
        return notes[name]

    nodes = [
        {"id": "w", "tool": "write", "parameters": {"name": "x"}},
        {"id": "v", "tool": "write", "parameters": {"name": "y"}},
        {"id": "r", "tool": "read", "parameters": {"name": "x"}},
    ]
    made = ask(ScriptedPlanner([{"nodes": nodes}]), [write, read], {"read": "read"})
    assert made.is_complete
    assert made.stats.tool_calls == 3
    assert made.stats.candidates == 1


def test_a_writing_tool_outside_of_the_world_is_not_called_in_a_search() -> None:
    sent: list[str] = []

    def mail(text: str) -> str:
        sent.append(text)
        return "sent"

    ledger = Ledger()
    plan = {
        "nodes": [
            {"id": "a", "tool": "add", "parameters": {"row": "new"}},
            {"id": "b", "tool": "count", "parameters": {"wanted": 5}, "after": ["a"]},
            {"id": "m", "tool": "mail", "parameters": {"text": "x"}, "after": ["b"]},
        ]
    }
    right = {"id": "b", "tool": "count", "parameters": {"wanted": 1}, "after": ["a"]}
    planner = ScriptedPlanner([plan], [[right]])
    made = ask(planner, [ledger.add, ledger.count, mail], {"count": "read"}, world=ledger)
    assert made.is_complete
    assert (ledger.rows, sent) == (["new"], ["x"])


def test_tokens_of_requests_that_are_under_way_count_before_the_limit_is_reached() -> None:
    async def never(number: int) -> int:
        raise ValueError("no")

    plans = [{"nodes": [{"id": "a", "tool": "never", "parameters": {"number": n}}]} for n in range(90)]
    made = ask(ScriptedPlanner(plans, [[each["nodes"][0]] for each in plans[1:]]), [never], "read", max_tokens=100)
    assert made.stats.stop_reason == "max_tokens=100"
    assert made.stats.tokens < 110, "the last ones may be longer than those before"


def test_a_writing_call_that_fails_is_not_made_again() -> None:
    tries: list[str] = []

    def send(text: str) -> str:
        tries.append(text)
        raise ConnectionError("lost")

    made = ask(ScriptedPlanner([{"nodes": [{"id": "out", "tool": "send", "parameters": {"text": "x"}}]}]), [send], {})
    assert tries == ["x"]
    assert not made.is_complete
    assert made.answer is None
    assert made.citations == []


def test_a_reading_call_that_lost_its_answer_is_made_a_second_time() -> None:
    tries: list[str] = []

    def look(text: str) -> str:
        tries.append(text)
        if len(tries) == 1:
            raise ConnectionError("lost")
        return "here"

    made = ask(ScriptedPlanner([{"nodes": [{"id": "x", "tool": "look", "parameters": {"text": "x"}}]}]), [look], "read")
    assert tries == ["x", "x"]
    assert made.is_complete


def test_candidates_write_in_copies_of_the_world_and_the_winner_writes_once() -> None:
    ledger = Ledger(["old"])
    plan = {
        "nodes": [
            {"id": "a", "tool": "add", "parameters": {"row": "new"}},
            {"id": "b", "tool": "count", "parameters": {"wanted": 5}, "after": ["a"]},
        ]
    }
    right = {"id": "b", "tool": "count", "parameters": {"wanted": 2}, "after": ["a"]}
    made = ask(
        ScriptedPlanner([plan], [[right]]), [ledger.add, ledger.count], {"count": "read"}, world=ledger,
    )  # fmt: skip
    assert made.is_complete
    assert ledger.rows == ["old", "new"]
    assert len(ledger.forks) == 1, "the second candidate goes on from what the first one wrote"
    assert all(fork.is_closed for fork in ledger.forks)


def test_what_only_a_copy_of_the_world_saw_is_not_claimed() -> None:
    ledger = Ledger()
    plan = {
        "nodes": [
            {"id": "a", "tool": "add", "parameters": {"row": "new"}},
            {"id": "b", "tool": "count", "parameters": {"wanted": 5}, "after": ["a"]},
        ]
    }
    planner = ScriptedPlanner([plan])
    made = ask(planner, [ledger.add, ledger.count], {"count": "read"}, world=ledger)
    assert not made.is_complete
    assert ledger.rows == []
    assert made.execution.outputs == {}


def test_tool_calls_stay_within_their_limit_the_final_run_included() -> None:
    count = 0

    def flaky(number: int) -> int:
        nonlocal count
        count += 1
        raise ValueError("no")

    plans = [{"nodes": [{"id": "a", "tool": "flaky", "parameters": {"number": n}}]} for n in range(50)]
    made = ask(ScriptedPlanner(plans, [[each["nodes"][0]] for each in plans[1:]]), [flaky], "read", max_tool_calls=5)
    assert made.stats.tool_calls == count == 5
    assert made.stats.stop_reason == "max_tool_calls=5"


def test_a_search_ends_at_its_time() -> None:
    async def slow(number: int) -> int:
        await anyio.sleep(8)
        raise ValueError("no")

    plans = [{"nodes": [{"id": "a", "tool": "slow", "parameters": {"number": n}}]} for n in range(90)]
    made = ask(
        ScriptedPlanner(plans, [[each["nodes"][0]] for each in plans[1:]]), [slow], "read", max_seconds=20.0,
        width=1,
    )  # fmt: skip
    assert made.stats.stop_reason == "max_seconds=20"
    assert made.stats.tool_calls == 3


def test_replies_that_are_no_workflow_end_the_search_not_the_run() -> None:
    planner = ScriptedPlanner([{"nodes": "nothing"}])
    made = ask(planner)
    assert made.answer is None
    assert not made.is_complete
    assert made.stats.unusable_replies > 0


def test_the_planner_lm_plans_and_the_configured_lm_answers() -> None:
    planner, writer = ScriptedPlanner([GOOD]), ScriptedPlanner([GOOD])
    program = Evoflux("question -> answer", tools=TOOLS, effects=READS, planner_lm=planner.lm)
    with dspy.context(lm=writer.lm):
        run(lambda: program.acall(question="How warm is it in Oslo?"))
    assert (planner.asked, writer.asked) == (["plan"], ["answer"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"signature": "tools -> answer"}, "rename"),
        ({"effects": "sometimes"}, "expected one of"),
        ({"max_tool_calls": 0}, "max_tool_calls is 0"),
        ({"width": 0}, "width is 0"),
    ],
)
def test_an_argument_that_cannot_work_is_refused_with_the_reason(options: dict[str, object], message: str) -> None:
    def make() -> None:
        program = Evoflux(**({"signature": "question -> answer", "tools": TOOLS} | options))  # type: ignore[arg-type]
        run(lambda: program.acall(question="?"))

    with pytest.raises(ConfigurationError, match=message):
        make()
