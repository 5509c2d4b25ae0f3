"""A search in a process of its own, to be killed and taken up again: `python -m tests.harness.child DIR KIND COUNT`.

The language models are named fakes in the process, a little slow. Every call of the metric or of `learn` and every
proposal appends a line to a file of DIR before anything else, so that what was really paid can be counted afterwards.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy

from benchmarks.in_process import InProcessStandIn
from dspy_flashevolve import AsyncMetaHarness, Harness
from dspy_flashevolve.sandbox.contract import CallLm, Failure, Job, Outcome
from dspy_flashevolve.sim import virtual
from tests.fakes import fake_lm, hashed

SLOTS = 8
TRAIN, VAL = (
    [dspy.Example(question=f"{name} {number}", answer="x").with_inputs("question") for number in range(count)]
    for name, count in (("t", 7), ("v", 8))
)
SOURCE = """# name: number {number}
# hypothesis: {number} is better
# based on: {number}
class Answerer(dspy.Module):
    def __init__(self):
        super().__init__()
        self.predict = dspy.Predict(dspy.Signature("question -> answer", "Instruction {number}"))
    def forward(self, **inputs):
        return self.predict(**inputs)
"""
LEARNS = "    def learn(self, batch):\n        pass\n"


class Learner(InProcessStandIn):
    """A stand-in for the sandbox that learns: what it remembers changes the answers. Some candidates go too far."""

    def __init__(self, log: Callable[[str, object], None], seconds: float = 0.004) -> None:
        self._log, self._seconds = log, seconds

    async def run(self, job: Job, call_lm: CallLm) -> Outcome:
        """See `CodeSandbox`."""
        await asyncio.sleep(self._seconds)
        if job.batch is not None:
            self._log("learnt", hashed(job.source, job.memory))
            return Outcome({}, memory={"seen": hashed(job.memory, job.batch) % 100})
        outcome = await super().run(job, call_lm)
        if hashed(job.source) % 6 == 0 and job.inputs == {"question": "v 3"}:
            return Outcome({}, failure=Failure("time", "it ran for too long"), calls=outcome.calls)
        seen = (job.memory or {}).get("seen", 0)
        return Outcome({"answer": str((int(outcome.fields["answer"]) + seen) % 7)}, job.memory, calls=outcome.calls)


def reply(**fields: str) -> str:
    """A reply in dspy's format of chats."""
    return "\n\n".join([f"[[ ## {name} ## ]]\n{text}" for name, text in fields.items()] + ["[[ ## completed ## ]]"])


def answers(prompt: str) -> str:
    """What a task LM answers: a digit that depends on the whole prompt."""
    return reply(answer=str(hashed(prompt) % 7))


def proposes(log: Callable[[str, object], None], prompt: str) -> str:
    """What a proposer LM answers: one tool call, and then two modules, one of which learns."""
    number = hashed(prompt) % 1000
    if "next_tool_name" in prompt:
        return reply(next_thought="t", next_tool_name="finish", next_tool_args="{}")
    log("proposed", number)
    first, second = SOURCE.format(number=number) + LEARNS, SOURCE.format(number=number + 1)
    return reply(reasoning="r", modules=f"```python\n{first}```\n```python\n{second}```")


def run(directory: Path, kind: str, iterations: int, is_virtual: bool = False, **options: Any) -> Harness:
    """One compile; `kind` is its schedule. In virtual time equal runs are equal."""
    directory.mkdir(exist_ok=True)

    def log(name: str, entry: object) -> None:
        with (directory / f"{name}.txt").open("a") as file:
            file.write(f"{entry}\n")

    def metric(gold: Any, pred: Any, trace: Any = None) -> float:
        log("scored", gold.question)
        return int(pred.answer) / 6

    with dspy.context(lm=options.pop("lm", None) or fake_lm(answers)):
        arguments: dict[str, Any] = {
            "proposer_lm": fake_lm(lambda prompt: proposes(log, prompt)),
            "sandbox": Learner(log),
            "iterations": iterations,
            "learn_batch": 4,
            "num_threads": SLOTS,
            "log_dir": directory / "run",
            "schedule": kind,
            **options,
        }
        optimizer = AsyncMetaHarness(arguments.pop("metric", metric), **arguments)
        student, data = dspy.Predict("question -> answer"), {"trainset": TRAIN, "valset": VAL}
        return (
            virtual.run(lambda: optimizer.acompile(student, **data))
            if is_virtual
            else optimizer.compile(student, **data)
        )


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
