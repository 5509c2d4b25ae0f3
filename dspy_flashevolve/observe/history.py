"""A run as its journal tells it: read once, into frozen records on which every view of a run stands.

Seconds are those of the engine's clock since the run began; the time between its sessions counts for nothing. Rows of
the journal have the wall's time, events have both: what happened between two events is put between them.
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
from typing import Any, Literal

from dspy_flashevolve.engine.journal import is_at_work, reading
from dspy_flashevolve.engine.replay import BEFORE_STEPS
from dspy_flashevolve.engine.scheduler import StageVisit
from dspy_flashevolve.observe.statistics import ChangeRecord

Role = Literal["task", "reflection"]
Rows = Callable[[str], list[sqlite3.Row]]
TIMED = ("StageVisited", "RequestFinished", "LmCallCounted", "StepOpened", "Looked")
"""Events that are read into records of their own, or told by other rows."""


@dataclass(frozen=True, slots=True)
class Session:
    """One `compile` on the directory.

    Args:
        state: how it ended (finished, stopped, failed, aborted); "running"; "killed" where nobody wrote an end.
        reason: of the end.
        began_at: seconds since 1970.
    """

    number: int
    began_at: float
    state: str
    reason: str
    settings: Mapping[str, Any]
    fingerprints: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Candidate:
    """What evolves, as it was committed: a candidate of GEPA's pool, a validated playbook, a harness.

    Args:
        score: on the validation set; None for a seed whose validation has not ended, or which the journal has not.
        scores: example's id as text -> score; of a seed that is being validated, those that are known by now.
        examples: of the validation set, where the journal tells and the validation has not ended; None else.
        step: that made it; None where the journal does not say, or another program made it.
        seconds, calls: when; None where the journal does not say. Calls are metric calls made by then.
        more: what the loop has written beside it.
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


@dataclass(frozen=True, slots=True)
class Request:
    """A rollout, or a request that is none, when it was answered.

    Args:
        role: who was asked: the task's LM, or one that reflects, integrates or proposes.
        latency_seconds: in its slot.
        score, example: of a rollout; None else.
        error: why the answer is of no use.
        is_lm_call: it is no request in a slot, but an LM call that belongs to none, see :class:`LmCallCounted`.
    """

    seconds: float
    stage: str
    role: Role
    step: int
    tokens: int
    cost_dollars: float
    latency_seconds: float
    score: float | None = None
    example: str | None = None
    error: str = ""
    is_lm_call: bool = False


@dataclass(frozen=True, slots=True)
class TracedRollout:
    """What went into a rollout of a step's minibatch, and what came out of it, for people.

    Args:
        example: its id as text.
        inputs, output: field -> value, as the journal has them; empty where it has no trace.
    """

    step: int
    example: str
    score: float
    inputs: Mapping[str, Any]
    output: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step.

    Args:
        way: how it ended; empty while it has no end.
        replies: what its requests that are no rollouts were answered, stage and JSON; empty unless they were read.
    """

    number: int
    selection: Any
    way: str = ""
    reason: str = ""
    replies: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Told:
    """An event of a rarer kind; see `dspy_flashevolve/engine/events.py`."""

    seconds: float
    kind: str
    step: int | None
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All of a run.

    Args:
        directory: of the run.
        optimizer: its name.
        seconds: from its beginning to what was written last; session_began: when the newest session began.
        calls: metric calls.
        max_calls: allowed; None for no such limit.
        under_way: rollouts that had begun and have no result.
        changes: what reflections added to the head, with what it is estimated to be worth.
        traced: rollouts on training examples whose trace was kept, in order; empty unless replies were read.
    """

    directory: str
    optimizer: str
    sessions: tuple[Session, ...] = ()
    seconds: float = 0.0
    session_began: float = 0.0
    calls: int = 0
    max_calls: int | None = None
    under_way: int = 0
    candidates: tuple[Candidate, ...] = ()
    requests: tuple[Request, ...] = ()
    steps: Mapping[int, StepRecord] = field(default_factory=dict[int, StepRecord])
    visits: tuple[StageVisit, ...] = ()
    events: tuple[Told, ...] = ()
    changes: tuple[ChangeRecord, ...] = ()
    traced: tuple[TracedRollout, ...] = ()

    @property
    def state(self) -> str:
        """Of the newest session; "unknown" where there is no journal."""
        return self.sessions[-1].state if self.sessions else "unknown"

    @property
    def seed(self) -> Candidate | None:
        """Candidate 0."""
        return next((one for one in self.candidates if one.index == 0), None)

    @property
    def best(self) -> Candidate | None:
        """The candidate that the run returns: the highest score, of equals the cheapest, then the first."""
        scored = [one for one in self.candidates if one.score is not None and not math.isnan(one.score)]
        return max(scored, key=lambda one: (one.score, -_cost(one), -one.version, -one.index), default=None)

    def of_kind(self, kind: str) -> list[Told]:
        """The events of one kind."""
        return [one for one in self.events if one.kind == kind]


