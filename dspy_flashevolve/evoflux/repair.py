"""Repairs of a workflow that need no language model: of what the check or a run complains of."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, cast

from dspy_flashevolve.evoflux.execution import NodeRun
from dspy_flashevolve.evoflux.schemas import Path, Schema, can_fit, faults_of, properties_of
from dspy_flashevolve.evoflux.tools import ToolSpec
from dspy_flashevolve.evoflux.workflow import Complaint, Node, Reference, Workflow, parameter_schema

LIKENESS = 0.55
"""Similarity of two names (difflib's ratio) from which one is taken for the other. A round number: "city_name" and
"name" have .62, "query" and "limit" .20."""
SURE = 0.75
"""Similarity from which a parameter is filled from a field: with less, "amount" took an item's "count" (.73)."""
CLEAR = 0.05
"""Of two tools whose names are alike by less than this difference, and that both have all parameters of a node, an LM
has to say which one is meant: "run_query" is like "read_query" by .74 and like "write_query" by .70."""
_LONGEST_NAME = 100
"""Characters of names that are compared, in quadratic time: an output's key may have a million."""
_MOST_FIELDS = 1000
"""Fields of an output that are looked through; a round number."""
_ROUNDS = 8
"""Repairs follow on each other (a tool is named right, then its parameters); more rounds than that go in circles."""


def repaired(
    workflow: Workflow, tools: Mapping[str, ToolSpec], outputs: Mapping[str, Any], failures: Sequence[NodeRun] = ()
) -> Workflow:
    """Repair what a run, by its ``failures``, and the static check complain of, as far as schemas, names and the
    outputs of nodes say how."""
    for run in failures:
        if run.path and run.tool in tools:
            workflow = _answered(workflow, Complaint(run.node, run.path, run.error, "reference"), tools, outputs)
    for _ in range(_ROUNDS):
        before = workflow
        for complaint in before.check(tools):
            workflow = _answered(workflow, complaint, tools, outputs)
        if workflow == before:
            break
    return workflow


def _answered(
    workflow: Workflow, complaint: Complaint, tools: Mapping[str, ToolSpec], outputs: Mapping[str, Any]
) -> Workflow:
    """Answer one complaint, or leave the workflow as it is."""
    node = next((node for node in workflow.nodes if node.id == complaint.node), None)
    if node is None:
        return workflow
    changes: dict[str, Any] = {}
    if complaint.kind == "tool":
        if (tool := _tool_like(node, tools)) is not None:
            changes = {"tool": tool}
    elif (spec := tools.get(node.tool)) is not None and complaint.path:
        # What is wrong inside the value of a reference is answered by another reference.
        path = next((where for where, _ in node.references if where == complaint.path[: len(where)]), complaint.path)
        schema = parameter_schema(spec, path)
        value = None if isinstance(schema, str) else _value_for(workflow, node, path, schema, tools, outputs)
        if value is not None:
            changes = {"parameters": _with_value(node.parameters, path, value)}
    changed = node.model_copy(update=changes)
    return Workflow(tuple(changed if each is node else each for each in workflow.nodes))


def _tool_like(node: Node, tools: Mapping[str, ToolSpec]) -> str | None:
    """Return the tool that a node most likely means, by name and parameters; None where two may be meant."""
    names = set(node.parameters)
    parameters = {name: set(properties_of(spec.input_schema)) for name, spec in tools.items()}
    likeness = {name: alike(node.tool, name) for name in tools}

    def fit(name: str) -> float:
        return likeness[name] + len(names & parameters[name]) / max(1, len(names | parameters[name]))

    best = max(tools, key=fit, default=None)
    if best is None or fit(best) < LIKENESS:
        return None
    if names and not names & parameters[best] and tools[best].effect != "read":
        return None  # a name alone is not enough to write
    rivals = {name for name in tools if likeness[name] > likeness[best] - CLEAR and names <= parameters[name]}
    return best if rivals <= {best} else None


def _value_for(
    workflow: Workflow,
    node: Node,
    path: Path,
    schema: Schema,
    tools: Mapping[str, ToolSpec],
    outputs: Mapping[str, Any],
) -> Any:
    """Find a value for a parameter that is missing or wrong; None where nothing suggests one."""
    reference = next((each for where, each in node.references if where == path), None)
    if reference is None and (coerced := coerced_to(_value_at(node.parameters, path), schema)) is not None:
        return coerced
    earlier = workflow.nodes[: workflow.nodes.index(node)][::-1]
    # What the parameter is called, and what a reference looked for in vain.
    names = [str(path[-1])]
    if reference is not None:
        earlier = sorted(earlier, key=lambda other: -alike(other.id, reference.node))
        names += reference.path[-1:]
    for source in earlier:
        if (found := _field_of(source, names, schema, tools, outputs)) is not None:
            return Reference(source.id, tuple(map(str, found))).as_json()
    return None


def _field_of(
    source: Node, names: Sequence[str], schema: Schema, tools: Mapping[str, ToolSpec], outputs: Mapping[str, Any]
) -> Path | None:
    """Find the field of an output that fits a schema and has one of some names; of two, the second was asked for in
    vain."""
    if source.id in outputs:
        fields = list(itertools.islice(_fields_in(outputs[source.id]), _MOST_FIELDS))
        fitting = [path for path, value in fields if not faults_of(value, schema)]
    else:
        spec = tools.get(source.tool)
        fields = [((name,), field) for name, field in properties_of(spec.output_schema if spec else None).items()]
        fitting = [path for path, field in fields if can_fit(field, schema)]

    def likeness(path: Path) -> float:
        own = next((part for part in reversed(path) if isinstance(part, str)), None)
        return max(alike(own, name) for name in names) if own is not None else 0.0

    best = max(fitting, key=lambda path: (likeness(path), -len(path)), default=None)
    is_only = len(names) > 1 and len([path for path, _ in fields if path]) <= 1
    return best if best is not None and (is_only or likeness(best) >= SURE) else None


def alike(first: str, second: str) -> float:
    """How alike two names are, from 0 to 1; one that holds the other counts as nearly the same."""
    first, second = first[:_LONGEST_NAME].lower(), second[:_LONGEST_NAME].lower()
    ratio = SequenceMatcher(None, first, second).ratio()
    holds = min(len(first), len(second)) > 1 and (first in second or second in first)
    return max(ratio, 0.8) if holds else ratio


def coerced_to(value: Any, schema: Schema) -> Any:
    """Return a value as a schema demands it, where that loses nothing; None where it cannot be.

    >>> coerced_to("5", {"type": "integer"}), coerced_to(5, {"type": "string"}), coerced_to(3, {})
    (5, '5', None)
    """
    forms: list[Any] = [[value]]
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            forms.insert(0, json.loads(value))
    else:
        forms.insert(0, json.dumps(value))
    fitting = (form for form in forms if value is not None and schema and not faults_of(form, schema))
    return next(fitting, None)


def _fields_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the fields of an output, outermost first; of a list its first item."""
    yield path, value
    if isinstance(value, dict):
        for name, inner in list(cast("dict[str, Any]", value).items())[:50]:
            if "." not in name:  # else no reference can name it
                yield from _fields_in(inner, (*path, name))
    elif isinstance(value, list) and value and len(path) < 6:
        yield from _fields_in(value[0], (*path, 0))


def _value_at(value: Any, path: Path) -> Any:
    """Return what is at a path of a value; None where nothing is."""
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _with_value(parameters: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """Return parameters with another value at a path; unchanged where there is no such place."""
    parameters = copy.deepcopy(parameters)
    with contextlib.suppress(KeyError, IndexError, TypeError):
        _value_at(parameters, path[:-1])[path[-1]] = value
    return parameters
