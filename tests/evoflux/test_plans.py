"""Plans as language models write them: what is read, what is refused with a reason, and what a planner is shown."""

from __future__ import annotations

import ast
import json
import keyword
from typing import Any

import dspy
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dspy_flashevolve.evoflux import Evoflux, ToolSpec, Workflow
from dspy_flashevolve.evoflux.plans import PlanError, as_python, read_plan, stub_of
from dspy_flashevolve.sim.virtual import run
from tests.evoflux.worlds import READS, TOOLS, ScriptedPlanner


def spec(name: str, inputs: Any, required: list[str], output: Any = None, effect: Any = "read") -> ToolSpec:
    schema = {"type": "object", "properties": inputs, "required": required, "additionalProperties": False}
    return ToolSpec(name, f"Does {name}.", schema, output, effect, lambda **arguments: arguments)


TEXT = {"type": "string"}
CATALOGUE = {
    each.name: each
    for each in (
        spec("find", {"name": TEXT}, ["name"], {"type": "object", "properties": {"sku": TEXT}}),
        spec("order", {"sku": TEXT, "amount": {"type": "integer"}}, ["sku", "amount"]),
        spec("get-time", {"from": TEXT}, ["from"]),
    )
}
FIND = ("a", "find", {"name": "tea"})


def nodes(text: str, **inputs: str) -> list[tuple[str, str, dict[str, Any]]]:
    """A plan's nodes as (identifier, tool, parameters)."""
    read = read_plan(text, CATALOGUE, inputs)
    return [(node.id, node.tool, node.parameters) for node in read.nodes]


@pytest.mark.parametrize(
    "text",
    [
        "a = find(name='tea')\nb = order(sku=a['sku'], amount=2)",
        "```python\na = find(name='tea')\nb = order(sku=a.sku, amount=2)\n```",
        "Here is the plan:\n\n    a = find(name='tea')\n    b = order(sku=a['sku'], amount=2)\n\nIt's short.",
        "1. `a = find(name='tea')`\n2. `b = order(sku=a['sku'], amount=2)`",
        "- a = find(name='tea')\n- b = order(sku=a['sku'], amount=2)  # two of them",
        json.dumps(["a = find(name='tea')", "b = order(sku=a['sku'], amount=2)"]),
        "import tools\na = await tools.find('tea')\nb = tools.order(a.get('sku'), 2)\nprint(b)",
        "name = 'tea'\na: dict = find(name)\ncode = a['sku']\nb = order(sku=code, amount=int(2))",
        "a = find(name='tea',)\nb = order(a['sku'],\n  amount=2)",
        "try:\n    a = find(name='tea')\n    b = order(sku=a['sku'], amount=2)\nexcept KeyError:\n    pass",
        "a = find(name='tea')\nif not a:\n    raise ValueError\nb = order(**{'sku': a['sku']}, amount=2)",
        json.dumps({"nodes": [
            {"id": "a", "tool": "find", "parameters": {"name": "tea"}},
            {"id": "b", "tool": "order", "parameters": {"sku": {"$ref": "a.sku"}, "amount": 2}},
        ]}),
    ],
)  # fmt: skip
def test_plans_are_read_in_every_form_that_models_write(text: str) -> None:
    assert nodes(text) == [FIND, ("b", "order", {"sku": {"$ref": "a.sku"}, "amount": 2})]


def test_a_call_in_an_argument_is_a_node_and_the_same_call_no_second_one() -> None:
    nested = "find(name='tea')\norder(sku=find(name='tea')['sku'], amount=1)\norder(sku='x', amount=1)"
    assert [tool for _, tool, _ in nodes(nested)] == ["find", "order", "order"]
    assert [tool for _, tool, _ in nodes("order(find('tea').sku, 1)\norder(find('tea').sku, 1)")] == [
        "find", "order", "order",
    ]  # fmt: skip


