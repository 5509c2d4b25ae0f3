"""How much faster AsyncGEPA proposes: `python -m benchmarks.throughput`.

Proposals a minute, tokens a second and slots busy of each method on a simulated server, beside the ceiling: the
tokens a second of a plain parallel evaluation with the same slots. With `--seconds 0 --calls 300`, the seconds until
that many metric calls are spent.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path

from benchmarks.methods import Limits, method
from benchmarks.results import RESULTS, Result, Spread, middle, ratio, shown, table, write_result
from benchmarks.workloads.house_rules import add_arguments, setting, simulated

METHODS = ("evaluate", "gepa", "gepa-independent-4", "gepa-independent-10", "gepa-independent-40", "async")
TARGET_OVER_GEPA = 8.0
TARGET_OVER_INDEPENDENT = 3.5
TARGET_CEILING_SHARE = 0.92
HEADER = (
    "method", "seconds", "proposals/min", "tokens/s", "slots busy", "refused", "best score", "metric calls",
    "x gepa", "x independent", "of ceiling",
)  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=__doc__)
    add_arguments(parser)
    parser.add_argument(
        "--seconds", type=float, default=180.0, help="time limit of a run, in the server's time; 0 for none"
    )
    parser.add_argument("--calls", type=int, help="metric calls that a run may spend; default any number")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from 0")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--out", type=Path, default=RESULTS / "throughput.jsonl")
    options = parser.parse_args(arguments)
    if not options.seconds and options.calls is None:
        parser.error("--seconds 0 needs --calls: a run must end")
    return options


def measure(options: argparse.Namespace) -> list[Result]:
    """Every method with every seed, seed by seed, each result written as soon as it is there."""
    methods = [method(name) for name in options.methods]
    results: list[Result] = []
    for seed in range(options.seeds):
        limits = Limits(options.slots, seed, options.seconds or None, options.calls, options.time_scale)
        with simulated("throughput", setting(options), seed) as (bench, workload):
            for chosen in methods:
                result = bench.run(chosen, workload, limits)
                write_result(options.out, result)
                results.append(result)
                print(f"seed {seed}: {chosen.name}: {result.pace:.1f} proposals/min, "
                      f"{result.tokens_per_second:.0f} tokens/s {result.error}", flush=True)  # fmt: skip
    return results


def median_of(results: Sequence[Result], name: str, figure: Callable[[Result], float | None]) -> float | None:
    """The median over the seeds of one method's figure; `None` without a run that has it."""
    return middle([result for result in results if result.method == name], figure)


def best_independent(results: Sequence[Result], figure: Callable[[Result], float | None]) -> str | None:
    """The independent sampling with the highest median of a figure, which a user would pick; `None` without one."""
    names = {result.method for result in results if result.method.startswith("gepa-independent")}
    return max(sorted(names), key=lambda name: median_of(results, name, figure) or 0.0, default=None)


def rows(results: Sequence[Result]) -> list[list[str]]:
    """The table's cells: medians over the seeds, and the ratios of medians."""
    pace, tokens = attrgetter("pace"), attrgetter("tokens_per_second")
    gepa, ceiling = median_of(results, "gepa", pace), median_of(results, "evaluate", tokens)
    rival = best_independent(results, pace)
    independent = median_of(results, rival, pace) if rival else None
    cells: list[list[str]] = []
    for name in dict.fromkeys(result.method for result in results):
        mine = [result for result in results if result.method == name]
        mine_pace = median_of(mine, name, pace) if name != "evaluate" else None
        cells.append([
            name,
            shown(median_of(mine, name, lambda result: result.total_seconds), ".0f"),
            "-" if mine_pace is None else str(Spread.of(map(pace, mine))),
            str(Spread.of(map(tokens, mine))),
            shown(median_of(mine, name, lambda result: result.mean_running), ".1f"),
            shown(median_of(mine, name, lambda result: result.refused), ".0f"),
            shown(median_of(mine, name, lambda result: result.best_score), ".3f"),
            shown(median_of(mine, name, lambda result: result.metric_calls), ".0f"),
            shown(ratio(mine_pace, gepa), ".2f"),
            shown(ratio(mine_pace, independent), ".2f"),
            shown(ratio(median_of(mine, name, tokens), ceiling), ".0%"),
        ])  # fmt: skip
    return cells


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a run ended in an error."""
    options = parse(arguments)
    results = measure(options)
    print()
    print(table(HEADER, rows(results)))
    print(
        f"targets for async: {TARGET_OVER_GEPA}x gepa, {TARGET_OVER_INDEPENDENT}x the best independent sampling, "
        f"{TARGET_CEILING_SHARE:.0%} of the ceiling"
    )
    for result in results:
        if result.error:
            print(f"{result.method}, seed {result.seed}, ended with {result.error}")
    return int(any(result.error for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
