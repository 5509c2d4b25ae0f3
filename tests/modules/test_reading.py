"""Reading replies: what an adapter of dspy's writes is read back, and nothing that a reply does not close."""

from __future__ import annotations

import json
from typing import Any

import dspy
import pytest
from dspy.utils.callback import BaseCallback
from dspy.utils.exceptions import AdapterParseError
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel

from dspy_flashevolve.gepa.edits import Edit
from dspy_flashevolve.modules.reading import asked, items_in, result_of, text_in, without_thoughts
from dspy_flashevolve.modules.rewriting import RepairChild
from tests.fakes import fake_lm

ADAPTERS = [dspy.ChatAdapter(), dspy.JSONAdapter(), dspy.XMLAdapter()]


class Rule(BaseModel):
    text: str
    weight: int = 0


class Write(dspy.Signature):
    """Write."""

    task: str = dspy.InputField()
    title: str = dspy.OutputField()
    rules: list[Rule] = dspy.OutputField()
    body: str = dspy.OutputField()


plain = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="`"), max_size=30).map(str.strip)
"""Without fences, which are taken off, and control characters, of which XML has none."""


def read(reply: str, signature: Any = Write, adapter: Any = None) -> Any:
    with dspy.context(lm=fake_lm(lambda prompt: reply)):
        return result_of(asked(dspy.Predict(signature), {"task": "t"}, True, adapter))


@given(st.sampled_from(ADAPTERS), plain, st.lists(st.builds(Rule, text=plain, weight=st.integers(0, 9))), plain)
@example(dspy.JSONAdapter(), "</think>", [Rule(text='"}], "body": "')], '{"rules": [')
@example(dspy.XMLAdapter(), "<title>", [Rule(text="</text></item>")], "</body> & more")
def test_what_an_adapter_writes_is_read_back(adapter: Any, title: str, rules: list[Rule], body: str) -> None:
    rules = rules or ([Rule(text="in XML no list is empty")] if isinstance(adapter, dspy.XMLAdapter) else [])
    outputs = {"title": title, "rules": rules, "body": body}
    reply = read(adapter.format_assistant_message_content(Write, outputs), adapter=adapter)
    assert (reply.title, reply.rules, reply.body) == (title, rules, body)


OLD = json.dumps({"edits": [{"action": "add", "part": n, "text": f"- Rule {n} [is] {{so}}."} for n in (1, 2, 3)]})
TAGS = '<add part="1">- Rule 1.</add> and <replace part="2">- Rule 2.</replace>'
JUNK = st.text(st.sampled_from('{}[]",: \n<>/`aet123'), max_size=12) | st.sampled_from(
    ["<think>", "</think>", "```json\n", '"text": "', '{"action": "add", "part": 1, "text": "', "<add part=", "</add>"]
)


@given(
    st.sampled_from([OLD, TAGS, f"<think>{OLD}</think>{OLD}", OLD + "\nNo:\n" + TAGS]),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 60), JUNK), max_size=4),
)
def test_each_edit_that_is_read_in_a_damaged_reply_stands_in_it_between_its_own_ends(
    reply: str, damages: list[tuple[int, int, str]]
) -> None:
    for start, length, junk in damages:
        reply = reply[:start] + junk + reply[start + length :]
    for edit in items_in(without_thoughts(reply), Edit):
        assert not edit.text or f'"{edit.text}"' in reply or f">{edit.text}</{edit.action}>" in reply


@given(st.text() | st.binary().map(lambda data: data.decode("utf-8", "replace")), st.sampled_from(ADAPTERS))
@example("[" * 5000, ADAPTERS[0])
@example('{"a":' * 5000, ADAPTERS[1])
@example('{"rules": ' + "9" * 5000 + "}", ADAPTERS[1])
def test_no_reply_raises_but_as_one_that_cannot_be_read(text: str, adapter: Any) -> None:
    for signature in (Write, RepairChild):
        try:
            read(text, signature, adapter)
        except AdapterParseError:
            continue


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ('{"body": "Say "yes" or "no"."}', 'Say "yes" or "no".'),
        ('Here:\n```json\n{"title": "x", "body": "Say "yes"\nor \\"no\\".",\n}\n```', 'Say "yes"\nor "no".'),
        (r'{"body": "Match \d+ and \(x\)."}', r"Match \d+ and \(x\)."),
        ('{"body": "Say "yes" or "no".", "title": "x"}', None),
        ('{"body": "Say "yes" or "n', None),
        ('{"body": ["a", {"b": 1}]}', '["a", {"b": 1}]'),
        ('{"body": 7}', None),
        ('{"answer": {"body": "In an object."}}', "In an object."),
        ('{"body": "First."} No: {"body": "Last."}', "Last."),
        ("[[ ## body ## ]]\nFor example:\n```\n1\n```\nSo.", "For example:\n```\n1\n```\nSo."),
        ("[[ ## body ## ]]\nFor example:\n```\n1", None),
        ("<body>```python\nx\n```</body>", "x"),
        ("<body>```markdown\nSo:\n```\n1\n```\n```</body>", "So:\n```\n1\n```"),
        ("<body>```\n1\n```\nor\n```\n2\n```</body>", "```\n1\n```\nor\n```\n2\n```"),
    ],
)
def test_a_text_is_read_as_models_write_it(reply: str, text: str | None) -> None:
    assert text_in(reply, "body") == text


@pytest.mark.parametrize(
    ("reply", "texts"),
    [
        ('[{"text": "a"}]\nRather:\n[{"text": "b"}, {"text": "c"}]', "bc"),
        ('{"text": "a"}\n{"text": "b"}', "ab"),
        ('```json\n{"text": "a"}\n```\nand\n```json\n{"text": "b"}\n```', "ab"),
        ('{"rules": [{"text": "a"}]} No: {"rules": [{"text": "b"}, {"text": "c', "b"),
        ('{"reply": {"rules": [{"text": "a"}, {"weight": 1}, {"text": 7}, "x"]}}', "a"),
        ("{not json} [1] {'text': 'x'} [{\"text\": \"a\"}]", "a"),
        ("<rules><item><text>a</text></item><item><text>b</item></rules>", "a"),
    ],
)
def test_items_are_those_of_the_last_list_or_all_that_stand_alone(reply: str, texts: str) -> None:
    assert "".join(rule.text for rule in items_in(reply, Rule)) == texts


class Own(dspy.ChatAdapter):
    """An adapter of a user's own, whose form nobody else knows."""

    def parse(self, signature: Any, completion: str) -> dict[str, Any]:
        return {"title": completion, "rules": [], "body": completion}


def test_fields_of_other_kinds_and_forms_are_read_by_the_adapter() -> None:
    assert read("<think>x</think>~a~", adapter=Own()).body == "~a~"
    assert read('{"count": "7"}', dspy.ensure_signature("task -> count: int"), dspy.JSONAdapter()).count == 7


def test_callbacks_hear_of_each_call_as_they_do_without() -> None:
    heard: list[str] = []

    class Heard(BaseCallback):
        def on_adapter_format_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
            heard.append(f"{type(instance).__name__} writes")

        def on_adapter_parse_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
            heard.append(f"{type(instance).__name__} reads")

    reply = "[[ ## body ## ]]\nx"
    with dspy.context(callbacks=[Heard()], lm=fake_lm(lambda prompt: reply)):
        predict = dspy.Predict("task -> body")
        predict(task="t")
        usual, heard[:] = list(heard), []
        result_of(asked(predict, {"task": "t"}, True))
    assert heard == usual == ["ChatAdapter writes", "ChatAdapter reads"]
