"""A run in a process of its own, to be killed and taken up again: `python -m tests.contract.child DIR KIND CALLS`.

The language models are named fakes in the process (tests/fakes.py), a little slow; every call of the metric appends a
line to DIR/calls.txt before it does anything else, so that what was really paid can be counted afterwards.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import dspy

from dspy_flashevolve import AsyncGEPA
from tests.contract.surface import Sum
from tests.fakes import Chain, digits, examples, hashed, reflection_lm, task_lm

TRAIN, VAL = examples("t", 9), examples("v", 12)


KINDS: dict[str, dict[str, Any]] = {
    "lockstep": {"schedule": "lockstep"},
    "edits": {},
    "edits reflective": {"staleness": "reflective"},
    "pareto": {"search": "pareto"},
    "pareto guarded": {"search": "pareto", "staleness": "guarded"},
    "pareto reflective": {"search": "pareto", "staleness": "reflective"},
}


class SlowChain(Chain):
    """Each rollout takes some milliseconds, some take more."""

    async def aforward(self, question: str) -> dspy.Prediction:
        await asyncio.sleep(0.002 + 0.02 * (hashed(question) % 7 == 0))
        return await super().aforward(question)


def run(directory: Path, kind: str, calls: int, predictors: int = 1, **options: Any) -> Any:
    """One compile of a kind in `KINDS`."""
    written = os.open(directory / "calls.txt", os.O_APPEND | os.O_CREAT | os.O_WRONLY)

    def metric(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        if pred_name is None:
            os.write(written, f"{gold.question}\n".encode())
        return digits(gold, pred, trace, pred_name, pred_trace)

    chosen = KINDS[kind] | ({} if kind == "lockstep" else {"num_threads": 8})
    with dspy.context(lm=task_lm()):
        optimizer = AsyncGEPA(
            metric, max_metric_calls=calls, reflection_lm=reflection_lm(), stale_candidate_reflection=Sum(),
            log_dir=str(directory / "run"), track_stats=True, **chosen, **options,
        )  # fmt: skip
        return optimizer.compile(SlowChain(predictors), trainset=TRAIN, valset=VAL)


if __name__ == "__main__":
    _, where, kind, budget = sys.argv
    program = run(Path(where), kind, int(budget))
    details = program.detailed_results
    print(json.dumps({"calls": details.total_metric_calls, "best": max(details.val_aggregate_scores)}))
