"""One run in virtual time: a method, a task and a simulated model of one seed, without a server.

A run takes seconds of CPU, however long it is for the model, and the same run gives the same trajectory. Only
AsyncGEPA runs here, with any of its schedules: dspy.GEPA waits in threads of its own.

A run with a time limit is given it as `max_seconds` and drains what it has admitted; trajectory, tokens and heads are
read at the limit, and what came after it counts for nothing. Only what the policy decided (`looks`) is a total of the
drained run, and a head that was superseded or rolled back counts even where that was later: AsyncGEPA does not say
when.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import dspy

from benchmarks.batching import profile_named
from benchmarks.methods import Limits, Method, Workload
from benchmarks.models import DEFAULT_MODEL
from benchmarks.trajectory import Point, Recorder, Spent, Trajectory
from benchmarks.variants import ADAPTIVE_START
from dspy_flashevolve import AsyncGEPA, AsyncStats
from dspy_flashevolve.sim import HouseRules
from dspy_flashevolve.sim.task import OUTPUTS
from dspy_flashevolve.sim.virtual import SimulatedModel, run

SETTLED_SECONDS = 10.0
"""Until then a run may be refused while it finds out how many requests it may have in flight."""


@dataclass(frozen=True)
class Setting:
    """What the runs of a command have in common.

    Attributes:
        profile: The backend's.
        train: Training examples.
        val: Validation examples; 0 for the training examples.
        model: The simulated model's name.
        reflection_seconds: Virtual seconds of each request that is no rollout's, of a reflection LM apart; 0 where
            the backend answers these too.
        cached: dspy's cache answers what was asked before, from a cache that the run begins empty.
    """

    profile: str = "h100-qwen3-8b"
    train: int = 60
    val: int = 60
    model: str = DEFAULT_MODEL
    reflection_seconds: float = 0.0
    cached: bool = False


@dataclass(frozen=True)
class Reading:
    """The model's counters at one moment.

    Attributes:
        tokens: Written, pro rata for replies under way.
        prompt_tokens: Read, of requests answered.
        answered: Requests answered.
        refused: Requests turned away (429).
        reflections: Of the requests answered, those that asked for a new text.
        running_seconds: The requests in flight, integrated over time.
    """

    tokens: float = 0.0
    prompt_tokens: int = 0
    answered: int = 0
    refused: int = 0
    reflections: int = 0
    running_seconds: float = 0.0

    @classmethod
    def of(cls, model: SimulatedModel) -> Reading:
        """The counters now."""
        load = model.load()
        return cls(
            load.generated_tokens,
            model.prompt_tokens,
            sum(model.requests.values()),
            len(model.refused),
            model.requests.get("reflection", 0),
            load.running_seconds,
        )


@dataclass(frozen=True)
class VirtualRun:
    """What a run left.

    Attributes:
        limits: Its limits.
        trajectory: Until it had drained.
        settled: The model's counters after `SETTLED_SECONDS`; `None` in a shorter run.
        reading: The model's counters at the limit.
        seconds: Virtual seconds until it had drained.
        stats: AsyncGEPA's own; `None` after an error.
        error: What ended the run early; empty when nothing did.
    """

    limits: Limits
    trajectory: Trajectory = field(default_factory=Trajectory)
    settled: Reading | None = None
    reading: Reading = Reading()
    seconds: float = 0.0
    stats: AsyncStats | None = None
    error: str = ""

    def at(self, share: float = 1.0) -> Point:
        """The state at a share of the limit: of the time, or of the metric calls; at 1 no call beyond it counts."""
        limits = self.limits
        if limits.metric_calls is not None:  # of what happens at the same virtual moment the last
            paid = [point for point in self.trajectory.points if point.metric_calls <= share * limits.metric_calls]
            return paid[-1] if paid else Point()
        return self.trajectory.at(share * (self.seconds if limits.seconds is None else limits.seconds))

    @property
    def tokens(self) -> float:
        """Written by the model by the limit."""
        return self.reading.tokens

    @property
    def refused_share(self) -> float | None:
        """Of the requests between `SETTLED_SECONDS` and the limit, those refused; `None` where there was none."""
        if self.settled is None:
            return None
        refused = self.reading.refused - self.settled.refused
        requests = refused + self.reading.answered - self.settled.answered
        return refused / requests if requests else None

    @property
    def span(self) -> float:
        """Virtual seconds until the limit, or until the run's end where that came first."""
        return self.seconds if self.limits.seconds is None else min(self.seconds, self.limits.seconds)

    @property
    def overshoot(self) -> int:
        """Metric calls past the limit."""
        limit = self.limits.metric_calls
        return 0 if limit is None else max(0, self.trajectory.end.metric_calls - limit)

    @property
    def changes(self) -> int:
        """Changes that reflections added to the head, drained."""
        return 0 if self.stats is None else len(self.stats.changes)

    @property
    def landed(self) -> int:
        """Candidates of the pool by the limit."""
        if self.stats is None:
            return 0
        return sum(commit.seconds <= self.span for commit in self.stats.commits)

    def share(self, decision: str) -> float | None:
        """Of all that the policy looked at, the share that it decided so; `None` where it looked at nothing."""
        looks = {} if self.stats is None else self.stats.looks
        return looks.get(decision, 0) / sum(looks.values()) if looks else None


