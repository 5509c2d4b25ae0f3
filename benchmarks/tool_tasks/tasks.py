"""Sixty tasks on servers in memory: a shop's stock, a mailbox, and a calendar. They stand in for MCP servers.

Each task has a workflow that does it, of which a scripted planner makes flawed copies, and an oracle that compares the
whole state with the one expected, so that what is unrelated has to be unchanged. A third is held out: the same servers
under other names of tools and parameters.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio

from dspy_flashevolve.evoflux import ToolSpec
from dspy_flashevolve.evoflux.tools import Effect, Schema

ITEMS = ("tea", "coffee", "sugar", "milk", "bread", "rice", "salt", "honey", "oats", "beans")
CALL_SECONDS = 1.0
"""What every tool call takes, in virtual time; a round number."""

_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
Handler = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]


def first_state() -> dict[str, Any]:
    """The state in which every task begins."""
    stock = {f"sku-{number}": {"name": name, "count": 10 + number} for number, name in enumerate(ITEMS)}
    return {"stock": stock, "mail": [], "events": []}


def _find(state: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    for sku, item in state["stock"].items():
        if item["name"] == given["name"]:
            return {"sku": sku, "count": item["count"]}
    raise KeyError(f"there is no item {given['name']!r}")


def _order(state: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    if given["sku"] not in state["stock"]:
        raise KeyError(f"there is no sku {given['sku']!r}")
    state["stock"][given["sku"]]["count"] += given["amount"]
    return {"order_id": f"order-{given['sku']}", "total": state["stock"][given["sku"]]["count"]}


def _mail(state: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    state["mail"].append({"to": given["to"], "body": given["body"]})
    return {"message_id": f"mail-{len(state['mail'])}"}


def _book(state: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    if not str(given["title"]).startswith(("mail-", "order-", "sku-")):
        raise ValueError(f"the title {given['title']!r} names no message, order or sku")
    state["events"].append({"title": given["title"], "day": given["day"]})
    return {"event_id": f"event-{len(state['events'])}"}


@dataclass(frozen=True)
class Described:
    """A tool of a server: its handler, parameters and outputs, and what it does."""

    handler: Handler
    inputs: dict[str, Schema]
    outputs: dict[str, Schema]
    effect: Effect
    does: str


SERVERS: dict[str, Described] = {
    "find_item": Described(
        _find, {"name": _TEXT}, {"sku": _TEXT, "count": _NUMBER}, "read", "Find an item of the stock."
    ),
    "order_item": Described(
        _order,
        {"sku": _TEXT, "amount": _NUMBER},
        {"order_id": _TEXT, "total": _NUMBER},
        "write",
        "Order more of an item.",
    ),
    "send_mail": Described(_mail, {"to": _TEXT, "body": _TEXT}, {"message_id": _TEXT}, "write", "Send a message."),
    "book_event": Described(
        _book,
        {"title": _TEXT, "day": {"enum": ["monday", "tuesday", "friday"]}},
        {"event_id": _TEXT},
        "write",
        "Enter an event in the calendar.",
    ),
}
HELD_OUT_NAMES = {
    "find_item": "catalog_lookup", "order_item": "purchase_create", "send_mail": "message_post",
    "book_event": "agenda_insert", "name": "product", "sku": "code", "amount": "units", "to": "recipient",
    "body": "content",
    "title": "subject", "day": "weekday", "count": "left", "order_id": "purchase", "total": "sum", "message_id": "post",
    "event_id": "entry",
}  # fmt: skip
"""Name of a tool or field -> its name in the held-out tasks."""


class MemoryWorld:
    """The servers' state, which candidates copy."""

    def __init__(self, state: dict[str, Any], renamed: Mapping[str, str]) -> None:
        self.state, self.renamed = state, renamed
        self._originals = {new: old for old, new in renamed.items()}

    async def specs(self) -> list[ToolSpec]:
        """The tools of this state."""
        return [self._spec(name, described) for name, described in SERVERS.items()]

    def _spec(self, name: str, described: Described) -> ToolSpec:
        def fields(given: Mapping[str, Schema]) -> Schema:
            names = {self.renamed.get(field, field): schema for field, schema in given.items()}
            return {
                "type": "object", "properties": names, "required": list(names), "additionalProperties": False,
            }  # fmt: skip

        shown = self.renamed.get(name, name)

        async def call(**given: Any) -> Any:
            return await self.call(shown, given)

        inputs, outputs = fields(described.inputs), fields(described.outputs)
        return ToolSpec(shown, described.does, inputs, outputs, described.effect, call)

    def holds(self, tool: str) -> bool:
        """Whether a tool works on this state."""
        return self._originals.get(tool, tool) in SERVERS

    async def fork(self) -> MemoryWorld:
        """Copy the state."""
        return MemoryWorld(copy.deepcopy(self.state), self.renamed)

    async def prepare(self, tool: str) -> None:
        """Nothing has to start."""

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        """Call a tool on this state."""
        await anyio.sleep(CALL_SECONDS)
        given = {self._originals.get(field, field): value for field, value in arguments.items()}
        made = SERVERS[self._originals.get(tool, tool)].handler(self.state, given)
        return {self.renamed.get(field, field): value for field, value in made.items()}

    async def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class ToolTask:
    """A task.

    Args:
        name: of it.
        question: what is to be done.
        nodes: a workflow that does it, in JSON.
        servers: how many it works on.
        is_held_out: its tools and fields have other names.
    """

    name: str
    question: str
    nodes: tuple[dict[str, Any], ...]
    servers: int
    is_held_out: bool

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[MemoryWorld, None]:
        """Give a fresh state for the block."""
        yield MemoryWorld(first_state(), HELD_OUT_NAMES if self.is_held_out else {})

    async def is_reached(self, world: MemoryWorld) -> bool:
        """The oracle: whether a state is the one that the task wants, and nothing else has changed."""
        return world.state == self.wanted()

    def wanted(self) -> dict[str, Any]:
        """The state after the task's own workflow."""
        wanted = first_state()
        outputs: dict[str, dict[str, Any]] = {}
        back = {new: old for old, new in HELD_OUT_NAMES.items()} if self.is_held_out else {}
        for node in self.nodes:
            given = {}
            for field, value in node["parameters"].items():
                if isinstance(value, dict):
                    source, name = value["$ref"].split(".")
                    value = outputs[source][back.get(name, name)]
                given[back.get(field, field)] = value
            outputs[node["id"]] = SERVERS[back.get(node["tool"], node["tool"])].handler(wanted, given)
        return wanted


