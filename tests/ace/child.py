"""AsyncACE in a process of its own, to be killed and taken up again: `python -m tests.ace.child DIR STALENESS SAMPLES`.

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

from dspy_flashevolve import AsyncACE
from tests.fakes import Chain, digits, examples, fake_lm, hashed, reply_for

VAL = examples("v", 6)
ROUNDS, SLOTS = 2, 8


class SlowChain(Chain):
    """Each rollout takes some milliseconds, some take more."""

    async def aforward(self, question: str) -> dspy.Prediction:
        await asyncio.sleep(0.002 + 0.02 * (hashed(question) % 7 == 0))
        return await super().aforward(question)


def replies(prompt: str, mixed: bool = False) -> str:
    """A digit; an insight; a bullet that no other sample adds, or mixed operations."""
    number = hashed(prompt)
    operations: list[dict[str, Any]] = [{"type": "ADD", "section": "other", "content": f"Insight {number}."}]
    if mixed:
        operations = [{"type": "ADD", "section": "other", "content": f"Insight {number % 40}."}]
        operations += [{"type": "REMOVE", "id": f"oth-{number % 9}"}] if number % 5 == 0 else []
    return reply_for(
        prompt,
        answer=str(number % 7),
        cited_bullets=f"oth-{number % 20}, oth-{number % 13}",
        what_went_wrong="",
        right_approach="",
        insight=f"insight {number % 100}",
        bullet_tags=json.dumps({f"oth-{number % 20}": ("helpful", "harmful")[number % 2]}),
        operations=json.dumps(operations),
    )


def run(directory: Path, schedule: str, samples: int, **options: Any) -> Any:
    """One compile; in lockstep operations are mixed."""
    lockstep = schedule == "lockstep"
    written = os.open(directory / "calls.txt", os.O_APPEND | os.O_CREAT | os.O_WRONLY)

    def metric(gold: Any, pred: Any, trace: Any = None) -> Any:
        os.write(written, f"{gold.question}\n".encode())
        return digits(gold, pred)

    chosen: dict[str, Any] = {"schedule": schedule, "num_threads": None if lockstep else SLOTS}
    settings = {"max_rounds": ROUNDS, "eval_every": 5, "token_budget": 10**6, **chosen, **options}
    optimizer = AsyncACE(metric, **{"log_dir": directory / "run", **settings})
    with dspy.context(lm=fake_lm(lambda prompt: replies(prompt, mixed=lockstep)), num_threads=SLOTS):
        return optimizer.compile(SlowChain(), trainset=examples("t", samples), valset=VAL)


def facts(program: Any) -> dict[str, Any]:
    """What a run has come to, as far as it does not depend on time, nor on where it was interrupted."""
    stats = program.async_stats
    return {
        "samples": stats.samples,
        "best": program.playbook.to_dict(),
        "version": stats.version,
        "rolled_back": stats.rolled_back,
        "operations": stats.operations,
        "tags": stats.tags,
        "problems": stats.problems,
        "counts": [stats.right_at_once, stats.corrected, stats.reflections, stats.citations],
        "snapshots": [[snapshot.version, snapshot.score] for snapshot in stats.snapshots],
    }


if __name__ == "__main__":
    _, where, kind, count = sys.argv
    program = run(Path(where), kind, int(count))
    print(json.dumps({**facts(program), "calls": program.async_stats.metric_calls}))
