"""AsyncMetaHarness beside its synchronous form: `python -m benchmarks.harness`.

The same optimizer with `schedule="async"` and `"lockstep"`, in the same slots, on the same model: validated candidates
a minute, and the best score at the same moment. Three backends:

    --backend virtual   virtual time, the simulated model in the process, and a stand-in for the sandbox (default)
    --backend http      the simulated server over HTTP and the real sandbox; needs cores to spare
    --api-base ...      a real server, the real sandbox, and the metrics of named workloads

Tasks are house rules, alone or on the rows and the program of a named workload; the latter, with its own metric, on a
real server.
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

from benchmarks.backends import Backend
from benchmarks.batching import Profile, profile_named
from benchmarks.in_process import InProcessStandIn
from benchmarks.models import DEFAULT_MODEL, REPLY_MODELS, reply_model_named
from benchmarks.results import RESULTS, Spread, append_json_lines, ratio, shown, table
from benchmarks.workloads.registry import workload_named, workload_names
from benchmarks.workloads.simulated import Data, simulated
from dspy_flashevolve import AsyncMetaHarness
from dspy_flashevolve.sim import HouseRules, SimServer
from dspy_flashevolve.sim.virtual import SimulatedModel, run

TARGET = 4.0
"""Validated candidates a minute, async over lockstep."""
HOUSE_RULES = "house-rules"
HEADER = (
    "task", "schedule", "candidates a minute", "best score", "candidates", "failed", "generations", "mean gap", "busy",
)  # fmt: skip
Schedule = Literal["async", "lockstep"]
LOCKSTEP: Schedule = "lockstep"


@dataclass(frozen=True)
class Row:
    """One run; rates and scores are those of the first `seconds` of it, in the server's time.

    Attributes:
        task: "house-rules", or the name of a workload.
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
        train, val: examples.
        k: candidates a proposal.
        model: the model's name; rows that name none are of the simulated one that is "obliging" now.
    """

    task: str
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
    train: int
    val: int
    k: int
    model: str = "obliging"

    @property
    def name(self) -> str:
        """The row's method."""
        return LOCKSTEP if self.schedule == LOCKSTEP else f"async, {self.proposers} proposers"

    @property
    def candidates_a_minute(self) -> float:
        """Validated candidates a minute."""
        return 60 * self.candidates / self.seconds


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harness", description=__doc__)
    parser.add_argument("--backend", choices=["virtual", "http"], default="virtual")
    parser.add_argument("--api-base", help="a real server's address, with /v1")
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help=f"the simulated model ({', '.join(REPLY_MODELS)}), or the one that the real server serves",
    )
    parser.add_argument("--max-tokens", type=int, default=1024, help="of a reply of the real model to the task")
    parser.add_argument("--proposer-tokens", type=int, default=4096, help="of its replies to proposers")
    parser.add_argument("--proposer-steps", type=int, default=8, help="tool calls of a proposer")
    parser.add_argument(
        "--tasks", nargs="+", default=[HOUSE_RULES], help=f"{HOUSE_RULES}, or out of {', '.join(workload_names())}"
    )
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
    options = parser.parse_args(arguments)
    if bool(options.api_base) == (options.model in REPLY_MODELS):
        parser.error("--api-base and --model belong together: a real server, and the model that it serves")
    known = [*([] if options.api_base else [HOUSE_RULES]), *workload_names()]
    if unknown := [name for name in options.tasks if name not in known]:
        parser.error(f"--tasks {' '.join(unknown)}: choose from {', '.join(known)}")
    return options


