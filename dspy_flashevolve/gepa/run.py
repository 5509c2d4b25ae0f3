"""One run of GEPA on the engine: the parts put together, from the seed's validation to the last checkpoint."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Coroutine
from typing import Any

import anyio

from dspy_flashevolve.engine.background import Background, run_with
from dspy_flashevolve.engine.budget import Budget
from dspy_flashevolve.engine.endpoints import Endpoints
from dspy_flashevolve.engine.events import Event, EventBus, RolloutFinished
from dspy_flashevolve.engine.integration import Integrator
from dspy_flashevolve.engine.pipeline import Pipeline
from dspy_flashevolve.engine.rollouts import Rollouts
from dspy_flashevolve.engine.slots import Slots
from dspy_flashevolve.engine.speculation import NOT_SPECULATIVE, ValidationOrder
from dspy_flashevolve.engine.stages import Stage
from dspy_flashevolve.engine.staleness import GapHistogram, Reflective
from dspy_flashevolve.gepa.evaluations import Evaluations
from dspy_flashevolve.gepa.heads import Heads
from dspy_flashevolve.gepa.payloads import Counts, EvolvingProgram
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.resuming import GoingOn, take_up
from dspy_flashevolve.gepa.run_journal import RunJournal
from dspy_flashevolve.gepa.seeding import SeedValidation
from dspy_flashevolve.gepa.services import Services
from dspy_flashevolve.gepa.settings import RunSettings
from dspy_flashevolve.gepa.source import GepaSource
from dspy_flashevolve.gepa.stages import GepaStages
from dspy_flashevolve.gepa.train_yard import TrainYard


class GepaRun:
    """Runs GEPA's stages over a pool.

    Args:
        pool: gepa's state and strategies.
        program: the program under optimization.
        settings: the schedule.
        bus: gets the events.
        integrator: reads stale children; needed by a policy that integrates.
        endpoints: who answers the requests, and when they may be asked; None where nobody minds.
        journal: where the run is written down, so that it can go on; None for nowhere.
    """

    def __init__(
        self,
        pool: Pool,
        program: EvolvingProgram,
        settings: RunSettings,
        bus: EventBus,
        integrator: Integrator | None = None,
        endpoints: Endpoints | None = None,
        journal: RunJournal | None = None,
    ) -> None:
        self.pool = pool
        self._endpoints = endpoints
        self._journal = journal
        self._integrator = integrator
        self.settings = settings
        self.bus = bus
        self.counts = Counts()
        self.gaps = GapHistogram()
        self.slots = Slots(settings.slots, settings.order, settings.clock)
        self.rollouts = Rollouts(
            self.slots,
            bus,
            settings.clock,
            settings.retry,
            single_flight=not settings.lockstep,
            rng=random.Random(pool.options.seed),
            timeout_seconds=settings.rollout_timeout_seconds,
            duplicates=None if settings.lockstep else settings.duplicates,
        )
        if endpoints is not None:
            endpoints.attach(self.slots, bus, settings.clock)
            self.rollouts.on_retry = endpoints.heard_retry
        highest = pool.options.perfect_score
        self._evaluations = Evaluations(
            program, self.rollouts, pool.loader, settings.same_data, math.inf if highest is None else highest
        )
        self._speculation = NOT_SPECULATIVE if settings.lockstep else settings.speculation or NOT_SPECULATIVE
        self._order = ValidationOrder(
            math.inf if highest is None else highest, self._speculation.rounds, pool.options.seed
        )
        self._background = Background()
        self._program = program
        self.pipeline: Pipeline | None = None
        self.budget = Budget(settings.budget_calls)
        self._stop_reason: str | None = None
        self._asked = False
        self._source: GepaSource | None = None
        self._stages_of_gepa: GepaStages | None = None
        self._yard: TrainYard | None = None
        policy = settings.staleness
        self._reflective = policy if isinstance(policy, Reflective) and not settings.lockstep else None
        self.heads = None if self._reflective is None else Heads(pool, self._reflective.rollback_margin)
        bus.subscribe(self._count_tokens)

    def stop(self, reason: str, *, limit: bool = False) -> None:
        """Admit no more tickets; what is admitted drains. The first reason stays. Call it on the run's loop.

        Args:
            reason: a sentence for people.
            limit: the run has reached a limit of its own; nobody has asked for an early end.
        """
        if not self.stop_reason:
            self._stop_reason, self._asked = reason, not limit
        if self.pipeline is not None:
            self.pipeline.stop(reason)
        self._finish_resting()

    @property
    def discarded_share(self) -> float:
        """Of the items that the staleness policy looked at, the share that it discarded."""
        return 0.0 if self._stages_of_gepa is None else self._stages_of_gepa.looks.discarded_share

    @property
    def stop_reason(self) -> str:
        """Why the run ended."""
        pipeline = None if self.pipeline is None else self.pipeline.stop_reason
        source = None if self._source is None else self._source.stop_requested
        return self._stop_reason or source or pipeline or ""

    @property
    def failed(self) -> str | None:
        """Why the run was given up; None when it was not."""
        return None if self._source is None else self._source.failed

    @property
    def stopped(self) -> bool:
        """Whether somebody asked for the end (a signal, a stopper, the file gepa.stop), not one of the run's limits."""
        stopper = self.pool.parts.stopper
        return self._asked or (bool(stopper.said) and not stopper.budget_spent and self.stop_reason == stopper.said)

    @property
    def live(self) -> list[int]:
        """Numbers of the tickets that have not ended."""
        return [] if self._source is None else sorted(self._source.accounts)

    async def run(self) -> None:
        """Run to the end; the pool holds the result.

        Raises:
            RunAbortedError: the provider refused for good, or the seed could not be validated.
            Exception: what a selector, a stopper or a user's strategy raised.
        """
        seeded = anyio.Event()
        resumed = await self.pool.write(self.pool.start)
        past = None
        if self._journal is not None:
            past = await self.pool.write(take_up, self._journal, self.pool, resumed, self.settings.lockstep)
            self.rollouts.log, self._journal.counts = self._journal, self.counts
            self.budget.spent = past.spent
            self._evaluations.past = past
        if resumed:
            self.budget.spent = self.pool.state.total_num_evals
            for scores in self.pool.state.prog_candidate_val_subscores:
                self._order.record(scores)
                self._evaluations.saw(max(scores.values(), default=-math.inf))
            seeded.set()
        source = self._source = GepaSource(
            self.pool,
            self.budget,
            self.settings.admission,
            self.settings.minibatch,
            self.settings.lockstep,
            most_failures=max(10, 2 * self.settings.live_limit),
            slots=self.slots,
            heads=self.heads if self._reflective is not None and self._reflective.train else None,
            frontier_share=1.0 if self._reflective is None else self._reflective.frontier_share,
        )
        if past is not None:
            source.going_on = GoingOn(past, self.pool, source.heads)
        source.spent_up = lambda: self.settings.spent_up(self.counts, past)
        source.mean_gap = lambda: self.gaps.mean_lately("before_commit")
        source.closed = self._finish_resting
        source.pending = lambda: self._background.running > 0 or not seeded.is_set()
        self._background.ended = self._wake
        if not self.settings.lockstep:
            self.pool.calls_made = lambda: self.budget.spent
        controller = None if self.settings.lockstep else self.settings.controller
        self.pipeline = Pipeline(self._stages(source, seeded), source, self.bus, self.settings.clock, controller)
        self.slots.on_idle = self._wake
        if self._stop_reason:
            self.pipeline.stop(self._stop_reason)
        await self._run_with_seed(source, seeded)

    async def _run_with_seed(self, source: GepaSource, seeded: anyio.Event) -> None:
        """In lockstep the seed comes first, as in gepa; else tickets start beside its validation."""
        pipeline = self.pipeline
        assert pipeline is not None
        seed = SeedValidation(self.pool, self._evaluations, self._order, self.budget, seeded)

        async def work() -> None:
            if not seeded.is_set() and (self.settings.lockstep or self.settings.seed_first):
                await self._seeded(seed, source)
            elif not seeded.is_set():
                self._background.start(lambda: self._seeded(seed, source))
            elif self.settings.lockstep and source.going_on is not None and source.going_on.left:
                pass  # gepa asks its stoppers between tickets, and here is one to be finished first
            elif await self.pool.write(self.pool.should_stop):
                source.stop_requested = self.pool.parts.stopper.said
            await pipeline.run()

        await run_with(self._background, work, self._watchers())
        source.end()

    def _watchers(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        watchers = [] if self._endpoints is None else self._endpoints.watchers
        seconds = self.settings.max_seconds
        return watchers if seconds is None else [*watchers, lambda: self._stop_after(seconds)]

    async def _seeded(self, seed: SeedValidation, source: GepaSource) -> None:
        if await seed.run():
            source.stop_requested = self.pool.parts.stopper.said
        self._wake()

    async def _stop_after(self, seconds: float) -> None:
        await anyio.sleep(seconds)
        self.stop(f"max_seconds={seconds:g} is over", limit=True)

    def _stages(self, source: GepaSource, seeded: anyio.Event) -> list[Stage]:
        services = Services(
            pool=self.pool,
            program=self._program,
            evaluations=self._evaluations,
            rollouts=self.rollouts,
            accounts=source.accounts,
            working=source.working,
            wake=self._wake,
            bus=self.bus,
            gaps=self.gaps,
            counts=self.counts,
            seeded=seeded,
            lockstep=self.settings.lockstep,
            staleness=self.settings.staleness,
            saves_calls=source.saves_calls,
            speculation=self._speculation,
            order=self._order,
            background=self._background,
            clock=self.settings.clock,
            journal=self._journal,
            past=self._evaluations.past,
        )
        yard = None
        if self._reflective is not None:
            assert self._integrator is not None, "a policy that integrates needs an integrator"
            assert self.heads is not None
            strict = self.settings.strict_live
            yard = TrainYard(services, self._reflective, self._integrator, self.heads, source, self.budget, strict)
            yard.queued = lambda: 0 if self.pipeline is None else self.pipeline.waiting("integrate")
        self._yard = yard
        self._stages_of_gepa = GepaStages(services, yard)
        # Tickets that only wait make room for further ones: there may be more than the limit.
        width = self.settings.live_limit * (1 if yard is None else 4)
        handlers: dict[str, Any] = self._stages_of_gepa.handlers()
        workers = {name: 1 if name == "commit" else width for name in handlers}
        # The validations of heads wait for those of later heads, which must find a worker.
        least = {"validate": width} if self._reflective is not None and self._reflective.train else {}
        stages = [Stage(n, handlers[n], workers[n], width, least_workers=least.get(n, 1)) for n in handlers]
        return stages if yard is None else [*stages, yard.stage(width)]

    def _finish_resting(self) -> None:
        stopping = self._stop_reason is not None or (self.pipeline is not None and bool(self.pipeline.stop_reason))
        if self._yard is not None:
            self._yard.finish_resting(stopping)

    def _wake(self) -> None:
        if self.pipeline is not None:
            self.pipeline.wake()
            if self.pipeline.stop_reason is not None:  # the source is not asked any more
                self._finish_resting()

    def _count_tokens(self, event: Event) -> None:
        if isinstance(event, RolloutFinished):
            self.counts.task_tokens += event.tokens
            self.counts.cost_dollars += event.cost_dollars
