"""A run as one HTML file that needs nothing else: no network, no script."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dspy_flashevolve.observe.figures import course, family, figures, prompts_diff, use_of_slots
from dspy_flashevolve.observe.history import Candidate, History
from dspy_flashevolve.observe.origins import origins
from dspy_flashevolve.observe.text import duration, number, score

WIDTH, HEIGHT = 420, 240
LEFT, RIGHT, TOP, BOTTOM = 48, 22, 10, 36
COLOURS = 8
MOST_POINTS = 600
"""Of one plot; of more the plot shows some, evenly."""
BINS = 120
MOST_DIFFS = 1_500_000
"""Characters of diffs in the family tree; those of later candidates are left to `flashevolve diff`."""
MOST_ROWS = 100
"""Of one kind of failure, and of integrations: the newest."""
CLIPPED = 500
"""Characters of a feedback, an error or a reason that are shown."""


def report(history: History) -> str:
    """The page; `history` has to have its replies.

    >>> "<title>dspy.GEPA" in report(History(directory="runs/1", optimizer="dspy.GEPA"))
    True
    """
    environment = Environment(
        loader=PackageLoader("dspy_flashevolve.observe", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": duration, "number": number, "score": score, "clipped": _clipped}
    found, best = figures(history), history.best
    lines = [] if best is None else origins(history, best)
    return environment.get_template("report.html").render(
        run=history,
        figures=found,
        began=datetime.fromtimestamp(history.sessions[0].began_at, timezone.utc) if history.sessions else None,
        best=best,
        components={name: list(its) for name, its in groupby(lines, key=lambda one: one.component)},
        steps=dict(sorted({one.step: one for one in lines if one.step is not None}.items())),
        score_plots=_score_plots(history, found.cost_dollars),
        slots=_slot_plots(history),
        colours=COLOURS,
        family=_family(history),
        failures=_failures(history),
        integrations=_integrations(history),
        settings=json.dumps(dict(history.sessions[-1].settings), indent=2) if history.sessions else "",
    )


def _clipped(text: str) -> str:
    return text if len(text) <= CLIPPED else f"{text[:CLIPPED]} …"


def _score_plots(history: History, dollars: float | None) -> list[Markup]:
    points = course(history)
    against = (
        ("seconds", history.seconds, [one.seconds for one in points]),
        ("metric calls", float(history.calls), [float(one.calls) for one in points]),
        ("dollars", dollars or 0.0, [one.cost_dollars for one in points]),
    )
    found: list[Markup] = []
    for name, right, xs in against:
        if right and points:
            marked = [
                (x, one.score, one.best, f"candidate {one.index}: {score(one.score)}")
                for x, one in zip(xs, points, strict=True)
            ]
            found.append(Markup(score_plot(marked, right, name)))
    return found


def _slot_plots(history: History) -> dict[str, Any]:
    end = history.seconds
    stages = list(dict.fromkeys(one.stage for one in [*history.requests, *history.visits]))
    busy = [(one.stage, one.seconds - one.latency_seconds, one.seconds) for one in history.requests]
    waiting = [(one.stage, one.queued, one.began) for one in history.visits]
    kinds = (("slots busy", busy), ("steps that wait for their first slot in a stage", waiting))
    drawn: list[tuple[str, Markup]] = []
    for name, intervals in kinds:
        used = use_of_slots(intervals, end, BINS)
        series = {stage: used.get(stage, [0.0] * BINS) for stage in stages}
        drawn.append((name, Markup(area_plot(series, end, "seconds", f"{name}, by stage"))))
    return {"stages": stages, "plots": drawn if end else []}


def _family(history: History) -> list[tuple[int, Candidate, list[str] | None]]:
    """Depth, candidate, what it changed in its first parent; None where that is left out."""
    found: list[tuple[int, Candidate, list[str] | None]] = []
    room = MOST_DIFFS
    for depth, one, parent in family(history):
        changed = [] if parent is None else prompts_diff(parent, one)
        room -= sum(map(len, changed))
        found.append((depth, one, changed if room > 0 else None))
    return found


def _failures(history: History) -> dict[str, list[str]]:
    """Kind -> the newest of it, in words."""
    found: dict[str, list[str]] = {}
    errors = Counter((one.stage, _clipped(one.error)) for one in history.requests if one.error)
    if errors:
        found["Requests whose answer was of no use"] = [
            f"{count} times in {stage}: {error}" for (stage, error), count in errors.most_common(MOST_ROWS)
        ]
    turned_away = [
        (one.fields["endpoint"], _clipped(one.fields["reason"])) for one in history.of_kind("RequestTurnedAway")
    ]
    if turned_away:
        found[f"Requests that got no answer, and were made again ({len(turned_away):,})"] = [
            f"{count} times by {name}: {reason}"
            for (name, reason), count in Counter(turned_away).most_common(MOST_ROWS)
        ]
    names = {
        "RolloutTimedOut": "Rollouts that took too long, and were run again",
        "ExampleGivenUp": "Examples without an answer",
        "EndpointPaused": "Pauses of an endpoint that refused most of what it was sent",
        "LimitChanged": "Changes of a limit on requests in flight",
    }
    for kind, name in names.items():
        events = history.of_kind(kind)
        if events:
            found[f"{name} ({len(events)})"] = [
                f"after {duration(one.seconds)}: "
                + ", ".join(f"{key} {_clipped(str(value))}" for key, value in one.fields.items() if key != "shift")
                for one in events[-MOST_ROWS:]
            ]
    return found


def _integrations(history: History) -> list[tuple[int, str, str]]:
    """Step, verdict, reason."""
    found = [tuple(verdict) for event in history.of_kind("Integrated") for verdict in event.fields["verdicts"]]
    return [(step, verdict, _clipped(reason)) for step, verdict, reason in dict.fromkeys(found)][-MOST_ROWS:]


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two others.

    >>> ticks(0, 217)
    [0.0, 50.0, 100.0, 150.0, 200.0]
    """
    span = (high - low) or 1.0
    size = 10.0 ** math.floor(math.log10(span / most))
    size *= next(one for one in (1, 2, 5, 10) if span / (size * one) <= most)
    first = math.ceil(low / size - 1e-9)
    return [round(number * size, 12) for number in range(first, first + most + 1) if number * size <= high + size / 1e6]


