"""Run directories that cannot be written, are in use, damaged, or of something else: a clear error, nothing lost."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import dspy
import pytest

from dspy_flashevolve import AsyncGEPA
from dspy_flashevolve.engine.errors import JournalError, RunDirectoryError
from dspy_flashevolve.engine.journal import FILE, Journal
from dspy_flashevolve.engine.journal_check import check
from tests.fakes import Chain, digits, examples, reflection_lm, task_lm

TRAIN, VAL = examples("t", 6), examples("v", 6)


class Counted:
    """The metric; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        self.calls += pred_name is None
        return digits(gold, pred, trace, pred_name, pred_trace)


def compiled(directory: Path, *, calls: int = 60, metric: Any = digits, student: Any = None, **options: Any) -> Any:
    data = {"trainset": options.pop("trainset", TRAIN), "valset": options.pop("valset", VAL)}
    with dspy.context(lm=options.pop("lm", None) or task_lm()):
        optimizer = AsyncGEPA(
            metric,
            max_metric_calls=calls,
            reflection_lm=reflection_lm(),
            log_dir=str(directory),
            track_stats=True,
            staleness="full",
            **options,
        )
        return optimizer.compile(student or Chain(), **data)


def journal_bytes(directory: Path) -> dict[str, bytes]:
    """Every file but those that SQLite and the lock make for as long as somebody looks."""
    passing = ("-wal", "-shm", ".lock")
    return {
        path.name: path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.endswith(passing)
    }


def refused(directory: Path, saying: str, **options: Any) -> None:
    """A compile there is refused with these words, before any call of the metric, and changes nothing."""
    metric = options.setdefault("metric", Counted())
    before = journal_bytes(directory)
    with pytest.raises(RunDirectoryError, match=saying):
        compiled(directory, **options)
    assert getattr(metric, "calls", 0) == 0
    assert journal_bytes(directory) == before


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that came to its end."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    compiled(directory, metric=Counted())
    return directory


@pytest.fixture
def directory(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def test_a_directory_that_cannot_be_made_is_refused() -> None:
    """Nobody, not even root, can make directories there."""
    if not Path("/proc/self").exists():
        pytest.skip("needs /proc")
    metric = Counted()
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        compiled(Path("/proc/flashevolve"), metric=metric)
    assert metric.calls == 0


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        compiled(tmp_path)


def test_a_log_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        compiled(tmp_path / "run")
    assert (tmp_path / "run").read_text() == "mine"


def test_a_truncated_journal_is_refused(directory: Path) -> None:
    path = directory / FILE
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    refused(directory, "no journal that can be continued", metric=Counted())


def test_a_journal_with_garbage_in_the_middle_is_refused(directory: Path) -> None:
    path = directory / FILE
    content = bytearray(path.read_bytes())
    content[4096:12288] = b"\xa5" * 8192
    path.write_bytes(bytes(content))
    refused(directory, "no journal that can be continued", metric=Counted())


def test_a_journal_whose_texts_are_broken_is_refused(directory: Path) -> None:
    connection = sqlite3.connect(directory / FILE)
    connection.execute("UPDATE candidates SET texts = '{' WHERE id = 1")
    connection.commit()
    connection.close()
    metric = Counted()
    with pytest.raises(RunDirectoryError, match="is damaged"):
        compiled(directory, metric=metric, calls=100)
    assert metric.calls == 0


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("these are notes of mine, and they are longer than a header of SQLite is, by far")
    refused(tmp_path, "not a database")


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / FILE)
    connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.commit()
    connection.close()
    refused(tmp_path, "a database of something else")


@pytest.mark.parametrize("version", [99, 0, -3])
def test_a_journal_of_a_version_that_is_not_known_is_refused(directory: Path, version: int) -> None:
    connection = sqlite3.connect(directory / FILE)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.commit()
    connection.close()
    refused(directory, f"its schema is version {version}", metric=Counted())


