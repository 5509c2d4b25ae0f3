"""AsyncACE against its synchronous form: `python -m benchmarks.ace`.

Both have the same slots, the same model and the same time; lockstep is ACE's reference loop (docs/ace.md), one sample
at a time, with validations on all slots. In virtual time by default (no server, any machine): house rules, which the
reflector reads from the feedback and the curator writes into the playbook, alone or on the rows and the program of a
named workload. With `--api-base` and `--model` on a real server, with the workload's own metric.

What is read at the limit: samples that came through to the playbook, and the best score of the playbooks that were
validated by then. What drains afterwards counts for nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import dspy

from benchmarks.ace_runs import Row, on_server, virtually
from benchmarks.backends import Backend
from benchmarks.batching import PROFILES
from benchmarks.models import DEFAULT_MODEL, REPLY_MODELS
from benchmarks.results import RESULTS, Spread, append_json_lines, ratio, shown, table
from benchmarks.tasks import TASKS
from benchmarks.workloads.registry import workload_names

SCHEDULES = ("lockstep", "async")
TARGET_SAMPLES = 2.5


def planned(options: argparse.Namespace) -> list[Row]:
    """Every run, without its figures."""
    backends = [options.model] if options.api_base else options.profiles
    runs = product(backends, options.tasks, range(options.seeds), SCHEDULES)
    sizes = (options.train, options.val, options.eval_every, "" if options.api_base else options.model)
    rows = [
        Row(task, schedule, backend, seed, options.slots, options.seconds, *sizes)
        for backend, task, seed, schedule in runs
    ]
    return list({row.key: row for row in rows}.values())


def made(options: argparse.Namespace, rows: Sequence[Row]) -> Iterator[Row]:
    """Every run, in order."""
    if options.api_base:
        backend = Backend(
            api_base=options.api_base, max_tokens=options.max_tokens, reflection_tokens=options.reflection_tokens
        )
        task_lm, reflection_lm = backend.lms(options.model)
        adapter = dspy.ChatAdapter(use_json_adapter_fallback=options.json_fallback)
        yield from (on_server(row, task_lm, reflection_lm, adapter) for row in rows)
    elif options.jobs == 1:
        yield from map(virtually, rows)
    else:
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            yield from pool.map(virtually, rows)


def report(rows: Sequence[Row]) -> str:
    """A line for each schedule, medians over the seeds, and whether the targets are met."""
    groups: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        if not row.error:
            backend = f"{row.backend}, {row.model}" if row.model else row.backend
            groups.setdefault((row.task, backend), {}).setdefault(row.schedule, []).append(row)
    lines: list[list[str]] = []
    verdicts: list[str] = []
    for (task, backend), of in groups.items():
        for schedule, own in of.items():
            scores = [row.best_score for row in own if row.best_score is not None]
            figures = [str(Spread.of(row.samples_per_minute for row in own)), str(Spread.of(scores)) if scores else "-"]
            calls = shown(statistics.median(row.metric_calls for row in own), ".0f")
            lines.append([task, backend, schedule, *figures, calls, str(len(own))])
        if set(of) == set(SCHEDULES):
            verdicts.append(_verdict(f"{task}, {backend}", of))
    header = ["task", "backend", "schedule", "samples/min", "best score", "metric calls", "seeds"]
    return "\n".join([table(header, lines), "", *verdicts])


def _verdict(where: str, of: dict[str, list[Row]]) -> str:
    speed = ratio(*(statistics.median(r.samples for r in of[name]) for name in ("async", "lockstep")))
    scores = [statistics.median(r.best_score or 0.0 for r in of[name]) for name in ("async", "lockstep")]
    met = speed is not None and speed >= TARGET_SAMPLES and scores[0] >= scores[1]
    word = "met" if met else "MISSED"
    return f"{where}: {shown(speed, '.1f')} x the samples, score {scores[0]:.3f} against {scores[1]:.3f}: {word}"


def recorded(path: Path) -> list[Row]:
    """The runs of a results file; of the same run measured twice, the later."""
    names = {one.name for one in fields(Row)}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [Row(**{name: value for name, value in line.items() if name in names}) for line in lines]
    return list({row.key: row for row in rows}.values())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ace", description=__doc__)
    parser.add_argument("--profiles", nargs="+", default=list(PROFILES), help="the simulated models")
    parser.add_argument(
        "--tasks", nargs="+", default=["few", "formula"], help=f"{', '.join(TASKS)}, or named workloads"
    )
    parser.add_argument("--seconds", type=float, default=240.0, help="the fixed time")
    parser.add_argument("--slots", type=int, default=64, help="requests in flight at most")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds")
    parser.add_argument("--train", type=int, default=60, help="training examples")
    parser.add_argument("--val", type=int, default=60, help="validation examples")
    parser.add_argument("--eval-every", type=int, default=5, help="samples between two validations")
    parser.add_argument("--jobs", type=int, default=1, help="virtual runs side by side")
    parser.add_argument("--api-base", help="of a real server, such as http://127.0.0.1:8000/v1")
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help=f"the simulated model ({', '.join(REPLY_MODELS)}), or the real server's"
    )
    parser.add_argument("--max-tokens", type=int, default=1024, help="of a reply of the real model to the task")
    parser.add_argument("--reflection-tokens", type=int, default=4096, help="of its reflections and operations")
    parser.add_argument(
        "--no-json-fallback", dest="json_fallback", action="store_false",
        help="do not ask a real model again, as dspy does, for JSON when its reply does not parse",
    )  # fmt: skip
    parser.add_argument("--report", type=Path, help="print the tables of an earlier file; run nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "ace.jsonl")
    options = parser.parse_args(arguments)
    if bool(options.api_base) == (options.model in REPLY_MODELS):
        parser.error("--api-base and --model belong together: a real server, and the model that it serves")
    known = workload_names() if options.api_base else [*workload_names(), *TASKS]
    unknown = [task for task in options.tasks if task.partition(":")[0] not in known]
    if unknown:
        parser.error(f"--tasks {' '.join(unknown)}: choose from {', '.join(known)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a run ended in an error, whatever became of the targets."""
    options = parse(arguments)
    if options.report is not None:
        print(report(recorded(options.report)))
        return 0
    os.environ.setdefault("TQDM_DISABLE", "1")
    rows: list[Row] = []
    for row in made(options, planned(options)):
        append_json_lines(
            options.out, [{"benchmark": "ace", **asdict(row), "samples_per_minute": row.samples_per_minute}]
        )
        print(f"{row.task} {row.backend} seed {row.seed} {row.schedule}: {row.samples} samples, ", end="")
        print(f"{shown(row.best_score, '.3f')} {row.error}", flush=True)
        rows.append(row)
    print("\n".join(["", report(rows)]))
    return int(any(row.error for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
