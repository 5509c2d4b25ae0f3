"""Evoflux as a module: used as dspy.ReAct is, its limits, what it cites, and what its search decides."""

from __future__ import annotations

from typing import Any

import anyio
import dspy
import pytest

from dspy_flashevolve import ConfigurationError
from dspy_flashevolve.evoflux import Evoflux
from dspy_flashevolve.programs.function_lm import lm_of
from dspy_flashevolve.sim.virtual import run
from tests.evoflux.worlds import GOOD, READS, TOOLS, Ledger, ScriptedPlanner, reply_for
from tests.fakes import fake_lm

ADD_AND_COUNT = "a = add(row='new')\nb = count(wanted={})"


def ask(planner: ScriptedPlanner, tools: list[Any] = TOOLS, effects: Any = READS, **options: Any) -> dspy.Prediction:
    """Ask how warm it is in Oslo, in virtual time."""
    program = Evoflux("question -> answer", tools=tools, effects=effects, **options)
    with dspy.context(lm=planner.lm):
        return run(lambda: program.acall(question="How warm is it in Oslo?"))


def never(number: int) -> int:
    raise ValueError("no")


def endless(call: str = "never") -> ScriptedPlanner:
    """A planner that has ever new ideas, none of which works."""
    plans = [f"a = {call}(number={number})" for number in range(90)]
    return ScriptedPlanner(plans, plans[1:])


def test_a_plan_that_runs_is_answered_from_what_it_gave() -> None:
    planner = ScriptedPlanner([GOOD])
    made = ask(planner)
    assert (made.answer, made.is_complete, made.citations) == ("4 degrees", True, ["city", "now"])
    assert made.execution.outputs == {"city": {"id": 7, "country": "Norway"}, "now": {"temperature": 4.0}}
    assert planner.asked == ["plan", "answer"]
    assert made.stats.tool_calls == 2


@pytest.mark.parametrize(
    "flawed",
    ["wether(city_id=city['id'])", "weather(city_id=city['city_id'])", "weather(city_id=town['id'])", "weather()",
     "weather(city_id='7')"],
    ids=["tool", "field", "node", "missing", "type"],
)  # fmt: skip
def test_flaws_that_schemas_and_outputs_explain_are_repaired_without_an_lm(flawed: str) -> None:
    planner = ScriptedPlanner([f"city = find_city(name='Oslo')\nnow = {flawed}"])
    made = ask(planner)
    assert made.is_complete
    assert planner.asked == ["plan", "answer"]
    assert made.execution.outputs["now"] == {"temperature": 4.0}


def test_an_lm_edits_what_nothing_else_repairs_and_reads_the_feedback_of_the_run() -> None:
    planner = ScriptedPlanner(["find_city(name='Olso')"], ["find_city(name='Oslo')"])
    assert ask(planner).is_complete
    assert planner.asked == ["plan", "edit", "answer"]
    assert "KeyError: 'olso'" in planner.prompts[1]


def test_a_planner_is_told_of_a_bad_reply_once() -> None:
    planner = ScriptedPlanner(["while True: find_city()", "find_city(name='X')"], ["find_city(name='Oslo')"])
    assert ask(planner).is_complete
    assert ["no loops" in prompt for prompt in planner.prompts] == [False, True, False, False]


def test_a_prefix_that_ran_is_not_run_again() -> None:
    calls: list[str] = []

    def find(name: str) -> dict[str, int]:
        calls.append(name)
        return {"id": 7}

    def use(id: int, word: str) -> str:
        if word != "right":
            raise ValueError("another word")
        return "done"

    plan = "a = find(name='Oslo')\nb = use(id=a['id'], word='{}')"
    made = ask(ScriptedPlanner([plan.format("wrong")], [plan.format("right")]), [find, use], "read")
    assert (made.is_complete, calls) == (True, ["Oslo"])
    assert made.stats.reused >= 1


def test_a_writing_tool_is_called_once_and_only_when_all_else_is_in_order() -> None:
    sent: list[str] = []

    def send(text: str) -> str:
        sent.append(text)
        return "ok"

    planner = ScriptedPlanner([f"{GOOD.replace('weather', 'nothing')}\nsend(text='warm')"], [f"{GOOD}\nsend('warm')"])
    assert ask(planner, [*TOOLS[:2], send]).is_complete
    assert sent == ["warm"]


