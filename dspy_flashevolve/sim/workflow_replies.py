"""The simulated model as the planner of Evoflux: it writes the steps that the question names, now and then with a flaw.

A question names steps in lines such as ``Step city = find_city(name="Oslo")``. Asked to change a workflow, it writes
the steps anew that the feedback complains of, and the other lines as they were.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dspy_flashevolve.sim.choices import Choices

FLAWS = 0.5
"""Probability that a step is written with a flaw. Not measured: large, so that a workflow of three steps has some."""
_STEP = re.compile(r"^Step (\w+) = (\w+)\((.*)\)$", re.MULTILINE)
_COMPLAINT = re.compile(r"^(?:check: )?node '(\w+)'[,:] (?!\{|\[)", re.MULTILINE)


def workflow_fields(inputs: Mapping[str, str], names: list[str], choices: Choices) -> dict[str, Any] | None:
    """Return the output fields of a reply to a prompt of Evoflux; None for other prompts.

    Args:
        inputs: the prompt's fields.
        names: of the output fields.
        choices: random choices of this request.
    """
    if "plan" in names and "tools" in inputs:
        named = set(_COMPLAINT.findall(inputs.get("feedback", "")))
        written = {line.split(" = ")[0]: line for line in inputs.get("workflow", "").splitlines()}
        steps = _STEP.findall("\n".join(inputs.values()))
        kept = written if named else {}
        lines = [
            _line(id, tool, arguments, choices) if id in named or id not in kept else kept[id]
            for id, tool, arguments in steps
        ]
        return {"plan": "\n".join(lines)}
    if "citations" in names and "evidence" in inputs:
        lines = [line.split(" | ") for line in inputs["evidence"].splitlines()]
        cited = [parts[0] for parts in lines if len(parts) > 2 and not parts[2].startswith("DID NOT RUN")]
        told = "; ".join(f"{parts[0]}: {parts[2]}" for parts in lines if parts[0] in cited)
        return {name: cited if name == "citations" else told for name in names}
    return None


def _line(id: str, tool: str, arguments: str, choices: Choices) -> str:
    """Write one step, with the name of its tool or its first parameter's wrong where it has a flaw."""
    if choices.uniform(f"flaw {id}") < FLAWS:
        if choices.uniform(f"kind {id}") < 0.5 or not arguments:
            tool = f"{tool}s"
        else:
            arguments = arguments.replace("=", "_=", 1)
    return f"{id} = {tool}({arguments})"
