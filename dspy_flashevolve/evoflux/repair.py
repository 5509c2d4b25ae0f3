"""Repairs of a workflow that need no language model: of what the check or a run complains of."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any, cast

from dspy_flashevolve.evoflux.execution import Execution
from dspy_flashevolve.evoflux.schemas import Path, Schema, can_fit, faults_of, properties_of
from dspy_flashevolve.evoflux.tools import ToolSpec
from dspy_flashevolve.evoflux.workflow import Complaint, Node, Reference, Workflow, wanted_at

LIKENESS = 0.55
"""Similarity of two names (difflib's ratio) from which one is taken for the other. A round number: "city_name" and
"name" have .62, "query" and "limit" .20."""
SURE = 0.75
"""Similarity from which a parameter is filled from a field: with less, "amount" took an item's "count" (.73)."""
CLEAR = 0.05
"""Of two tools whose names are alike by less than this difference, and that both take what is given, an LM has to say
which one is meant: "run_query" is like "read_query" by .74 and like "write_query" by .70."""
_LONGEST_NAME = 100
"""Characters of names that are compared, in quadratic time: an output's key may have a million."""
_MOST_FIELDS = 1000
"""Fields of an output that are looked through; a round number."""
_ROUNDS = 8
"""Repairs follow on each other (a tool is named right, then its parameters); more rounds than that go in circles."""


def alike(first: str, second: str) -> float:
    """How alike two names are, from 0 to 1; one that holds the other counts as nearly the same."""
    first, second = first[:_LONGEST_NAME].lower(), second[:_LONGEST_NAME].lower()
    ratio = SequenceMatcher(None, first, second).ratio()
    holds = min(len(first), len(second)) > 1 and (first in second or second in first)
    return max(ratio, 0.8) if holds else ratio


def closest(name: str, names: Sequence[str]) -> str | None:
    """Return the name that is most like another, if any is enough."""
    best = max(names, key=lambda other: alike(name, other), default=None)
    return best if best is not None and alike(name, best) >= LIKENESS else None


@dataclass(frozen=True)
class Repairer:
    """Repairs workflows by what schemas, names and known values say: inputs of the question, and outputs of nodes."""

    tools: Mapping[str, ToolSpec]
    inputs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    outputs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def repaired(self, workflow: Workflow) -> Workflow:
        """Repair what the static check complains of, as far as it is clear how."""
        for _ in range(_ROUNDS):
            complaints = workflow.check(self.tools)
            if any(each.kind == "shape" for each in complaints):
                break  # while two nodes share an identifier, a complaint does not say which of them it means
            changed = workflow
            for complaint in complaints:
                changed = self._answered(changed, complaint)
            if changed == workflow:
                break
            workflow = changed
        return workflow

    def repaired_run(self, workflow: Workflow, execution: Execution) -> Workflow:
        """Repair what a run complained of: references to fields that are not there, arguments against the schema."""
        known = replace(self, outputs=execution.outputs)
        for run in execution.failures:
            if run.path and run.tool in self.tools:
                complaint = Complaint(run.node, run.path, run.error, "reference")
                workflow = known._answered(workflow, complaint)
        return known.repaired(workflow)

    def _answered(self, workflow: Workflow, complaint: Complaint) -> Workflow:
        """Answer one complaint, or leave the workflow as it is."""
        node = next((node for node in reversed(workflow.nodes) if node.id == complaint.node), None)
        spec = self.tools.get(node.tool) if node is not None else None
        if node is None:
            return workflow
        if complaint.kind == "tool":
            tool = self._tool_like(node)
            return workflow if tool is None else with_node(workflow, node, node.changed(tool=tool))
        if spec is None or not complaint.path or complaint.kind not in ("parameter", "reference"):
            return workflow
        # What is wrong inside the value of a reference is answered by another reference.
        path = next((where for where, _ in node.references if where == complaint.path[: len(where)]), complaint.path)
        wanted = wanted_at(spec.input_schema, path)
        value = None if isinstance(wanted, str) else self._value_for(workflow, node, path, wanted)
        return workflow if value is None else with_node(workflow, node, with_parameter(node, path, value))

    def _tool_like(self, node: Node) -> str | None:
        """Return the tool that a node most likely means, by name and parameters; None where two may be meant."""
        given = set(node.parameters)
        known = {name: set(properties_of(spec.input_schema)) for name, spec in self.tools.items()}
        likeness = {name: alike(node.tool, name) for name in known}

        def fit(name: str) -> float:
            return likeness[name] + len(given & known[name]) / max(1, len(given | known[name]))

        best = max(known, key=fit, default=None)
        if best is None or fit(best) < LIKENESS:
            return None
        if given and not given & known[best] and self.tools[best].effect != "read":
            return None  # a name alone is not enough to write
        rivals = [name for name in known if likeness[name] > likeness[best] - CLEAR and given <= known[name]]
        return best if set(rivals) <= {best} else None

    def _value_for(self, workflow: Workflow, node: Node, path: Path, wanted: Schema) -> Any:
        """Find a value for a parameter that is missing or wrong; None where nothing suggests one."""
        reference = next((each for where, each in node.references if where == path), None)
        if reference is None and (coerced := coerced_to(value_at(node.parameters, path), wanted)) is not None:
            return coerced
        # What a field is called where it is wanted, and what it was called where it was looked for in vain.
        names = [str(path[-1])]
        names += reference.path[-1:] if reference else ()
        for source in sources(workflow, node, reference):
            if found := self._field_of(source, names, wanted):
                return found.as_json()
        given = closest(names[0], [key for key, value in self.inputs.items() if not faults_of(value, wanted)])
        return self.inputs[given] if given is not None else None

    def _field_of(self, source: Node, names: Sequence[str], wanted: Schema) -> Reference | None:
        """Find the field of an output that fits and has one of some names; of two, the second was asked for in vain."""
        if source.id in self.outputs:
            fields = list(itertools.islice(_fields_in(self.outputs[source.id]), _MOST_FIELDS))
            fitting = [path for path, value in fields if not faults_of(value, wanted)]
        else:
            spec = self.tools.get(source.tool)
            known = properties_of(spec.output_schema if spec is not None else None)
            fields = [((name,), given) for name, given in known.items()]
            fitting = [path for path, given in fields if can_fit(given, wanted)]

        def likeness(path: Path) -> float:
            own = next((part for part in reversed(path) if isinstance(part, str)), None)
            return max(alike(own, name) for name in names) if own is not None else 0.0

        best = max(fitting, key=lambda path: (likeness(path), -len(path)), default=None)
        is_only = len(names) > 1 and len([path for path, _ in fields if path]) <= 1
        if best is None or not (is_only or likeness(best) >= SURE):
            return None
        return Reference(source.id, tuple(map(str, best)))


def coerced_to(value: Any, wanted: Schema) -> Any:
    """Return a value as a schema wants it, where that loses nothing; None where it cannot be.

    >>> coerced_to("5", {"type": "integer"}), coerced_to("red", {"enum": ["RED", "BLUE"]}), coerced_to(3, {})
    (5, 'RED', None)
    """
    forms: list[Any] = [json.dumps(value), [value]]
    if isinstance(value, str):
        if choices := [choice for choice in wanted.get("enum") or () if isinstance(choice, str)]:
            return closest(value, choices)
        forms = [value.strip()]
        with contextlib.suppress(ValueError, RecursionError):
            forms.append(json.loads(value))
        forms.append([value])
    fitting = (form for form in forms if value is not None and wanted and not faults_of(form, wanted))
    return next(fitting, None)


def sources(workflow: Workflow, node: Node, reference: Reference | None = None) -> list[Node]:
    """The nodes whose output a parameter may take: those before it, nearest first, and first the one that it named."""
    later = dependants(workflow, node.id) | {node.id}
    position = workflow.nodes.index(node)
    found = [other for other in reversed(workflow.nodes[:position]) if other.id not in later]
    found += [other for other in workflow.nodes[position + 1 :] if other.id not in later]
    return sorted(found, key=lambda other: -alike(other.id, reference.node)) if reference is not None else found


def dependants(workflow: Workflow, id: str) -> set[str]:
    """The nodes that need a node, directly or by others."""
    found: set[str] = set()
    while more := {node.id for node in workflow.nodes if node.id not in found and {id, *found} & set(node.needs)}:
        found |= more
    return found


def _fields_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the fields of an output, outermost first; of a list its first item."""
    yield path, value
    if isinstance(value, dict):
        for name, inner in list(cast("dict[str, Any]", value).items())[:50]:
            if "." not in name:  # else no reference can name it
                yield from _fields_in(inner, (*path, name))
    elif isinstance(value, list) and value and len(path) < 6:
        yield from _fields_in(value[0], (*path, 0))


def value_at(value: Any, path: Path) -> Any:
    """Return what is at a path of a value; None where nothing is."""
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def with_parameter(node: Node, path: Path, value: Any) -> Node:
    """Return a node with one parameter set; unchanged where there is no such place."""
    parameters = copy.deepcopy(node.parameters)
    with contextlib.suppress(KeyError, IndexError, TypeError):
        value_at(parameters, path[:-1])[path[-1]] = value
    return node.changed(parameters=parameters)


def with_node(workflow: Workflow, old: Node, *new: Node) -> Workflow:
    """Return a workflow with others in the place of one of its nodes."""
    position = workflow.nodes.index(old)
    return Workflow((*workflow.nodes[:position], *new, *workflow.nodes[position + 1 :]))
