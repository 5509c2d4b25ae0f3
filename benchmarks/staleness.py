"""Which staleness policy makes the better program: `python -m benchmarks.staleness`.

The policies, lockstep (dspy.GEPA, barrier for barrier) and Combee, on three kinds of task and several seeds, in
virtual time: once at a fixed time, and once at an equal number of metric calls. It needs no server, and the same
command gives the same figures on any machine. `async-train-1` integrates one proposal at a time onto the head;
`async-patch` repairs one stale child that passed its screen, and makes no head.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from benchmarks.methods import Limits, async_options, method
from benchmarks.results import RESULTS, Spread, append_json_lines, ratio, shown, table
from benchmarks.virtual import TASKS, Setting, run_virtually, task_kind

METHODS = (
    "lockstep", "combee-9", "combee-25", "async-full", "async-guarded-2", "async-guarded-8", "async-patch",
    "async-train-1", "async-train-2", "async-train-4", "async-train-8", "async-train-12", "async-train-24", "async",
)  # fmt: skip
TARGET_OVER_LOCKSTEP = 3.0
TARGET_OVER_COMBEE = 1.5
HEADER = (
    "method", "best score (min-max)", "gain", "x lockstep's gain", "x best Combee's", "metric calls", "proposals",
    "generations", "discarded", "integrated", "heads confirmed/superseded/rolled back",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One run. Figures are taken at the limit, before the drain, unless their name says otherwise.

    Attributes:
        task: Kind of task, with its changes.
        method: What ran.
        seed: Seed of the task, the model and the optimizer.
        condition: "time" or "calls".
        limit: Virtual seconds, or metric calls.
        profile: The simulated model.
        slots: Requests in flight at most.
        best_score: Best fully validated score; at "calls" of the candidates that were paid for within the limit.
        seed_score: The seed program's.
        half_score: The best score at half the limit.
        metric_calls: Counted by the optimizer; at "calls" those within the limit.
        overshoot: Metric calls past the limit, drained.
        proposals: New texts.
        generations: From the seed to the deepest candidate.
        tokens_per_second: Written by the model.
        seconds: Virtual seconds until the run had drained.
        discarded: Share of what the policy looked at, drained; `None` where it looked at nothing.
        integrated: The same.
        heads: Way in which a head ended -> heads that were screened by then.
        error: What ended the run early; empty when nothing did.
        trajectory: Rows of `Point`'s fields where score or depth changed, drained.
    """

    task: str
    method: str
    seed: int
    condition: str
    limit: float
    profile: str
    slots: int
    best_score: float | None = None
    seed_score: float | None = None
    half_score: float | None = None
    metric_calls: int = 0
    overshoot: int = 0
    proposals: int = 0
    generations: int = 0
    tokens_per_second: float = 0.0
    seconds: float = 0.0
    discarded: float | None = None
    integrated: float | None = None
    heads: dict[str, int] = field(default_factory=dict)
    error: str = ""
    trajectory: list[list[float | int | None]] = field(default_factory=list)

    @property
    def gain(self) -> float | None:
        """How far the best score lies above the seed program's; `None` without one, or after an error."""
        if self.error or self.best_score is None or self.seed_score is None:
            return None
        return self.best_score - self.seed_score

    @property
    def where(self) -> str:
        """The task and the limit, for people."""
        return f"{self.task}, at {self.limit:g} {'virtual seconds' if self.condition == 'time' else 'metric calls'}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness", description=__doc__)
    common = Setting()
    parser.add_argument("--profile", default=common.profile, help="the simulated model")
    parser.add_argument("--slots", type=int, default=64, help="requests in flight at most")
    parser.add_argument("--train", type=int, default=common.train, help="training examples")
    parser.add_argument("--val", type=int, default=common.val, help="validation examples")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), help="kinds of task, as few or many:rules=96")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seconds", type=float, default=120.0, help="the fixed virtual time; 0 to skip")
    parser.add_argument("--calls", type=int, default=600, help="the equal number of metric calls; 0 to skip")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--report", type=Path, help="print the tables of an earlier file; run nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "staleness.jsonl")
    options = parser.parse_args(arguments)
    try:
        for name in options.methods:
            async_options(name)
        for name in options.tasks:
            task_kind(name)
    except ValueError as error:
        parser.error(str(error))
    return options


def measure(setting: Setting, job: tuple[Limits, str, str]) -> Row:
    """One run: the limits with the seed, the task's name and the method's."""
    limits, task, name = job
    condition, limit = ("calls", limits.metric_calls) if limits.metric_calls else ("time", limits.seconds or 0.0)
    row = partial(Row, task, name, limits.seed, condition, limit, setting.profile, limits.slots)
    run = run_virtually(method(name), task_kind(task).task(limits.seed), limits, setting)
    point = run.at()
    return row(
        best_score=point.best_score,
        seed_score=run.trajectory.seed_score,
        half_score=run.at(0.5).best_score,
        metric_calls=point.metric_calls,
        overshoot=run.overshoot,
        proposals=point.proposals,
        generations=point.depth,
        tokens_per_second=run.tokens / run.span if run.span else 0.0,
        seconds=run.seconds,
        discarded=run.share("discard"),
        integrated=run.share("integrate"),
        heads=asdict(run.heads),
        error=run.error,
        trajectory=run.trajectory.compact(),
    )


def measured(options: argparse.Namespace) -> Iterator[Row]:
    """Every run, in the order of conditions, tasks, seeds and methods."""
    ends = [{"seconds": options.seconds}] if options.seconds else []
    ends += [{"metric_calls": options.calls}] if options.calls else []
    jobs = [
        (Limits(options.slots, seed, **end), task, name)
        for end in ends
        for task, seed, name in product(options.tasks, range(options.seeds), options.methods)
    ]
    run = partial(measure, Setting(options.profile, options.train, options.val))
    if options.jobs <= 1:
        yield from map(run, jobs)
        return
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run, jobs)


