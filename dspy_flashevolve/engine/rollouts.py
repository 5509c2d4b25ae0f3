"""Rollouts and other requests: a slot for each, retries outside the slot, paid once, written down.

A rollout's metric call is settled against a reservation; equal rollouts in flight are one; what the journal has from an
interrupted run is not made again. Other requests (a reflection, an integration) cost no metric call.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import anyio

from dspy_flashevolve.engine.endpoints import Endpoints
from dspy_flashevolve.engine.errors import FlashEvolveError, RolloutUnresolvedError, TransientError
from dspy_flashevolve.engine.events import EventBus, ExampleGivenUp, RequestFinished, RolloutFinished, RolloutTimedOut
from dspy_flashevolve.engine.loop import check_main_thread, collecting_errors
from dspy_flashevolve.engine.replay import Rollout, RolloutKey, RunJournal
from dspy_flashevolve.engine.retries import TrackedRequest
from dspy_flashevolve.engine.scheduler import Requester, Scheduler
from dspy_flashevolve.engine.slot import Slot, current_slot
from dspy_flashevolve.engine.steps import Reservation, Step, StepEnded

logger = logging.getLogger(__name__)
T = TypeVar("T")
OnGranted = Callable[[], None]


@dataclass(frozen=True, slots=True)
class RequestCost:
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


async def batch(count: int, call: Callable[[int, OnGranted], Awaitable[T]]) -> list[T]:
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

            with collecting_errors(failures, group, "a request"):
                try:
                    results[index] = await call(index, granted)
                except (RolloutUnresolvedError, NoLongerWantedError, StepEnded) as error:
                    put_off.append(error)
            granted()

        begin()
    for error in (*failures, *sorted(put_off, key=lambda one: not isinstance(one, StepEnded))):
        raise error
    return [results[index] for index in range(count)]


async def gather(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run a few calls at once; results in order, errors as of :func:`batch`."""

    async def one(index: int, granted: OnGranted) -> T:
        granted()
        return await calls[index]()

    return await batch(len(calls), one)


@dataclass(eq=False)
class _Flight:
    """A request under way; equal rollouts join it."""

    landed: anyio.Event = field(default_factory=anyio.Event)
    result: Rollout | None = None
    slot: Slot | None = None
    rests_since: float | None = None

    @property
    def waits_since(self) -> float | None:
        """When it began to wait to be asked for again; None where it does not."""
        return self.slot.paused_since if self.rests_since is None and self.slot is not None else self.rests_since

    def cut(self) -> None:
        """End its attempt, as its time does."""
        if self.slot is not None and self.slot.time_scope is not None:
            self.slot.time_scope.cancel()


