"""One run of AsyncACE, measured: in virtual time, or on a real server. The comparison is `python -m benchmarks.ace`."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import dspy

from benchmarks.batching import Profile, profile_named
from benchmarks.tasks import task_kind
from benchmarks.virtual import told
from benchmarks.workloads.registry import workload_named, workload_names
from benchmarks.workloads.simulated import Data, simulated
from dspy_flashevolve import AsyncACE
from dspy_flashevolve.observe.statistics import AceStats
from dspy_flashevolve.sim import ReplyModel
from dspy_flashevolve.sim.virtual import SimulatedModel, run

CURVE_POINTS = 30
EPOCHS = 1000
"""So many that time is what ends a run."""


@dataclass(frozen=True)
class Row:
    """One run. Figures are taken at the limit, before the drain, unless their name says otherwise.

    Attributes:
        task: Kind of house rules task, or the name of a workload.
        schedule: "lockstep" or "async".
        backend: The simulated profile, or the real model.
        seed: Of the task, the model and the optimizer.
        slots: Requests in flight at most.
        limit: Seconds; virtual ones but on a real server.
        train: Training examples.
        val: Validation examples.
        eval_every: AsyncACE's.
        model: The simulated model's name, empty for a real one; rows that name none are of what is "obliging" now.
        samples: That came through to the playbook.
        best_score: Of the playbooks validated by then; `None` before the first.
        seed_score: Of the empty playbook; `None` where it was not validated by then.
        validations: Playbooks validated by then.
        version: Of the newest playbook.
        metric_calls: Made.
        total_seconds: Until the run had drained.
        final_score: Of the playbook that was returned, drained.
        problems: Kind -> replies, or parts of them, that could not be used; drained.
        snapshots: Second, version, score of each validation; drained.
        curve: Second, metric calls, validated score and true score (on examples that nobody saw) of the best playbook
            then, at `CURVE_POINTS` moments up to the limit; empty on a real server.
        error: What ended the run early; empty when nothing did.
    """

    task: str
    schedule: str
    backend: str
    seed: int
    slots: int
    limit: float
    train: int
    val: int
    eval_every: int
    model: str = "obliging"
    samples: int = 0
    best_score: float | None = None
    seed_score: float | None = None
    validations: int = 0
    version: int = 0
    metric_calls: int = 0
    total_seconds: float = 0.0
    final_score: float | None = None
    problems: dict[str, int] = field(default_factory=dict)
    snapshots: list[list[float]] = field(default_factory=list)
    curve: list[list[float]] = field(default_factory=list)
    error: str = ""

    @property
    def samples_per_minute(self) -> float:
        """Samples over the limit."""
        return 60 * self.samples / self.limit

    @property
    def key(self) -> tuple[object, ...]:
        """What the run was to be."""
        size = (self.slots, self.limit, self.train, self.val, self.eval_every)
        return (self.task, self.backend, self.model, *size, self.seed, self.schedule)


def optimizer_for(row: Row, metric: Callable[..., Any], reflection_lm: dspy.LM) -> AsyncACE:
    """The optimizer of a row."""
    return AsyncACE(
        metric,
        reflector_lm=reflection_lm,
        curator_lm=reflection_lm,
        num_threads=row.slots,
        epochs=EPOCHS,
        schedule=row.schedule,  # type: ignore[arg-type]
        max_seconds=row.limit,
        eval_every=row.eval_every,
        seed=row.seed,
    )


def virtually(row: Row) -> Row:
    """One run in virtual time."""
    logging.getLogger("dspy").setLevel(logging.CRITICAL)
    data, profile, reply_model, true_score = _simulated(row)
    model = SimulatedModel(profile, seed=row.seed, reply_model=reply_model)

    async def main() -> Row:
        loop = asyncio.get_running_loop()
        began, lm, at_limit, curve = loop.time(), model.lm(), list[Row](), list[list[float]]()
        optimizer = optimizer_for(row, data.metric, lm)

        async def read() -> None:
            for _ in range(CURVE_POINTS):
                await asyncio.sleep(row.limit / CURVE_POINTS)
                now, best = read_at_limit(row, optimizer), optimizer.best_so_far()
                if best is not None and now.best_score is not None:
                    texts = {name: predictor.signature.instructions for name, predictor in best.named_predictors()}
                    score = round(true_score(texts), 4)
                    curve.append([round(loop.time() - began, 3), now.metric_calls, now.best_score, score])
            at_limit.append(read_at_limit(row, optimizer))

        reading = asyncio.ensure_future(read())
        try:
            with dspy.context(lm=lm):
                program: Any = await optimizer.acompile(data.program, trainset=data.trainset, valset=data.valset)
        except Exception as error:
            return replace(row, error=told(error))
        finally:
            reading.cancel()
        read_now = at_limit[0] if at_limit else read_at_limit(row, optimizer)
        return replace(drained(read_now, program.async_stats, loop.time() - began), curve=curve)

    return run(main)


def _simulated(row: Row) -> tuple[Data, Profile, ReplyModel, Callable[[Mapping[str, str]], float]]:
    kind = task_kind("few" if row.task in workload_names() else row.task)
    task, profile = kind.task(row.seed, row.model), profile_named(row.backend)
    if row.task not in workload_names():
        return (
            Data(task.program(), task.metric, task.trainset(row.train), task.valset(row.val)),
            profile,
            task.reply_model,
            lambda texts: task.true_score(list(texts.values())),
        )
    named = workload_named(row.task, train=row.train, val=row.val, test=0, seed=row.seed)
    ruled = simulated(named, task)
    assert ruled.true_score is not None
    return Data.of(ruled), ruled.profile(profile), task.reply_model, ruled.true_score


def on_server(row: Row, task_lm: dspy.LM, reflection_lm: dspy.LM, adapter: dspy.Adapter) -> Row:
    """One run on a real server, with the workload's own metric."""
    named = workload_named(row.task, train=row.train, val=row.val, test=0, seed=row.seed)
    optimizer, at_limit = optimizer_for(row, named.metric, reflection_lm), list[Row]()
    timer = threading.Timer(row.limit, lambda: at_limit.append(read_at_limit(row, optimizer)))
    timer.daemon = True
    began = time.monotonic()
    timer.start()
    try:
        with dspy.context(lm=task_lm, adapter=adapter):
            program: Any = optimizer.compile(named.program(), trainset=named.trainset, valset=named.valset)
    except Exception as error:
        return replace(row, error=told(error))
    finally:
        timer.cancel()
    read_now = at_limit[0] if at_limit else read_at_limit(row, optimizer)
    return drained(read_now, program.async_stats, time.monotonic() - began)


def read_at_limit(row: Row, optimizer: AsyncACE) -> Row:
    """The figures now."""
    stats = optimizer.stats_so_far()
    if stats is None:
        return row
    return replace(
        row,
        samples=stats.samples,
        best_score=max((one.score for one in stats.snapshots), default=None),
        seed_score=next((one.score for one in stats.snapshots if one.version == 0), None),
        validations=len(stats.snapshots),
        version=stats.version,
        metric_calls=stats.metric_calls,
    )


def drained(row: Row, stats: AceStats, seconds: float) -> Row:
    """The figures of the whole run beside those at its limit."""
    return replace(
        row,
        total_seconds=seconds,
        final_score=max(one.score for one in stats.snapshots),
        problems=stats.problems,
        snapshots=[[round(one.seconds, 3), one.version, one.score] for one in stats.snapshots],
    )
