"""One run under faults: the optimizer, the restart in its middle, and what the scores that it left deserve."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import dspy
from gepa.core.callbacks import OptimizationEndEvent

from benchmarks.chaos_audit import Conditions, audited, language_model, workload_of
from benchmarks.measure import CountedMetric, silence
from benchmarks.methods import Limits, Workload, gepa_arguments
from benchmarks.trajectory import Recorder
from dspy_flashevolve import AsyncGEPA, Workflow
from dspy_flashevolve.sim import Faults, HouseRules, SimServer


@dataclass(frozen=True)
class Job:
    """A run to be made: "gepa" or "async", with faults or without, and the seed of task, server and optimizer."""

    method: str
    faulty: bool
    seed: int
    conditions: Conditions


@dataclass(frozen=True)
class ChaosRow:
    """One run.

    Attributes:
        method: "gepa" or "async".
        faulty: With faults and a restart, or without.
        seed: Of task, server and optimizer.
        limit: `max_metric_calls`.
        step_calls: The most that one more step could have cost.
        spent: Metric calls, by the optimizer's count.
        answered: Metric calls that reached the metric.
        stored: Validation scores that the pool was left with.
        wrong: Those that differ from what the candidate scores on the same example without faults.
        cached: Scores in gepa's evaluation cache; AsyncGEPA only.
        cached_wrong: Those that are not what the metric says of the output beside them.
        foreign: Candidates in the pool whose text no reflection wrote.
        stored_score: The returned candidate's validation score as the optimizer has it.
        best_score: The same candidate's score without faults.
        seed_score: The seed's score without faults.
        candidates: Pool, the seed included.
        seconds: Real seconds.
        injected: Kind of fault -> how often.
        restarts: Of the server.
        failed_steps: Of AsyncGEPA.
        timed_out: Rollouts that AsyncGEPA gave up and asked for again.
        retried: Requests that AsyncGEPA made again.
        stop_reason: Why AsyncGEPA ended.
        error: What ended the run early; empty when nothing did.
    """

    method: str
    faulty: bool
    seed: int
    limit: int
    step_calls: int
    spent: int = 0
    answered: int = 0
    stored: int = 0
    wrong: int = 0
    cached: int = 0
    cached_wrong: int = 0
    foreign: int = 0
    stored_score: float | None = None
    best_score: float | None = None
    seed_score: float | None = None
    candidates: int = 0
    seconds: float = 0.0
    injected: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    failed_steps: int = 0
    timed_out: int = 0
    retried: int = 0
    stop_reason: str = ""
    error: str = ""

    @property
    def unanswered(self) -> int:
        """Metric calls that were spent and never reached the metric: the simulated model writes no answer that does
        not parse, so each is an error of the provider that was scored."""
        return max(0, self.spent - self.answered)

    @property
    def title(self) -> str:
        """Which run it is, for people."""
        return f"{self.method}, {'faults' if self.faulty else 'no faults'}, seed {self.seed}"


class Keeper(Recorder):
    """A recorder that keeps gepa's state at the end of the run."""

    state: Any = None

    def on_optimization_end(self, event: OptimizationEndEvent) -> None:
        """Keep the pool."""
        super().on_optimization_end(event)
        self.state = event["final_state"]


