"""A run as one HTML page that needs nothing else: no network, no script."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dspy_flashevolve.engine.events import LmCallCounted
from dspy_flashevolve.observe.analysis import (
    example_scores,
    family_tree,
    lines_of,
    open_intervals,
    score_course,
    totals_of,
)
from dspy_flashevolve.observe.formatting import (
    candidates_diff,
    format_duration,
    format_number,
    format_score,
    format_standing,
)
from dspy_flashevolve.observe.history import Candidate, History

# A page of a long run has to open in a browser within a second or two. The limits below keep it under some megabytes.
MOST_CANDIDATES, MOST_EXAMPLES = 40, 100
"""Rows and columns of the table of scores by example: a screen of each, and a quarter of a megabyte at most."""
BINS = 120
"""Bins of a plot of slots: each is about three pixels wide."""
MOST_DIFFS = 1_500_000
"""Characters of diffs in the family tree. Those of later candidates are left to `flashevolve diff`."""
MOST_ROWS = 100
"""Failures of one kind, and integrations, that are listed: the newest."""
CLIPPED = 500
"""Characters of a feedback, an error or a reason."""
FAILURE_TITLES = {
    "ActorLost": "Processes that ran rollouts and were lost; their rollouts were run again",
    "RolloutTimedOut": "Rollouts that took too long, and were run again",
    "ExampleGivenUp": "Examples without an answer",
    "EndpointPaused": "Pauses of an endpoint that refused most of what it was sent",
    "LimitChanged": "Changes of a limit on requests in flight",
}
"""Kind of event -> title under which the page lists it."""
# In pixels of the drawing; a page scales it. The left margin holds the numbers of an axis and its name, the bottom one
# a row of numbers and one of text.
WIDTH, HEIGHT = 420, 240
LEFT, RIGHT, TOP, BOTTOM = 48, 22, 10, 36
COLOURS = 8
"""Colours that the page's style sheet defines. A ninth series has the first one again."""
MOST_POINTS = 600
"""Dots of one plot, more than can be told apart; of more the plot shows some, evenly."""


def report(history: History) -> str:
    """Write the page of a run, whose history was read with ``replies=True``.

    >>> "<title>dspy.GEPA" in report(History(directory="runs/1", optimizer="dspy.GEPA"))
    True
    """
    environment = Environment(
        loader=PackageLoader("dspy_flashevolve.observe", "."),
        autoescape=True,  # prompts and replies may hold any markup
        undefined=StrictUndefined,  # a misspelt name in the template is an error, not an empty place
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "standing": format_standing,
        "duration": format_duration,
        "number": format_number,
        "score": format_score,
        "clipped": _clipped,
    }
    totals, best = totals_of(history), history.best
    lines = [] if best is None else lines_of(history, best)
    return environment.get_template("report.html").render(
        run=history,
        totals=totals,
        began=datetime.fromtimestamp(history.sessions[0].began_at, timezone.utc) if history.sessions else None,
        best=best,
        components={name: list(of_component) for name, of_component in groupby(lines, key=lambda line: line.component)},
        steps=dict(sorted({line.step: line for line in lines if line.step is not None}.items())),
        by_example=example_scores(history, MOST_CANDIDATES, MOST_EXAMPLES),
        score_plots=list(_score_plots(history, totals.cost_dollars)),
        slots=_slot_plots(history),
        colours=COLOURS,
        family=list(_family(history)),
        failures=_failures(history),
        integrations=_integrations(history),
        settings=json.dumps(dict(history.sessions[-1].settings), indent=2) if history.sessions else "",
    )


def _clipped(text: str) -> str:
    return text if len(text) <= CLIPPED else f"{text[:CLIPPED]} …"