@dataclass(frozen=True)
class Asked:
    """What a run is asked to do; the fields are those of `Row`."""

    options: argparse.Namespace
    task: str
    schedule: Schedule
    proposers: int
    seed: int

    def row(self) -> Row:
        """The run."""
        if self.options.api_base:
            return self._real()
        return self._virtual() if self.options.backend == "virtual" else self._http()

    def _virtual(self) -> Row:
        rules, data, profile = self._simulated()
        model = SimulatedModel(profile, seed=self.seed, reply_model=rules.reply_model)

        async def main() -> Row:
            lm, began = model.lm(), asyncio.get_running_loop().time()
            optimizer = self._optimizer(data, lm, 1.0, sandbox=InProcessStandIn())
            with dspy.context(lm=lm):
                program = await optimizer.acompile(data.program, trainset=data.trainset, valset=data.valset)
            return self._row("virtual", program, asyncio.get_running_loop().time() - began, 1.0)

        return run(main)

    def _http(self) -> Row:
        rules, data, profile = self._simulated()
        scale = self.options.time_scale
        with SimServer(profile, seed=self.seed, time_scale=scale, reply_model=rules.reply_model) as server:
            lm = dspy.LM("openai/simulated", api_base=server.api_base, api_key="none", cache=False)
            return self._compiled("http", data, lm, lm, scale)

    def _real(self) -> Row:
        options = self.options
        workload = workload_named(self.task, train=options.train, val=options.val, test=0, seed=self.seed)
        backend = Backend(
            api_base=options.api_base, max_tokens=options.max_tokens, reflection_tokens=options.proposer_tokens
        )
        task_lm, proposer_lm = backend.lms(options.model)
        return self._compiled(options.model, Data.of(workload), task_lm, proposer_lm, 1.0)

    def _compiled(self, backend: str, data: Data, task_lm: dspy.LM, proposer_lm: dspy.LM, scale: float) -> Row:
        optimizer = self._optimizer(data, proposer_lm, scale)
        began = time.monotonic()
        with dspy.context(lm=task_lm):
            program = optimizer.compile(data.program, trainset=data.trainset, valset=data.valset)
        return self._row(backend, program, time.monotonic() - began, scale)

    def _simulated(self) -> tuple[HouseRules, Data, Profile]:
        options = self.options
        rules = HouseRules(rules=options.rules, seed=self.seed, reply_model=reply_model_named(options.model))
        profile = profile_named(options.profile)
        if self.task == HOUSE_RULES:
            seed: Any = rules.program()
            student = dspy.Predict(dspy.Signature("question -> answer", seed.answer.signature.instructions))
            return rules, Data(student, rules.metric, rules.trainset(options.train), rules.valset(options.val)), profile
        named = workload_named(self.task, train=options.train, val=options.val, test=0, seed=self.seed)
        ruled = simulated(named, rules)
        return rules, Data.of(ruled), ruled.profile(profile)

    def _optimizer(self, data: Data, proposer_lm: Any, scale: float, **more: Any) -> AsyncMetaHarness:
        return AsyncMetaHarness(
            data.metric,
            proposer_lm=proposer_lm,
            iterations=100_000,
            k=self.options.k,
            proposers=self.proposers,
            proposer_steps=self.options.proposer_steps,
            num_threads=self.options.slots,
            schedule=self.schedule,
            max_seconds=self.options.seconds / scale,
            seed=self.seed,
            **more,
        )

    def _row(self, backend: str, program: Any, wall: float, scale: float) -> Row:
        found, seconds = program.detailed_results, self.options.seconds
        admitted = [commit for commit in found.stats.commits if commit.seconds * scale <= seconds]
        gaps = [commit.gap for commit in admitted[1:]]
        return Row(
            task=self.task,
            backend=backend,
            schedule=self.schedule,
            proposers=1 if self.schedule == LOCKSTEP else self.proposers,
            seed=self.seed,
            slots=self.options.slots,
            seconds=seconds,
            total_seconds=wall * scale,
            candidates=max(0, len(admitted) - 1),
            best_score=max((commit.score for commit in admitted), default=0.0),
            seed_score=found.candidates[0].score,
            failed=len(found.failed),
            generations=found.stats.generations,
            mean_gap=statistics.fmean(gaps) if gaps else 0.0,
            occupancy=found.stats.occupancy,
            train=self.options.train,
            val=self.options.val,
            k=self.options.k,
            model=self.options.model,
        )


def report(rows: Sequence[Row]) -> str:
    """The table, and the verdict on each task and number of proposers."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.task, row.name), []).append(row)
    lines = [
        [
            *key,
            str(Spread.of(row.candidates_a_minute for row in group)),
            str(Spread.of(row.best_score for row in group)),
            shown(statistics.median(row.candidates for row in group), ".0f"),
            shown(statistics.median(row.failed for row in group), ".0f"),
            shown(statistics.median(row.generations for row in group), ".0f"),
            shown(statistics.median(row.mean_gap for row in group), ".1f"),
            shown(statistics.median(row.occupancy for row in group), ".0%"),
        ]
        for key, group in groups.items()
    ]
    rates = {key: statistics.median(row.candidates_a_minute for row in group) for key, group in groups.items()}
    times = {key: ratio(rate, rates.get((key[0], LOCKSTEP))) for key, rate in rates.items() if key[1] != LOCKSTEP}
    verdicts = [
        f"{task}, {name}: {shown(factor, '.2f', ' x')} lockstep's validated candidates a minute, target {TARGET:g} x: "
        f"{'met' if factor is not None and factor >= TARGET else 'missed'}"
        for (task, name), factor in times.items()
    ]
    return "\n".join([table(HEADER, lines), "", *verdicts])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the rows, and print."""
    options = parse(arguments)
    os.environ.setdefault("TQDM_DISABLE", "1")
    logging.getLogger("dspy_flashevolve").setLevel(logging.ERROR)
    methods: list[tuple[Schedule, int]] = [(LOCKSTEP, 1), *(("async", number) for number in options.proposers)]
    rows: list[Row] = []
    for task, seed, (schedule, proposers) in product(options.tasks, range(options.seeds), methods):
        row = Asked(options, task, schedule, proposers, seed).row()
        rows.append(row)
        record = {"benchmark": "harness", **asdict(row), "candidates_a_minute": row.candidates_a_minute}
        append_json_lines(options.out, [record])
        said = f"{row.candidates_a_minute:.2f} candidates a minute, best {row.best_score:.3f}"
        print(f"{task}, seed {seed}, {row.name}: {said}", file=sys.stderr)
    print(report(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
