"""AsyncMetaHarness beside its synchronous form: `python -m benchmarks.harness`.

The same optimizer with `schedule="async"` and `"lockstep"`, in the same slots, on the same model: validated candidates
a minute, and the best score at the same moment. Three backends:

    --backend virtual   virtual time, the simulated model in the process, and a stand-in for the sandbox (default)
    --backend http      the simulated server over HTTP and the real sandbox; needs cores to spare
    --api-base ...      a real server, the real sandbox, and the rows of a named workload
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import dspy

from benchmarks.in_process import InProcessStandIn
from benchmarks.results import RESULTS, Spread, append_json_lines, ratio, shown, table
from benchmarks.workloads.registry import workload_named
from dspy_flashevolve import AsyncMetaHarness
from dspy_flashevolve.sim import HouseRules, SimServer
from dspy_flashevolve.sim.virtual import SimulatedModel, run

TARGET = 4.0
"""Validated candidates a minute, async over lockstep."""
HEADER = ("schedule", "candidates a minute", "best score", "candidates", "failed", "generations", "mean gap", "busy")
Schedule = Literal["async", "lockstep"]


@dataclass(frozen=True)
class Row:
    """One run; rates and scores are those of the first `seconds` of it, in the server's time.

    Attributes:
        backend: "virtual", "http", or the real model.
        schedule: "async" or "lockstep".
        proposers: agents that write at once; one in lockstep.
        seed: of task, model and optimizer.
        slots: requests in flight at most.
        seconds: the limit.
        total_seconds: until what ran at the limit was finished.
        candidates: admitted by the limit, the seed left out.
        best_score, seed_score: on the validation set.
        failed: candidates that failed, over the whole run.
        generations: from the seed to the deepest candidate, over the whole run.
        mean_gap: admissions between what a candidate's proposer saw and its own.
        occupancy: share of slot-seconds in use.
    """

    backend: str
    schedule: str
    proposers: int
    seed: int
    slots: int
    seconds: float
    total_seconds: float
    candidates: int
    best_score: float
    seed_score: float
    failed: int
    generations: int
    mean_gap: float
    occupancy: float

    @property
    def name(self) -> str:
        """The row's method."""
        return self.schedule if self.schedule == "lockstep" else f"async, {self.proposers} proposers"

    @property
    def candidates_a_minute(self) -> float:
        """Validated candidates a minute."""
        return 60 * self.candidates / self.seconds


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harness", description=__doc__)
    parser.add_argument("--backend", choices=["virtual", "http"], default="virtual")
    parser.add_argument("--api-base", help="a real server's address, with /v1")
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="the model that it serves")
    parser.add_argument("--workload", default="symptom2disease", help="whose rows a real server gets")
    parser.add_argument("--profile", default="h100-qwen3-8b", help="the simulated model")
    parser.add_argument("--time-scale", type=float, default=4.0, help="of the simulated server over HTTP")
    parser.add_argument("--seconds", type=float, default=300.0, help="the fixed time, in the server's seconds")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--proposers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--k", type=int, default=2, help="candidates a proposal")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--train", type=int, default=20)
    parser.add_argument("--val", type=int, default=30)
    parser.add_argument("--rules", type=int, default=24)
    parser.add_argument("--out", type=Path, default=RESULTS / "harness.jsonl")
    return parser.parse_args(arguments)


def measured(options: argparse.Namespace, schedule: Schedule, proposers: int, seed: int) -> Row:
    """One run."""
    if options.api_base:
        return _real(options, schedule, proposers, seed)
    return (_virtual if options.backend == "virtual" else _http)(options, schedule, proposers, seed)


def _virtual(options: argparse.Namespace, schedule: Schedule, proposers: int, seed: int) -> Row:
    task = HouseRules(rules=options.rules, seed=seed)
    model = SimulatedModel(options.profile, seed=seed, reply_model=task.reply_model)

    async def main() -> Row:
        lm, began = model.lm(), asyncio.get_running_loop().time()
        optimizer = _optimizer(options, schedule, proposers, seed, task.metric, lm, 1.0, sandbox=InProcessStandIn())
        with dspy.context(lm=lm):
            program = await optimizer.acompile(_student(task), **_house_rules(options, task))
        return _row(options, "virtual", optimizer, program, seed, asyncio.get_running_loop().time() - began, 1.0)

    return run(main)


def _http(options: argparse.Namespace, schedule: Schedule, proposers: int, seed: int) -> Row:
    task, scale = HouseRules(rules=options.rules, seed=seed), options.time_scale
    with SimServer(options.profile, seed=seed, time_scale=scale, reply_model=task.reply_model) as server:
        lm = dspy.LM("openai/simulated", api_base=server.api_base, api_key="none", cache=False)
        optimizer = _optimizer(options, schedule, proposers, seed, task.metric, lm, scale)
        began = time.monotonic()
        with dspy.context(lm=lm):
            program = optimizer.compile(_student(task), **_house_rules(options, task))
        return _row(options, "http", optimizer, program, seed, time.monotonic() - began, scale)


