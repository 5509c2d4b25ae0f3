"""The history of a run: its journal, read once into frozen records, from which every view of a run is made.

Seconds count from the start of the run; the time between its sessions is left out.
"""

from __future__ import annotations

import json
import math
import sqlite3
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from dspy_flashevolve.engine.events import (
    Committed,
    Event,
    RequestFinished,
    RolloutFinished,
    SeedValidated,
    StageVisited,
)
from dspy_flashevolve.engine.store import BEFORE_STEPS, IN_FLIGHT, is_in_use, reading
from dspy_flashevolve.observe.statistics import ChangeRecord, Request

Query = Callable[[str], list[sqlite3.Row]]
KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}
"""Name of a kind of event, as it stands in the journal -> the kind."""


@dataclass(frozen=True, slots=True)
class Session:
    """One call of `compile` on the run directory; sessions are numbered from 1.

    Args:
        began_at: seconds since 1970.
        state: how it ended (finished, stopped, failed, aborted); "running"; "killed" where no end was written.
        settings: the optimizer's arguments.
        fingerprints: of the optimizer, the program, the data and the metric.
    """

    number: int
    began_at: float
    state: str
    reason: str
    settings: Mapping[str, Any]
    fingerprints: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate as it was committed: one of GEPA's pool, a validated playbook, or a harness.

    What the journal does not say is None.

    Args:
        index: number in the pool; the seed is 0.
        texts: component -> text.
        score: validation score; None for a seed whose validation has not ended.
        scores: example's id as text -> score; while the seed is being validated, those that are known.
        parents: indices of its parents; the first is the one that it was made from.
        step: the step that made it; None where another program did.
        seconds, calls: when it was committed, and metric calls made by then.
        gap: commits that its step had not seen.
        version: version of the pool that it was committed as.
        more: whatever the loop has written beside it.
        examples: size of the validation set, of a seed that is being validated.
        has_grown: it joins edits of several reflections, and was not written anew.
    """

    index: int
    texts: Mapping[str, str]
    score: float | None
    scores: Mapping[str, float] = field(default_factory=dict[str, float])
    parents: tuple[int | None, ...] = ()
    step: int | None = None
    seconds: float | None = None
    calls: int | None = None
    gap: int | None = None
    version: int = 0
    more: Any = None
    examples: int | None = None
    has_grown: bool = False


@dataclass(frozen=True, slots=True)
class RolloutOn(RolloutFinished):
    """A rollout, with its example's id as text."""

    example: str = ""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step.

    Args:
        selection: what it works on, as its loop wrote it down.
        way, reason: how and why it ended; empty while it has no end.
        replies: stage and JSON of each reply to a request that ran no program; empty unless replies were read.
    """

    number: int
    selection: Any
    way: str = ""
    reason: str = ""
    replies: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All that the journal of a run tells.

    Args:
        optimizer: name of the optimizer.
        seconds: from the start of the run to the last row.
        session_began: when the newest session began, in the same seconds.
        calls, max_calls: metric calls made and allowed; None without such a limit.
        in_flight: stage -> requests that hold a slot, about a second ago; empty for a run that is over.
        candidates: by index, the seed first.
        requests: rollouts, other requests and LM calls, by the time of their answers; stages that ask the task LM have
            rollouts.
        visits: visits of steps to stages, by their ends.
        events: all other events, in order.
        changes: changes that reflections made, with their estimated effects.
    """

    directory: str
    optimizer: str
    sessions: tuple[Session, ...] = ()
    seconds: float = 0.0
    session_began: float = 0.0
    calls: int = 0
    max_calls: int | None = None
    in_flight: Mapping[str, int] = field(default_factory=dict[str, int])
    candidates: tuple[Candidate, ...] = ()
    requests: tuple[Request, ...] = ()
    steps: Mapping[int, StepRecord] = field(default_factory=dict[int, StepRecord])
    visits: tuple[StageVisited, ...] = ()
    events: tuple[Event, ...] = ()
    changes: tuple[ChangeRecord, ...] = ()

    @property
    def state(self) -> str:
        """State of the newest session; "unknown" where there is no journal."""
        return self.sessions[-1].state if self.sessions else "unknown"

    @property
    def seed(self) -> Candidate | None:
        """Candidate 0; None where the journal does not have it."""
        return next((candidate for candidate in self.candidates if candidate.index == 0), None)

    @property
    def best(self) -> Candidate | None:
        """The candidate that the run returns: the highest score, of equals one that has not grown, then the cheapest,
        then the first."""
        scored = [one for one in self.candidates if one.score is not None and not math.isnan(one.score)]
        return max(
            scored, key=lambda one: (one.score, not one.has_grown, -_cost(one), -one.version, -one.index), default=None
        )

    @property
    def failed_requests(self) -> list[RequestFinished]:
        """Requests whose answer was of no use, in order."""
        return [request for request in self.requests if isinstance(request, RequestFinished) and request.error]

    def of_kind(self, kind: str) -> list[Any]:
        """Return the events of one kind."""
        return [event for event in self.events if event.kind == kind]


