"""The journal: one SQLite file in a run's directory, to which one thread appends.

What is appended is written in the order in which it came, in batches: while one batch is committed the next one
gathers. :meth:`Journal.flush` waits until everything that was appended before is on its way to the disk. A process
that is killed loses at most what was appended since the last batch began, and never a part of it from the middle.

The tables are below and, with examples, in docs/journal.md. Times are seconds since 1970 (``*_at``); texts that hold
structure are JSON. A table is only ever appended to, but ``state``, which keeps the newest value under each name. There
is no pickle in the file, and no secret: every text goes through :class:`~dspy_flashevolve.engine.redaction.Redaction`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import queue
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dspy_flashevolve.engine.errors import FlashEvolveError, JournalError, RunDirectoryError
from dspy_flashevolve.engine.files import open_private
from dspy_flashevolve.engine.redaction import Redaction

FILE = "journal.sqlite"
LOCK = "journal.lock"
IN_FLIGHT = "in_flight"
"""Name under which a run keeps how many requests of each stage hold a slot."""
CURRENT_SECONDS = 1.0
"""Seconds between two looks at a value that is kept current: as often as `flashevolve watch` looks, and a row a second
is little beside the rows of rollouts."""
LARGEST_BATCH = 1000
"""Rows of one transaction at most."""
APPLICATION_ID = 0x464C4556
SCHEMA_VERSION = 3

SCHEMA = (
    # One run on the directory. A session without an end in session_ends was killed.
    """CREATE TABLE sessions (id INTEGER PRIMARY KEY, began_at REAL NOT NULL, pid INTEGER NOT NULL,
        settings TEXT NOT NULL, fingerprints TEXT NOT NULL)""",
    """CREATE TABLE session_ends (id INTEGER PRIMARY KEY, ended_at REAL NOT NULL, state TEXT NOT NULL,
        reason TEXT NOT NULL)""",
    # Every text of a candidate that was run or committed; the hash is of the texts.
    "CREATE TABLE candidates (id INTEGER PRIMARY KEY, hash TEXT NOT NULL UNIQUE, texts TEXT NOT NULL)",
    # What a step works on, as its loop wrote it down: a run that goes on runs a step without an end again, from there.
    """CREATE TABLE steps (id INTEGER PRIMARY KEY, number INTEGER NOT NULL UNIQUE, session INTEGER NOT NULL,
        opened_at REAL NOT NULL, version INTEGER NOT NULL, selection TEXT NOT NULL)""",
    """CREATE TABLE ends (id INTEGER PRIMARY KEY, step INTEGER NOT NULL UNIQUE, session INTEGER NOT NULL,
        ended_at REAL NOT NULL, way TEXT NOT NULL, reason TEXT NOT NULL)""",
    # Metric calls. A row is written before the metric is called, with calls = 1; -1 takes one back that is not counted,
    # and what was spent by another program on the same directory comes as one row.
    """CREATE TABLE calls (id INTEGER PRIMARY KEY, session INTEGER NOT NULL, step INTEGER NOT NULL,
        stage TEXT NOT NULL, at REAL NOT NULL, calls INTEGER NOT NULL)""",
    """CREATE TABLE rollouts (id INTEGER PRIMARY KEY, call INTEGER NOT NULL, session INTEGER NOT NULL,
        step INTEGER NOT NULL, stage TEXT NOT NULL, candidate TEXT NOT NULL, split TEXT NOT NULL,
        example TEXT NOT NULL, traced INTEGER NOT NULL, score REAL NOT NULL, objective_scores TEXT NOT NULL,
        output TEXT, trace TEXT, tokens INTEGER NOT NULL, cost_dollars REAL NOT NULL, latency_seconds REAL NOT NULL,
        at REAL NOT NULL)""",
    "CREATE INDEX rollouts_by_step ON rollouts (step)",
    # What a request that is no rollout was answered; the position tells those of one step in one stage apart.
    """CREATE TABLE replies (id INTEGER PRIMARY KEY, session INTEGER NOT NULL, step INTEGER NOT NULL,
        stage TEXT NOT NULL, position TEXT NOT NULL, reply TEXT NOT NULL, tokens INTEGER NOT NULL,
        cost_dollars REAL NOT NULL, at REAL NOT NULL)""",
    """CREATE TABLE commits (id INTEGER PRIMARY KEY, candidate_index INTEGER NOT NULL UNIQUE, session INTEGER NOT NULL,
        step INTEGER, at REAL NOT NULL, version INTEGER NOT NULL, candidate TEXT NOT NULL, parents TEXT NOT NULL,
        score REAL NOT NULL, scores TEXT NOT NULL, more TEXT)""",
    """CREATE TABLE events (id INTEGER PRIMARY KEY, session INTEGER NOT NULL, at REAL NOT NULL, seconds REAL NOT NULL,
        kind TEXT NOT NULL, step INTEGER, fields TEXT NOT NULL)""",
    "CREATE TABLE state (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
)

COLUMNS = {
    statement.split()[2]: re.findall(r"(\w+) (?:INTEGER|REAL|TEXT)\b", statement)
    for statement in SCHEMA
    if statement.startswith("CREATE TABLE")
}
"""Table -> its columns."""


class Journal:
    """A run directory's journal, open for one process at a time.

    Args:
        directory: made when it is not there.
        redaction: takes secrets out of what is written.

    Raises:
        RunDirectoryError: the directory cannot be written, another process runs on it, or what is there is no journal
            of ours, or a damaged or a newer one. Nothing is changed then.
    """

    def __init__(self, directory: str | Path, redaction: Redaction | None = None) -> None:
        self.directory = Path(directory)
        self.path = self.directory / FILE
        self.redaction = redaction or Redaction()
        self._lock = self._locked()
        self._ids: dict[str, itertools.count[int]] = {}
        self._queue: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | Future[None] | None] = queue.SimpleQueue()
        """What to write, who waits for that, and None at the end."""
        self._current: dict[str, Callable[[], Any]] = {}
        """Name -> function whose value is kept current under it."""
        self.failure: JournalError | None = None
        """Why nothing is written any more; None while all is well."""
        self.is_new = not _is_there(self.path)
        """There was none before."""
        try:
            self._writing = _opened(self.path)
            self.session = self.next_id("sessions")
            """Number of this run on the directory, from 1."""
        except BaseException:
            self._lock.release()
            raise
        self._thread = threading.Thread(target=self._write, name="flashevolve-journal", daemon=True)
        self._thread.start()

    def append(self, table: str, **values: Any) -> None:
        """Append a row; numbers, texts and None as they are, everything else as JSON. Any thread may call it.

        What is not given of the session and of the time is this session, and now. The writer's thread makes the JSON:
        what is given must not change any more.
        """
        for name in COLUMNS[table]:
            if name == "session":
                values.setdefault(name, self.session)
            elif name == "at" or name.endswith("_at"):
                values.setdefault(name, time.time())
        columns, marks = ", ".join(values), ", ".join("?" * len(values))
        self._queue.put((f"INSERT INTO {table} ({columns}) VALUES ({marks})", tuple(values.values())))

    def set_state(self, name: str, value: Any) -> None:
        """Keep one value under a name, in place of the one before."""
        statement = (
            "INSERT INTO state (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value=excluded.value"
        )
        self._queue.put((statement, (name, json.dumps(value))))

    def keep_current(self, name: str, value_of: Callable[[], Any]) -> None:
        """Keep the value of a function under a name from now on, written about once a second where it has changed.

        What changes with each request is written down in this way without a row for each.

        Args:
            value_of: called by the writer's thread; its value must be JSON.
        """
        self._current[name] = value_of

    def next_id(self, table: str) -> int:
        """A new number for a row of ``table``, from 1, without gaps as far as all of them are used."""
        if table not in self._ids:
            last = int(self.rows(f"SELECT COALESCE(MAX(id), 0) AS last FROM {table}")[0]["last"])
            self._ids[table] = itertools.count(last + 1)
        return next(self._ids[table])

    async def flush(self) -> None:
        """Wait until everything that was appended is written.

        Raises:
            JournalError: it could not be.
        """
        future = self._marker()
        loop = asyncio.get_running_loop()
        if hasattr(loop, "wait_from_thread"):  # virtual time must not pass meanwhile
            future.result()
        else:
            await asyncio.wrap_future(future)

    def flush_blocking(self) -> None:
        """As :meth:`flush`, for a thread that may wait."""
        self._marker().result()

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """What a query finds, of what was written when the journal was opened or flushed."""
        with reporting_damage(self.path), _connected(self.path) as connection:
            connection.row_factory = sqlite3.Row
            return connection.execute(query, parameters).fetchall()

    def get_state(self, name: str) -> Any:
        """What :meth:`set_state` kept under a name; None where nothing was."""
        found = self.rows("SELECT value FROM state WHERE name = ?", (name,))
        with reporting_damage(self.path):
            return json.loads(found[0]["value"]) if found else None

    def close(self) -> None:
        """Write the rest, end the thread, and let others have the directory. Calling it again does nothing."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self._writing.close()
        self._lock.release()

    def _marker(self) -> Future[None]:
        future: Future[None] = Future()
        if not self._thread.is_alive():
            raise JournalError(f"The journal {self.path} is closed.")
        self._queue.put(future)
        return future

    def _locked(self) -> FileLock:
        lock = FileLock(self.directory / LOCK, timeout=0, mode=0o600, thread_local=False)  # it is released on the loop
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            raise RunDirectoryError(
                f"log_dir={str(self.directory)!r}: another run is at work there. Wait for its end, or give another "
                "log_dir."
            ) from None
        except OSError as error:
            raise RunDirectoryError(
                f"log_dir={str(self.directory)!r} cannot be written ({error}), expected a directory that can."
            ) from error
        return lock

    def _write(self) -> None:
        """The writer's thread."""
        ended = False
        written: dict[str, Any] = {}
        next_look = time.monotonic()
        while not ended:
            entries: list[tuple[str, tuple[Any, ...]] | Future[None] | None] = []
            with suppress(queue.Empty):
                entries.append(self._queue.get(timeout=max(0.0, next_look - time.monotonic())))
            if (now := time.monotonic()) >= next_look:
                next_look = now + CURRENT_SECONDS
                for name, value_of in list(self._current.items()):
                    if written.get(name) != (value := value_of()):
                        written[name] = value
                        self.set_state(name, value)
            while entries and len(entries) < LARGEST_BATCH and entries[-1] is not None:
                try:
                    entries.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            self._write_batch([entry for entry in entries if isinstance(entry, tuple)])
            for entry in entries:
                if isinstance(entry, Future) and entry.set_running_or_notify_cancel():
                    if self.failure is None:
                        entry.set_result(None)
                    else:
                        entry.set_exception(self.failure)
            ended = entries[-1:] == [None]

    def _write_batch(self, rows: list[tuple[str, tuple[Any, ...]]]) -> None:
        if not rows or self.failure is not None:
            return
        try:
            self._writing.execute("BEGIN IMMEDIATE")
            for statement, values in rows:
                self._writing.execute(statement, [self.redaction.redact(_plain(value)) for value in values])
            self._writing.execute("COMMIT")
        except Exception as error:  # whatever it is: a writer that ends would leave those who wait waiting
            self.failure = JournalError(
                f"The journal {self.path} cannot be written ({error}): the run ends, since what it pays for from now "
                "on could not be found again. Mend that (a full disk, say), then run again with the same log_dir."
            )
            with suppress(sqlite3.Error):
                if self._writing.in_transaction:
                    self._writing.execute("ROLLBACK")


