"""The workloads by name: `workload_named("hotpotqa", train=40, val=40, seed=0)`.

Each stands in a module of its own, which holds a `DEFINITION` and is imported when it is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util

from benchmarks.workloads.definition import Definition, NamedWorkload, Size

MODULES = {
    "agnews": "benchmarks.workloads.agnews",
    "aime": "benchmarks.workloads.aime",
    "debian": "benchmarks.workloads.debian",
    "finer": "benchmarks.workloads.finer",
    "formula": "benchmarks.workloads.formula",
    "hotpotqa": "benchmarks.workloads.hotpotqa",
    "hover": "benchmarks.workloads.hover",
    "ifbench": "benchmarks.workloads.ifbench",
    "symptom2disease": "benchmarks.workloads.symptom2disease",
    "symptom2disease-coded": "benchmarks.workloads.symptom2disease_coded",
}
"""Where each workload is defined."""


def workload_names() -> list[str]:
    """The workloads that there are."""
    return sorted(name for name, module in MODULES.items() if importlib.util.find_spec(module) is not None)


def definition_named(name: str) -> Definition:
    """A workload without its rows.

    Raises:
        ValueError: If there is none of that name; the message lists those that there are.
        TypeError: If its module has no `DEFINITION`.
    """
    if name not in workload_names():
        raise ValueError(f"unknown workload {name!r}: choose one of {', '.join(workload_names())}")
    found = getattr(importlib.import_module(MODULES[name]), "DEFINITION", None)
    if not isinstance(found, Definition):
        raise TypeError(f"{MODULES[name]} must hold a Definition named DEFINITION, got {found!r}")
    return found


def workload_named(
    name: str, *, train: int | None = None, val: int | None = None, test: int | None = None, seed: int = 0
) -> NamedWorkload:
    """A workload with its rows; the same arguments give the same examples in the same order.

    Args:
        name: One of `workload_names`.
        train: How many training examples; None for the workload's own size. `val` and `test` likewise.
        val: How many validation examples.
        test: How many test examples.
        seed: Decides which rows are drawn, and their order.

    Raises:
        ValueError: If there is no workload of that name, or it has fewer rows than asked for.
        RowsMissing: If the rows are nowhere to be found.
    """
    definition = definition_named(name)
    usual = definition.size
    size = Size(
        usual.train if train is None else train,
        usual.val if val is None else val,
        usual.test if test is None else test,
    )
    return definition.drawn(size, seed)
