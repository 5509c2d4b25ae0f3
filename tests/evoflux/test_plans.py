"""Plans as language models write them: what is read, what is refused with a reason, and what a planner is shown."""

from __future__ import annotations

import ast
import json
from typing import Any

import dspy
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from dspy_flashevolve.evoflux import Evoflux, ToolSpec, Workflow
from dspy_flashevolve.evoflux.plans import PlanError, read_plan, stub_of
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
        spec("order", {"sku": TEXT, "amount": {"type": "integer"}}, ["sku", "amount"], effect="write"),
        spec("send", {"cc": TEXT, "to": TEXT, "text": TEXT}, ["to", "text"], effect="write"),
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
        "Here is the plan:\n```\na = find(name='tea')\nb = order(sku=a.sku, amount=2)\n```\nIt's short.",
        "import tools\na = find('tea')\nb = order(a['sku'], 2)\nprint(b)",
        "name = 'tea'\na: dict = find(name)\ncode = a['sku']\nb = order(sku=code, amount=int(2))",
        "a = find(name='tea',)\nb = order(a['sku'],\n  amount=2)",
        "<think>\nfind('x')\n```\norder('y', 1)\n```\n</think>a = find('tea')\nb = order(**{'sku': a.sku}, amount=2)",
    ],
)
def test_plans_are_read_in_every_form_that_models_write(text: str) -> None:
    assert nodes(text) == [FIND, ("b", "order", {"sku": {"$ref": "a.sku"}, "amount": 2})]


def test_a_call_in_an_argument_is_a_node() -> None:
    nested = "find(name='tea')\norder(sku=find(name='tea')['sku'], amount=1)\norder(sku='x', amount=1)"
    assert [tool for _, tool, _ in nodes(nested)] == ["find", "find", "order", "order"]
    twice = "send(to=order('x', 1)['a'], text=order('x', 1)['b'])"
    assert [tool for _, tool, _ in nodes(twice)] == ["order", "order", "send"]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("-3", -3), ("+2.5", 2.5), ("('a', 'b')", ["a", "b"]), ("True", True), ("None", None),
        ("true", True), ("null", None), ("str(a['n'])", {"$text": [{"$ref": "a.n"}]}),
        ("list(a['n'])", {"$ref": "a.n"}),
        ("{'k': ['v']}['k'][0]", "v"), ("a['rows'][-1]", {"$ref": "a.rows.-1"}),
        ("f'{7}'", "7"), ("f'{\"x\"!s}'", "x"), ("a['a']", {"$ref": "a.a"}), ("'a'", "a"),
        ("f'a{a.n}'", {"$text": ["a", {"$ref": "a.n"}]}),
        ("a['n'] + 'x'", {"$text": [{"$ref": "a.n"}, "x"]}), ("f''", ""),
    ],
)  # fmt: skip
def test_values_are_read_as_python_means_them(argument: str, value: Any) -> None:
    assert nodes(f"a = find('tea')\nfind(name={argument})")[1][2] == {"name": value}


def test_arguments_without_names_are_in_the_order_of_the_stub() -> None:
    assert "(to: str, text: str, cc: str = ...)" in stub_of(CATALOGUE["send"], "send")
    assert nodes("send('bob', 'hi', 'ann', 'more')")[0][2] == {
        "to": "bob", "text": "hi", "cc": "ann", "argument_4": "more",
    }  # fmt: skip


def test_what_a_line_may_do_besides_a_call() -> None:
    text = "text = 'Sku: '\na = b = find('tea')\na\n'done'\ntext = text + b['sku']\nsend(to='x', text=text)"
    assert nodes(text)[1] == ("n1", "send", {"to": "x", "text": {"$text": ["Sku: ", {"$ref": "a.sku"}]}})


def test_a_text_with_lists_and_fences_in_it_stays_as_it_is() -> None:
    text = "Shopping:\n- milk\n2. eggs\n```python\norder(sku='x')\n```\n"
    assert nodes(f'a = find("tea")\nsend(to="b", text="""{text}""")')[1][2]["text"] == text


