"""The journal by itself: rows in order, batches, what it keeps, and whether its check can fail."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dspy_flashevolve.cli import NO_RUN, main
from dspy_flashevolve.engine.check import check
from dspy_flashevolve.engine.errors import JournalError, RunDirectoryError
from dspy_flashevolve.engine.redaction import Redaction, secrets_in
from dspy_flashevolve.engine.store import COLUMNS, FILE, SCHEMA_VERSION, Store, check_readable, hash_of
from dspy_flashevolve.observe.history import read as history_of


def fill(store: Store, calls: int, limit: int = 100) -> None:
    """A small run: a step, its rollouts, the last one with its parent, its reply, a commit."""
    seed, texts = {"answer": "seed"}, {"answer": "text"}
    append = store.append

    def rollout(number: int, step: int, candidate: dict[str, str], score: float) -> None:
        append("calls", id=number, session=1, step=step, stage="validate", at=0.0, calls=1)
        append(
            "rollouts", call=number, session=1, step=step, stage="validate", candidate=hash_of(candidate), split="val",
            example=str(number), traced=0, score=score, objective_scores={}, output="null", trace=None, tokens=0,
            cost_dollars=0.0, latency_seconds=0.0, at=0.0,
        )  # fmt: skip

    append(
        "sessions",
        id=1,
        began_at=0.0,
        pid=1,
        settings={"max_metric_calls": limit, "schedule": "async"},
        fingerprints={},
    )
    append("candidates", hash=hash_of(seed), texts=seed)
    append("candidates", hash=hash_of(texts), texts=texts)
    append("steps", number=0, session=1, opened_at=0.0, version=0, selection="[]")
    for number in range(1, calls):
        rollout(number, 0, texts, 0.5)
    rollout(calls, 0, seed, 0.25)
    append("replies", session=1, step=0, stage="propose", position="0", reply="{}", tokens=1, cost_dollars=0.0, at=0.0)
    append(
        "commits", candidate_index=1, session=1, step=0, at=0.0, version=1, candidate=hash_of(texts), parents=[0],
        score=0.5, scores={str(number): 0.5 for number in range(1, calls)}, more=None,
    )  # fmt: skip
    append("ends", step=0, session=1, ended_at=0.0, way="committed", reason="")
    append("session_ends", id=1, ended_at=0.0, state="finished", reason="")
    store.flush_blocking()


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    store = Store(tmp_path)
    fill(store, 5)
    store.close()
    return tmp_path


def change(directory: Path, *statements: str) -> None:
    with closing(sqlite3.connect(directory / FILE)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def test_what_many_threads_append_is_all_there(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def work(thread: int) -> None:
        for number in range(200):
            store.append("calls", session=thread, step=number, stage="rollout", at=0.0, calls=1)
        store.flush_blocking()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(8):
        found = store.rows("SELECT step FROM calls WHERE session = ? ORDER BY id", (number,))
        assert [row["step"] for row in found] == list(range(200))
    store.close()


def test_a_batch_that_fails_leaves_nothing_of_itself_and_ends_the_writing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append("ends", step=1, session=1, ended_at=0.0, way="rejected", reason="")
    store.flush_blocking()
    store.append("ends", step=1, session=1, ended_at=0.0, way="rejected", reason="twice")
    with pytest.raises(JournalError, match="UNIQUE"):
        store.flush_blocking()
    store.append("ends", step=2, session=1, ended_at=0.0, way="rejected", reason="")
    with pytest.raises(JournalError):
        store.flush_blocking()
    assert len(store.rows("SELECT * FROM ends")) == 1
    store.close()


def test_another_version_of_the_schema_is_refused_with_what_to_do_and_left_as_it_is(tmp_path: Path) -> None:
    Store(tmp_path).close()
    for version in (1, SCHEMA_VERSION + 1):
        change(tmp_path, f"PRAGMA user_version = {version}")
        before = (tmp_path / FILE).read_bytes()
        words = (
            rf"schema is version {version}, this .* knows version {SCHEMA_VERSION}\. Use the version that wrote it, or"
        )
        for read in (Store, check, history_of):
            with pytest.raises(RunDirectoryError, match=words):
                read(tmp_path)
        assert (tmp_path / FILE).read_bytes() == before


FULL = """
import resource, sys
from dspy_flashevolve.engine.errors import RunDirectoryError
from dspy_flashevolve.engine.store import Store

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
try:
    Store(sys.argv[1])
except RunDirectoryError as error:
    print(error)
"""


def in_a_process(script: str, *arguments: object) -> str:
    """What a script prints."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]).stdout


@pytest.mark.skipif(sys.platform == "win32", reason="needs setrlimit")
@pytest.mark.parametrize("size", [0, 4096, 30_000])
def test_a_creation_on_a_full_disk_is_told_and_leaves_no_journal(tmp_path: Path, size: int) -> None:
    """The file system refuses files above a size: a real refusal of real writes."""
    assert "cannot be written" in in_a_process(FULL, tmp_path, size)
    assert not (tmp_path / FILE).exists()
    Store(tmp_path).close()
    check_readable(tmp_path / FILE)


def test_a_journal_that_was_moved_away_without_the_files_beside_it_does_not_come_back(tmp_path: Path) -> None:
    """After a kill SQLite's log has what is not in the journal's file yet."""
    store = Store(tmp_path / "run")
    fill(store, 3)
    copy = tmp_path / "killed"
    shutil.copytree(tmp_path / "run", copy)
    store.close()
    assert (copy / f"{FILE}-wal").stat().st_size
    (copy / FILE).unlink()
    again = Store(copy)
    assert again.session == 1
    assert again.rows("SELECT * FROM rollouts") == []
    again.close()


