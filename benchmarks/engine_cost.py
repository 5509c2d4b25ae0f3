"""What the engine itself costs: `python -m benchmarks.engine_cost`.

CPU time a rollout of AsyncGEPA over a program that answers at once, beside dspy.Evaluate over as many calls, and the
peak of allocated memory for two numbers of rollouts. No language model is called: the instructions come from a
plain function, and the metric is a checksum of instruction and question, so that about half of the proposals pass.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import tempfile
import time
import tracemalloc
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dspy

from benchmarks.measure import Bench, NoMeter
from benchmarks.methods import Limits, Method, Optimizer, Workload, gepa_arguments
from benchmarks.results import RESULTS, append_json_lines, shown, table
from benchmarks.trajectory import Recorder

TARGET_MILLISECONDS = 1.0
METHODS = ("evaluate", "gepa", "async", "async-journal")


@dataclass(frozen=True)
class Cost:
    """One measured run.

    Attributes:
        method: `evaluate`, `gepa`, `async`, or `async-journal`, which writes a run directory.
        rollouts: Rollouts that reached the metric.
        cpu_seconds: Processor time of this process, all threads; 0 when memory was traced.
        wall_seconds: Elapsed time; 0 when memory was traced.
        proposals: Instructions proposed.
        candidates: Candidates accepted.
        peak_bytes: Most memory that Python had allocated above the start; 0 when time was measured.
        error: What ended the run early.
    """

    method: str
    rollouts: int
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    proposals: int = 0
    candidates: int = 0
    peak_bytes: int = 0
    error: str = ""

    @property
    def cpu_milliseconds_per_rollout(self) -> float:
        """Processor time a rollout."""
        return 1000.0 * self.cpu_seconds / self.rollouts if self.rollouts else 0.0


class NoOp(dspy.Module):
    """Answers with its own instruction, at once, and leaves the trace that a predictor would."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = dspy.Predict(dspy.Signature("question -> text", "Answer."))

    def forward(self, question: str) -> dspy.Prediction:
        """The instruction, as `text`."""
        prediction = dspy.Prediction(text=self.answer.signature.instructions)
        if dspy.settings.trace is not None:
            dspy.settings.trace.append((self.answer, {"question": question}, prediction))
        return prediction

    async def aforward(self, question: str) -> dspy.Prediction:
        """The same on the event loop."""
        return self.forward(question)


def checksum_score(
    gold: Any, pred: Any, trace: Any = None, pred_name: str | None = None, pred_trace: Any = None
) -> dspy.Prediction:
    """A score below 1 that the instruction and the question decide."""
    return dspy.Prediction(score=zlib.crc32(f"{pred.text} {gold.question}".encode()) % 997 / 1000, feedback="None.")


def constant_score(
    gold: Any, pred: Any, trace: Any = None, pred_name: str | None = None, pred_trace: Any = None
) -> dspy.Prediction:
    """Always one half: nothing is accepted, and the pool does not grow."""
    return dspy.Prediction(score=0.5, feedback="None.")