def _cost(candidate: Candidate) -> float:
    """Return the mean cost of a harness, whose search prefers the cheapest of equals; 0 for other candidates."""
    record = candidate.more.get("candidate", {}) if isinstance(candidate.more, dict) else {}
    costs: list[float] = record.get("costs") or [0.0]
    return sum(costs) / len(costs)


def read(run_dir: str | Path, replies: bool = False) -> History:
    """Read the journal of a run directory, also while the run is at work.

    Args:
        replies: also read what reflections answered, which says where a line of a prompt came from.

    Raises:
        RunDirectoryError: there is no journal, or it cannot be read.
    """
    with reading(run_dir) as query:
        query("BEGIN")  # one transaction, so that all that is read is of one moment
        sessions = _sessions(query, run_dir)
        rows = query("SELECT session, at, seconds, kind, step, fields FROM events ORDER BY id")
        clock = _Clock(sessions, [(row["session"], row["at"], row["seconds"]) for row in rows])
        events = [_event(row, clock) for row in rows if row["kind"] in KINDS]
        rare = tuple(event for event in events if not isinstance(event, Request | StageVisited))
        calls = query("SELECT session, at, stage, calls FROM calls ORDER BY id")
        newest = sessions[-1] if sessions else None
        requests = [*_rollouts(query, clock), *(event for event in events if isinstance(event, Request))]
        requests.sort(key=lambda request: request.seconds)
        in_flight = _state(query, IN_FLIGHT) if newest is not None and newest.state == "running" else {}
        return History(
            directory=str(run_dir),
            optimizer="a run" if newest is None else newest.fingerprints.get("optimizer", "a run"),
            sessions=sessions,
            seconds=max([clock.end, *(request.seconds for request in requests[-1:])]),
            session_began=clock.newest,
            calls=sum(row["calls"] for row in calls),
            max_calls=None if newest is None else newest.settings.get("max_metric_calls"),
            in_flight={stage: requests for stage, requests in in_flight.items() if requests},
            candidates=_candidates(query, clock, rare, calls, Path(run_dir), _valset_size(sessions)),
            requests=tuple(requests),
            steps=_steps(query, replies),
            visits=tuple(event for event in events if isinstance(event, StageVisited)),
            events=rare,
            changes=_changes(query),
        )


def _event(row: sqlite3.Row, clock: _Clock) -> Event:
    """Return the event that a row tells of, in the seconds of the run."""
    fields: dict[str, Any] = {"step": row["step"], **json.loads(row["fields"])}
    for name in fields.keys() & {"queued_seconds", "began_seconds"}:
        fields[name] = clock.of_event(row["session"], fields[name])
    kind = KINDS[row["kind"]]
    named = {name: fields[name] for name in kind.__dataclass_fields__.keys() & fields.keys()}
    return kind(clock.of_event(row["session"], row["seconds"]), **named)


def _rollouts(query: Query, clock: _Clock) -> Iterator[RolloutOn]:
    rows = query(
        "SELECT session, at, step, stage, score, latency_seconds, tokens, cost_dollars, example "
        "FROM rollouts ORDER BY id"
    )
    for session, at, step, stage, score, *figures in rows:
        yield RolloutOn(clock.of_row(session, at), step, stage, float(score), *figures)


def _state(query: Query, name: str) -> dict[str, Any]:
    """Return the value that the journal keeps under a name; empty where there is none."""
    rows = query(f"SELECT value FROM state WHERE name = '{name}'")
    return json.loads(rows[0]["value"]) if rows else {}


class _Clock:
    """The seconds of a run: those of its sessions, one after the other.

    Events (session, wall time, seconds) have the engine's clock. Rows have wall time alone, which counts from their
    session's first event.
    """

    def __init__(self, sessions: tuple[Session, ...], events: list[tuple[int, float, float]]) -> None:
        by_session: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for session, at, seconds in events:
            by_session[session].append((at, seconds))
        self._began: dict[int, tuple[float, float, float]] = {}
        self.end = self.newest = 0.0
        for session in sessions:
            pairs = by_session[session.number] or [(session.began_at, 0.0)]
            at, first = pairs[0]
            self._began[session.number] = self.end, at, first
            self.newest = self.end
            self.end += max(seconds for _, seconds in pairs) - first

    def of_event(self, session: int, seconds: float) -> float:
        """Convert the engine's seconds in a session to seconds since the run began."""
        began, _, first = self._began.get(session, (0.0, 0.0, 0.0))
        return began + seconds - first

    def of_row(self, session: int, at: float) -> float:
        """Convert the wall time of a row to seconds since the run began."""
        began, first_at, _ = self._began.get(session, (0.0, at, 0.0))
        return began + max(0.0, at - first_at)


