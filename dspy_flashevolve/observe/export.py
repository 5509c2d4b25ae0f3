"""What other programs read of a run: a candidate as the file of `program.load`, and Chrome trace events.

https://ui.perfetto.dev opens these. Each stage is a process with two groups of tracks. Under "slot" are its requests,
one a slice. Under "step" is what each step did there: a slice "waiting" until it had its first slot, if it had to wait,
and a slice "step N" until its last request was answered. Arrows go along each step from stage to stage.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from dspy_flashevolve.engine.errors import ConfigurationError, RunDirectoryError
from dspy_flashevolve.engine.scheduler import StageVisit
from dspy_flashevolve.observe.history import Candidate, History, Request

PREDICTOR = "predictor '"
STEP_TRACKS = 100_000
"""Number of the first track of steps; those of slots are from 1."""
MICROSECONDS = 1e6


def program_state(history: History, candidate: Candidate, base: str | Path | None = None) -> dict[str, Any]:
    """The state of the student with a candidate's texts.

    The journal holds a candidate's texts, and what belongs to a harness. Demos, field descriptions and LMs of
    predictors are the student's: without ``base`` the file has none of them, and the program that loads it keeps its
    own, but for an LM that is set on a predictor.

    Args:
        base: what ``student.save("student.json")`` wrote; default: the smallest state that ``load`` takes.

    Raises:
        ConfigurationError: ``base`` is no such file or of another program, or it is needed.
    """
    if not candidate.texts:
        raise ConfigurationError(f"{history.directory}: the texts of candidate {candidate.index} are not there.")
    if history.optimizer == "AsyncMetaHarness":
        memory = candidate.more["candidate"].get("memory")
        return _complete({"module_src": candidate.texts["source"], "memory": memory, "lm": None})
    state = {} if base is None else _read(Path(base))
    prints = history.sessions[-1].fingerprints if history.sessions else {}
    all_names = {name[len(PREDICTOR) : -1] for name in prints if name.startswith(PREDICTOR)}
    missing = sorted(all_names - candidate.texts.keys() - state.keys())
    unknown = sorted(candidate.texts.keys() - state.keys()) if base is not None else []
    if missing or unknown:
        raise ConfigurationError(
            f"{base or history.directory}: it says nothing of {', '.join(missing or unknown)}. Give what "
            'student.save("student.json") wrote for the program that was optimized, by --program student.json.'
        )
    for name, text in candidate.texts.items():
        part = state.setdefault(name, {"lm": None})
        if not isinstance(part, dict) or not isinstance(part.get("signature", {}), dict):
            raise ConfigurationError(f"{base}: {name} is no predictor's state, expected what student.save wrote.")
        if "module_src" in part or (name not in all_names and all_names):  # a dspy.Flex
            part["module_src"] = text
        else:
            part.setdefault("signature", {"fields": []})["instructions"] = text
    return _complete(state)


def _complete(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "metadata": state.get("metadata", {"dependency_versions": {}})}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigurationError(
            f'{path} cannot be read ({error.strerror}), expected what student.save("student.json") wrote.'
        ) from error
    except ValueError as error:
        raise ConfigurationError(
            f'{path} is no JSON ({error}), expected what student.save("student.json") wrote.'
        ) from error
    if not isinstance(found, dict) or "metadata" not in found:
        raise ConfigurationError(f'{path} holds no program, expected what student.save("student.json") wrote.')
    return found


def trace(history: History) -> str:
    """The trace as JSON.

    Raises:
        RunDirectoryError: there is no journal, only another program's checkpoint, which tells of no time.
    """
    if not history.sessions:
        raise RunDirectoryError(f"{history.directory} has no timeline: no journal tells when anything happened there.")
    names = dict.fromkeys(one.stage for one in (*history.requests, *history.visits))
    stages = {one: number for number, one in enumerate(names, start=1)}
    events: list[dict[str, Any]] = []
    for name, number in stages.items():
        events.append(_named("process", number, 0, name))
        requests = [one for one in history.requests if one.stage == name and not one.is_lm_call]
        for lane, one in _lanes([(one.seconds - one.latency_seconds, one.seconds, one) for one in requests]):
            events.append(_request(number, lane, one))
        visits = [one for one in history.visits if one.stage == name]
        for lane, one in _lanes([(one.queued, one.ended, one) for one in visits]):
            events += _visit(number, STEP_TRACKS + lane, one)
    slices = [one for one in events if one["ph"] == "X"]
    # A run's clock counts from its first event, and the first requests begin before it. Perfetto drops what is below 0.
    earliest = min([0, *(one["ts"] for one in slices)])
    for one in slices:
        one["ts"] -= earliest
    tracks = {(one["pid"], one["tid"]) for one in slices}
    for process, track in sorted(tracks):
        kind = f"step {track - STEP_TRACKS}" if track > STEP_TRACKS else f"slot {track}"
        events.append(_named("thread", process, track, kind))
    return json.dumps({"traceEvents": [*events, *_arrows(events)], "displayTimeUnit": "ms"})


def _lanes(intervals: list[tuple[float, float, Any]]) -> Iterable[tuple[int, Any]]:
    """Each interval (begin, end, what) with the lowest number of a lane, from 1, where none overlaps it."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    last = 0
    for begin, end, what in sorted(intervals, key=lambda one: (one[0], one[1])):
        while busy and busy[0][0] <= begin + 1e-9:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            last += 1
            heapq.heappush(free, last)
        lane = heapq.heappop(free)
        heapq.heappush(busy, (max(begin, end) + 1e-6, lane))
        yield lane, what


def _request(process: int, track: int, one: Request) -> dict[str, Any]:
    said = {"step": one.step, "tokens": one.tokens, "cost_dollars": one.cost_dollars, "role": one.role}
    said |= {} if one.score is None else {"score": one.score, "example": one.example}
    said |= {"error": one.error} if one.error else {}
    name = "failed" if one.error else "request" if one.score is None else "rollout"
    return _slice(name, process, track, one.seconds - one.latency_seconds, one.seconds, said)


def _visit(process: int, track: int, one: StageVisit) -> list[dict[str, Any]]:
    said = {"step": one.step}
    waiting = _slice("waiting", process, track, one.queued, one.began, said)
    at_work = _slice(f"step {one.step}", process, track, one.began, one.ended, said)
    return [waiting, at_work] if waiting["dur"] else [at_work]


def _slice(name: str, process: int, track: int, begin: float, end: float, said: dict[str, Any]) -> dict[str, Any]:
    begin, end = round(begin * MICROSECONDS), round(end * MICROSECONDS)
    return {"ph": "X", "name": name, "pid": process, "tid": track, "ts": begin, "dur": end - begin, "args": said}


def _named(what: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": process, "tid": track, "args": {"name": name}}


def _arrows(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_step: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for one in events:
        if one["ph"] == "X" and one["name"] == f"step {one['args']['step']}":
            by_step[one["args"]["step"]].append(one)
    found: list[dict[str, Any]] = []
    for visits in by_step.values():
        in_order = sorted(visits, key=lambda one: one["ts"])
        for before, after in pairwise(in_order):
            both = {"cat": "step", "name": before["name"], "id": len(found) + 1}
            for kind, one in (("s", before), ("f", after)):
                found.append({**both, "ph": kind, "bp": "e", "pid": one["pid"], "tid": one["tid"], "ts": one["ts"]})
    return found
