"""One compile of AsyncGEPA: the student, the data and the settings of dspy, turned into one run.

This is where GEPA's parts meet: the pool and its strategies, the program, the schedule, what is shown.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import anyio
import dspy
from dspy.primitives import Example, Module, Prediction
from dspy.teleprompt.gepa.gepa import DspyGEPAResult
from dspy.teleprompt.gepa.gepa_flex_utils import enumerate_flex_submodules
from dspy.teleprompt.gepa.gepa_utils import DspyAdapter, LoggerAdapter
from gepa.core.data_loader import ensure_loader
from gepa.core.result import GEPAResult

from dspy_flashevolve.engine.blame import hand_over, report
from dspy_flashevolve.engine.endpoints import Endpoints
from dspy_flashevolve.engine.errors import DataError
from dspy_flashevolve.engine.events import EventBus
from dspy_flashevolve.engine.threads import Threads
from dspy_flashevolve.gepa.options import GepaOptions
from dspy_flashevolve.gepa.parts import build_parts, has_foreign, hooks_of
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.run import GepaRun
from dspy_flashevolve.gepa.settings import RunSettings
from dspy_flashevolve.observe.lineage import LineageWriter
from dspy_flashevolve.observe.progress import Progress
from dspy_flashevolve.observe.records import AsyncStats
from dspy_flashevolve.observe.statistics import Recorder
from dspy_flashevolve.programs.dspy_program import DspyProgram, settings_snapshot
from dspy_flashevolve.programs.endpoints import LanguageModels, endpoints_of
from dspy_flashevolve.programs.integrating import DspyIntegrator
from dspy_flashevolve.programs.metric import Metric
from dspy_flashevolve.programs.vllm_metrics import watchers
from dspy_flashevolve.reflection.stale_candidates import StaleCandidateReflection

logger = logging.getLogger(__name__)
gepa_logger = logging.getLogger("dspy.teleprompt.gepa.gepa")
"""gepa's own log lines go where ``dspy.GEPA`` sends them."""
MUCH_DISCARDED = 0.5
"""Share of the children from which a run says that its staleness policy discards too much."""
TASK_STAGES = ("rollout", "screen", "prefix", "validate")
"""Stages whose requests run the program."""
CHECKPOINT_SECONDS = 5.0
"""With ``log_dir``, the least time between two checkpoints of an asynchronous run."""


@dataclass(frozen=True)
class AsyncGEPAResult(DspyGEPAResult):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
    """``dspy.GEPA``'s detailed results, with the figures of the asynchronous run beside them.

    Args:
        async_stats: throughput, occupancy, gaps and commits; see :class:`AsyncStats`.
    """

    async_stats: AsyncStats | None = None