def recorded(path: Path) -> list[Row]:
    """The runs of a file that this command wrote; of the same run measured twice, the later."""
    known = {one.name for one in fields(Row)}
    found: dict[tuple[object, ...], Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = Row(**{name: value for name, value in json.loads(line).items() if name in known})
        found[row.condition, row.limit, row.profile, row.slots, row.task, row.seed, row.method] = row
    return list(found.values())


def median_of(rows: Sequence[Row], name: str | None, figure: Callable[[Row], float | None]) -> float | None:
    """The median over the seeds of one method's figure; `None` without a run that has it."""
    known = [value for row in rows if row.method == name and (value := figure(row)) is not None]
    return statistics.median(known) if known else None


def best_combee(rows: Sequence[Row]) -> str | None:
    """The Combee with the highest median gain, which a user would pick; `None` without one."""
    names = sorted({row.method for row in rows if row.method.startswith("combee")})
    return max(names, key=lambda name: _gain(rows, name) or 0.0, default=None)


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The table of one task and condition, a line a method: medians over the seeds."""
    lockstep, combee = _gain(rows, "lockstep"), _gain(rows, best_combee(rows))
    lines: list[list[str]] = []
    for name in dict.fromkeys(row.method for row in rows):
        mine = [row for row in rows if row.method == name and not row.error]
        middle = partial(median_of, mine, name)
        heads = [middle(lambda row, end=end: row.heads.get(end)) for end in ("confirmed", "superseded", "rolled_back")]
        lines.append([
            name,
            _spread([row.best_score for row in mine if row.best_score is not None]),
            shown(_gain(mine, name), "+.3f"),
            shown(ratio(_gain(mine, name), lockstep), ".2f"),
            shown(ratio(_gain(mine, name), combee), ".2f"),
            shown(middle(lambda row: row.metric_calls), ".0f"),
            shown(middle(lambda row: row.proposals), ".0f"),
            shown(middle(lambda row: row.generations), ".0f"),
            shown(middle(lambda row: row.discarded), ".0%"),
            shown(middle(lambda row: row.integrated), ".0%"),
            "/".join(shown(count, ".0f") for count in heads) if any(heads) else "-",
        ])  # fmt: skip
    return lines


def verdicts(rows: Sequence[Row]) -> list[str]:
    """A line for each target of one task and condition, by median gains; none where a method is missing.

    At a fixed time the default policy has to gain three times as much as lockstep on "many" and one and a half times as
    much as the best Combee, and elsewhere no less than these and than admitting everything. At equal calls it may stay
    behind the better of lockstep and Combee by as much as that one's seeds differ (the highest gain less the lowest).
    """
    ours, combee = _gain(rows, "async"), best_combee(rows)
    if ours is None:
        return []
    if rows[0].condition == "calls":
        rival = max(("lockstep", combee), key=lambda name: _gain(rows, name) or 0.0)
        gains = [row.gain for row in rows if row.method == rival and row.gain is not None]
        if not gains:
            return []
        spread, theirs = max(gains) - min(gains), statistics.median(gains)
        met = _met(ours, theirs - spread)
        return [
            f"{rows[0].where}: async {ours:+.3f} against {rival} {theirs:+.3f}, less its spread of {spread:.3f}: {met}"
        ]
    if rows[0].task.partition(":")[0] == "many":
        targets = {"lockstep": TARGET_OVER_LOCKSTEP, combee: TARGET_OVER_COMBEE}
    else:
        targets = {"lockstep": 1.0, combee: 1.0, "async-full": 1.0}
    lines: list[str] = []
    for rival, factor in targets.items():
        if (theirs := _gain(rows, rival)) is not None:
            times = shown(ratio(ours, theirs), ".2f", " x ")
            met = _met(ours, factor * theirs)
            lines.append(
                f"{rows[0].where}: async {ours:+.3f} is {times}{rival}'s {theirs:+.3f}, target {factor:g} x: {met}"
            )
    return lines


def report(rows: Sequence[Row]) -> str:
    """Every table, and then every verdict."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row.where} ({row.profile}, {row.slots} slots)", []).append(row)
    tables = [f"{title}\n{table(HEADER, cells(group))}" for title, group in groups.items()]
    lines = [line for group in groups.values() for line in verdicts(group)]
    return "\n\n".join([*tables, "\n".join(lines)] if lines else tables)


def _gain(rows: Sequence[Row], name: str | None) -> float | None:
    return median_of(rows, name, lambda row: row.gain)


def _met(figure: float, target: float) -> str:
    return "met" if figure >= target - 1e-9 else "MISSED"


def _spread(scores: Sequence[float]) -> str:
    if not scores:
        return "-"
    spread = Spread.of(scores)
    return f"{spread.median:.3f} ({spread.low:.3f}-{spread.high:.3f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a run ended in an error, whatever became of the targets."""
    options = parse(arguments)
    if options.report is not None:
        print(report(recorded(options.report)))
        return 0
    os.environ.setdefault("TQDM_DISABLE", "1")
    rows: list[Row] = []
    for row in measured(options):
        rates = {"benchmark": "staleness", "gain": row.gain}
        append_json_lines(options.out, [{**rates, **asdict(row)}])
        rows.append(row)
        score = shown(row.best_score, ".3f")
        print(f"{row.where}, seed {row.seed}: {row.method}: {score} {row.error}".rstrip(), flush=True)
    problems = [f"{row.where}, seed {row.seed}: {row.method}: {row.error}" for row in rows if row.error]
    print("\n".join(["", report(rows), *problems]))
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
