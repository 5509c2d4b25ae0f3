"""Tools, planners and states that the tests of Evoflux share. The planners are scripted, no language models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import dspy

from dspy_flashevolve.evoflux import Workflow
from dspy_flashevolve.evoflux.plans import PlanError, read_plan
from tests.fakes import fake_lm

CITIES = {"oslo": {"id": 7, "country": "Norway"}, "rome": {"id": 3, "country": "Italy"}}


def find_city(name: str) -> dict[str, Any]:
    """Find a city by its name."""
    return CITIES[name.lower()]


def weather(city_id: int, unit: str = "celsius") -> dict[str, float]:
    """Say how warm it is in a city."""
    return {"temperature": {7: 4.0, 3: 21.0}[city_id] * (1.8 if unit == "fahrenheit" else 1)}


def send(text: str) -> str:
    """Send a message."""
    return f"sent {text}"


TOOLS = [find_city, weather, send]
READS = {"find_city": "read", "weather": "read"}
GOOD = {
    "nodes": [
        {"id": "city", "tool": "find_city", "parameters": {"name": "Oslo"}},
        {"id": "now", "tool": "weather", "parameters": {"city_id": {"$ref": "city.id"}}},
    ]
}
"""A workflow that answers how warm it is in Oslo."""


def good(**changes: Any) -> dict[str, Any]:
    """``GOOD`` with some fields of its second node changed."""
    first, second = GOOD["nodes"]
    return {"nodes": [first, {**second, **changes}]}


def reply_for(prompt: str, **fields: str) -> str:
    """A reply in dspy's format; the prompts speak of JSON, which tests.fakes takes for another format."""
    del prompt
    return "\n\n".join([f"[[ ## {name} ## ]]\n{text}" for name, text in fields.items()] + ["[[ ## completed ## ]]"])


class ScriptedPlanner:
    """An LM that gives written replies: plans and edits in turn, the last again and again, and cites every node.

    Args:
        plans: workflows in JSON, or texts.
        edits: lists of nodes that are new or changed, or whole replies.
    """

    def __init__(self, plans: list[Any], edits: list[Any] | None = None) -> None:
        self.plans, self.edits = list(plans), list(edits or [])
        self.prompts: list[str] = []
        self.lm = fake_lm(self._reply)

    def _reply(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if "[[ ## workflow ## ]]" in prompt:
            changed = _next(self.edits) or []
            return reply_for(prompt, plan=changed if isinstance(changed, str) else _edited(prompt, changed))
        if "[[ ## plan ## ]]" in prompt:
            plan = _next(self.plans)
            return reply_for(prompt, plan=plan if isinstance(plan, str) else json.dumps(plan["nodes"]))
        return reply_for(prompt, answer="4 degrees", citations='["city", "now", "nothing"]')

    @property
    def asked(self) -> list[str]:
        """Of each request what it was for."""
        return [
            "edit" if "[[ ## workflow ## ]]" in each else "plan" if "[[ ## plan ## ]]" in each else "answer"
            for each in self.prompts
        ]


def _edited(prompt: str, changed: list[dict[str, Any]]) -> str:
    """The workflow that a request for an edit shows, with some nodes new or changed."""
    shown = prompt.rsplit("[[ ## workflow ## ]]\n", 1)[1].split("\n\n[[ ## ")[0]
    by_id = {node["id"]: node for node in changed}
    with suppress(PlanError):  # a prompt with a picture has no such text
        nodes = [by_id.pop(node["id"], node) for node in read_plan(shown, {}).as_json()["nodes"]]
        return json.dumps([*nodes, *by_id.values()])
    return json.dumps(list(by_id.values()))


def _next(replies: list[Any]) -> Any:
    return replies.pop(0) if len(replies) > 1 else replies[0] if replies else None


class Ledger:
    """A state in memory that can be copied: rows, and how often something was written on the real one.

    Args:
        rows: of it.
    """

    def __init__(self, rows: list[str] | None = None) -> None:
        self.rows = list(rows or [])
        self.forks: list[Ledger] = []
        self.is_closed = False

    def add(self, row: str) -> dict[str, int]:
        """Write a row."""
        self.rows.append(row)
        return {"rows": len(self.rows)}

    def count(self, wanted: int = 0) -> dict[str, int]:
        """Count the rows, or fail where it is not as many as wanted."""
        if wanted and wanted != len(self.rows):
            raise ValueError(f"there are {len(self.rows)} rows, not {wanted}")
        return {"rows": len(self.rows)}

    def holds(self, tool: str) -> bool:
        return tool in ("add", "count")

    async def prepare(self, tool: str) -> None:
        pass

    async def fork(self) -> Ledger:
        copy = Ledger(self.rows)
        self.forks.append(copy)
        return copy

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        return getattr(self, tool)(**arguments)

    async def close(self) -> None:
        self.is_closed = True


def workflow(*nodes: tuple[str, str, dict[str, Any]]) -> Workflow:
    """A workflow of (identifier, tool, parameters)."""
    return Workflow.from_json([{"id": id, "tool": tool, "parameters": given} for id, tool, given in nodes])


def tool(function: Callable[..., Any], name: str) -> dspy.Tool:
    return dspy.Tool(function, name=name)
