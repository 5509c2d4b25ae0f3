"""The parser against prompts that dspy really writes, and against anything else."""

from __future__ import annotations

import json
from typing import Any, Literal

import dspy
import pytest
from dspy.teleprompt.gepa.instruction_proposal import ProposeInstruction
from hypothesis import given, settings
from hypothesis import strategies as st

from dspy_flashevolve.sim.backend import H100_QWEN3_8B
from dspy_flashevolve.sim.prompts import BadRequest, ChatRequest, OutputField, parse_chat_request
from dspy_flashevolve.sim.replies import ReplyModel, reply_to

INSTRUCTION = 'Answer well.\n\n  Be kind.\nRule 07: mention the word "amber".'
ADAPTERS = [dspy.ChatAdapter(), dspy.JSONAdapter()]


class Several(dspy.Signature):
    """Answer."""

    question: str = dspy.InputField()
    tags: list[str] = dspy.OutputField(desc="some (short) tags")
    verdict: Literal["yes", "no"] = dspy.OutputField()
    count: int = dspy.OutputField()
    sure: bool = dspy.OutputField()
    answer: str = dspy.OutputField()


def parsed(messages: Any, **extra: Any) -> ChatRequest:
    return parse_chat_request(json.dumps({"model": "sim", "messages": messages, **extra}).encode())


def reply(request: ChatRequest) -> str:
    return reply_to(request, H100_QWEN3_8B, ReplyModel(), seed=0).text


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_task_prompt_gives_up_its_instruction_inputs_and_outputs(adapter: dspy.ChatAdapter) -> None:
    signature = dspy.make_signature("question, context -> answer", INSTRUCTION)
    request = parsed(adapter.format(signature, [], {"question": "Why?\nReally?", "context": "None."}))
    assert request.kind == "task"
    assert request.instruction == INSTRUCTION.replace("\n\n", "\n\n")
    assert request.inputs == {"question": "Why?\nReally?", "context": "None."}
    assert request.output_fields == (OutputField("answer"),)
    assert request.json_reply == isinstance(adapter, dspy.JSONAdapter)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_reply_to_several_typed_outputs_is_one_that_dspy_parses(adapter: dspy.ChatAdapter) -> None:
    outputs = adapter.parse(Several, reply(parsed(adapter.format(Several, [], {"question": "Why?"}))))
    assert (outputs["tags"], outputs["verdict"], outputs["count"], outputs["sure"]) == ([], "yes", 0, True)
    assert "reply" in outputs["answer"]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_chain_of_thought_keeps_the_rules_in_the_answer(adapter: dspy.ChatAdapter) -> None:
    signature = dspy.ChainOfThought(dspy.make_signature("question -> answer", INSTRUCTION)).predict.signature
    request = parsed(adapter.format(signature, [], {"question": "Why?"}))
    assert [field.name for field in request.output_fields] == ["reasoning", "answer"]
    outputs = adapter.parse(signature, reply(request))
    assert "amber" in outputs["answer"]
    assert "amber" not in outputs["reasoning"]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_demonstrations_do_not_hide_the_question(adapter: dspy.ChatAdapter) -> None:
    demos = [{"question": "Before?", "answer": 'No: Rule 09: mention the word "plum".'}]
    request = parsed(adapter.format(dspy.Signature("question -> answer"), demos, {"question": "Now?"}))
    assert request.inputs == {"question": "Now?"}
    assert "plum" not in request.instruction


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_proposers_prompt_is_a_reflection_that_reads_the_feedback(adapter: dspy.ChatAdapter) -> None:
    feedback = 'Missed: Rule 08: mention the word "plum".'
    examples = [{"Inputs": {"question": "q"}, "Generated Outputs": {"answer": "a"}, "Feedback": feedback}]
    inputs = {"current_instruction": INSTRUCTION, "examples_with_feedback": examples}
    request = parsed(adapter.format(ProposeInstruction, [], inputs))
    assert request.kind == "reflection"
    assert request.inputs["current_instruction"] == INSTRUCTION
    model = ReplyModel(forgets=0, useless=0)
    text = reply_to(request, H100_QWEN3_8B, model, seed=0).text
    instruction = adapter.parse(ProposeInstruction, text)["new_instruction"]
    assert instruction.splitlines()[-2:] == [
        'Rule 07: mention the word "amber".',
        'Rule 08: mention the word "plum".',
    ]


def test_the_text_parts_of_a_message_count_and_its_images_do_not() -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "image_url", "image_url": {"url": "data:x"}}]
    assert (
        parsed([{"role": "user", "content": parts}]).content == parsed([{"role": "user", "content": "Hello"}]).content
    )


@pytest.mark.parametrize("json_reply", [False, True])
def test_an_unknown_prompt_gets_a_plain_reply_in_the_format_it_asks_for(json_reply: bool) -> None:
    extra = {"response_format": {"type": "json_object"}} if json_reply else {}
    request = parsed([{"role": "user", "content": "Hello"}], **extra)
    assert request.kind == "other"
    text = reply(request)
    assert (json.loads(text)["reply"] if json_reply else text).startswith("Here is a short")


def test_the_content_is_messages_and_sampling_and_nothing_else() -> None:
    messages = [{"role": "user", "content": "Hello"}]
    base = parsed(messages).content
    assert parsed(messages, user="x", max_tokens=5).content == base
    assert parsed(messages, temperature=0.5).content != base
    assert parsed(messages, seed=1).content != base


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"[]", None),
        (b"\xff\xfe\xfd", None),
        (b"[" * 100_000, None),
        (b"{}", "messages"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": [1]}', "messages[0]"),
        (b'{"messages": [{"content": "x"}]}', "messages[0].role"),
        (b'{"messages": [{"role": "user", "content": 1}]}', "messages[0].content"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', "n"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": true}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stream": "yes"}', "stream"),
        (b'{"messages": [{"role": "user", "content": "x"}], "model": 3}', "model"),
    ],
)
def test_a_malformed_request_is_a_bad_request_that_names_the_part(body: bytes, param: str | None) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_chat_request(body)
    assert caught.value.param == param


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=200))
def test_no_bytes_make_the_server_fail(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_chat_request(body)
