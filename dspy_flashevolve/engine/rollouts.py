"""Rollouts and other requests: each gets a slot, is retried outside of it, is paid once, and is written down.

A rollout's metric call is settled against a reservation. Equal rollouts in flight are made once, and what the Store
has of an interrupted run is not made again. Other requests (a reflection, a repair) cost no metric call. Code inside
a rollout reports to the run that its metric is called, before it is: it may run in a thread, or in another process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import anyio

from dspy_flashevolve.engine.endpoints import Endpoints
from dspy_flashevolve.engine.errors import FlashEvolveError, NoLongerWantedError, RolloutUnresolvedError, TransientError
from dspy_flashevolve.engine.events import EventBus, ExampleGivenUp, RequestFinished, RolloutFinished, RolloutTimedOut
from dspy_flashevolve.engine.loop import check_main_thread, collecting_errors
from dspy_flashevolve.engine.retries import TrackedRequest
from dspy_flashevolve.engine.scheduler import Requester, Scheduler, Slot, current_slot
from dspy_flashevolve.engine.steps import Reservation, Step, StepEnded
from dspy_flashevolve.engine.store import Rollout, RolloutKey, Store
from dspy_flashevolve.engine.texts import logger_named

T = TypeVar("T")
OnGranted = Callable[[], None]
"""Called when a request has its slot."""


async def batch(count: int, call: Callable[[int, OnGranted], Awaitable[T]]) -> list[T]:
    """Run ``call(0)`` to ``call(count - 1)`` concurrently; return their results in order.

    Each call begins when the one before it has its slot, so that a request that waits for a slot costs no task:
    thousands of examples of thousands of steps may wait.

    Args:
        call: makes one request. It is given a function that it calls when the request has its slot, or needs none.

    Raises:
        StepEnded, RolloutUnresolvedError, NoLongerWantedError: one of them, once all other calls have ended, since what
            they do may be paid already.
        Exception: any other error, as it is, at once; the other calls are cancelled.
    """
    results: dict[int, T] = {}
    deferred_errors: list[FlashEvolveError] = []
    failures: list[BaseException] = []
    begun = 0

    async with anyio.create_task_group() as group:

        def begin_next() -> None:
            nonlocal begun
            if begun < count and not failures:
                index, begun = begun, begun + 1
                group.start_soon(make, index)

        async def make(index: int) -> None:
            was_granted = False

            def on_granted() -> None:
                nonlocal was_granted
                if not was_granted:
                    was_granted = True
                    begin_next()

            with collecting_errors(failures, group, "a request"):
                try:
                    results[index] = await call(index, on_granted)
                except (RolloutUnresolvedError, NoLongerWantedError, StepEnded) as error:
                    deferred_errors.append(error)
            on_granted()

        begin_next()
    # A step that has ended says more than a request of it that got no answer.
    for error in (*failures, *sorted(deferred_errors, key=lambda error: not isinstance(error, StepEnded))):
        raise error
    return [results[index] for index in range(count)]


async def gather(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run a few calls at once; return their results in order, and raise errors as :func:`batch` does."""

    async def make(index: int, on_granted: OnGranted) -> T:
        on_granted()
        return await calls[index]()

    return await batch(len(calls), make)


class RolloutRecorder(Protocol):
    """Records the metric's call of one rollout, and what the rollout has cost although it came to nothing."""

    async def record_metric_call(self) -> None: ...

    def retract_metric_call(self) -> None: ...

    def record_wasted_cost(self, tokens: int, cost_dollars: float) -> None: ...


_RECORDER: ContextVar[RolloutRecorder | None] = ContextVar("flashevolve_rollout", default=None)


