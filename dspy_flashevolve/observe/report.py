"""A run as one HTML page that needs nothing else: no network, no script."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dspy_flashevolve.observe.analysis import (
    endpoint_uses,
    example_scores,
    family_tree,
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
from dspy_flashevolve.observe.history import Candidate, History, TracedRollout
from dspy_flashevolve.observe.origins import lines_of, removed_seed_lines
from dspy_flashevolve.observe.plots import COLOURS, area_plot, score_plot, tree_plot

# A page of a long run has to open in a browser within a second or two. The limits below keep it under some megabytes.
MOST_CANDIDATES, MOST_EXAMPLES = 40, 100
"""Rows and columns of the table of scores by example: a screen of each, and a quarter of a megabyte at most."""
MOST_VALUE = 300
"""Characters of an example's field: enough to recognize the example."""
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
        removed=[] if best is None else removed_seed_lines(history, best),
        examples=_Examples(history),
        by_example=example_scores(history, MOST_CANDIDATES, MOST_EXAMPLES),
        tree_plot=Markup(tree_plot(history)),
        endpoints=endpoint_uses(history),
        score_plots=list(_score_plots(history, totals.cost_dollars)),
        slots=_slot_plots(history),
        colours=COLOURS,
        family=list(_family(history)),
        failures=_failures(history),
        integrations=_integrations(history),
        settings=json.dumps(dict(history.sessions[-1].settings), indent=2) if history.sessions else "",
    )


class _Examples:
    """Examples as the page shows them: by their inputs, with the outputs that a step had for them."""

    def __init__(self, history: History) -> None:
        self._inputs: dict[str, str] = {}
        self._of_step: defaultdict[tuple[int, str], list[TracedRollout]] = defaultdict(list)
        for rollout in history.traced:
            if rollout.inputs:
                self._inputs.setdefault(rollout.example, _values(rollout.inputs))
            self._of_step[rollout.step, rollout.example].append(rollout)

    def name(self, example: str) -> str:
        """Return an example's inputs, or its id where no trace was kept."""
        return self._inputs.get(example, f"example {example}")

    def outputs(self, step: int, example: str) -> list[tuple[str, str]]:
        """Return outputs and scores that a step had for an example: the parent's, then the child's."""
        return [(_values(rollout.output), f"{rollout.score:.2f}") for rollout in self._of_step[step, example]]


def _values(fields: Mapping[str, Any]) -> str:
    """Write fields as text for people: a single one by itself, several with their names."""
    shown = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in fields.items()
    }
    cut = {name: value if len(value) <= MOST_VALUE else f"{value[:MOST_VALUE]} …" for name, value in shown.items()}
    return next(iter(cut.values())) if len(cut) == 1 else "; ".join(f"{name}: {value}" for name, value in cut.items())


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
    busy = [(request.stage, request.seconds - request.latency_seconds, request.seconds) for request in history.requests]
    waiting = [(visit.stage, visit.queued, visit.began) for visit in history.visits]
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
    failures: dict[str, list[str]] = {}
    errors = Counter((request.stage, _clipped(request.error)) for request in history.requests if request.error)
    if errors:
        failures["Requests whose answer was of no use"] = [
            f"{count} times in {stage}: {error}" for (stage, error), count in errors.most_common(MOST_ROWS)
        ]
    turned_away = Counter(
        (event.fields["endpoint"], _clipped(event.fields["reason"])) for event in history.of_kind("RequestTurnedAway")
    )
    if turned_away:
        failures[f"Requests that got no answer, and were made again ({turned_away.total():,})"] = [
            f"{count} times by {name}: {reason}" for (name, reason), count in turned_away.most_common(MOST_ROWS)
        ]
    failed = Counter(_clipped(step.reason) for step in history.steps.values() if step.way == "failed")
    if failed:
        failures[f"Steps that failed ({failed.total():,})"] = [
            f"{count} times: {reason}" for reason, count in failed.most_common(MOST_ROWS)
        ]
    for kind, title in FAILURE_TITLES.items():
        events = history.of_kind(kind)
        if events:
            failures[f"{title} ({len(events)})"] = [
                f"after {format_duration(event.seconds)}: "
                + ", ".join(f"{name} {_clipped(str(value))}" for name, value in event.fields.items() if name != "shift")
                for event in events[-MOST_ROWS:]
            ]
    return failures


def _integrations(history: History) -> list[tuple[int, str, str]]:
    """Return step, verdict and reason of the newest verdicts."""
    verdicts = [tuple(verdict) for event in history.of_kind("Integrated") for verdict in event.fields["verdicts"]]
    # A run that was killed and goes on writes some of them again.
    return [(step, verdict, _clipped(reason)) for step, verdict, reason in dict.fromkeys(verdicts)][-MOST_ROWS:]
