"""Rollouts and other requests: a slot for each, retries outside the slot, paid once, written down.

A rollout's metric call is settled against a reservation; equal rollouts in flight are one; what the journal has from an
interrupted run is not made again. Other requests (a reflection, an integration) cost no metric call.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import anyio

from dspy_flashevolve.engine.budget import Reservation
from dspy_flashevolve.engine.endpoints import Endpoints
from dspy_flashevolve.engine.errors import FlashEvolveError, RolloutUnresolvedError, TransientError
from dspy_flashevolve.engine.events import EventBus, RequestFinished, RolloutFinished, RolloutTimedOut
from dspy_flashevolve.engine.loop import is_being_cancelled
from dspy_flashevolve.engine.replay import Rollout, RolloutKey, RunJournal
from dspy_flashevolve.engine.scheduler import Requester, Scheduler, current_slot
from dspy_flashevolve.engine.steps import Step, StepEnded

T = TypeVar("T")
Granted = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Spent:
    """What a request that is no rollout has cost.

    Args:
        tokens, cost_dollars: see :class:`Rollout`.
        error: why its answer is of no use; empty when it is.
    """

    tokens: int
    cost_dollars: float = 0.0
    error: str = ""


class RolloutRecord(Protocol):
    """How a rollout is written down, and read again by a run that goes on."""

    def write(self, rollout: Rollout) -> tuple[str, str | None]:
        """Output and trace as text; the trace is None where it cannot be kept."""
        ...

    def read(self, row: Any) -> Rollout | None:
        """The rollout in a row of the journal; None where what was kept is not enough."""
        ...


class ReplyRecord(Protocol[T]):
    """How the answer of a request that is no rollout is written down, and read again.

    Attributes:
        position: tells the requests of a step in a stage apart; the same in every run of the step.
    """

    @property
    def position(self) -> str: ...

    def write(self, answer: T) -> str | None:
        """The answer as text; None where it is not worth keeping, or cannot be kept."""
        ...

    def read(self, text: str) -> T | None:
        """The answer that was kept; None where it cannot be read any more."""
        ...


class NoLongerWantedError(FlashEvolveError):
    """An evaluation was given up before its next rollout began: nobody needs it any more."""


async def batch(count: int, call: Callable[[int, Granted], Awaitable[T]]) -> list[T]:
    """Run ``call(0)`` to ``call(count - 1)`` side by side; their results in order.

    Each begins when the one before it has its slot, so that what waits for one costs no task: thousands of examples of
    thousands of steps may wait.

    Args:
        call: makes one request, and calls what it is given when that has its slot (or needs none).

    Raises:
        StepEnded, RolloutUnresolvedError, NoLongerWantedError: one of them, when all others have ended, which may be
            paid already.
        Exception: any other error, as it is, at once; the rest is cancelled.
    """
    results: dict[int, T] = {}
    put_off: list[FlashEvolveError] = []
    failures: list[BaseException] = []
    begun = 0

    async with anyio.create_task_group() as group:

        def begin() -> None:
            nonlocal begun
            if begun < count and not failures:
                index, begun = begun, begun + 1
                group.start_soon(one, index)

        async def one(index: int) -> None:
            told = False

            def granted() -> None:
                nonlocal told
                if not told:
                    told = True
                    begin()

            try:
                results[index] = await call(index, granted)
            except (RolloutUnresolvedError, NoLongerWantedError, StepEnded) as error:
                put_off.append(error)
            except anyio.get_cancelled_exc_class() as error:
                if is_being_cancelled():
                    raise
                failure = RuntimeError("a request was cancelled by its own code")
                failure.__cause__ = error
                failures.append(failure)
                group.cancel_scope.cancel()
            except BaseException as error:
                failures.append(error)
                group.cancel_scope.cancel()
            granted()

        begin()
    for error in (*failures, *sorted(put_off, key=lambda one: not isinstance(one, StepEnded))):
        raise error
    return [results[index] for index in range(count)]


async def gather(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run a few calls at once; results in order, errors as of :func:`batch`."""

    async def one(index: int, granted: Granted) -> T:
        granted()
        return await calls[index]()

    return await batch(len(calls), one)


@dataclass(eq=False)
class _Flight(Generic[T]):
    """A rollout under way that others may join."""

    landed: anyio.Event = field(default_factory=anyio.Event)
    result: T | None = None


