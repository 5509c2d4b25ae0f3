"""Run directories that cannot be written, are in use, damaged, or of something else: a clear error, nothing lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
import pytest
from gepa.core.adapter import RolloutOutput
from gepa.core.data_loader import DataId
from gepa.core.state import EvaluationCache

from dspy_flashevolve import AsyncGEPA, ConfigurationError
from tests.contract.surface import Scored, facts, journal_of, on, problems
from tests.fakes import Chain, digits, examples, reflection_lm, task_lm

TRAIN, VAL = examples("t", 6), examples("v", 6)


def compiled(directory: Path, calls: int = 60, metric: Any = digits, student: Any = None, **options: Any) -> Any:
    reflecting = options.pop("reflection_lm", None) or reflection_lm()
    data = {"trainset": options.pop("trainset", TRAIN), "valset": options.pop("valset", VAL)}
    with dspy.context(lm=options.pop("lm", None) or task_lm()):
        optimizer = AsyncGEPA(
            metric, max_metric_calls=calls, reflection_lm=reflecting, log_dir=str(directory), track_stats=True,
            search="pareto", **options,
        )  # fmt: skip
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
    metric = options.setdefault("metric", Scored())
    before = journal_bytes(directory)
    with pytest.raises(ConfigurationError, match=saying):
        compiled(directory, **options)
    assert getattr(metric, "questions", []) == []
    assert journal_bytes(directory) == before


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that came to its end."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    compiled(directory, metric=Scored())
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
    metric = Scored()
    with pytest.raises(ConfigurationError, match="cannot be written"):
        compiled(Path("/proc/flashevolve"), metric=metric)
    assert metric.questions == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigurationError, match="cannot be written"):
        compiled(tmp_path)


def test_a_log_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        compiled(tmp_path / "run")
    assert (tmp_path / "run").read_text() == "mine"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:12288] = b"\xa5" * 8192
    path.write_bytes(bytes(content))


def replace_by_notes(path: Path) -> None:
    path.write_text("these are notes of mine, and they are longer than a header of SQLite is, by far")


def executed(statement: str, anew: bool = False) -> Callable[[Path], None]:
    def execute(path: Path) -> None:
        if anew:
            path.unlink()
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(statement)
            connection.commit()

    return execute


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, "no journal that can be continued"),
    "garbage in the middle": (spoil, "no journal that can be continued"),
    "no database": (replace_by_notes, "not a database"),
    "of something else": (executed("CREATE TABLE recipes (name TEXT)", True), "a database of something else"),
    "a later version": (executed("PRAGMA user_version = 99"), "its schema is version 99"),
    "no version": (executed("PRAGMA user_version = 0"), "its schema is version 0"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_journal_that_is_damaged_or_of_something_else_or_of_an_unknown_version_is_refused(
    directory: Path, damage: str
) -> None:
    change, saying = DAMAGES[damage]
    change(journal_of(directory))
    refused(directory, saying)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_what_a_kill_leaves_of_a_journal_that_was_being_made_is_no_hindrance(
    finished: Path, tmp_path: Path, share: float
) -> None:
    """A part of it under another name, SQLite's rollback file beside that, and an empty file under its own."""
    path, content = journal_of(tmp_path), journal_of(finished).read_bytes()
    path.touch()
    path.with_suffix(".new").write_bytes(content[: int(share * len(content))])
    path.with_suffix(".new-journal").write_bytes(content[: int(share * len(content))])
    assert compiled(tmp_path).detailed_results.total_metric_calls > 0
    assert problems(tmp_path) == []


@pytest.mark.long
def test_two_runs_at_once_on_one_directory_are_refused(tmp_path: Path) -> None:
    """The second one begins while the first is at work, in this process and in another one."""
    refusals: list[str] = []
    other = f"""
from pathlib import Path
from dspy_flashevolve import ConfigurationError
from tests.contract.test_run_directory import compiled
try:
    compiled(Path({str(tmp_path)!r}))
except ConfigurationError as error:
    print(error)
"""

    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        if not refusals:
            refusals.append("")
            with pytest.raises(ConfigurationError, match="another run is at work there"):
                compiled(tmp_path, metric=metric)
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            done = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, env=environment)
            refusals.append(done.stdout)
        return digits(gold, pred)

    compiled(tmp_path, metric=metric)
    assert "another run is at work there" in refusals[1]
    compiled(tmp_path, metric=metric, calls=70)


