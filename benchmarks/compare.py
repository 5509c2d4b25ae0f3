"""Which optimizer makes the better program: `python -m benchmarks.compare`.

dspy.GEPA (lockstep, which takes its steps barrier for barrier), its parallel sampling, Combee, and AsyncGEPA by
search and staleness policy, on three kinds of task, under simulated models that are more or less obliging, on several
seeds, in virtual time: once at a fixed time, and once at an equal number of metric calls. Scores are true scores: what
the best validated program of the moment is to score on examples that neither training nor validation saw. It needs no
server, and the same command gives the same figures on any machine. An interrupted command goes on where it stopped:
what its file has is not run again. `async-full` and `async-reflective` are GEPA's own search (`search="pareto"`) with
that staleness policy; rows of `async-patch`, in older files, had stale children repaired after their screen.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks.batching import PROFILES
from benchmarks.methods import Limits, method
from benchmarks.models import REPLY_MODELS
from benchmarks.results import RESULTS, ratio, shown, table
from benchmarks.runs import (
    TOLERANCE,
    Job,
    Row,
    best_combee,
    carry_out,
    median_gain,
    median_of,
    recorded,
    score_spread,
    verdict,
)
from benchmarks.tasks import TASKS, task_kind
from benchmarks.virtual import Setting

METHODS = (
    "lockstep", "gepa-independent-10", "combee-9", "combee-25", "combee-40", "async-full", "async-reflective", "async",
)  # fmt: skip
"""All that are compared; `async` is the default, with its integrations."""
TARGET_OVER_LOCKSTEP = 3.0
TARGET_OVER_COMBEE = 1.5
MOMENTS = (120.0, 600.0, 1800.0)
"""Seconds at which longer runs are read as well."""
HEADER = (
    "method", "seeds", "true score (min-max)", "validated", "gain", "x lockstep's gain", "x best Combee's",
    "of the possible", "rollouts", "LM calls", "task tokens", "reflection tokens", "gain a million tokens", "dollars",
    "seconds to lockstep's score", "requests paid to it", "reflections to it", "proposals", "integrated", "changes",
)  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    common = Setting()
    parser.add_argument(
        "--profiles", nargs="+", choices=list(PROFILES), default=[common.profile], help="the simulated backends"
    )
    parser.add_argument(
        "--model", nargs="+", choices=list(REPLY_MODELS), default=[common.model], help="how well they obey and reflect"
    )
    parser.add_argument(
        "--reflection-seconds",
        type=float,
        default=common.reflection_seconds,
        help="what each reflection takes, by another model than the task's; 0 for the same model",
    )
    parser.add_argument(
        "--cached", action="store_true", help="dspy's cache answers what was asked before, as by default"
    )
    parser.add_argument("--slots", type=int, default=64, help="requests in flight at most")
    parser.add_argument("--train", type=int, default=common.train, help="training examples")
    parser.add_argument("--val", type=int, default=common.val, help="validation examples; 0 for the training examples")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), help="kinds of task, as few or many:rules=96")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seconds", type=float, default=120.0, help="the fixed virtual time; 0 to skip")
    parser.add_argument("--calls", type=int, default=600, help="the equal number of metric calls; 0 to skip")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--fresh", action="store_true", help="run again what the file has")
    parser.add_argument("--report", type=Path, help="print the tables of an earlier file; run nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "compare.jsonl")
    options = parser.parse_args(arguments)
    try:
        for name in options.methods:
            method(name, virtual=True)
        for name in options.tasks:
            task_kind(name)
    except ValueError as error:
        parser.error(str(error))
    return options


def planned(options: argparse.Namespace) -> list[Job]:
    """Every run, in the order of conditions, tasks, seeds and methods."""
    ends = [{"seconds": options.seconds}] if options.seconds else []
    ends += [{"metric_calls": options.calls}] if options.calls else []
    return [
        Job(
            Setting(profile, options.train, options.val, model, options.reflection_seconds, options.cached),
            Limits(options.slots, seed, **end),
            task,
            name,
        )
        for end in ends
        for profile, model, task, seed, name in product(
            options.profiles, options.model, options.tasks, range(options.seeds), options.methods
        )
    ]


def moments(rows: Sequence[Row]) -> list[float]:
    """The seconds before their limit at which runs at a fixed time are read as well."""
    return [seconds for seconds in MOMENTS if rows[0].condition == "time" and seconds < rows[0].limit]


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The table of one task and condition, a line a method: medians over the seeds."""
    lockstep, combee = median_gain(rows, "lockstep"), median_gain(rows, best_combee(rows))
    final = {row.seed: row.score for row in rows if row.method == "lockstep" and not row.error}
    lines: list[list[str]] = []
    for name in dict.fromkeys(row.method for row in rows):
        mine = [row for row in rows if row.method == name and not row.error]
        middle = partial(median_of, mine, name)
        lines.append([
            name,
            str(len(mine)),
            score_spread(mine),
            shown(middle(lambda row: row.best_score), ".3f"),
            shown(median_gain(mine, name), "+.3f"),
            shown(ratio(median_gain(mine, name), lockstep), ".2f"),
            shown(ratio(median_gain(mine, name), combee), ".2f"),
            shown(middle(_of_the_possible), ".0%"),
            shown(middle(lambda row: row.metric_calls), ".0f"),
            shown(middle(lambda row: row.lm_calls), ".0f"),
            shown(middle(lambda row: row.task_tokens), ".0f"),
            shown(middle(lambda row: row.reflection_tokens), ".0f"),
            shown(middle(lambda row: row.gain_per_million), ".3f"),
            shown(middle(lambda row: row.dollars), ".2f"),
            _to_lockstep(mine, final, Row.seconds_to),
            _to_lockstep(mine, final, lambda row, goal: (row.paid_to(goal) or [None, None])[0]),
            _to_lockstep(mine, final, lambda row, goal: (row.paid_to(goal) or [None, None])[1]),
            shown(middle(lambda row: row.proposals), ".0f"),
            shown(middle(lambda row: row.integrated), ".0%"),
            shown(middle(lambda row: row.changes), ".0f"),
            *(shown(middle(lambda row, at=at: row.true_score_at(at)), ".3f") for at in moments(rows)),
        ])  # fmt: skip
    return lines