@contextmanager
def recording_rollout(recorder: RolloutRecorder) -> Generator[None, None, None]:
    """Let ``recorder`` hear of the rollout that is made in the block."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


async def record_metric_call() -> None:
    """Record, inside a rollout, that its metric is called when this returns. Outside of a rollout do nothing."""
    recorder = _RECORDER.get()
    if recorder is not None:
        await recorder.record_metric_call()


def retract_metric_call() -> None:
    """Take back, inside a rollout, that its metric was called, since the rollout was given up before it was."""
    recorder = _RECORDER.get()
    if recorder is not None:
        recorder.retract_metric_call()


def record_wasted_cost(tokens: int, cost_dollars: float) -> None:
    """Record, inside a rollout, what it has cost although it comes to nothing. Outside of a rollout do nothing."""
    recorder = _RECORDER.get()
    if recorder is not None and tokens:
        recorder.record_wasted_cost(tokens, cost_dollars)


logger = logger_named(__name__)


@dataclass(frozen=True, slots=True)
class RequestCost:
    """The cost of a request that is no rollout; ``error`` says why its answer is of no use."""

    tokens: int
    cost_dollars: float = 0.0
    error: str = ""


class RolloutRecord(Protocol):
    """How a rollout is written down, and read again by a run that goes on."""

    def write(self, rollout: Rollout) -> tuple[str, str | None]:
        """Output and trace as text; the trace is None where it cannot be kept."""
        ...

    def read(self, row: Any) -> Rollout | None:
        """The rollout in a row of the Store; None where what was kept is not enough."""
        ...


class ReplyRecord(Protocol[T]):
    """How the answer of a request that is no rollout is written down, and read again; ``position`` tells the requests
    of a step in a stage apart, the same in every run of the step."""

    @property
    def position(self) -> str: ...

    def write(self, answer: T) -> str | None:
        """The answer as text; None where it is not worth keeping, or cannot be kept."""
        ...

    def read(self, text: str) -> T | None:
        """The answer that was kept; None where it cannot be read any more."""
        ...


@dataclass(eq=False)
class _Flight:
    """A request over all of its attempts; equal rollouts wait for its end, with a trace or without (``traced``)."""

    traced: bool = True
    ended: anyio.Event = field(default_factory=anyio.Event)
    result: Rollout | None = None
    slot: Slot | None = None
    is_backing_off: bool = False
    """It waits, without a slot, for its next attempt."""

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for its next attempt, or an LM call in it for its own."""
        return self.is_backing_off or (self.slot is not None and self.slot.is_retrying)

    def cancel_attempt(self) -> None:
        """End its attempt, as its timeout does."""
        if self.slot is not None and self.slot.time_scope is not None:
            self.slot.time_scope.cancel()