class Restart:
    """Restarts a server once, when a metric has been called so often.

    Args:
        server: To be restarted.
        at_call: The call of the metric.
        down_seconds: How long it stays down.
    """

    def __init__(self, server: SimServer, at_call: int, down_seconds: float) -> None:
        self._server = server
        self._at_call = at_call
        self._down_seconds = down_seconds
        self._due = threading.Event()
        self._calls = 0
        self._cancelled = False
        self._thread = threading.Thread(target=self._run, name="restart", daemon=True)
        self.injected: dict[str, int] = {}
        """Faults that the server had injected when it went down."""
        self.count = 0
        """Restarts that have been made."""

    def watched(self, metric: Callable[..., Any]) -> Callable[..., Any]:
        """The metric, whose calls are counted."""

        def counted(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
            self._calls += pred_name is None
            if self._calls >= self._at_call:
                self._due.set()
            return metric(gold, pred, trace, pred_name, pred_trace)

        return counted

    @contextmanager
    def armed(self) -> Iterator[None]:
        """The restart may happen within the block; one that has begun is waited for."""
        self._thread.start()
        try:
            yield
        finally:
            self._cancelled = not self._due.is_set()
            self._due.set()
            self._thread.join()

    def _run(self) -> None:
        self._due.wait()
        if self._cancelled:
            return
        with self._server.down() as before:
            self.injected = dict(before.faults)
            time.sleep(self._down_seconds)
        self.count += 1


@dataclass(frozen=True)
class Ended:
    """What a run leaves: the state, the program, and how it went."""

    keeper: Keeper
    program: Any
    answered: int
    seconds: float
    error: str


def optimizer(method: str, workload: Workload, limits: Limits, keeper: Keeper, rollout_timeout_seconds: float) -> Any:
    """The optimizer of that name; raises `ValueError` for one that is none."""
    arguments = gepa_arguments(workload, limits, keeper)
    if method == "gepa":
        return dspy.GEPA(**arguments)
    if method != "async":
        raise ValueError(f"unknown method {method!r}: choose gepa or async")
    arguments["gepa_kwargs"]["cache_evaluation"] = True
    return AsyncGEPA(**arguments, workflow=Workflow(rollout_timeout_seconds=rollout_timeout_seconds))


def compiled(job: Job, workload: Workload, metric: CountedMetric) -> Ended:
    """Run the optimizer to its end; an exception ends up in `error`, with its traceback on stderr."""
    conditions, keeper = job.conditions, Keeper(job.conditions.time_scale)
    limits = Limits(conditions.slots, job.seed, metric_calls=conditions.calls, time_scale=conditions.time_scale)
    began, program, error = time.monotonic(), None, ""
    try:
        chosen = optimizer(job.method, workload, limits, keeper, conditions.rollout_timeout_seconds)
        with silence(), dspy.context(lm=workload.task_lm, adapter=workload.adapter):
            program = chosen.compile(workload.program(), trainset=workload.trainset, valset=workload.valset)
    except Exception as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    return Ended(keeper, program, metric.count, time.monotonic() - began, error)


def run_job(job: Job) -> ChaosRow:
    """One run, with its audit."""
    logging.getLogger("dspy").setLevel(logging.CRITICAL)
    logging.getLogger("dspy_flashevolve").setLevel(logging.CRITICAL)
    conditions, task = job.conditions, HouseRules(rules=job.conditions.rules, seed=job.seed)
    faults = Faults(**{**vars(conditions.faults), "seed": job.seed}) if job.faulty else None
    with SimServer(
        profile=conditions.profile, seed=job.seed, time_scale=conditions.time_scale, faults=faults
    ) as server:
        restart = Restart(server, conditions.calls // 2, conditions.down_seconds)
        metric = CountedMetric(restart.watched(task.metric) if job.faulty else task.metric)
        workload = workload_of(task, conditions, language_model(server, conditions.timeout_seconds), metric)
        with restart.armed():
            ended = compiled(job, workload, metric)
        injected = dict(server.stats().faults)
    for kind, count in restart.injected.items():
        injected[kind] = injected.get(kind, 0) + count
    stats = getattr(ended.program, "async_stats", None)
    state = ended.keeper.state
    row: dict[str, Any] = {
        "spent": ended.keeper.trajectory.end.metric_calls,
        "answered": ended.answered,
        "seconds": ended.seconds,
        "injected": dict(sorted(injected.items())),
        "restarts": restart.count,
        "error": ended.error,
    }
    if stats is not None:
        row |= {
            "failed_steps": stats.ended["failed"],
            "timed_out": stats.timed_out_rollouts,
            "retried": stats.retried_requests,
            "stop_reason": stats.stop_reason,
        }
    if state is not None:
        row = audited(row, state, task, conditions, job.seed)
    return ChaosRow(job.method, job.faulty, job.seed, conditions.calls, conditions.step_calls, **row)
