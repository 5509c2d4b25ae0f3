"""One search of AsyncMetaHarness with real models, judged on test rows: `python -m benchmarks.harness_run`.

    python -m benchmarks.harness_run symptom2disease --task-model openai/gpt-4o-mini --proposer-model openai/gpt-5

Models are named as in `benchmarks.run`: `--task-model text-student` knows only what its prompt says, and
`--proposer-model file:FOLDER` is one whose replies are files. The run appends a line to `--out`, with every candidate's
source whole.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dspy

from benchmarks.measure import silence
from benchmarks.results import RESULTS, append_json_lines, commit, table
from benchmarks.run import Setting, definition_of, judged, models, standard_error
from benchmarks.workloads.registry import workload_names
from dspy_flashevolve import AsyncMetaHarness

NAME = "meta-harness"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harness_run", description=__doc__)
    parser.add_argument("workload", choices=workload_names())
    parser.add_argument("--task-model", required=True)
    parser.add_argument("--task-base", help="a server with OpenAI's API")
    parser.add_argument("--task-tokens", type=int, default=1024)
    parser.add_argument("--proposer-model", required=True)
    parser.add_argument("--proposer-base", help="a server with OpenAI's API")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--k", type=int, default=1)
    parser.add_argument("--proposers", type=int, default=2)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accept-missing", nargs="*", default=[], help="layers of the sandbox that may be missing")
    parser.add_argument("--out", type=Path, default=RESULTS / "harness_run.jsonl")
    return parser.parse_args(arguments)


def search(options: argparse.Namespace) -> dict[str, Any]:
    """Make the search, and judge the student and what it returned on the test rows."""
    setting = Setting(
        options.workload, options.task_model, options.proposer_model, options.task_base, options.proposer_base,
        task_tokens=options.task_tokens, reply_seconds=0.0, slots=options.slots,
    )  # fmt: skip
    definition = definition_of(setting, NAME, options.seed)
    drawn = definition.drawn(definition.size, options.seed)
    with models(setting, definition, NAME, options.seed) as (task_lm, proposer_lm):
        optimizer = AsyncMetaHarness(
            drawn.metric, proposer_lm=proposer_lm, iterations=options.iterations, k=options.k,
            proposers=options.proposers, num_threads=options.slots, seed=options.seed,
            accept_missing_protection=options.accept_missing,
        )  # fmt: skip
        began = time.monotonic()
        with silence(), dspy.context(lm=task_lm):
            program = optimizer.compile(drawn.program(), trainset=drawn.trainset, valset=drawn.valset)
        seconds, found = time.monotonic() - began, program.detailed_results
        answered, asked = replace(task_lm.tally), replace(proposer_lm.tally)
        before, after = (
            judged(drawn.testset, drawn.metric, task_lm, options.slots, each) for each in (drawn.program(), program)
        )
    return {
        "benchmark": NAME, "commit": commit(), "workload": options.workload, "seed": options.seed,
        "task_model": options.task_model, "iterations": options.iterations, "k": options.k,
        "proposers": options.proposers, "test_before": sum(before) / len(before), "test": sum(after) / len(after),
        "test_error": standard_error(after), "validated": found.candidates[found.best].score, "seconds": seconds,
        "proposer_requests": asked.requests, "proposer_read": asked.read, "proposer_written": asked.written,
        "task_requests": answered.requests, "missing_protection": list(found.missing_protection),
        "candidates": [
            {"score": each.score, "cost": each.cost, "name": each.draft.name, "hypothesis": each.draft.hypothesis,
             "parents": each.draft.parents, "source": each.draft.source}
            for each in found.candidates
        ],
        "failed": [{"name": each.draft.name, "failure": str(each.failure)} for each in found.failed],
        "ended": dict(found.stats.end_reasons), "returned": found.best, "memory": program.memory,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write the row, and print."""
    options = parse(arguments)
    row = search(options)
    append_json_lines(options.out, [row])
    lines = [(str(n), f"{each['score']:.3f}", f"{each['cost']:.0f}", each["name"], each["hypothesis"][:90])
             for n, each in enumerate(row["candidates"])]  # fmt: skip
    print(table(("candidate", "validated", "prompt tokens", "name", "hypothesis"), lines))
    print(f"test {row['test_before']:.3f} -> {row['test']:.3f} ({row['test_error']:.3f}), {row['seconds']:.0f} s, "
          f"{row['proposer_requests']} requests of the proposer, {row['task_requests']} of the task model")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
