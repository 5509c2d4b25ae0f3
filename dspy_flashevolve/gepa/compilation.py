"""One compile of AsyncGEPA: the student, the data and the arguments, turned into one run, and what it returns."""

from __future__ import annotations

import asyncio
import difflib
import logging
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import anyio
import dspy
from dspy.primitives import Module
from dspy.teleprompt.gepa.gepa import DspyGEPAResult
from dspy.teleprompt.gepa.gepa_flex_utils import enumerate_flex_submodules
from dspy.teleprompt.gepa.gepa_utils import LoggerAdapter
from gepa.core.data_loader import ensure_loader
from gepa.core.result import GEPAResult

from dspy_flashevolve.engine.admission import LiveSteps, for_slots
from dspy_flashevolve.engine.errors import hand_over, report
from dspy_flashevolve.engine.loop import run_to_end
from dspy_flashevolve.engine.replay import RunJournal
from dspy_flashevolve.engine.staleness import Full, Reflective, StalenessPolicy, policy_named
from dspy_flashevolve.gepa.evaluate import Workflow
from dspy_flashevolve.gepa.options import GepaOptions, build_parts, has_foreign, hooks_of
from dspy_flashevolve.gepa.pool import BestResult, Pool
from dspy_flashevolve.gepa.resume import check_checkpoint
from dspy_flashevolve.gepa.step import GepaLoop
from dspy_flashevolve.modules.integrate import StaleCandidateReflection
from dspy_flashevolve.observe.statistics import AsyncStats, log_summary
from dspy_flashevolve.programs.fingerprints import fingerprints_of, open_journal
from dspy_flashevolve.programs.metric import Metric
from dspy_flashevolve.programs.program import DspyProgram, adapter_of
from dspy_flashevolve.programs.run import DspyRun

logger = logging.getLogger(__name__)
gepa_logger = logging.getLogger("dspy.teleprompt.gepa.gepa")
"""gepa's own log lines, and what is told of every run, go where ``dspy.GEPA`` sends them: dspy shows them."""
GENERATIONS, GENERATIONS_OF_CHANGES = 12.0, 6.0
"""A limited budget is spread over at least this many generations (:class:`LiveSteps`); fewer where the work of many
steps comes together in one head."""
MUCH_DISCARDED = 0.5
"""Share of the children from which a run says that its staleness policy discards too much."""
CHECKPOINT_SECONDS = 5.0
"""With ``log_dir``, the least time between two checkpoints of an asynchronous run."""


@dataclass(frozen=True)
class AsyncGEPAResult(DspyGEPAResult):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
    """``dspy.GEPA``'s detailed results, with the figures of the asynchronous run beside them.

    Args:
        async_stats: throughput, occupancy, gaps and commits; see :class:`AsyncStats`. None while the run goes on.
    """

    async_stats: AsyncStats | None = None


class Best:
    """The best program of one run, for any thread at any time; it waits for nobody.

    Copies and pickles of it are empty: a run belongs to the optimizer that began it.

    Args:
        adapter: builds programs.
        track_stats: whether programs carry detailed results.
        found: the pool's best result so far.
    """

    def __init__(self, adapter: Any = None, track_stats: bool = False, found: BestResult | None = None) -> None:
        self._adapter, self._track_stats, self._found = adapter, track_stats, found
        self._end: tuple[GEPAResult[Any, Any] | None, AsyncStats] | None = None

    def __reduce__(self) -> Any:
        return (Best, ())

    def end(self, result: GEPAResult[Any, Any] | None, stats: AsyncStats) -> None:
        """The run has ended with ``result``, None where the seed was not validated."""
        self._end = (result, stats)

    def program(self) -> Module | None:
        """A new program each time; None before the seed is validated."""
        result, stats = self._end or (None if self._found is None else self._found.result, None)
        if result is None:
            return None
        program: Any = self._adapter.build_program(result.best_candidate)
        if self._track_stats:
            detailed = AsyncGEPAResult.from_gepa_result(result, self._adapter)
            program.detailed_results = AsyncGEPAResult(**vars(detailed), async_stats=stats)
            program.async_stats = stats
        return program


