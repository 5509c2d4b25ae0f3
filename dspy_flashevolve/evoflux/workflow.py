"""A workflow: a graph of tool calls in which parameters may refer to fields of earlier outputs, and its static check.

In JSON a workflow is ``{"nodes": [{"id": "n1", "tool": "search", "parameters": {"query": "tea"}}, ...]}``. A parameter,
at any depth, may be a reference to a field whose name has no dot: ``{"$ref": "n1.rows.0.id"}``; and a text that is
joined once such fields are known: ``{"$text": ["Found ", {"$ref": "n1.rows.0.id"}]}``. ``after`` names nodes that have
to run before without giving an output.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, cast

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, field_validator

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.evoflux.schemas import (
    Path,
    Schema,
    TooMuchWorkError,
    can_fit,
    faults_of,
    field_schema,
    limited_work,
)
from dspy_flashevolve.evoflux.tools import ToolSpec

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
REFERENCE = "$ref"
TEXT = "$text"
PARAMETERS = {"parameters", "arguments", "args", "params", "input", "kwargs"}
"""Names under which models write a node's parameters in JSON."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A field of an earlier node's output.

    Args:
        node: identifier of the node.
        path: names of fields and numbers of items, from the output inwards; empty for the whole output.
    """

    node: str
    path: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the reference as a parameter's value."""
        return {REFERENCE: ".".join((self.node, *self.path))}


def reference_in(value: Any) -> Reference | None:
    """Read a parameter's value as a reference; None where it is none: it has other fields than ``$ref``."""
    if not isinstance(value, dict) or set(cast("dict[Any, Any]", value)) != {REFERENCE}:
        return None
    given = cast("dict[str, Any]", value)[REFERENCE]
    if not isinstance(given, str):
        return None
    node, *path = given.split(".")
    return Reference(node, tuple(path))


