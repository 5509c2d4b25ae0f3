"""Every test reads the samples; those of the real rows ask for `real_rows`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.workloads.rows import VARIABLE, data_folder
from tests.benchmarks.workloads.samples import write_samples

REAL_FOLDER = data_folder()


@pytest.fixture(scope="session")
def sample_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with the samples."""
    folder = tmp_path_factory.mktemp("data")
    write_samples(folder)
    return folder


@pytest.fixture(autouse=True)
def sample_rows(sample_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The samples are the data folder."""
    monkeypatch.setenv(VARIABLE, str(sample_folder))
    return sample_folder


@pytest.fixture
def real_rows(sample_rows: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real rows are the data folder; skipped where there are none."""
    if not REAL_FOLDER.is_dir():
        pytest.skip(f"no rows in {REAL_FOLDER}")
    monkeypatch.setenv(VARIABLE, str(REAL_FOLDER))
    return REAL_FOLDER
