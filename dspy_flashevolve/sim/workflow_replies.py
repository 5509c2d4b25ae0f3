"""The simulated model as the planner of Evoflux: it writes the steps that the question names, now and then with a flaw.

A question names steps in lines such as ``Step find: find_city {"name": "Oslo"}``, where references are written as in a
workflow. Asked for an edit, it writes the steps that the feedback complains of anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from dspy_flashevolve.sim.reply_model import Choices

FLAWS = 0.5
"""Probability that a step is written with a flaw. Not measured: large, so that a workflow of three steps has some."""
_STEP = re.compile(r"^Step (\w+): (\w+) (\{.*\})$", re.MULTILINE)
_COMPLAINT = re.compile(r"^(?:check: )?node '(\w+)'[,:] (?!\{|\[)", re.MULTILINE)


def workflow_fields(inputs: Mapping[str, str], names: list[str], choices: Choices) -> dict[str, Any] | None:
    """Return the output fields of a reply to a prompt of Evoflux; None for other prompts.

    Args:
        inputs: the prompt's fields.
        names: of the output fields.
        choices: random choices of this request.
    """
    if "nodes" in names and "tools" in inputs:
        steps = _STEP.findall("\n".join(inputs.values()))
        named = set(_COMPLAINT.findall(inputs.get("feedback", ""))) if "removed" in names else set[str]()
        nodes = [_node(id, tool, text, choices) for id, tool, text in steps if not named or id in named]
        return {"nodes": nodes, "removed": []} if "removed" in names else {"nodes": nodes}
    if "citations" in names and "evidence" in inputs:
        lines = [line.split(" | ") for line in inputs["evidence"].splitlines()]
        cited = [parts[0] for parts in lines if len(parts) > 2 and not parts[2].startswith("DID NOT RUN")]
        told = "; ".join(f"{parts[0]}: {parts[2]}" for parts in lines if parts[0] in cited)
        return {name: cited if name == "citations" else told for name in names}
    return None


def _node(id: str, tool: str, text: str, choices: Choices) -> dict[str, Any]:
    """Write one step, with the name of its tool or its first parameter's wrong where it has a flaw."""
    parameters: dict[str, Any] = json.loads(text)
    if choices.uniform(f"flaw {id}") < FLAWS:
        if choices.uniform(f"kind {id}") < 0.5 or not parameters:
            tool = f"{tool}s"
        else:
            first = next(iter(parameters))
            parameters = {f"{name}_" if name == first else name: value for name, value in parameters.items()}
    return {"id": id, "tool": tool, "parameters": parameters, "after": []}
