"""A run as a table that is drawn again and again, in a terminal or a notebook. Needs the extra ``rich``."""

from __future__ import annotations

import io
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from dspy.utils.callback import BaseCallback
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dspy_flashevolve.observe.notebook import Output, kernel_display
from dspy_flashevolve.observe.progress import Display, since, used_share
from dspy_flashevolve.observe.statistics import RunStats
from dspy_flashevolve.observe.text import duration, left, number, score

COLUMNS = ("stage", "waiting", "in flight", "answered", "tokens", "dollars", "slot seconds")


COLUMNS_OF_A_NOTEBOOK = 100
"""Characters of a line, which fit beside a notebook's margins on most screens."""


class LiveTable(BaseCallback, Display):
    """A callback of dspy's that shows runs in the place of the bar: ``dspy.configure(callbacks=[LiveTable()])``.

    What has been spent and found, and for each stage what waits, runs and was answered. Log lines stand above it. In a
    notebook it is one output, which is drawn again in its place every two seconds or less often, and at the end.

    Args:
        refresh_seconds: between two drawings in a terminal, above 0.
        console: of rich, where it is drawn. Default: the notebook, or rich's own, on standard output.
    """

    def __init__(self, refresh_seconds: float = 0.5, console: Console | None = None) -> None:
        self._refresh_seconds, self._console = refresh_seconds, console

    @contextmanager
    def observing(self, run: Any) -> Generator[None, None, None]:
        """See :class:`~dspy_flashevolve.engine.run.Observer`."""
        before = _used(run, run.statistics())
        display = kernel_display() if self._console is None else None
        if display is not None:
            output = Output(display)
            run.bus.subscribe(lambda _: output.draw(lambda: _as_text(_drawn(run, before))))
            try:
                yield
            finally:
                output.draw(lambda: _as_text(_drawn(run, before)), is_last=True)
            return
        with Live(
            console=self._console,
            get_renderable=lambda: _drawn(run, before),
            refresh_per_second=1 / self._refresh_seconds,
        ) as live:
            yield
        if not live.console.is_terminal and not live.console.is_jupyter:
            live.console.line()  # rich leaves the last line open


def _as_text(drawn: Group) -> str:
    written = io.StringIO()
    Console(file=written, width=COLUMNS_OF_A_NOTEBOOK, force_jupyter=False).print(drawn)
    return written.getvalue()


def _used(run: Any, stats: RunStats) -> float:
    """The share of a run's limits that is used, but for time."""
    return max(stats.metric_calls / stats.max_metric_calls if stats.max_metric_calls else 0.0, used_share(run))


def _drawn(run: Any, before: float) -> Group:
    """A run as it stands, asked from rich's thread; a DspyRun: others have no callbacks of dspy's.

    Args:
        before: the share of its limits that was used when it began.
    """
    stats, recorder = run.statistics(), run.recorder
    seconds, calls = stats.seconds, stats.metric_calls
    budget = "" if stats.max_metric_calls is None else f" of {stats.max_metric_calls:,}"
    time_left = left(seconds, run.max_seconds, since(before, _used(run, stats))) if stats.outcome == "running" else ""
    best = "validating the seed program"
    if recorder.best_score is not None:
        scores = f"best score {score(recorder.best_score)}, seed {score(recorder.seed_score)}"
        best = f"{scores}, {len(stats.commits)} candidates accepted"
    lines = [
        f"{run.name}: {', '.join(filter(None, [stats.outcome, duration(seconds), time_left]))}",
        f"{best}; metric calls {calls:,}{budget}; {stats.steps} steps",
    ]
    table = Table(COLUMNS[0], box=None, pad_edge=False)
    for name in COLUMNS[1:]:
        table.add_column(name, justify="right")
    slots = run.scheduler.statistics()
    for stage, one in slots.stages.items():
        if stage not in stats.requests_by_stage and not one.waiting + one.running:
            continue
        table.add_row(
            stage,
            number(one.waiting),
            number(one.running),
            number(stats.requests_by_stage.get(stage, 0)),
            number(stats.tokens_by_stage.get(stage, 0)),
            number(stats.dollars_by_stage.get(stage, 0.0), 4),
            number(one.served_seconds),
        )
    table.add_row("all", "", f"{slots.busy}/{run.scheduler.limit}", number(sum(stats.requests_by_stage.values())),
                  number(sum(stats.tokens_by_stage.values())), number(stats.cost_dollars, 4),
                  number(slots.busy_seconds), style="bold")  # fmt: skip
    return Group(*(Text(line) for line in lines), table)