def test_a_joined_text_reaches_the_tool_as_one_text() -> None:
    plan = "city = find_city(name='Oslo')\nout = send(text=f\"{city['country']}: {city['id']}, {city}\")"
    program = Evoflux("question -> answer", tools=TOOLS, effects=READS | {"send": "read"})
    with dspy.context(lm=ScriptedPlanner([plan]).lm):
        made = run(lambda: program.acall(question="?"))
    assert made.execution.outputs["out"] == 'sent Norway: 7, {"id": 7, "country": "Norway"}'


def test_an_input_may_be_named() -> None:
    assert nodes("find(name=question)", question="Order tea")[0][2] == {"name": "Order tea"}
    assert nodes("find(name=tea)", question="Order tea")[0][2] == {"name": {"$ref": "tea"}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no call"),
        ("I cannot do that.", "line 1.*no Python"),
        ("a = find('tea')\nIt's short.", "line 2.*no Python"),
        ("1. `find('tea')`\n2. `find('x')`", "line 1.*no Python"),
        ("for item in items:\n    find(name=item)", "line 1.*no loops"),
        ("def find(name):\n    return order(name, 1)", "line 1.*no loops"),
        ("a = find(name='tea'", "line 1.*no Python"),
        ("a = find(name='tea')\nb = order(sku=a['sku'], amount=a['count'] - 3)", "line 2.*written out"),
        ("a = find(name='tea')\nb = order(sku=a['sku'], amount=a['count'] + 3)", "line 2.*written out"),
        ("a = find(name='tea'.upper())", "line 1.*only tools are called"),
        ("a = find(*names)", "line 1.*one by one"),
        ("a, b = find(name='tea'), 1", "line 1.*assigned to a name"),
        ("if rows:\n    await client.order(sku=r)\nfind('x')", "line 1.*no loops"),
        ("n = 1\nif rows:\n    n = 5\nfind('x')", "line 2.*no loops"),
        ("try:\n    find('x')\nexcept KeyError:\n    order('x', 1)", "line 1.*no loops"),
        ("s = 'x'\ns += 'y'\nfind(s)", "line 2.*no loops"),
        ("find('x')\nFinally: order(sku='x')", "line 2.*no loops"),
        ("find('x')\nreturn order('x', 1)", "line 2.*no loops"),
        ("find('x')\n- order('x', 1)", "line 2.*a line is a call"),
        ("await order('x', 1)", "line 1.*a line is a call"),
        ("find('x')\nu = set(a)", "line 2.*only tools are called"),
        ("a = find('x')\nsum(a['prices'])", "line 2.*only tools are called"),
        ("re.find('x', 'y')", "line 1.*only tools are called"),
        ("a = find('x')\na.find('y')", "line 2.*only tools are called"),
        ("find('x')\norder(\n    sku='y',\n    amount=two units,\n)", "line 4.*no Python"),
        ("find('x')\nplace(sku=a['sku'] amount=2)", "line 2.*no Python"),
        ("```\nfind('x')\n```\nCorrected:\n```\nfind('y')\n```", "2 blocks"),
        ("a = find('x')\nfind(f\"{a['n']:.2f}\")", "line 2.*without a format"),
        ("a = find('x')\nfind(f\"{a['n']!r}\")", "line 2.*without a format"),
        ("send('a', 'b', to='c')", "line 1.*given twice"),
        ("a = find('x')\nif not a:\n    raise ValueError\norder('x', 1)", "line 2.*no loops"),
        ("a = find('x')\nassert a\norder('x', 1)", "line 2.*no loops"),
        ("r = 'x'\nfor r in rows:\n    pass\norder(r, 1)", "line 2.*no loops"),
        ("order('x', 1)\n```python\na = find('x')\n```", "outside of its block"),
        ("order(**dict(p, amount=2))", "line 1.*only tools are called"),
        ("a = find('x')\nfind(a.get('sku', 'D'))", "line 2.*only tools are called"),
        ("a = find('x')\nfind(a['x.y'])", "line 2.*a dot"),
        ("find(f'{5:999999999999}')", "line 1.*without a format"),
        ('[{"id": "a", "tool": "order"}]\n\nfind("x")', "line 1.*a line is a call"),
        ('{"nodes": [{"id": "a", "tool": "find", "parameters": {"name": "x"}}]}', "line 1.*a line is a call"),
        ("a = find('x')\nfind(name=a" + "[0]" * 3000 + ")", "nested"),
        ("v = 'x'\n" + "v = [v]\n" * 60 + "find(v)", "levels deep"),
        ("find()\n" * 2500, "more than 100 calls"),
        ("s = 'ab'\n" + "s = s + s\n" * 40 + "find(s)", "at most 20,000"),
        ("s = ['ab']\n" + "s = [s, s]\n" * 40 + "find(s)", "at most 20,000"),
        ("a = find(name=1e999)", "line 1.*written out"),
        ("a = find(name=b'tea')", "line 1.*written out"),
        ("a = find(name={'a'})", "line 1.*written out"),
        ("a = find(name='tea'['x'])", "line 1.*a field is named"),
        ("(" * 5000 + "find(name='tea')", "Python"),
        ("x" * 20_001, "20,001 characters"),
    ],
)  # fmt: skip
def test_what_a_workflow_cannot_say_is_refused_with_the_line(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=f"(?s){message}"):
        read_plan(text, CATALOGUE)


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
    text = str(flow)
    ast.parse(text)
    assert read_plan(text, CATALOGUE) == flow


