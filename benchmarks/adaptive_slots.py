"""Adaptive slots beside fixed ones on a real server: `python -m benchmarks.adaptive_slots`.

The same workload as `benchmarks.vllm_cpu`: AsyncGEPA with adaptive slots, which starts low and is told nothing of the
server, and AsyncGEPA with each fixed number of slots. The limit's course is printed and written beside the figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import dspy

from benchmarks.measure import Bench
from benchmarks.methods import Limits, Method, Workload, gepa_arguments
from benchmarks.results import RESULTS, Result, append_json_lines, ratio, shown, table
from benchmarks.trajectory import Recorder
from benchmarks.vllm_cpu import VllmMeter, workload
from benchmarks.workloads import ifeval

TARGET_SHARE = 0.9
HEADER = ("slots", "seconds", "metric calls", "tokens/s", "of the best fixed", "peak", "retried", "best score")


@dataclass
class Kept:
    """AsyncGEPA under some slots; keeps the figures of its run, which go with the program otherwise.

    Args:
        arguments: AsyncGEPA's.
        threads: `dspy.settings.num_threads`: where adaptive slots start.
    """

    arguments: dict[str, Any]
    threads: int
    stats: Any = None

    def compile(self, student: dspy.Module, *, trainset: list[Any], valset: list[Any]) -> dspy.Module:
        """AsyncGEPA's own."""
        from dspy_flashevolve import AsyncGEPA

        with dspy.context(num_threads=self.threads):
            program: Any = AsyncGEPA(**self.arguments).compile(student, trainset=trainset, valset=valset)
        self.stats = program.async_stats
        return program


@dataclass
class Slots:
    """One way to bound the requests in flight: a fixed number, or from `start` up to `most`."""

    most: int
    start: int | None = None
    kept: list[Kept] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For the tables."""
        return f"fixed-{self.most}" if self.start is None else f"adaptive-{self.start}-{self.most}"

    def method(self) -> Method:
        """AsyncGEPA with these slots."""

        def build(task: Workload, limits: Limits, recorder: Recorder) -> Kept:
            slots = {"num_threads": self.most}
            if self.start is not None:
                slots = {"num_threads": None, "max_concurrency": self.most}
            arguments = gepa_arguments(task, limits, recorder) | slots
            arguments |= {"max_seconds": limits.wall_seconds, "track_stats": True}
            self.kept.append(Kept(arguments, self.start or self.most))
            return self.kept[-1]

        return Method(self.name, build)

    @property
    def stats(self) -> Any:
        """`AsyncStats` of the run; `None` after an error."""
        return self.kept[-1].stats if self.kept else None


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adaptive_slots", description=__doc__)
    parser.add_argument("--api-base", default="http://127.0.0.1:8111/v1")
    parser.add_argument("--model", default="qwen05", help="the model's name on the server")
    parser.add_argument("--start", type=int, default=1, help="adaptive slots at first")
    parser.add_argument("--high", type=int, default=128, help="the most that they may become")
    parser.add_argument("--fixed", type=int, nargs="*", default=[32], help="fixed slots to compare with")
    parser.add_argument("--calls", type=int, default=200, help="metric calls of each run")
    parser.add_argument("--seconds", type=float, help="a time limit instead")
    parser.add_argument("--train", type=int, default=20)
    parser.add_argument("--val", type=int, default=20)
    parser.add_argument("--source", choices=sorted(ifeval.FILES), default="ifeval")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=160, help="longest reply of the task model")
    parser.add_argument("--reflection-tokens", type=int, default=512, help="longest reply of the reflection model")
    parser.add_argument("--out", type=Path, default=RESULTS / "adaptive_slots.jsonl")
    return parser.parse_args(arguments)


def course(stats: Any) -> list[list[Any]]:
    """Rows of (seconds, limit before, limit after, reason), for every change of the limit."""
    return [
        [round(change.seconds, 2), change.before, change.after, change.reason]
        for change in getattr(stats, "limit_changes", [])
    ]


def record(slots: Slots, result: Result) -> dict[str, object]:
    """A line of the results file."""
    stats = slots.stats
    return {
        **asdict(result),
        "tokens_per_second": result.tokens_per_second,
        "start": slots.start,
        "limit_changes": course(stats),
        "peak_slots": getattr(stats, "peak_slots", 0),
        "retried_requests": getattr(stats, "retried_requests", 0),
        "pauses": getattr(stats, "pauses", 0),
    }


def rows(runs: Sequence[tuple[Slots, Result]]) -> list[list[str]]:
    """The table's cells, a row a run."""
    best = max((result.tokens_per_second for slots, result in runs if slots.start is None), default=None)
    return [
        [
            slots.name,
            f"{result.total_seconds:.1f}",
            str(result.total_metric_calls),
            f"{result.tokens_per_second:.0f}",
            shown(ratio(result.tokens_per_second, best), ".0%"),
            str(getattr(slots.stats, "peak_slots", "-")),
            str(getattr(slots.stats, "retried_requests", "-")),
            shown(result.best_score, ".3f"),
        ]
        for slots, result in runs
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a run ended in an error."""
    options = parse(arguments)
    calls = None if options.seconds else options.calls
    task = workload(options)
    bench = Bench("adaptive_slots", options.model, VllmMeter(options.api_base))
    runs: list[tuple[Slots, Result]] = []
    for slots in (Slots(options.high, options.start), *(Slots(number) for number in options.fixed)):
        limits = Limits(slots.most, options.seed, options.seconds, calls)
        result = bench.run(slots.method(), task, limits)
        append_json_lines(options.out, [record(slots, result)])
        runs.append((slots, result))
        print(f"{slots.name}: {result.tokens_per_second:.0f} tokens/s {result.error}", flush=True)
        for seconds, before, after, reason in course(slots.stats):
            print(f"  {seconds:8.2f} s  {before:4d} -> {after:<4d} {reason}")
    print()
    print(table(HEADER, rows(runs)))
    print(f"target for adaptive, from {options.start} slots on: {TARGET_SHARE:.0%} of the best fixed number's tokens/s")
    return int(any(result.error for _, result in runs))


if __name__ == "__main__":
    raise SystemExit(main())
