"""How much better the program gets: `python -m benchmarks.score`.

Best fully validated score of each method, over several seeds: once at a fixed time, and once at an equal number of
metric calls. AsyncGEPA must never spend more calls than it was given.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

from benchmarks.methods import Limits, method
from benchmarks.results import RESULTS, Result, Spread, ratio, shown, table, write_result
from benchmarks.throughput import best_independent, median_of
from benchmarks.trajectory import Point
from benchmarks.workloads.house_rules import Setting, add_arguments, setting, simulated

METHODS = ("gepa", "gepa-independent-4", "gepa-independent-10", "gepa-independent-40", "async")
HEADER = (
    "method", "best score (min-max)", "gain", "x gepa's gain", "metric calls", "proposals", "generations",
    "seconds", "overshoot",
)  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.score", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=120.0, help="the fixed time, in the server's time; 0 to skip")
    parser.add_argument("--calls", type=int, default=600, help="the equal number of metric calls; 0 to skip")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds")
    parser.add_argument("--jobs", type=int, default=1, help="seeds that run side by side, each on a server of its own")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--report", type=Path, help="print the tables of an earlier file; run nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "score.jsonl")
    return parser.parse_args(arguments)


def best(result: Result) -> float | None:
    """The best fully validated score; with a budget, of the candidates that it paid for: an overshoot buys nothing."""
    if result.call_limit is None:
        return result.best_score
    points = [Point(*row) for row in result.trajectory]  # pyright: ignore[reportArgumentType]
    scores = [p.best_score for p in points if p.metric_calls <= result.call_limit and p.best_score is not None]
    return max(scores, default=result.seed_score)


def recorded(path: Path, condition: str) -> list[Result]:
    """The results of a file that an earlier run of this command wrote, for `condition` ("time" or "calls")."""
    known = {field.name for field in fields(Result)}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Result(**{name: value for name, value in row.items() if name in known})
        for row in rows
        if row["benchmark"] == f"score-{condition}"
    ]


def gain(result: Result) -> float | None:
    """How far the best score lies above the seed program's in the same run."""
    reached = best(result)
    return None if reached is None or result.seed_score is None else reached - result.seed_score


def measure(names: Sequence[str], chosen: Setting, limits: Limits, out: Path) -> list[Result]:
    """Every method once, with the seed of the limits."""
    results: list[Result] = []
    kind = "calls" if limits.metric_calls else "time"
    with simulated(f"score-{kind}", chosen, limits.seed) as (bench, workload):
        for name in names:
            result = bench.run(method(name), workload, limits)
            write_result(out, result)
            results.append(result)
            spent = f"{result.total_metric_calls} calls, {result.total_seconds:.0f} s"
            score = shown(best(result), ".3f")
            print(f"seed {limits.seed}, fixed {kind}: {name}: {score} after {spent} {result.error}", flush=True)
    return results


def rows(results: Sequence[Result]) -> list[list[str]]:
    """The table's cells, a row a method."""
    reference = median_of(results, "gepa", gain)
    cells: list[list[str]] = []
    for name in dict.fromkeys(result.method for result in results):
        mine = [result for result in results if result.method == name]
        scores = [score for score in map(best, mine) if score is not None]
        mine_gain = median_of(mine, name, gain)
        cells.append([
            name,
            str(Spread.of(scores)) if scores else "-",
            shown(mine_gain, "+.3f"),
            shown(ratio(mine_gain, reference), ".2f"),
            shown(median_of(mine, name, lambda result: result.metric_calls), ".0f"),
            shown(median_of(mine, name, lambda result: result.proposals), ".0f"),
            shown(median_of(mine, name, lambda result: result.depth), ".0f"),
            shown(median_of(mine, name, lambda result: result.total_seconds), ".0f"),
            str(max(result.overshoot for result in mine)),
        ])  # fmt: skip
    return cells


def verdicts(results: Sequence[Result], condition: str) -> list[str]:
    """A line for each rival of AsyncGEPA: medians, and in how many seeds it was at least as good."""
    rivals = [name for name in ("gepa", best_independent(results, best)) if name]
    ours = {result.seed: best(result) for result in results if result.method == "async"}
    lines: list[str] = []
    for rival in rivals:
        theirs = {result.seed: best(result) for result in results if result.method == rival}
        mine, other = median_of(results, "async", best), median_of(results, rival, best)
        if mine is None or other is None:
            continue
        pairs = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
        won = sum(a is not None and b is not None and a >= b for a, b in pairs)
        word = "ahead of" if mine > other else "level with" if mine == other else "behind"
        lines.append(f"{condition}: async {mine:.3f} is {word} {rival} {other:.3f}; {won} of {len(pairs)} seeds")
    return lines


def overshoots(results: Sequence[Result]) -> list[str]:
    """AsyncGEPA's runs that spent more metric calls than they had: there must be none."""
    return [
        f"seed {result.seed}: {result.method} spent {result.overshoot} metric calls more than {result.call_limit}"
        for result in results
        if result.method.startswith("async") and result.overshoot > 0
    ]


def _report(results: Sequence[Result], condition: str) -> None:
    print()
    print(condition)
    print(table(HEADER, rows(results)))
    print("\n".join(verdicts(results, condition)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a run ended in an error or AsyncGEPA overshot its budget."""
    options = parse(arguments)
    if options.report is not None:
        for condition, words in (("time", "at the fixed time"), ("calls", "at the equal number of metric calls")):
            if results := recorded(options.report, condition):
                _report(results, words)
        return 0
    chosen, every_result = setting(options), []
    for seconds, calls in ((options.seconds, None), (None, options.calls)):
        if not (seconds or calls):
            continue
        results: list[Result] = []
        limits = [Limits(options.slots, seed, seconds, calls, options.time_scale) for seed in range(options.seeds)]
        run = partial(measure, options.methods, chosen, out=options.out)
        if options.jobs > 1:
            with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
                results += chain.from_iterable(pool.map(run, limits))
        else:
            results += chain.from_iterable(map(run, limits))
        _report(results, f"at {seconds:.0f} seconds" if seconds else f"at {calls} metric calls")
        every_result += results
    problems = overshoots(every_result) + [f"{r.method}, seed {r.seed}: {r.error}" for r in every_result if r.error]
    print("\n".join(["", *problems] if problems else ["", "async never overshot its budget"]))
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
