"""Imports go one way (docs/architecture.md): read from the source, so that no import can hide."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dspy_flashevolve

ROOT = Path(dspy_flashevolve.__file__).parent
NAME = "dspy_flashevolve"
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))

MAY_IMPORT = {
    "engine": {"engine"},
    "gepa": {"engine", "gepa"},
    "ace": {"engine", "ace", "modules", "observe", "programs", "scheduling", "workbench"},
    "sandbox": {"engine", "sandbox"},
    "harness": {"engine", "programs", "sandbox", "observe", "harness", "workbench"},
    "programs": {"engine", "programs"},
    "modules": {"engine", "modules"},
    "observe": {"engine", "observe"},
    "sim": {"sim"},
}
"""Package -> packages of ours that it may import; modules at the top may import all."""

THIRD_PARTY = {
    "engine": {"anyio", "filelock", "sniffio"},
    "gepa": {"anyio", "gepa"},
    "ace": {"anyio", "dspy"},
    "sandbox": {"anyio", "dspy", "pydantic_core"},
    "harness": {"anyio", "dspy", "pydantic", "pydantic_core"},
    "programs": {"anyio", "dspy", "gepa", "httpx", "litellm", "pydantic", "pydantic_core"},
    "modules": {"dspy", "pydantic"},
    "observe": {"tqdm"},
    "sim": {"aiohttp", "dspy"},
}
"""Package -> what it may import from outside the standard library."""

LOWEST = {"errors.py": set(), "item.py": set(), "events.py": {"item"}}
"""The engine's lowest modules -> the engine modules that they may import."""


def imports_of(module: str) -> set[str]:
    """Every dotted name that a module imports, at any depth of nesting."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide where a name comes from"
            names.add(node.module or "")
    return names


def packaged() -> list[str]:
    return [module for module in MODULES if "/" in module]


def test_every_package_has_its_rule() -> None:
    assert {module.split("/")[0] for module in packaged()} == set(MAY_IMPORT) == set(THIRD_PARTY)


@pytest.mark.parametrize("module", packaged())
def test_a_package_imports_only_what_stands_below_it(module: str) -> None:
    package = module.split("/")[0]
    ours = {name.split(".")[1] for name in imports_of(module) if name.startswith(f"{NAME}.")}
    assert ours <= MAY_IMPORT[package]


@pytest.mark.parametrize("module", packaged())
def test_a_package_imports_no_other_library_than_its_own(module: str) -> None:
    import sys

    roots = {name.split(".")[0] for name in imports_of(module)} - {NAME}
    assert roots - set(sys.stdlib_module_names) <= THIRD_PARTY[module.split("/")[0]]


@pytest.mark.parametrize("module", sorted(LOWEST))
def test_the_engines_lowest_modules_stand_on_their_own(module: str) -> None:
    below = {name.rsplit(".", 1)[1] for name in imports_of(f"engine/{module}") if name.startswith(f"{NAME}.engine.")}
    assert below <= LOWEST[module]


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("engine/")])
def test_the_engine_names_no_algorithm(module: str) -> None:
    """Prose may give examples; identifiers and strings that steer code may not."""
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    identifiers = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    identifiers |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    identifiers -= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    words = ("gepa", "dspy", "playbook", "harness", "reflect")
    assert not [name for name in identifiers if any(word in name.lower() for word in words)]