def _sessions(query: Query, run_dir: str | Path) -> tuple[Session, ...]:
    rows = query("SELECT s.*, e.state, e.reason FROM sessions s LEFT JOIN session_ends e ON e.id = s.id ORDER BY s.id")
    sessions: list[Session] = []
    for row in rows:
        state = row["state"] or ("running" if row is rows[-1] and is_in_use(run_dir) else "killed")
        settings, fingerprints = json.loads(row["settings"]), json.loads(row["fingerprints"])
        sessions.append(Session(row["id"], row["began_at"], state, row["reason"] or "", settings, fingerprints))
    return tuple(sessions)


def _candidates(
    query: Query,
    clock: _Clock,
    events: tuple[Event, ...],
    calls: list[sqlite3.Row],
    directory: Path,
    valset_size: int | None,
) -> tuple[Candidate, ...]:
    texts = {row["hash"]: json.loads(row["texts"]) for row in query("SELECT hash, texts FROM candidates")}
    committed = {event.candidate: event for event in events if isinstance(event, Committed)}
    call_times, calls_made = [row["at"] for row in calls], list(accumulate(row["calls"] for row in calls))
    candidates: list[Candidate] = []
    grown = _state(query, "grown")
    for row in query("SELECT * FROM commits ORDER BY candidate_index"):
        event, calls_before = committed.get(row["candidate_index"]), bisect_right(call_times, row["at"])
        candidates.append(
            Candidate(
                row["candidate_index"],
                texts.get(row["candidate"], {}),
                float(row["score"]),
                json.loads(row["scores"]),
                tuple(json.loads(row["parents"])),
                row["step"],
                clock.of_row(row["session"], row["at"]) if event is None else event.seconds,
                calls_made[calls_before - 1] if calls_before else 0,
                None if event is None else event.gap,
                row["version"],
                None if row["more"] is None else json.loads(row["more"]),
                has_grown=str(row["candidate_index"]) in grown,
            )
        )
    if not candidates or candidates[0].index > 0:  # GEPA's seed is in the pool from the start: it has no commit
        candidates.insert(0, _seed(query, clock, texts, events, directory / "candidates.json", valset_size))
    return tuple(candidates)


def _valset_size(sessions: tuple[Session, ...]) -> int | None:
    """Return the number of validation examples; None where the journal does not tell."""
    count = sessions[-1].fingerprints.get("valset", "").partition(" ")[0] if sessions else ""
    return int(count) if count.isdecimal() else None


def _seed(
    query: Query,
    clock: _Clock,
    texts: Mapping[str, Any],
    events: tuple[Event, ...],
    stored: Path,
    valset_size: int | None,
) -> Candidate:
    """Return the program that was validated before any step; it has a score when its validation has ended.

    Args:
        stored: gepa's own file of candidates, for a seed that another program has validated.
        valset_size: number of validation examples; None where that is not known.
    """
    rows = query(
        "SELECT session, candidate, example, score, at FROM rollouts "
        f"WHERE step = {BEFORE_STEPS} AND split = 'val' ORDER BY id"
    )
    if not rows:
        return Candidate(0, json.loads(stored.read_text("utf-8"))[0] if stored.is_file() else {}, None)
    name, last = rows[0]["candidate"], rows[-1]
    scores = {row["example"]: float(row["score"]) for row in rows if row["candidate"] == name}
    validated = next((event for event in events if isinstance(event, SeedValidated)), None)
    if validated is not None:
        score, seconds = validated.score, validated.seconds
    else:
        score = sum(scores.values()) / len(scores) if len(scores) == valset_size else None
        seconds = clock.of_row(last["session"], last["at"])
    return Candidate(0, texts.get(name, {}), score, scores, seconds=seconds, calls=len(scores), examples=valset_size)


def _steps(query: Query, with_replies: bool) -> dict[int, StepRecord]:
    replies: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
    for row in query("SELECT step, stage, reply FROM replies ORDER BY id") if with_replies else ():
        replies[row["step"]].append((row["stage"], row["reply"]))
    rows = query("SELECT number, selection, way, reason FROM steps LEFT JOIN ends ON step = number ORDER BY number")
    return {
        number: StepRecord(number, json.loads(selection), way or "", reason or "", tuple(replies[number]))
        for number, selection, way, reason in rows
    }


def _changes(query: Query) -> tuple[ChangeRecord, ...]:
    """Return the changes that reflections have made, with the estimates of their effects."""
    credit = _state(query, "credit")
    return tuple(ChangeRecord(**record) for record in credit.get("records", []))
