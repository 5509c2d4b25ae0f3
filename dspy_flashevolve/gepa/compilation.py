"""One compile of AsyncGEPA: the student, the data and the settings of dspy, turned into one run.

This is where GEPA's parts meet: the pool and its strategies, the program, the schedule, what is shown.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import replace
from typing import Any

import anyio
import dspy
from dspy.primitives import Module
from dspy.teleprompt.gepa.gepa_flex_utils import enumerate_flex_submodules
from dspy.teleprompt.gepa.gepa_utils import LoggerAdapter
from gepa.core.data_loader import ensure_loader
from gepa.core.result import GEPAResult

from dspy_flashevolve.engine.blame import hand_over, report
from dspy_flashevolve.engine.endpoints import Endpoints
from dspy_flashevolve.engine.events import EventBus
from dspy_flashevolve.engine.threads import Threads
from dspy_flashevolve.gepa.options import GepaOptions
from dspy_flashevolve.gepa.parts import build_parts, has_foreign, hooks_of
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.run import GepaRun
from dspy_flashevolve.gepa.run_journal import RunJournal
from dspy_flashevolve.gepa.settings import RunSettings
from dspy_flashevolve.modules.integrate import StaleCandidateReflection
from dspy_flashevolve.observe.lineage import LineageWriter
from dspy_flashevolve.observe.progress import Progress
from dspy_flashevolve.observe.statistics import AsyncStats, Recorder, log_summary
from dspy_flashevolve.programs.lm import LanguageModels, endpoints_of
from dspy_flashevolve.programs.metric import Metric
from dspy_flashevolve.programs.program import DspyIntegrator, DspyProgram, adapter_of
from dspy_flashevolve.programs.runner import settings_snapshot
from dspy_flashevolve.programs.vllm_metrics import watchers
from dspy_flashevolve.recording import begin_journal
from dspy_flashevolve.results import Best

logger = logging.getLogger(__name__)
gepa_logger = logging.getLogger("dspy.teleprompt.gepa.gepa")
"""gepa's own log lines go where ``dspy.GEPA`` sends them."""
MUCH_DISCARDED = 0.5
"""Share of the children from which a run says that its staleness policy discards too much."""
TASK_STAGES = ("rollout", "screen", "prefix", "validate")
"""Stages whose requests run the program."""
CHECKPOINT_SECONDS = 5.0
"""With ``log_dir``, the least time between two checkpoints of an asynchronous run."""


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
        self._student = student
        self._settings = settings
        self._priced = settings.max_cost is not None
        workers = self._settings.slots + self._settings.live_limit + 1
        self._threads = Threads(workers, "work")
        self._metric = Metric(optimizer.metric_fn, self._threads, optimizer.metric_lock)
        self._reflection_lm = optimizer.reflection_lm
        self._integrating: Module = optimizer.stale_candidate_reflection or StaleCandidateReflection()
        self._models = self._paced(student)
        self._adapter = adapter_of(optimizer, student, self._metric, self._reflection_lm)
        predictors: list[tuple[str, Any]] = student.named_predictors()
        self._seed_candidate: dict[str, str] = {name: one.signature.instructions for name, one in predictors}
        for path, flex in enumerate_flex_submodules(student).items():
            self._seed_candidate[path] = flex.module_src
        self._log = LoggerAdapter(gepa_logger)
        self._parts = build_parts(options, self._valset, self._log)
        if has_foreign(self._parts):
            self._settings = replace(settings, seed_first=True)
        self.best = Best(self._adapter, optimizer.track_stats)
        self._run: GepaRun | None = None
        self._stopped: str | None = None

    @property
    def tracker(self) -> Any:
        """The experiment tracker. Enter it in the caller's thread: mlflow's active run belongs to a thread."""
        return self._parts.tracker

    def stop(self, reason: str) -> None:
        """Start no more steps and finish those that run. Call it on the run's loop."""
        if self._stopped is None:
            logger.warning(
                "%s: steps that run are finished, no further one starts. A second time cancels them.", reason
            )
        self._stopped = self._stopped or reason
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
        journal = self._journal()
        try:
            return await self._evolved(journal)
        finally:
            if journal is not None:
                journal.journal.close()  # whatever went wrong, others may have the directory

    async def _evolved(self, journal: RunJournal | None) -> Module:
        optimizer, bus = self._optimizer, EventBus()
        pool = self._pool()
        self.best.begin(pool.standing)
        program = DspyProgram(self._adapter, self._metric, self._threads, self._priced, self._models)
        program.attach(asyncio.get_running_loop())
        lineage = None if journal is None else LineageWriter(optimizer.log_dir, journal.journal.redaction)
        endpoints = None if self._models is None else self._models.endpoints
        if self._models is not None:
            self._models.attach(asyncio.get_running_loop())
        run = self._run = GepaRun(pool, program, self._settings, bus, self._integrator(), endpoints, journal)
        if self._stopped is not None:
            run.stop(self._stopped)
        began = anyio.current_time()
        recorder, progress = Recorder(began), Progress(optimizer.max_metric_calls, run.slots)
        bus.subscribe(recorder)
        if lineage is not None:
            bus.subscribe(lineage)
        bus.subscribe(progress)
        if journal is not None:
            bus.subscribe(journal)
        state, reason = "aborted", ""
        try:
            await run.run()
            await pool.write(pool.finish)
            if journal is not None:
                await journal.journal.flush()
            stats = self._stats(run, recorder, anyio.current_time() - began)
            state, reason = stats.outcome, run.stop_reason
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            with anyio.CancelScope(shield=True):
                await self._failed(pool, error, run.live)
            stats = self._stats(run, recorder, anyio.current_time() - began, error)
            state = stats.outcome
            self.best.end(pool.standing.result, stats)
            if isinstance(error, Exception):
                report(error, hooks_of(self._parts, optimizer))
                if pool.seed_confirmed:
                    hand_over(error, self._result(pool, stats))
            self._summarize(stats, pool, error=isinstance(error, Exception))
            raise
        finally:
            progress.close()
            if lineage is not None:
                lineage.close()
            pool.close()
            if journal is not None:
                journal.session_ended(state, reason)
        if run.discarded_share > MUCH_DISCARDED:
            logger.warning(
                "The staleness policy discarded %.0f%% of the children that it looked at: their work was for nothing. "
                "Raise max_gap, lower max_live_tickets, or use staleness='reflective'.",
                100 * run.discarded_share,
            )
        self._summarize(stats, pool)
        return self._result(pool, stats)

    def _summarize(self, stats: AsyncStats, pool: Pool, error: bool = False) -> None:
        log_summary(logger, stats, pool.standing.score, error, made=f"{stats.proposals} proposals")

    async def _failed(self, pool: Pool, error: BaseException, live: list[int]) -> None:
        """Save what there is. Where that fails too, the first error is the one to tell."""
        try:
            await pool.write(pool.fail, error, live)
        except OSError as also:
            logger.error("The checkpoint could not be written (%s); the one before it is as it was.", also)

    def _journal(self) -> RunJournal | None:
        lms = [self._snapshot.get("lm"), self._reflection_lm, *(p.lm for p in self._student.predictors())]
        return begin_journal(self._optimizer, self._adapter, self._seed_candidate, (self._trainset, self._valset), lms)

    def _integrator(self) -> DspyIntegrator:
        code = tuple(self._adapter._flex_paths)  # pyright: ignore[reportPrivateUsage]
        lm = self._reflection_lm or dspy.settings.lm
        return DspyIntegrator(self._integrating, lm, code, self._threads, self._priced, self._models)

    def _paced(self, student: Module) -> LanguageModels | None:
        """Pace the LMs that the run will call; None in lockstep, which calls them as they are."""
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
        self._snapshot["lm"], self._reflection_lm = models.paced(lm), models.paced(self._reflection_lm)
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

    def _stats(
        self, run: GepaRun, recorder: Recorder, seconds: float, error: BaseException | None = None
    ) -> AsyncStats:
        ended = "stopped" if run.stopped else "finished"
        cancelled = run.stop_reason if run.stopped else "cancelled"
        reason = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else cancelled
        of_run = recorder.stats(
            schedule=self._optimizer.schedule,
            seconds=seconds,
            stop_reason=run.stop_reason if error is None else reason,
            failed=run.failed is not None,
            outcome="aborted" if error is not None else ended if run.failed is None else "failed",
            metric_calls=run.pool.state.total_num_evals,
            max_metric_calls=self._optimizer.max_metric_calls,
            slots=run.slots.statistics(),
            gaps=run.gaps.as_dict(),
            rollouts=run.rollouts,
            retried_requests=run.rollouts.retried + (0 if self._models is None else self._models.endpoints.retried),
            cost_dollars=run.counts.cost_dollars,
        )
        return recorder.async_stats(
            of_run,
            proposals=run.counts.proposals,
            task_tokens=run.counts.task_tokens,
            reflection_tokens=run.counts.reflection_tokens,
            reflection_calls=run.counts.reflection_calls,
            integration_calls=run.counts.integration_calls,
        )

    def _result(self, pool: Pool, stats: AsyncStats) -> Module:
        optimizer = self._optimizer
        self.best.end(GEPAResult.from_state(pool.state, run_dir=optimizer.log_dir, seed=optimizer.seed), stats)
        program = self.best.program()
        assert program is not None, "a run that comes to its end has validated its seed"
        return program