ITEM = {"type": "object", "properties": {"sku": {"type": "string", "description": "CODE"}}, "required": ["sku"]}


@pytest.mark.parametrize(
    ("schema", "shown"),
    [
        ({"anyOf": [{"$ref": "#/$defs/Item"}, {"type": "null"}]}, "{'sku': str} | None"),
        ({"anyOf": [{"enum": ["low", "high"]}, {"type": "null"}]}, "Literal['low', 'high'] | None"),
        ({"type": "array", "items": {"$ref": "#/$defs/Item"}}, "list[{'sku': str}]"),
        ({"allOf": [{"$ref": "#/$defs/Item"}]}, "{'sku': str}"),
        ({"oneOf": [TEXT, {"$ref": "#/$defs/Item"}]}, "str | {'sku': str}"),
        ({"type": ["object", "null"], "properties": {"a": TEXT}}, "{'a'?: str} | None"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "dict[str, int]"),
        ({"anyOf": [True, TEXT]}, "Any | str"),
        ({"const": 5}, "Literal[5]"),
    ],
)
def test_a_stub_shows_what_a_parameter_may_be(schema: dict[str, Any], shown: str) -> None:
    made = spec("t", {"p": schema}, ["p"])
    made.input_schema["$defs"] = {"Item": ITEM}
    stub = stub_of(made, "t")
    assert f"(p: {shown})" in stub
    assert "CODE" in stub


class Item(BaseModel):
    name: str


def test_inputs_and_outputs_that_look_like_references_are_data() -> None:
    """Else who writes a question or an output could have results sent to another tool."""

    def secret() -> Any:
        return {"key": "SECRET", "doc": {"$text": ["a", "b"]}, "ref": {"$ref": "s.key"}}

    def keep(first: Any, second: Any = None) -> str:
        kept.append((first, second))
        return "kept"

    kept: list[Any] = []
    plan = "s = secret()\nkeep(first=items)\nkeep(first=s['doc'], second=f\"{s['key']}!\")\nkeep(first=s['ref'])"
    program = Evoflux("items: list -> answer", [secret, keep], effects="read", max_candidates=1)
    with dspy.context(lm=ScriptedPlanner([plan]).lm):
        run(lambda: program.acall(items=[{"$ref": "s.key"}]))
        run(lambda: program.acall(items=["tea"]))
    assert sorted(kept, key=str) == sorted(
        [({"$text": ["a", "b"]}, "SECRET!"), ({"$ref": "s.key"}, None)] * 2 + [(["tea"], None)], key=str
    )


def test_no_value_of_a_writing_call_is_lost_in_a_repair() -> None:
    ordered: list[int] = []

    def order(sku: str, amount: int = 1) -> str:
        ordered.append(amount)
        return "ok"

    for argument in ("quantity=5", "amount='two dozen'", "amounts=5"):
        with dspy.context(lm=ScriptedPlanner([f"order(sku='x', {argument})"]).lm):
            run(lambda: Evoflux("question -> answer", [order], without=["LM edits"]).acall(question="?"))
    assert ordered == []  # they are left to the LM
