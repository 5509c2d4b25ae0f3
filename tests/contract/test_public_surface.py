"""What users may import, and that AsyncGEPA takes what dspy.GEPA takes."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import dspy
import pytest

import dspy_flashevolve
from dspy_flashevolve import AsyncGEPA

NEW = {
    "metric_lock", "max_concurrency", "max_cost", "max_reflection_calls", "max_seconds", "rollouts", "schedule",
    "search", "stale_candidate_reflection", "staleness", "workflow",
}  # fmt: skip
"""Arguments that AsyncGEPA has beside dspy.GEPA's."""
EXPORTED = {
    "AsyncACE", "AsyncGEPA", "AsyncGEPAResult", "AsyncMetaHarness", "AsyncStats", "ConfigurationError", "DataError",
    "DspyRun", "EditedText", "Edits", "FLASHEVOLVE", "FlashEvolveError", "Full", "Guarded", "Harness", "HarnessError",
    "Limits", "Playbook", "Reflective", "RunAbortedError", "StaleCandidateReflection", "Workflow",
}  # fmt: skip
"""Names that users import."""


def test_every_public_name_exists_and_is_documented() -> None:
    for name in dspy_flashevolve.__all__:
        is_documented = name == "FLASHEVOLVE" or inspect.getdoc(getattr(dspy_flashevolve, name))  # it is a mapping
        assert is_documented, name
    assert len(set(dspy_flashevolve.__all__)) == len(dspy_flashevolve.__all__)
    assert set(dspy_flashevolve.__all__) == EXPORTED
    assert len(EXPORTED) <= 23
    assert set(dir(dspy_flashevolve)) >= EXPORTED


def test_the_package_says_its_version_and_where_it_comes_from() -> None:
    assert dspy_flashevolve.__version__ == version("dspy-flashevolve")
    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{dspy_flashevolve.__version__}"' in project
    assert "[project.urls]" in project


def test_the_errors_are_a_tree_that_users_can_catch_by_its_branches() -> None:
    assert issubclass(dspy_flashevolve.ConfigurationError, dspy_flashevolve.FlashEvolveError)
    assert issubclass(dspy_flashevolve.ConfigurationError, ValueError)
    assert issubclass(dspy_flashevolve.DataError, (dspy_flashevolve.ConfigurationError, AssertionError))
    assert issubclass(dspy_flashevolve.RunAbortedError, dspy_flashevolve.FlashEvolveError)


def arguments(of: type) -> dict[str, inspect.Parameter]:
    """Those of its constructor that a caller can name. AsyncGEPA takes others, to say what replaces them."""
    found = inspect.signature(of.__init__).parameters  # type: ignore[misc]
    return {name: one for name, one in found.items() if one.kind is not inspect.Parameter.VAR_KEYWORD}


def test_every_argument_of_gepa_has_the_same_default_and_kind() -> None:
    theirs, ours = arguments(dspy.GEPA), arguments(AsyncGEPA)
    size = "reflection_minibatch_size"  # None stands for as many as the budget pays
    assert {name: (p.default, p.kind) for name, p in theirs.items() if name != size} == {
        name: (p.default, p.kind) for name, p in ours.items() if name in theirs and name != size
    }
    assert (theirs[size].kind, ours[size].default) == (ours[size].kind, None)
    assert set(ours) - set(theirs) == NEW
    assert len(NEW) <= 11


def test_the_new_arguments_are_keyword_only_and_have_defaults() -> None:
    ours = arguments(AsyncGEPA)
    for name in set(ours) - set(arguments(dspy.GEPA)):
        assert ours[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert ours[name].default is not inspect.Parameter.empty


def test_compile_has_the_signature_of_gepas_and_initial_candidates_and_acompile_is_its_twin() -> None:
    theirs = inspect.signature(dspy.GEPA.compile).parameters
    for method in (AsyncGEPA.compile, AsyncGEPA.acompile):
        ours = dict(inspect.signature(method).parameters)
        assert ours.pop("initial_candidates").kind is inspect.Parameter.KEYWORD_ONLY
        assert {n: (p.default, p.kind) for n, p in ours.items()} == {n: (p.default, p.kind) for n, p in theirs.items()}
    assert inspect.iscoroutinefunction(AsyncGEPA.acompile)


def test_it_is_a_gepa_to_whoever_asks() -> None:
    from dspy.teleprompt import Teleprompter

    assert issubclass(AsyncGEPA, dspy.GEPA)
    assert issubclass(AsyncGEPA, Teleprompter)


def test_importing_the_package_alone_does_not_import_dspy() -> None:
    """The simulated server's process starts in a fraction of the time."""
    code = "import sys, dspy_flashevolve.sim.process; sys.exit('dspy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        dspy_flashevolve.Nothing  # noqa: B018


def test_the_contract_is_written_in_terms_of_the_public_surface() -> None:
    """Of this package its tests import what it exports, ``sim``, and modules that users import by name; nothing is
    patched inside it."""
    for path in Path(__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        ours = {name for name in names if name.split(".")[0] == "dspy_flashevolve"}
        public = "dspy_flashevolve", "dspy_flashevolve.evoflux", "dspy_flashevolve.programs.servers"
        allowed = {name for name in ours if name in public or name.startswith("dspy_flashevolve.sim")}
        assert ours == allowed, path.name