def _of_the_possible(row: Row) -> float | None:
    """The gain in true score as a share of that of the best program that there is."""
    if row.true_score is None or row.seed_true_score is None:
        return None
    optimum = task_kind(row.task).task(row.seed, row.model).optimum
    return ratio(row.true_score - row.seed_true_score, optimum - row.seed_true_score)


def _to_lockstep(
    mine: Sequence[Row], final: dict[int, float | None], cost_to: Callable[[Row, float], float | None]
) -> str:
    """The median of the cost until the score that lockstep ended with on the same seed, and how many came to it."""
    goals = [(row, goal) for row in mine if (goal := final.get(row.seed)) is not None]
    reached = [cost for row, goal in goals if (cost := cost_to(row, goal)) is not None]
    return f"{statistics.median(reached):.0f} ({len(reached)}/{len(goals)})" if reached else "-"


def verdicts(rows: Sequence[Row]) -> list[str]:
    """A line for each target of one task and condition, by median gains; none where a method is missing.

    At a fixed time the default policy has to gain three times as much as lockstep on "many" and one and a half times as
    much as the best Combee, and elsewhere no less than these and than admitting everything. At equal calls it may stay
    behind the better of lockstep and Combee by as much as that one's seeds differ (the highest gain less the lowest).
    """
    ours, combee = median_gain(rows, "async"), best_combee(rows)
    if ours is None:
        return []
    where = f"{rows[0].where} ({rows[0].model})"
    if rows[0].condition == "calls":
        rival = max(("lockstep", combee), key=lambda name: median_gain(rows, name) or 0.0)
        gains = [row.gain for row in rows if row.method == rival and row.gain is not None]
        if not gains:
            return []
        spread, theirs = max(gains) - min(gains), statistics.median(gains)
        met = verdict(ours >= theirs - spread - TOLERANCE)
        return [f"{where}: async {ours:+.3f} against {rival} {theirs:+.3f}, less its spread of {spread:.3f}: {met}"]
    if rows[0].task.partition(":")[0] == "many":
        targets = {"lockstep": TARGET_OVER_LOCKSTEP, combee: TARGET_OVER_COMBEE}
    else:
        targets = {"lockstep": 1.0, combee: 1.0, "async-full": 1.0}
    lines: list[str] = []
    for rival, factor in targets.items():
        if (theirs := median_gain(rows, rival)) is not None:
            times = shown(ratio(ours, theirs), ".2f", " x ")
            met = verdict(ours >= factor * theirs - TOLERANCE)
            lines.append(f"{where}: async {ours:+.3f} is {times}{rival}'s {theirs:+.3f}, target {factor:g} x: {met}")
    return lines


def report(rows: Sequence[Row]) -> str:
    """Every table, and then every verdict."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        slow = f", {row.reflection_seconds:g} s a reflection" if row.reflection_seconds else ""
        slow += ", dspy's cache" if row.cached else ""
        groups.setdefault(f"{row.where} ({row.profile}, {row.model}{slow}, {row.slots} slots)", []).append(row)
    tables: list[str] = []
    for title, group in groups.items():
        header = (*HEADER, *(f"at {seconds:g} s" for seconds in moments(group)))
        tables.append(f"{title}\n{table(header, cells(group))}")
    lines = [line for group in groups.values() for line in verdicts(group)]
    return "\n\n".join([*tables, "\n".join(lines)] if lines else tables)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a run ended in an error, whatever became of the targets."""
    options = parse(arguments)
    if options.report is not None:
        print(report(recorded(options.report)))
        return 0
    return carry_out("compare", planned(options), options, report)


if __name__ == "__main__":
    raise SystemExit(main())
