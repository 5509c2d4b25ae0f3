"""Workloads side by side: `python -m benchmarks.bench`, in a checkout.

Every method gets the same rows, slots, seed and time, and a run of its own on the same backend: a simulated server with
the workload's prompts and house rules as what there is to learn (`benchmarks.workloads.simulated`), over HTTP or with
`--virtual` in virtual time; or any server with OpenAI's API and the workload's own metric. A bench that was interrupted
goes on where it stopped.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from benchmarks.backends import Backend
from benchmarks.batching import PROFILES
from benchmarks.methods import Limits, method
from benchmarks.models import DEFAULT_MODEL, REPLY_MODELS
from benchmarks.results import (
    RESULTS,
    Result,
    RunKey,
    Spread,
    commit,
    middle,
    ratio,
    read_results,
    shown,
    table,
    write_result,
)
from benchmarks.workloads.registry import definition_named, workload_named, workload_names
from benchmarks.workloads.rows import RowsMissing
from benchmarks.workloads.virtual import VirtualJob, run_job

METHODS = (
    "gepa", "gepa-independent-4", "gepa-independent-10", "gepa-independent-40", "gepa-pxn-3x3", "combee-10",
    "combee-40", "async-full", "async-guarded-8", "async-reflective", "async+slots=adaptive", "async",
)  # fmt: skip
"""All that are compared; `async` is the default."""
SECONDS = 120.0
BASELINE = "gepa"
COLUMNS = (
    "method", "seeds", "score", "gain", "validated", f"x {BASELINE}'s gain", "proposals a minute", f"x {BASELINE}'s",
    "metric calls", "tokens/s", "slots busy", "generations", "overshoot", "failed",
)  # fmt: skip


def title(workload: str, train: int | None, val: int | None, seconds: float | None) -> str:
    """The benchmark's name in the results; it tells runs of other sizes and limits apart.

    Example:
        >>> title("aime", 20, None, 120)
        'bench-aime-train20-120s'
    """
    parts = [f"train{train}" if train is not None else "", f"val{val}" if val is not None else ""]
    parts.append(f"{seconds:.10g}s" if seconds else "")
    return "-".join(["bench", workload, *(part for part in parts if part)])


def sizes(workload: str, options: argparse.Namespace) -> tuple[int | None, int | None]:
    """Training and validation examples that the options ask for; `None` for the workload's own number."""
    if options.most is None:
        return options.train, options.val
    usual = definition_named(workload).size
    if usual.train is None or usual.val is None:  # all rows, however many these are
        usual = workload_named(workload).size
    train = min(usual.train, options.most) if options.train is None else options.train
    return train, min(usual.val, options.most) if options.val is None else options.val


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=__doc__)
    parser.add_argument("--workload", nargs="+", choices=workload_names(), default=workload_names(), metavar="NAME",
                        help=", ".join(workload_names()))  # fmt: skip
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="benchmarks/README.md names them")
    parser.add_argument(
        "--backend", nargs="+", choices=sorted(PROFILES), default=["h100-qwen3-8b"], help="of the simulated model"
    )
    parser.add_argument("--virtual", action="store_true", help="the simulated model in virtual time")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, in virtual time")
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help=f"the simulated model ({', '.join(REPLY_MODELS)}), or a real one: its name on the server of --api-base, "
        "or litellm's name for it, as in openai/gpt-4o-mini, with the key in the environment",
    )
    parser.add_argument("--api-base", help="a server with OpenAI's API that serves the model")
    parser.add_argument(
        "--vllm", action="store_true", help="the server is vLLM: read tokens and requests from /metrics"
    )
    parser.add_argument("--max-tokens", type=int, default=1024, help="longest reply of a real model")
    parser.add_argument("--reflection-tokens", type=int, default=4096, help="longest reflection of a real model")
    parser.add_argument("--no-json-fallback", action="store_true", help="a reply that does not parse is a failure")
    parser.add_argument(
        "--seconds",
        nargs="+",
        default=[],
        help="a time limit, in the server's time: 120, NAME=600 for one workload, NAME@PROFILE=900 on one backend; "
        "default 120 without --calls",
    )
    parser.add_argument("--calls", type=int, help="a budget of metric calls")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--train", type=int, help="training examples; default the workload's own")
    parser.add_argument("--val", type=int, help="validation examples; default the workload's own")
    parser.add_argument("--most", type=int, help="examples that either split has at most, where no number is given")
    parser.add_argument("--time-scale", type=float, default=1.0, help="the simulated server's seconds in a real one")
    parser.add_argument("--out", type=Path, default=RESULTS / "bench.jsonl")
    parser.add_argument("--fresh", action="store_true", help="run again what the file has")
    options = parser.parse_args(arguments)
    options.simulated = options.model
    if options.model in REPLY_MODELS:
        options.model = None
    if options.model is None and (options.api_base is not None or options.vllm):
        parser.error("--api-base and --vllm need the --model that the server serves")
    for name in ("seeds", "slots", "jobs", "most", "train", "val", "calls"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is {value}, expected at least 1")
    if options.vllm and options.api_base is None:
        parser.error("--vllm reads the server's /metrics: it needs its --api-base, as in http://127.0.0.1:8000/v1")
    if options.model is not None and (options.virtual or options.time_scale != 1.0):
        parser.error("--virtual and --time-scale are the simulated model's; a real one keeps its own time")
    if options.virtual and options.time_scale != 1.0:
        parser.error("--virtual needs no --time-scale: its seconds take as long as the work between them")
    try:
        for name in options.methods:
            method(name, options.virtual)
        options.seconds = _seconds(options.seconds, options)
    except ValueError as error:
        parser.error(str(error))
    return options


Known = Collection[RunKey]


def runs(options: argparse.Namespace, there: Known) -> Iterator[Result]:
    """Every run that the file does not have yet, as it ends."""
    if options.virtual:
        yield from _in_virtual_time(options, there)
        return
    for name in options.backend if options.model is None else options.backend[:1]:
        backend = Backend(
            name,
            options.api_base,
            options.model,
            options.time_scale,
            options.max_tokens,
            options.reflection_tokens,
            options.vllm,
            not options.no_json_fallback,
            options.simulated,
        )
        yield from _on(backend, options, there)


def _on(backend: Backend, options: argparse.Namespace, there: Known) -> Iterator[Result]:
    for workload in options.workload:
        seconds, (train, val) = options.seconds[workload, backend.profile], sizes(workload, options)
        benchmark = title(workload, train, val, seconds)
        for seed in range(options.seeds):
            limits = Limits(options.slots, seed, seconds, options.calls, options.time_scale)
            run = RunKey(benchmark, backend.name, backend.settings, options.slots, options.calls, "", seed)
            missing = [name for name in options.methods if run._replace(method=name) not in there]
            if not missing:
                continue
            with backend.serving(benchmark, workload, train, val, seed) as (bench, task):
                for name in missing:
                    yield bench.run(method(name), task, limits)


def _in_virtual_time(options: argparse.Namespace, there: Known) -> Iterator[Result]:
    jobs = [
        VirtualJob(
            title(workload, *sizes(workload, options), options.seconds[workload, profile]),
            workload,
            profile,
            name,
            *sizes(workload, options),
            Limits(options.slots, seed, options.seconds[workload, profile], options.calls),
            options.simulated,
        )
        for profile in options.backend
        for workload in options.workload
        for seed in range(options.seeds)
        for name in options.methods
    ]
    missing = [job for job in jobs if job.key not in there]
    if options.jobs <= 1:
        yield from map(run_job, missing)
        return
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_job, missing)


