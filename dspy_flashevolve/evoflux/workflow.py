"""A workflow: calls of tools, in which parameters may refer to fields of earlier outputs, and its static check.

A workflow is written as lines of Python, one for each node: ``n2 = order(sku=n1["rows"][0]["sku"])``. In a node's
parameters, at any depth, ``{"$ref": "n1.rows.0.sku"}`` is a reference to a field whose name has no dot, and
``{"$text": ["Found ", {"$ref": "n1.rows.0.sku"}]}`` a text that is joined once such fields are known.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, field_validator

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.evoflux.schemas import Path, TooMuchWorkError, can_fit, faults_of, field_schema, limited_work
from dspy_flashevolve.evoflux.tools import ToolSpec

REFERENCE = "$ref"
TEXT = "$text"


def python_name(name: str) -> str:
    """Write a name as an ASCII identifier of Python: ``get-time`` as ``get_time``."""
    identifier = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"_{identifier}" if not identifier.isidentifier() else identifier + "_" * keyword.iskeyword(identifier)


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
    text = cast("dict[str, Any]", value)[REFERENCE]
    if not isinstance(text, str):
        return None
    node, *path = text.split(".")
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


class Node(BaseModel):
    """One tool call.

    Attributes:
        id: identifier of Python in ASCII, unique in its workflow.
        tool: name of the tool.
        parameters: of JSON's types, with references among them; not to be changed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    tool: str
    parameters: dict[str, Any] = Field(default_factory=dict)

    @field_validator("id")
    @classmethod
    def _is_identifier(cls, id: str) -> str:
        if python_name(id) != id:
            raise ValueError(f"{id!r} is no identifier, expected letters, digits and underscores")
        return id

    @field_validator("parameters")
    @classmethod
    def _have_names(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        if reference_in(parameters) is not None:
            raise ValueError("parameters are a reference, expected a value for each name")
        return parameters

    @property
    def references(self) -> list[tuple[Path, Reference]]:
        """The references among the parameters, each with its path."""
        return list(references_in(self.parameters))

    @property
    def needs(self) -> set[str]:
        """The nodes whose outputs it refers to."""
        return {reference.node for _, reference in self.references}


_NODES = TypeAdapter(tuple[Node, ...])


@dataclass(frozen=True, slots=True)
class Complaint:
    """One thing that the static check has against a workflow.

    Args:
        node: identifier of the node; empty where it is about the whole workflow.
        path: of the parameter; ("nodes",) or ("tool",) where ``kind`` says that it is none.
        message: what is wrong, and what was expected.
        kind: "shape" of the workflow, "tool" of the node, "parameter" and "reference" of a parameter.
    """

    node: str
    path: Path
    message: str
    kind: Literal["shape", "tool", "parameter", "reference"]

    def __str__(self) -> str:
        return f"node {self.node!r}, field {field_name(self.path)!r}: {self.message}"


@dataclass(frozen=True, slots=True)
class Workflow:
    """Tool calls in the order of their lines; ``str`` writes them as Python.

    Raises:
        ConfigurationError: two nodes have the same identifier.
    """

    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        ids = [node.id for node in self.nodes]
        if repeated := sorted({id for id in ids if ids.count(id) > 1}):
            raise ConfigurationError(f"the workflow has several nodes {repeated}, expected an identifier for each node")

    @classmethod
    def from_json(cls, data: Any) -> Workflow:
        """Read a workflow from JSON data: a list of nodes, or an object that has it as ``nodes``.

        Raises:
            ConfigurationError: it has not the shape of a workflow; the message names the node and the field.
        """
        try:
            return cls(_NODES.validate_python(data["nodes"] if isinstance(data, dict) else data))
        except (KeyError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"the workflow is no list of nodes: {error!s:.500}") from None

    def as_json(self) -> dict[str, Any]:
        """Return the workflow as a JSON object; :meth:`from_json` makes an equal workflow of it."""
        return {"nodes": [node.model_dump(mode="json") for node in self.nodes]}

    def as_python(self, names: Mapping[str, str] | None = None) -> str:
        """Write the workflow as lines of Python; ``names`` says how Python calls a tool: tool -> name."""
        lines: list[str] = []
        for node in self.nodes:
            arguments = [
                f"{name}={_python(value)}" if python_name(name) == name else f"**{{{name!r}: {_python(value)}}}"
                for name, value in node.parameters.items()
            ]
            tool = (names or {}).get(node.tool) or python_name(node.tool)
            lines.append(f"{node.id} = {tool}({', '.join(arguments)})")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.as_python()

    def check(self, tools: Mapping[str, ToolSpec]) -> list[Complaint]:
        """List what is wrong with the workflow before any call; nothing is run.

        A workflow without complaints names tools that exist, its literal parameters satisfy their schemas, and its
        references name fields that earlier nodes may have, of a type that fits.
        """
        with limited_work():
            return list(self._complaints(tools))

    def _complaints(self, tools: Mapping[str, ToolSpec]) -> Iterator[Complaint]:
        if not self.nodes:
            yield Complaint("", ("nodes",), "the workflow has no node, expected at least one", "shape")
        earlier: dict[str, Node] = {}
        for node in self.nodes:
            spec = tools.get(node.tool)
            if spec is None:
                yield Complaint(node.id, ("tool",), f"there is no tool {node.tool!r}, but {sorted(tools)}", "tool")
            else:
                with suppress(TooMuchWorkError):
                    opaque = [path for path, _ in node.references]
                    for path, message in faults_of(node.parameters, spec.input_schema, opaque):
                        yield Complaint(node.id, path, message, "parameter")
                for path, reference in node.references:
                    if message := _reference_fault(reference, spec, path, earlier, tools):
                        yield Complaint(node.id, path, message, "reference")
            earlier[node.id] = node


def _reference_fault(
    reference: Reference, spec: ToolSpec, path: Path, earlier: Mapping[str, Node], tools: Mapping[str, ToolSpec]
) -> str:
    """Say why a reference cannot give what a parameter of a tool, at a path, accepts; empty where it may."""
    if reference.node not in earlier:
        return f"there is no node {reference.node!r} before it, but {list(earlier)}"
    source = tools.get(earlier[reference.node].tool)
    if source is None or source.output_schema is None:
        return ""
    offered, accepted = field_schema(source.output_schema, reference.path), parameter_schema(spec, path)
    if isinstance(offered, str):
        return f"the output of {reference.node!r} {offered}"
    if isinstance(accepted, str) or can_fit(offered, accepted):
        return ""
    return f"{reference.as_json()} is {offered.get('type')}, expected {accepted.get('type')}"


def parameter_schema(spec: ToolSpec, path: Path) -> dict[str, Any] | str:
    """Return what a tool's schema says of the value at a path, as ``field_schema``; of a text's part, nothing."""
    return {} if TEXT in path else field_schema(spec.input_schema, path)


def field_name(path: Path) -> str:
    """Write a parameter's path as people read it: ``rows.0.id``."""
    return ".".join(map(str, path)) or "parameters"


def _python(value: Any) -> str:
    """Write a parameter's value as an expression of Python."""
    reference = reference_in(value)
    if reference is not None and python_name(reference.node) == reference.node:
        parts = (part if re.fullmatch(r"-?\d+", part, re.ASCII) else repr(part) for part in reference.path)
        return reference.node + "".join(f"[{part}]" for part in parts)
    if is_text(value):
        written = [_python(part) for part in value[TEXT]]
        return " + ".join(written if value[TEXT] and isinstance(value[TEXT][0], str) else ["''", *written])
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return "{" + ", ".join(f"{name!r}: {_python(inner)}" for name, inner in fields.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_python, cast("list[Any]", value))) + "]"
    return repr(value)
