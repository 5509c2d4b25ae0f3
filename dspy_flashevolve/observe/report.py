"""A run as one HTML file that needs nothing else: no network, no script."""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime, timezone
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dspy_flashevolve.observe import plots
from dspy_flashevolve.observe.figures import course, family, figures, prompts_diff, use_of_slots
from dspy_flashevolve.observe.history import Candidate, History
from dspy_flashevolve.observe.origins import origins
from dspy_flashevolve.observe.text import duration, number, score

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
        colours=plots.COLOURS,
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
            found.append(Markup(plots.scores(marked, right, name)))
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
        drawn.append((name, Markup(plots.areas(series, end, "seconds", f"{name}, by stage"))))
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
