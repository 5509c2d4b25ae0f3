"""How throughput and staleness grow with slots and validation sets: `python -m benchmarks.scaling`.

In virtual time, on a fleet: the API profile without its limit of requests in flight, so that twice the slots could do
twice the work. Lockstep, which is dspy.GEPA barrier for barrier, stands beside AsyncGEPA. A run that the file has
already is not made again.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from benchmarks.methods import Limits, method
from benchmarks.results import RESULTS, append_json_lines, shown, table
from benchmarks.tasks import task_kind
from benchmarks.virtual import Setting, run_virtually
from dspy_flashevolve.sim.profiles import API_GPT_4O_MINI, Profile

FLEET = replace(API_GPT_4O_MINI, name="api-gpt-4o-mini, no limit", concurrency_limit=None)
SLOTS = (8, 32, 128, 512, 2048, 4096)
VALS = (50, 500, 5000)
METHODS = ("lockstep", "async-full", "async")
HEADER = (
    "method", "seconds", "val", "slots", "tokens/s", "x fewest slots", "slope", "proposals a minute",
    "validations a minute", "mean gap", "generations", "best score",
)  # fmt: skip


@dataclass(frozen=True)
class ScalingRow:
    """One run, cancelled at the limit: what is under way then would drain for as long as the validation set is large.

    Attributes:
        slots: Requests in flight at most.
        val: Validation examples.
        limit: Virtual seconds.
        tokens_per_second: Written by the model.
        mean_gap: Commits that a child had not seen when it was about to be committed; `None` where none was.
        generations: From the seed to the deepest candidate.
        error: What ended the run early; empty when nothing did.
    """

    method: str
    seed: int
    slots: int
    val: int
    train: int
    limit: float
    tokens_per_second: float = 0.0
    proposals: int = 0
    validations: int = 0
    mean_gap: float | None = None
    generations: int = 0
    best_score: float | None = None
    error: str = ""

    @property
    def key(self) -> tuple[str, int, int, int, int, float]:
        """What the run was to be."""
        return self.method, self.seed, self.slots, self.val, self.train, self.limit


def mean_gap(gaps: dict[str, dict[int, int]], where: str = "before_commit") -> float | None:
    """The mean of a histogram of gaps.

    Example:
        >>> mean_gap({"before_commit": {0: 1, 4: 3}})
        3.0
    """
    counts = gaps.get(where, {})
    total = sum(counts.values())
    return sum(gap * count for gap, count in counts.items()) / total if total else None


def measured(row: ScalingRow, profile: Profile = FLEET) -> ScalingRow:
    """Make the run that a row names."""
    setting = Setting(profile=profile, train=row.train, val=row.val)  # pyright: ignore[reportArgumentType]
    task = task_kind("many").task(row.seed)
    limits = Limits(row.slots, row.seed, seconds=row.limit)
    run = run_virtually(method(row.method), task, limits, setting, drain=False)
    point = run.at()
    return replace(
        row,
        tokens_per_second=run.tokens / row.limit,
        proposals=point.proposals,
        validations=point.validations,
        mean_gap=None if run.stats is None else mean_gap(run.stats.gaps),
        generations=point.depth,
        best_score=point.best_score,
        error=run.error,
    )


def recorded(path: Path) -> list[ScalingRow]:
    """The rows of a file; the last one with a key counts, and none that failed."""
    rows: dict[object, ScalingRow] = {}
    names = ScalingRow.__dataclass_fields__
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        kept = json.loads(line)
        row = ScalingRow(**{name: kept[name] for name in names if name in kept})
        rows[row.key] = row
    return [row for row in rows.values() if not row.error]


def made(jobs: Sequence[ScalingRow], side_by_side: int) -> Iterator[ScalingRow]:
    """Every run, in the order of the jobs, each in a process of its own without Python's garbage collector.

    A million requests that wait are as many objects, through which the collector would go again and again.
    """
    with get_context("spawn").Pool(side_by_side, initializer=gc.disable, maxtasksperchild=1) as pool:
        yield from pool.imap(measured, jobs)


def slope(low: ScalingRow, high: ScalingRow) -> float | None:
    """By which power of the slots the throughput grows from one run to another: 1 is in proportion, 0 not at all.

    Example:
        >>> few = ScalingRow("async", 0, slots=8, val=50, train=60, limit=60.0, tokens_per_second=100.0)
        >>> slope(few, replace(few, slots=32, tokens_per_second=200.0))
        0.5
    """
    if low.tokens_per_second <= 0 or high.tokens_per_second <= 0 or low.slots == high.slots:
        return None
    return math.log(high.tokens_per_second / low.tokens_per_second) / math.log(high.slots / low.slots)


def medians(rows: Sequence[ScalingRow]) -> list[ScalingRow]:
    """One row a method, limit, validation set and number of slots: medians over the seeds, in that order."""
    groups: dict[tuple[int, float, int, int], list[ScalingRow]] = {}
    order = list(METHODS) + sorted({row.method for row in rows} - set(METHODS))
    for row in rows:
        groups.setdefault((order.index(row.method), row.limit, row.val, row.slots), []).append(row)
    found: list[ScalingRow] = []
    for _, group in sorted(groups.items()):
        gaps = [row.mean_gap for row in group if row.mean_gap is not None]
        scores = [row.best_score for row in group if row.best_score is not None]
        found.append(
            replace(
                group[0],
                tokens_per_second=median(row.tokens_per_second for row in group),
                proposals=round(median(row.proposals for row in group)),
                validations=round(median(row.validations for row in group)),
                mean_gap=median(gaps) if gaps else None,
                generations=round(median(row.generations for row in group)),
                best_score=median(scores) if scores else None,
            )
        )
    return found


def cells(rows: Sequence[ScalingRow]) -> list[list[str]]:
    """The table's lines: a method and a validation set after the other, by slots."""
    lines: list[list[str]] = []
    first: ScalingRow | None = None
    before: ScalingRow | None = None
    for row in medians(rows):
        if first is None or (first.method, first.limit, first.val) != (row.method, row.limit, row.val):
            first, before = row, None
        grown = row.tokens_per_second / first.tokens_per_second if first.tokens_per_second else None
        lines.append([
            row.method,
            f"{row.limit:g}",
            str(row.val),
            str(row.slots),
            f"{row.tokens_per_second:.0f}",
            shown(grown, ".1f"),
            shown(None if before is None else slope(before, row), ".2f"),
            f"{60 * row.proposals / row.limit:.1f}",
            f"{60 * row.validations / row.limit:.1f}",
            shown(row.mean_gap, ".1f"),
            str(row.generations),
            shown(row.best_score, ".3f"),
        ])  # fmt: skip
        before = row
    return lines


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--slots", type=int, nargs="+", default=list(SLOTS))
    parser.add_argument("--vals", type=int, nargs="+", default=list(VALS), help="validation examples")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--train", type=int, default=60, help="training examples")
    parser.add_argument("--seconds", type=float, default=120.0, help="virtual seconds")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--report", type=Path, help="print the table of an earlier file; run nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "scaling.jsonl")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a run ended in an error."""
    options = parse(arguments)
    if options.report is not None:
        print(table(HEADER, cells(recorded(options.report))))
        return 0
    wanted = [
        ScalingRow(name, seed, slots, val, options.train, options.seconds)
        for seed in range(options.seeds)
        for val in options.vals
        for name in options.methods
        for slots in options.slots
    ]
    there = {row.key: row for row in recorded(options.out)}
    rows = [there[row.key] for row in wanted if row.key in there]
    for row in made([row for row in wanted if row.key not in there], options.jobs):
        append_json_lines(options.out, [{"benchmark": "scaling", **asdict(row)}])
        rows.append(row)
        print(
            f"{row.method}, {row.slots} slots, {row.val} examples, seed {row.seed}: {row.error or 'done'}", flush=True
        )
    print(table(HEADER, cells([row for row in rows if not row.error])))
    return int(any(row.error for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