def _connected(path: Path) -> closing[sqlite3.Connection]:
    """A connection that is closed at the end of the block.

    It is one for writing, so that SQLite takes away the files that it makes to read. In a folder that may only be read
    it can make none: there a journal that nobody writes is read alone.
    """
    is_fixed = not _may_write(path) and not _is_there(path.with_name(path.name + "-wal"))
    address = f"{path.absolute().as_uri()}?{'mode=ro&immutable=1' if is_fixed else 'mode=rwc'}"
    return closing(sqlite3.connect(address, uri=True, timeout=30, isolation_level=None))


def _may_write(path: Path) -> bool:
    """Whether a journal, and its folder, may be written."""
    ours = os.access in os.supports_effective_ids
    return all(os.access(place, os.W_OK, effective_ids=ours) for place in (path.parent, path) if place.exists())


def _plain(value: Any) -> Any:
    if isinstance(value, str):  # half a surrogate pair, as JSON of a provider may hold, is no UTF-8
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, float) and math.isnan(value):  # SQLite takes NaN for NULL; as a text it stays what it is
        return "nan"
    return value if value is None or isinstance(value, int | float) else json.dumps(value, default=_number)


def _number(value: Any) -> Any:
    """A metric's score that is a number of another library: numpy's, a tensor with one element."""
    return float(value)


