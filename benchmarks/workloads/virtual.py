"""A named workload in virtual time: one run, as the result that a run over HTTP leaves."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.methods import Limits, method
from benchmarks.models import DEFAULT_MODEL, reply_model_named
from benchmarks.results import Result, RunKey
from benchmarks.virtual import VirtualRun, run_served
from benchmarks.workloads.registry import workload_named
from benchmarks.workloads.simulated import simulated
from dspy_flashevolve.sim import HouseRules
from dspy_flashevolve.sim.virtual import SimulatedModel


@dataclass(frozen=True)
class VirtualJob:
    """A run to be made.

    Attributes:
        benchmark: Its name in the results.
        workload: The workload's name.
        profile: The simulated model's; replies to the task get the workload's lengths.
        method: What runs.
        train: Training examples; `None` for the workload's own number.
        val: Validation examples; likewise.
        limits: Seed, slots, virtual seconds, metric calls.
        model: The simulated model's name (`benchmarks.models.REPLY_MODELS`).
    """

    benchmark: str
    workload: str
    profile: str
    method: str
    train: int | None
    val: int | None
    limits: Limits
    model: str = DEFAULT_MODEL

    @property
    def settings(self) -> str:
        """What else tells its run apart, for the results."""
        return f"{self.model} model"

    @property
    def backend(self) -> str:
        """For the results."""
        return f"{self.profile}, virtual time"

    @property
    def key(self) -> RunKey:
        """That of its result."""
        limits, what = self.limits, (self.benchmark, self.backend, self.settings)
        return RunKey(*what, limits.slots, limits.metric_calls, self.method, limits.seed)

    def run(self) -> Result:
        """Make the run.

        Raises:
            RowsMissing: The workload's rows are nowhere.
            ValueError: There is no such workload, method or profile, or the workload has fewer rows.
        """
        limits, reply_model = self.limits, reply_model_named(self.model)
        task = HouseRules(seed=limits.seed, reply_model=reply_model)
        rows = workload_named(self.workload, train=self.train, val=self.val, test=0, seed=limits.seed)
        asked = simulated(rows, task)
        model = SimulatedModel(asked.profile(self.profile), seed=limits.seed, reply_model=reply_model)
        chosen = method(self.method, virtual=True)
        return self._result(run_served(chosen, model, lambda served: asked.served(served.lm(), served.lm()), limits))

    def _result(self, run: VirtualRun) -> Result:
        point, span, reading = run.at(), run.span, run.reading
        return Result(
            benchmark=self.benchmark,
            method=self.method,
            backend=self.backend,
            seed=self.limits.seed,
            slots=self.limits.slots,
            seconds=span,
            total_seconds=run.seconds,
            proposals=point.proposals,
            reflections=reading.reflections,
            metric_calls=point.metric_calls,
            total_metric_calls=run.trajectory.end.metric_calls,
            call_limit=self.limits.metric_calls,
            best_score=point.best_score,
            seed_score=run.trajectory.seed_score,
            true_score=point.true_score,
            seed_true_score=run.trajectory.seed_true_score,
            depth=point.depth,
            accepted=point.accepted,
            validations=point.validations,
            prompt_tokens=reading.prompt_tokens,
            completion_tokens=reading.tokens,
            requests=reading.answered,
            refused=reading.refused,
            mean_running=reading.running_seconds / span if span else None,
            error=run.error,
            trajectory=run.trajectory.compact(),
            settings=self.settings,
        )


def run_job(job: VirtualJob) -> Result:
    """`VirtualJob.run`, for a pool of processes."""
    return job.run()