def _score_plots(history: History, dollars: float | None) -> Iterator[Markup]:
    """Plot the course of the score against time, metric calls and dollars, as far as these are known."""
    points = score_course(history)
    axes = (
        ("seconds", history.seconds, [point.seconds for point in points]),
        ("metric calls", float(history.calls), [float(point.calls) for point in points]),
        ("dollars", dollars or 0.0, [point.cost_dollars for point in points]),
    )
    for name, right, xs in axes:
        if right and points:
            dots = [
                (x, point.score, point.best, f"candidate {point.index}: {format_score(point.score)}")
                for x, point in zip(xs, points, strict=True)
            ]
            yield Markup(score_plot(dots, right, name))


def _slot_plots(history: History) -> dict[str, Any]:
    """Plot slots in use, and steps that wait for one, by stage over time."""
    end = history.seconds
    stages = list(dict.fromkeys(record.stage for record in [*history.requests, *history.visits]))
    busy = [
        (request.stage, request.seconds - request.latency_seconds, request.seconds)
        for request in history.requests
        if not isinstance(request, LmCallCounted)
    ]
    waiting = [(visit.stage, visit.queued_seconds, visit.began_seconds) for visit in history.visits]
    kinds = (("slots busy", "slots", busy), ("steps that wait for their first slot in a stage", "steps", waiting))
    plots: list[tuple[str, Markup]] = []
    for name, unit, intervals in kinds:
        averages = open_intervals(intervals, end, BINS)
        series = {stage: averages.get(stage, [0.0] * BINS) for stage in stages}
        plots.append((name, Markup(area_plot(series, end, "seconds", f"{name}, by stage", unit))))
    return {"stages": stages, "plots": plots if end else []}


def _family(history: History) -> Iterator[tuple[int, Candidate, list[str] | None]]:
    """Yield depth, candidate, and its diff to its first parent; None for the diff where the page has no room for it."""
    room = MOST_DIFFS
    for depth, candidate, parent in family_tree(history):
        changed = [] if parent is None or room <= 0 else candidates_diff(parent, candidate)
        room -= sum(map(len, changed))
        yield depth, candidate, changed if room > 0 else None


def _failures(history: History) -> dict[str, list[str]]:
    """Return title -> lines, for each kind of failure; the newest failures of each."""
    counted = {
        "Requests whose answer was of no use": [
            f"in {request.stage}: {_clipped(request.error)}" for request in history.failed_requests
        ],
        "Requests that got no answer, and were made again": [
            f"by {event.endpoint}: {_clipped(event.reason)}" for event in history.of_kind("RequestTurnedAway")
        ],
        "Steps that failed": [
            f"since: {_clipped(step.reason)}" for step in history.steps.values() if step.way == "failed"
        ],
    }
    failures = {
        f"{title} ({len(lines):,})": [f"{count} times {line}" for line, count in Counter(lines).most_common(MOST_ROWS)]
        for title, lines in counted.items()
        if lines
    }
    for kind, title in FAILURE_TITLES.items():
        if events := history.of_kind(kind):
            failures[f"{title} ({len(events)})"] = [
                f"after {format_duration(event.seconds)}: "
                + ", ".join(f"{name} {_clipped(str(value))}" for name, value in event.fields.items())
                for event in events[-MOST_ROWS:]
            ]
    return failures


def _integrations(history: History) -> list[tuple[int, str, str]]:
    """Return step, verdict and reason of the newest verdicts."""
    verdicts = [tuple(verdict) for event in history.of_kind("Integrated") for verdict in event.verdicts]
    # A run that was killed and goes on writes some of them again.
    return [(step, verdict, _clipped(reason)) for step, verdict, reason in dict.fromkeys(verdicts)][-MOST_ROWS:]