def tasks() -> list[ToolTask]:
    """All sixty: twenty over one server, twenty over two, twenty over three; every third is held out."""
    made: list[ToolTask] = []
    for number in range(60):
        item, servers, is_held_out = ITEMS[number % len(ITEMS)], number % 3 + 1, (number // 3) % 3 == 2
        amount, day = number % 7 + 1, ("monday", "tuesday", "friday")[number % 5 % 3]
        nodes: list[dict[str, Any]] = [
            {"id": "item", "tool": "find_item", "parameters": {"name": item}},
            {"id": "order", "tool": "order_item", "parameters": {"sku": {"$ref": "item.sku"}, "amount": amount}},
        ]
        question = f"Order {amount} more of {item}"
        if servers >= 2:
            mail = {"to": f"buyer{number}", "body": {"$ref": "order.order_id"}}
            nodes.append({"id": "mail", "tool": "send_mail", "parameters": mail, "after": ["order"]})
            question += f", send the order's id to buyer{number}"
        if servers == 3:
            event = {"title": {"$ref": "mail.message_id"}, "day": day}
            nodes.append({"id": "event", "tool": "book_event", "parameters": event, "after": ["mail"]})
            question += f", and book the message's id for {day}"
        if is_held_out:
            nodes = [_renamed(node) for node in nodes]
        made.append(ToolTask(f"task-{number}", question + ".", tuple(nodes), servers, is_held_out))
    return made


def _renamed(node: dict[str, Any]) -> dict[str, Any]:
    def value_of(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        source, field = value["$ref"].split(".")
        return {"$ref": f"{source}.{HELD_OUT_NAMES[field]}"}

    parameters = {HELD_OUT_NAMES[field]: value_of(value) for field, value in node["parameters"].items()}
    return {**node, "tool": HELD_OUT_NAMES[node["tool"]], "parameters": parameters}