def _real(options: argparse.Namespace, schedule: Schedule, proposers: int, seed: int) -> Row:
    workload = workload_named(options.workload, train=options.train, val=options.val, test=0, seed=seed)
    lm = dspy.LM(f"openai/{options.model}", api_base=options.api_base, api_key="none", cache=False)
    optimizer = _optimizer(options, schedule, proposers, seed, workload.metric, lm, 1.0)
    began = time.monotonic()
    with dspy.context(lm=lm):
        program = optimizer.compile(workload.program(), trainset=workload.trainset, valset=workload.valset)
    return _row(options, options.model, optimizer, program, seed, time.monotonic() - began, 1.0)


def _student(task: HouseRules) -> dspy.Module:
    seed: Any = task.program()
    return dspy.Predict(dspy.Signature("question -> answer", seed.answer.signature.instructions))


def _house_rules(options: argparse.Namespace, task: HouseRules) -> dict[str, Any]:
    return {"trainset": task.trainset(options.train), "valset": task.valset(options.val)}


def _optimizer(
    options: argparse.Namespace, schedule: Schedule, proposers: int, seed: int, metric: Any, lm: Any, scale: float,
    **more: Any,
) -> AsyncMetaHarness:  # fmt: skip
    return AsyncMetaHarness(
        metric,
        proposer_lm=lm,
        iterations=100_000,
        k=options.k,
        proposers=proposers,
        num_threads=options.slots,
        schedule=schedule,
        max_seconds=options.seconds / scale,
        seed=seed,
        **more,
    )


def _row(
    options: argparse.Namespace, backend: str, optimizer: AsyncMetaHarness, program: Any, seed: int, wall: float,
    scale: float,
) -> Row:  # fmt: skip
    found = program.detailed_results
    began = [commit for commit in found.stats.commits if commit.seconds * scale <= options.seconds]
    gaps = [commit.gap for commit in began[1:]]
    return Row(
        backend=backend,
        schedule=optimizer.schedule,
        proposers=1 if optimizer.schedule == "lockstep" else optimizer.proposers,
        seed=seed,
        slots=options.slots,
        seconds=options.seconds,
        total_seconds=wall * scale,
        candidates=max(0, len(began) - 1),
        best_score=max((commit.score for commit in began), default=0.0),
        seed_score=found.candidates[0].score,
        failed=len(found.failed),
        generations=found.stats.generations,
        mean_gap=statistics.fmean(gaps) if gaps else 0.0,
        occupancy=found.stats.occupancy,
    )


def report(rows: Sequence[Row]) -> str:
    """The table, and the verdict on each number of proposers."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.name, []).append(row)
    lines = [
        [
            name,
            str(Spread.of(row.candidates_a_minute for row in group)),
            str(Spread.of(row.best_score for row in group)),
            shown(statistics.median(row.candidates for row in group), ".0f"),
            shown(statistics.median(row.failed for row in group), ".0f"),
            shown(statistics.median(row.generations for row in group), ".0f"),
            shown(statistics.median(row.mean_gap for row in group), ".1f"),
            shown(statistics.median(row.occupancy for row in group), ".0%"),
        ]
        for name, group in groups.items()
    ]
    rates = {name: statistics.median(row.candidates_a_minute for row in group) for name, group in groups.items()}
    times = {name: ratio(rate, rates.get("lockstep")) for name, rate in rates.items() if name != "lockstep"}
    verdicts = [
        f"{name}: {shown(factor, '.2f', ' x')} lockstep's validated candidates a minute, target {TARGET:g} x: "
        f"{'met' if factor is not None and factor >= TARGET else 'missed'}"
        for name, factor in times.items()
    ]
    return "\n".join([table(HEADER, lines), "", *verdicts])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the rows, and print."""
    options = parse(arguments)
    os.environ.setdefault("TQDM_DISABLE", "1")
    logging.getLogger("dspy_flashevolve").setLevel(logging.ERROR)
    methods: list[tuple[Schedule, int]] = [("lockstep", 1), *(("async", number) for number in options.proposers)]
    rows: list[Row] = []
    for seed, (schedule, proposers) in product(range(options.seeds), methods):
        row = measured(options, schedule, proposers, seed)
        rows.append(row)
        record = {"benchmark": "harness", **asdict(row), "candidates_a_minute": row.candidates_a_minute}
        append_json_lines(options.out, [record])
        said = f"{row.candidates_a_minute:.2f} candidates a minute, best {row.best_score:.3f}"
        print(f"seed {seed}, {row.name}: {said}", file=sys.stderr)
    print(report(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