# Plots, as SVG: the page has no scripts


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Choose round numbers between two others for the ticks of an axis: 0, 50, 100, 150, 200 from 0 to 217."""
    span = (high - low) or 1.0
    size = 10.0 ** math.floor(math.log10(span / most))
    size *= next(factor for factor in (1, 2, 5, 10) if span / (size * factor) <= most)
    first = math.ceil(low / size - 1e-9)  # a multiple stays one, whatever the division's rounding
    return [round(number * size, 12) for number in range(first, first + most + 1) if number * size <= high + size / 1e6]


class _Axes:
    """The axes of a plot: from values to pixels, and the grid. The x axis goes from 0 to `right`."""

    def __init__(self, right: float, low: float, high: float) -> None:
        self._right, self._low, self._high = right or 1.0, low, high if high > low else low + 1.0

    def x(self, value: float) -> float:
        return round(LEFT + value / self._right * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def svg(self, body: list[str], x_name: str, label: str, y_name: str) -> str:
        lines: list[str] = []
        for value in ticks(self._low, self._high):
            lines.append(f'<path class="grid" d="M{LEFT} {self.y(value)}H{WIDTH - RIGHT}"/>')
            lines.append(f'<text x="{LEFT - 6}" y="{self.y(value) + 4}" text-anchor="end">{value:g}</text>')
        for value in ticks(0, self._right):
            text = f"{value:,.0f}" if value >= 1000 else f"{value:g}"
            lines.append(f'<text x="{self.x(value)}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{text}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        lines.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_name)}</text>')
        up = (TOP + HEIGHT - BOTTOM) / 2
        lines.append(
            f'<text x="11" y="{up}" text-anchor="middle" transform="rotate(-90 11 {up})">{escape(y_name)}</text>'
        )
        head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        return "".join([head, *lines, *body, "</svg>"])


def score_plot(points: Sequence[tuple[float, float, float, str]], right: float, x_name: str) -> str:
    """Plot scores as dots, and the best so far as a line; a point is x, score, best score so far, and a tooltip."""
    values = [score for _, score, _, _ in points]
    margin = 0.05 * ((max(values) - min(values)) or 1.0)
    axes = _Axes(right, min(values) - margin, max(values) + margin)
    line = f"M{axes.x(points[0][0])} {axes.y(points[0][2])}"
    best = points[0][2]
    for x, _, reached, _ in points[1:]:  # a corner only where the best rises, so that the path stays short
        if reached > best:
            line, best = f"{line}H{axes.x(x)}V{axes.y(reached)}", reached
    line += f"H{axes.x(right)}"
    shown = points[:: math.ceil(len(points) / MOST_POINTS)]
    dots = [
        f'<circle class="dot" cx="{axes.x(x)}" cy="{axes.y(score)}" r="3"><title>{escape(name)}</title></circle>'
        for x, score, _, name in shown
    ]
    label = f"score against {x_name}: from {points[0][1]:.4f} to {best:.4f}"
    return axes.svg([f'<path class="best" d="{line}"/>', *dots], x_name, label, "score")


def area_plot(series: Mapping[str, Sequence[float]], right: float, x_name: str, label: str, y_name: str) -> str:
    """Plot series stacked on each other, over equal bins of the x axis; series number n has the CSS class ``c`` n."""
    if not series:
        return ""
    bins = len(next(iter(series.values())))
    below = [0.0] * bins
    axes = _Axes(right, 0.0, max(map(sum, zip(*series.values(), strict=True))))
    xs = [axes.x(number * right / bins) for number in range(bins + 1)]
    body: list[str] = []
    for colour, (name, values) in enumerate(series.items()):
        above = [low + value for low, value in zip(below, values, strict=True)]
        top = "".join(f"V{axes.y(value)}H{xs[number + 1]}" for number, value in enumerate(above))
        back = "".join(f"V{axes.y(below[number])}H{xs[number]}" for number in reversed(range(bins)))
        path = f'd="M{xs[0]} {axes.y(below[0])}{top}{back}Z"'
        tooltip = escape(f"{name}: {max(values):.3g} at most, {sum(values) / len(values):.3g} on average")
        body.append(f'<path class="c{colour % COLOURS}" {path}><title>{tooltip}</title></path>')
        below = above
    return axes.svg(body, x_name, label, y_name)