def _seconds(written: Sequence[str], options: argparse.Namespace) -> dict[tuple[str, str], float | None]:
    """(Workload, profile) -> seconds; raises `ValueError` for what is not above 0, or no run of the command.

    What names a workload counts more than what names none, and what names a profile more than that.
    """
    default = None if options.calls else SECONDS
    seconds = dict.fromkeys(product(options.workload, options.backend), default)
    for one in sorted(written, key=lambda text: (text.count("="), text.count("@"))):
        place, _, number = one.rpartition("=")
        name, _, profile = place.partition("@")
        chosen = [key for key in seconds if name in ("", key[0]) and profile in ("", key[1])]
        if not chosen:
            raise ValueError(f"--seconds {one}: there is no run of {place!r}")
        if not 0 < _number(number) < math.inf:
            raise ValueError(f"--seconds {one}: expected seconds, more than 0")
        seconds.update(dict.fromkeys(chosen, float(number)))
    return seconds


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def named(result: Result) -> str:
    """What the runs that are compared have in common, for people."""
    limit = "" if result.call_limit is None else f", {result.call_limit} metric calls"
    settings = f", {result.settings}" if result.settings else ""
    return f"{result.benchmark} on {result.backend}, {result.slots} slots{limit}{settings}"


def cells(results: Sequence[Result]) -> list[list[str]]:
    """A line a method, in the order in which they came; medians over the seeds, failed runs left out.

    The score is the true one where it is known (`Result.score`), and validated is what the validation set says of it.
    """
    lines: list[list[str]] = []
    sound = [result for result in results if not result.error]
    base = [result for result in sound if result.method == BASELINE]
    for name in dict.fromkeys(result.method for result in results):
        mine = [result for result in sound if result.method == name]
        scores = [result.score for result in mine if result.score is not None]
        gained, pace = middle(mine, lambda result: result.gain), middle(mine, lambda result: result.pace)
        lines.append([
            name,
            str(len({result.seed for result in mine})),
            str(Spread.of(scores)) if scores else "-",
            shown(gained, "+.3f"),
            shown(middle(mine, lambda result: result.best_score), ".2f"),
            shown(ratio(gained, middle(base, lambda result: result.gain)), ".2f"),
            shown(pace, ".1f"),
            shown(ratio(pace, middle(base, lambda result: result.pace)), ".1f"),
            shown(middle(mine, lambda result: result.metric_calls), ".0f"),
            shown(middle(mine, lambda result: result.tokens_per_second), ".0f"),
            shown(middle(mine, lambda result: result.mean_running), ".1f"),
            shown(middle(mine, lambda result: result.depth), ".0f"),
            str(max((result.overshoot for result in mine), default=0)),
            str(sum(bool(result.error) for result in results if result.method == name)),
        ])  # fmt: skip
    return lines


