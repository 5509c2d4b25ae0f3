"""One run of GEPA on the engine: the parts put together, from the seed's validation to the last checkpoint."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio

from dspy_flashevolve.engine.admission import Admission
from dspy_flashevolve.engine.budget import Budget, Reservation
from dspy_flashevolve.engine.errors import RolloutUnresolvedError, RunAbortedError
from dspy_flashevolve.engine.events import Event, EventBus, RolloutFinished
from dspy_flashevolve.engine.pipeline import Pipeline
from dspy_flashevolve.engine.rollouts import RetryPolicy, Rollouts
from dspy_flashevolve.engine.slots import Claim, SlotOrder, Slots
from dspy_flashevolve.engine.stages import Stage
from dspy_flashevolve.engine.staleness import Full, GapHistogram, StalenessPolicy
from dspy_flashevolve.gepa.evaluations import Evaluations
from dspy_flashevolve.gepa.payloads import Counts, EvolvingProgram
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.source import GepaSource
from dspy_flashevolve.gepa.stages import DEPTHS, GepaStages, Services

SEED_TICKET = -1
"""The seed's validation belongs to no ticket; this number stands for it in claims and events."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How a run is scheduled.

    Args:
        slots: requests in flight at most, over all stages.
        live_limit: tickets that live at once at most; sizes the stages' workers and queues.
        admission: decides when a ticket may start.
        budget_calls: metric calls that are never exceeded; None for no limit of the engine's own.
        minibatch: training examples a task, for the estimate of a ticket's cost.
        lockstep: one ticket at a time, the seed first, exactly as gepa.
        seed_first: no ticket starts before the seed is validated: a strategy of the user's may look at its scores.
        staleness: looks at every child after its screen and before its commit.
        max_seconds: no ticket starts after it; None for no limit.
        same_data: the training set is the validation set.
        order: who gets the next free slot; None for the default.
        retry: what happens when the provider asks to come back later.
        clock: seconds.
    """

    slots: int
    live_limit: int
    admission: Admission
    budget_calls: int | None
    minibatch: int
    lockstep: bool = False
    seed_first: bool = False
    staleness: StalenessPolicy = field(default_factory=Full)
    max_seconds: float | None = None
    same_data: bool = False
    order: SlotOrder | None = None
    retry: RetryPolicy | None = None
    clock: Callable[[], float] = time.monotonic


class GepaRun:
    """Runs GEPA's stages over a pool.

    Args:
        pool: gepa's state and strategies.
        program: the program under optimization.
        settings: the schedule.
        bus: gets the events.
    """

    def __init__(self, pool: Pool, program: EvolvingProgram, settings: RunSettings, bus: EventBus) -> None:
        self.pool = pool
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
        )
        self._evaluations = Evaluations(program, self.rollouts, pool.loader, settings.same_data)
        self._program = program
        self.pipeline: Pipeline | None = None
        self.budget = Budget(settings.budget_calls)
        self._stop_reason: str | None = None
        self._source: GepaSource | None = None
        bus.subscribe(self._count_tokens)

    def stop(self, reason: str) -> None:
        """Admit no more tickets; what is admitted drains. Call it on the run's loop."""
        self._stop_reason = self._stop_reason or reason
        if self.pipeline is not None:
            self.pipeline.stop(reason)

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
        if resumed:
            self.budget.spent = self.pool.state.total_num_evals
            seeded.set()
        source = self._source = GepaSource(
            self.pool,
            self.budget,
            self.settings.admission,
            self.settings.minibatch,
            self.settings.lockstep,
            most_failures=max(10, 2 * self.settings.live_limit),
        )
        if not self.settings.lockstep:
            self.pool.calls_made = lambda: self.budget.spent
        self.pipeline = Pipeline(self._stages(source, seeded), source, self.bus, self.settings.clock)
        if self._stop_reason:
            self.pipeline.stop(self._stop_reason)
        await self._run_with_seed(source, seeded)

    async def _run_with_seed(self, source: GepaSource, seeded: anyio.Event) -> None:
        """In lockstep the seed comes first, as in gepa; else tickets start beside its validation."""
        assert self.pipeline is not None
        ids = self._seed_examples()
        reservation = None if seeded.is_set() else self.budget.reserve(len(ids))
        failures: list[Exception] = []
        async with anyio.create_task_group() as group:
            if self.settings.max_seconds is not None:
                group.start_soon(self._stop_after, self.settings.max_seconds)
            try:
                if not seeded.is_set() and (self.settings.lockstep or self.settings.seed_first):
                    await self._validate_seed(ids, reservation, source, seeded)
                elif not seeded.is_set():
                    group.start_soon(self._guarded_seed, ids, reservation, source, seeded, failures, group.cancel_scope)
                elif await self.pool.write(self.pool.should_stop):
                    source.stop_requested = "a stopper said stop"
                await self.pipeline.run()
                await seeded.wait()
            except Exception as error:
                failures.append(error)
            group.cancel_scope.cancel()
        for failure in failures:
            raise failure

    def _seed_examples(self) -> list[Any]:
        """The validation examples of the seed: all, unless the evaluation policy wants fewer."""
        narrow = getattr(self.pool.val_evaluation_policy, "get_seed_eval_batch", None)
        return list(self.pool.loader.all_ids() if narrow is None else narrow(self.pool.loader))

    async def _guarded_seed(
        self,
        ids: list[Any],
        reservation: Reservation | None,
        source: GepaSource,
        seeded: anyio.Event,
        failures: list[Exception],
        scope: anyio.CancelScope,
    ) -> None:
        try:
            await self._validate_seed(ids, reservation, source, seeded)
        except Exception as error:
            failures.append(error)
            scope.cancel()

    async def _validate_seed(
        self, ids: list[Any], reservation: Reservation | None, source: GepaSource, seeded: anyio.Event
    ) -> None:
        if reservation is None:
            raise RunAbortedError(
                f"The budget of {self.budget.limit} metric calls cannot hold the seed's validation of "
                f"{len(ids)} examples."
            )
        # Nothing can be compared before the seed is validated: no validation goes before it.
        claim = Claim(SEED_TICKET, "validate", DEPTHS["validate"], value=math.inf)
        try:
            evaluation, _ = await self._evaluations.validation(
                claim, reservation, self.pool.seed_candidate, ids, capture_traces=False
            )
        except RolloutUnresolvedError as error:
            raise RunAbortedError(f"The seed program could not be validated: {error}") from error
        reservation.refund()
        await self.pool.write(self.pool.confirm_seed, evaluation)
        if await self.pool.write(self.pool.should_stop):
            source.stop_requested = "a stopper said stop"
        seeded.set()
        self._wake()

    async def _stop_after(self, seconds: float) -> None:
        await anyio.sleep(seconds)
        self.stop(f"max_seconds={seconds:g} is over")

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
            clock=self.settings.clock,
        )
        width = self.settings.live_limit
        workers = {name: 1 if name == "commit" else width for name in DEPTHS}
        handlers: dict[str, Any] = GepaStages(services).handlers()
        return [Stage(name, handlers[name], workers[name], queue_capacity=width) for name in DEPTHS]

    def _wake(self) -> None:
        if self.pipeline is not None:
            self.pipeline.wake()

    def _count_tokens(self, event: Event) -> None:
        if isinstance(event, RolloutFinished):
            self.counts.task_tokens += event.tokens