class Numbered:
    """Proposes `Answer 1.`, `Answer 2.` and so on, without a language model."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __call__(
        self,
        candidate: Mapping[str, str],
        reflective_dataset: Mapping[str, Any],
        components_to_update: Sequence[str],
    ) -> dict[str, str]:
        """A new text for each component."""
        return {name: f"Answer {next(self._numbers)}." for name in components_to_update}


def without_language_model(name: str) -> Method:
    """dspy.GEPA, AsyncGEPA or the plain evaluation with numbered instructions."""
    if name == "evaluate":
        from benchmarks.methods import method

        return method(name)

    def build(workload: Workload, limits: Limits, recorder: Recorder) -> Optimizer:
        arguments = {**gepa_arguments(workload, limits, recorder), "instruction_proposer": Numbered()}
        if name == "gepa":
            return dspy.GEPA(**arguments)
        from dspy_flashevolve import AsyncGEPA

        if name == "async-journal":
            arguments["log_dir"] = tempfile.mkdtemp(prefix="engine-cost-")
        return AsyncGEPA(**arguments)

    return Method(name, build)


def workload(metric: Callable[..., Any], examples: int) -> Workload:
    """The no-op program with numbered questions."""
    questions = [dspy.Example(question=f"Question {number}?").with_inputs("question") for number in range(2 * examples)]
    return Workload(NoOp, questions[:examples], questions[examples:], metric, task_lm=None, reflection_lm=None)


def run(name: str, rollouts: int, slots: int, metric: Callable[..., Any], examples: int = 50) -> Cost:
    """One run of `rollouts` metric calls, with its processor and elapsed time."""
    bench = Bench("engine_cost", "no-op", NoMeter())
    limits = Limits(slots, seed=0, metric_calls=rollouts)
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    result = bench.run(without_language_model(name), workload(metric, examples), limits)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Cost(name, result.scored, cpu, wall, result.proposals, result.accepted, error=result.error)


def peak(name: str, rollouts: int, slots: int) -> Cost:
    """One run under tracemalloc, with its peak; the tracing costs too much time for any other figure."""
    gc.collect()
    tracemalloc.start()
    try:
        cost = run(name, rollouts, slots, constant_score)
        return Cost(name, cost.rollouts, proposals=cost.proposals, candidates=cost.candidates,
                    peak_bytes=tracemalloc.get_traced_memory()[1], error=cost.error)  # fmt: skip
    finally:
        tracemalloc.stop()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_cost", description=__doc__)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--few", type=int, default=2_000, help="rollouts of the smaller run of the memory figures")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="runs of the time figures; the median counts")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--out", type=Path, default=RESULTS / "engine_cost.jsonl")
    return parser.parse_args(arguments)


def growth(few: Cost, many: Cost) -> float | None:
    """Bytes that the peak grows a further rollout; `None` for runs of the same length."""
    further = many.rollouts - few.rollouts
    return (many.peak_bytes - few.peak_bytes) / further if further > 0 else None


def measure(name: str, options: argparse.Namespace) -> tuple[list[str], list[Cost]]:
    """One method's row, and its runs; the first one, short, only warms up."""
    run(name, 500, options.slots, checksum_score)
    timed = [run(name, options.rollouts, options.slots, checksum_score) for _ in range(options.repeats)]
    few, many = (peak(name, rollouts, options.slots) for rollouts in (options.few, options.rollouts))
    middle = sorted(timed, key=lambda cost: cost.cpu_milliseconds_per_rollout)[len(timed) // 2]
    median = statistics.median(cost.cpu_milliseconds_per_rollout for cost in timed)
    row = [
        name, str(middle.rollouts), f"{median:.3f}", f"{middle.wall_seconds:.1f}", str(middle.proposals),
        str(middle.candidates), f"{few.peak_bytes / 2**20:.1f}", f"{many.peak_bytes / 2**20:.1f}",
        shown(growth(few, many), ".0f"),
    ]  # fmt: skip
    return row, [*timed, few, many]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a run ended in an error."""
    options = parse(arguments)
    rows: list[list[str]] = []
    costs: list[Cost] = []
    for name in options.methods:
        row, measured = measure(name, options)
        rows.append(row)
        costs += measured
    append_json_lines(options.out, [{"benchmark": "engine_cost", **asdict(cost)} for cost in costs])
    header = ["method", "rollouts", "CPU ms a rollout", "seconds", "proposals", "accepted",
              f"MiB at {options.few}", f"MiB at {options.rollouts}", "bytes a further rollout"]  # fmt: skip
    print(table(header, rows))
    print(f"target for async: under {TARGET_MILLISECONDS:.0f} ms a rollout, and no growth with rollouts")
    errors = sorted({f"{cost.method}: {cost.error}" for cost in costs if cost.error})
    print("\n".join(errors))
    return int(bool(errors))


if __name__ == "__main__":
    raise SystemExit(main())