def report(results: Sequence[Result]) -> str:
    """A table for each setting."""
    groups = [
        [result for result in results if result.setting == setting]
        for setting in dict.fromkeys(result.setting for result in results)
    ]
    return "\n\n".join(f"{named(group[0])}\n{table(COLUMNS, cells(group))}" for group in groups)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; 1 when a run ended in an error or rows are missing."""
    return carry_out(parse(arguments), report)


def carry_out(options: argparse.Namespace, report: Callable[[Sequence[Result]], str]) -> int:
    """Make the runs that the file lacks, write each as it ends, and print a report on the file's rows; see `main`."""
    recorded = read_results(options.out) if options.out.is_file() and not options.fresh else []
    there = {result.key for result in recorded if not result.error}
    if there:
        print(f"{options.out} has {len(there)} runs, which are not made again; --fresh makes them again", flush=True)
    failed = False
    commit()  # before the code changes under a long run
    try:
        for result in runs(options, there):
            write_result(options.out, result)
            failed = failed or bool(result.error)
            score = shown(result.score, ".3f")
            print(
                f"{result.benchmark}, {result.backend}, seed {result.seed}: {result.method}: {score} {result.error}",
                flush=True,
            )
    except (RowsMissing, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print("\n" + report(read_results(options.out) if options.out.is_file() else []))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