def check_readable(path: Path) -> None:
    """Look whether a file is a journal that this version can read; it is not changed.

    Raises:
        RunDirectoryError: it is not, with the reason.
    """
    what = f"{path} is no journal that can be continued"
    advice = "Give another log_dir." if _may_write(path) else "It may only be read: copy it to where you may write."
    try:
        with _connected(path) as connection:
            found = connection.execute("PRAGMA application_id").fetchone()[0]
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if found != APPLICATION_ID:
                raise RunDirectoryError(f"{what}: it is a database of something else. {advice}")
            if version != SCHEMA_VERSION:
                raise RunDirectoryError(
                    f"{what}: its schema is version {version}, this dspy-flashevolve knows version {SCHEMA_VERSION}. "
                    "Use the version that wrote it, or give another log_dir."
                )
            problems = [" ".join(str(row[0]).split()) for row in connection.execute("PRAGMA quick_check(3)")]
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise RunDirectoryError(f"{what}: {error}. {advice}") from error
    if problems != ["ok"]:
        raise RunDirectoryError(f"{what}: it is damaged ({'; '.join(problems)}). {advice}")


@contextmanager
def reading(directory: str | Path) -> Generator[Callable[[str], list[sqlite3.Row]], None, None]:
    """Queries on the journal of a run directory, also while the run goes on; nothing is changed.

    Raises:
        RunDirectoryError: there is none, or what is read inside the block makes no sense.
    """
    path = Path(directory) / FILE
    if not path.is_file():
        raise RunDirectoryError(f"{path} is missing: a run that is given a log_dir writes it there.")
    check_readable(path)
    with _connected(path) as connection, reporting_damage(path):
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA query_only = ON")
        yield lambda query: connection.execute(query).fetchall()


