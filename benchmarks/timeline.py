"""What a run did when: rows for a results file from AsyncGEPA's statistics."""

from __future__ import annotations

from typing import Any

from benchmarks.methods import Limits
from dspy_flashevolve import AsyncStats

SAMPLES = 120
"""Of the requests in flight, over the limit of a run; one a second in a run without a time limit."""
MOST_STEPS = 80
"""A timeline has the first ones."""


def timeline(stats: AsyncStats | None, limits: Limits) -> list[list[Any]]:
    """Step, stage, and the seconds of the server's clock when it began and ended there; of seed 0 alone.

    A picture shows the first steps of one run; all of five runs would make the files many times as long.
    The seed's validation is no step.
    """
    if stats is None or limits.seed != 0:
        return []
    scale = limits.time_scale
    return [
        [record.step, record.stage, round(record.began * scale, 2), round(record.ended * scale, 2)]
        for record in stats.stages
        if 0 <= record.step < MOST_STEPS and (limits.seconds is None or record.began * scale <= limits.seconds)
    ]
