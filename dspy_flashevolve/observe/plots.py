"""Plots as inline SVG, static and small: no library that draws needs to be there, and no script to show them.

Colours and fonts are the page's (classes ``c0`` to ``c7``), so that they follow its dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 420, 240
LEFT, RIGHT, TOP, BOTTOM = 48, 22, 10, 36
COLOURS = 8
MOST_POINTS = 600
"""Of one plot; of more the plot shows some, evenly."""


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


def scores(points: Sequence[tuple[float, float, float, str]], right: float, x_name: str) -> str:
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


def areas(series: Mapping[str, Sequence[float]], right: float, x_name: str, says: str) -> str:
    """Series on top of each other, over equal parts of the x axis; the one of number n has the class ``c`` n."""
    if not series:
        return ""
    bins = len(next(iter(series.values())))
    below = [0.0] * bins
    axes = _Axes(right, 0.0, max(map(sum, zip(*series.values(), strict=True))))
    xs = [axes.x(place * right / bins) for place in range(bins + 1)]
    body: list[str] = []
    for number, (name, values) in enumerate(series.items()):
        above = [low + value for low, value in zip(below, values, strict=True)]
        top = "".join(f"V{axes.y(value)}H{xs[place + 1]}" for place, value in enumerate(above))
        back = "".join(f"V{axes.y(below[place])}H{xs[place]}" for place in reversed(range(bins)))
        path = f'd="M{xs[0]} {axes.y(below[0])}{top}{back}Z"'
        body.append(f'<path class="c{number % COLOURS}" {path}><title>{escape(name)}</title></path>')
        below = above
    return axes.svg(body, x_name, says)