@contextmanager
def reporting_damage(path: Path) -> Generator[None, None, None]:
    """Turn whatever a damaged journal makes of the block that reads it into an error that says so.

    Raises:
        RunDirectoryError: the block raised anything of the kind.
    """
    try:
        yield
    except FlashEvolveError:
        raise
    except (sqlite3.Error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunDirectoryError(
            f"{path} cannot be read ({type(error).__name__}: {error}). It is damaged: put a copy back, or give another "
            "log_dir."
        ) from error


def is_in_use(directory: str | Path) -> bool:
    """Whether a process has the journal of a run directory open for writing, on this machine or another."""
    path = Path(directory) / LOCK
    if not path.is_file():
        return False
    try:
        with FileLock(path, timeout=0, mode=0o600):
            return False
    except Timeout:
        return True
    except OSError:  # a copy that may only be read
        return False


def _is_there(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _opened(path: Path) -> sqlite3.Connection:
    """The writer's connection to a journal, which is made where there is none.

    Raises:
        RunDirectoryError: see :func:`checked`.
    """
    try:
        if _is_there(path):
            check_readable(path)
        else:
            _create(path)
        connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
    except sqlite3.Error as error:
        raise RunDirectoryError(f"log_dir={str(path.parent)!r}: the journal cannot be written ({error}).") from error
    return connection


def _create(path: Path) -> None:
    """Make an empty journal, whole or not at all: a process that is killed meanwhile leaves a file of another name."""
    unfinished = path.with_suffix(".new")
    unfinished.unlink(missing_ok=True)
    for rest in ("-wal", "-shm"):  # of a journal that was moved away: SQLite would read it as the new one's
        path.with_name(path.name + rest).unlink(missing_ok=True)
    open(unfinished, "xb", opener=open_private).close()  # its companions have the same mode
    with _connected(unfinished) as connection:
        connection.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    unfinished.replace(path)
