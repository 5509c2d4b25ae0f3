"""Workloads side by side: `python -m benchmarks.bench`, in a checkout also `flashevolve bench`.

Every method gets the same rows, slots, seed and time, and a run of its own on the same backend: a simulated server with
the workload's prompts and house rules as what there is to learn (`benchmarks.workloads.simulated`), or any server with
OpenAI's API and the workload's own metric. A bench that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import dspy

from benchmarks.measure import Bench, NoMeter
from benchmarks.methods import Limits, Workload, method
from benchmarks.report import COLUMNS, cells, page, read
from benchmarks.results import RESULTS, Result, shown, table, write_result
from benchmarks.vllm_cpu import VllmMeter
from benchmarks.workloads.registry import workload_named, workload_names
from benchmarks.workloads.rows import RowsMissing
from benchmarks.workloads.simulated import served, simulated
from dspy_flashevolve.sim import HouseRules
from dspy_flashevolve.sim.profiles import PROFILES

METHODS = ("gepa", "gepa-independent-10", "combee-9", "async-full", "async")


@dataclass(frozen=True)
class Backend:
    """Who answers.

    Attributes:
        profile: Of the simulated server; unused with an `api_base`.
        api_base: Of a server with OpenAI's API; None for the simulated one.
        model: Its model.
        time_scale: The simulated server's seconds in a real one.
        max_tokens: Longest reply of a real model to the task; reflections may take four times as many.
        is_vllm: Whether the server has vLLM's `/metrics`.
    """

    profile: str = "h100-qwen3-8b"
    api_base: str | None = None
    model: str = "simulated"
    time_scale: float = 1.0
    max_tokens: int = 1024
    is_vllm: bool = False

    @property
    def name(self) -> str:
        """For the results."""
        return self.profile if self.api_base is None else self.model

    @contextmanager
    def serving(
        self, benchmark: str, name: str, train: int | None, val: int | None, seed: int
    ) -> Iterator[tuple[Bench, Workload]]:
        """The bench, and the workload with its language models.

        Raises:
            RowsMissing: The workload's rows are nowhere.
            ValueError: There is no such workload, or it has fewer rows.
        """
        chosen = workload_named(name, train=train, val=val, test=0, seed=seed)
        if self.api_base is None:
            asked = simulated(chosen, HouseRules(seed=seed))
            with served(benchmark, asked, self.profile, seed, self.time_scale) as pair:
                yield pair
            return
        key = {"api_base": self.api_base, "api_key": "none", "cache": False}
        model = f"openai/{self.model}"
        task_lm = dspy.LM(model, max_tokens=self.max_tokens, **key)
        reflection_lm = dspy.LM(model, max_tokens=4 * self.max_tokens, temperature=1.0, **key)
        meter = VllmMeter(self.api_base) if self.is_vllm else NoMeter()
        yield Bench(benchmark, self.model, meter), chosen.served(task_lm, reflection_lm)


def key_of(result: Result) -> tuple[object, ...]:
    """What a run was to be: workload and sizes (in the benchmark's name), backend, method, seed, slots, limit."""
    return result.benchmark, result.backend, result.method, result.seed, result.slots, result.call_limit


def title(workload: str, train: int | None, val: int | None, seconds: float | None) -> str:
    """The benchmark's name in the results; it tells runs of other sizes and limits apart.

    Example:
        >>> title("aime", 20, None, 120)
        'bench-aime-train20-120s'
    """
    parts = [f"train{train}" if train is not None else "", f"val{val}" if val is not None else ""]
    parts.append(f"{seconds:g}s" if seconds else "")
    return "-".join(["bench", workload, *(part for part in parts if part)])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=__doc__)
    parser.add_argument("--workload", nargs="+", choices=workload_names(), default=workload_names(), metavar="NAME",
                        help=", ".join(workload_names()))  # fmt: skip
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="benchmarks/README.md names them")
    parser.add_argument("--backend", choices=sorted(PROFILES), default="h100-qwen3-8b", help="of the simulated server")
    parser.add_argument("--api-base", help="a server with OpenAI's API, instead of the simulated one")
    parser.add_argument("--model", default="simulated", help="its model")
    parser.add_argument(
        "--vllm", action="store_true", help="the server is vLLM: read tokens and requests from /metrics"
    )
    parser.add_argument("--max-tokens", type=int, default=1024, help="longest reply of a real model")
    parser.add_argument("--seconds", type=float, help="a time limit, in the server's time; default 120 without --calls")
    parser.add_argument("--calls", type=int, help="a budget of metric calls")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--train", type=int, help="training examples; default the workload's own")
    parser.add_argument("--val", type=int, help="validation examples; default the workload's own")
    parser.add_argument("--time-scale", type=float, default=1.0, help="the simulated server's seconds in a real one")
    parser.add_argument("--out", type=Path, default=RESULTS / "bench.jsonl")
    parser.add_argument("--html", type=Path, help="write the report there")
    options = parser.parse_args(arguments)
    if options.seconds is None and options.calls is None:
        options.seconds = 120.0
    if options.api_base is not None and options.time_scale != 1.0:
        parser.error("--time-scale is the simulated server's; a real one keeps its own time")
    try:
        for name in options.methods:
            method(name)
    except ValueError as error:
        parser.error(str(error))
    return options


def runs(options: argparse.Namespace, there: dict[tuple[object, ...], Result]) -> Iterator[Result]:
    """Every run that the file does not have yet, as it ends."""
    backend = Backend(
        options.backend, options.api_base, options.model, options.time_scale, options.max_tokens, options.vllm
    )
    for workload in options.workload:
        benchmark = title(workload, options.train, options.val, options.seconds)
        for seed in range(options.seeds):
            limits = Limits(options.slots, seed, options.seconds, options.calls, options.time_scale)
            missing = [
                name
                for name in options.methods
                if (benchmark, backend.name, name, seed, options.slots, options.calls) not in there
            ]
            if not missing:
                continue
            with backend.serving(benchmark, workload, options.train, options.val, seed) as (bench, task):
                for name in missing:
                    yield bench.run(method(name), task, limits)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; 1 when a run ended in an error or rows are missing."""
    options = parse(arguments)
    recorded = [result for result, _ in read(options.out)] if options.out.is_file() else []
    there = {key_of(result): result for result in recorded if not result.error}
    failed = False
    try:
        for result in runs(options, there):
            write_result(options.out, result)
            failed = failed or bool(result.error)
            score = shown(result.best_score, ".3f")
            print(
                f"{result.benchmark}, {result.backend}, seed {result.seed}: {result.method}: {score} {result.error}",
                flush=True,
            )
    except RowsMissing as error:
        print(error, file=sys.stderr)
        return 1
    lines = read(options.out) if options.out.is_file() else []
    for benchmark, backend in dict.fromkeys((result.benchmark, result.backend) for result, _ in lines):
        mine = [result for result, _ in lines if (result.benchmark, result.backend) == (benchmark, backend)]
        print(f"\n{benchmark} on {backend}\n{table(COLUMNS, cells(mine))}")
    if options.html is not None:
        options.html.write_text(page(lines, options.html.with_suffix("")), encoding="utf-8")
        print(options.html)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
