"""One run of an evolution loop: the one thing on which every loop stands.

A loop supplies ``async def step(step) -> End``, one coroutine from a step's selection to its end, and its state. The
run opens steps while admission (``LiveSteps`` in steps.py; gepa/admission.py), budget and limits allow, gives them
slots, threads and a Store, and knows how it ended.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import anyio

from dspy_flashevolve.engine.errors import ConfigurationError, RolloutUnresolvedError, check_counts, check_limits
from dspy_flashevolve.engine.events import (
    Committed,
    EventBus,
    StageVisited,
    StepClosed,
    StepOpened,
)
from dspy_flashevolve.engine.limits import Bounds
from dspy_flashevolve.engine.loop import LoopClock, Threads, collecting_errors, run_to_end
from dspy_flashevolve.engine.provider import OUTAGE_SECONDS, Providers, RetryPolicy, queues_of
from dspy_flashevolve.engine.requests import Requests
from dspy_flashevolve.engine.scheduler import Scheduler, StageVisit
from dspy_flashevolve.engine.steps import (
    Admission,
    Budget,
    End,
    EndKind,
    LiveSteps,
    Load,
    NothingToDoError,
    Reservation,
    Step,
    StepEnded,
    step_rng,
)
from dspy_flashevolve.engine.store import IN_FLIGHT, Store, Unfinished
from dspy_flashevolve.engine.texts import logger_named

logger = logger_named(__name__)
T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, None]]

Outcome = Literal["running", "finished", "stopped", "failed", "aborted"]
"""A run is under way; or how it ended: at the end of its work or at one of its limits; since somebody asked for it;
since it was given up; by an exception."""
SPARE_THREADS = 16
"""Threads beside those of the slots, for what a loop does without one."""
MAX_RESTING = 8
"""Steps that may wait for a provider that answers nobody and make room for others all the same: these ask for something
else, and tell a few requests that get no answer from an outage. More would only wait, too. Not tuned."""
PRIOR_STEPS = 4
"""The estimate of a step's cost begins as if this many had cost the most that one can."""


Schedule = Literal["async", "lockstep"]


@dataclass(frozen=True, kw_only=True)
class RunLimits:
    """What bounds a run, and how its steps follow each other.

    Args:
        max_metric_calls: never exceeded; None for no limit.
        max_seconds: no step starts after it; what runs is finished. None for no limit.
        schedule: "async", or "lockstep": one step at a time, nothing beside it, the same slots; equal rollouts are made
            as often as they are asked for.
        rollout_timeout_seconds: a rollout that takes longer is given up and asked for again; None for no bound.
        max_outage_seconds: when a provider that answers nothing is given up, and the longest Retry-After; None for
            never.
        seed: of the steps' randomness, and of jitter; None draws one.

    Raises:
        ConfigurationError: an argument that cannot work, with the reason.
    """

    max_metric_calls: int | None = None
    max_seconds: float | None = None
    schedule: Schedule = "async"
    rollout_timeout_seconds: float | None = None
    max_outage_seconds: float | None = OUTAGE_SECONDS
    seed: int | None = 0

    def __post_init__(self) -> None:
        schedule: Any = self.schedule
        if schedule not in ("async", "lockstep"):
            raise ConfigurationError(f"schedule is {schedule!r}, expected 'async' or 'lockstep'.")
        check_counts(max_metric_calls=self.max_metric_calls)
        check_limits(
            max_seconds=self.max_seconds,
            max_outage_seconds=self.max_outage_seconds,
            rollout_timeout_seconds=self.rollout_timeout_seconds,
        )


@runtime_checkable
class Observer(Protocol):
    """Looks at runs while they go on."""

    def observing(self, run: EvolutionRun) -> AbstractContextManager[object]:
        """What is entered when the run begins, and left when it has ended and its ``outcome`` is known. It may
        subscribe to the run's ``bus``, and read from any thread what the run says of itself."""
        ...


