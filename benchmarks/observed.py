"""What it costs to look at a run: `python -m benchmarks.observed`.

Tokens a second of AsyncGEPA with nothing that looks on, and with the bar, the journal, wandb (offline), mlflow (a
local SQLite file) and OpenTelemetry (written to nowhere), by turns on one server. What is not installed is left out.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import asdict, dataclass
from functools import partialmethod
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import dspy
from tqdm.auto import tqdm

from benchmarks.methods import Workload
from benchmarks.results import RESULTS, Spread, append_json_lines, table
from benchmarks.workloads.house_rules import add_arguments, setting, simulated
from dspy_flashevolve import AsyncGEPA

TARGET_SHARE = 0.98
OPTIONAL = ("wandb", "mlflow", "opentelemetry.sdk")


def is_installed(name: str) -> bool:
    """Whether a module can be imported."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@dataclass(frozen=True)
class Pace:
    """One run.

    Attributes:
        looked_at: Whether bar, journal and trackers were on.
        tokens: Prompt and completion tokens of all its LM calls.
        seconds: From its first request to its last; what trackers take to begin and to end is not in it.
    """

    looked_at: bool
    tokens: int
    seconds: float
    metric_calls: int

    @property
    def tokens_per_second(self) -> float:
        """Over the whole run."""
        return self.tokens / self.seconds


def trackers(directory: Path) -> dict[str, Any]:
    """The arguments by which AsyncGEPA keeps a journal and tells wandb and mlflow, all under `directory`."""
    gepa_kwargs: dict[str, Any] = {}
    if is_installed("mlflow"):
        import mlflow  # pyright: ignore[reportMissingImports]

        gepa_kwargs = {
            "mlflow_tracking_uri": f"sqlite:///{directory}/mlflow.sqlite",
            "mlflow_experiment_name": "observed",
        }
        mlflow.set_tracking_uri(gepa_kwargs["mlflow_tracking_uri"])
        if mlflow.get_experiment_by_name("observed") is None:
            mlflow.create_experiment("observed", artifact_location=(directory / "artifacts").as_uri())
    return {
        "log_dir": tempfile.mkdtemp(dir=directory),
        "use_wandb": is_installed("wandb"),
        "wandb_init_kwargs": {"mode": "offline", "dir": str(directory), "settings": {"silent": True}},
        "use_mlflow": is_installed("mlflow"),
        "gepa_kwargs": gepa_kwargs,
    }


@contextmanager
def bar(shown: bool) -> Iterator[None]:
    """Draw progress bars, or none; what is drawn goes nowhere."""
    begin: Any = tqdm.__init__
    tqdm.__init__ = partialmethod(begin, disable=not shown)  # type: ignore[method-assign, assignment]
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
            yield
    finally:
        tqdm.__init__ = begin  # type: ignore[method-assign]


@contextmanager
def traced() -> Iterator[None]:
    """Spans and metrics of what runs inside, written to nowhere."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    from dspy_flashevolve.observe.otel import OpenTelemetry

    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        tracers, reader = TracerProvider(), PeriodicExportingMetricReader(ConsoleMetricExporter(out=nowhere), 1000)
        tracers.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(out=nowhere)))
        meters = MeterProvider([reader])
        with dspy.context(callbacks=[OpenTelemetry(tracers, meters)]):
            yield
        tracers.shutdown()
        meters.shutdown()


def run(workload: Workload, options: argparse.Namespace, number: int, directory: Path | None) -> Pace:
    """One run: with everything that looks on, which writes into `directory`, or with nothing."""
    looked_at = directory is not None
    optimizer = AsyncGEPA(
        workload.metric,
        reflection_lm=workload.reflection_lm,
        num_threads=options.slots,
        max_seconds=options.seconds / options.time_scale,
        seed=number,
        track_stats=True,
        **({} if directory is None else trackers(directory)),
    )
    tracing = traced() if looked_at and is_installed("opentelemetry.sdk") else nullcontext()
    with bar(looked_at), tracing, dspy.context(lm=workload.task_lm):
        program: Any = optimizer.compile(workload.program(), trainset=workload.trainset, valset=workload.valset)
    stats = program.async_stats
    return Pace(looked_at, sum(stats.tokens_by_stage.values()), stats.seconds, stats.metric_calls)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observed", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of a run, in the server's time")
    parser.add_argument("--runs", type=int, default=5, help="runs of each kind")
    parser.add_argument("--out", type=Path, default=RESULTS / "observed.jsonl")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = parse(arguments)
    missing = [name for name in OPTIONAL if not is_installed(name)]
    print(f"not installed, and left out: {', '.join(missing) or 'nothing'}")
    logging.getLogger("dspy").setLevel(logging.CRITICAL)
    os.environ["WANDB_MODE"] = "offline"
    paces: list[Pace] = []
    with simulated("observed", setting(options), seed=0) as (_, workload), tempfile.TemporaryDirectory() as temporary:
        for number in range(options.runs):
            for looked_at in (number % 2 == 0, number % 2 == 1):  # each is first as often as the other
                pace = run(workload, options, number, Path(temporary) if looked_at else None)
                append_json_lines(options.out, [{"benchmark": "observed", "seed": number, **asdict(pace)}])
                paces.append(pace)
                said = f"{pace.tokens_per_second:.0f} tokens/s, {pace.metric_calls} metric calls"
                print(f"run {number}, {'everything' if looked_at else 'nothing'}: {said}", flush=True)
    nothing, everything = (
        Spread.of(one.tokens_per_second for one in paces if one.looked_at == looked_at) for looked_at in (False, True)
    )
    print(table(("looks on", "tokens/s"), [["nothing", str(nothing)], ["everything", str(everything)]]))
    share = everything.median / nothing.median
    print(f"{share:.1%} of the tokens a second; target: at least {TARGET_SHARE:.0%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