def begun_with(text: str) -> Chain:
    student = Chain()
    student.steps[0].signature = student.steps[0].signature.with_instructions(text)
    return student


@pytest.mark.parametrize(
    ("change", "saying"),
    [
        ({"trainset": examples("u", 6)}, "trainset was 6 examples, .*, is 6 examples"),
        ({"valset": VAL[:5]}, "valset was 6 examples, .*, is 5 examples"),
        ({"student": Chain(2)}, r"predictor 'steps\[1\]' is new"),
        ({"student": dspy.Predict("question -> answer")}, "program was Chain, is Predict"),
        ({"metric": digits}, "metric was Scored, is digits"),
        ({"student": begun_with("Another text.")}, r"seed text of 'steps\[0\]' has changed"),
    ],
)
def test_another_program_other_data_or_another_metric_are_refused_by_name(
    directory: Path, change: dict[str, Any], saying: str
) -> None:
    refused(directory, saying, **change)


def test_a_journal_of_candidates_without_their_checkpoint_is_refused(tmp_path: Path) -> None:
    assert len(compiled(tmp_path, metric=Scored(), seed=5).detailed_results.candidates) > 1
    (tmp_path / "gepa_state.bin").unlink()
    metric = Scored()
    with pytest.raises(ConfigurationError, match=r"gepa_state.bin is missing"):
        compiled(tmp_path, metric=metric, calls=100, seed=5)
    assert metric.questions == []


def test_a_journal_that_was_copied_without_its_last_writes_goes_on_from_the_checkpoint_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What a run that was killed has written lies in a file of SQLite's beside the journal."""
    copies = (tmp_path / "whole", []), (tmp_path / "part", ["*-wal", "*-shm"])

    def copy(event: dict[str, Any]) -> None:
        if len(event["state"].program_candidates) > 1 and not copies[0][0].exists():
            for copied, without in copies:
                shutil.copytree(tmp_path / "run", copied, ignore=shutil.ignore_patterns("*.lock", *without))

    compiled(tmp_path / "run", schedule="lockstep", gepa_kwargs=on("on_iteration_start", copy))
    known = json.loads((tmp_path / "part" / "candidates.json").read_text())
    assert len(known) > 1
    for copied, without in copies:
        caplog.clear()
        details = compiled(copied, schedule="lockstep").detailed_results
        assert facts(details)[0][: len(known)] == known
        said = [line for line in caplog.messages if "copied without journal.sqlite-wal" in line]
        assert len(said) == len(without[:1])
        assert problems(copied) == []


def test_a_damaged_checkpoint_is_refused_with_the_ways_out(directory: Path) -> None:
    path = directory / "gepa_state.bin"
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"notes of mine", pickle.dumps(["no state"]), pickle.dumps({})):
        path.write_bytes(damaged)
        refused(directory, r"gepa_state.bin cannot be read: .* damaged. Put a copy .* another log_dir", metric=Scored())
    path.write_bytes(whole)
    assert compiled(directory, metric=Scored(), calls=100).detailed_results.total_metric_calls > 60