class Rollouts:
    """Makes the requests of one run.

    Args:
        scheduler: gives the slots.
        bus: told of every request that was answered, and of every rollout that was given up.
        endpoints: who answers; their policy says how often a request is made again.
        single_flight: equal rollouts in flight are one.
        timeout_seconds: a run of a rollout that takes longer, from the grant of its slot, is cancelled and counts as a
            :class:`TransientError`. The time in which it has given its slot back, since its provider said when to come
            back, does not count. Code that runs in a thread cannot be cancelled: a program there is left behind, and
            a metric there, which is the end of a rollout, is waited for. None for no bound. Whatever runs in a slot
            may have another end: that of one LM call, see ``Pace``.
        journal: where rollouts and replies are written down; None for nowhere.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        bus: EventBus,
        endpoints: Endpoints,
        *,
        single_flight: bool = True,
        timeout_seconds: float | None = None,
        journal: RunJournal | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.bus = bus
        self.endpoints = endpoints
        self.clock = scheduler.clock
        self._single_flight = single_flight
        self.timeout_seconds = timeout_seconds
        self.journal = journal
        self._flights: dict[RolloutKey, _Flight] = {}
        self._awaited: dict[int, list[_Flight]] = {}
        """Step -> the requests that it waits for."""
        self.answered_seconds = -math.inf
        """When a request was answered last."""
        self.joined = 0
        """Rollouts that were joined instead of run."""
        self.unanswerable: dict[tuple[str, Hashable], str] = {}
        """Split and example that get no answer -> what the provider says: every candidate fails on it."""
        self._refused: dict[RolloutKey, str] = {}
        self._answered: set[tuple[str, Hashable]] = set()
        self.timed_out = 0
        """Runs of rollouts that were given up."""

    async def request(
        self,
        stage: str,
        step: Requester,
        call: Callable[[], Awaitable[T]],
        cost_of: Callable[[T], RequestCost] | None = None,
        record: ReplyRecord[T] | None = None,
    ) -> T:
        """Make a request that is no rollout.

        Args:
            stage, step: whose queue it waits in.
            spent: what it has cost, for a :class:`RequestFinished`; None for no event, unless ``call`` raises what is
                no error of this package: that is told in each case, so that no failed request goes unseen.
            record: how its answer is written down; None where it is not. What was paid before an interruption is read,
                and costs nothing.

        Raises:
            RolloutUnresolvedError: every attempt ended in a :class:`TransientError`.
        """
        journal = self.journal
        _asks(step)
        if journal is not None and record is not None:
            kept = journal.find_reply(step.number, stage, record.position)
            answer = None if kept is None else record.read(kept)
            if answer is not None:
                return answer

        async def in_time() -> T:
            began = self.clock()
            with anyio.CancelScope() as bound:
                _bind(bound)
                return await call()
            raise TransientError(f"no answer within {self.clock() - began:g} seconds", of_request=True)

        async def once(attempt: int) -> T:
            began = self.clock()
            try:
                answer, cost = await in_time(), RequestCost(0)
            except FlashEvolveError:  # it is asked again, or ends its step or the run, which is told elsewhere
                raise
            except Exception as error:
                now, said = self.clock(), f"{type(error).__name__}: {error}"
                self.bus.emit(RequestFinished(now, step.number, stage, now - began, 0, 0.0, said))
                raise
            if cost_of is not None:
                now, cost = self.clock(), cost_of(answer)
                paid = cost.tokens, cost.cost_dollars, cost.error
                self.bus.emit(RequestFinished(now, step.number, stage, now - began, *paid))
            if journal is not None and record is not None and (text := record.write(answer)) is not None:
                journal.record_reply(step.number, stage, record.position, text, cost.tokens, cost.cost_dollars)
            return answer

        return await self._retried(_Flight(), stage, step, once)

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

        An example that gets no answer for the first candidate that is run on it, while others are answered, is asked
        for no more: it fails for every candidate alike, and costs nothing. Where it was answered for another candidate,
        it fails for those alone for which it gets none.

        Args:
            stage, step: whose queue it waits in.
            pays: a call of it is settled, unless it is joined or read.
            call: runs it.
            record: how it is written down; None where it is not.
            failed: makes a failure of the reason why there is no answer; None where that is an error.
            behind, granted: see :meth:`Scheduler.run`.

        Raises:
            RolloutUnresolvedError: the provider gave no answer.
        """
        _asks(step)
        if self.journal is not None and record is not None:
            kept = self.journal.find_rollout(key, step.number, record.read)
            if kept is not None:
                return kept
        while self._single_flight and (flight := self._flights.get(key)):
            on_granted()
            with self._waiting_for(flight, step):
                await flight.landed.wait()
            if flight.result is not None:
                self.joined += 1
                return flight.result
            # The one who flew was cancelled or got no answer: fly again.
        while waiting := self._waiting_for_example(key):
            on_granted()
            with self._waiting_for(waiting, step):
                await waiting.landed.wait()
        example = key.split, key.example
        if make_failure is not None and self.is_unanswered(key):
            on_granted()
            return make_failure(self.unanswerable.get(example) or self._refused[key])
        flight = _Flight()
        if self._single_flight:
            self._flights[key] = flight
        one = _Run(self, key, stage, step, reservation, call, record)
        try:
            flight.result = await self._retried(
                flight, stage, step, one.once, followers=followers, on_granted=on_granted
            )
            self._answered.add(example)
        except RolloutUnresolvedError as error:
            if make_failure is None or not error.unanswerable:
                raise
            flight.result = make_failure(self._gives_up(key, step, stage, error))
        finally:
            if self._flights.get(key) is flight:
                del self._flights[key]
            flight.landed.set()
        return flight.result

    def unanswered_examples(self, candidate: str, split: str) -> set[Hashable]:
        """Examples that get no answer, at least for this candidate, and those of which a rollout waits to be asked for
        again."""
        keys = [key for key, flight in self._flights.items() if flight.waits_since is not None]
        keys += [key for key in list(self._refused) if key.candidate == candidate]
        both = [*self.unanswerable, *((key.split, key.example) for key in keys)]
        return {example for of, example in both if of == split}

    def _waiting_for_example(self, key: RolloutKey) -> _Flight | None:
        """A rollout of another candidate that waits to be asked for again, on an example that nobody was answered yet.

        It finds out whether the example gets an answer at all. More of them would hold further slots meanwhile, until
        nothing is left that could show that others are answered.
        """
        if not self._single_flight or (key.split, key.example) in self._answered:
            return None
        return next(
            (
                flight
                for other, flight in self._flights.items()
                if (other.split, other.example) == (key.split, key.example) and flight.waits_since is not None
            ),
            None,
        )

    def is_unanswered(self, key: RolloutKey) -> bool:
        """Whether a rollout fails because nobody answers it: its score says nothing of its candidate."""
        return (key.split, key.example) in self.unanswerable or key in self._refused

    def waiting_since(self, step: int) -> float | None:
        """When the last of all that a step has asked for began to wait to be asked for again; None where something is
        under way."""
        since = [flight.waits_since for flight in self._awaited.get(step, ())]
        waiting = [one for one in since if one is not None]
        return max(waiting) if waiting and len(waiting) == len(since) else None

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

    async def _retried(
        self, flight: _Flight, stage: str, step: Requester, once: Callable[[int], Awaitable[T]], **queue: Any
    ) -> T:
        """Call ``once`` in a slot, with the number of the attempt, from 1, until it does not fail transiently."""
        sent, answers = TrackedRequest(), self.endpoints.responder_of_stage(stage)

        async def call() -> T:
            flight.slot = current_slot()
            if self.endpoints.retries.outage:
                raise RolloutUnresolvedError(self.endpoints.retries.outage)
            answers.begin(sent)
            try:
                return await once(sent.failures + 1)
            finally:
                answers.leave(sent)

        with self._waiting_for(flight, step):
            while True:
                try:
                    answer = await self.scheduler.run(stage, step, call, **queue)
                except TransientError as error:
                    asked: TrackedRequest = error.asked or sent
                    if error.asked is None:
                        answers.record_failure(sent, str(error), error.of_request)
                        if (limit := self.endpoints.rollout_limit(stage)) is not None:
                            limit.record_refusal(error.retry_after_seconds)
                        if answers.may_retry(sent, self.endpoints.retries.policy.attempts):
                            flight.rests_since = self.clock()
                            await answers.pause_before_retry(None, sent, error.retry_after_seconds)
                            flight.rests_since = None
                            continue
                    said = f"no answer after {asked.failures} attempts: {error}"
                    raise RolloutUnresolvedError(said, asked.is_isolated) from error
                answers.record_answer(sent)
                self.answered_seconds = self.clock()
                return answer

    def _gives_up(self, key: RolloutKey, step: Requester, stage: str, error: RolloutUnresolvedError) -> str:
        """Take note of what cannot be answered; returns why."""
        example, said = (key.split, key.example), str(error)
        alone = example in self._answered
        if example not in self.unanswerable and key not in self._refused:
            self._refused[key] = said
            self.bus.emit(ExampleGivenUp(self.clock(), step.number, stage, key.split, key.example, alone, said))
            logger.warning(
                "Example %r of %s gets %s, while others are answered: it fails for %s from now on.",
                key.example, key.split, said, "this candidate" if alone else "every candidate",
            )  # fmt: skip
        if not alone and example not in self.unanswerable:
            self.unanswerable[example] = said
            for other, flight in self._flights.items():
                if (other.split, other.example) == example and flight.waits_since is not None:
                    flight.cut()
        return said