def test_what_comes_after_a_writing_call_waits_with_it_for_the_final_run() -> None:
    """It may need what is written, so that it is no evidence against the workflow that it would fail before."""
    notes: dict[str, str] = {}

    def write(name: str) -> str:
        notes[name] = "text"
        return "ok"

    def read(name: str) -> str:
        return notes[name]

    planner = ScriptedPlanner(["write(name='x')\nwrite(name='y')\nread(name='x')"])
    made = ask(planner, [write, read], {"read": "read"})
    assert made.is_complete
    assert (made.stats.tool_calls, made.stats.candidates) == (3, 1)


def test_candidates_write_in_copies_of_the_world_and_the_winner_writes_once() -> None:
    ledger = Ledger(["old"])
    planner = ScriptedPlanner([ADD_AND_COUNT.format(5)], [ADD_AND_COUNT.format(2)])
    made = ask(planner, [ledger.add, ledger.count], {"count": "read"}, world=ledger)
    assert made.is_complete
    assert ledger.rows == ["old", "new"]
    assert len(ledger.forks) == 1, "the second candidate goes on from what the first one wrote"
    assert all(fork.is_closed for fork in ledger.forks)


def test_a_writing_tool_outside_of_the_world_is_not_called_in_a_search() -> None:
    sent: list[str] = []

    def mail(text: str) -> str:
        sent.append(text)
        return "sent"

    ledger = Ledger()
    planner = ScriptedPlanner([f"{ADD_AND_COUNT.format(count)}\nmail(text='x')" for count in (5, 1)])
    planner.edits = planner.plans[1:]
    made = ask(planner, [ledger.add, ledger.count, mail], {"count": "read"}, world=ledger)
    assert made.is_complete
    assert (ledger.rows, sent) == (["new"], ["x"])


@pytest.mark.parametrize(("plan", "options"), [
    (ADD_AND_COUNT.format(5), {}),
    ("a = add(row='x')", {"checks": [lambda outputs: False], "max_candidates": 3}),
], ids=["fails", "check says no"])  # fmt: skip
def test_what_only_a_copy_of_the_world_saw_is_neither_written_nor_claimed(plan: str, options: Any) -> None:
    ledger = Ledger()
    made = ask(ScriptedPlanner([plan]), [ledger.add, ledger.count], {"count": "read"}, world=ledger, **options)
    assert not made.is_complete
    assert (ledger.rows, made.execution.outputs) == ([], {})


@pytest.mark.parametrize(("effect", "times"), [("write", 1), ("idempotent", 2), ("read", 2)])
def test_a_call_that_lost_its_answer_is_made_a_second_time_unless_it_writes(effect: str, times: int) -> None:
    tries: list[str] = []

    def tell(text: str) -> str:
        tries.append(text)
        if len(tries) == 1:
            raise ConnectionError("lost")
        return "here"

    made = ask(ScriptedPlanner(["tell(text='x')"]), [tell], effect)
    assert len(tries) == times
    assert made.is_complete == (times == 2)
    assert (made.answer is None) == (times == 1)