def _cost(candidate: Candidate) -> float:
    """Of a harness, whose search prefers the cheapest of equals."""
    kept = candidate.more.get("candidate", {}) if isinstance(candidate.more, dict) else {}
    costs: list[float] = kept.get("costs") or [0.0]
    return sum(costs) / len(costs)


def read(run_dir: str | Path, replies: bool = False) -> History:
    """Read the journal of a run directory, of a run that is at work too.

    Args:
        replies: read what reflections answered, too, which says where a line of a prompt came from.

    Raises:
        RunDirectoryError: there is no journal, or it cannot be read.
    """
    with reading(run_dir) as rows:
        rows("BEGIN")  # one moment for all that is read
        sessions = _sessions(rows, run_dir)
        events = rows("SELECT session, at, seconds, kind, step, fields FROM events ORDER BY id")
        clock = _Clock(sessions, [(row["session"], row["at"], row["seconds"]) for row in events])
        told = [
            Told(
                clock.of_event(session, seconds),
                kind,
                step,
                {"shift": clock.of_event(session, 0.0), **json.loads(text)},
            )
            for session, _, seconds, kind, step, text in events
        ]
        rare = tuple(one for one in told if one.kind not in TIMED)
        calls = rows("SELECT session, at, stage, calls FROM calls ORDER BY id")
        settings = sessions[-1].settings if sessions else {}
        requests = _requests(rows, clock, told)
        return History(
            directory=str(run_dir),
            optimizer=sessions[-1].fingerprints.get("optimizer", "a run") if sessions else "a run",
            sessions=sessions,
            seconds=max([clock.end, *(one.seconds for one in requests[-1:])]),
            session_began=clock.newest,
            calls=sum(row["calls"] for row in calls),
            max_calls=settings.get("max_metric_calls"),
            under_way=_under_way(rows) if sessions and sessions[-1].state == "running" else 0,
            candidates=_candidates(rows, clock, rare, calls, Path(run_dir), _valset_size(sessions)),
            requests=requests,
            steps=_steps(rows, replies),
            visits=tuple(_visits(told)),
            events=rare,
            changes=_changes(rows),
            traced=tuple(_traced(rows)) if replies else (),
        )


def _requests(rows: Rows, clock: _Clock, told: list[Told]) -> tuple[Request, ...]:
    """What was answered, in order of time."""
    found = [
        Request(clock.of_row(row["session"], row["at"]), row["stage"], "task", row["step"], row["tokens"],
                row["cost_dollars"], row["latency_seconds"], float(row["score"]), row["example"])
        for row in rows(
            "SELECT session, stage, step, tokens, cost_dollars, latency_seconds, score, example, at FROM rollouts "
            "ORDER BY id"
        )
    ]  # fmt: skip
    of_task = {one.stage for one in found}
    for one in told:
        if one.kind in ("RequestFinished", "LmCallCounted"):
            stage, tokens, dollars = (one.fields[name] for name in ("stage", "tokens", "cost_dollars"))
            latency, error = one.fields.get("latency_seconds", 0.0), one.fields.get("error", "")
            role: Role = "task" if stage in of_task else "reflection"
            step = BEFORE_STEPS if one.step is None else one.step
            found.append(Request(one.seconds, stage, role, step, tokens, dollars, latency, error=error,
                                 is_lm_call=one.kind == "LmCallCounted"))  # fmt: skip
    return tuple(sorted(found, key=lambda one: one.seconds))


