"""The simulated model as the agent that writes harnesses: it reads the archive by its tools, then writes modules.

It answers the prompts of ``dspy.ReAct`` for AsyncMetaHarness' proposer. It looks at a candidate's source and at the
feedback in the archive, and writes modules whose instructions hold more of the rules that the feedback names. Now and
then it writes one that does not even compile.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping

from dspy_flashevolve.sim.prompts import ChatRequest
from dspy_flashevolve.sim.words import FILLER_OPENING, Choices, rules_in

Rewrite = Callable[[str, str, Choices], str]
"""(current instruction, feedback, choices) -> new instruction."""

BROKEN = 0.04
"""Probability that a module is not valid Python. Not measured: small, so that a search of 40 candidates meets the case
once or twice."""
BEST_CANDIDATES = 3
"""The simulated proposer builds on one of this many best candidates, so that two proposers seldom build on the same."""
MOST_MODULES = 16
"""Most modules of one reply, whatever number the prompt asks for."""
_LINE = re.compile(r"^(\d{4}): score", re.MULTILINE)
_TEMPLATE = """# name: house rules {number}
# hypothesis: The answers miss rules that the instruction does not state; state {rules} of them.
# based on: {base}
class Answerer(dspy.Module):
    def __init__(self):
        super().__init__()
        self.predict = dspy.Predict(dspy.Signature({fields!r}, {instruction!r}))

    def forward(self, **inputs):
        return self.predict(**inputs){end}"""


def is_tool_call(request: ChatRequest) -> bool:
    """Return whether an agent is asked for its next tool call, for which it writes less than for a module."""
    return any(field.name == "next_tool_name" for field in request.output_fields)


def harness_fields(request: ChatRequest, fork: Callable[[int], Choices], rewrite: Rewrite) -> dict[str, object]:
    """Return the output fields of a reply to a harness prompt.

    Args:
        request: a request of kind "harness".
        fork: returns random choices of this request by number.
        rewrite: writes an instruction from feedback.
    """
    names = [field.name for field in request.output_fields]
    inputs = request.inputs
    if is_tool_call(request):
        values = _step(inputs, fork(0))
    else:
        values = {"modules": "\n\n".join(_modules(inputs, fork, rewrite))}
    return {name: values.get(name, FILLER_OPENING) for name in names}


def _step(inputs: Mapping[str, str], choices: Choices) -> dict[str, object]:
    """Return the next tool call: list a candidate's files, read its source, search for feedback, finish."""
    done = sum(name.startswith("tool_name_") for name in inputs)
    if done == 0:
        best = _LINE.findall(inputs.get("archive_overview", ""))[:BEST_CANDIDATES] or ["0000"]
        return _call("list_files", {"folder": f"candidates/{best[choices.index('base', len(best))]}"})
    if done == 1:
        match = re.search(r"candidates/\d{4}/source\.py", inputs.get("observation_0", ""))
        return _call("read_file", {"path": match.group() if match else "candidates/0000/source.py"})
    if done == 2:
        return _call("search_files", {"text": "feedback: Missed", "folder": "candidates"})
    return _call("finish", {})


def _call(tool: str, args: dict[str, object]) -> dict[str, object]:
    return {"next_thought": FILLER_OPENING, "next_tool_name": tool, "next_tool_args": args}


def _modules(inputs: Mapping[str, str], fork: Callable[[int], Choices], rewrite: Rewrite) -> list[str]:
    match = re.search(r"candidates/(\d{4})", inputs.get("tool_args_1", ""))
    fields, current = _signature_in(inputs.get("observation_1", ""))
    feedback = inputs.get("observation_2", "")
    digits = re.search(r"\d{1,4}", inputs.get("count", ""))
    count = min(MOST_MODULES, int(digits.group()) if digits else 1)
    written: list[str] = []
    for number in range(1, count + 1):
        choices = fork(number)
        instruction = rewrite(current, feedback, choices)
        rules = len(rules_in(instruction)) - len(rules_in(current))
        source = _TEMPLATE.format(
            number=f"{len(rules_in(instruction))}-{number}",
            rules=max(0, rules),
            base=match.group(1) if match else "0000",
            fields=fields,
            instruction=instruction,
            end="(" if choices.uniform("broken") < BROKEN else "",
        )
        written.append(f"```python\n{source}\n```")
    return written


def _signature_in(source: str) -> tuple[str, str]:
    """Return the fields and the instruction of the first signature in a source."""
    try:
        texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        texts = []
    strings = [text for text in texts if isinstance(text, str)]
    fields = next((text for text in strings if "->" in text), "question -> answer")
    return fields, max((text for text in strings if text != fields), key=len, default="")
