"""The simulated model as the agent that writes harnesses."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.models import ImitatingModel
from benchmarks.models.harness_replies import harness_fields
from dspy_flashevolve.sim.profiles import H100_QWEN3_8B
from dspy_flashevolve.sim.prompts import ChatRequest, OutputField, parse_chat_request
from dspy_flashevolve.sim.replies import reply_to
from dspy_flashevolve.sim.words import Choices, rules_in

FAITHFUL = ImitatingModel(forgets=0, useless=0)
SOURCE = """class Seed(dspy.Module):
    def __init__(self):
        super().__init__()
        self.predict = dspy.Predict(dspy.Signature('question: str -> answer: str', 'Answer.\\nRule 01: mention the word "amber".'))

    def forward(self, **inputs):
        return self.predict(**inputs)
"""  # noqa: E501
FEEDBACK = 'candidates/0000/traces/0.txt:9: feedback: Missed: Rule 02: mention the word "plum".'


def request(inputs: dict[str, str], *outputs: str) -> ChatRequest:
    """A prompt of dspy's ChatAdapter."""
    sections = "\n\n".join(f"[[ ## {name} ## ]]\n{text}" for name, text in inputs.items())
    fields = ", then ".join(f"`[[ ## {name} ## ]]`" for name in outputs)
    ask = f"Respond with the corresponding output fields, starting with the field {fields}, and then ending."
    return parse_chat_request(json.dumps({"messages": [{"role": "user", "content": f"{sections}\n\n{ask}"}]}).encode())


def written(inputs: dict[str, str], *outputs: str, model: ImitatingModel = FAITHFUL) -> dict[str, Any]:
    return harness_fields(
        request({"archive_overview": "0003: score 0.5000, cost 3: x", "direction": "words", **inputs}, *outputs),
        lambda number: Choices(0, str(number)),
        lambda current, feedback, choices: model.new_instruction(current, feedback, choices),
    )


def test_the_prompts_of_the_proposer_are_known() -> None:
    assert request({"archive_overview": "x", "direction": "y"}, "modules").kind == "harness"
    assert request({"question": "x"}, "answer").kind == "task"


def test_it_lists_reads_searches_and_finishes() -> None:
    seen: dict[str, str] = {}
    tools: list[str] = []
    for step in range(4):
        reply = written(seen, "next_thought", "next_tool_name", "next_tool_args")
        tools.append(reply["next_tool_name"])
        seen |= {f"tool_name_{step}": tools[-1], f"observation_{step}": "candidates/0003/source.py"}
    assert tools == ["list_files", "read_file", "search_files", "finish"]


def test_modules_hold_the_rules_of_the_source_and_of_the_feedback_and_compile() -> None:
    reply = written(
        {"observation_1": SOURCE, "observation_2": FEEDBACK, "count": "3", "tool_args_1": "candidates/0007/source.py"},
        "reasoning", "modules",
    )  # fmt: skip
    blocks = re.findall(r"```python\n(.*?)\n```", reply["modules"], re.DOTALL)
    whole = [block for block in blocks if not block.endswith("(")]
    assert len(blocks) == 3
    assert whole
    for block in whole:
        texts = [node.value for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Constant)]
        instruction = max((text for text in texts if isinstance(text, str)), key=len)
        assert [rule.word for rule in rules_in(instruction)] == ["amber", "plum"]
        assert "# based on: 0007" in block


@given(st.dictionaries(st.sampled_from(["observation_1", "observation_2", "count", "tool_args_1",
                                        "archive_overview"]), st.text()))  # fmt: skip
def test_no_prompt_makes_it_raise(inputs: dict[str, str]) -> None:
    fields = ("reasoning", "modules")
    chat = request({"archive_overview": "", "direction": "", **inputs}, *fields)
    assert reply_to(chat, H100_QWEN3_8B, ImitatingModel(), 0).text
    assert set(written(inputs, *fields)) == set(fields)
    assert OutputField(fields[0]) in chat.output_fields
