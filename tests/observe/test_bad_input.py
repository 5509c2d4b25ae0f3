"""The commands that read a run, on what is no run, or a damaged one: one line on stderr, and nothing is written."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dspy_flashevolve.cli import main
from dspy_flashevolve.engine.journal import Journal

READERS = ("watch", "report", "compare", "export", "diff", "lineage", "timeline")


def arguments(command: str, directory: Path, out: Path) -> list[str]:
    more = {
        "watch": ["--once"],
        "report": ["-o", str(out)],
        "export": [str(out)],
        "diff": ["seed", "best"],
        "lineage": ["--prompts"],
        "timeline": ["-o", str(out)],
    }
    return [command, str(directory), *more.get(command, [])]


def refusal(capsys: pytest.CaptureFixture[str], *given: object) -> str:
    """The one line with which a command fails."""
    assert main([str(one) for one in given]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.splitlines()
    return line


def changed(statement: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        with sqlite3.connect(directory / "journal.sqlite") as connection:
            connection.execute(statement)
        connection.close()

    return damage


def cut(directory: Path) -> None:
    path = directory / "journal.sqlite"
    path.write_bytes(path.read_bytes()[:40_000])


def zeroed(directory: Path) -> None:
    path = directory / "journal.sqlite"
    found = bytearray(path.read_bytes())
    found[3 * 4096 : 9 * 4096] = bytes(6 * 4096)
    path.write_bytes(found)


def replaced(by: bytes) -> Callable[[Path], None]:
    return lambda directory: shutil.rmtree(directory) or directory.mkdir() or put(directory, by)


def put(directory: Path, content: bytes) -> None:
    (directory / "journal.sqlite").write_bytes(content)


def unfinished(directory: Path) -> None:
    (directory / "journal.sqlite").rename(directory / "journal.new")
    (directory / "gepa_state.bin").unlink()


NO_RUN: dict[str, Callable[[Path], Any]] = {
    "no directory": shutil.rmtree,
    "a file": lambda directory: shutil.rmtree(directory) or directory.write_text("x"),
    "an empty directory": lambda directory: shutil.rmtree(directory) or directory.mkdir(),
    "an empty file": replaced(b""),
    "a text": replaced(b"hello " * 1000),
    "a journal that is being created": unfinished,
    "cut off": cut,
    "pages of zeros": zeroed,
    "no JSON": changed("UPDATE sessions SET settings = '{'"),
    "settings of another kind": changed("UPDATE sessions SET settings = '[]'"),
    "events without fields": changed("UPDATE events SET fields = '{}'"),
    "a checkpoint of something else": lambda directory: (
        (directory / "journal.sqlite").unlink(),
        (directory / "gepa_state.bin").write_bytes(b"nonsense"),
    ),
}


@pytest.mark.parametrize("damage", NO_RUN.values(), ids=NO_RUN.keys())
def test_what_is_no_run_is_refused_in_a_line_that_names_it(
    damage: Callable[[Path], Any], counted: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(counted[0], run)
    damage(run)
    there = sorted(tmp_path.rglob("*"))
    for command in READERS:
        assert str(run) in refusal(capsys, *arguments(command, run, tmp_path / "out"))
    assert sorted(tmp_path.rglob("*")) == there


@pytest.mark.parametrize(
    ("statement", "commands"),
    [
        ("UPDATE rollouts SET latency_seconds = 'x', tokens = 'x'", ("watch", "report", "compare", "timeline")),
        ("UPDATE events SET seconds = 9e999", ("watch", "report", "compare", "timeline")),
        ("UPDATE candidates SET texts = '\"x\"'", ("report", "export", "diff", "lineage")),
        ("UPDATE replies SET reply = '{'", ("report",)),
    ],
)
def test_values_of_another_kind_are_refused_where_they_are_needed(
    statement: str,
    commands: tuple[str, ...],
    counted: tuple[Path, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(counted[0], run)
    changed(statement)(run)
    for command in commands:
        assert str(run) in refusal(capsys, *arguments(command, run, out))
    assert not out.exists()


def test_a_run_without_a_session_has_no_best_candidate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Journal(tmp_path).close()
    assert "no candidate has a score yet" in refusal(capsys, "export", tmp_path, tmp_path / "out")
    assert "no candidate has a score yet" in refusal(capsys, "diff", tmp_path, "seed", "best")


def test_reading_leaves_a_run_directory_as_it_was(counted: tuple[Path, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(counted[0], run)

    def contents() -> dict[Path, bytes]:
        return {one: one.read_bytes() for one in run.rglob("*") if one.is_file()}

    before = contents()
    for command in (*READERS, "check"):
        assert main(arguments(command, run, tmp_path / "out")) == 0
        assert contents() == before


def test_compare_names_the_run_that_is_damaged_and_no_other(
    counted: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, damaged = tmp_path / "good", tmp_path / "damaged"
    for copy in (good, damaged):
        shutil.copytree(counted[0], copy)
    changed("UPDATE rollouts SET tokens = 'x'")(damaged)
    for runs in ((damaged, good), (good, damaged)):
        line = refusal(capsys, "compare", *runs)
        assert line.startswith(f"flashevolve: {damaged} cannot be shown")
        assert str(good) not in line


@pytest.mark.parametrize("name", ["link", "journal.sqlite-wal", "gepa_state.bin"])
def test_no_file_of_a_run_is_written_over(
    name: str, counted: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(counted[0], run)
    out = tmp_path / "link" if name == "link" else run / name
    if name == "link":
        out.symlink_to(run / "journal.sqlite")
    before = {one.name: one.read_bytes() for one in run.iterdir() if one.is_file()}
    assert "not written over" in refusal(capsys, "timeline", run, "-o", out)
    assert {one.name: one.read_bytes() for one in run.iterdir() if one.is_file()} == before


@contextmanager
def only_readable(directory: Path) -> Iterator[Path]:
    """A copy of a run directory, without its lock, in which the user of the block may only read."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # what pytest makes is of its user alone
        run = Path(folder) / "run"
        shutil.copytree(directory, run)
        (run / "journal.lock").unlink()
        for path in run.iterdir():
            path.chmod(0o555 if path.is_dir() else 0o444)
        run.chmod(0o555)
        try:
            if user == 0:
                os.seteuid(65534)
            yield run
        finally:
            os.seteuid(user)
            run.chmod(0o755)