class Compilation:
    """One run of one optimizer: everything that belongs to it and to no other.

    Args:
        optimizer: an AsyncGEPA; only its arguments are read.
        options: gepa's configuration.
        student: the program; it is not changed.
        trainset, valset: examples or gepa's loaders; valset None means the trainset.
        initial: programs of the student's make to begin from beside it.

    Raises:
        RunDirectoryError: ``log_dir`` cannot be written, is in use, or holds another run.
    """

    def __init__(
        self,
        optimizer: Any,
        options: GepaOptions,
        student: Module,
        trainset: Any,
        valset: Any,
        initial: Sequence[Module] = (),
    ) -> None:
        self._optimizer, self._options, self._student = optimizer, options, student
        self._lockstep = optimizer.schedule == "lockstep"
        self._same_data = valset is None or valset is trainset
        self._trainset: Any = ensure_loader(trainset)
        self._valset: Any = self._trainset if self._same_data else ensure_loader(cast(Any, valset))
        self._integrating: Module = optimizer.stale_candidate_reflection or StaleCandidateReflection()
        self._seed = texts_of(student)
        self._initial = [texts_of(one) for one in initial]
        if options.run_dir is not None:
            check_checkpoint(options.run_dir, bool(options.get("use_cloudpickle")))
        journal = self._journal()
        try:
            self._build(journal)
        except BaseException:
            if journal is not None:
                journal.journal.close()  # whatever went wrong, others may have the directory
            raise

    def _build(self, journal: RunJournal | None) -> None:
        optimizer, lockstep = self._optimizer, self._lockstep
        run = self._run = DspyRun(
            name="AsyncGEPA",
            stages=self._stages(),
            num_threads=optimizer.num_threads,
            max_concurrency=optimizer.max_concurrency,
            max_metric_calls=None if lockstep else optimizer.max_metric_calls,
            max_seconds=optimizer.max_seconds,
            schedule=optimizer.schedule,
            rollout_timeout_seconds=optimizer.rollout_timeout_seconds,
            max_outage_seconds=optimizer.workflow.max_outage_seconds,
            median_seconds=optimizer.workflow.median_seconds,
            seed=optimizer.seed,
            paced=not lockstep,
            journal=journal,
            shown_calls=optimizer.max_metric_calls,
        )
        self._metric = Metric(optimizer.metric_fn, run.threads, optimizer.metric_lock)
        reflection_lm = run.paced(optimizer.reflection_lm)
        adapter = adapter_of(optimizer, self._student, self._metric, reflection_lm)
        log = LoggerAdapter(gepa_logger)
        self._parts = build_parts(self._options, self._valset, log)
        self._pool = Pool(
            parts=self._parts,
            options=self._options,
            adapter=adapter,
            seed_candidate=self._seed,
            trainset=self._trainset,
            valset=self._valset,
            logger=log,
            checkpoint_seconds=0.0 if lockstep else CHECKPOINT_SECONDS,
            caches_minibatches=lockstep or self._same_data,
            calls_made=lambda: run.budget.spent,
            journal=journal,
            shares_randomness=lockstep,
        )
        self.best = Best(adapter, optimizer.track_stats, self._pool.best)
        policy = Full() if lockstep else self._usable_policy()
        minibatch = optimizer.reflection_minibatch_size or 3
        self._loop = GepaLoop(
            run,
            self._pool,
            DspyProgram(adapter, self._metric, run.threads, run.models),
            policy=policy,
            workflow=optimizer.workflow,
            admission=admission_of(optimizer.workflow, policy, run.slots, min(minibatch, run.slots)),
            minibatch=minibatch,
            integration=(self._integrating, optimizer.reflection_lm, tuple(adapter._flex_paths)),  # pyright: ignore[reportPrivateUsage]
            same_data=self._same_data,
            seed_first=has_foreign(self._parts),
            max_reflection_calls=optimizer.max_reflection_calls,
            max_cost=optimizer.max_cost,
            initial=self._initial,
        )

    def run_sync(self) -> Module:
        """Run to the end on a loop of its own, and build the best program; see :func:`run_to_end` for signals."""
        with self._tracked():  # in the caller's thread: mlflow's active run belongs to a thread
            return run_to_end(self._run_to_result, self._run.stop)

    async def run_async(self) -> Module:
        """The same on the caller's loop."""
        with self._tracked():
            return await self._run_to_result()

    @contextmanager
    def _tracked(self) -> Generator[None, None, None]:
        """gepa's tracker around the run; where it cannot begin, others may have the directory."""
        try:
            with self._parts.tracker:
                yield
        finally:
            if self._run.journal is not None:
                self._run.journal.journal.close()

    async def _run_to_result(self) -> Module:
        run, pool = self._run, self._pool
        try:
            async with run.opened():
                self._metric.attach(asyncio.get_running_loop())
                await self._evolved()
        except BaseException as error:
            stats = self._stats()
            self.best.end(pool.best.result, stats)
            if isinstance(error, Exception):
                report(error, hooks_of(self._parts, self._optimizer))
                if pool.seed_confirmed:
                    hand_over(error, self._result(stats))
            log_summary(logger, stats, isinstance(error, Exception))
            raise
        stats = self._stats()
        if self._loop.discarded_share > MUCH_DISCARDED:
            logger.warning(
                "The staleness policy discarded %.0f%% of the children that it looked at: their work was for nothing. "
                "Raise max_gap, lower Workflow.live_steps, or use staleness='reflective'.",
                100 * self._loop.discarded_share,
            )
        log_summary(logger if stats.failed else gepa_logger, stats)
        return self._result(stats)

    async def _evolved(self) -> None:
        run, pool = self._run, self._pool
        try:
            await self._loop.evolve()
            await pool.write(pool.finish)
            if run.journal is not None:
                await run.journal.journal.flush()
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                try:
                    await pool.write(pool.fail, error)
                except OSError as also:  # the first error is the one to tell
                    logger.error("The checkpoint could not be written (%s); the one before it is as it was.", also)
            raise
        finally:
            pool.close()

    def _journal(self) -> RunJournal | None:
        optimizer, student = self._optimizer, self._student
        parts = fingerprints_of(student, self._seed, self._trainset, self._valset, optimizer.metric_fn)
        lms = [dspy.settings.lm, optimizer.reflection_lm, *(one.lm for one in student.predictors())]
        return open_journal(optimizer, parts, lms, each_once=self._lockstep)

    def _stages(self) -> dict[str, Sequence[Any]]:
        """Stage -> what its requests ask, in the order in which the stages go before others where slots are scarce:
        what is nearer to a commit, but the long rest of a validation, on which nobody waits, after the screen and a
        validation's prefix."""
        reflection = self._optimizer.reflection_lm
        integrating = [getattr(one, "lm", None) or reflection for one in self._integrating.predictors()]
        student = [self._student]
        return {
            "rollout": student,
            "propose": [reflection],
            "integrate": integrating or [reflection],
            "validate": student,
            "screen": student,
            "prefix": student,
        }

    def _usable_policy(self) -> StalenessPolicy:
        """The policy; one that integrates needs an LM to do it."""
        policy = policy_named(self._optimizer.staleness)
        silent = [one for one in self._integrating.predictors() if getattr(one, "lm", None) is None]
        has_lm = self._optimizer.reflection_lm is not None or dspy.settings.lm is not None
        if isinstance(policy, Reflective) and silent and not has_lm:
            logger.warning("There is no LM that could integrate stale candidates: they are admitted as they are.")
            return Full()
        return policy

    def _stats(self) -> AsyncStats:
        of_run = self._run.statistics(metric_calls=self._pool.state.total_num_evals)
        found = self._pool.best.result
        return self._run.recorder.async_stats(
            of_run,
            proposals=self._loop.proposals,
            reflection_calls=self._loop.reflection_calls,
            integration_calls=self._loop.integration_calls,
            changes=self._loop.changes(),
            seed_score=None if found is None else found.val_aggregate_scores[0],
            best_score=self._pool.best.score,
            prompt_change="" if found is None else _difference(self._seed, found.candidates[found.best_idx]),
        )

    def _result(self, stats: AsyncStats) -> Module:
        optimizer = self._optimizer
        result = GEPAResult[Any, Any].from_state(self._pool.state, run_dir=optimizer.log_dir, seed=optimizer.seed)
        self.best.end(result, stats)
        program = self.best.program()
        assert program is not None, "a run that comes to its end has validated its seed"
        return program


