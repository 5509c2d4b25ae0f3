"""Plots of a run as SVG, for a page without scripts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from dspy_flashevolve.observe.formatting import format_score
from dspy_flashevolve.observe.history import History

# In pixels of the drawing; a page scales it. The left margin holds the numbers of an axis and its name, the bottom one
# a row of numbers and one of text.
WIDTH, HEIGHT = 420, 240
TREE_WIDTH, TREE_HEIGHT = 860, 320
LEFT, RIGHT, TOP, BOTTOM = 48, 22, 10, 36
COLOURS = 8
"""Colours that the page's style sheet defines. A ninth series has the first one again."""
MOST_POINTS = 600
"""Dots of one plot, more than can be told apart; of more the plot shows some, evenly."""
MOST_LABELS = 40
"""Candidates of a tree that are all labelled with their numbers; of more, only those on the way to the best are."""


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Choose round numbers between two others for the ticks of an axis.

    >>> ticks(0, 217)
    [0.0, 50.0, 100.0, 150.0, 200.0]
    """
    span = (high - low) or 1.0
    size = 10.0 ** math.floor(math.log10(span / most))
    size *= next(factor for factor in (1, 2, 5, 10) if span / (size * factor) <= most)
    first = math.ceil(low / size - 1e-9)  # a multiple stays one, whatever the division's rounding
    return [round(number * size, 12) for number in range(first, first + most + 1) if number * size <= high + size / 1e6]


class _Axes:
    """The axes of a plot: from values to pixels, and the grid.

    Args:
        right: end of the x axis, which begins at 0.
        low, high: ends of the y axis.
    """

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
    """Plot scores as dots, and the best so far as a line.

    Args:
        points: x, score, best score so far, and tooltip of each dot.
        right: end of the x axis.
    """
    if not points:
        return ""
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
        body.append(f'<path class="c{colour % COLOURS}" {path}><title>{_tooltip(name, values)}</title></path>')
        below = above
    return axes.svg(body, x_name, label, y_name)


def _tooltip(name: str, values: Sequence[float]) -> str:
    return escape(f"{name}: {max(values):.3g} at most, {sum(values) / len(values):.3g} on average")


def tree_plot(history: History) -> str:
    """Plot candidates by number and score, each joined to its parents; the way to the best is drawn thick."""
    candidates = {candidate.index: candidate for candidate in history.candidates}
    scores = {index: candidate.score for index, candidate in candidates.items() if candidate.score is not None}
    if len(scores) < 2 or history.best is None:
        return ""
    last, low, high = max(scores), min(scores.values()), max(scores.values())
    width, height = TREE_WIDTH - LEFT - RIGHT, TREE_HEIGHT - 3 * TOP - BOTTOM

    def y_of(score: float) -> float:
        share = (score - low) / (high - low) if high > low else 0.5
        return round(TREE_HEIGHT - BOTTOM - TOP - share * height, 1)

    def position(index: int) -> tuple[float, float]:
        return round(LEFT + index / (last or 1) * width, 1), y_of(scores[index])

    way, ancestors = set[int](), [history.best.index]
    while ancestors:
        index = ancestors.pop()
        if index in scores and index not in way:
            way.add(index)
            ancestors += [parent for parent in candidates[index].parents if parent is not None]
    edges: list[str] = []
    nodes: list[str] = []
    for index, value in scores.items():
        candidate, (x, y) = candidates[index], position(index)
        parents = [parent for parent in candidate.parents if parent in scores and parent != index]
        for parent in parents:
            from_x, from_y = position(parent)
            kind = "way" if {index, parent} <= way else "edge"
            middle = round((from_x + x) / 2, 1)
            edges.append(f'<path class="{kind}" d="M{from_x} {from_y}C{middle} {from_y} {middle} {y} {x} {y}"/>')
        tooltip = f"candidate {index}: {format_score(value)}"
        tooltip += f", from {', '.join(map(str, parents))}" if parents else ", the seed" if index == 0 else ""
        tooltip += "" if candidate.step is None or candidate.step < 0 else f", step {candidate.step}"
        kind = "dot on-way" if index in way else "dot"
        nodes.append(f'<circle class="{kind}" cx="{x}" cy="{y}" r="4.5"><title>{escape(tooltip)}</title></circle>')
        if len(scores) <= MOST_LABELS or index in way:
            nodes.append(f'<text x="{x}" y="{y - 8}" text-anchor="middle">{index}</text>')
    lines: list[str] = []
    for value in ticks(low, high):
        lines.append(f'<path class="grid" d="M{LEFT} {y_of(value)}H{TREE_WIDTH - RIGHT}"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y_of(value) + 4}" text-anchor="end">{value:g}</text>')
    up, middle = TREE_HEIGHT / 2 - TOP, LEFT + width / 2
    lines.append(f'<text x="11" y="{up}" text-anchor="middle" transform="rotate(-90 11 {up})">score</text>')
    x_name = "candidates, in the order in which they came"
    lines.append(f'<text x="{middle}" y="{TREE_HEIGHT - 8}" text-anchor="middle">{x_name}</text>')
    label = f"the family tree: {len(scores)} candidates, the best is {history.best.index}"
    head = f'<svg viewBox="0 0 {TREE_WIDTH} {TREE_HEIGHT}" role="img" aria-label="{label}">'
    return "".join([head, *lines, *edges, *nodes, "</svg>"])
