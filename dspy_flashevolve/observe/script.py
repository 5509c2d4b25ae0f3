"""Objects in a user's Python file or module, by name: `flashevolve estimate` needs what no run directory holds."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspy_flashevolve.engine.errors import ConfigurationError

RUN_NAME = "flashevolve_script"
"""``__name__`` of an executed file. What it does under ``if __name__ == "__main__":``, such as a run, is not done."""


def names_in(source: str) -> Mapping[str, Any]:
    """Execute a file, or import a module, as ``python FILE`` or ``python -m MODULE`` find it, and return its names.

    Args:
        source: "experiment.py", or "package.experiment".

    Raises:
        ConfigurationError: There is no such file or module.
        Exception: What its code raises.
    """
    path = Path(source)
    if path.suffix == ".py" or path.exists():
        if not path.is_file():
            raise ConfigurationError(f"{source}: there is no such file. Name a Python file, or a module.")
        sys.path.insert(0, str(path.resolve().parent))  # as `python FILE` does, for the modules beside the file
        return runpy.run_path(source, run_name=RUN_NAME)
    sys.path.insert(0, "")
    try:
        return vars(importlib.import_module(source))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{source}.".startswith(f"{error.name}."):  # a module that it imports itself
            raise
        raise ConfigurationError(f"{source}: there is no such file or module (no module {error.name!r}).") from error
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{source!r} is the name of no file and no module ({error}).") from error


def object_named(names: Mapping[str, Any], name: str, source: str, option: str, kind: type) -> Any:
    """Return the object under a name, which has to be of a kind.

    Args:
        names: of the file or module.
        source, option: the file or module, and the option that gave the name, for messages.

    Raises:
        ConfigurationError: there is none, or it is of another kind.
    """
    if name not in names:
        fitting = ", ".join(key for key, value in names.items() if isinstance(value, kind) and key[0] != "_") or "none"
        raise ConfigurationError(
            f"{source} has no {name!r}. Give the name of a {kind.__name__} in it by {option}: there are {fitting}."
        )
    value = names[name]
    if not isinstance(value, kind):
        raise ConfigurationError(f"{name!r} in {source} is a {type(value).__name__}, expected a {kind.__name__}.")
    return value
