"""The Store of a run: what is paid and what is decided, as rows of SQLite.

With a directory the rows are a file in it, the journal, from which a run that was interrupted goes on. Without one the
tables are in memory and stay empty, since nobody would read their rows after the run: every question is answered as for
a new run. What a running run tells of itself, its observers hear from its bus.

Rows are written in the order in which they came, in batches: while a thread commits one batch the next one gathers.
:meth:`Database.flush` waits until everything that was appended before is on its way to the disk. A process that is
killed loses at most what was appended since the last batch began, and never a part of it from the middle.

The tables are below and, with examples, in docs/journal.md. Times are seconds since 1970 (``*_at``); texts that hold
structure are JSON. A table is only ever appended to, but ``state``, which keeps the newest value under each name. There
is no pickle in the file, and no secret: every text goes through :class:`~dspy_flashevolve.engine.redaction.Redaction`.

Everything that is paid or decided becomes a row: metric calls before they are made, rollouts, replies, selections,
commits before the pool has them, and the ends of steps. A run that goes on runs again, from their selection, the steps
that had no end; what was paid for these is found here, by candidate and example or by stage and position, and costs
nothing. Other steps find nothing here: what they need is paid anew, as in a run that was never interrupted.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import math
import os
import re
import sqlite3
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dspy_flashevolve.engine.errors import FlashEvolveError, JournalError, RunDirectoryError
from dspy_flashevolve.engine.events import Event, RolloutFinished, StepClosed
from dspy_flashevolve.engine.redaction import REDACTED, Redaction, secrets_in
from dspy_flashevolve.engine.steps import EndKind

BEFORE_STEPS = -1
"""Stands for the number of a step in what belongs to none: the seed's validation, say."""

TRACE_UNREADABLE = "TraceUnreadable"
"""Kind of the event that says that a rollout's trace was kept, and cannot be read any more."""


def id_text(example_id: Any) -> str:
    """An example's id as text; ids of lists are numbers, other loaders have what they like."""
    return json.dumps(example_id, default=repr)