def test_a_directory_may_have_any_name(tmp_path: Path) -> None:
    directory = tmp_path / "what? 100% #1"
    store = Store(directory)
    fill(store, 2)
    store.close()
    assert check(directory).problems == []


def test_the_page_has_every_table_with_its_columns_and_its_queries_run(filled: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "journal.md").read_text(encoding="utf-8")
    assert f"Version {SCHEMA_VERSION} of the schema" in page
    described = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", page, re.MULTILINE)
    assert {name for name, _ in described} == set(COLUMNS)
    with closing(sqlite3.connect(filled / FILE)) as connection:
        for name, columns in described:
            names = [row[1] for row in connection.execute(f"PRAGMA table_info({name})")]
            assert re.findall(r"`(\w+)`", columns) == names
        for query in page.split("```sql\n")[1].split("```")[0].split(";")[:-1]:
            connection.execute(query).fetchall()


def test_a_good_journal_has_no_problems(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(filled).problems == []
    assert main(["check", str(filled)]) == 0
    out = capsys.readouterr().out
    assert "5 metric calls, 5 rollouts" in out
    assert "no problems" in out


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("UPDATE rollouts SET call = 99 WHERE id = 1", "names call 99"),
        ("UPDATE rollouts SET call = 2 WHERE id = 1", "paid by one metric call"),
        ("UPDATE rollouts SET candidate = 'nobody' WHERE id = 1", "names candidate nobody"),
        ("UPDATE rollouts SET score = 0.25 WHERE id = 2", "scores that no rollout gave"),
        ("UPDATE commits SET candidate_index = 4", "commit 1 is candidate 4"),
        ("DELETE FROM ends", "has no end"),
        ("UPDATE ends SET step = 9", "names step 9"),
        ("UPDATE replies SET step = 9", "names step 9"),
        ('UPDATE candidates SET texts = \'{"answer": "other"}\'', "not those that it was named after"),
        ("UPDATE sessions SET settings = json_set(settings, '$.max_metric_calls', 4)", "4 were allowed"),
        ("UPDATE calls SET calls = 97 WHERE id = 1", "100 were allowed"),
    ],
)
def test_the_check_finds_what_is_wrong(
    filled: Path, damage: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(filled, damage)
    assert main(["check", str(filled)]) == 1
    assert problem in capsys.readouterr().out


def test_the_check_finds_a_rollout_that_was_paid_twice(filled: Path) -> None:
    change(
        filled,
        "DELETE FROM ends",
        "INSERT INTO sessions SELECT 2, 1.0, 1, settings, fingerprints FROM sessions",
        "INSERT INTO calls VALUES (6, 2, 0, 'validate', 0, 1)",
        "INSERT INTO rollouts SELECT 6, 6, 2, step, stage, candidate, split, example, traced, score, "
        "objective_scores, output, trace, 0, 0, 0, 0 FROM rollouts WHERE id = 3",
    )
    assert any("was paid twice" in problem for problem in check(filled).problems)


def test_the_check_of_a_directory_without_a_journal_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path)]) == NO_RUN
    assert f"{FILE} is missing" in capsys.readouterr().err
    with pytest.raises(RunDirectoryError):
        check(tmp_path)


def test_a_loop_that_keeps_no_texts_of_what_it_runs_and_scores_its_commits_itself_has_no_problems(filled: Path) -> None:
    """Its rollouts' candidates have names of its own; budget, references to calls and ends are checked all the same."""
    change(
        filled,
        "UPDATE rollouts SET candidate = 'draft ' || candidate",
        "UPDATE commits SET candidate_index = 0, scores = '{\"no example\": 1.0}'",
        "UPDATE sessions SET settings = '{\"max_metric_calls\": 4}'",
    )
    assert check(filled).problems == ["5 metric calls were made, 4 were allowed"]


def test_lockstep_may_exceed_the_budget_as_dspys_gepa_does(filled: Path) -> None:
    change(filled, """UPDATE sessions SET settings = '{"max_metric_calls": 4, "schedule": "lockstep"}'""")
    assert check(filled).problems == []


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6) | st.integers(0, 110), st.binary(min_size=1, max_size=64))
@example(60, b"\x80")  # a version below 0
@example(617, b"\x00\x80")  # a table's name that is no text
def test_a_journal_with_a_changed_place_is_refused_or_read_but_never_breaks(
    tmp_path_factory: pytest.TempPathFactory, place: int, noise: bytes
) -> None:
    directory = tmp_path_factory.mktemp("noise")
    store = Store(directory)
    fill(store, 3)
    store.close()
    content = bytearray((directory / FILE).read_bytes())
    at = place % len(content)
    content[at : at + len(noise)] = noise[: len(content) - at]
    (directory / FILE).write_bytes(bytes(content))
    with suppress(RunDirectoryError):
        check(directory)
    with suppress(RunDirectoryError):
        Store(directory).close()


def test_secrets_are_found_by_the_names_of_settings() -> None:
    given: dict[str, Any] = {
        "api_key": "a", "model": "m", "headers": {"Authorization": "b"}, "OPENAI_API_KEY": "c", "temperature": 1.0,
        "aws_secret_key": "d", "hf_token": "e", "max_tokens": "f",
    }  # fmt: skip
    assert secrets_in(given) == {"a", "b", "c", "d", "e"}


def test_words_that_are_no_secret_stay() -> None:
    """Servers of one's own take any key, and people give any word."""
    redaction = Redaction(["EMPTY", "not-needed", "anything-goes", "0123456789"])
    text = "EMPTY is not-needed, anything-goes: 0123456789, task-list, a sketch-of-something-long-and-winding"
    assert redaction.redact(text) == text
    for words in ("pk_customer_orders_by_region", "Use bearer authentication.", "sk-learn-compatible-estimators"):
        assert redaction.redact(words) == words