def texts_of(program: Module) -> dict[str, str]:
    """What evolves of a program: component -> text, instructions of predictors and source of dspy.Flex submodules."""
    predictors: list[tuple[str, Any]] = program.named_predictors()
    sources: dict[str, str] = {path: flex.module_src for path, flex in enumerate_flex_submodules(program).items()}
    return {name: one.signature.instructions for name, one in predictors} | sources


def _difference(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """A unified diff of the texts of two candidates, component by component."""
    lines = [
        line
        for name in before
        for line in difflib.unified_diff(
            before[name].splitlines(), after[name].splitlines(), f"{name}, before", f"{name}, after", lineterm="", n=1
        )
    ]
    return "\n".join(lines)


def admission_of(workflow: Workflow, policy: StalenessPolicy, slots: int, burst: int) -> LiveSteps:
    """When a step may start: as many as the workflow says, else a bound that follows from slots, budget and policy."""
    if workflow.live_steps is not None:
        return LiveSteps(workflow.live_steps, strict=True)
    if isinstance(policy, Reflective) and policy.changes:  # all steps are short: each does one step's work
        return LiveSteps(max(2, math.ceil(3 * slots / 4)), None, GENERATIONS_OF_CHANGES, burst, slots)
    return for_slots(slots, GENERATIONS, burst=burst)
