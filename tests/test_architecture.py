"""The rules of docs/architecture.md, read from the source, so that no import can hide."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import dspy_flashevolve

ROOT = Path(dspy_flashevolve.__file__).parent
NAME = "dspy_flashevolve"
MODULES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8")) for path in sorted(ROOT.rglob("*.py"))}

ALLOWED = {
    "engine": ({"engine"}, {"anyio", "filelock", "sniffio"}),
    "observe": ({"engine", "observe"}, {"dspy", "jinja2", "markupsafe", "opentelemetry", "rich", "tqdm"}),
    "modules": ({"engine", "modules"}, {"dspy", "pydantic"}),
    "sandbox": ({"engine", "sandbox"}, {"anyio", "dspy", "pydantic", "pydantic_core"}),
    "programs": (
        {"engine", "observe", "programs"},
        {"anyio", "cloudpickle", "dspy", "gepa", "httpx", "litellm", "numpy", "pydantic", "pydantic_core", "ray"},
    ),
    "gepa": (
        {"engine", "modules", "observe", "programs", "gepa"},
        {"anyio", "cloudpickle", "dspy", "gepa", "mlflow", "numpy", "pydantic"},
    ),
    "ace": ({"engine", "modules", "observe", "programs", "ace"}, {"dspy", "numpy", "pydantic"}),
    "harness": (
        {"engine", "observe", "programs", "sandbox", "harness"},
        {"anyio", "dspy", "pydantic", "pydantic_core"},
    ),
    "evoflux": (
        {"engine", "programs", "evoflux"},
        {"anyio", "dspy", "pydantic", "pydantic_core"},
    ),
    "sim": ({"sim"}, {"aiohttp", "dspy"}),
}
"""Package -> packages of ours, and libraries outside the standard one, that it may import."""
ENGINE_KNOWS_NOT = ("gepa", "dspy", "playbook", "harness", "reflect")
"""What no identifier of the engine names; prose may give examples."""
OPTIMIZERS = {"async_ace.py", "async_gepa.py", "async_meta_harness.py", "__init__.py"}


ASSIGNED = {
    ("step", "has_begun"): "the run keeps the state of its steps",
    ("step", "is_working"): "the run keeps the state of its steps",
    ("step", "has_requested"): "the run's rollouts keep the state of its steps",
    ("slot", "time_scope"): "whoever is in a slot may bound its time; a pause moves the bound",
    ("bound", "deadline"): "anyio's way to move a deadline",
    ("time_scope", "deadline"): "the same",
    ("connection", "row_factory"): "sqlite3's way to name columns",
    ("_executor", "_max_workers"): "the standard library's executor has no other way to grow",
    ("budget", "spent"): "a run that goes on has spent what its checkpoint says",
    ("store", "spent"): "the same",
    ("_writer", "playbook"): "a run that goes on has the playbook that its journal says",
    ("counts", "*"): "counters",
    ("counters", "*"): "counters",
    ("stats", "*"): "how a question was answered, which its search, its executor and its module count together",
    ("error", "best_program"): "an error carries the best program to whoever catches it",
    ("error", "ATTEMPTS"): "an error of a provider says how often it was asked",
    ("Reading", "*"): "a class made of one of dspy's adapters, in the function that makes it",
    ("state", "*"): "gepa's state: its own engine changes it so",
    ("merge", "*"): "gepa's merge keeps its counts in attributes",
    ("record", "*"): "logging's way for a filter to change what is logged",
}
"""What is assigned to objects of other modules -> why: (last name of the object, attribute or what setattr is given).
All else is an object's own matter, or set when it is made: no hooks, no wiring afterwards."""


def imports(node: ast.AST) -> Iterator[str]:
    """Every dotted name that is imported, at any depth, for the type checker too."""
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative imports hide where a name comes from"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)