def _bind(bound: anyio.CancelScope) -> None:
    if (slot := current_slot()) is not None:
        slot.time_scope = bound


def _asks(step: Requester) -> None:
    if isinstance(step, Step):
        step.has_requested = True


@dataclass(eq=False, slots=True)
class _Run:
    """One run of a rollout in a slot, within its time; its metric call is written down before it is made."""

    of: Rollouts
    key: RolloutKey
    stage: str
    step: Requester
    pays: Reservation
    call: Callable[[], Awaitable[Rollout]]
    record: RolloutRecord | None
    number: int | None = None
    metric_began: bool = False
    began: float = 0.0

    async def once(self, attempt: int) -> Rollout:
        self.number, self.metric_began = None, False
        clock, timeout = self.of.clock, self.of.timeout_seconds
        self.began = clock()
        try:
            with anyio.move_on_after(timeout) as bound, recording_rollout(self):
                _bind(bound)
                rollout = await self.call()
                check_main_thread()
                return self._answered(rollout, clock() - self.began)
        except anyio.get_cancelled_exc_class():
            if self.metric_began:
                self._settle()
            raise
        except BaseException:
            self.retract_metric_call()
            raise
        raise self._gave_up(clock() - self.began, attempt)

    async def record_metric_call(self) -> None:
        """Write the metric's call down."""
        self.metric_began = True
        if self.of.journal is not None and self.number is None:
            with anyio.CancelScope(shield=True):  # that must not be forgotten, whatever comes
                number = self.of.journal.record_call(self.stage, self.step.number)
                await self.of.journal.journal.flush()
                self.number = number

    def retract_metric_call(self) -> None:
        """Take that back: it was not made after all."""
        self.metric_began = False
        if self.of.journal is not None and self.number is not None:
            self.of.journal.record_call(self.stage, self.step.number, -1)
            self.number = None

    def record_wasted_cost(self, tokens: int, cost_dollars: float) -> None:
        """Tell what is paid and comes to nothing."""
        now, said = self.of.clock(), "given up"
        event = RequestFinished(now, self.step.number, self.stage, now - self.began, tokens, cost_dollars, said)
        self.of.bus.emit(event)

    def _settle(self) -> None:
        """Count the call of its metric, as the step's."""
        self.pays.settle()
        if self.of.journal is not None and self.number is None:
            self.number = self.of.journal.record_call(self.stage, self.step.number)

    def _answered(self, rollout: Rollout, seconds: float) -> Rollout:
        self._settle()
        of, stage, number = self.of, self.stage, self.step.number
        if self.of.journal is not None and self.record is not None:
            assert self.number is not None
            self.of.journal.record_rollout(
                self.key, stage, number, rollout, self.record.write(rollout), seconds, self.number
            )
        if (limit := of.endpoints.rollout_limit(stage)) is not None:
            limit.record_answer(seconds, rollout.tokens)
        of.bus.emit(
            RolloutFinished(of.clock(), number, stage, rollout.score, seconds, rollout.tokens, rollout.cost_dollars)
        )
        return rollout

    def _gave_up(self, seconds: float, attempt: int) -> FlashEvolveError:
        """The run took too long, or waited for what nobody answers: what to raise."""
        of = self.of
        if said := of.unanswerable.get((self.key.split, self.key.example)):
            if self.metric_began:
                self._settle()
            return RolloutUnresolvedError(said, unanswerable=True)
        of.timed_out += 1
        of.bus.emit(RolloutTimedOut(of.clock(), self.step.number, self.stage, seconds, attempt))
        late = f"no answer within {seconds:g} seconds"
        if self.metric_began:
            self._settle()
            if not self.pays.extend(1):
                return RolloutUnresolvedError(f"{late}, and the budget does not pay another attempt.")
        return TransientError(late, of_request=True)


