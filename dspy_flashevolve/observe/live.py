"""A live table of a run, redrawn in its place. Needs the extra ``rich``."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from dspy.utils.callback import BaseCallback
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dspy_flashevolve.observe.formatting import format_duration, format_number, format_score, time_left
from dspy_flashevolve.observe.progress import Display, share_since, used_share
from dspy_flashevolve.observe.statistics import RunStats

HEAD = ("stage", "waiting", "in flight", "answered", "tokens", "dollars", "slot seconds")


class LiveTable(BaseCallback, Display):
    """A callback of dspy's that shows runs in the place of the bar: ``dspy.configure(callbacks=[LiveTable()])``.

    The table shows what has been spent and what the best score is, and for each stage the requests that wait, are in
    flight and were answered. Log lines stand above it. In a notebook rich draws it by ipywidgets.

    Args:
        refresh_seconds: seconds between two drawings in a terminal, above 0.
        console: rich's console to draw on. Default: rich's own, on standard output or in the notebook.
    """

    def __init__(self, refresh_seconds: float = 0.5, console: Console | None = None) -> None:
        self._refresh_seconds, self._console = refresh_seconds, console

    @contextmanager
    def observing(self, run: Any) -> Generator[None, None, None]:
        """Show the run while it goes on; see :class:`~dspy_flashevolve.engine.run.Observer`."""
        used_before = _used(run, run.statistics())
        with Live(
            console=self._console,
            get_renderable=lambda: _draw(run, used_before),
            refresh_per_second=1 / self._refresh_seconds,
        ) as live:
            yield
        if not live.console.is_terminal and not live.console.is_jupyter:
            live.console.line()  # rich leaves the last line open


def _used(run: Any, stats: RunStats) -> float:
    """Return the share of a run's limits, other than that in seconds, that is used."""
    return max(stats.metric_calls / stats.max_metric_calls if stats.max_metric_calls else 0.0, used_share(run))


def _draw(run: Any, used_before: float) -> Group:
    """Draw a run as it stands. Rich's thread calls this; `run` is a DspyRun: others have no callbacks of dspy's.

    Args:
        used_before: the share of its limits that was used when the session began.
    """
    stats, recorder = run.statistics(), run.recorder
    seconds, calls = stats.seconds, stats.metric_calls
    budget = "" if stats.max_metric_calls is None else f" of {stats.max_metric_calls:,}"
    remaining = ""
    if stats.outcome == "running":
        remaining = time_left(seconds, run.max_seconds, share_since(used_before, _used(run, stats)))
    progress = "validating the seed program"
    if recorder.best_score is not None:
        scores = f"best score {format_score(recorder.best_score)}, seed {format_score(recorder.seed_score)}"
        progress = f"{scores}, {len(stats.commits)} candidates accepted"
    lines = [
        f"{run.name}: {', '.join(filter(None, [stats.outcome, format_duration(seconds), remaining]))}",
        f"{progress}; metric calls {calls:,}{budget}; {stats.steps} steps",
    ]
    table = Table(HEAD[0], box=None, pad_edge=False)
    for name in HEAD[1:]:
        table.add_column(name, justify="right")
    slots = run.scheduler.statistics()
    for name, stage in slots.stages.items():
        if name in stats.requests_by_stage or stage.waiting + stage.running:
            table.add_row(
                name,
                format_number(stage.waiting),
                format_number(stage.running),
                format_number(stats.requests_by_stage.get(name, 0)),
                format_number(stats.tokens_by_stage.get(name, 0)),
                format_number(stats.dollars_by_stage.get(name, 0.0), 4),
                format_number(stage.served_seconds),
            )
    table.add_row(
        "all",
        "",
        f"{slots.busy}/{run.scheduler.limit}",
        format_number(sum(stats.requests_by_stage.values())),
        format_number(sum(stats.tokens_by_stage.values())),
        format_number(stats.cost_dollars, 4),
        format_number(slots.busy_seconds),
        style="bold",
    )
    return Group(*(Text(line) for line in lines), table)
