"""The commands that read a run, on what is no run, or a damaged one: one line on stderr, and nothing is written."""

from __future__ import annotations

import json
import os
import random
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

from dspy_flashevolve.cli import FAILED, NO_RUN, NOT_WRITTEN, WRONG_ARGUMENT, main
from dspy_flashevolve.engine.store import Store
from tests.observe.runs import Session

READERS = ("watch", "report", "compare", "export", "diff", "lineage")


def arguments(command: str, directory: Path, out: Path) -> list[str]:
    more = {
        "watch": ["--once"],
        "report": ["-o", str(out)],
        "export": [str(out)],
        "diff": ["seed", "best"],
        "lineage": ["--prompts"],
    }
    return [command, str(directory), *more.get(command, [])]


def refusal(capsys: pytest.CaptureFixture[str], *given: object, status: int = NO_RUN) -> str:
    """The one line with which a command fails, and its status."""
    assert main([str(argument) for argument in given]) == status
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
    content = bytearray(path.read_bytes())
    content[3 * 4096 : 9 * 4096] = bytes(6 * 4096)
    path.write_bytes(content)


def replaced(by: bytes) -> Callable[[Path], None]:
    return lambda directory: shutil.rmtree(directory) or directory.mkdir() or put(directory, by)


def put(directory: Path, content: bytes) -> None:
    (directory / "journal.sqlite").write_bytes(content)


def unfinished(directory: Path) -> None:
    (directory / "journal.sqlite").rename(directory / "journal.new")
    (directory / "gepa_state.bin").unlink()


