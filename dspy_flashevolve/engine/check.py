"""Does a journal hold what it promises? `flashevolve check RUN_DIR` asks this module."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspy_flashevolve.engine.journal import BEFORE_STEPS, TRACE_UNREADABLE, hash_of, id_text, reading
from dspy_flashevolve.engine.redaction import REDACTED

Rows = Callable[[str], list[sqlite3.Row]]

UNKEPT_TRACE = "traced AND stage NOT IN ('validate', 'prefix') AND trace IS NULL"
UNKEPT = "a trace that JSON cannot hold: those that a killed run has yet to reflect on are paid again"
PAID_TWICE = f"""
    SELECT b.id, b.step, b.stage, b.example FROM rollouts a
    JOIN rollouts b ON b.candidate = a.candidate AND b.split = a.split AND b.example = a.example
        AND b.traced = a.traced AND b.session > a.session
    LEFT JOIN ends e ON e.step = a.step
    LEFT JOIN steps second ON second.number = b.step JOIN sessions s ON s.id = b.session
    WHERE json_extract(s.settings, '$.schedule') IS NOT 'lockstep' AND a.step >= 0
        AND (e.session IS NULL OR e.session >= b.session) AND second.session <= a.session
        AND NOT (a.traced AND a.stage NOT IN ('validate', 'prefix') AND (a.trace IS NULL OR a.id IN (
            SELECT json_extract(fields, '$.rollout') FROM events WHERE kind = '{TRACE_UNREADABLE}')))
    UNION ALL
    SELECT b.id, b.step, b.stage, b.example FROM rollouts a
    JOIN rollouts b ON b.candidate = a.candidate AND b.split = a.split AND b.example = a.example
        AND b.traced = a.traced AND b.session > a.session WHERE a.step < 0 AND b.step < 0"""
"""Rollouts finished in an earlier session, for work that was not, and again. A trace that JSON could not hold, or that
can be read no more, is paid again when it is still needed, which that of a validation is not; docs/journal.md. In
lockstep an example that stands twice in a minibatch is run twice, as in dspy.GEPA: there the rows do not tell."""
KEEPS_TEXTS = """
    SELECT 1 FROM rollouts WHERE step >= 0 AND candidate IN (SELECT hash FROM candidates)
        AND candidate NOT IN (SELECT candidate FROM commits) LIMIT 1"""
"""Whether the loop writes down the text of whatever its steps run, as one does that has it of a candidate without a
commit: other loops name what they run as they like, and write down what they commit."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check has found: a line a fact, and a sentence a problem, none when all is well."""

    summary: list[str]
    problems: list[str]


def check(directory: str | Path) -> CheckReport:
    """Look through the journal of a run directory; nothing is changed, and no pickle is read.

    Raises:
        RunDirectoryError: there is no journal, or it cannot be read at all.
    """
    with reading(directory) as rows:
        keeps = bool(rows(KEEPS_TEXTS))
        problems = [
            *_unknown_references(rows, keeps),
            *_wrong_commits(rows, keeps),
            *_wrong_counts(rows),
            *_wrong_texts(rows),
            *_wrong_ends(rows),
        ]
        return CheckReport(_summary(rows), problems)


def _summary(rows: Rows) -> list[str]:
    totals = rows(
        "SELECT (SELECT COUNT(*) FROM sessions) AS sessions, (SELECT COUNT(*) FROM session_ends) AS ended,"
        " (SELECT COUNT(*) FROM steps) AS steps, (SELECT COUNT(*) FROM rollouts) AS rollouts,"
        " (SELECT COALESCE(SUM(calls), 0) FROM calls) AS calls, (SELECT COUNT(*) FROM commits) AS commits,"
        " (SELECT MAX(score) FROM commits) AS best"
    )[0]
    ways = ", ".join(
        f"{row['n']} {row['way']}" for row in rows("SELECT way, COUNT(*) AS n FROM ends GROUP BY way ORDER BY way")
    )
    unfinished = rows("SELECT COUNT(*) AS n FROM steps WHERE number NOT IN (SELECT step FROM ends)")[0]["n"]
    [untraced] = rows(f"SELECT COUNT(*) AS n FROM rollouts WHERE {UNKEPT_TRACE}")
    best = "none yet" if totals["best"] is None else f"{totals['best']:.4f}"
    return [
        f"{totals['sessions']} sessions, {totals['sessions'] - totals['ended']} of them without an end",
        f"{totals['steps']} steps: {ways or 'none ended'}, {unfinished} unfinished",
        f"{totals['calls']} metric calls, {totals['rollouts']} rollouts",
        f"{totals['commits']} commits, best score {best}",
        *([f"{untraced['n']} rollouts with {UNKEPT}"] if untraced["n"] else []),
    ]


