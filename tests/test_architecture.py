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
    "observe": ({"engine", "observe"}, {"tqdm"}),
    "modules": ({"engine", "modules"}, {"dspy", "pydantic"}),
    "sandbox": ({"engine", "sandbox"}, {"anyio", "dspy", "pydantic_core"}),
    "programs": (
        {"engine", "observe", "programs"},
        {"anyio", "dspy", "gepa", "httpx", "litellm", "pydantic", "pydantic_core"},
    ),
    "gepa": ({"engine", "modules", "observe", "programs", "gepa"}, {"anyio", "dspy", "gepa"}),
    "ace": ({"engine", "modules", "observe", "programs", "ace"}, {"anyio", "dspy", "pydantic"}),
    "harness": (
        {"engine", "observe", "programs", "sandbox", "harness"},
        {"anyio", "dspy", "pydantic", "pydantic_core"},
    ),
    "sim": ({"sim"}, {"aiohttp", "dspy"}),
}
"""Package -> packages of ours, and libraries outside the standard one, that it may import."""
OPTIMIZERS = {"async_ace.py", "async_gepa.py", "async_meta_harness.py", "__init__.py"}


def imports(node: ast.AST, *, at_run_time: bool = False) -> Iterator[str]:
    """Every dotted name that is imported, at any depth; at run time only, none for the type checker or in functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative imports hide where a name comes from"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif at_run_time and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        elif not (at_run_time and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
            yield from imports(child, at_run_time=at_run_time)


def test_packages_import_only_what_stands_below_them_and_the_command_line_alone_the_simulation() -> None:
    packages = {module.split("/")[0] for module in MODULES if "/" in module}
    assert packages == set(ALLOWED)
    for module, tree in MODULES.items():
        ours = {name.split(".")[1] for name in imports(tree) if name.startswith(f"{NAME}.")}
        if "/" in module:
            assert ours <= ALLOWED[module.split("/")[0]][0], module
        elif module != "cli.py":
            assert module in OPTIMIZERS, f"{module}: a loose module at the top"
            assert "sim" not in ours, module


def test_packages_use_no_libraries_but_their_own_and_never_the_benchmarks_or_tests() -> None:
    for module, tree in MODULES.items():
        roots = {name.split(".")[0] for name in imports(tree)} - {NAME} - set(sys.stdlib_module_names)
        assert not roots & {"benchmarks", "tests"}, module
        if "/" in module:
            assert roots <= ALLOWED[module.split("/")[0]][1], module


def test_no_module_is_imported_in_a_circle() -> None:
    names = {f"{NAME}/{module}".removesuffix(".py").removesuffix("/__init__").replace("/", ".") for module in MODULES}

    def module_of(name: str) -> str:
        return name if name in names else name.rpartition(".")[0]

    edges = {
        f"{NAME}/{module}".removesuffix(".py").removesuffix("/__init__").replace("/", "."): {
            module_of(name) for name in imports(tree, at_run_time=True) if name.startswith(f"{NAME}.")
        }
        for module, tree in MODULES.items()
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


def test_the_engine_names_no_algorithm() -> None:
    """Prose may give examples; identifiers that steer code may not."""
    for module, tree in MODULES.items():
        if module.startswith("engine/"):
            identifiers = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            identifiers |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            identifiers -= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
            words = ("gepa", "dspy", "playbook", "harness", "reflect")
            assert not [name for name in identifiers if any(word in name.lower() for word in words)], module
