"""The timeline that a result keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from benchmarks.methods import Limits
from benchmarks.timeline import MOST_STEPS, timeline
from dspy_flashevolve.engine.stages import StageVisit


def test_the_first_steps_of_seed_0_up_to_the_limit_in_the_servers_time() -> None:
    records = [
        StageVisit(-1, "validate", 0.0, 0.0, 0.5),
        StageVisit(0, "rollout", 0.0, 0.5, 2.0),
        StageVisit(MOST_STEPS, "rollout", 0.0, 1.0, 2.0),
        StageVisit(1, "propose", 9.0, 10.5, 12.0),
    ]
    stats: Any = SimpleNamespace(stages=records)
    assert timeline(stats, Limits(4, 0, seconds=20.0, time_scale=2.0)) == [[0, "rollout", 1.0, 4.0]]
    assert timeline(stats, Limits(4, 0)) == [[0, "rollout", 0.5, 2.0], [1, "propose", 10.5, 12.0]]
    assert timeline(stats, Limits(4, 1)) == timeline(None, Limits(4, 0)) == []
