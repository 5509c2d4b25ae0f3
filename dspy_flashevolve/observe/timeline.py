"""The timeline of a run as Chrome trace events, which https://ui.perfetto.dev opens.

Each stage is a process with two groups of tracks. Under "slot" are its requests, one slice each. Under "step" is what
each step did there: a slice "waiting" until it had its first slot, if it had to wait, and a slice "step N" until its
last request was answered. Arrows follow each step from stage to stage.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from dspy_flashevolve.engine.errors import RunDirectoryError
from dspy_flashevolve.engine.scheduler import StageVisit
from dspy_flashevolve.observe.history import History, Request

TraceEvent = dict[str, Any]
STEP_TRACKS = 100_000
"""Number of the first track of steps. Tracks of slots count from 1, and no run has as many slots."""
MICROSECONDS = 1e6


def trace_json(history: History) -> str:
    """Write the trace of a run as JSON.

    Raises:
        RunDirectoryError: there is no journal, only another program's checkpoint, which has no times.
    """
    if not history.sessions:
        raise RunDirectoryError(f"{history.directory} has no timeline: no journal tells when anything happened there.")
    names = dict.fromkeys(record.stage for record in (*history.requests, *history.visits))
    events: list[TraceEvent] = []
    for process, stage in enumerate(names, start=1):
        events.append(_name("process", process, 0, stage))
        requests = [request for request in history.requests if request.stage == stage and not request.is_lm_call]
        for lane, request in _lanes(
            [(request.seconds - request.latency_seconds, request.seconds, request) for request in requests]
        ):
            events.append(_request_slice(process, lane, request))
        visits = [visit for visit in history.visits if visit.stage == stage]
        for lane, visit in _lanes([(visit.queued, visit.ended, visit) for visit in visits]):
            events += _visit_slices(process, STEP_TRACKS + lane, visit)
    slices = [event for event in events if event["ph"] == "X"]
    # A run's clock counts from its first event, and the first requests begin before it. Perfetto drops what is below 0.
    earliest = min([0, *(event["ts"] for event in slices)])
    for event in slices:
        event["ts"] -= earliest
    for process, track in sorted({(event["pid"], event["tid"]) for event in slices}):
        name = f"step {track - STEP_TRACKS}" if track > STEP_TRACKS else f"slot {track}"
        events.append(_name("thread", process, track, name))
    return json.dumps({"traceEvents": [*events, *_arrows(events)], "displayTimeUnit": "ms"})


def _lanes(intervals: list[tuple[float, float, Any]]) -> Iterable[tuple[int, Any]]:
    """Put each interval (begin, end, item) into the lowest lane, from 1, in which it overlaps no other."""
    # Perfetto draws overlapping slices of one track as nested in each other, which these are not.
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    lanes = 0
    for begin, end, item in sorted(intervals, key=lambda interval: interval[:2]):
        while busy and busy[0][0] <= begin + 1e-9:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            lanes += 1
            heapq.heappush(free, lanes)
        lane = heapq.heappop(free)
        # At least a microsecond, the unit of a trace: two empty slices at one place would hide each other.
        heapq.heappush(busy, (max(begin, end) + 1e-6, lane))
        yield lane, item


def _request_slice(process: int, track: int, request: Request) -> TraceEvent:
    details = {
        "step": request.step,
        "tokens": request.tokens,
        "cost_dollars": request.cost_dollars,
        "role": request.role,
    }
    details |= {} if request.score is None else {"score": request.score, "example": request.example}
    details |= {"error": request.error} if request.error else {}
    name = "failed" if request.error else "request" if request.score is None else "rollout"
    return _slice(name, process, track, request.seconds - request.latency_seconds, request.seconds, details)


def _visit_slices(process: int, track: int, visit: StageVisit) -> list[TraceEvent]:
    details = {"step": visit.step}
    waiting = _slice("waiting", process, track, visit.queued, visit.began, details)
    at_work = _slice(f"step {visit.step}", process, track, visit.began, visit.ended, details)
    return [waiting, at_work] if waiting["dur"] else [at_work]


def _slice(name: str, process: int, track: int, begin: float, end: float, details: dict[str, Any]) -> TraceEvent:
    start, stop = round(begin * MICROSECONDS), round(end * MICROSECONDS)
    return {"ph": "X", "name": name, "pid": process, "tid": track, "ts": start, "dur": stop - start, "args": details}


def _name(kind: str, process: int, track: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": f"{kind}_name", "pid": process, "tid": track, "args": {"name": name}}


def _arrows(events: list[TraceEvent]) -> list[TraceEvent]:
    by_step: defaultdict[int, list[TraceEvent]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["name"] == f"step {event['args']['step']}":
            by_step[event["args"]["step"]].append(event)
    arrows: list[TraceEvent] = []
    for visits in by_step.values():
        in_order = sorted(visits, key=lambda event: event["ts"])
        for before, after in pairwise(in_order):
            # "bp": "e" binds an arrow to the slice around its end. Without it Perfetto takes the next slice.
            arrow = {"cat": "step", "name": before["name"], "id": len(arrows) + 1, "bp": "e"}
            for phase, end in (("s", before), ("f", after)):
                arrows.append({**arrow, "ph": phase, "pid": end["pid"], "tid": end["tid"], "ts": end["ts"]})
    return arrows
