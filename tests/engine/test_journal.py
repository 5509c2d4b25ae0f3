"""The journal by itself: rows in order, batches, what it keeps, and whether its check can fail."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dspy_flashevolve.cli import main
from dspy_flashevolve.engine import journal as module
from dspy_flashevolve.engine.errors import JournalError, RunDirectoryError
from dspy_flashevolve.engine.journal import FILE, Journal, checked
from dspy_flashevolve.engine.journal_check import check, name_of
from dspy_flashevolve.engine.journal_schema import SCHEMA_VERSION, TABLES, migrate
from dspy_flashevolve.engine.redaction import MARK, Redaction, secrets_in


def fill(journal: Journal, calls: int, limit: int = 100) -> None:
    """A small run: a ticket, its rollouts, a commit."""
    texts = {"step": "text"}
    append = journal.append
    append(
        "sessions",
        id=1,
        began_at=0.0,
        pid=1,
        settings={"max_metric_calls": limit, "schedule": "async"},
        fingerprints={},
    )
    append("candidates", hash=name_of(texts), texts=texts)
    append("tickets", number=0, session=1, opened_at=0.0, kind="mutation", version=0, rng="0/0", selection=[])
    for number in range(1, calls + 1):
        append("calls", id=number, session=1, ticket=0, stage="validate", at=0.0, calls=1)
        append(
            "rollouts", call=number, session=1, ticket=0, stage="validate", candidate=name_of(texts), split="val",
            example=str(number), traced=0, score=0.5, objective_scores={}, output="null", trace=None, tokens=0,
            cost_dollars=0.0, latency_seconds=0.0, at=0.0,
        )  # fmt: skip
    append(
        "commits", candidate_index=1, session=1, ticket=0, at=0.0, version=1, candidate=name_of(texts), parents=[0],
        score=0.5, scores={str(number): 0.5 for number in range(1, calls + 1)}, objective_scores=None,
    )  # fmt: skip
    append("ends", ticket=0, session=1, ended_at=0.0, way="committed", reason="")
    append("session_ends", id=1, ended_at=0.0, state="finished", reason="")
    journal.flush_here()


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    journal = Journal(tmp_path)
    fill(journal, 5)
    journal.close()
    return tmp_path


def change(directory: Path, *statements: str) -> None:
    with closing(sqlite3.connect(directory / FILE)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def test_rows_come_back_in_the_order_in_which_they_were_appended(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in range(3 * module.LARGEST_BATCH):
        journal.append("head_ends", session=1, head=number, way="confirmed", at=0.0)
    journal.flush_here()
    assert [row["head"] for row in journal.rows("SELECT head FROM head_ends ORDER BY id")] == list(
        range(3 * module.LARGEST_BATCH)
    )
    journal.close()


def test_what_many_threads_append_is_all_there(tmp_path: Path) -> None:
    journal = Journal(tmp_path)

    def work(thread: int) -> None:
        for number in range(200):
            journal.append("head_ends", session=thread, head=number, way="confirmed", at=0.0)
        journal.flush_here()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(8):
        found = journal.rows("SELECT head FROM head_ends WHERE session = ? ORDER BY id", (number,))
        assert [row["head"] for row in found] == list(range(200))
    journal.close()


def test_after_a_flush_another_connection_sees_everything(tmp_path: Path) -> None:
    async def appended() -> int:
        journal.append("head_ends", session=1, head=7, way="confirmed", at=0.0)
        await journal.flush()
        with closing(sqlite3.connect(tmp_path / FILE)) as other:
            return other.execute("SELECT head FROM head_ends").fetchone()[0]

    journal = Journal(tmp_path)
    assert asyncio.run(appended()) == 7
    journal.close()


def test_a_batch_that_fails_leaves_nothing_of_itself_and_ends_the_writing(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append("ends", ticket=1, session=1, ended_at=0.0, way="rejected", reason="")
    journal.flush_here()
    journal.append("ends", ticket=1, session=1, ended_at=0.0, way="rejected", reason="twice")
    with pytest.raises(JournalError, match="UNIQUE"):
        journal.flush_here()
    journal.append("ends", ticket=2, session=1, ended_at=0.0, way="rejected", reason="")
    with pytest.raises(JournalError):
        journal.flush_here()
    assert len(journal.rows("SELECT * FROM ends")) == 1
    journal.close()


def test_a_closed_journal_takes_no_flush_and_gives_the_directory_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append("head_ends", session=1, head=1, way="confirmed", at=0.0)
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="closed"):
        journal.flush_here()
    again = Journal(tmp_path)
    assert len(again.rows("SELECT * FROM head_ends")) == 1
    again.close()


def test_sessions_are_numbered_on(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    fill(first, 1)
    assert first.session == 1
    first.close()
    second = Journal(tmp_path)
    assert second.session == 2
    assert second.next_id("calls") == 2
    assert second.next_id("calls") == 3
    second.close()


def test_the_newest_value_is_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.kept("seed") is None
    for value in (1, [2, "x"]):
        journal.keep("seed", value)
    journal.flush_here()
    assert journal.kept("seed") == [2, "x"]
    journal.close()


def test_no_thread_outlives_a_closed_journal(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    journal = Journal(tmp_path)
    assert set(threading.enumerate()) - before
    journal.close()
    assert not set(threading.enumerate()) - before


def test_a_journal_of_every_earlier_version_is_brought_to_this_one(tmp_path: Path) -> None:
    """There is one version so far; this fails when a second comes without its step."""
    Journal(tmp_path).close()
    from dspy_flashevolve.engine.journal_schema import MIGRATIONS

    assert set(MIGRATIONS) == set(range(1, SCHEMA_VERSION))
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as connection:
        migrate(connection)
        assert connection.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION
    checked(tmp_path / FILE)


def test_a_migration_runs_its_statements_and_raises_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dspy_flashevolve.engine import journal_schema

    Journal(tmp_path).close()
    step = ("ALTER TABLE heads ADD COLUMN colour TEXT",)
    monkeypatch.setitem(journal_schema.MIGRATIONS, SCHEMA_VERSION, step)
    monkeypatch.setattr(journal_schema, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    monkeypatch.setattr(module, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    Journal(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / FILE)) as connection:
        assert "colour" in [row[1] for row in connection.execute("PRAGMA table_info(heads)")]
        assert connection.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION + 1


def test_the_schema_names_its_tables() -> None:
    assert {"sessions", "tickets", "rollouts", "proposals", "verdicts", "commits", "events", "state"} <= TABLES


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
        ("UPDATE ends SET ticket = 9", "names ticket 9"),
        ('UPDATE candidates SET texts = \'{"step": "other"}\'', "not those that it was named after"),
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
        "INSERT INTO rollouts SELECT 6, 6, 2, ticket, stage, candidate, split, example, traced, score, "
        "objective_scores, output, trace, 0, 0, 0, 0 FROM rollouts WHERE id = 3",
    )
    assert any("was paid twice" in problem for problem in check(filled).problems)


def test_the_check_finds_a_checkpoint_that_is_not_the_journals(filled: Path) -> None:
    texts = [{"step": "seed"}, {"step": "text"}]
    (filled / "candidates.json").write_text(json.dumps(texts))
    assert check(filled).problems == []
    (filled / "candidates.json").write_text(json.dumps([texts[0], {"step": "another"}]))
    assert check(filled).problems == ["candidate 1 is another one in candidates.json"]
    (filled / "candidates.json").write_text(json.dumps([*texts, {"step": "unknown"}]))
    assert check(filled).problems == ["the journal has 1 commits, candidates.json has 2"]


def test_the_check_of_a_directory_without_a_journal_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path)]) == 1
    assert "AsyncGEPA writes it for runs with log_dir" in capsys.readouterr().err
    with pytest.raises(RunDirectoryError):
        check(tmp_path)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=6000))
def test_no_file_however_malformed_is_taken_for_a_journal(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    directory = tmp_path_factory.mktemp("fuzz")
    (directory / FILE).write_bytes(content)
    if content:
        with pytest.raises(RunDirectoryError):
            Journal(directory)
        assert (directory / FILE).read_bytes() == content
    else:
        Journal(directory).close()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6) | st.integers(0, 110), st.binary(min_size=1, max_size=64))
@example(60, b"\x80")  # a version below 0
@example(617, b"\x00\x80")  # a table's name that is no text
def test_a_journal_with_a_changed_place_is_refused_or_read_but_never_breaks(
    tmp_path_factory: pytest.TempPathFactory, place: int, noise: bytes
) -> None:
    directory = tmp_path_factory.mktemp("noise")
    journal = Journal(directory)
    fill(journal, 3)
    journal.close()
    content = bytearray((directory / FILE).read_bytes())
    at = place % len(content)
    content[at : at + len(noise)] = noise[: len(content) - at]
    (directory / FILE).write_bytes(bytes(content))
    with suppress(RunDirectoryError):
        check(directory)
    with suppress(RunDirectoryError):
        Journal(directory).close()


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
    assert redaction.of(text) == text
    for words in ("pk_customer_orders_by_region", "Use bearer authentication.", "sk-learn-compatible-estimators"):
        assert redaction.of(words) == words


@pytest.mark.parametrize(
    "key", ["sk-proj-abcdefghij0123456789", "AIzaSyA0123456789abcdefghijkl", "hf_abcdefgh1jklmnop"]
)
def test_what_looks_like_a_providers_key_is_not_written(tmp_path: Path, key: str) -> None:
    journal = Journal(tmp_path)
    journal.append("ends", ticket=1, session=1, ended_at=0.0, way="failed", reason=f"Incorrect API key: {key}.")
    journal.flush_here()
    assert journal.rows("SELECT reason FROM ends")[0]["reason"] == f"Incorrect API key: {MARK}."
    journal.close()