class _Axes:
    """Where values are on the picture."""

    def __init__(self, right: float, low: float, high: float) -> None:
        self._right, self._low, self._high = right or 1.0, low, high if high > low else low + 1.0

    def x(self, value: float) -> float:
        return round(LEFT + value / self._right * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def svg(self, body: list[str], x_name: str, says: str) -> str:
        lines: list[str] = []
        for value in ticks(self._low, self._high):
            lines.append(f'<path class="grid" d="M{LEFT} {self.y(value)}H{WIDTH - RIGHT}"/>')
            lines.append(f'<text x="{LEFT - 6}" y="{self.y(value) + 4}" text-anchor="end">{value:g}</text>')
        for value in ticks(0, self._right):
            text = f"{value:,.0f}" if value >= 1000 else f"{value:g}"
            lines.append(f'<text x="{self.x(value)}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{text}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        lines.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_name)}</text>')
        head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(says)}">'
        return "".join([head, *lines, *body, "</svg>"])


def score_plot(points: Sequence[tuple[float, float, float, str]], right: float, x_name: str) -> str:
    """Scores, and the best so far as a line.

    Args:
        points: x, score, best score so far, what the point is.
        right: end of the x axis.
    """
    if not points:
        return ""
    values = [score for _, score, _, _ in points]
    margin = 0.05 * ((max(values) - min(values)) or 1.0)
    axes = _Axes(right, min(values) - margin, max(values) + margin)
    line = f"M{axes.x(points[0][0])} {axes.y(points[0][2])}"
    best = points[0][2]
    for x, _, reached, _ in points[1:]:
        if reached > best:
            line, best = f"{line}H{axes.x(x)}V{axes.y(reached)}", reached
    line += f"H{axes.x(right)}"
    shown = points[:: math.ceil(len(points) / MOST_POINTS)]
    dots = [
        f'<circle class="dot" cx="{axes.x(x)}" cy="{axes.y(score)}" r="3"><title>{escape(name)}</title></circle>'
        for x, score, _, name in shown
    ]
    says = f"score against {x_name}: from {points[0][1]:.4f} to {best:.4f}"
    return axes.svg([f'<path class="best" d="{line}"/>', *dots], x_name, says)


def area_plot(series: Mapping[str, Sequence[float]], right: float, x_name: str, says: str) -> str:
    """Series on top of each other, over equal parts of the x axis; the one of number n has the class ``c`` n."""
    if not series:
        return ""
    bins = len(next(iter(series.values())))
    below = [0.0] * bins
    axes = _Axes(right, 0.0, max(map(sum, zip(*series.values(), strict=True))))
    xs = [axes.x(place * right / bins) for place in range(bins + 1)]
    body: list[str] = []
    for colour, (name, values) in enumerate(series.items()):
        above = [low + value for low, value in zip(below, values, strict=True)]
        top = "".join(f"V{axes.y(value)}H{xs[place + 1]}" for place, value in enumerate(above))
        back = "".join(f"V{axes.y(below[place])}H{xs[place]}" for place in reversed(range(bins)))
        path = f'd="M{xs[0]} {axes.y(below[0])}{top}{back}Z"'
        body.append(f'<path class="c{colour % COLOURS}" {path}><title>{escape(name)}</title></path>')
        below = above
    return axes.svg(body, x_name, says)
