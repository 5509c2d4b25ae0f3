"""Whole runs, made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.observe.runs import with_changes, with_tokens


@pytest.fixture(scope="session")
def counted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Directory and program of :func:`with_tokens`."""
    directory = tmp_path_factory.mktemp("counted")
    return directory, with_tokens(directory)


@pytest.fixture(scope="session")
def changed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Directory and program of :func:`with_changes`."""
    directory = tmp_path_factory.mktemp("changed")
    return directory, with_changes(directory)