unix = pytest.mark.skipif(not hasattr(os, "seteuid"), reason="permissions of Unix")


@unix
def test_a_killed_run_that_may_only_be_read_says_that_it_is_to_be_copied(
    counted: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = tmp_path / "killed"
    shutil.copytree(counted[0], killed)
    (killed / "journal.sqlite-wal").write_bytes(b"what SQLite has not put into the journal yet")
    with only_readable(killed) as run:
        assert "copy it to where you may write" in refusal(capsys, "watch", run, "--once")


@unix
def test_a_run_directory_that_may_only_be_read_is_read(
    counted: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with only_readable(counted[0]) as run:
        assert [main(arguments(one, run, Path("unused"))) for one in ("watch", "lineage", "diff")] == [0, 0, 0]
    assert "AsyncGEPA" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["report", "export", "timeline"])
def test_a_file_that_cannot_be_written_is_named(
    command: str, counted: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(counted[0], run)
    for out in (tmp_path / "missing" / "out", tmp_path):
        assert f"'{out}' cannot be written" in refusal(capsys, *arguments(command, run, out))
    journal = (run / "journal.sqlite").read_bytes()
    assert "is a run's journal" in refusal(capsys, *arguments(command, run, run / "journal.sqlite"))
    assert (run / "journal.sqlite").read_bytes() == journal
    assert list(tmp_path.iterdir()) == [run]


@pytest.mark.parametrize(
    "state", ["[]", '{"metadata": {}, "steps[0]": 3}', '{"metadata": {}, "steps[0]": {"signature": 3}}']
)
def test_a_program_file_of_another_kind_is_refused(
    state: str, counted: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base.json"
    base.write_text(state)
    assert str(base) in refusal(capsys, "export", counted[0], "--program", base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_an_output_that_takes_nothing_ends_a_command_without_a_traceback(counted: tuple[Path, Any]) -> None:
    lineage = [sys.executable, "-m", "dspy_flashevolve.cli", "lineage", str(counted[0]), "--prompts"]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # what a user has: the output goes out when the command ends
    process = subprocess.Popen(lineage, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=buffered)
    assert process.stdout
    process.stdout.close()
    assert process.stderr
    assert [process.stderr.read(), process.wait()] == ["", 1]
    process.stderr.close()
    with open("/dev/full", "w") as full:
        failed = subprocess.run(lineage, stdout=full, stderr=subprocess.PIPE, text=True, env=buffered, check=False)
    assert failed.returncode == 1
    assert failed.stderr == "flashevolve: [Errno 28] No space left on device\n"