def run_virtually(chosen: Method, task: HouseRules, limits: Limits, setting: Setting) -> VirtualRun:
    """One method on one task; the seed of the limits is the model's and the optimizer's. See `run_served`."""

    if setting.cached:
        dspy.configure_cache(enable_disk_cache=False, enable_memory_cache=True)

    def workload(model: SimulatedModel) -> Workload:
        trainset = task.trainset(setting.train)
        return Workload(
            program=task.program,
            trainset=trainset,
            valset=task.valset(setting.val) if setting.val else trainset,
            metric=task.metric,
            task_lm=model.lm().copy(cache=setting.cached),
            reflection_lm=model.lm().copy(cache=setting.cached),
            true_score=lambda texts: task.true_score([texts[name] for name in OUTPUTS if name in texts]),
        )

    model = SimulatedModel(profile_named(setting.profile), limits.seed, task.reply_model, setting.reflection_seconds)
    return run_served(chosen, model, workload, limits)


def run_served(
    chosen: Method, model: SimulatedModel, serve: Callable[[SimulatedModel], Workload], limits: Limits
) -> VirtualRun:
    """One method on a model and the workload that it serves.

    An exception ends up in `error`, with its traceback on stderr.

    Raises:
        ValueError: The limits scale time, or the method is not one of AsyncGEPA's.
    """
    if limits.time_scale != 1.0:
        raise ValueError(f"virtual time needs no scale, got time_scale={limits.time_scale!r}")
    logging.getLogger("dspy").setLevel(logging.CRITICAL)

    async def main() -> VirtualRun:
        loop = asyncio.get_running_loop()
        workload = serve(model)
        recorder = Recorder(clock=loop.time, true_score=workload.true_score, spent=lambda: spent_by(model))
        try:
            optimizer = chosen.build(workload, limits, recorder)
        except Exception as raised:
            return VirtualRun(limits, error=told(raised))
        if not isinstance(optimizer, AsyncGEPA):
            raise ValueError(f"{chosen.name} cannot run in virtual time: only AsyncGEPA can")
        optimizer.track_stats = True
        readings: dict[float, Reading] = {}
        error, stats = "", None
        with dspy.context(lm=workload.task_lm, adapter=workload.adapter, num_threads=ADAPTIVE_START):
            reading = asyncio.ensure_future(
                _read_at({SETTLED_SECONDS, limits.seconds or SETTLED_SECONDS}, model, readings)
            )
            try:
                program: Any = await optimizer.acompile(
                    workload.program(), trainset=workload.trainset, valset=workload.valset
                )
                stats = program.async_stats
            except Exception as raised:
                error = told(raised)
            finally:
                reading.cancel()
        final = readings.get(limits.seconds or -1.0) or Reading.of(model)
        settled = readings.get(SETTLED_SECONDS)
        return VirtualRun(limits, recorder.trajectory, settled, final, recorder.seconds, stats, error)

    return run(main)


def spent_by(model: SimulatedModel) -> Spent:
    """What a model has done so far."""
    requests, tokens = model.requests.get("task", 0), model.tokens.get("task", 0)
    others, other_tokens = sum(model.requests.values()) - requests, sum(model.tokens.values()) - tokens
    return Spent(others, tokens, other_tokens, model.prompt_tokens, requests)


def told(error: Exception) -> str:
    """An error in a line, with its traceback on stderr."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


async def _read_at(moments: Collection[float], model: SimulatedModel, readings: dict[float, Reading]) -> None:
    """Read the model's counters at these seconds."""
    began = asyncio.get_running_loop().time()
    for moment in sorted(moments):
        await asyncio.sleep(began + moment - asyncio.get_running_loop().time())
        readings[moment] = Reading.of(model)