class Rollouts:
    """Makes the requests of one run.

    Args:
        single_flight: make equal rollouts in flight once.
        timeout_seconds: an attempt at a rollout that takes longer, from the grant of its slot, is cancelled and
            counts as a :class:`TransientError`; time in which it has given its slot back does not count. A program in a
            thread is left behind, and a metric there is waited for. None for no bound.
        store: where rollouts and replies are written down.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        bus: EventBus,
        endpoints: Endpoints,
        store: Store,
        *,
        single_flight: bool = True,
        timeout_seconds: float | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.bus = bus
        self.endpoints = endpoints
        self.clock = scheduler.clock
        self._single_flight = single_flight
        self.timeout_seconds = timeout_seconds
        self.store = store
        self._flights: dict[RolloutKey, _Flight] = {}
        self._awaited: dict[int, list[_Flight]] = {}
        """Number of a step -> the requests that it waits for."""
        self.joined = 0
        """Number of rollouts that waited for an equal one instead of being made."""
        self.unanswerable: dict[tuple[str, Hashable], str] = {}
        """Split and example that get no answer -> what the provider says. Every candidate fails on such an example."""
        self._unanswered: dict[RolloutKey, str] = {}
        """Rollouts that get no answer, although another candidate's on the same example may."""
        self._answered_examples: set[tuple[str, Hashable]] = set()
        self.timed_out = 0
        """Number of attempts at rollouts that took too long."""

    async def request(
        self,
        stage: str,
        step: Requester,
        call: Callable[[], Awaitable[T]],
        cost_of: Callable[[T], RequestCost] | None = None,
        record: ReplyRecord[T] | None = None,
    ) -> T:
        """Make a request that costs no metric call and, where ``cost_of`` prices it, is told to observers; what
        ``record`` reads back from an interrupted run is not asked for again.

        Raises:
            RolloutUnresolvedError: the provider gave no answer.
        """
        store = self.store
        _mark_requested(step)
        if record is not None:
            reply = store.find_reply(step.number, stage, record.position)
            answer = None if reply is None else record.read(reply)
            if answer is not None:
                return answer

        async def in_time() -> T:
            began = self.clock()
            with anyio.CancelScope() as time_scope:
                _bound_slot(time_scope)
                return await call()
            raise TransientError(f"no answer within {self.clock() - began:g} seconds", of_request=True)

        async def attempt(number: int) -> T:
            began = self.clock()
            try:
                answer, cost = await in_time(), RequestCost(0)
            except FlashEvolveError:  # it is retried, or ends its step or the run: each has an event of its own
                raise
            except Exception as error:
                now, reason = self.clock(), f"{type(error).__name__}: {error}"
                self.bus.emit(RequestFinished(now, step.number, stage, now - began, 0, 0.0, reason))
                raise
            if cost_of is not None:
                now, cost = self.clock(), cost_of(answer)
                amounts = cost.tokens, cost.cost_dollars, cost.error
                self.bus.emit(RequestFinished(now, step.number, stage, now - began, *amounts))
            if store.is_durable and record is not None and (text := record.write(answer)) is not None:
                store.record_reply(step.number, stage, record.position, text, cost.tokens, cost.cost_dollars)
            return answer

        return await self._retry(_Flight(), stage, step, attempt)

    async def rollout(
        self,
        key: RolloutKey,
        stage: str,
        step: Requester,
        reservation: Reservation,
        call: Callable[[], Awaitable[Rollout]],
        record: RolloutRecord | None = None,
        *,
        make_failure: Callable[[str], Rollout] | None = None,
        followers: int = 0,
        on_granted: OnGranted = lambda: None,
    ) -> Rollout:
        """Run one rollout, or join an equal one that is in flight, or read one that was paid before an interruption.

        An example that gets no answer for the first candidate that is run on it, while other requests are answered,
        is given up: it fails for every candidate alike, and costs nothing. Where it was answered for another
        candidate before, it fails only for candidates that get no answer on it.

        Args:
            reservation: pays its metric call, unless it is joined or read.
            make_failure: makes a failed rollout from the reason why there is no answer; None where that is an error.

        Raises:
            RolloutUnresolvedError: the provider gave no answer.
        """
        _mark_requested(step)
        if record is not None:
            paid_rollout = self.store.find_rollout(key, step.number, record.read)
            if paid_rollout is not None:
                return paid_rollout
        shared = replace(key, traced=True)  # the LMs are asked the same with a trace and without
        while self._single_flight and (flight := self._flights.get(shared)):
            on_granted()
            with self._waiting_for(flight, step):
                await flight.ended.wait()
            if flight.result is not None and (flight.traced == key.traced or not flight.result.error):
                self.joined += 1
                return flight.result
            # Its step was cancelled, or it got no answer: this step makes the rollout itself.
        while flight := self._waiting_for_example(key):
            on_granted()
            with self._waiting_for(flight, step):
                await flight.ended.wait()
        example = key.split, key.example
        if make_failure is not None and self.is_unanswered(key):
            on_granted()
            return make_failure(self.unanswerable.get(example) or self._unanswered[key])
        flight = _Flight(key.traced)
        if self._single_flight:
            self._flights[shared] = flight
        attempts = _RolloutAttempts(self, key, stage, step, reservation, call, record)
        try:
            flight.result = await self._retry(
                flight, stage, step, attempts.make, followers=followers, on_granted=on_granted
            )
            self._answered_examples.add(example)
        except RolloutUnresolvedError as error:
            if make_failure is None or not error.unanswerable:
                raise
            flight.result = make_failure(self._give_up(key, step, stage, error))
        finally:
            if self._flights.get(shared) is flight:
                del self._flights[shared]
            flight.ended.set()
        return flight.result

    def unanswered_examples(self, candidate: str, split: str) -> set[Hashable]:
        """Return the examples that get no answer, at least for this candidate, and those on which a rollout waits for
        its next attempt."""
        keys = [key for key, flight in self._flights.items() if flight.is_waiting]
        keys += [key for key in list(self._unanswered) if key.candidate == candidate]
        unanswered = [*self.unanswerable, *((key.split, key.example) for key in keys)]
        return {example for example_split, example in unanswered if example_split == split}

    def _waiting_for_example(self, key: RolloutKey) -> _Flight | None:
        """A rollout of another candidate that waits for its next attempt, on an example that got no answer yet: it
        finds out whether the example gets one at all, and more rollouts on it would hold slots meanwhile."""
        if not self._single_flight or (key.split, key.example) in self._answered_examples:
            return None
        return next(
            (
                flight
                for other, flight in self._flights.items()
                if (other.split, other.example) == (key.split, key.example) and flight.is_waiting
            ),
            None,
        )

    def is_unanswered(self, key: RolloutKey) -> bool:
        """Whether a rollout fails because it gets no answer, so that its score says nothing about its candidate."""
        return (key.split, key.example) in self.unanswerable or key in self._unanswered

    def is_waiting(self, step: int) -> bool:
        """Whether all of a step's requests wait for their next attempt."""
        flights = self._awaited.get(step, ())
        return bool(flights) and all(flight.is_waiting for flight in flights)

    @contextmanager
    def _waiting_for(self, flight: _Flight, step: Requester) -> Generator[None, None, None]:
        awaited = self._awaited.setdefault(step.number, [])
        awaited.append(flight)
        try:
            yield
        finally:
            awaited.remove(flight)
            if not awaited:
                self._awaited.pop(step.number, None)

    async def _retry(
        self,
        flight: _Flight,
        stage: str,
        step: Requester,
        attempt: Callable[[int], Awaitable[T]],
        *,
        followers: int = 0,
        on_granted: OnGranted | None = None,
    ) -> T:
        """Call ``attempt`` in a slot, with its number from 1, until it does not fail transiently."""
        request, responder = TrackedRequest(), self.endpoints.of_stage(stage)
        retries = self.endpoints.retries

        async def call() -> T:
            flight.slot = current_slot()
            if retries.outage:
                raise RolloutUnresolvedError(retries.outage)
            responder.begin(request)
            try:
                return await attempt(request.failures + 1)
            finally:
                responder.leave(request)

        with self._waiting_for(flight, step):
            while True:
                try:
                    answer = await self.scheduler.run(stage, step, call, followers=followers, on_granted=on_granted)
                except TransientError as error:
                    failed: TrackedRequest = error.asked or request
                    if error.asked is None:  # else the LM call that failed was retried already, where it was made
                        responder.record_failure(request, str(error), error.of_request)
                        if not responder.group.sees_lm_calls:  # of an LM of the user's own kind: whole requests tell
                            responder.record_refusal(request, error.retry_after_seconds)
                        if responder.may_retry(request, retries.policy.attempts):
                            flight.is_backing_off = True
                            await responder.pause_before_retry(None, request, error.retry_after_seconds)
                            flight.is_backing_off = False
                            continue
                    reason = f"no answer after {failed.failures} attempts: {error}"
                    raise RolloutUnresolvedError(reason, failed.is_isolated) from error
                if responder.group.sees_lm_calls:
                    responder.record_answer(request)
                else:
                    responder.record_reply(request)
                return answer

    def _give_up(self, key: RolloutKey, step: Requester, stage: str, error: RolloutUnresolvedError) -> str:
        """Record that a rollout cannot be answered; return why."""
        example, reason = (key.split, key.example), str(error)
        alone = example in self._answered_examples
        if example not in self.unanswerable and key not in self._unanswered:
            self._unanswered[key] = reason
            self.bus.emit(ExampleGivenUp(self.clock(), step.number, stage, key.split, key.example, alone, reason))
            logger.warning(
                "Example %r of %s gets %s, while others are answered: it fails for %s from now on.",
                key.example, key.split, reason, "this candidate" if alone else "every candidate",
            )  # fmt: skip
        if not alone and example not in self.unanswerable:
            self.unanswerable[example] = reason
            for other, flight in self._flights.items():
                if (other.split, other.example) == example and flight.is_waiting:
                    flight.cancel_attempt()
        return reason


