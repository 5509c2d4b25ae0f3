"""The whole life of a paid request, from top to bottom: :meth:`Requests.answer`.

.. code-block:: text

    paid before      a run that goes on reads what the killed one has paid for     Call.paid_before
    single flight    equal rollouts in flight are made once                        Requests._rollout
    slot             it waits in the run's order                                   engine/scheduler.py
    budget           a rollout's metric call is written down before it is made,
                     and settled against the reservation of its step               MetricCall
    attempt          it is made, within its time                                   Call.attempt
    retry, fault     a 429, a timeout, a lost connection: whose fault it is, and
                     when it is made again, outside of the slot                    Attempts in engine/provider.py
    no answer        its example is given up, or its step fails; never a score     Requests._give_up
    row              answer and cost are written down and told to the observers    Call.attempt

An LM call inside of a request goes through the same attempts (``programs/lm.py``). Code inside a rollout reports to the
run that its metric is called, before it is: it may run in a thread, or in another process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar, cast

import anyio

from dspy_flashevolve.engine.errors import FlashEvolveError, NoLongerWantedError, RolloutUnresolvedError, TransientError
from dspy_flashevolve.engine.events import EventBus, ExampleGivenUp, RequestFinished, RolloutFinished, RolloutTimedOut
from dspy_flashevolve.engine.loop import check_main_thread, collecting_errors
from dspy_flashevolve.engine.provider import Attempts, Failure, Providers
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


@dataclass(eq=False, kw_only=True)
class Call(Generic[T]):
    """A request that costs no metric call: a reflection, say.

    Args:
        stage, step: whose queue it waits in, and who asks.
        make: makes it once, in a slot.
        cost_of: what its answer has cost, for the observers; None for a request that asks no LM.
        record: how its answer is written down, and read by a run that goes on; None where it is not.
        followers: requests of the same batch that come once it has its slot.
        on_granted: called when it has its slot, or needs none.
    """

    stage: str
    step: Requester
    make: Callable[[], Awaitable[T]]
    cost_of: Callable[[T], RequestCost] | None = None
    record: ReplyRecord[T] | None = None
    followers: int = 0
    on_granted: OnGranted = lambda: None

    def paid_before(self, store: Store) -> T | None:
        """Return the answer that was paid before an interruption; None where there is none."""
        if self.record is None:
            return None
        reply = store.find_reply(self.step.number, self.stage, self.record.position)
        return None if reply is None else self.record.read(reply)

    async def attempt(self, requests: Requests, number: int) -> T:
        """Make it once, tell the observers what it has cost, and write its answer down."""
        began = requests.clock()

        def finished(cost: RequestCost) -> None:
            now, amounts = requests.clock(), (cost.tokens, cost.cost_dollars, cost.error)
            requests.bus.emit(RequestFinished(now, self.step.number, self.stage, now - began, *amounts))

        with anyio.CancelScope() as time_scope:
            _bound_slot(time_scope)
            try:
                answer = await self.make()
            except FlashEvolveError:  # it is retried, or ends its step or the run: each has an event of its own
                raise
            except Exception as error:
                finished(RequestCost(0, error=f"{type(error).__name__}: {error}"))
                raise
            cost = RequestCost(0) if self.cost_of is None else self.cost_of(answer)
            if self.cost_of is not None:
                finished(cost)
            record, store = self.record, requests.store
            if store.is_durable and record is not None and (text := record.write(answer)) is not None:
                amounts = cost.tokens, cost.cost_dollars
                store.record_reply(self.step.number, self.stage, record.position, text, *amounts)
            return answer
        raise TransientError(f"no answer within {requests.clock() - began:g} seconds", of_request=True)


@dataclass(eq=False, kw_only=True)
class RolloutCall(Call[Rollout]):
    """A rollout. It costs a metric call, which is written down before the metric is called.

    Args:
        key: equal ones are made once.
        reservation: pays its metric call, unless it is joined or read.
        written: how it is written down and read; None where it is not.
        make_failure: makes a failed rollout from the reason why there is no answer; None where that is an error.
    """

    key: RolloutKey
    reservation: Reservation
    written: RolloutRecord | None = None
    make_failure: Callable[[str], Rollout] | None = None

    @property
    def example(self) -> tuple[str, Hashable]:
        """Its example: split and id."""
        return self.key.split, self.key.example

    def paid_before(self, store: Store) -> Rollout | None:
        """See :meth:`Call.paid_before`."""
        if self.written is None:
            return None
        return store.find_rollout(self.key, self.step.number, self.written.read)

    async def attempt(self, requests: Requests, number: int) -> Rollout:
        """Make it once, pay it, tell the observers, and write it down.

        Raises:
            TransientError: it took too long, and another attempt can be paid.
            RolloutUnresolvedError: it took too long, or its example was given up meanwhile.
        """
        metric_call, clock = MetricCall(requests, self), requests.clock
        try:
            with anyio.move_on_after(requests.timeout_seconds) as time_scope, recording_rollout(metric_call):
                _bound_slot(time_scope)
                rollout = await self.make()
                check_main_thread()
                seconds = clock() - metric_call.began_seconds
                metric_call.settle()
                if requests.store.is_durable and self.written is not None:
                    assert metric_call.number is not None
                    written = self.written.write(rollout)
                    requests.store.record_rollout(
                        self.key, self.stage, self.step.number, rollout, written, seconds, metric_call.number
                    )
                amounts = rollout.score, seconds, rollout.tokens, rollout.cost_dollars
                requests.bus.emit(RolloutFinished(clock(), self.step.number, self.stage, *amounts))
                return rollout
        except anyio.get_cancelled_exc_class():
            if metric_call.has_begun:
                metric_call.settle()
            raise
        except BaseException:
            metric_call.retract_metric_call()
            raise
        if metric_call.has_begun:
            metric_call.settle()
        if reason := requests.unanswerable.get(self.example):
            raise RolloutUnresolvedError(reason, unanswerable=True)
        seconds = clock() - metric_call.began_seconds
        requests.timed_out += 1
        requests.bus.emit(RolloutTimedOut(clock(), self.step.number, self.stage, seconds, number))
        late = f"no answer within {seconds:g} seconds"
        if metric_call.has_begun and not self.reservation.extend(1):
            raise RolloutUnresolvedError(f"{late}, and the budget does not pay another attempt.")
        raise TransientError(late, of_request=True)


class MetricCall:
    """The metric call of one attempt at a rollout; its number is that of its row."""

    def __init__(self, requests: Requests, call: RolloutCall) -> None:
        self._requests, self._call = requests, call
        self.began_seconds = requests.clock()
        self.number: int | None = None
        self.has_begun = False

    async def record_metric_call(self) -> None:
        """Write it down, before it is made."""
        self.has_begun = True
        store = self._requests.store
        if self.number is None:
            with anyio.CancelScope(shield=True):  # a call that is made must be written, whatever comes
                number = store.record_call(self._call.stage, self._call.step.number)
                await store.flush()
                self.number = number

    def retract_metric_call(self) -> None:
        """Take it back, since it was not made after all."""
        self.has_begun = False
        if self.number is not None:
            self._requests.store.record_call(self._call.stage, self._call.step.number, -1)
            self.number = None

    def record_wasted_cost(self, tokens: int, cost_dollars: float) -> None:
        """Tell the observers what was paid and came to nothing."""
        now, (stage, step) = self._requests.clock(), (self._call.stage, self._call.step.number)
        event = RequestFinished(now, step, stage, now - self.began_seconds, tokens, cost_dollars, "given up")
        self._requests.bus.emit(event)

    def settle(self) -> None:
        """Pay it."""
        self._call.reservation.settle()
        if self.number is None:
            self.number = self._requests.store.record_call(self._call.stage, self._call.step.number)


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


class Requests:
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
        providers: Providers,
        store: Store,
        *,
        single_flight: bool = True,
        timeout_seconds: float | None = None,
    ) -> None:
        self.scheduler, self.bus, self.providers, self.store = scheduler, bus, providers, store
        self.clock, self.timeout_seconds, self._single_flight = scheduler.clock, timeout_seconds, single_flight
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

    async def answer(self, call: Call[T]) -> T:
        """Return the answer to a request: one that was paid before an interruption, that of an equal rollout in flight,
        or what it is answered in a slot.

        An example that gets no answer for the first candidate that is run on it, while other requests are answered,
        is given up: it fails for every candidate alike, and costs nothing. Where it was answered for another
        candidate before, it fails only for candidates that get no answer on it.

        Raises:
            RolloutUnresolvedError: the provider gave no answer.
        """
        if isinstance(call.step, Step):
            call.step.has_requested = True
        if (answer := call.paid_before(self.store)) is not None:
            return answer
        if isinstance(call, RolloutCall):
            return cast(T, await self._rollout(call))
        return await self._answer_in_slot(call, _Flight())

    async def ask(self, stage: str, step: Requester, make: Callable[[], Awaitable[T]]) -> T:
        """Return what ``make`` is answered, which is neither written down nor priced; see :meth:`answer`."""
        return await self.answer(Call(stage=stage, step=step, make=make))

    async def _rollout(self, call: RolloutCall) -> Rollout:
        key, shared = call.key, replace(call.key, traced=True)  # the LMs are asked the same with a trace and without
        while self._single_flight and (flight := self._flights.get(shared)):
            await self._join(flight, call)
            if flight.result is not None and (flight.traced == key.traced or not flight.result.error):
                self.joined += 1
                return flight.result
            # Its step was cancelled, or it got no answer: this step makes the rollout itself.
        while flight := self._waiting_on_example(call):
            await self._join(flight, call)
        if call.make_failure is not None and self.is_unanswered(key):
            call.on_granted()
            return call.make_failure(self.unanswerable.get(call.example) or self._unanswered[key])
        flight = _Flight(key.traced)
        if self._single_flight:
            self._flights[shared] = flight
        try:
            flight.result = await self._answer_in_slot(call, flight)
            self._answered_examples.add(call.example)
        except RolloutUnresolvedError as error:
            if call.make_failure is None or not error.unanswerable:
                raise
            flight.result = call.make_failure(self._give_up(call, str(error)))
        finally:
            if self._flights.get(shared) is flight:
                del self._flights[shared]
            flight.ended.set()
        return flight.result

    async def _answer_in_slot(self, call: Call[T], flight: _Flight) -> T:
        """Make attempts at a request, each in a slot, until one is answered; see :meth:`Attempts.try_again`."""
        providers = self.providers
        attempts = Attempts(providers.of_stage(call.stage), is_whole=True)

        async def attempt() -> T:
            attempts.slot = flight.slot = current_slot()
            await attempts.begin()
            if providers.outage:  # it was given up while this one waited
                raise RolloutUnresolvedError(providers.outage)
            attempts.send()
            try:
                return await call.attempt(self, attempts.failures + 1)
            finally:
                attempts.leave()

        with self._waiting_for(flight, call.step):
            while True:
                try:
                    answer = await self.scheduler.run(
                        call.stage, call.step, attempt, followers=call.followers, on_granted=call.on_granted
                    )
                except TransientError as error:
                    failed: Attempts = error.attempts or attempts
                    if error.attempts is None:  # else the LM call that failed was made again where it was made
                        attempts.slot, flight.is_backing_off = None, True
                        failure = Failure(str(error), error.of_request, error.retry_after_seconds, "refused")
                        if await attempts.try_again(failure):
                            flight.is_backing_off = False
                            continue
                    reason = f"no answer after {failed.failures} attempts: {error}"
                    raise RolloutUnresolvedError(reason, failed.is_isolated) from error
                attempts.answered()
                return answer

    # Examples that get no answer.

    def unanswered_examples(self, candidate: str, split: str) -> set[Hashable]:
        """Return the examples that get no answer, at least for this candidate, and those on which a rollout waits for
        its next attempt."""
        keys = [key for key, flight in self._flights.items() if flight.is_waiting]
        keys += [key for key in list(self._unanswered) if key.candidate == candidate]
        unanswered = [*self.unanswerable, *((key.split, key.example) for key in keys)]
        return {example for example_split, example in unanswered if example_split == split}

    def is_unanswered(self, key: RolloutKey) -> bool:
        """Whether a rollout fails because it gets no answer, so that its score says nothing about its candidate."""
        return (key.split, key.example) in self.unanswerable or key in self._unanswered

    def _waiting_on_example(self, call: RolloutCall) -> _Flight | None:
        """A rollout of another candidate that waits for its next attempt, on an example that got no answer yet: it
        finds out whether the example gets one at all, and more rollouts on it would hold slots meanwhile."""
        if not self._single_flight or call.example in self._answered_examples:
            return None
        return next((flight for flight in self._flights_on(call.example) if flight.is_waiting), None)

    def _flights_on(self, example: tuple[str, Hashable]) -> list[_Flight]:
        return [flight for key, flight in self._flights.items() if (key.split, key.example) == example]

    def _give_up(self, call: RolloutCall, reason: str) -> str:
        """Record that a rollout cannot be answered; return why."""
        key, example = call.key, call.example
        alone = example in self._answered_examples
        if example not in self.unanswerable and key not in self._unanswered:
            self._unanswered[key] = reason
            event = ExampleGivenUp(self.clock(), call.step.number, call.stage, *example, alone, reason)
            self.bus.emit(event)
            logger.warning(
                "Example %r of %s gets %s, while others are answered: it fails for %s from now on.",
                key.example, key.split, reason, "this candidate" if alone else "every candidate",
            )  # fmt: skip
        if not alone and example not in self.unanswerable:
            self.unanswerable[example] = reason
            for flight in self._flights_on(example):
                if flight.is_waiting:
                    flight.cancel_attempt()
        return reason

    # Who waits for what.

    def is_waiting(self, step: int) -> bool:
        """Whether all of a step's requests wait for their next attempt."""
        flights = self._awaited.get(step, ())
        return bool(flights) and all(flight.is_waiting for flight in flights)

    async def _join(self, flight: _Flight, call: RolloutCall) -> None:
        """Wait for the end of a request of somebody else's."""
        call.on_granted()
        with self._waiting_for(flight, call.step):
            await flight.ended.wait()

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


def _bound_slot(time_scope: anyio.CancelScope) -> None:
    """Let pauses of the current slot move the deadline of a scope on."""
    if (slot := current_slot()) is not None:
        slot.time_scope = time_scope