class Rollouts:
    """Makes the requests of one run.

    Args:
        scheduler: gives the slots.
        bus: told of every request that was answered, and of every rollout that was given up.
        endpoints: who answers; their policy says how often a request is made again.
        single_flight: equal rollouts in flight are one.
        rng: jitter.
        timeout_seconds: a run of a rollout that takes longer, from the grant of its slot, is cancelled and counts as a
            :class:`TransientError`. The time in which it has given its slot back, since its provider said when to come
            back, does not count. Code that runs in a thread cannot be cancelled: a program there is left behind, and
            a metric there, which is the end of a rollout, is waited for. None for no bound.
        journal: where rollouts and replies are written down; None for nowhere.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        bus: EventBus,
        endpoints: Endpoints,
        *,
        single_flight: bool = True,
        rng: random.Random | None = None,
        timeout_seconds: float | None = None,
        journal: RunJournal | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.bus = bus
        self.endpoints = endpoints
        self.clock = scheduler.clock
        self._single_flight = single_flight
        self._rng = rng or random.Random()
        self.timeout_seconds = timeout_seconds
        self.journal = journal
        self._flights: dict[RolloutKey, _Flight[Rollout]] = {}
        self.shared = 0
        """Rollouts that were joined instead of run."""
        self.retried = 0
        """Requests that were made again."""
        self.timed_out = 0
        """Runs of rollouts that were given up."""

    async def request(
        self,
        stage: str,
        step: Requester,
        call: Callable[[], Awaitable[T]],
        spent: Callable[[T], Spent] | None = None,
        record: ReplyRecord[T] | None = None,
    ) -> T:
        """Make a request that is no rollout.

        Args:
            stage, step: whose queue it waits in.
            spent: what it has cost, for a :class:`RequestFinished`; None for no event.
            record: how its answer is written down; None where it is not. What was paid before an interruption is read,
                and costs nothing.

        Raises:
            RolloutUnresolvedError: every attempt ended in a :class:`TransientError`.
        """
        journal = self.journal
        _asks(step)
        if journal is not None and record is not None:
            kept = journal.reply(step.number, stage, record.position)
            answer = None if kept is None else record.read(kept)
            if answer is not None:
                return answer

        async def once() -> T:
            began = self.clock()
            answer = await call()
            cost = Spent(0) if spent is None else spent(answer)
            if spent is not None:
                seconds = self.clock() - began
                self.bus.emit(
                    RequestFinished(
                        self.clock(), step.number, stage, seconds, cost.tokens, cost.cost_dollars, cost.error
                    )
                )
            if journal is not None and record is not None and (text := record.write(answer)) is not None:
                journal.replied(step.number, stage, record.position, text, cost.tokens, cost.cost_dollars)
            return answer

        return await self._retried(stage, lambda attempt: self.scheduler.run(stage, step, once))

    async def rollout(
        self,
        key: RolloutKey,
        stage: str,
        step: Requester,
        pays: Reservation,
        call: Callable[[], Awaitable[Rollout]],
        record: RolloutRecord | None = None,
        *,
        rank: float = 0.0,
        behind: int = 0,
        granted: Granted = lambda: None,
    ) -> tuple[Rollout, bool]:
        """Run one rollout, or join an equal one that is in flight, or read one that was paid before an interruption.

        Args:
            stage, step: whose queue it waits in.
            pays: a call of it is settled, unless it is joined or read.
            call: runs it.
            record: how it is written down; None where it is not.
            rank, behind, granted: see :meth:`Scheduler.run`.

        Returns:
            The rollout, and whether it was paid here.

        Raises:
            RolloutUnresolvedError: the provider gave no answer.
        """
        _asks(step)
        if self.journal is not None and record is not None:
            kept = self.journal.rollout(key, step.number, record.read)
            if kept is not None:
                return kept, False
        while self._single_flight and (flight := self._flights.get(key)):
            granted()
            await flight.landed.wait()
            if flight.result is not None:
                self.shared += 1
                return flight.result, False
            # The one who flew was cancelled or got no answer: fly again.
        flight = _Flight[Rollout]()
        if self._single_flight:
            self._flights[key] = flight
        try:
            flight.result = await self._retried(
                stage,
                lambda attempt: self.scheduler.run(
                    stage,
                    step,
                    _Run(self, key, stage, step, pays, call, record, attempt + 1).once,
                    rank=rank,
                    behind=behind,
                    granted=granted,
                ),
            )
        finally:
            if self._flights.get(key) is flight:
                del self._flights[key]
            flight.landed.set()
        return flight.result, True

    async def _retried(self, stage: str, once: Callable[[int], Awaitable[T]]) -> T:
        """Call ``once`` with the number of the attempt, from 0, until it does not fail transiently."""
        attempts, retry = 0, self.endpoints.retry
        while True:
            try:
                return await once(attempts)
            except TransientError as error:
                attempts += error.attempts
                if attempts >= retry.attempts:
                    raise RolloutUnresolvedError(f"no answer after {attempts} attempts: {error}") from error
                self.retried += 1
                self.endpoints.turned_away(stage, error.retry_after_seconds)
                wait = retry.wait_seconds(attempts - 1, error.retry_after_seconds, self._rng.random())
            await anyio.sleep(wait)


def _asks(step: Requester) -> None:
    if isinstance(step, Step):
        step.has_asked = True


class _Run:
    """One run of a rollout in a slot, within its time; its metric call is written down before it is made."""

    def __init__(
        self,
        of: Rollouts,
        key: RolloutKey,
        stage: str,
        step: Requester,
        pays: Reservation,
        call: Callable[[], Awaitable[Rollout]],
        record: RolloutRecord | None,
        attempt: int,
    ) -> None:
        self._of, self._key, self._stage, self._step = of, key, stage, step
        self._pays, self._call, self._record, self._attempt = pays, call, record, attempt
        self._journal = of.journal
        self._number: int | None = None
        self._metric_began = False

    async def once(self) -> Rollout:
        of = self._of
        clock, timeout = of.clock, of.timeout_seconds
        began = clock()
        token = _METRIC_BEGINS.set(self._metric_begins)
        try:
            if timeout is None:
                return self._answered(await self._call(), clock() - began)
            with anyio.move_on_after(timeout) as bound:
                if (slot := current_slot()) is not None:
                    slot.bound = bound
                return self._answered(await self._call(), clock() - began)
        except anyio.get_cancelled_exc_class():
            if self._metric_began:
                self._settle()
            raise
        except BaseException:
            if self._journal is not None and self._number is not None:
                self._journal.call_returned(self._stage, self._step.number)
            raise
        finally:
            _METRIC_BEGINS.reset(token)
        raise self._gave_up(clock() - began, timeout)

    async def _metric_begins(self) -> None:
        self._metric_began = True
        if self._journal is not None and self._number is None:
            with anyio.CancelScope(shield=True):  # that must not be forgotten, whatever comes
                self._number = await self._journal.call_begins(self._stage, self._step.number)

    def _settle(self) -> None:
        """Count the call of its metric, as the step's."""
        self._pays.settle()
        if self._journal is not None and self._number is None:
            self._number = self._journal.call_counts(self._stage, self._step.number)

    def _answered(self, rollout: Rollout, seconds: float) -> Rollout:
        self._settle()
        of, stage, number = self._of, self._stage, self._step.number
        if self._journal is not None and self._record is not None:
            assert self._number is not None
            self._journal.finished(
                self._key, stage, number, rollout, self._record.write(rollout), seconds, self._number
            )
        of.endpoints.answered(stage, seconds, rollout.tokens)
        of.bus.emit(
            RolloutFinished(of.clock(), number, stage, rollout.score, seconds, rollout.tokens, rollout.cost_dollars)
        )
        return rollout

    def _gave_up(self, seconds: float, timeout: float | None) -> FlashEvolveError:
        """The run took too long: what to raise."""
        of = self._of
        of.timed_out += 1
        of.bus.emit(RolloutTimedOut(of.clock(), self._step.number, self._stage, seconds, self._attempt))
        late = f"no answer within {timeout:g} seconds"
        if self._metric_began:
            self._settle()
            if not self._pays.extend(1):
                return RolloutUnresolvedError(f"{late}, and the budget does not pay another attempt.")
        return TransientError(late)


_METRIC_BEGINS: ContextVar[Callable[[], Awaitable[None]] | None] = ContextVar("flashevolve_metric", default=None)


async def metric_begins() -> None:
    """Say, inside a rollout, that its metric is called when this returns. Outside of one it does nothing."""
    begins = _METRIC_BEGINS.get()
    if begins is not None:
        await begins()