class Compilation:
    """One run of one optimizer: everything that belongs to it and to no other.

    Args:
        optimizer: an AsyncGEPA; only what dspy.GEPA's constructor stores is read from it.
        options: gepa's configuration.
        settings: the schedule.
        student: the program; it is not changed.
        trainset, valset: examples or gepa's loaders; valset None means the trainset.
    """

    def __init__(
        self, optimizer: Any, options: GepaOptions, settings: RunSettings, student: Module, trainset: Any, valset: Any
    ) -> None:
        self._optimizer = optimizer
        self._trainset: Any = ensure_loader(trainset)
        self._valset: Any = self._trainset if settings.same_data else ensure_loader(valset)
        self._snapshot = settings_snapshot()
        self._options = options
        self._settings = settings
        self._priced = settings.max_cost is not None
        workers = self._settings.slots + self._settings.live_limit + 1
        self._threads = Threads(workers, "work")
        self._metric = Metric(optimizer.metric_fn, self._threads, optimizer.metric_lock)
        self._reflection_lm = optimizer.reflection_lm
        self._integrating: Module = optimizer.stale_candidate_reflection or StaleCandidateReflection()
        self._models = self._twins(student)
        self._adapter = _adapter(optimizer, student, self._metric, self._reflection_lm)
        predictors: list[tuple[str, Any]] = student.named_predictors()
        self._seed_candidate: dict[str, str] = {name: one.signature.instructions for name, one in predictors}
        for path, flex in enumerate_flex_submodules(student).items():
            self._seed_candidate[path] = flex.module_src
        self._log = LoggerAdapter(gepa_logger)
        self._parts = build_parts(options, self._valset, self._log)
        if has_foreign(self._parts):
            self._settings = replace(settings, seed_first=True)
        self._run: GepaRun | None = None
        self._stopped: str | None = None

    @property
    def tracker(self) -> Any:
        """The experiment tracker. Enter it in the caller's thread: mlflow's active run belongs to a thread."""
        return self._parts.tracker

    def stop(self, reason: str) -> None:
        """Start no more steps and finish those that run. Call it on the run's loop."""
        self._stopped = reason
        if self._run is not None:
            self._run.stop(reason)

    async def run(self) -> Module:
        """Run to the end and build the best program."""
        finished = False
        try:
            with dspy.context(**self._snapshot):
                program = await self._evolve()
            finished = True
            return program
        finally:
            if self._models is not None:
                self._models.close()
            self._threads.close(wait=finished and not self._threads.abandoned)

    async def _evolve(self) -> Module:
        optimizer, bus = self._optimizer, EventBus()
        pool = self._pool()
        program = DspyProgram(self._adapter, self._metric, self._threads, self._priced, self._models)
        program.attach(asyncio.get_running_loop())
        endpoints = None if self._models is None else self._models.endpoints
        if self._models is not None:
            self._models.attach(asyncio.get_running_loop())
        run = self._run = GepaRun(pool, program, self._settings, bus, self._integrator(), endpoints)
        if self._stopped is not None:
            run.stop(self._stopped)
        began = anyio.current_time()
        recorder, progress = Recorder(began), Progress(optimizer.max_metric_calls, run.slots)
        bus.subscribe(recorder)
        lineage = None if optimizer.log_dir is None else LineageWriter(optimizer.log_dir)
        if lineage is not None:
            bus.subscribe(lineage)
        bus.subscribe(progress)
        try:
            await run.run()
            await pool.write(pool.finish)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await pool.write(pool.fail, error, run.live)
            if isinstance(error, Exception):
                report(error, hooks_of(self._parts, optimizer))
                if pool.seed_confirmed:
                    hand_over(error, self._result(pool, self._stats(run, recorder, anyio.current_time() - began)))
            raise
        finally:
            progress.close()
            if lineage is not None:
                lineage.close()
            pool.close()
        if run.failed is not None:
            logger.error("AsyncGEPA gave up: %s. The best program so far is returned.", run.failed)
        if run.discarded_share > MUCH_DISCARDED:
            logger.warning(
                "The staleness policy discarded %.0f%% of the children that it looked at: their work was for nothing. "
                "Raise max_gap, lower max_live_tickets, or use staleness='reflective'.",
                100 * run.discarded_share,
            )
        return self._result(pool, self._stats(run, recorder, anyio.current_time() - began))

    def _integrator(self) -> DspyIntegrator:
        code = tuple(self._adapter._flex_paths)  # pyright: ignore[reportPrivateUsage]
        lm = self._reflection_lm or dspy.settings.lm
        return DspyIntegrator(self._integrating, lm, code, self._threads, self._priced, self._models)

    def _twins(self, student: Module) -> LanguageModels | None:
        """The run's twins of the LMs that it will call; None in lockstep, which calls them as they are."""
        settings, lm = self._settings, self._snapshot.get("lm")
        if settings.lockstep:
            return None
        endpoints = Endpoints(settings.adaptive, settings.retry, random.Random(self._optimizer.seed))
        reflection_lm = self._reflection_lm or lm
        tasks = endpoints_of(student.predictors(), lm) or endpoints_of([None], lm)
        endpoints.assign({
            **dict.fromkeys(TASK_STAGES, tasks),
            "propose": endpoints_of([None], reflection_lm),
            "integrate": endpoints_of(self._integrating.predictors(), reflection_lm),
        })  # fmt: skip
        if settings.adaptive is not None:
            endpoints.watchers += watchers(endpoints)
        models = LanguageModels(endpoints)
        self._snapshot["lm"], self._reflection_lm = models.twin(lm), models.twin(self._reflection_lm)
        return models

    def _pool(self) -> Pool:
        lockstep = self._settings.lockstep
        return Pool(
            parts=self._parts,
            options=self._options,
            adapter=self._adapter,
            seed_candidate=self._seed_candidate,
            trainset=self._trainset,
            valset=self._valset,
            logger=self._log,
            checkpoint_seconds=0.0 if lockstep else CHECKPOINT_SECONDS,
            caches_minibatches=lockstep or self._settings.same_data,
        )

    def _stats(self, run: GepaRun, recorder: Recorder, seconds: float) -> AsyncStats:
        return recorder.stats(
            schedule=self._optimizer.schedule,
            seconds=seconds,
            stop_reason=run.stop_reason,
            failed=run.failed is not None,
            proposals=run.counts.proposals,
            metric_calls=run.pool.state.total_num_evals,
            max_metric_calls=self._optimizer.max_metric_calls,
            slots=run.slots.statistics(),
            gaps=run.gaps.as_dict(),
            rollouts=run.rollouts,
            retried_requests=run.rollouts.retried + (0 if self._models is None else self._models.endpoints.retried),
            task_tokens=run.counts.task_tokens,
            reflection_tokens=run.counts.reflection_tokens,
            reflection_calls=run.counts.reflection_calls,
            integration_calls=run.counts.integration_calls,
            cost_dollars=run.counts.cost_dollars,
        )

    def _result(self, pool: Pool, stats: AsyncStats) -> Module:
        optimizer = self._optimizer
        result: Any = GEPAResult.from_state(pool.state, run_dir=optimizer.log_dir, seed=optimizer.seed)
        program: Any = self._adapter.build_program(result.best_candidate)
        if optimizer.track_stats:
            detailed = AsyncGEPAResult.from_gepa_result(result, self._adapter)
            program.detailed_results = AsyncGEPAResult(**vars(detailed), async_stats=stats)
            program.async_stats = stats
        return program