class Shop:
    """Remembers what was written."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.tools = [self.look, self.verify, self.reserve, self.charge]

    def look(self) -> str:
        return "seen"

    def verify(self) -> str:
        raise ValueError("no")

    def reserve(self) -> str:
        self.done.append("reserve")
        return "ok"

    def charge(self) -> str:
        self.done.append("charge")
        return "ok"


SHOP_READS = {"look": "read", "verify": "read"}


def test_no_writing_begins_that_the_calls_cannot_end() -> None:
    shop = Shop()
    made = ask(ScriptedPlanner(["look()\nlook()\nreserve()\ncharge()"]), shop.tools, SHOP_READS, max_tool_calls=2)
    assert (shop.done, made.is_complete) == ([], False)


def test_in_the_final_run_nothing_is_written_after_a_failure() -> None:
    shop = Shop()
    made = ask(ScriptedPlanner(["a = reserve()\nv = verify()\nb = charge()"]), shop.tools, SHOP_READS)
    assert shop.done == ["reserve"]
    assert {each.node: each.status for each in made.execution.runs} == {"a": "ran", "v": "failed", "b": "skipped"}


def test_an_answer_that_cannot_be_read_after_a_write_is_told_and_not_raised() -> None:
    shop = Shop()

    def reply(prompt: str) -> str:
        is_plan = "[[ ## plan ## ]]" in prompt or "`plan`" in prompt
        return reply_for(prompt, plan="charge()") if is_plan else "It was charged."

    with dspy.context(lm=fake_lm(reply)):
        made = run(lambda: Evoflux("question -> answer", shop.tools).acall(question="?"))
        with pytest.raises(Exception, match="answer"):
            run(lambda: Evoflux("question -> answer", shop.tools, effects="read").acall(question="?"))
    assert (made.answer, made.is_complete, made.citations) == (None, True, [])
    assert "answer" in made.stats.answer_error


def test_an_lm_error_of_an_edit_ends_the_search_with_what_was_found() -> None:
    def reply(prompt: str) -> str:
        if "[[ ## workflow ## ]]" in prompt:
            raise ConnectionError("429 too many requests")
        if "[[ ## plan ## ]]" in prompt:
            return reply_for(prompt, plan="a = look()\nverify()")
        return reply_for(prompt, answer="so far", citations='["a"]')

    with dspy.context(lm=lm_of(reply, "lm")):
        made = Evoflux("question -> answer", tools=Shop().tools, effects="read")(question="?")
    assert (made.answer, made.citations) == ("so far", ["a"])
    assert "429" in made.stats.stop_reason


def test_a_reply_that_cannot_be_read_is_asked_for_anew_though_dspy_caches_and_with_what_was_wrong(
    tmp_path: Any,
) -> None:
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        if "[[ ## plan ## ]]" in prompt or "`plan`" in prompt:
            return reply_for(prompt, plan="for city in cities: weather(city)" if len(prompts) < 3 else GOOD)
        return reply_for(prompt, answer="4 degrees", citations="[]")

    lm = fake_lm(reply)
    lm.cache = True
    with dspy.context(lm=lm):
        made = run(lambda: Evoflux("question -> answer", tools=TOOLS, effects="read").acall(question=str(tmp_path)))
    assert made.answer == "4 degrees"
    assert made.stats.unusable_replies >= 1
    assert any("could not be read" in prompt for prompt in prompts)


def test_replies_that_are_no_workflow_end_the_search_not_the_run() -> None:
    made = ask(ScriptedPlanner(["nothing"]))
    assert (made.answer, made.is_complete) == (None, False)
    assert made.stats.unusable_replies > 0


def test_a_check_of_the_goal_chooses_between_workflows_that_run() -> None:
    def say(number: int) -> int:
        return number

    plans = [f"a = say(number={number})" for number in (1, 2, 3, 4)]
    made = ask(ScriptedPlanner(plans, plans[1:]), [say], "read", checks=[lambda outputs: outputs["a"] == 3])
    assert made.execution.outputs == {"a": 3}


def test_an_async_search_begins_with_as_many_plans_as_its_width() -> None:
    for width in (1, 3):
        planner = endless()
        ask(planner, [never], "read", width=width, max_candidates=width)
        assert planner.asked[:width] == ["plan"] * width
        assert planner.asked.count("plan") == width


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


# Limits


def test_tokens_of_requests_that_are_under_way_count_before_the_limit_is_reached() -> None:
    made = ask(endless(), [never], "read", max_tokens=100)
    assert made.stats.stop_reason == "max_tokens=100"
    assert made.stats.tokens < 110, "the last ones may be longer than those before"


def test_tool_calls_stay_within_their_limit_the_final_run_included() -> None:
    made = ask(endless(), [never], "read", max_tool_calls=5)
    assert made.stats.tool_calls == 5
    assert made.stats.stop_reason == "max_tool_calls=5"


def test_a_search_ends_at_its_time() -> None:
    async def slow(number: int) -> int:
        await anyio.sleep(8)
        raise ValueError("no")

    made = ask(endless("slow"), [slow], "read", max_seconds=20.0)
    assert (made.stats.stop_reason, made.stats.tool_calls) == ("max_seconds=20", 3)


def test_the_planner_lm_plans_and_the_configured_lm_answers() -> None:
    planner, writer = ScriptedPlanner([GOOD]), ScriptedPlanner([GOOD])
    ask(writer, planner_lm=planner.lm)
    assert (planner.asked, writer.asked) == (["plan"], ["answer"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"signature": signature}, "rename") for signature in (
            "tools -> answer", "question -> is_complete", "question -> execution", "question -> stats",
            "question -> workflow",
        )),
        ({"effects": "sometimes"}, "expected one of"),
        ({"max_tool_calls": 0}, "max_tool_calls is 0"),
        ({"width": 0}, "width is 0"),
        ({"without": ["LM"]}, "expected some of"),
    ],
)  # fmt: skip
def test_an_argument_that_cannot_work_is_refused_with_the_reason(options: dict[str, Any], message: str) -> None:
    def make() -> None:
        program = Evoflux(**({"signature": "question -> answer", "tools": TOOLS} | options))
        run(lambda: program.acall(question="?"))

    with pytest.raises(ConfigurationError, match=message):
        make()