class RolloutRecorder(Protocol):
    """What is told, from inside a rollout, of its metric's call and of what it has cost."""

    async def record_metric_call(self) -> None: ...

    def retract_metric_call(self) -> None: ...

    def record_wasted_cost(self, tokens: int, cost_dollars: float) -> None: ...


_RUN: ContextVar[RolloutRecorder | None] = ContextVar("flashevolve_rollout", default=None)


@contextmanager
def recording_rollout(by: RolloutRecorder) -> Generator[None, None, None]:
    """Tell ``by`` of a rollout that is made inside."""
    token = _RUN.set(by)
    try:
        yield
    finally:
        _RUN.reset(token)


async def record_metric_call() -> None:
    """Say, inside a rollout, that its metric is called when this returns. Outside of one it does nothing."""
    run = _RUN.get()
    if run is not None:
        await run.record_metric_call()


def retract_metric_call() -> None:
    """Say, inside a rollout, that its metric was not called although it was said to be: the rollout is given up."""
    run = _RUN.get()
    if run is not None:
        run.retract_metric_call()


def record_wasted_cost(tokens: int, cost_dollars: float) -> None:
    """Say, inside a rollout, what it has cost although it comes to nothing. Outside of one it does nothing."""
    run = _RUN.get()
    if run is not None and tokens:
        run.record_wasted_cost(tokens, cost_dollars)