def _unknown_references(rows: Rows, keeps_texts: bool) -> list[str]:
    """Rows that name what is not there."""
    found: list[str] = []
    candidates, steps = "SELECT hash FROM candidates", "SELECT number FROM steps"
    references = [
        ("rollouts", "call", "SELECT id FROM calls"),
        ("commits", "candidate", candidates),
        ("ends", "step", steps),
        ("replies", "step", f"{steps} UNION SELECT {BEFORE_STEPS}"),
    ]
    if keeps_texts:
        beside = "SELECT candidate FROM rollouts WHERE step < 0"
        references.append(("rollouts", "candidate", f"{candidates} UNION {beside}"))
    for table, column, known in references:
        for row in rows(f"SELECT id, {column} AS name FROM {table} WHERE {column} NOT IN ({known}) LIMIT 3"):
            found.append(f"{table} row {row['id']} names {column} {row['name']}, which is not there")
    for row in rows("SELECT call, COUNT(*) AS n FROM rollouts GROUP BY call HAVING n > 1 LIMIT 3"):
        found.append(f"{row['n']} rollouts were paid by one metric call, number {row['call']}")
    return found


def _wrong_commits(rows: Rows, keeps_texts: bool) -> list[str]:
    """Commits out of order, or with scores that no rollout gave."""
    found: list[str] = []
    commits = rows("SELECT * FROM commits ORDER BY candidate_index")
    first = min(1, commits[0]["candidate_index"]) if commits else 1  # the seed is a commit of some loops
    for place, row in enumerate(commits, start=first):
        if row["candidate_index"] != place:
            found.append(f"commit {place} is candidate {row['candidate_index']}")
            break
    given: dict[tuple[str, str], set[float]] = {}
    # In lockstep gepa's own cache, where it is on, does not tell training from validation examples.
    for row in rows(
        "SELECT r.candidate, r.example, r.score FROM rollouts r JOIN sessions s ON s.id = r.session "
        "WHERE r.split = 'val' OR json_extract(s.settings, '$.schedule') = 'lockstep'"
    ):
        given.setdefault((row["candidate"], row["example"]), set()).add(row["score"])
    unanswered: set[str] = {
        id_text(json.loads(row["fields"])["example"])
        for row in rows("SELECT fields FROM events WHERE kind = 'ExampleGivenUp'")
    }
    for row in commits if keeps_texts else ():
        if row["step"] is None:  # another program's
            continue
        scores: dict[str, float] = json.loads(row["scores"])
        wrong = [
            example
            for example, score in scores.items()
            if example not in unanswered
            and not math.isnan(score)
            and score not in given.get((row["candidate"], example), ())
        ]
        if wrong:
            found.append(f"candidate {row['candidate_index']} has scores that no rollout gave: examples {wrong[:3]}")
    return found


def _wrong_counts(rows: Rows) -> list[str]:
    """Money: calls beyond the budget, rollouts paid twice."""
    found: list[str] = []
    spent = 0
    for session in rows(
        "SELECT s.settings, SUM(c.calls) AS made, SUM(c.stage = 'elsewhere') AS elsewhere FROM calls c "
        "JOIN sessions s ON s.id = c.session GROUP BY s.id ORDER BY s.id"
    ):
        settings: dict[str, Any] = json.loads(session["settings"])
        spent += session["made"]
        limit = settings.get("max_metric_calls")
        if limit is not None and spent > limit and settings.get("schedule") != "lockstep" and not session["elsewhere"]:
            found.append(f"{spent} metric calls were made, {limit} were allowed")
    twice = rows(PAID_TWICE)
    for row in twice[:3]:
        found.append(
            f"rollout {row['id']} (step {row['step']}, {row['stage']}, example {row['example']}) was paid twice"
        )
    if len(twice) > 3:
        found.append(f"{len(twice) - 3} more rollouts were paid twice")
    return found


def _wrong_texts(rows: Rows) -> list[str]:
    found: list[str] = []
    for row in rows("SELECT hash, texts FROM candidates"):
        texts: dict[str, str] = json.loads(row["texts"])
        if hash_of(texts) != row["hash"] and REDACTED not in row["texts"]:
            found.append(f"the texts of candidate {row['hash']} are not those that it was named after")
    return found[:3]


def _wrong_ends(rows: Rows) -> list[str]:
    """Steps that a finished session left behind."""
    return [
        f"step {row['number']} has no end, although session {row['session']} came to its end"
        for row in rows(
            "SELECT number, session FROM steps JOIN session_ends s ON s.id = session "
            "WHERE session = (SELECT MAX(id) FROM sessions) AND s.state IN ('finished', 'stopped') "
            "AND number NOT IN (SELECT step FROM ends) LIMIT 3"
        )
    ]