def test_texts_are_joined_of_what_is_known_later() -> None:
    parts = ["Sku ", {"$ref": "a.sku"}, "!"]
    for text in ("f\"Sku {a['sku']}!\"", "'Sku ' + a['sku'] + '!'"):
        assert nodes(f"a = find(name='tea')\nfind(name={text})")[1][2] == {"name": {"$text": parts}}
    assert nodes("a = find(name='t' + 'ea')") == [FIND]
    assert nodes("a = find(name=f'{\"te\"}a')") == [FIND]


def test_a_joined_text_reaches_the_tool_as_one_text() -> None:
    plan = "city = find_city(name='Oslo')\nout = send(text=f\"{city['country']}: {city['id']}, {city}\")"
    program = Evoflux("question -> answer", tools=TOOLS, effects=READS | {"send": "read"})
    with dspy.context(lm=ScriptedPlanner([plan]).lm):
        made = run(lambda: program.acall(question="?"))
    assert made.execution.outputs["out"] == 'sent Norway: 7, {"id": 7, "country": "Norway"}'


def test_a_field_of_a_joined_text_that_is_not_there_is_repaired_as_any_other() -> None:
    plan = "city = find_city(name='Oslo')\nout = send(text=f\"in {city['countri']}\")"
    program = Evoflux("question -> answer", tools=TOOLS, effects=READS | {"send": "read"}, without=["LM edits"])
    with dspy.context(lm=ScriptedPlanner([plan]).lm):
        made = run(lambda: program.acall(question="?"))
    assert made.execution.outputs["out"] == "sent in Norway"


def test_an_input_may_be_named_and_a_word_of_it_may_lack_its_quotes() -> None:
    asked = "Order tea for buyer4"
    assert nodes("find(name=question)", question=asked)[0][2] == {"name": asked}
    assert nodes("find(name=buyer4)", question=asked)[0][2] == {"name": "buyer4"}
    assert nodes("find(name=buyer5)", question=asked)[0][2] == {"name": {"$ref": "buyer5"}}
    # It is like the name of a result, so that this is what is meant.
    assert nodes("order1 = find(name='x')\nfind(name=order)", question="order tea")[1][2] == {"name": {"$ref": "order"}}


def test_a_results_name_in_quotes_is_that_result_unless_the_question_has_the_word() -> None:
    plan = "tea = find(name='tea')\norder(sku='tea', amount=1)"
    assert nodes(plan)[1][2]["sku"] == {"$ref": "tea"}
    assert nodes(plan, question="Order tea")[1][2]["sku"] == "tea"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no call"),
        ("I cannot do that.", "no call"),
        ("None]]", "no call"),
        ("for item in items:\n    find(name=item)", "line 1.*no loops"),
        ("def find(name):\n    return order(name, 1)", "line 1.*no loops"),
        ("a = find(name='tea'", "line 1.*no Python"),
        ("a = find(name='tea')\nb = order(sku=a['sku'], amount=a['count'] - 3)", "line 2.*written out"),
        ("a = find(name='tea')\nb = order(sku=a['sku'], amount=a['count'] + 3)", "line 2.*written out"),
        ("a = find(name='tea'.upper())", "line 1.*only tools are called"),
        ("a = find(*names)", "line 1.*one by one"),
        ("a, b = find(name='tea'), 1", "line 1.*assigned to a name"),
        ("a = find(name=1e999)", "line 1.*written out"),
        ("a = find(name=b'tea')", "line 1.*written out"),
        ("a = find(name='tea'['x'])", "line 1.*a field is named"),
        ("(" * 5000 + "find(name='tea')", "Python"),
        ("x" * 50_001, "50,001 characters"),
        ("\n".join("words that are no Python" for _ in range(300)), "prose"),
    ],
)  # fmt: skip
def test_what_a_workflow_cannot_say_is_refused_with_the_line(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=f"(?s){message}"):
        read_plan(text, CATALOGUE)


def test_a_planner_is_told_of_a_plan_that_could_not_be_read() -> None:
    planner = ScriptedPlanner(["while True: find_city()", "city = find_city(name='Oslo')"])
    with dspy.context(lm=planner.lm):
        made = run(lambda: Evoflux("question -> answer", tools=TOOLS, effects=READS).acall(question="?"))
    assert made.is_complete
    assert made.stats.unusable_replies == 1
    assert "no loops" in planner.prompts[1]


