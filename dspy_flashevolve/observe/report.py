"""A run as one HTML file that needs nothing else: no network, no script."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dspy_flashevolve.observe.figures import (
    by_endpoint,
    course,
    example_scores,
    family,
    figures,
    prompts_diff,
    use_of_slots,
)
from dspy_flashevolve.observe.history import Candidate, History, TracedRollout
from dspy_flashevolve.observe.origins import gone, origins
from dspy_flashevolve.observe.text import duration, number, score, standing

WIDTH, HEIGHT = 420, 240
LEFT, RIGHT, TOP, BOTTOM = 48, 22, 10, 36
COLOURS = 8
MOST_SCORED, MOST_EXAMPLES = 40, 100
"""Rows and columns of the table of scores by example: a screen of each, and a quarter of a megabyte at most."""
TREE_WIDTH, TREE_HEIGHT = 860, 320
MOST_VALUE = 300
"""Characters of an example's field."""
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
    environment.filters |= {
        "standing": standing,
        "duration": duration,
        "number": number,
        "score": score,
        "clipped": _clipped,
    }
    found, best = figures(history), history.best
    lines = [] if best is None else origins(history, best)
    return environment.get_template("report.html").render(
        run=history,
        figures=found,
        began=datetime.fromtimestamp(history.sessions[0].began_at, timezone.utc) if history.sessions else None,
        best=best,
        components={name: list(its) for name, its in groupby(lines, key=lambda one: one.component)},
        steps=dict(sorted({one.step: one for one in lines if one.step is not None}.items())),
        gone=[] if best is None else gone(history, best),
        examples=_Examples(history),
        by_example=example_scores(history, MOST_SCORED, MOST_EXAMPLES),
        tree_plot=Markup(tree_plot(history)),
        endpoints=by_endpoint(history),
        score_plots=_score_plots(history, found.cost_dollars),
        slots=_slot_plots(history),
        colours=COLOURS,
        family=_family(history),
        failures=_failures(history),
        integrations=_integrations(history),
        settings=json.dumps(dict(history.sessions[-1].settings), indent=2) if history.sessions else "",
    )


class _Examples:
    """What examples are, for the template: their inputs, and what came out in a step."""

    def __init__(self, history: History) -> None:
        self._inputs: dict[str, str] = {}
        self._of_step: defaultdict[tuple[int, str], list[TracedRollout]] = defaultdict(list)
        for rollout in history.traced:
            if rollout.inputs:
                self._inputs.setdefault(rollout.example, _values(rollout.inputs))
            self._of_step[rollout.step, rollout.example].append(rollout)

    def name(self, example: str) -> str:
        """Its inputs; its number where no trace was kept."""
        return self._inputs.get(example, f"example {example}")

    def outputs(self, step: int, example: str) -> list[tuple[str, str]]:
        """Output and score, in order: the parent's, then the child's."""
        return [(_values(rollout.output), f"{rollout.score:.2f}") for rollout in self._of_step[step, example]]


def _values(fields: Mapping[str, Any]) -> str:
    """Fields as text for people: the only one by itself, several with their names."""
    shown = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in fields.items()
    }
    cut = {name: value if len(value) <= MOST_VALUE else f"{value[:MOST_VALUE]} …" for name, value in shown.items()}
    return next(iter(cut.values())) if len(cut) == 1 else "; ".join(f"{name}: {value}" for name, value in cut.items())


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
        y_name = "slots" if intervals is busy else "steps"
        drawn.append((name, Markup(area_plot(series, end, "seconds", f"{name}, by stage", y_name))))
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
    failed = Counter(_clipped(step.reason) for step in history.steps.values() if step.way == "failed")
    if failed:
        found[f"Steps that failed ({failed.total():,})"] = [
            f"{count} times: {reason}" for reason, count in failed.most_common(MOST_ROWS)
        ]
    names = {
        "ActorLost": "Processes that ran rollouts and were lost; their rollouts were run again",
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

    def svg(self, body: list[str], x_name: str, says: str, y_name: str) -> str:
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
    return axes.svg([f'<path class="best" d="{line}"/>', *dots], x_name, says, "score")


def area_plot(series: Mapping[str, Sequence[float]], right: float, x_name: str, says: str, y_name: str) -> str:
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
        body.append(f'<path class="c{colour % COLOURS}" {path}><title>{_peak(name, values)}</title></path>')
        below = above
    return axes.svg(body, x_name, says, y_name)


def _peak(name: str, values: Sequence[float]) -> str:
    return escape(f"{name}: {max(values):.3g} at most, {sum(values) / len(values):.3g} on average")


def tree_plot(history: History) -> str:
    """Candidates by number and score, each joined to its parents; the way to the best is drawn thick."""
    known = {one.index: (one, one.score) for one in history.candidates if one.score is not None}
    if len(known) < 2 or history.best is None:
        return ""
    scores = [value for _, value in known.values()]
    last, low, high = max(known), min(scores), max(scores)
    width, height = TREE_WIDTH - LEFT - RIGHT, TREE_HEIGHT - 3 * TOP - BOTTOM

    def place(index: int) -> tuple[float, float]:
        share = (known[index][1] - low) / (high - low) if high > low else 0.5
        return round(LEFT + index / (last or 1) * width, 1), round(TREE_HEIGHT - BOTTOM - TOP - share * height, 1)

    way, ahead = set[int](), [history.best.index]
    while ahead:
        index = ahead.pop()
        if index in known and index not in way:
            way.add(index)
            ahead += [parent for parent in known[index][0].parents if parent is not None]
    edges: list[str] = []
    nodes: list[str] = []
    for index, (one, value) in known.items():
        x, y = place(index)
        parents = [parent for parent in one.parents if parent in known and parent != index]
        for parent in parents:
            from_x, from_y = place(parent)
            kind = "way" if {index, parent} <= way else "edge"
            middle = round((from_x + x) / 2, 1)
            edges.append(f'<path class="{kind}" d="M{from_x} {from_y}C{middle} {from_y} {middle} {y} {x} {y}"/>')
        name = f"candidate {index}: {score(value)}"
        name += f", from {', '.join(map(str, parents))}" if parents else ", the seed" if index == 0 else ""
        name += "" if one.step is None or one.step < 0 else f", step {one.step}"
        kind = "dot on-way" if index in way else "dot"
        nodes.append(f'<circle class="{kind}" cx="{x}" cy="{y}" r="4.5"><title>{escape(name)}</title></circle>')
        if len(known) <= MOST_SCORED or index in way:
            nodes.append(f'<text x="{x}" y="{y - 8}" text-anchor="middle">{index}</text>')
    lines: list[str] = []
    for value in ticks(low, high):
        share = (value - low) / (high - low) if high > low else 0.5
        y = round(TREE_HEIGHT - BOTTOM - TOP - share * height, 1)
        lines.append(f'<path class="grid" d="M{LEFT} {y}H{TREE_WIDTH - RIGHT}"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:g}</text>')
    up, middle = TREE_HEIGHT / 2 - TOP, LEFT + width / 2
    lines.append(f'<text x="11" y="{up}" text-anchor="middle" transform="rotate(-90 11 {up})">score</text>')
    x_name = "candidates, in the order in which they came"
    lines.append(f'<text x="{middle}" y="{TREE_HEIGHT - 8}" text-anchor="middle">{x_name}</text>')
    says = f"the family tree: {len(known)} candidates, the best is {history.best.index}"
    head = f'<svg viewBox="0 0 {TREE_WIDTH} {TREE_HEIGHT}" role="img" aria-label="{says}">'
    return "".join([head, *lines, *edges, *nodes, "</svg>"])