def test_two_runs_on_one_directory_are_refused(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    try:
        with pytest.raises(RunDirectoryError, match="another run is at work there"):
            compiled(tmp_path)
    finally:
        first.close()
    compiled(tmp_path)


def test_two_processes_on_one_directory_are_refused(tmp_path: Path) -> None:
    journal = "from dspy_flashevolve.engine.journal import Journal"
    holds = f"import sys; {journal}; j = Journal(sys.argv[1]); print('held', flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", holds, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunDirectoryError, match="another run is at work there"):
            compiled(tmp_path)
    finally:
        other.kill()
        other.communicate()
    compiled(tmp_path)  # the lock of a process that was killed is gone


@pytest.mark.parametrize(
    ("change", "saying"),
    [
        ({"trainset": examples("u", 6)}, "trainset was 6 examples, .*, is 6 examples"),
        ({"valset": VAL[:5]}, "valset was 6 examples, .*, is 5 examples"),
        ({"student": Chain(2)}, r"predictor 'steps\[1\]' is new"),
        ({"student": dspy.Predict("question -> answer")}, "program was Chain, is Predict"),
        ({"metric": digits}, "metric was Counted, is digits"),
    ],
)
def test_another_program_other_data_or_another_metric_are_refused_by_name(
    directory: Path, change: dict[str, Any], saying: str
) -> None:
    refused(directory, saying, **change)


def test_a_student_with_other_instructions_is_refused_by_the_predictors_name(directory: Path) -> None:
    student = Chain()
    student.steps[0].signature = student.steps[0].signature.with_instructions("Another text.")
    refused(directory, r"seed text of 'steps\[0\]' has changed", student=student)


def test_another_line_of_gepa_is_refused(directory: Path) -> None:
    connection = sqlite3.connect(directory / FILE)
    connection.execute("UPDATE sessions SET settings = json_set(settings, '$.versions.gepa', '0.9.0')")
    connection.commit()
    connection.close()
    refused(directory, "gepa was 0.9.0", metric=Counted())


def test_a_journal_without_its_checkpoint_is_refused(directory: Path) -> None:
    (directory / "gepa_state.bin").unlink()
    metric = Counted()
    with pytest.raises(RunDirectoryError, match=r"gepa_state.bin is missing"):
        compiled(directory, metric=metric, calls=100)
    assert metric.calls == 0


FULL = """
import resource, sys
from pathlib import Path
from dspy_flashevolve.engine.errors import JournalError
from tests.resuming.child import run

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    run(Path(sys.argv[1]), "full", 300)
except JournalError as error:
    print(type(error.best_program).__name__)
    print(error)
    sys.exit(3)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs setrlimit")
def test_a_full_disk_ends_the_run_with_the_best_so_far_and_nothing_is_damaged(tmp_path: Path) -> None:
    """The file system refuses files above a size, for the whole process: a real refusal of real writes."""
    from tests.resuming.child import run

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), "600000"], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 3, ended.stderr[-2000:]
    kind, message = ended.stdout.split("\n", 1)
    assert kind == "SlowChain"
    assert "cannot be written" in message
    assert check(tmp_path / "run").problems == []
    connection = sqlite3.connect(tmp_path / "run" / FILE)
    rows = connection.execute("SELECT COUNT(*), MIN(score), MAX(score) FROM rollouts").fetchone()
    connection.close()
    assert rows[0] > 20
    assert rows[2] > 0
    done = run(tmp_path, "full", 300).detailed_results
    assert check(tmp_path / "run").problems == []
    assert done.total_metric_calls <= 300


def test_a_journal_that_cannot_be_written_any_more_says_so_at_the_next_flush(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    try:
        journal._writing.execute("PRAGMA max_page_count = 1")  # pyright: ignore[reportPrivateUsage]
        for number in range(500):
            journal.append("ends", ticket=number, session=1, ended_at=0.0, way="rejected", reason="x" * 1000)
        with pytest.raises(JournalError, match=r"cannot be written \(database or disk is full\)"):
            journal.flush_here()
    finally:
        journal.close()
    assert check(tmp_path).summary
