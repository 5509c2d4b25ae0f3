"""Does a journal hold what it promises? `flashevolve check RUN_DIR` asks this module."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dspy_flashevolve.engine.redaction import REDACTED
from dspy_flashevolve.engine.store import BEFORE_STEPS, TRACE_UNREADABLE, hash_of, id_text, reading

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
KEEPS_TEXTS = """EXISTS (
    SELECT 1 FROM rollouts WHERE step >= 0 AND candidate IN (SELECT hash FROM candidates)
        AND candidate NOT IN (SELECT candidate FROM commits))"""
"""Whether the loop writes down the text of whatever its steps run, as one does that has it of a candidate without a
commit: other loops name what they run as they like, and write down what they commit."""
_NAMED = "SELECT '{0} row ' || id || ' names {1} ' || {1} || ', which is not there' FROM {0} WHERE {1} NOT IN ({2})"
_CANDIDATES, _STEPS = "SELECT hash FROM candidates", "SELECT number FROM steps"
PROBLEMS = (
    # Rows that name what is not there.
    _NAMED.format("rollouts", "call", "SELECT id FROM calls"),
    _NAMED.format("commits", "candidate", _CANDIDATES),
    _NAMED.format("ends", "step", _STEPS),
    _NAMED.format("replies", "step", f"{_STEPS} UNION SELECT {BEFORE_STEPS}"),
    _NAMED.format("rollouts", "candidate", f"{_CANDIDATES} UNION SELECT candidate FROM rollouts WHERE step < 0")
    + f" AND {KEEPS_TEXTS}",
    "SELECT COUNT(*) || ' rollouts were paid by one metric call, number ' || call FROM rollouts "
    "GROUP BY call HAVING COUNT(*) > 1",
    # Commits out of order: the first that is. The seed is a commit of some loops.
    """SELECT * FROM (SELECT 'commit ' || place || ' is candidate ' || candidate_index FROM (
        SELECT candidate_index, ROW_NUMBER() OVER (ORDER BY candidate_index) - 1
            + MIN(1, (SELECT MIN(candidate_index) FROM commits)) AS place FROM commits)
    WHERE candidate_index <> place ORDER BY place LIMIT 1)""",
    # Calls beyond the budget. In lockstep it is spent as dspy.GEPA spends it; another program knows of no budget.
    """SELECT spent || ' metric calls were made, ' || allowed || ' were allowed' FROM (
        SELECT SUM(SUM(c.calls)) OVER (ORDER BY s.id) AS spent, SUM(c.stage = 'elsewhere') AS elsewhere,
            json_extract(s.settings, '$.max_metric_calls') AS allowed,
            json_extract(s.settings, '$.schedule') AS schedule
        FROM calls c JOIN sessions s ON s.id = c.session GROUP BY s.id)
    WHERE spent > allowed AND schedule IS NOT 'lockstep' AND NOT elsewhere""",
    # Steps that a finished session left behind.
    """SELECT 'step ' || number || ' has no end, although session ' || session || ' came to its end'
    FROM steps JOIN session_ends s ON s.id = session
    WHERE session = (SELECT MAX(id) FROM sessions) AND s.state IN ('finished', 'stopped')
        AND number NOT IN (SELECT step FROM ends)""",
)
"""Queries that find nothing in a good journal, and else sentences."""
MOST_SHOWN = 3
"""Problems of one kind that are shown, as many as help to find the cause."""


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
        problems = [row[0] for query in PROBLEMS for row in rows(f"{query} LIMIT {MOST_SHOWN}")]
        twice = [
            f"rollout {row['id']} (step {row['step']}, {row['stage']}, example {row['example']}) was paid twice"
            for row in rows(PAID_TWICE)
        ]
        problems += twice[:MOST_SHOWN]
        if len(twice) > MOST_SHOWN:
            problems.append(f"{len(twice) - MOST_SHOWN} more rollouts were paid twice")
        problems += [
            f"the texts of candidate {row['hash']} are not those that it was named after"
            for row in rows("SELECT hash, texts FROM candidates")
            if hash_of(json.loads(row["texts"])) != row["hash"] and REDACTED not in row["texts"]
        ][:MOST_SHOWN]
        return CheckReport(_summary(rows), problems + _wrong_scores(rows))


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


def _wrong_scores(rows: Rows) -> list[str]:
    """Commits with scores that no rollout gave, where the loop scores its commits by rollouts."""
    scores_of: dict[tuple[str, str], set[float]] = {}
    # In lockstep gepa's own cache, where it is on, does not tell training from validation examples.
    for row in rows(
        "SELECT r.candidate, r.example, r.score FROM rollouts r JOIN sessions s ON s.id = r.session "
        "WHERE r.split = 'val' OR json_extract(s.settings, '$.schedule') = 'lockstep'"
    ):
        scores_of.setdefault((row["candidate"], row["example"]), set()).add(row["score"])
    unanswered: set[str] = {
        id_text(json.loads(row["fields"])["example"])
        for row in rows("SELECT fields FROM events WHERE kind = 'ExampleGivenUp'")
    }
    problems: list[str] = []
    # Commits without a step are another program's.
    for row in rows(f"SELECT * FROM commits WHERE step IS NOT NULL AND {KEEPS_TEXTS} ORDER BY candidate_index"):
        scores: dict[str, float] = json.loads(row["scores"])
        wrong = [
            example
            for example, score in scores.items()
            if example not in unanswered
            and not math.isnan(score)
            and score not in scores_of.get((row["candidate"], example), ())
        ]
        if wrong:
            problems.append(f"candidate {row['candidate_index']} has scores that no rollout gave: examples {wrong[:3]}")
    return problems