class Planted:
    """Makes a file when it is read."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


@pytest.mark.parametrize("journal", [True, False])
def test_a_planted_checkpoint_is_refused_and_does_not_run(directory: Path, tmp_path: Path, journal: bool) -> None:
    path, made = directory / "gepa_state.bin", tmp_path / "made"
    state = pickle.loads(path.read_bytes())
    if not journal:
        journal_of(directory).unlink()
    calls = [(os.mkdir, str(made)), (exec, f"open({str(made)!r}, 'w')"), (subprocess.Popen, ["touch", str(made)])]
    for call in calls:
        path.write_bytes(pickle.dumps({**state, "adapter_state": {"x": Planted(*call)}}))
        refused(directory, r"it names (posix|nt|builtins|subprocess)\.\w+, .* is not run", metric=Scored())
    assert not made.exists()


@pytest.mark.parametrize("more", [{"track_best_outputs": True}, {"gepa_kwargs": {"cache_evaluation": True}}])
def test_outputs_that_cannot_be_pickled_end_no_run_and_come_back(tmp_path: Path, more: dict[str, Any]) -> None:
    """Those of a predictor whose signature was made from a string have that in them, which no pickle can name."""
    student = dspy.Predict("question -> answer")
    first = compiled(tmp_path, student=student, calls=40, **more)
    again = compiled(tmp_path, student=student, calls=150, **more)
    assert again.detailed_results.total_metric_calls > first.detailed_results.total_metric_calls
    for details in (first.detailed_results, again.detailed_results) if "track_best_outputs" in more else ():
        outputs = [output for found in details.best_outputs_valset.values() for _, output in found]
        assert len(outputs) >= len(VAL)
        assert all(output.answer for output in outputs)
    assert problems(tmp_path) == []


@pytest.mark.parametrize("first", [dspy.GEPA, AsyncGEPA])
def test_a_checkpoint_with_gepas_cache_is_gone_on_from(tmp_path: Path, first: Any) -> None:
    """The cache names the types that it is of."""
    more: dict[str, Any] = {"log_dir": str(tmp_path), "gepa_kwargs": {"cache_evaluation": True}}
    with dspy.context(lm=task_lm()):
        optimizer = first(digits, max_metric_calls=40, reflection_lm=reflection_lm(), track_stats=True, **more)
        optimizer.compile(Chain(), trainset=TRAIN, valset=VAL)
    path = tmp_path / "gepa_state.bin"
    state = pickle.loads(path.read_bytes())
    cache = EvaluationCache[RolloutOutput, DataId]() if first is dspy.GEPA else EvaluationCache[Any, Any]()
    path.write_bytes(pickle.dumps({**state, "evaluation_cache": cache}))  # as it is before anything is in it
    details = compiled(tmp_path, calls=100, gepa_kwargs=more["gepa_kwargs"]).detailed_results
    assert details.total_metric_calls > state["total_num_evals"]


@pytest.mark.parametrize("awaited", [False, True])
def test_a_tracker_that_cannot_begin_leaves_the_directory_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, awaited: bool
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # not installed
    settings = {"max_metric_calls": 60, "reflection_lm": reflection_lm(), "log_dir": str(tmp_path), "search": "pareto"}
    tracked, data = AsyncGEPA(digits, use_wandb=True, **settings), {"trainset": TRAIN, "valset": VAL}  # type: ignore[arg-type]
    with pytest.raises(ImportError):
        asyncio.run(tracked.acompile(Chain(), **data)) if awaited else tracked.compile(Chain(), **data)
    assert compiled(tmp_path).detailed_results.total_metric_calls > 0


FULL = """
import resource, sys
from pathlib import Path
from dspy_flashevolve import RunAbortedError
from tests.contract.child import run

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    run(Path(sys.argv[1]), "pareto", 300)
except RunAbortedError as error:
    print(type(error.best_program).__name__)
    print(error)
    sys.exit(3)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="needs setrlimit")
def test_a_full_disk_ends_the_run_with_the_best_so_far_and_nothing_is_damaged(tmp_path: Path) -> None:
    """The file system refuses files above a size, for the whole process: a real refusal of real writes."""
    from tests.contract.child import run

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), "600000"], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 3, ended.stderr[-2000:]
    kind, message = ended.stdout.split("\n", 1)
    assert kind == "SlowChain"
    assert "cannot be written" in message
    assert problems(tmp_path / "run") == []
    before = (tmp_path / "calls.txt").read_bytes().count(b"\n")
    assert before > 20
    done = run(tmp_path, "pareto", 300).detailed_results
    assert problems(tmp_path / "run") == []
    assert before < (tmp_path / "calls.txt").read_bytes().count(b"\n") <= done.total_metric_calls <= 300
