"""What a run did when: rows for a results file from AsyncGEPA's statistics."""

from __future__ import annotations

from typing import Any

from benchmarks.methods import Limits
from dspy_flashevolve import AsyncStats

SAMPLES = 120
"""Of the requests in flight, over the limit of a run; one a second in a run without a time limit."""
MOST_TICKETS = 80
"""A timeline has the first ones."""


def timeline(stats: AsyncStats | None, limits: Limits) -> list[list[Any]]:
    """Ticket, stage, and the seconds of the server's clock when it began and ended there; of seed 0 alone.

    A picture shows the first tickets of one run; all of five runs would make the files many times as long.
    """
    if stats is None or limits.seed != 0:
        return []
    scale = limits.time_scale
    return [
        [record.ticket, record.stage, round(record.began * scale, 2), round(record.ended * scale, 2)]
        for record in stats.stages
        if record.ticket < MOST_TICKETS and (limits.seconds is None or record.began * scale <= limits.seconds)
    ]