def references_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, Reference]]:
    """Yield each reference in a value with its path, outermost first."""
    reference = reference_in(value)
    if reference is not None:
        yield path, reference
    elif isinstance(value, dict):
        for name, inner in cast("dict[str, Any]", value).items():
            yield from references_in(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(cast("list[Any]", value)):
            yield from references_in(inner, (*path, index))


def is_text(value: Any) -> bool:
    """Whether a parameter's value is a text that is joined once its references are known."""
    return isinstance(value, dict) and set(cast("dict[Any, Any]", value)) == {TEXT} and isinstance(value[TEXT], list)


def wanted_at(schema: Schema, path: Path) -> Schema | str:
    """Return what a tool's schema says of the value at a path, as ``field_schema``; of a text's part, nothing."""
    return {} if TEXT in path else field_schema(schema, path)


class Node(BaseModel):
    """One tool call.

    Attributes:
        id: identifier, unique in its workflow.
        tool: name of the tool.
        parameters: of JSON's types, with references among them; not to be changed.
        after: nodes that have to run before it, beside those that it refers to.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    tool: str
    parameters: dict[str, Any] = Field(
        default_factory=dict, validation_alias=AliasChoices(*sorted(PARAMETERS, reverse=True))
    )
    after: tuple[str, ...] = ()

    @field_validator("parameters")
    @classmethod
    def _have_names(cls, given: dict[str, Any]) -> dict[str, Any]:
        if reference_in(given) is not None:
            raise ValueError("parameters are a reference, expected a value for each name")
        return given

    @property
    def references(self) -> list[tuple[Path, Reference]]:
        """The references among the parameters, each with its path."""
        return list(references_in(self.parameters))

    @property
    def needs(self) -> tuple[str, ...]:
        """The nodes that have to run before it."""
        return tuple(dict.fromkeys([*(reference.node for _, reference in self.references), *self.after]))

    def changed(self, **fields: Any) -> Node:
        """Return a copy with other values of some fields."""
        return self.model_copy(update=fields)


_NODES = TypeAdapter(tuple[Node, ...])


@dataclass(frozen=True, slots=True)
class Complaint:
    """What the static check has against a workflow.

    Args:
        node: identifier of the node; empty where it is about the whole workflow.
        path: of the parameter; ("id",), ("tool",) or ("after",) where ``kind`` says that it is none.
        message: what is wrong, and what was expected.
        kind: "shape" and "tool" of the node, "parameter" and "reference" of a parameter, "order" and "cycle".
    """

    node: str
    path: Path
    message: str
    kind: Literal["shape", "tool", "parameter", "reference", "order", "cycle"]

    def __str__(self) -> str:
        return f"node {self.node!r}, field {field_name(self.path)!r}: {self.message}"


@dataclass(frozen=True, slots=True)
class Workflow:
    """A graph of tool calls; ``nodes`` are in the order in which they run where nothing else orders them."""

    nodes: tuple[Node, ...]

    @classmethod
    def from_json(cls, given: Any) -> Workflow:
        """Read a workflow from JSON: text, an object with ``nodes``, or a list of nodes.

        Raises:
            ConfigurationError: it has not the shape of a workflow; the message names the node and the field.
        """
        try:
            given = json.loads(given) if isinstance(given, str) else given
            return cls(_NODES.validate_python(given["nodes"] if isinstance(given, dict) else given))
        except (KeyError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"the workflow is no JSON of a list of nodes: {error!s:.500}") from None

    def as_json(self) -> dict[str, Any]:
        """Return the workflow as a JSON object; :meth:`from_json` makes an equal workflow of it."""
        return {"nodes": [node.model_dump(mode="json") for node in self.nodes]}

    def __str__(self) -> str:
        """The workflow as canonical JSON."""
        return json.dumps(self.as_json(), ensure_ascii=False, sort_keys=True)

    def ordered(self) -> tuple[Node, ...]:
        """Return the nodes in an order in which each comes after what it needs; those of a cycle are left out."""
        done: dict[str, Node] = {}
        waiting = list(self.nodes)
        while ready := next((node for node in waiting if all(need in done for need in node.needs)), None):
            waiting.remove(ready)
            done[ready.id] = ready
        return tuple(done.values())

    def mermaid(self) -> str:
        """Draw the graph as a Mermaid flowchart; an edge is named after the field that it gives."""
        lines = ["flowchart TD"]
        lines += [f'    {_safe(node.id)}["{_text(node.id)}: {_text(node.tool)}"]' for node in self.nodes]
        for node in self.nodes:
            for path, reference in node.references:
                lines.append(f"    {_safe(reference.node)} -->|{_text(field_name(path))}| {_safe(node.id)}")
            lines += [f"    {_safe(before)} -.-> {_safe(node.id)}" for before in node.after]
        return "\n".join(lines)

    def check(self, tools: Mapping[str, ToolSpec]) -> list[Complaint]:
        """List what is wrong with the workflow before any call; nothing is run.

        A workflow without complaints names tools that exist, its literal parameters satisfy their schemas, and its
        references name fields that earlier nodes may have, of a type that fits.
        """
        with limited_work():
            complaints = list(_complaints(self, tools))
        if all(complaint.kind in ("parameter", "tool") for complaint in complaints):
            ran = {node.id for node in self.ordered()}
            for node in self.nodes:
                if node.id not in ran:
                    message = f"it waits for {list(node.needs)}, which wait for it: a cycle"
                    complaints.append(Complaint(node.id, ("after",), message, "cycle"))
        return complaints


def _complaints(workflow: Workflow, tools: Mapping[str, ToolSpec]) -> Iterator[Complaint]:
    """Yield what is wrong with each node by itself, and with its references."""
    if not workflow.nodes:
        yield Complaint("", ("nodes",), "the workflow has no node, expected at least one", "shape")
    by_id = {node.id: node for node in workflow.nodes}
    for number, node in enumerate(workflow.nodes):
        if not _NAME.match(node.id) or keyword.iskeyword(node.id):
            message = f"{node.id!r} is no identifier, expected letters, digits and underscores"
            yield Complaint(node.id, ("id",), message, "shape")
        elif any(other.id == node.id for other in workflow.nodes[:number]):
            yield Complaint(node.id, ("id",), "another node has the same identifier", "shape")
        for before in node.after:
            if before not in by_id:
                yield Complaint(node.id, ("after",), f"there is no node {before!r}, but {list(by_id)}", "order")
        spec = tools.get(node.tool)
        if spec is None:
            yield Complaint(node.id, ("tool",), f"there is no tool {node.tool!r}, but {sorted(tools)}", "tool")
        else:
            opaque = [path for path, _ in node.references]
            with suppress(TooMuchWorkError):
                for path, message in faults_of(node.parameters, spec.input_schema, opaque):
                    yield Complaint(node.id, path, message, "parameter")
            for path, reference in node.references:
                if message := _reference_fault(reference, wanted_at(spec.input_schema, path), by_id, tools):
                    yield Complaint(node.id, path, message, "reference")


def _reference_fault(
    reference: Reference, wanted: Schema | str, by_id: Mapping[str, Node], tools: Mapping[str, ToolSpec]
) -> str:
    """Say why a reference cannot give what a parameter wants; empty where it may."""
    if reference.node not in by_id:
        return f"there is no node {reference.node!r}, but {list(by_id)}"
    source = tools.get(by_id[reference.node].tool)
    if source is None or source.output_schema is None:
        return ""
    given = field_schema(source.output_schema, reference.path)
    if isinstance(given, str):
        return f"the output of {reference.node!r} {given}"
    if isinstance(wanted, str) or can_fit(given, wanted):
        return ""
    return f"{reference.as_json()} is {given.get('type')}, expected {wanted.get('type')}"


def field_name(path: Path) -> str:
    """Write a parameter's path as people read it: ``rows.0.id``."""
    return ".".join(map(str, path)) or "parameters"


def _safe(id: str) -> str:
    return re.sub(r"\W", "_", id, flags=re.ASCII) or "_"


def _text(text: str) -> str:
    return re.sub(r'["|<>\[\]{}`\n\r]', " ", text)
