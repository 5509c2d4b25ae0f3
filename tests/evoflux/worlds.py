"""Tools, planners and states that the tests of Evoflux share. The planners are scripted, no language models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
GOOD = 'city = find_city(name="Oslo")\nnow = weather(city_id=city["id"])'
"""A plan that answers how warm it is in Oslo."""


def reply_for(prompt: str, **fields: str) -> str:
    """A reply in dspy's format; the prompts speak of JSON, which tests.fakes takes for another format."""
    del prompt
    return "\n\n".join([f"[[ ## {name} ## ]]\n{text}" for name, text in fields.items()] + ["[[ ## completed ## ]]"])


class ScriptedPlanner:
    """An LM that gives written replies: plans and edits in turn, the last again and again, and cites every node.

    Args:
        plans: replies to requests for a plan.
        edits: replies to requests for an edit; without any, every edit is of nothing.
    """

    def __init__(self, plans: list[str], edits: list[str] | None = None) -> None:
        self.plans, self.edits = list(plans), list(edits or ["nothing"])
        self.prompts: list[str] = []
        self.lm = fake_lm(self._reply)

    def _reply(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if (asked := self.asked[-1]) == "answer":
            return reply_for(prompt, answer="4 degrees", citations='["city", "now", "nothing"]')
        replies = self.plans if asked == "plan" else self.edits
        return reply_for(prompt, plan=replies.pop(0) if len(replies) > 1 else replies[0])

    @property
    def asked(self) -> list[str]:
        """Of each request what it was for."""
        return [
            "edit" if "[[ ## workflow ## ]]" in each else "plan" if "[[ ## plan ## ]]" in each else "answer"
            for each in self.prompts
        ]


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
