"""What commands say of run directories that cannot be shown."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest

from tests.contract.surface import command, compiled


@pytest.fixture
def run(tmp_path: Path) -> Path:
    compiled(60, log_dir=str(tmp_path / "run"))
    return tmp_path / "run"


def test_compare_names_the_run_that_is_damaged_and_no_other(run: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    with contextlib.closing(sqlite3.connect(damaged / "journal.sqlite")) as journal:
        journal.execute("UPDATE rollouts SET tokens = 'x'")
        journal.commit()
    status, _, said = command("compare", str(damaged), str(run))
    assert status == 1
    assert str(damaged) in said
    assert f"'{run}'" not in said
    assert "[" not in said


@pytest.mark.parametrize("name", ["link", "journal.sqlite-wal", "gepa_state.bin"])
def test_no_file_of_a_run_is_written_over(run: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "link" if name == "link" else run / name
    if name == "link":
        out.symlink_to(run / "journal.sqlite")
    before = {one.name: one.read_bytes() for one in run.iterdir() if one.is_file()}
    status, _, _ = command("timeline", str(run), "-o", str(out))
    after = {one.name: one.read_bytes() for one in run.iterdir() if one.is_file()}
    assert status == 1
    assert after == before