class EvolutionRun:
    """One run of an evolution loop.

    Args:
        name: of the optimizer, for people.
        stages: stage -> the endpoints that its requests ask, in the order of the way that a step takes: a later
            stage is nearer to a commit, and goes first among equals.
        slots: requests in flight at most, over all stages.
        adaptive: how the endpoints' limits adapt below ``slots``; None for no limit but that.
        limits: what bounds it; None for nothing.
        retry: how often a request is made that the provider turns away, and when.
        store: what writes the run down. Default: one in memory.

    Raises:
        ConfigurationError: no stage, or fewer than 1 slot.
    """

    def __init__(
        self,
        *,
        name: str,
        stages: Mapping[str, Iterable[str]],
        slots: int,
        adaptive: Bounds | None = None,
        limits: RunLimits | None = None,
        retry: RetryPolicy | None = None,
        store: Store | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        if not stages:
            raise ConfigurationError(f"{name}: a run has no stages, expected at least one.")
        limits = RunLimits() if limits is None else limits
        self.name, self.slots, self.store = name, slots, store or Store()
        self.lockstep, self.max_seconds = limits.schedule == "lockstep", limits.max_seconds
        self.redaction = self.store.redaction
        """Takes secrets out of what leaves the process."""
        self._observers = observers
        self.ended: dict[str, int] = {kind.value: 0 for kind in EndKind}
        """Way -> steps that ended so."""
        self.stop_reason = ""
        """Why no further step starts; empty while one may."""
        self.outcome: Outcome = "running"
        """What is known at the end of :meth:`evolve`, or of the run where that raises."""
        self._ends: Outcome = "finished"
        self.error: BaseException | None = None
        """What ended the run; None while nothing did."""
        self._live: dict[int, Step] = {}
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._recorded: list[Unfinished] = []
        self._next = 0
        self._exhausted = self._broken = False
        self._at_least = 0
        self._beside = 0
        self._put_off: list[Work] = []
        self._start: Callable[[Work], object] = self._put_off.append
        self._failures = self._calls_of_ended = 0
        self._most_calls = 0
        self._change = anyio.Event()
        self._waits_for_slots = False
        self._generations: dict[int, int] = {}
        self._best = -math.inf
        self.clock = LoopClock()
        self.bus = EventBus([self.store])
        asked = {stage: list(names) for stage, names in stages.items()}
        self.scheduler = Scheduler(
            slots, list(asked), queues_of(asked), self.clock, on_idle=self._slot_is_idle, on_visit=self._visited
        )
        self.store.keep_current(IN_FLIGHT, self._in_flight)
        rng = random.Random(limits.seed)
        retry = replace(retry or RetryPolicy(), outage_seconds=limits.max_outage_seconds)
        self.providers = Providers(
            asked, adaptive, self.scheduler, self.bus, self.clock, retry, rng,
            lambda reason: self.stop(reason, "failed"),
        )  # fmt: skip
        self.requests = Requests(
            self.scheduler,
            self.bus,
            self.providers,
            self.store,
            single_flight=not self.lockstep,
            timeout_seconds=limits.rollout_timeout_seconds,
        )
        self.budget = Budget(limits.max_metric_calls, spent=self.store.spent)
        self.threads = Threads(slots + SPARE_THREADS, "work")
        self.gaps: defaultdict[str, Counter[int]] = defaultdict(Counter)
        """Place -> gap (version less version seen) -> how often it was seen there."""
        self.policy_decisions: Counter[str] = Counter()
        """What a staleness policy decided (admit, discard, integrate) -> how often."""
        self.used_shares: list[Callable[[], float]] = []
        """What of a loop's own limits is used, from 0 to 1, for those who tell how long the run may last. A loop adds
        its own."""
        self.seed = self._seed(limits.seed)

    # Beginning and end.

    def run_sync(self, main: Callable[[], Awaitable[T]]) -> T:
        """Run ``main`` on a loop of its own and wait for it; see :func:`~.loop.run_to_end`.

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
    async def opened(self) -> AsyncGenerator[None, None]:
        """Everything is ready for requests inside the block; a run is for one."""
        self.clock.attach()
        with ExitStack() as observing:
            for observer in self._observers:
                observing.enter_context(observer.observing(self))
            try:
                yield
            except BaseException as error:
                self.error, self._ends = error, "aborted"
                raise
            finally:
                self.outcome = self._ends
                self.threads.close(wait=self.error is None and not self.threads.abandoned)
                self.store.record_session_end(self.outcome, self.end_reason)

    def stop(self, reason: str, outcome: Outcome = "stopped") -> None:
        """Open no more steps; what runs is finished. The first reason, a sentence for people, stays. Call it on the
        run's loop.

        The outcome is "stopped" where somebody asked for it, "finished" at a limit of the run (only then retries are
        still waited for), "failed" where it is given up.
        """
        if self.stop_reason:
            return
        self.stop_reason, self._ends = reason, outcome
        if outcome != "finished":
            self.providers.hurry()
            logger.warning(
                "%s: %s. Steps that run are finished, no further one starts%s.",
                self.name,
                reason,
                ". A second time cancels them" if outcome == "stopped" else "",
            )
        for number, scope in self._scopes.items():
            if not self._live[number].has_begun:
                scope.cancel()  # it may wait for something to work on as long as it likes
        self._notify()

    @property
    def end_reason(self) -> str:
        """Why no further step starts, or what ended the run; empty while neither is so."""
        error = self.error
        said = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else "cancelled"
        return self.stop_reason if error is None else said

    # Steps.

    async def evolve(
        self,
        step: Callable[[Step], Awaitable[End]],
        admission: Admission | None = None,
        *,
        calls_per_step: int = 0,
        reserve: Callable[[], Reservation | None] | None = None,
        stop_reason: Callable[[], str | None] = lambda: None,
        on_end: Callable[[Step, End], Awaitable[None]] | None = None,
        first_number: int = 0,
        min_steps: int = 0,
        watchers: Iterable[Work] = (),
    ) -> None:
        """Open steps until there is nothing to do or a stop is asked for, and wait for the last of them.

        Args:
            step: the loop's way from selection to end. It calls :meth:`begin` when it has selected what it works on,
                and only then is the next one opened; what it raises beside :class:`StepEnded`,
                :class:`NothingToDoError` and :class:`RolloutUnresolvedError` ends the run. Steps of an interrupted run
                come first, with ``recorded``.
            admission: when one more may start. Default: as many at once as there are slots. In lockstep it is one.
            calls_per_step, reserve: metric calls that a step may cost at most, which are set aside before it starts;
                or what sets them aside, None where they do not fit.
            stop_reason: why no further step may start, by a limit of the loop's own; None while one may.
            on_end: awaited at each step's end, before another starts in its place.
            first_number, min_steps: number of the first step; steps below ``min_steps`` start also after
                ``max_seconds``.
            watchers: what runs beside the steps until the last one has ended.

        Raises:
            RunAbortedError: the provider refused for good.
            Exception: what a step raised, or what runs beside them, after the rest was cancelled.
        """
        self._step, self._ended, self._why_none_opens = step, on_end, stop_reason
        self._rule = LiveSteps(1, strict=True) if self.lockstep else admission or LiveSteps(self.slots)
        self._reserve = reserve or (lambda: self.budget.reserve(calls_per_step))
        self._next, self._exhausted, self._most_calls = max(first_number, self._next), False, calls_per_step
        self._broken, self._at_least, self.outcome = False, min_steps, "running"
        self._recorded = self.store.unfinished
        failures: list[BaseException] = []

        async def guarded(work: Work) -> None:
            with collecting_errors(failures, group, f"{self.name}: a step, or what runs beside them,"):
                await work()

        async with anyio.create_task_group() as around:
            for watch in watchers:
                around.start_soon(guarded, watch)
            if self.max_seconds is not None:
                around.start_soon(guarded, partial(self._watch_time, self.max_seconds))
            async with anyio.create_task_group() as group:
                self._start = lambda work: group.start_soon(guarded, work)
                for work in (*self._put_off, self._admit):
                    self._start(work)
                self._put_off.clear()
            around.cancel_scope.cancel()
        self._start = self._put_off.append
        if failures:
            raise failures[0]
        self.outcome = self._ends

    def _in_flight(self) -> dict[str, int]:
        """Count the requests that hold a slot, by stage."""
        return {name: stage.running for name, stage in self.scheduler.statistics().stages.items()}

    def begin(self, step: Step, version: int, value: float | None = None, selection: Any = None) -> None:
        """The step has selected what it works on, at the pool's version, and is thought to reach a value in score: the
        next one may be opened. ``selection`` is what the loop needs to run it again from here; JSON, for the
        Store.

        Raises:
            NothingToDoError: a stop came first: the step never was.
        """
        scope = self._scopes.get(step.number)
        if scope is not None and scope.cancel_called:  # it has not heard of it yet
            raise NothingToDoError
        step.record_version(version, value)
        step.has_begun = True
        self.store.record_selection(step.number, version, selection)
        self.bus.emit(StepOpened(self.clock(), step.number, version, len(self._live)))
        self._notify()

    def mark_child_made(self, step: Step) -> None:
        """The step works towards a child no more: another may start its work."""
        step.is_working = False
        self._notify()

    @property
    def live(self) -> list[int]:
        """Numbers of the steps that have begun and not ended."""
        return sorted(number for number, step in self._live.items() if step.has_begun)

    @property
    def is_busy(self) -> bool:
        """Whether a step, or what runs beside the steps, may still hand back metric calls that it set aside."""
        return bool(self.live or self._beside)

    @property
    def _working(self) -> int:
        """Steps that work towards a child, and do not wait for a provider that answers others."""
        steps = [step for step in self._live.values() if step.is_working]
        return len(steps) - self._resting(steps)

    def _resting(self, steps: Iterable[Step]) -> int:
        """How many of some steps, or those whose end they wait for, wait for a provider that answers others: work goes
        on around them."""
        numbers = [step.number if step.blocked_by is None else step.blocked_by for step in steps]
        return min(MAX_RESTING, sum(map(self.requests.is_waiting, numbers)))

    def load(self) -> Load:
        """What admission looks at."""
        steps = list(self._live.values())
        return Load(
            live=len(steps),
            working=self._working,
            idle_slots=self.scheduler.idle,
            calls_left=self.budget.left,
            calls_reserved=self.budget.reserved,
            calls_per_step=(PRIOR_STEPS * self._most_calls + self._calls_of_ended)
            / (PRIOR_STEPS + sum(self.ended.values())),
            ended=sum(self.ended.values()),
            slots=self.scheduler.limit,
            parked=self._resting(steps),
            without_request=sum(not step.has_requested for step in steps),
        )

    async def run_in_background(self, work: Callable[[], Awaitable[None]]) -> None:
        """Begin what no step waits for, beside the steps of :meth:`evolve` (with the first one, where it is called
        before); in lockstep do it before this returns. What it raises ends the run, but for a request that got no
        answer, which is logged."""

        async def unresolved_is_told() -> None:
            try:
                await work()
            except RolloutUnresolvedError as error:
                logger.warning("%s: work beside the steps is left undone: %s", self.name, error)
            finally:
                self._beside -= 1
                self._notify()

        self._beside += 1
        if self.lockstep:
            await unresolved_is_told()
        else:
            self._start(unresolved_is_told)

    def _notify(self) -> None:
        """Something has changed that a step, or the opening of one, may wait for."""
        self._change.set()
        self._change = anyio.Event()

    async def wait_for_change(self) -> None:
        """Wait until something has changed."""
        await self._change.wait()

    def commit(
        self,
        step: Step,
        *,
        version: int,
        candidate: int,
        score: float,
        best_score: float | None = None,
        generation: int | None = None,
        parents: Sequence[int] = (),
    ) -> None:
        """Tell the observers that what evolves has changed, by a step: its version gives the gap.

        Args:
            version, best_score: after the change; the best one defaults to the highest that was told so far.
            candidate, score: number of the new candidate, and its score on the whole validation set.
            generation: steps from the seed. Default: one more than its parents', as far as they were told.
            parents: numbers of the candidates that it was made from, what it was built on first; none for the seed.
        """
        gap = version - 1 - step.version
        self.gaps["before_commit"][gap] += 1
        if generation is None:
            generation = 1 + max((self._generations.get(parent, 0) for parent in parents), default=-1)
        self._generations[candidate] = generation
        self._best = max(self._best, score)
        best = self._best if best_score is None else best_score
        change = (version, gap, candidate, score, best, generation, tuple(parents))
        self.bus.emit(Committed(self.clock(), step.number, *change))

    # How steps are opened and closed.

    async def _admit(self) -> None:
        while True:
            change = self._change
            if self._broken:  # the cancellation has not come here yet
                return
            step = self._opened()
            if step is not None:
                self._live[step.number] = step
                self._start(partial(self._lives, step))
                while step.number in self._live and not step.has_begun:
                    await self.wait_for_change()
                continue
            if not self._live and (self.stop_reason or self._exhausted):
                return
            if not self._live and not self._beside:
                self.stop("nothing more to do", "finished")
                return
            await change.wait()

    def _opened(self) -> Step | None:
        """The next step, if one may start."""
        recorded = self._recorded[0] if self._recorded else None
        if recorded is not None and not self.stop_reason:
            return None if self.lockstep and self._live else self._runs_again(self._recorded.pop(0))
        if self.stop_reason or self._exhausted:
            return None
        if (reason := self._why_none_opens()) is not None:
            self.stop(reason, "finished")
            return None
        self._waits_for_slots = False
        if not self._rule.admits(self.load()):
            self._waits_for_slots = True
            return None
        reservation = self._reserve()
        if reservation is None:
            if not self._live and not self._beside:
                calls_left, most = self.budget.left, self._most_calls
                pays_most = calls_left is not None and calls_left >= most
                beside = " and the validation of what it finds" if pays_most else ""
                self.stop(
                    f"max_metric_calls={self.budget.limit}: the {calls_left} calls left cannot pay a step, which "
                    f"may cost {most}{beside}",
                    "finished",
                )
            return None
        self._most_calls = max(self._most_calls, reservation.open)
        number = self._next
        self._next += 1
        return Step(number, step_rng(number, self.seed), reservation)

    def _runs_again(self, recorded: Unfinished) -> Step:
        """A step of an interrupted run: what it needs at most and has not paid is set aside, as far as it goes."""
        calls_left, needed = self.budget.left, max(0, self._most_calls - self.store.paid[recorded.number])
        reservation = self.budget.reserve(needed if calls_left is None else min(calls_left, needed))
        reservation = reservation or Reservation(self.budget, 0)
        step = Step(recorded.number, step_rng(recorded.number, self.seed), reservation, recorded.selection)
        step.record_version(recorded.version)
        return step

    async def _lives(self, step: Step) -> None:
        end: End | None = None
        try:
            with anyio.CancelScope() as scope:
                self._scopes[step.number] = scope
                if self.stop_reason:  # it came between the opening and this
                    scope.cancel()
                end = await self._end_of(step)
            if end is not None and (step.has_begun or not scope.cancel_called):
                with anyio.CancelScope(shield=True):  # a step ends once, whatever else comes to its end
                    if not step.has_begun:  # it counts all the same, or its number would be opened for ever
                        self.begin(step, step.version)
                    self._count(step, end)
                    if self._ended is not None:
                        await self._ended(step, end)
        except BaseException:
            self._broken = True
            raise
        finally:
            step.reservation.refund()
            del self._live[step.number], self._scopes[step.number]
            if step.has_begun:
                end = end or End(EndKind.CANCELLED, "the run ended before the step did")
                self.ended[end.kind.value] += 1
                self.bus.emit(StepClosed(self.clock(), step.number, end, len(self._live)))
            elif step.recorded is None:
                self._next = min(self._next, step.number)
            self._notify()

    async def _end_of(self, step: Step) -> End | None:
        try:
            return await self._step(step)
        except NothingToDoError:
            self._exhausted = True
            return None
        except StepEnded as error:
            return error.end
        except RolloutUnresolvedError as error:
            return End(EndKind.FAILED, str(error))

    def _count(self, step: Step, end: End) -> None:
        """Steps that fail at no cost must not go on for ever; those that cost something end with the budget."""
        step.reservation.refund()
        spent = step.reservation.settled
        self._calls_of_ended += spent
        self._failures = self._failures + 1 if end.kind is EndKind.FAILED and not spent else 0
        if self._failures >= max(10, 2 * self.slots):
            self.stop(f"{self._failures} steps in a row failed; the last: {end.reason}", "failed")

    def _slot_is_idle(self) -> None:
        if self._waits_for_slots:
            self._notify()

    def _visited(self, visit: StageVisit) -> None:
        self.bus.emit(StageVisited(visit.ended, visit.step, visit.stage, visit.queued, visit.began))

    async def _watch_time(self, most: float) -> None:
        await anyio.sleep(max(0.0, self.clock.began + most - self.clock()))
        least = self._at_least
        while self._next < least or any(not step.has_begun for step in self._live.values() if step.number < least):
            await self.wait_for_change()
        self.stop(f"max_seconds={most:g} is over", "finished")
        self.providers.hurry()

    def _seed(self, seed: int | None) -> int:
        """The seed of the steps' randomness: the same in every session of a run."""
        seed = self.store.get_state("seed") if seed is None else seed
        seed = random.SystemRandom().getrandbits(64) if seed is None else seed
        self.store.set_state("seed", lambda: seed)
        return seed
