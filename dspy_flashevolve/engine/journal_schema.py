"""The journal's tables. Times are seconds since 1970 (``*_at``); texts that hold structure are JSON.

A table is only ever appended to, but ``state``, which keeps the newest value under each name. A change of the tables
raises :data:`SCHEMA_VERSION` and adds a step to :data:`MIGRATIONS`.
"""

from __future__ import annotations

import sqlite3

APPLICATION_ID = 0x464C4556
SCHEMA_VERSION = 1
MIGRATIONS: dict[int, tuple[str, ...]] = {}
"""Version -> the statements that make the next version of it."""

SCHEMA = (
    # One run on the directory. A session without an end in session_ends was killed.
    """CREATE TABLE sessions (id INTEGER PRIMARY KEY, began_at REAL NOT NULL, pid INTEGER NOT NULL,
        settings TEXT NOT NULL, fingerprints TEXT NOT NULL)""",
    """CREATE TABLE session_ends (id INTEGER PRIMARY KEY, ended_at REAL NOT NULL, state TEXT NOT NULL,
        reason TEXT NOT NULL)""",
    # Every text of a candidate that was run or committed; the hash is of the texts.
    "CREATE TABLE candidates (id INTEGER PRIMARY KEY, hash TEXT NOT NULL UNIQUE, texts TEXT NOT NULL)",
    """CREATE TABLE tickets (id INTEGER PRIMARY KEY, number INTEGER NOT NULL UNIQUE, session INTEGER NOT NULL,
        opened_at REAL NOT NULL, kind TEXT NOT NULL, version INTEGER NOT NULL, rng TEXT NOT NULL,
        selection TEXT NOT NULL)""",
    """CREATE TABLE ends (id INTEGER PRIMARY KEY, ticket INTEGER NOT NULL UNIQUE, session INTEGER NOT NULL,
        ended_at REAL NOT NULL, way TEXT NOT NULL, reason TEXT NOT NULL)""",
    # Metric calls. A row is written before the metric is called, with calls = 1; -1 takes one back that is not counted,
    # and what was spent by another program on the same directory comes as one row.
    """CREATE TABLE calls (id INTEGER PRIMARY KEY, session INTEGER NOT NULL, ticket INTEGER NOT NULL,
        stage TEXT NOT NULL, at REAL NOT NULL, calls INTEGER NOT NULL)""",
    """CREATE TABLE rollouts (id INTEGER PRIMARY KEY, call INTEGER NOT NULL, session INTEGER NOT NULL,
        ticket INTEGER NOT NULL, stage TEXT NOT NULL, candidate TEXT NOT NULL, split TEXT NOT NULL,
        example TEXT NOT NULL, traced INTEGER NOT NULL, score REAL NOT NULL, objective_scores TEXT NOT NULL,
        output TEXT, trace TEXT, tokens INTEGER NOT NULL, cost_dollars REAL NOT NULL, latency_seconds REAL NOT NULL,
        at REAL NOT NULL)""",
    "CREATE INDEX rollouts_by_ticket ON rollouts (ticket)",
    """CREATE TABLE proposals (id INTEGER PRIMARY KEY, ticket INTEGER NOT NULL, position INTEGER NOT NULL,
        session INTEGER NOT NULL, at REAL NOT NULL, texts TEXT NOT NULL, feedback TEXT NOT NULL,
        tokens INTEGER NOT NULL, cost_dollars REAL NOT NULL)""",
    """CREATE TABLE verdicts (id INTEGER PRIMARY KEY, session INTEGER NOT NULL, ticket INTEGER NOT NULL,
        child INTEGER NOT NULL, verdict TEXT NOT NULL, reason TEXT NOT NULL, at REAL NOT NULL)""",
    # Integrated candidates that passed their screen, and how each ended. A head's handle is unique in its session.
    """CREATE TABLE heads (id INTEGER PRIMARY KEY, session INTEGER NOT NULL, head INTEGER NOT NULL,
        ticket INTEGER NOT NULL, at REAL NOT NULL, candidate TEXT NOT NULL, base INTEGER, parents TEXT NOT NULL,
        generation INTEGER NOT NULL, examples TEXT NOT NULL, before TEXT NOT NULL, after TEXT NOT NULL,
        members TEXT NOT NULL)""",
    """CREATE TABLE head_ends (id INTEGER PRIMARY KEY, session INTEGER NOT NULL, head INTEGER NOT NULL,
        way TEXT NOT NULL, at REAL NOT NULL)""",
    """CREATE TABLE commits (id INTEGER PRIMARY KEY, candidate_index INTEGER NOT NULL UNIQUE, session INTEGER NOT NULL,
        ticket INTEGER, at REAL NOT NULL, version INTEGER NOT NULL, candidate TEXT NOT NULL, parents TEXT NOT NULL,
        score REAL NOT NULL, scores TEXT NOT NULL, objective_scores TEXT)""",
    """CREATE TABLE events (id INTEGER PRIMARY KEY, session INTEGER NOT NULL, at REAL NOT NULL, seconds REAL NOT NULL,
        kind TEXT NOT NULL, ticket INTEGER, fields TEXT NOT NULL)""",
    "CREATE TABLE state (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
)

TABLES = frozenset(statement.split()[2] for statement in SCHEMA if statement.startswith("CREATE TABLE"))


def migrate(connection: sqlite3.Connection) -> None:
    """Bring an older journal to this version, a version at a time, each in a transaction of its own."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    while version < SCHEMA_VERSION:
        connection.execute("BEGIN IMMEDIATE")
        for statement in MIGRATIONS[version]:
            connection.execute(statement)
        version += 1
        connection.execute(f"PRAGMA user_version = {version}")
        connection.execute("COMMIT")