def _bound_slot(time_scope: anyio.CancelScope) -> None:
    """Let pauses of the current slot move the deadline of a scope on."""
    if (slot := current_slot()) is not None:
        slot.time_scope = time_scope


def _mark_requested(step: Requester) -> None:
    if isinstance(step, Step):
        step.has_requested = True


@dataclass(eq=False, slots=True)
class _RolloutAttempts:
    """A rollout over all of its attempts; its metric call is written down, as ``call_number``, before it is made."""

    rollouts: Rollouts
    key: RolloutKey
    stage: str
    step: Requester
    reservation: Reservation
    call: Callable[[], Awaitable[Rollout]]
    record: RolloutRecord | None
    call_number: int | None = None
    metric_began: bool = False
    began: float = 0.0

    async def make(self, attempt: int) -> Rollout:
        """Make one attempt, in the current slot."""
        self.call_number, self.metric_began = None, False
        clock, timeout = self.rollouts.clock, self.rollouts.timeout_seconds
        self.began = clock()
        try:
            with anyio.move_on_after(timeout) as time_scope, recording_rollout(self):
                _bound_slot(time_scope)
                rollout = await self.call()
                check_main_thread()
                return self._finish(rollout, clock() - self.began)
        except anyio.get_cancelled_exc_class():
            if self.metric_began:
                self._settle()
            raise
        except BaseException:
            self.retract_metric_call()
            raise
        raise self._end_late(clock() - self.began, attempt)

    async def record_metric_call(self) -> None:
        """Write the metric's call into the Store."""
        self.metric_began = True
        if self.call_number is None:
            with anyio.CancelScope(shield=True):  # a call that is made must be in the Store, whatever comes
                number = self.rollouts.store.record_call(self.stage, self.step.number)
                await self.rollouts.store.flush()
                self.call_number = number

    def retract_metric_call(self) -> None:
        """Take the metric's call back, since it was not made after all."""
        self.metric_began = False
        if self.call_number is not None:
            self.rollouts.store.record_call(self.stage, self.step.number, -1)
            self.call_number = None

    def record_wasted_cost(self, tokens: int, cost_dollars: float) -> None:
        """Tell the observers what was paid and came to nothing."""
        now, reason = self.rollouts.clock(), "given up"
        event = RequestFinished(now, self.step.number, self.stage, now - self.began, tokens, cost_dollars, reason)
        self.rollouts.bus.emit(event)

    def _settle(self) -> None:
        """Count the metric's call as the step's."""
        self.reservation.settle()
        if self.call_number is None:
            self.call_number = self.rollouts.store.record_call(self.stage, self.step.number)

    def _finish(self, rollout: Rollout, seconds: float) -> Rollout:
        """Pay the rollout, write it down and tell the observers."""
        self._settle()
        rollouts, stage, number = self.rollouts, self.stage, self.step.number
        if rollouts.store.is_durable and self.record is not None:
            assert self.call_number is not None
            rollouts.store.record_rollout(
                self.key, stage, number, rollout, self.record.write(rollout), seconds, self.call_number
            )
        rollouts.bus.emit(
            RolloutFinished(
                rollouts.clock(), number, stage, rollout.score, seconds, rollout.tokens, rollout.cost_dollars
            )
        )
        return rollout

    def _end_late(self, seconds: float, attempt: int) -> FlashEvolveError:
        """Count an attempt that took too long, or whose example was given up meanwhile; return what to raise."""
        rollouts = self.rollouts
        if reason := rollouts.unanswerable.get((self.key.split, self.key.example)):
            if self.metric_began:
                self._settle()
            return RolloutUnresolvedError(reason, unanswerable=True)
        rollouts.timed_out += 1
        rollouts.bus.emit(RolloutTimedOut(rollouts.clock(), self.step.number, self.stage, seconds, attempt))
        late = f"no answer within {seconds:g} seconds"
        if self.metric_began:
            self._settle()
            if not self.reservation.extend(1):
                return RolloutUnresolvedError(f"{late}, and the budget does not pay another attempt.")
        return TransientError(late, of_request=True)