def dotted(module: str) -> str:
    return f"{NAME}/{module}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_imports_go_one_way_and_the_engine_knows_no_algorithm() -> None:
    packages = {module.split("/")[0] for module in MODULES if "/" in module}
    assert packages == set(ALLOWED)
    for module, tree in MODULES.items():
        found = set(imports(tree))
        assert not {name.split(".")[0] for name in found} & {"benchmarks", "tests"}, module
        ours = {name.split(".")[1] for name in found if name.startswith(f"{NAME}.")}
        if "/" in module:
            assert ours <= ALLOWED[module.split("/")[0]][0], module
        elif module != "cli.py":
            assert module in OPTIMIZERS, f"{module}: a loose module at the top"
            assert "sim" not in ours, module
        if module.startswith("engine/"):
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            used -= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
            assert not [name for name in used if any(word in name.lower() for word in ENGINE_KNOWS_NOT)], module


def test_no_module_is_imported_in_a_circle_not_even_for_the_type_checker() -> None:
    names = {dotted(module) for module in MODULES}

    def module_of(name: str) -> str:
        return name if name in names else name.rpartition(".")[0]

    edges = {
        dotted(module): {module_of(name) for name in imports(tree) if name.startswith(f"{NAME}.")}
        for module, tree in MODULES.items()
        if module != "__init__.py"  # it hands out names of all the others, when they are asked for
    }
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way, name))
        if name not in done:
            for other in sorted(edges.get(name, ())):
                visit(other, (*way, name))
            done.add(name)

    for name in sorted(edges):
        visit(name, ())


def test_each_package_uses_no_libraries_but_its_own() -> None:
    for module, tree in MODULES.items():
        roots = {name.split(".")[0] for name in imports(tree)} - {NAME} - set(sys.stdlib_module_names)
        if "/" in module:
            assert roots <= ALLOWED[module.split("/")[0]][1], module


def own_attributes(tree: ast.Module) -> set[str]:
    """Attributes of the classes that a module defines: declared, or set on self."""
    found: set[str] = set()
    for one in ast.walk(tree):
        if isinstance(one, ast.ClassDef):
            found |= {each.target.id for each in one.body if isinstance(each, ast.AnnAssign) and _is_name(each.target)}
            for each in ast.walk(one):
                if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and _is_name(each.value, "self"):
                    found.add(each.attr)
    return found


def built_here(function: ast.AST | None) -> set[str]:
    """Local names that a function gives to what a call in it returns."""
    found: set[str] = set()
    for one in ast.walk(function) if function is not None else ():
        if isinstance(one, ast.Assign | ast.AnnAssign) and isinstance(one.value, ast.Call):
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            found |= {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
    return found


def assigned(node: ast.AST, function: ast.AST | None = None) -> Iterator[tuple[int, str, str]]:
    """Line, last name of the object, attribute, of what is assigned onto another object than self and what a function
    has built itself; by ``=``, ``+=``, ``for``, ``with``, ``del`` or ``setattr``."""
    for child in ast.iter_child_nodes(node):
        inner = child if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) else function
        owner, attribute = None, ""
        if isinstance(child, ast.Attribute) and not isinstance(child.ctx, ast.Load):
            owner, attribute = child.value, child.attr
        elif isinstance(child, ast.Call) and _is_name(child.func, "setattr", "delattr"):
            owner, attribute = child.args[0], ast.unparse(child.args[1]).strip("'")
        if owner is not None and not _is_name(owner, "self", "cls", *built_here(function)):
            yield child.lineno, ast.unparse(owner).rsplit(".", 1)[-1], attribute
        yield from assigned(child, inner)


def _is_name(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Name) and (not names or node.id in names)


def test_nothing_is_assigned_onto_an_object_of_another_module_after_it_is_built() -> None:
    """A module may keep state in objects of the classes that it defines; for all else there is a reason above."""
    used: set[tuple[str, str]] = set()
    for module, tree in MODULES.items():
        own = own_attributes(tree)
        for line, name, attribute in assigned(tree):
            reasons = {(name, attribute), (name, "*")} & set(ASSIGNED)
            used |= reasons
            assert attribute in own or reasons, f"{module}:{line}: {name}.{attribute} is set from outside"
    assert used == set(ASSIGNED), "exceptions that nobody needs any more"
