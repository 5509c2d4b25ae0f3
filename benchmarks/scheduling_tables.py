"""What `benchmarks.scheduling` compares, its tables, and whether its targets are met."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from benchmarks.results import ratio, shown, table
from benchmarks.runs import TOLERANCE, Row, median_gain, median_of, score_spread, verdict

EXPERIMENTS = {
    "mechanisms": {
        "lockstep": "dspy.GEPA, barrier for barrier",
        "async-full": "GEPA's search; steps overlap, and children are admitted as they are",
        "async-full+rollout=0.67": "the same, and reflection starts on two examples of three",
        "async-reflective": "GEPA's search; an LM call repairs stale children before their screen",
        "async+admission=live:256": "the default without its bound on live steps",
        "async": "the default",
    },
    "prefix": {
        "async": "the default, which has none",
        "async+prefix=0.25": "prefix 0.25",
        "async+prefix=0.5": "prefix 0.5",
        "async-full": "GEPA's search, no prefix",
        "async-full+prefix=0.25": "GEPA's search, prefix 0.25",
        "async-full+prefix=0.5": "GEPA's search, prefix 0.5",
    },
    "controller": {
        "async": "the default: the order of the queues decides",
        "async+controller=median": "the paper's median rule",
    },
    "slots": {
        "async+slots=adaptive": "8 to begin with, up to 256",
        "async+slots=8": "8 slots",
        "async+slots=32": "32 slots",
        "async+slots=64": "64 slots",
        "async+slots=128": "128 slots",
    },
}
"""Experiment -> its variants -> what each of them is."""
TARGET_OF_BEST_SLOTS = 0.9
TARGET_REFUSED = 0.01
SLOTS_FIGURES = ("tokens/s", "validations a minute", "accepted a minute")
"""By each of which adaptive slots are compared with fixed ones."""
ALLOCATION_FIGURE = "landed a minute"
"""By which controllers are compared: proposals that came into the pool, those of an integration one by one."""

Figure = Callable[[Row], float | None]
FIGURES: dict[str, tuple[Figure, str]] = {
    "validations a minute": (lambda row: row.a_minute(row.validations), ".2f"),
    "accepted a minute": (lambda row: row.a_minute(row.accepted), ".2f"),
    "landed a minute": (lambda row: row.a_minute(row.landed), ".2f"),
    "generations": (lambda row: row.generations, ".0f"),
    "proposals": (lambda row: row.proposals, ".0f"),
    "metric calls": (lambda row: row.metric_calls, ".0f"),
    "tokens/s": (lambda row: row.tokens_per_second, ".0f"),
    "429s": (lambda row: row.refused, ".0f"),
    "refused after 10 s": (lambda row: row.refused_share, ".2%"),
}
"""Column -> its figure of a run, of which the table has the median, and the form."""
SCORES = ("variant", "what it is", "score (min-max)", "gain", "x lockstep's gain")


def cells(rows: Sequence[Row], named: Mapping[str, str], figures: Sequence[str] = tuple(FIGURES)) -> list[list[str]]:
    """A table, a line a variant that was run: medians over the seeds.

    Args:
        rows: The runs of one profile and task; those that failed are left out.
        named: Variants, in the order of the lines -> what they are.
        figures: Columns after the scores.
    """
    lockstep = median_gain(rows, "lockstep")
    lines: list[list[str]] = []
    for name in [name for name in named if any(row.method == name for row in rows)]:
        mine = [row for row in rows if row.method == name and not row.error]
        gain = median_gain(mine, name)
        columns = [(median_of(mine, name, FIGURES[figure][0]), FIGURES[figure][1]) for figure in figures]
        lines.append([
            name,
            named[name],
            score_spread(mine),
            shown(gain, "+.3f"),
            shown(ratio(gain, lockstep), ".2f"),
            *(shown(value, form) for value, form in columns),
        ])  # fmt: skip
    return lines


def experiment_verdicts(rows: Sequence[Row]) -> list[str]:
    """A line for each target of one profile and task, by medians; none where a variant is missing."""
    return [*_prefix_verdicts(rows), *_controller_verdicts(rows), *_slots_verdicts(rows)]


def _prefix_verdicts(rows: Sequence[Row]) -> list[str]:
    lines: list[str] = []
    for base in ("async", "async-full"):
        ours, theirs = (_median(rows, f"{base}{prefix}", "validations a minute") for prefix in ("+prefix=0.25", ""))
        if ours is None or theirs is None:
            continue
        met = verdict(ours > theirs + TOLERANCE)
        told = f"{base}: prefix 0.25 makes {ours:.2f} validations a minute, none {theirs:.2f}"
        lines.append(f"{_place(rows)}: {told}, more: {met}")
    return lines


def _controller_verdicts(rows: Sequence[Row]) -> list[str]:
    ours, theirs = (_median(rows, name, ALLOCATION_FIGURE) for name in EXPERIMENTS["controller"])
    if ours is None or theirs is None:
        return []
    met = verdict(ours >= theirs - TOLERANCE)
    told = f"the default has {ours:.2f} {ALLOCATION_FIGURE}, the median rule {theirs:.2f}"
    return [f"{_place(rows)}: {told}, no less: {met}"]


def _slots_verdicts(rows: Sequence[Row]) -> list[str]:
    adaptive, *others = EXPERIMENTS["slots"]
    lines: list[str] = []
    for column in SLOTS_FIGURES:
        ours, fixed = _median(rows, adaptive, column), _medians(rows, others, column)
        if ours is None or not fixed:
            continue
        best = max(fixed, key=fixed.__getitem__)
        met = verdict(ours >= TARGET_OF_BEST_SLOTS * fixed[best] - TOLERANCE)
        share = shown(ratio(ours, fixed[best]), ".0%")
        lines.append(
            f"{_place(rows)}: adaptive slots {ours:.2f} {column} are {share} of {best}'s {fixed[best]:.2f}, "
            f"at least {TARGET_OF_BEST_SLOTS:.0%}: {met}"
        )
    shares = [row.refused_share for row in rows if row.method == adaptive and row.refused_share is not None]
    if shares:
        met = verdict(max(shares) < TARGET_REFUSED)
        lines.append(
            f"{_place(rows)}: adaptive slots had at most {max(shares):.2%} refused after 10 s in a seed, "
            f"under {TARGET_REFUSED:.0%}: {met}"
        )
    return lines


def report(rows: Sequence[Row]) -> str:
    """Every table, and then every verdict."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        title = f"{_place([row])}, {row.slots} slots, {row.train} + {row.val} examples, {row.model} model"
        groups.setdefault(title, []).append(row)
    known = {name for named in EXPERIMENTS.values() for name in named}
    parts: list[str] = []
    for title, group in groups.items():
        for experiment, named in {**EXPERIMENTS, "others": _others(group, known)}.items():
            if lines := cells(group, named):
                parts.append(f"{title}: {experiment}\n{table((*SCORES, *FIGURES), lines)}")
    lines = [line for group in groups.values() for line in experiment_verdicts(group)]
    return "\n\n".join([*parts, "\n".join(lines)] if lines else parts)


def _others(rows: Sequence[Row], known: Collection[str]) -> dict[str, str]:
    """Variants that were asked for by name."""
    return {row.method: "" for row in rows if row.method not in known}


def _place(rows: Sequence[Row]) -> str:
    return f"{rows[0].where} ({rows[0].profile})"


def _median(rows: Sequence[Row], name: str, column: str) -> float | None:
    return median_of([row for row in rows if not row.error], name, FIGURES[column][0])


def _medians(rows: Sequence[Row], names: Sequence[str], column: str) -> dict[str, float]:
    found = {name: _median(rows, name, column) for name in names}
    return {name: value for name, value in found.items() if value is not None}