def hash_of(texts: Mapping[str, str]) -> str:
    """A candidate's name: a hash of its texts, component -> text."""
    return hashlib.sha256(json.dumps(sorted(texts.items())).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One run of a program with a candidate on one example.

    Args:
        output, score: what the program returned; higher is better.
        objective_scores: objective name -> score; empty when the metric has one objective.
        trajectory: what reflection reads; None when no trace was asked for or none could be taken.
        tokens, cost_dollars: prompt and completion tokens that the LMs reported; 0 dollars where a price is not known.
        error: what the program or its metric raised, as a sentence; empty where neither did.
    """

    output: Any
    score: float
    objective_scores: dict[str, float] = field(default_factory=dict[str, float])
    trajectory: Any = None
    tokens: int = 0
    cost_dollars: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class RolloutKey:
    """Equal keys mean the same rollout: of a candidate (its name, by :func:`hash_of` or another text), on an example of
    a split, with a trace or without."""

    candidate: str
    split: str
    example: Hashable
    traced: bool = True


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A step that had no end, with the pool's version that it saw: it runs again from its selection, as its loop wrote
    it down."""

    number: int
    version: int
    selection: Any


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
INSERT = {
    table: f"INSERT {'OR REPLACE ' * (table == 'state')}INTO {table} VALUES ({', '.join('?' * len(columns))})"
    for table, columns in COLUMNS.items()
}
"""Table -> the statement that writes a row of it."""


class Database:
    """Rows of SQLite, in a file for one process at a time, or in memory.

    Args:
        directory: where the file is; made when it is not there. None for memory.
        redaction: takes secrets out of what is written. Default: those of the environment.

    Raises:
        RunDirectoryError: the directory cannot be written, another process runs on it, or what is there is no journal
            of ours, or a damaged or a newer one. Nothing is changed then.
    """

    def __init__(self, directory: str | PathLike[str] | None = None, redaction: Redaction | None = None) -> None:
        self.directory = None if directory is None else Path(directory)
        self.path = Path(":memory:") if self.directory is None else self.directory / FILE
        self.redaction = Redaction(secrets_in(os.environ)) if redaction is None else redaction
        self._waiting: deque[tuple[str, list[Any]] | Future[None]] = deque()
        """Rows to write, and who waits for those before."""
        self._current: dict[str, Callable[[], Any]] = {}
        """Name -> function whose value is kept current under it."""
        self.failure: JournalError | None = None
        """Why nothing is written any more; None while all is well."""
        self._lock, self._wake, self._is_closed = threading.Lock(), threading.Event(), False
        self._file_lock = None if self.directory is None else _locked(self.directory)
        self.is_new = self.directory is None or not _is_there(self.path)
        """There was none before."""
        try:
            self._connection = _opened(self.directory)
            if self.directory is None:  # else :meth:`close` does it
                weakref.finalize(self, self._connection.close)
            self.session: int = self.rows("SELECT COALESCE(MAX(id), 0) + 1 AS next FROM sessions")[0]["next"]
            """Number of this run on the directory, from 1."""
        except BaseException:
            if self._file_lock is not None:
                self._file_lock.release()
            raise
        self._thread = None
        if self.directory is not None:
            self._thread = threading.Thread(target=self._write, name="flashevolve-journal", daemon=True)
            self._thread.start()

    @property
    def is_durable(self) -> bool:
        """Whether rows are written, to a file: only then is it worth to make texts of outputs, traces and replies."""
        return self.directory is not None

    def append(self, table: str, **values: Any) -> None:
        """Append a row; numbers, texts and None as they are, everything else as JSON. Any thread may call it.

        Without other values the session is this one, and times are now. The writer makes the JSON, later: ``values``
        must not change any more.
        """
        if self._thread is None:
            return
        now = time.time()
        row = {"id": None, "session": self.session, "at": now, "began_at": now, "opened_at": now, "ended_at": now}
        row |= values
        self._waiting.append((INSERT[table], [row[name] for name in COLUMNS[table]]))
        self._wake.set()

    def set_state(self, name: str, value_of: Callable[[], Any]) -> None:
        """Keep what a function returns, JSON, under a name, in place of what was there. In memory it is not called."""
        if self.is_durable:
            self.append("state", name=name, value=json.dumps(value_of()))

    def get_state(self, name: str) -> Any:
        """Return what :meth:`set_state` has under a name; None where there is nothing."""
        found = self.rows("SELECT value FROM state WHERE name = ?", (name,))
        with reporting_damage(self.path):
            return json.loads(found[0]["value"]) if found else None

    def keep_current(self, name: str, value_of: Callable[[], Any]) -> None:
        """Keep the value of a function, JSON, under a name from now on, written about once a second by the writer's
        thread where it has changed: what changes with each request needs no row for each."""
        self._current[name] = value_of

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """Return what a query finds, of all that was appended."""
        self._raise_if_closed()
        self._write_waiting()
        with reporting_damage(self.path), self._lock:
            return self._connection.execute(query, parameters).fetchall()

    async def flush(self) -> None:
        """Wait until everything that was appended is in the file; raises JournalError where it cannot be written."""
        if hasattr(asyncio.get_running_loop(), "wait_from_thread"):  # virtual time must not pass meanwhile
            self.flush_blocking()
        elif self.is_durable:
            self._raise_if_closed()
            future: Future[None] = Future()
            self._waiting.append(future)
            self._wake.set()
            await asyncio.wrap_future(future)

    def flush_blocking(self) -> None:
        """As :meth:`flush`, for a thread that may wait."""
        if self.is_durable:
            self._raise_if_closed()
            self._write_waiting()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Write the rest, end the thread, and let others have the directory. Calling it again does nothing."""
        if self._thread is None or self._is_closed:
            return
        self._is_closed = True
        self._wake.set()
        self._thread.join()
        self._write_waiting()
        self._connection.close()
        assert self._file_lock is not None
        self._file_lock.release()

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise JournalError(f"The journal {self.path} is closed.")

    def _write(self) -> None:
        """Write what waits, as long as there is a file: the work of its thread."""
        written: dict[str, Any] = {}
        next_look = time.monotonic()
        while not self._is_closed:
            self._wake.wait(max(0.0, next_look - time.monotonic()))
            self._wake.clear()
            if (now := time.monotonic()) >= next_look:
                next_look = now + CURRENT_SECONDS
                for name, value_of in list(self._current.items()):
                    if written.get(name) != (value := value_of()):
                        written[name] = value
                        self.append("state", name=name, value=json.dumps(value))
            self._write_waiting()

    def _write_waiting(self) -> None:
        """Write what waits, in batches, and tell those who wait for it."""
        is_done = False
        while not is_done:
            # The lock is also around the taking, so that rows are written in the order in which they came, and it is
            # taken where nothing waits: another thread may be about to write what did.
            with self._lock:
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), LARGEST_BATCH))]
                self._write_batch([entry for entry in batch if isinstance(entry, tuple)])
                for entry in batch:
                    if isinstance(entry, Future) and entry.set_running_or_notify_cancel():
                        if self.failure is None:
                            entry.set_result(None)
                        else:
                            entry.set_exception(self.failure)
                is_done = not self._waiting

    def _write_batch(self, rows: list[tuple[str, list[Any]]]) -> None:
        if not rows or self.failure is not None:
            return
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for statement, values in rows:
                self._connection.execute(statement, [self.redaction.redact(_plain(value)) for value in values])
            self._connection.execute("COMMIT")
        except Exception as error:  # whatever it is: a writer that ends would leave those who wait waiting
            self.failure = JournalError(
                f"The journal {self.path} cannot be written ({error}): the run ends, since what it pays for from now "
                "on could not be found again. Mend that (a full disk, say), then run again with the same log_dir."
            )
            with suppress(sqlite3.Error):
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")


class Store(Database):
    """What a run writes down, and what it is answered when it goes on.

    Args:
        directory, redaction: see :class:`Database`.
        each_once: a rollout that is kept answers one request; else all that are equal (equal ones in flight are one).
        is_readable: whether a trace, as it stands in a row, can still be read. Default: each can.
    """

    def __init__(
        self,
        directory: str | PathLike[str] | None = None,
        redaction: Redaction | None = None,
        *,
        each_once: bool = False,
        is_readable: Callable[[str], bool] = lambda trace: True,
    ) -> None:
        super().__init__(directory, redaction)
        self._each_once, self._is_readable = each_once, is_readable
        self.unfinished: list[Unfinished] = []
        self._numbers: set[int] = set()
        self._rollouts: dict[tuple[str, str, str, int], list[int]] = {}
        self._untraced: set[int] = set()
        self._replies: dict[tuple[int, str, str], str] = {}
        self.paid: Counter[int] = Counter()
        """Step that runs again -> its rollouts that are paid."""
        try:
            with reporting_damage(self.path):
                self._load()
        except BaseException:
            self.close()
            raise

    def _load(self) -> None:
        [spent] = self.rows("SELECT COALESCE(SUM(calls), 0) AS calls, COALESCE(MAX(id), 0) AS last FROM calls")
        self.spent = int(spent["calls"])
        """Metric calls of all sessions before."""
        self._call_numbers = itertools.count(int(spent["last"]) + 1)
        [asked] = self.rows(
            "SELECT COALESCE(SUM(kind = 'RequestFinished' AND json_extract(fields, '$.stage') NOT IN "
            "(SELECT stage FROM rollouts)), 0) AS calls, "
            "COALESCE(SUM(json_extract(fields, '$.cost_dollars')), 0) AS dollars FROM events "
            "WHERE kind IN ('RequestFinished', 'LmCallCounted') AND json_valid(fields)"
        )
        [ran] = self.rows("SELECT COALESCE(SUM(cost_dollars), 0) AS dollars FROM rollouts")
        self.requests_before: int = asked["calls"]
        """Requests that were no rollouts, of all sessions before."""
        self.dollars_before: float = asked["dollars"] + ran["dollars"]
        """What these, the rollouts, and LM calls that belong to neither have cost."""
        self.last_step = int(self.rows("SELECT COALESCE(MAX(number), -1) AS last FROM steps")[0]["last"])
        """The highest number that a step had; -1 for none."""
        self.texts: dict[str, dict[str, str]] = {
            row["hash"]: dict(json.loads(row["texts"]).items())
            for row in self.rows("SELECT hash, texts FROM candidates")
        }
        """Candidate's hash -> its texts."""

    def load_unfinished(self, seeded: bool = True) -> list[Unfinished]:
        """Find the steps that had no end, and what was paid for them; also what belongs to no step unless that is done
        (``seeded``). Call it once, when ends that were not written are."""
        for row in self.rows("SELECT * FROM steps WHERE number NOT IN (SELECT step FROM ends) ORDER BY number"):
            selection = row["selection"]
            texts = [text for name, parts in self.texts.items() if name in selection for text in parts.values()]
            if any(REDACTED in text for text in (selection, *texts)):
                self.record_end(
                    row["number"], "failed", "a secret was taken out of its texts: they are not what they were"
                )
                continue
            self.unfinished.append(Unfinished(int(row["number"]), int(row["version"]), json.loads(selection)))
        self._numbers = {step.number for step in self.unfinished} | (set[int]() if seeded else {BEFORE_STEPS})
        for row in self.rows("SELECT id, step, candidate, split, example, traced FROM rollouts"):
            if row["step"] in self._numbers:
                key = row["candidate"], row["split"], row["example"], row["traced"]
                self._rollouts.setdefault(key, []).append(row["id"])
                self.paid[row["step"]] += 1
                if row["traced"] and not self._has_trace(row["id"], row["step"]):
                    self._untraced.add(row["id"])
        for row in self.rows("SELECT step, stage, position, reply FROM replies"):
            if row["step"] in self._numbers and REDACTED not in row["reply"]:
                self._replies[row["step"], row["stage"], row["position"]] = row["reply"]
        return self.unfinished

    def _has_trace(self, rollout: int, step: int) -> bool:
        """Whether the trace of a rollout was kept, and can still be read; if not, that is written down, since the
        rollout may be paid again."""
        [row] = self.rows("SELECT trace FROM rollouts WHERE id = ?", (rollout,))
        if row["trace"] is None:
            return False
        if self._is_readable(row["trace"]):
            return True
        fields = json.dumps({"rollout": rollout})
        self.append("events", seconds=0.0, kind=TRACE_UNREADABLE, step=step, fields=fields)
        return False

    # What is answered.

    def find_rollout(self, key: RolloutKey, step: int, read: Callable[[Any], Rollout | None]) -> Rollout | None:
        """A rollout that was paid for work which runs again now; None where there is none, or it cannot be read."""
        if step not in self._numbers or not self._rollouts:
            return None
        found = self._rollouts.get((key.candidate, key.split, id_text(key.example), int(key.traced)))
        if not found:
            return None
        row = found.pop(0) if self._each_once else found[-1]
        with reporting_damage(self.path):
            return read(self.rows("SELECT * FROM rollouts WHERE id = ?", (row,))[0])

    def count_missing(
        self,
        step: int,
        candidate: str,
        split: str,
        ids: Iterable[Any],
        *,
        traced: bool = True,
        needs_trace: bool = False,
    ) -> int:
        """Count a candidate's rollouts that are still to be paid for a step; with ``needs_trace`` also those whose
        trace could not be kept."""
        ids = list(ids)
        if step not in self._numbers or not self._rollouts:
            return len(ids)
        found = (self._rollouts.get((candidate, split, id_text(example), int(traced))) for example in ids)
        return sum(not rows or (needs_trace and rows[-1] in self._untraced) for rows in found)

    def find_reply(self, step: int, stage: str, position: str) -> str | None:
        """What a request of a step that runs again now was answered; None where there is nothing."""
        return self._replies.get((step, stage, position))

    # What is written.

    def record_candidate(self, texts: Mapping[str, str]) -> str:
        """Write a candidate's texts, once; returns its hash."""
        name = hash_of(texts)
        if self.is_durable and name not in self.texts:
            self.texts[name] = dict(texts)
            self.append("candidates", hash=name, texts=dict(texts))
        return name

    def record_call(self, stage: str, step: int, calls: int = 1) -> int:
        """Write a metric call that counts, and return its number; wait with :meth:`flush` before it is made.

        The stage is "elsewhere" for what another program made on the same run directory; -1 call takes one back that
        had begun and is not counted after all.
        """
        number = next(self._call_numbers)
        self.append("calls", id=number, step=step, stage=stage, calls=calls)
        return number

    def record_rollout(
        self,
        key: RolloutKey,
        stage: str,
        step: int,
        rollout: Rollout,
        written: tuple[str, str | None],
        seconds: float,
        call: int,
    ) -> None:
        """Write what a rollout gave; ``written`` is its output and its trace as text."""
        self.append(
            "rollouts",
            call=call,
            step=step,
            stage=stage,
            candidate=key.candidate,
            split=key.split,
            example=id_text(key.example),
            traced=int(key.traced),
            score=float(rollout.score),
            objective_scores=dict(rollout.objective_scores),
            output=written[0],
            trace=written[1] if key.traced else None,
            tokens=rollout.tokens,
            cost_dollars=rollout.cost_dollars,
            latency_seconds=seconds,
        )

    def record_reply(self, step: int, stage: str, position: str, reply: str, tokens: int, cost_dollars: float) -> None:
        """Write what a request that is no rollout was answered."""
        self.append(
            "replies",
            step=step,
            stage=stage,
            position=position,
            reply=reply,
            tokens=tokens,
            cost_dollars=cost_dollars,
        )

    def record_selection(self, step: int, version: int, selection: Any) -> None:
        """Write what a step has selected, unless it runs again; it must be JSON."""
        if step in self._numbers:
            return
        self.append("steps", number=step, version=version, selection=json.dumps(selection))

    def record_end(self, step: int, way: str, reason: str, before: bool = False) -> None:
        """Write a step's end; ``before``: it had ended in the session before, which did not come to write it."""
        self.append("ends", step=step, session=self.session - before, way=way, reason=reason)

    def record_commit(
        self,
        step: int | None,
        candidate_index: int,
        version: int,
        texts: Mapping[str, str],
        parents: Sequence[int | None],
        scores: Mapping[str, float],
        score: float | None = None,
        more: Any = None,
    ) -> None:
        """Write a candidate that is about to enter the pool, made by a step (None: by another program), with its scores
        by example and what else the loop needs to put it there again. Wait for it with :meth:`flush`."""
        self.append(
            "commits",
            candidate_index=candidate_index,
            step=step,
            version=version,
            candidate=self.record_candidate(texts),
            parents=list(parents),
            score=sum(scores.values()) / max(1, len(scores)) if score is None else score,
            scores=dict(scores),
            more=None if more is None else json.dumps(more),
        )

    def record_session_end(self, state: str, reason: str) -> None:
        """Write how the run ended, and close the Store."""
        self.append("session_ends", id=self.session, state=state, reason=reason)
        self.close()

    def __call__(self, event: Event) -> None:
        """A subscriber of the run's bus."""
        if isinstance(event, RolloutFinished) or not self.is_durable:
            return  # a rollout is a row of its own
        if isinstance(event, StepClosed):
            if event.end.kind is not EndKind.CANCELLED:  # a run that goes on runs it again
                self.record_end(event.step, event.end.kind.value, event.end.reason)
            return
        self.append(
            "events",
            seconds=event.seconds,
            kind=event.kind,
            step=getattr(event, "step", None),
            fields=json.dumps(event.fields, default=str),
        )


def _connected(path: Path) -> closing[sqlite3.Connection]:
    """A connection that is closed at the end of the block. It is one for writing, so that SQLite takes away the files
    that it makes to read; in a folder that may only be read a journal that nobody writes is read alone."""
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
    # A metric's score may be a number of another library: numpy's, a tensor with one element.
    return value if value is None or isinstance(value, int | float) else json.dumps(value, default=float)


def check_readable(path: Path) -> None:
    """Raise RunDirectoryError unless a file is a journal that this version can read; it is not changed."""
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
    """Query the journal of a run directory, also while the run goes on. Raises RunDirectoryError where there is none,
    or what is read inside the block makes no sense."""
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
    """Turn whatever a damaged journal makes of the block that reads it into a RunDirectoryError that says so."""
    try:
        yield
    except FlashEvolveError:
        raise
    except (sqlite3.Error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunDirectoryError(
            f"{path} cannot be read ({type(error).__name__}: {error}). It is damaged: put a copy back, or give another "
            "log_dir."
        ) from error


def open_private(path: str, flags: int) -> int:
    """Open a file that is made for the user alone, from its first moment; an ``opener`` for :func:`open`."""
    return os.open(path, flags, 0o600)


def write_private(path: Path, content: bytes | str) -> None:
    """Write a file of a run directory, whole or not at all, or raise JournalError. A link in its place is replaced, and
    not followed."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished.unlink(missing_ok=True)
        with open(unfinished, "xb", opener=open_private) as file:
            file.write(content.encode("utf-8", "replace") if isinstance(content, str) else content)
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise JournalError(
            f"{path} cannot be written ({error.strerror or error}): the run ends. What was paid for is in the journal, "
            "and the file is as it was. Mend that (a full disk, say), then run again with the same log_dir."
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


def _opened(directory: Path | None) -> sqlite3.Connection:
    """Return the writer's connection, to tables that are made where there are none."""
    options: Any = {"timeout": 30, "isolation_level": None, "check_same_thread": False}
    try:
        if directory is None:
            connection = sqlite3.connect(":memory:", **options)
            _make_tables(connection)
        else:
            path = directory / FILE
            if _is_there(path):
                check_readable(path)
            else:
                _create(path)
            connection = sqlite3.connect(path, **options)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
    except sqlite3.Error as error:
        raise RunDirectoryError(f"log_dir={str(directory)!r}: the journal cannot be written ({error}).") from error
    connection.row_factory = sqlite3.Row
    return connection


def _create(path: Path) -> None:
    """Make an empty journal, whole or not at all: a process that is killed meanwhile leaves a file of another name."""
    unfinished = path.with_suffix(".new")
    unfinished.unlink(missing_ok=True)
    for rest in ("-wal", "-shm"):  # of a journal that was moved away: SQLite would read it as the new one's
        path.with_name(path.name + rest).unlink(missing_ok=True)
    open(unfinished, "xb", opener=open_private).close()  # its companions have the same mode
    with _connected(unfinished) as connection:
        _make_tables(connection)
    unfinished.replace(path)


def _make_tables(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for statement in SCHEMA:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")


def _locked(directory: Path) -> FileLock:
    """Make a directory where there is none, and lock it against other runs."""
    lock = FileLock(directory / LOCK, timeout=0, mode=0o600, thread_local=False)  # it is released on the loop
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise RunDirectoryError(
            f"log_dir={str(directory)!r}: another run is at work there. Wait for its end, or give another log_dir."
        ) from None
    except OSError as error:
        raise RunDirectoryError(
            f"log_dir={str(directory)!r} cannot be written ({error}), expected a directory that can."
        ) from error
    return lock
