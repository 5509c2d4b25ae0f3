"""The pictures of a report, as PNG: score curves, slots in use, and the timeline of stages. Matplotlib draws them."""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.results import Result
from benchmarks.runs import Row
from benchmarks.trajectory import Point

OURS = "async"
GRID = 200
"""Points of a curve."""


def curve(
    results: Sequence[Result], axis: str, end: float
) -> tuple[list[float], list[float], list[float], list[float]]:
    """The best score of several seeds over `axis` ("seconds" or "metric_calls"): places, medians, lowest, highest.

    A place where a seed has no score yet is left out.
    """
    places = [end * number / GRID for number in range(GRID + 1)]
    runs = [_within(result) for result in results]
    kept: list[tuple[float, list[float]]] = []
    for place in places:
        scores = [_reached(points, axis, place) for points in runs]
        known = [score for score in scores if score is not None]
        if known and len(known) == len(runs):
            kept.append((place, known))
    return (
        [place for place, _ in kept],
        [statistics.median(scores) for _, scores in kept],
        [min(scores) for _, scores in kept],
        [max(scores) for _, scores in kept],
    )


def scores(results: Sequence[Result], axis: str, label: str) -> bytes:
    """The curves of every method: the median over the seeds, and their range as a band.

    Raises:
        ImportError: matplotlib is not installed; the message says how to get it. So with every picture.
    """
    figure = _figure(4.5)
    axes = figure.subplots()
    for name, style in _styles(results).items():
        mine = [result for result in results if result.method == name and not result.error]
        ends = [r.seconds if axis == "seconds" else float(r.metric_calls) for r in mine]
        places, medians, low, high = curve(mine, axis, statistics.median(ends) if ends else 0.0)
        if places:
            axes.step(places, medians, where="post", label=_plain(name), **style)
            axes.fill_between(places, low, high, step="post", alpha=0.15, color=style["color"])
    axes.set_xlabel(label)
    axes.set_ylabel("best fully validated score")
    return _png(figure, axes)


def true_scores(rows: Sequence[Row], shown: Mapping[str, str], titles: Mapping[str, str]) -> bytes:
    """True scores over time: a panel a task, a line a method with the range of its seeds.

    Args:
        rows: at a fixed time, of one profile and model.
        shown: method -> what it is called, in the order of the legend.
        titles: task -> what it is called.
    """
    figure = _figure(3.2)
    for axes, (task, title) in zip(figure.subplots(1, len(titles), sharey=True), titles.items(), strict=True):
        for number, (name, words) in enumerate(shown.items()):
            mine = [row for row in rows if row.task == task and row.method == name and not row.error]
            end = min((row.limit for row in mine), default=0.0)
            places = [end * place / GRID for place in range(GRID + 1)]
            scores = [[row.true_score_at(place) or 0.0 for row in mine] for place in places if mine]
            style = {"color": f"C{number}", "label": words, "linewidth": 2.5 if name == OURS else 1.2}
            axes.step(places[: len(scores)], [statistics.median(one) for one in scores], where="post", **style)
            low, high = [min(one) for one in scores], [max(one) for one in scores]
            axes.fill_between(places[: len(scores)], low, high, step="post", alpha=0.15, color=style["color"])
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("seconds")
        axes.set_ylim(bottom=0.0)
        axes.grid(alpha=0.3)
        axes.label_outer()
    figure.axes[0].set_ylabel("score on unseen examples")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    return _bytes(figure)


def slots(results: Sequence[Result]) -> bytes | None:
    """Requests in flight over time, of each method's first run; `None` where nobody sampled them."""
    shown = {result.method: result for result in reversed(results) if result.busy and not result.error}
    if not shown:
        return None
    figure = _figure(4.5)
    axes = figure.subplots()
    for name, style in _styles(results).items():
        if name in shown:
            seconds, running = zip(*shown[name].busy, strict=True)
            axes.plot(seconds, running, label=_plain(name), **style)
    axes.set_xlabel("seconds")
    axes.set_ylabel("slots busy")
    return _png(figure, axes)


def stages(result: Result) -> bytes:
    """What the first steps of a run did when: a line a step, a bar each stage that worked on it."""
    figure = _figure(4.5)
    axes = figure.subplots()
    names = list(dict.fromkeys(stage for _, stage, _, _ in result.stages))
    colours = {name: f"C{number}" for number, name in enumerate(names)}
    for name in names:
        for step, _, began, ended in [row for row in result.stages if row[1] == name]:
            axes.broken_barh([(began, ended - began)], (step - 0.4, 0.8), color=colours[name])
        axes.plot([], [], color=colours[name], linewidth=6, label=name)
    axes.set_xlim(0, result.seconds)
    axes.set_xlabel("seconds")
    axes.set_ylabel("step")
    axes.set_title(f"{_plain(result.method)}, seed {result.seed}", fontsize="medium")
    axes.invert_yaxis()
    return _png(figure, axes)


def _plain(name: str) -> str:
    """A name that matplotlib does not take for a formula."""
    return name.replace("$", r"\$")


def _styles(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """A colour for each method, in the order in which they came; ours is drawn thick."""
    names = list(dict.fromkeys(result.method for result in results))
    wide = {OURS: 2.5}
    colours = [f"C{number}" for number in range(10)] + ["black", "gold", "navy", "tomato", "lime", "indigo"]
    return {
        name: {"color": colours[number % len(colours)], "linewidth": wide.get(name, 1.2)}
        for number, name in enumerate(names)
    }


def _within(result: Result) -> list[Point]:
    """The points of a run up to its limit; what drains after it counts for nothing."""
    points = [Point(*row) for row in result.trajectory]  # pyright: ignore[reportArgumentType]
    return [point for point in points if point.seconds <= result.seconds]


def _reached(points: Sequence[Point], axis: str, place: float) -> float | None:
    known = [p.best_score for p in points if p.best_score is not None and getattr(p, axis) <= place]
    return max(known, default=None)


def _figure(height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("The report needs matplotlib: pip install 'dspy-flashevolve[notebooks]'") from error
    return Figure(figsize=(9, height), dpi=90, layout="constrained")


def _png(figure: Any, axes: Any) -> bytes:
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    return _bytes(figure)


def _bytes(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
