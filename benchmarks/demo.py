"""`make demo`: AsyncGEPA beside dspy.GEPA on the embedded server, in under two minutes.

The prompts are IFBench's where its rows are at hand (`FLASHEVOLVE_DATA`, or `../shared/data`), else a few dozen of
our own. What a good answer must contain is known (`dspy_flashevolve.sim.HouseRules`), so the best score is known too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.methods import Limits, method
from benchmarks.results import Result, ratio, shown, table, write_result
from benchmarks.workloads.house_rules import MODEL, Setting, simulated
from benchmarks.workloads.rows import data_folder
from dspy_flashevolve.sim import HouseRules

METHODS = ("gepa", "async")
HEADER = ("optimizer", "proposals/min", "tokens/s", "slots busy", "best score", "generations", "metric calls")
NAMES = {"gepa": "dspy.GEPA", "async": "AsyncGEPA"}


def prompts() -> tuple[list[str] | None, str]:
    """IFBench's prompts, or None for our own, and where they come from."""
    path = data_folder() / "ifbench" / "test.jsonl"
    if not path.is_file():
        return None, "the project's own questions (no IFBench rows at hand)"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [row["prompt"] for row in rows], f"{len(rows)} IFBench prompts"


def row(result: Result) -> list[str]:
    """A line of the table."""
    return [
        NAMES[result.method],
        f"{result.proposals_per_minute:.1f}",
        f"{result.tokens_per_second:.0f}",
        shown(result.mean_running, ".1f"),
        shown(result.best_score, ".3f"),
        str(result.depth),
        str(result.metric_calls),
    ]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of each run, in the server's time")
    parser.add_argument("--time-scale", type=float, default=3.0, help="the server's seconds in a real one")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON lines to append the results to; default: nothing is written")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both, one after the other on the same server, and print the table."""
    options = parse(arguments)
    chosen = Setting("h100-qwen3-8b", options.time_scale, train=60, val=60, rules=24)
    limits = Limits(options.slots, options.seed, options.seconds, time_scale=options.time_scale)
    questions, origin = prompts()
    here = options.seconds / options.time_scale
    print(
        f"A simulated vLLM server (Qwen3-8B on an H100), {origin}. Both optimizers get the same program, "
        f"{options.slots} requests in flight and {options.seconds:g} s of the server's time.\nStarting the server ...",
        flush=True,
    )
    results: list[Result] = []
    with simulated("demo", chosen, options.seed, questions) as (bench, workload):
        for name in METHODS:
            print(f"{NAMES[name]}: runs for about {here:g} s ...", flush=True)
            result = bench.run(method(name), workload, limits)
            print(
                f"  best score {shown(result.best_score, '.3f')} after {result.metric_calls} metric calls", flush=True
            )
            results.append(result)
            if options.out is not None:
                write_result(options.out, result)
    print("\n" + table(HEADER, [row(result) for result in results]))
    gepa, ours = results
    more = ratio(ours.proposals_per_minute, gepa.proposals_per_minute)
    optimum = HouseRules(rules=chosen.rules, seed=options.seed, reply_model=MODEL).optimum
    print(f"\nAsyncGEPA made {shown(more, '.1f')} times the proposals a minute. The score can reach {optimum:.2f}.")
    for result in results:
        if result.error:
            print(f"{NAMES[result.method]} failed: {result.error}")
    return int(any(result.error for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
