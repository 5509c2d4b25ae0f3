"""What any evolution loop on the engine needs for one run: slots, requests, threads, paced LMs, events, statistics.

A loop brings its stages and says what a ticket works on; docs/adding-an-algorithm.md writes one from beginning to end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import dspy
from dspy.primitives.module import Module

from dspy_flashevolve.engine.admission import Admission, LiveTickets
from dspy_flashevolve.engine.background import Background, run_with
from dspy_flashevolve.engine.budget import Budget
from dspy_flashevolve.engine.claims import SlotOrder
from dspy_flashevolve.engine.commits import Commits
from dspy_flashevolve.engine.control import WorkflowController
from dspy_flashevolve.engine.errors import ConfigurationError, RolloutUnresolvedError
from dspy_flashevolve.engine.loop import run_to_end
from dspy_flashevolve.engine.pipeline import Pipeline, Source
from dspy_flashevolve.engine.retries import RetryPolicy
from dspy_flashevolve.engine.slots import SlotStatistics
from dspy_flashevolve.engine.sources import OneAtATime, Select, TicketSource
from dspy_flashevolve.engine.stages import Outcomes, Stage, unresolved_fails
from dspy_flashevolve.engine.stragglers import Duplicates
from dspy_flashevolve.observe.progress import Progress
from dspy_flashevolve.observe.statistics import Outcome, Recorder, RunStats
from dspy_flashevolve.programs.requests import Requests, check_lms
from dspy_flashevolve.scheduling import Schedule, check_counts, check_run, order_named, width_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEAST_WORKERS = 64
"""Workers of a stage that does not say how many. One whose request waits without a slot must not hold up others."""


class Workbench(Requests):
    """One run of an evolution loop.

    Make it, give the loop's async main function to :meth:`run_sync` or :meth:`run_async`, and let that function call
    :meth:`evolve` with the loop's stages.

    Args:
        lms: stage -> what its requests ask: LMs, modules (the LMs of their predictors), or None for the configured
            LM. Every stage that makes requests is in it, in the order of the way that an item takes: a later stage goes
            first where slots are scarce.
        name: of the optimizer, for people.
        num_threads: requests in flight at most, over all stages. Default: found out while the run goes on, up to
            ``max_concurrency``; ``dspy.settings.num_threads`` in lockstep, and where a module in ``lms`` runs in
            threads unless ``max_concurrency`` is given.
        max_concurrency: the most requests in flight when ``num_threads`` is None. Default: 256.
        budget_calls: metric calls that are never exceeded; None for no limit.
        seed: of the tickets' randomness, and of jitter.
        schedule: "async", or "lockstep": one ticket at a time, nothing beside it, the same slots.
        slot_order: who gets the next free slot: "deepest" (default), "value", or a :class:`SlotOrder`.
        max_seconds: no ticket starts after it; what runs is finished. None for no limit.
        priced: work out what LM calls cost, in dollars.
        rollout_timeout_seconds, duplicate_stragglers: as in :class:`AsyncGEPA`.
        retry: how often a request is made that the provider turns away, and when.
        depths: stage -> how much goes before others where slots are scarce, above 0. Default: by the order of ``lms``.

    Raises:
        ConfigurationError: an argument that cannot work, with the reason.
    """

    def __init__(
        self,
        *,
        lms: Mapping[str, Sequence[Any]],
        name: str = "flashevolve",
        num_threads: int | None = None,
        max_concurrency: int | None = None,
        budget_calls: int | None = None,
        seed: int | None = 0,
        schedule: Schedule = "async",
        slot_order: str | SlotOrder = "deepest",
        max_seconds: float | None = None,
        priced: bool = False,
        rollout_timeout_seconds: float | None = None,
        duplicate_stragglers: Duplicates | None = None,
        retry: RetryPolicy | None = None,
        depths: Mapping[str, int] | None = None,
    ) -> None:
        self.name, self.seed, self.schedule, self.slot_order = name, seed, schedule, slot_order
        self.num_threads, self.max_concurrency, self.max_seconds = num_threads, max_concurrency, max_seconds
        self.rollout_timeout_seconds, self.duplicate_stragglers = rollout_timeout_seconds, duplicate_stragglers
        self.budget_calls = budget_calls
        check_run(self)
        check_counts(self, "budget_calls")
        check_lms(lms)
        self.lockstep = schedule == "lockstep"
        width, adaptive = width_of(self, [one for listed in lms.values() for one in listed if isinstance(one, Module)])
        super().__init__(
            lms=lms,
            width=width,
            adaptive=adaptive,
            order=order_named(slot_order),
            lockstep=self.lockstep,
            seed=seed,
            priced=priced,
            retry=retry,
            timeout_seconds=rollout_timeout_seconds,
            duplicates=duplicate_stragglers,
            depths=depths,
        )
        self.budget = Budget(budget_calls)
        self.commits = Commits(self.bus, self.clock)
        self.gaps = self.commits.gaps
        self.background = Background()
        self.pipeline: Pipeline | None = None
        self._recorder: Recorder | None = None
        self._began = 0.0
        self._end: tuple[float, SlotStatistics] | None = None
        self._stop: tuple[str, Outcome] | None = None
        self._error: BaseException | None = None

    def run_sync(self, main: Callable[[], Awaitable[T]]) -> T:
        """Run ``main`` on a loop of its own and wait for it: in a script, a thread, or a notebook cell.

        Ctrl-C and SIGTERM are heard as in :meth:`AsyncGEPA.compile`.

        Raises:
            KeyboardInterrupt: it was cancelled by a second signal.
            Exception: what ``main`` raised.
        """
        return run_to_end(lambda: self.run_async(main), self.stop)

    async def run_async(self, main: Callable[[], Awaitable[T]]) -> T:
        """Run ``main`` on the caller's loop, real or virtual."""
        async with self.opened():
            return await main()

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[Workbench, None]:
        """Everything is ready for requests inside the block; once a workbench.

        Raises:
            ConfigurationError: it was opened before.
        """
        if self._recorder is not None:
            raise ConfigurationError("a workbench is for one run, and this one has been opened before: make another.")
        self.clock.attach()
        self._began = self.clock()
        self._recorder, progress = Recorder(self._began), Progress(self.budget.limit, self.slots, self.name)
        self.bus.subscribe(self._recorder)
        self.bus.subscribe(progress)
        self.endpoints.attach(self.slots, self.bus, self.clock)
        self.models.attach(asyncio.get_running_loop())
        try:
            with dspy.context(**self.settings):
                yield self
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._end = self.clock(), self.slots.statistics()
            progress.close()
            self.models.close()
            self.threads.close(wait=self._error is None and not self.threads.abandoned)

    async def evolve(
        self, stages: Sequence[Stage], source: Source, controller: WorkflowController | None = None
    ) -> None:
        """Run the stages until the source is exhausted or a stop is asked for, and what runs beside them has ended.

        It may be called several times in a run, one after the other.

        Args:
            stages: those of :meth:`stage`, or any others.
            source: that of :meth:`source`, or any other. In lockstep it is asked only while no ticket lives.
            controller: moves workers between the stages; not in lockstep.

        Raises:
            RunAbortedError: the provider refused for good.
            Exception: what a handler, the source or the work beside them raised, after the rest was cancelled.
        """
        source = OneAtATime(source) if self.lockstep else source
        pipeline = Pipeline(stages, source, self.bus, self.clock, None if self.lockstep else controller)
        self.pipeline = pipeline
        self.slots.on_idle = self.background.ended = pipeline.wake
        if self._stop is not None:
            pipeline.stop(self._stop[0])
        await run_with(self.background, pipeline.run, [self._watch_time, *self.endpoints.watchers])

    async def beside(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do what no ticket waits for, beside the stages of :meth:`evolve`; in lockstep at once, before this returns.

        Call it from a handler or while a ticket is selected. What ``work`` raises ends the run; where a request of it
        got no answer, that is logged.
        """

        async def guarded() -> None:
            try:
                await work()
            except RolloutUnresolvedError as error:
                logger.warning("%s: work beside the steps is left undone: %s", self.name, error)

        if self.lockstep:
            await guarded()
        else:
            self.background.start(guarded)

    def stop(self, reason: str, outcome: Outcome = "stopped") -> None:
        """Start no more tickets; what runs is finished. The first reason stays. Call it on the run's loop.

        Args:
            reason: a sentence for people.
            outcome: "stopped" where somebody asked for it, "finished" at a limit of the run, "failed" where it is given
                up.
        """
        if self._stop is None:
            self._stop = reason, outcome
            if outcome != "finished":
                logger.warning("%s: %s. What runs is finished, no further step starts.", self.name, reason)
        if self.pipeline is not None:
            self.pipeline.stop(reason)

    @property
    def stop_reason(self) -> str:
        """Why the run ended, or does not start any more tickets; empty while it does."""
        pipeline = None if self.pipeline is None else self.pipeline.stop_reason
        return self._stop[0] if self._stop is not None else pipeline or ""

    def statistics(self) -> RunStats:
        """What the run has done so far.

        Raises:
            ConfigurationError: it has not been opened yet.
        """
        if self._recorder is None:
            raise ConfigurationError("the workbench has not been opened, so that there are no statistics yet.")
        now, slots = self._end or (self.clock(), self.slots.statistics())
        error, outcome = self._error, "finished" if self._stop is None else self._stop[1]
        said = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else "cancelled"
        return self._recorder.stats(
            schedule=self.schedule,
            seconds=now - self._began,
            stop_reason=self.stop_reason if error is None else said,
            failed=outcome == "failed",
            outcome=outcome if error is None else "aborted",
            metric_calls=self.budget.spent,
            max_metric_calls=self.budget.limit,
            slots=slots,
            gaps=self.gaps.as_dict(),
            rollouts=self.rollouts,
            retried_requests=self.rollouts.retried + self.endpoints.retried,
        )

    def source(self, select: Select, *, calls: int = 0, admission: Admission | None = None) -> TicketSource:
        """A source of tickets that this run's budget pays for.

        Args:
            select: what a ticket works on.
            calls: metric calls that a ticket may cost at most.
            admission: how many tickets may live. Default: as many as there are slots. In lockstep it is one.
        """
        rule = LiveTickets(self.width) if admission is None else admission
        source = TicketSource(select, self.budget, calls, rule, self.slots, self.seed)
        source.on_limit = lambda reason: self.stop(reason, "finished")
        source.on_failure = lambda reason: self.stop(reason, "failed")
        source.pending = lambda: self.background.running > 0
        source.mean_gap = self.commits.mean_gap
        return source

    def stage(
        self,
        name: str,
        handler: Callable[[Any], Awaitable[Outcomes]],
        *,
        workers: int | None = None,
        batch: int | None = None,
        ready: Callable[[int], bool] | None = None,
    ) -> Stage:
        """A stage whose tickets fail where a request got no answer.

        Args:
            workers: items that it works on at once. Default: so many that the slots decide. 1 for the one stage that
                changes what evolves.
            handler, batch, ready: see :class:`Stage`. In lockstep a batch begins with what there is.
        """
        ready = None if self.lockstep else ready
        width = max(LEAST_WORKERS, self.width)
        return Stage(name, unresolved_fails(handler), width if workers is None else workers, width, batch, ready)

    async def _watch_time(self) -> None:
        if self.max_seconds is not None:
            await anyio.sleep(self._began + self.max_seconds - self.clock())
            self.stop(f"max_seconds={self.max_seconds:g} is over", "finished")