def _traced(rows: Rows) -> Iterator[TracedRollout]:
    query = (
        "SELECT step, example, score, json_extract(trace, '$.prediction') AS output, "
        "json_extract(trace, '$.trace[0][1]') AS inputs FROM rollouts "
        f"WHERE split = 'train' AND step > {BEFORE_STEPS} AND trace IS NOT NULL AND trace <> 'null' ORDER BY id"
    )
    for row in rows(query):
        inputs, output = (_fields_of(row[name]) for name in ("inputs", "output"))
        yield TracedRollout(row["step"], row["example"], float(row["score"]), inputs, output)


def _fields_of(text: Any) -> dict[str, Any]:
    """What the journal has encoded of a prediction, or of inputs; see `encoded` in programs/records.py."""
    try:
        fields = _without_marks(json.loads(text)) if isinstance(text, str) else {}
    except ValueError:  # a text by itself, which json_extract gives without quotes
        fields = {"": text}
    return fields if isinstance(fields, dict) else {"": fields}


def _without_marks(value: Any) -> Any:
    """What was encoded, as plain JSON: nothing is imported or made, so that this may be done with any journal."""
    if isinstance(value, list):
        return [_without_marks(part) for part in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        [(kind, kept)] = value.items()
        if kind in ("d", "p") and isinstance(kept, dict):
            return {name: _without_marks(part) for name, part in kept.items()}
        if kind in ("m", "f") and isinstance(kept, list) and kept:
            return kept[-1] if kind == "m" else kept[0]
        if kind in ("t", "x"):
            return _without_marks(kept)
    return value


def _visits(told: list[Told]) -> Iterator[StageVisit]:
    for one in told:
        if one.kind == "StageVisited" and one.step is not None:
            queued, began, shift = (one.fields[name] for name in ("queued_seconds", "began_seconds", "shift"))
            yield StageVisit(one.step, one.fields["stage"], queued + shift, began + shift, one.seconds)


def _under_way(rows: Rows) -> int:
    """Metric calls of the newest session that have no result."""
    newest = "session = (SELECT MAX(id) FROM sessions)"
    [row] = rows(
        f"SELECT (SELECT COALESCE(SUM(calls), 0) FROM calls WHERE {newest} AND stage <> 'elsewhere') "
        f"- (SELECT COUNT(*) FROM rollouts WHERE {newest}) AS n"
    )
    return max(0, row["n"])


class _Clock:
    """Puts the sessions' times one after the other."""

    def __init__(self, sessions: tuple[Session, ...], events: list[tuple[int, float, float]]) -> None:
        self._known: dict[int, tuple[list[float], list[float]]] = {}
        by_session: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for session, at, seconds in events:
            by_session[session].append((at, seconds))
        self._offset: dict[int, float] = {}
        self.end = self.newest = 0.0
        for one in sessions:
            pairs = by_session[one.number] or [(one.began_at, 0.0)]
            ats, seconds = list(accumulate((at for at, _ in pairs), max)), [second for _, second in pairs]
            self._known[one.number] = ats, seconds
            self._offset[one.number], self.newest = self.end - seconds[0], self.end
            self.end += max(seconds) - seconds[0]

    def of_event(self, session: int, seconds: float) -> float:
        """The same since the run began."""
        return seconds + self._offset.get(session, 0.0)

    def of_row(self, session: int, at: float) -> float:
        """What the engine's clock said then, since the run began."""
        ats, seconds = self._known.get(session, ([at], [0.0]))
        place = bisect_right(ats, at)
        if place in (0, len(ats)):  # before the first event, or after the last: the clocks go alike
            edge = min(place, len(ats) - 1)
            return self.of_event(session, max(seconds[0], seconds[edge] + at - ats[edge]))
        before, after = ats[place - 1], ats[place]
        share = (at - before) / (after - before)
        return self.of_event(session, seconds[place - 1] + share * (seconds[place] - seconds[place - 1]))


def _sessions(rows: Rows, run_dir: str | Path) -> tuple[Session, ...]:
    found: list[Session] = []
    query = "SELECT s.*, e.state, e.reason FROM sessions s LEFT JOIN session_ends e ON e.id = s.id ORDER BY s.id"
    table = rows(query)
    for row in table:
        state = row["state"] or ("running" if row is table[-1] and is_at_work(run_dir) else "killed")
        settings, prints = json.loads(row["settings"]), json.loads(row["fingerprints"])
        found.append(Session(row["id"], row["began_at"], state, row["reason"] or "", settings, prints))
    return tuple(found)


def _candidates(
    rows: Rows,
    clock: _Clock,
    events: tuple[Told, ...],
    calls: list[sqlite3.Row],
    directory: Path,
    size: int | None,
) -> tuple[Candidate, ...]:
    texts = {row["hash"]: json.loads(row["texts"]) for row in rows("SELECT hash, texts FROM candidates")}
    told = {one.fields["candidate"]: one for one in events if one.kind == "Committed"}
    ats, made = [row["at"] for row in calls], list(accumulate(row["calls"] for row in calls))
    found: list[Candidate] = []
    for row in rows("SELECT * FROM commits ORDER BY candidate_index"):
        event, before = told.get(row["candidate_index"]), bisect_right(ats, row["at"])
        found.append(
            Candidate(
                row["candidate_index"],
                texts.get(row["candidate"], {}),
                float(row["score"]),
                json.loads(row["scores"]),
                tuple(json.loads(row["parents"])),
                row["step"],
                clock.of_row(row["session"], row["at"]) if event is None else event.seconds,
                made[before - 1] if before else 0,
                None if event is None else event.fields["gap"],
                row["version"],
                None if row["more"] is None else json.loads(row["more"]),
            )
        )
    if not found or found[0].index > 0:  # GEPA's seed is in the pool from the start: no commit tells of it
        found.insert(0, _seed(rows, clock, texts, events, directory / "candidates.json", size))
    return tuple(found)


def _valset_size(sessions: tuple[Session, ...]) -> int | None:
    """How many examples a candidate is validated on; None where the journal does not tell."""
    said = sessions[-1].fingerprints.get("valset", "").partition(" ")[0] if sessions else ""
    return int(said) if said.isdecimal() else None


def _seed(
    rows: Rows,
    clock: _Clock,
    texts: Mapping[str, Any],
    events: tuple[Told, ...],
    stored: Path,
    size: int | None,
) -> Candidate:
    """What was validated before any step; where another program did that, what gepa has stored of it.

    Its score is told at the end of its validation. Before that there is the mean of what is known by then, which is not
    its score: where few examples are known it may be far from it.

    Args:
        size: examples that it is validated on; None where that is not known.
    """
    table = rows(
        "SELECT session, candidate, example, score, at FROM rollouts "
        f"WHERE step = {BEFORE_STEPS} AND split = 'val' ORDER BY id"
    )
    if not table:
        return Candidate(0, json.loads(stored.read_text("utf-8"))[0] if stored.is_file() else {}, None)
    name, last = table[0]["candidate"], table[-1]
    scores = {row["example"]: float(row["score"]) for row in table if row["candidate"] == name}
    told = [one for one in events if one.kind == "SeedValidated"]
    mean = sum(scores.values()) / len(scores) if len(scores) == size else None
    score = told[0].fields["score"] if told else mean
    seconds = told[0].seconds if told else clock.of_row(last["session"], last["at"])
    return Candidate(0, texts.get(name, {}), score, scores, seconds=seconds, calls=len(scores), examples=size)


def _steps(rows: Rows, replies: bool) -> dict[int, StepRecord]:
    said: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
    for row in rows("SELECT step, stage, reply FROM replies ORDER BY id") if replies else ():
        said[row["step"]].append((row["stage"], row["reply"]))
    ended = "SELECT number, selection, way, reason FROM steps LEFT JOIN ends ON step = number ORDER BY number"
    return {
        number: StepRecord(number, json.loads(selection), way or "", reason or "", tuple(said[number]))
        for number, selection, way, reason in rows(ended)
    }


def _changes(rows: Rows) -> tuple[ChangeRecord, ...]:
    """What GEPA's credit assignment has kept; an estimate that an older version has not kept is NaN."""
    kept = rows("SELECT value FROM state WHERE name = 'credit'")
    if not kept:
        return ()
    credit = json.loads(kept[0]["value"])
    effects = credit.get("effects") or [[math.nan, math.nan]] * len(credit["changes"])
    return tuple(
        ChangeRecord(step, one["component"], one["part"], one["replaces"], *effect)
        for step, one, effect in zip(credit["steps"], credit["changes"], effects, strict=True)
    )