def test_half_an_emoji_goes_no_further() -> None:
    for text in ("a = find(name='\\ud83d')", "a = find(name='\ud83d')"):
        read = read_plan(text, CATALOGUE)
        str(read).encode()
        as_python(read).encode()


TOKENS = (
    "find order a b ( ) [ ] = 'sku' name , + f'{a}' 1 . ** { } : for in if not ``` - ` def await None ... while ; \\ #"
)
WORDS = [*TOKENS.split(), "\n", "    "]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=25).map(" ".join) | st.text(max_size=40))
@example("find(name=...)")
@example("find(**{**a})")
@example("find(name=[i for i in a])")
@example("a = find(name=a)")
@example("find(name={a: 1})")
@example("\x00find()")
@example("find(name=a[1:2])")
@example("find(name=0x" + "f" * 9000 + ")")
def test_any_text_is_a_plan_or_refused_with_a_reason(text: str) -> None:
    try:
        read = read_plan(text, CATALOGUE, {"question": "Order tea"})
    except PlanError as error:
        assert str(error)  # noqa: PT017  # both outcomes are right; a reason must be there
    else:
        assert read.nodes
        json.dumps(read.as_json())
        read.check(CATALOGUE)


PLAIN: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5) | st.just({"$ref": "a.rows.0.id"}),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.text(max_size=4) | st.sampled_from(["name", "from", "x-y", "class"])


@settings(deadline=None)
@given(st.lists(st.dictionaries(KEYS, PLAIN, max_size=3), min_size=1, max_size=3))
def test_a_workflow_that_is_written_as_python_is_read_as_the_same_workflow(parameters: list[dict[str, Any]]) -> None:
    made = [{"id": "a", "tool": "find", "parameters": {"name": "tea"}}]
    made += [
        {"id": f"n{number}", "tool": tool, "parameters": given}
        for number, (tool, given) in enumerate(zip(["get-time", "unknown", "order"], parameters, strict=False))
    ]
    flow = Workflow.from_json(made)
    text = as_python(flow)
    ast.parse(text)
    inputs = {"question": "a n0 n1 n2"}  # so that a text with a result's name stays a text
    assert read_plan(text, CATALOGUE, inputs) == flow


def test_a_planner_sees_tools_as_stubs_of_functions() -> None:
    day = {"enum": ["monday", "friday"], "description": "The day\nof it."}
    point = {"type": "object", "properties": {"x": {"type": "number"}, "tags": {"type": "array", "items": TEXT}}}
    count = {"type": "integer", "minimum": 1, "default": 3}
    maybe = {"anyOf": [TEXT, {"type": "null"}], "description": "Or none."}
    inputs = {"note": maybe, "from": TEXT, "day": day, "at": point, "count": count, "any": {}}
    shown = stub_of(spec("get-time", inputs, ["day", "at"], {"type": "object", "properties": {"id": TEXT}}, "write"))
    assert shown.splitlines()[0] == (
        "def get_time(day: Literal['monday', 'friday'], at: {'x': float, 'tags': list[str]}, note: str | None = ..., "
        "**{'from': str = ...}, count: int = 3, any: Any = ...) -> {'id': str}: ...  # [write] Does get-time."
    )
    assert "    # day: The day of it." in shown
    assert '    # count: {"minimum": 1}' in shown
    assert "    # note: Or none." in shown


def test_descriptions_inside_a_parameter_are_shown() -> None:
    rows = {
        "type": "array",
        "items": {"type": "object", "properties": {"id": {"type": "string", "description": "SKU"}}},
    }
    assert "SKU" in stub_of(spec("add", {"rows": rows}, ["rows"]))


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8) | st.sampled_from(keyword.kwlist))
def test_every_name_of_a_tool_can_be_called_in_a_plan(name: str) -> None:
    tools = {name: spec(name, {"name": TEXT}, ["name"])}
    flow = Workflow.from_json([{"id": "a", "tool": name, "parameters": {"name": "x"}}])
    assert read_plan(as_python(flow), tools).nodes[0].tool == name
