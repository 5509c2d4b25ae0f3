"""One line at the end of a run."""

from __future__ import annotations

import logging

from dspy_flashevolve.observe.records import RunStats

WORDS = {
    "finished": "finished",
    "stopped": "was stopped",
    "failed": "gave up, and returns the best program so far",
    "aborted": "was aborted",
}


def log_summary(
    logger: logging.Logger,
    stats: RunStats,
    best_score: float | None,
    error: bool = False,
    *,
    name: str = "AsyncGEPA",
    made: str = "",
) -> None:
    """Say how a run ended, what it has found and what it has spent.

    INFO where it came to its end, WARNING where it was cancelled, ERROR where it failed or an error ended it.

    Args:
        best_score: the pool's best; None where the seed was not validated.
        error: what aborted the run was an error.
        name: of the optimizer.
        made: what it has made, such as "12 proposals"; default its tickets.
    """
    level = logging.ERROR if stats.failed or error else logging.INFO
    level = logging.WARNING if stats.outcome == "aborted" and not error else level
    logger.log(
        level,
        "%s %s: %s, %d accepted, best score %s, %d of %s metric calls, %.1f s; %s.",
        name,
        WORDS[stats.outcome],
        made or f"{stats.tickets} steps",
        stats.ended["committed"],
        "unknown" if best_score is None else f"{best_score:.4g}",
        stats.metric_calls,
        "unlimited" if stats.max_metric_calls is None else stats.max_metric_calls,
        stats.seconds,
        stats.stop_reason.rstrip("."),
    )
