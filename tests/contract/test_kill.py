"""kill -9 in the middle of a run, and the run goes on: a real process, really killed, at moments drawn by a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.child import KINDS, VAL
from tests.contract.surface import problems
from tests.killing import finished, killed_after

SPAN_SECONDS = 0.35
"""Longest time from the first metric call of a process to its end."""
LOST_A_KILL = 8
"""Slots: metric calls that were under way when a process was killed."""


ONE_STEP = 2 * 3 + len(VAL)
"""Metric calls by which lockstep may overshoot, as dspy.GEPA does: it asks its stoppers between steps."""


class Victim:
    """A run in processes of its own."""

    def __init__(self, directory: Path, kind: str, calls: int) -> None:
        self.directory = directory
        self.run = directory / "run"
        self._module = "tests.contract.child", directory, kind, calls

    def calls_made(self) -> int:
        """What the metric itself has counted, over all processes."""
        path = self.directory / "calls.txt"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def killed_after(self, seconds: float) -> bool:
        return killed_after(seconds, self.calls_made, *self._module)

    def finished(self) -> dict[str, Any]:
        return finished(*self._module)

    def candidates(self) -> list[dict[str, str]]:
        path = self.run / "candidates.json"
        return json.loads(path.read_text()) if path.exists() else []


def survives(directory: Path, kind: str, calls: int, kills: int, seed: int) -> Iterator[str]:
    """Kill and go on; yields what is wrong."""
    victim, rng = Victim(directory, kind, calls), random.Random(seed)
    pool: list[dict[str, str]] = []
    done = 0
    for _ in range(kills):
        if not victim.killed_after(rng.random() * SPAN_SECONDS):
            break
        done += 1
        if victim.candidates()[: len(pool)] != pool:
            yield f"kill {done} lost a committed candidate"
        pool = victim.candidates()
        yield from (f"kill {done}: {problem}" for problem in problems(victim.run))
    result = victim.finished()
    if victim.candidates()[: len(pool)] != pool:
        yield "the end lost a committed candidate"
    yield from problems(victim.run)
    spent = result["calls"]
    allowed = calls + (ONE_STEP if kind == "lockstep" else 0)
    if not victim.calls_made() <= spent <= allowed:
        yield f"{victim.calls_made()} calls were made, {spent} are known, {allowed} were allowed"
    if spent - victim.calls_made() > done * LOST_A_KILL:
        yield f"{done} kills lost {spent - victim.calls_made()} calls of the budget"
    if done < max(1, min(kills, 3) - 1):
        yield f"the run was killed {done} times only: the test says nothing"


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("edits", 1),
        *(pytest.param(kind, 2, marks=pytest.mark.long) for kind in ("edits", "pareto reflective", "lockstep")),
    ],
)
def test_a_killed_run_goes_on_and_loses_no_commit_and_pays_nothing_twice(tmp_path: Path, kind: str, kills: int) -> None:
    assert list(survives(tmp_path, kind, calls=200, kills=kills, seed=1)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_thirty_kills_lose_no_commit_and_pay_nothing_twice(tmp_path: Path, kind: str) -> None:
    assert list(survives(tmp_path, kind, calls=900, kills=30, seed=30)) == []