BROKEN_RUNS: dict[str, Callable[[Path], Any]] = {
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


@pytest.mark.parametrize("damage", BROKEN_RUNS.values(), ids=BROKEN_RUNS.keys())
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
        ("UPDATE rollouts SET latency_seconds = 'x', tokens = 'x'", ("watch", "report", "compare")),
        ("UPDATE events SET seconds = 9e999", ("watch", "report", "compare")),
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
    Store(tmp_path).close()
    assert "no candidate has a score yet" in refusal(
        capsys, "export", tmp_path, tmp_path / "out", status=WRONG_ARGUMENT
    )
    assert "no candidate has a score yet" in refusal(capsys, "diff", tmp_path, "seed", "best", status=WRONG_ARGUMENT)


def test_reading_leaves_a_run_directory_as_it_was(counted: tuple[Path, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(counted[0], run)

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

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
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    assert "not written over" in refusal(capsys, "report", run, "-o", out, status=WRONG_ARGUMENT)
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


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
        assert [main(arguments(command, run, Path("unused"))) for command in ("watch", "lineage", "diff")] == [0, 0, 0]
    assert "AsyncGEPA" in capsys.readouterr().out


@pytest.mark.parametrize(
    "state", ["[]", '{"metadata": {}, "steps[0]": 3}', '{"metadata": {}, "steps[0]": {"signature": 3}}']
)
def test_a_program_file_of_another_kind_is_refused(
    state: str, counted: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base.json"
    base.write_text(state)
    given = ("export", counted[0], "--program", base, tmp_path / "out")
    assert str(base) in refusal(capsys, *given, status=WRONG_ARGUMENT)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_an_output_that_takes_nothing_ends_a_command_without_a_traceback(counted: tuple[Path, Any]) -> None:
    lineage = [sys.executable, "-m", "dspy_flashevolve.cli", "lineage", str(counted[0]), "--prompts"]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # what a user has: the output goes out when the command ends
    process = subprocess.Popen(lineage, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=buffered)
    assert process.stdout
    process.stdout.close()
    assert process.stderr
    assert [process.stderr.read(), process.wait()] == ["", FAILED]
    process.stderr.close()
    with open("/dev/full", "w") as full:
        failed = subprocess.run(lineage, stdout=full, stderr=subprocess.PIPE, text=True, env=buffered, check=False)
    assert failed.returncode == NOT_WRITTEN
    assert failed.stderr == "flashevolve: standard output cannot be written: No space left on device.\n"


# Each mistake has its own message and status, and none of them is called damage.


@pytest.mark.parametrize(
    ("given", "status", "message"),
    [
        (["diff", "RUN", "seed", "99"], WRONG_ARGUMENT, "candidate '99', expected best, seed or one of"),
        (["diff", "RUN", "first", "best"], WRONG_ARGUMENT, "candidate 'first', expected best, seed or one of"),
        (["export", "RUN", "OUT", "--candidate", "-1"], WRONG_ARGUMENT, "candidate '-1', expected best"),
        (["export", "RUN", "OUT", "--program", "GONE"], WRONG_ARGUMENT, "cannot be read (No such file or directory)"),
        (["export", "RUN", "OUT", "--program", "FOLDER"], WRONG_ARGUMENT, "cannot be read (Is a directory)"),
        (["report", "RUN", "-o", "FOLDER"], NOT_WRITTEN, "cannot be written: Is a directory. Name a file"),
        (["report", "RUN", "-o", ""], NOT_WRITTEN, "'' cannot be written: Is a directory. Name a file"),
        (["report", "RUN", "-o", "GONE/page"], NOT_WRITTEN, "cannot be written: No such file or directory"),
        (["export", "RUN", "FOLDER"], NOT_WRITTEN, "cannot be written: Is a directory. Name a file"),
        (["export", "RUN", "GONE/program"], NOT_WRITTEN, "cannot be written: No such file or directory"),
        (["export", "RUN", "RUN/journal.sqlite"], WRONG_ARGUMENT, "is a run's journal"),
        (["report", "RUN", "-o", "RUN/journal.sqlite"], WRONG_ARGUMENT, "is a run's journal"),
        (["report", "RUN", "-o", "zero\0byte"], NOT_WRITTEN, "cannot be written: embedded null byte"),
        (["report", "RUN", "-o", "CIRCLE"], NOT_WRITTEN, "cannot be written: "),
        (["report", "RUN", "-o", "RUN/journal.lock"], WRONG_ARGUMENT, "journal.lock, which is not written over"),
        (["lineage", "GONE"], NO_RUN, "there is no such directory"),
        (["check", "GONE"], NO_RUN, "there is no such directory"),
        (["compare", "RUN", "GONE"], NO_RUN, "there is no such directory"),
        (["report", "FOLDER"], NO_RUN, "journal.sqlite is missing: a run that is given a log_dir writes it there"),
        (["report", "RUN/.."], NO_RUN, "There are runs in "),
        (["lineage", "RUN/journal.sqlite"], NO_RUN, "is a file, and a run is a directory. Name the folder"),
        (["watch", "RUN/journal.sqlite"], NO_RUN, "is a file, and a run is a directory. Name the folder"),
        (["lineage", "x" * 5000], NO_RUN, "File name too long"),
    ],
)
def test_a_mistake_has_its_own_message_and_status_and_is_not_called_damage(
    given: list[str],
    status: int,
    message: str,
    counted: tuple[Path, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(counted[0], tmp_path / "run")
    (tmp_path / "folder").mkdir()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for name in ("RUN", "OUT", "GONE", "FOLDER", "CIRCLE"):
        given = [part.replace(name, str(tmp_path / name.lower())) for part in given]
    before = sorted(tmp_path.rglob("*"))
    line = refusal(capsys, *given, status=status)
    assert message in line
    assert "damaged" not in line
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["lineage", ""], "must be the log_dir of a run"),
        (["lineage", "zero\0byte"], "must be the log_dir of a run"),
        (["watch", "run", "--every", "1e300"], "at most 86400 seconds"),
        (["watch", "run", "--every", "nan"], "must be above 0 and at most"),
        (["compare"], "the following arguments are required: RUN_DIR"),
    ],
)
def test_an_argument_that_no_run_could_take_is_refused_before_the_run_is_read(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == WRONG_ARGUMENT
    assert message in capsys.readouterr().err


def test_no_mix_of_arguments_to_a_sound_run_has_a_traceback_or_calls_it_damaged(
    counted: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = str(counted[0])
    words = [run, run, run, "seed", "best", "0", "-1", "٣", "1e9", "", ".", "/dev/null", "a/b", "-o", "--program",
             "--candidate", "--json", "--prompts", "--best", "--once", "-", "é\x1b[31m"]  # fmt: skip
    draw, statuses = random.Random(0), set[int]()
    for _ in range(150):
        given = [draw.choice([*READERS, "check"]), run, *draw.choices(words, k=draw.randrange(4))]
        try:
            statuses.add(main(given))
        except SystemExit as ended:
            statuses.add(int(ended.code or 0))
            capsys.readouterr()  # argparse repeats what the user has typed
        printed = capsys.readouterr()
        assert "damaged" not in printed.err, given
        assert "\x1b" not in printed.out + printed.err, given
    assert statuses == {0, WRONG_ARGUMENT, NO_RUN, NOT_WRITTEN}


def test_ctrl_c_fails_a_command_that_does_not_wait_for_it(
    counted: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("dspy_flashevolve.cli.read", interrupted)
    assert [main([command, str(counted[0])]) for command in ("watch", "lineage")] == [0, 130]


def test_texts_that_no_encoding_holds_are_shown_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Session(tmp_path / "run") as session:
        session.store.record_commit(0, 0, 0, {"answer": "half a pair \ud800"}, [], {}, 0.5)
        session.ends("finished")
    out = tmp_path / "out"
    for command in ("report", "export", "lineage"):
        assert main(arguments(command, tmp_path / "run", out)) == 0
        if command == "export":
            assert json.loads(out.read_text())["answer"]["signature"]["instructions"] == "half a pair \ud800"
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "dspy_flashevolve.cli", "lineage", str(tmp_path / "run"), "--prompts"]
    assert "half a pair ?" in subprocess.run(command, env=ascii_only, capture_output=True, text=True, check=True).stdout