def check_data(student: Module, trainset: Any, teacher: Module | None, valset: Any) -> None:
    if not isinstance(student, Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DataError(f"student is {student!r}, expected a dspy.Module.")
    if teacher is not None:
        raise DataError("teacher is given, but GEPA has no use for one: leave it out.")
    for name, data in (("trainset", trainset), ("valset", valset)):
        if data is None and name == "valset":
            continue
        if data is None or len(data) < 1:
            raise DataError(f"{name} is empty, expected at least one dspy.Example.")
        first = data[0] if isinstance(data, list | tuple) else None
        if isinstance(first, Example) and not isinstance(first, Prediction) and first._input_keys is None:  # pyright: ignore[reportPrivateUsage]
            raise DataError(
                f"{name}[0] does not say which fields are inputs: build it by dspy.Example(...).with_inputs(...)."
            )


def _adapter(optimizer: Any, student: Module, metric: Metric, reflection_lm: Any) -> DspyAdapter:
    """dspy's adapter, set up as ``dspy.GEPA.compile`` sets it up."""
    return DspyAdapter(
        student_module=student,
        metric_fn=optimizer.metric_fn,
        feedback_map={name: _feedback(name, predictor, metric) for name, predictor in student.named_predictors()},
        failure_score=optimizer.failure_score,
        num_threads=optimizer.num_threads,
        add_format_failure_as_feedback=optimizer.add_format_failure_as_feedback,
        rng=random.Random(optimizer.seed),
        reflection_lm=reflection_lm,
        custom_instruction_proposer=optimizer.custom_instruction_proposer,
        custom_code_proposer=optimizer.custom_code_proposer,
        warn_on_score_mismatch=optimizer.warn_on_score_mismatch,
        reflection_minibatch_size=optimizer.reflection_minibatch_size,
    )


def _feedback(name: str, predictor: Any, metric: Metric) -> Callable[..., Any]:
    """What the metric says of one predictor, with a default where it says nothing."""

    def feedback(
        predictor_output: Any, predictor_inputs: Any, module_inputs: Any, module_outputs: Any, captured_trace: Any
    ) -> Any:
        trace = [(predictor, predictor_inputs, predictor_output)]
        result = metric.blocking(module_inputs, module_outputs, captured_trace, name, trace)
        if not hasattr(result, "feedback"):
            return {"score": result, "feedback": f"This trajectory got a score of {result}."}
        if result["feedback"] is None:
            result["feedback"] = f"This trajectory got a score of {result['score']}."
        return result

    return feedback
