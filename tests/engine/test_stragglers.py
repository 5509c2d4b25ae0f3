"""Rollouts that take too long: given up, tried again, duplicated; paid as they should be. Virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from dspy_flashevolve.engine.budget import Budget, Reservation
from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.errors import (
    ConfigurationError,
    RolloutUnresolvedError,
    RunAbortedError,
    TransientError,
)
from dspy_flashevolve.engine.events import Event, EventBus, RolloutDuplicated, RolloutFinished, RolloutTimedOut
from dspy_flashevolve.engine.flights import Rollout
from dspy_flashevolve.engine.leases import current_lease, paused_slot
from dspy_flashevolve.engine.retries import RetryPolicy
from dspy_flashevolve.engine.rollouts import Rollouts
from dspy_flashevolve.engine.slots import Slots
from dspy_flashevolve.engine.stragglers import Duplicates, Stragglers, metric_begins
from dspy_flashevolve.engine.threads import Threads
from dspy_flashevolve.programs.metric import Metric
from dspy_flashevolve.sim.virtual import run

T = TypeVar("T")
FIRST, SECOND = Claim(0, "screen", 3), Claim(1, "screen", 3)
AT_ONCE = RetryPolicy(attempts=3, first_seconds=0.0)
EAGER = Duplicates(factor=3.0, least=2, share=1.0)


def now() -> float:
    return asyncio.get_running_loop().time()


class Bench:
    """A rollout service in virtual time, with what it used and told."""

    def __init__(self, slots: int = 4, limit: int | None = 100, retry: RetryPolicy = AT_ONCE, **options: Any) -> None:
        self.events: list[Event] = []
        bus = EventBus()
        bus.subscribe(self.events.append)
        self.slots = Slots(slots, clock=now)
        self.budget = Budget(limit)
        self.rollouts = Rollouts(self.slots, bus, now, retry, **options)

    def reserved(self, calls: int = 1) -> Reservation:
        reservation = self.budget.reserve(calls)
        assert reservation is not None
        return reservation

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]

    async def after(self, *seconds: float) -> None:
        """Let rollouts that take that long finish, one after the other."""
        for number, duration in enumerate(seconds):
            await self.rollouts.rollout(("before", number), FIRST, self.reserved(), Taking(duration))

    def check_nothing_is_held(self) -> None:
        used = self.slots.statistics()
        assert (used.busy, used.waiting, self.budget.reserved) == (0, 0, 0)


class Taking:
    """A rollout whose first run takes the first time, its second the second, and so on; the last repeats."""

    def __init__(self, *seconds: float, metric_after: float | None = None) -> None:
        self.seconds = seconds
        self.metric_after = metric_after
        self.runs = self.ended = self.cancelled = 0

    async def __call__(self) -> Rollout:
        number = self.runs
        self.runs += 1
        try:
            seconds = self.seconds[min(number, len(self.seconds) - 1)]
            if self.metric_after is not None and self.metric_after < seconds:
                await anyio.sleep(self.metric_after)
                await metric_begins()
                seconds -= self.metric_after
            await anyio.sleep(seconds)
        except BaseException:
            self.cancelled += 1
            raise
        self.ended += 1
        return Rollout(f"run {number}", 0.5, tokens=7)


# Timeouts


def test_a_rollout_that_takes_too_long_is_given_up_and_tried_again() -> None:
    async def main() -> None:
        bench, call = Bench(timeout_seconds=10.0), Taking(1000.0, 4.0)
        reservation = bench.reserved()
        rollout, paid = await bench.rollouts.rollout("key", FIRST, reservation, call)
        assert (rollout.output, paid, now()) == ("run 1", True, 14.0)
        assert bench.events[0] == RolloutTimedOut(10.0, 0, "screen", waited_seconds=10.0, attempt=1)
        assert [event.latency_seconds for event in bench.of(RolloutFinished)] == [4.0]
        assert (bench.rollouts.timed_out, bench.rollouts.retried, call.cancelled) == (1, 1, 1)
        assert (reservation.settled, bench.budget.spent) == (1, 1)
        bench.check_nothing_is_held()

    run(main)


def test_a_rollout_that_always_takes_too_long_is_unresolved_and_not_paid() -> None:
    async def main() -> None:
        bench = Bench(timeout_seconds=2.5)
        reservation = bench.reserved()
        with pytest.raises(RolloutUnresolvedError, match=r"no answer after 3 attempts: no answer within 2\.5 seconds"):
            await bench.rollouts.rollout("key", FIRST, reservation, Taking(1000.0))
        assert [event.attempt for event in bench.of(RolloutTimedOut)] == [1, 2, 3]
        assert (reservation.settled, reservation.open, bench.of(RolloutFinished)) == (0, 1, [])

    run(main)


def test_the_wait_for_a_slot_does_not_count() -> None:
    async def main() -> None:
        bench = Bench(slots=1, timeout_seconds=10.0)
        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(bench.rollouts.rollout, number, FIRST, bench.reserved(), Taking(9.0))
        assert (now(), bench.rollouts.timed_out) == (36.0, 0)

    run(main)


@pytest.mark.parametrize(("working", "answers"), [(1.9, True), (2.1, False)])
def test_the_time_in_which_the_provider_lets_it_wait_does_not_count(working: float, answers: bool) -> None:
    """Two seconds of work are allowed; two requests of the rollout are told to come back after 30 and 40 seconds."""

    async def main() -> None:
        bench = Bench(timeout_seconds=2.0, retry=RetryPolicy(attempts=1))

        async def waits(seconds: float) -> None:
            async with paused_slot(current_lease()):
                await anyio.sleep(seconds)

        async def call() -> Rollout:
            await anyio.sleep(1)
            async with anyio.create_task_group() as group:
                group.start_soon(waits, 30)
                group.start_soon(waits, 40)
            await anyio.sleep(working - 1)
            return Rollout(None, 1.0)

        if answers:
            rollout, _ = await bench.rollouts.rollout("r", FIRST, bench.reserved(), call)
            assert rollout.score == 1.0
            assert now() == pytest.approx(40 + working)
        else:
            with pytest.raises(RolloutUnresolvedError, match="no answer within 2 seconds"):
                await bench.rollouts.rollout("r", FIRST, reservation := bench.reserved(), call)
            reservation.refund()
            assert now() == pytest.approx(42)
        bench.check_nothing_is_held()

    run(main)


def test_no_slot_is_held_between_a_timeout_and_the_next_attempt() -> None:
    class Half(RetryPolicy):
        def wait_seconds(self, attempt: int, retry_after_seconds: float | None, chance: float) -> float:
            return 5.0

    async def main() -> None:
        bench, busy = Bench(timeout_seconds=10.0, retry=Half(attempts=2)), list[int]()

        async def watch() -> None:
            for at in (9.0, 12.0, 16.0):
                await anyio.sleep(at - now())
                busy.append(bench.slots.statistics().busy)

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            await bench.rollouts.rollout("key", FIRST, bench.reserved(), Taking(1000.0, 3.0))
        assert busy == [1, 0, 1]

    run(main)


def test_two_tickets_share_a_rollout_that_times_out_and_is_tried_again() -> None:
    async def main() -> None:
        bench, call, results = Bench(timeout_seconds=10.0), Taking(1000.0, 4.0), list[tuple[Rollout, bool]]()

        async def one(claim: Claim, at: float) -> None:
            await anyio.sleep(at)
            reservation = bench.reserved()
            results.append(await bench.rollouts.rollout("key", claim, reservation, call))
            reservation.refund()

        async with anyio.create_task_group() as group:
            group.start_soon(one, FIRST, 0.0)
            group.start_soon(one, SECOND, 6.0)
        assert [(rollout.output, paid) for rollout, paid in results] == [("run 1", True), ("run 1", False)]
        assert (call.runs, bench.budget.spent, bench.rollouts.shared, now()) == (2, 1, 1, 14.0)
        bench.check_nothing_is_held()

    run(main)


def test_a_metric_that_had_begun_is_paid_and_the_next_attempt_as_well() -> None:
    async def main() -> None:
        bench, call = Bench(timeout_seconds=10.0), Taking(1000.0, 4.0, metric_after=5.0)
        reservation = bench.reserved()
        await bench.rollouts.rollout("key", FIRST, reservation, call)
        assert (call.runs, reservation.settled, bench.budget.spent) == (2, 2, 2)
        assert len(bench.of(RolloutFinished)) == 1
        bench.check_nothing_is_held()

    run(main)


def test_without_budget_for_another_attempt_the_rollout_is_unresolved() -> None:
    async def main() -> None:
        bench, call = Bench(limit=1, timeout_seconds=10.0), Taking(1000.0, 4.0, metric_after=5.0)
        with pytest.raises(RolloutUnresolvedError, match="within 10 seconds, and the budget does not pay another"):
            await bench.rollouts.rollout("key", FIRST, bench.reserved(), call)
        assert (call.runs, bench.budget.spent, bench.budget.reserved) == (1, 1, 0)

    run(main)


def test_a_cancelled_rollout_whose_metric_had_begun_is_paid() -> None:
    async def main() -> None:
        bench = Bench()
        begun, before = bench.reserved(), bench.reserved()
        async with anyio.create_task_group() as group:
            group.start_soon(bench.rollouts.rollout, 1, FIRST, begun, Taking(1000.0, metric_after=5.0))
            group.start_soon(bench.rollouts.rollout, 2, FIRST, before, Taking(1000.0, metric_after=50.0))
            await anyio.sleep(20.0)
            group.cancel_scope.cancel()
        assert (begun.settled, before.settled) == (1, 0)

    run(main)


def test_a_timeout_of_the_program_itself_is_not_taken_for_one() -> None:
    async def call() -> Rollout:
        raise TimeoutError("of its own")

    async def main() -> None:
        bench = Bench(timeout_seconds=10.0)
        with pytest.raises(TimeoutError, match="of its own"):
            await bench.rollouts.rollout("key", FIRST, bench.reserved(), call)
        assert bench.rollouts.timed_out == 0

    run(main)


def test_other_requests_are_not_bounded() -> None:
    async def main() -> None:
        bench = Bench(timeout_seconds=10.0, duplicates=EAGER)
        await bench.after(1.0, 1.0)
        assert (await bench.rollouts.request(FIRST, Taking(1000.0))).output == "run 0"
        assert bench.of(RolloutTimedOut) == []

    run(main)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_timeout_is_above_zero(seconds: float) -> None:
    with pytest.raises(ConfigurationError, match=f"timeout_seconds is {seconds}, expected a number above 0, or None"):
        Bench(timeout_seconds=seconds)


# Threads cannot be interrupted


@pytest.mark.parametrize("late", ["returns", "raises"])
def test_a_program_in_a_thread_is_left_behind_and_what_it_gives_is_dropped(late: str) -> None:
    ended, leaked = list[float](), list[dict[str, Any]]()

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: leaked.append(context))
        bench, threads, runs = Bench(timeout_seconds=10.0), Threads(4, "test"), list[int]()

        def program(seconds: float) -> Rollout:
            loop.wait_from_thread(asyncio.sleep(seconds))
            ended.append(loop.time())
            if seconds > 10.0 and late == "raises":
                raise ValueError("late")
            return Rollout(f"after {seconds:g}", 0.5)

        async def call() -> Rollout:
            runs.append(len(runs))
            return await threads.run(program, 25.0 if len(runs) == 1 else 4.0)

        rollout, _ = await bench.rollouts.rollout("key", FIRST, bench.reserved(), call)
        assert (rollout.output, now(), bench.rollouts.timed_out, bench.budget.spent) == ("after 4", 14.0, 1, 1)
        bench.check_nothing_is_held()
        await anyio.sleep(20.0)
        assert ended == [14.0, 25.0]
        threads.close(wait=False)

    run(main)
    assert leaked == []


def test_calls_that_were_given_up_do_not_hold_up_those_that_follow() -> None:
    go = threading.Event()

    async def main() -> None:
        threads = Threads(2, "test")
        for _ in range(3):
            began = threading.Event()
            hung = asyncio.ensure_future(threads.run(lambda: (began.set(), go.wait(timeout=10))))  # noqa: B023
            while not began.is_set():
                await checkpoint()
            hung.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hung
        with anyio.fail_after(10):
            assert await threads.run(lambda: "in time") == "in time"
        go.set()
        threads.close()

    asyncio.run(main())


def test_one_worker_stays_one_so_that_its_calls_stay_in_order() -> None:
    go, inside, most = threading.Event(), 0, 0

    def work() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        assert go.wait(timeout=10)
        inside -= 1

    async def main() -> None:
        threads = Threads(1, "test")
        began = threading.Event()
        first = asyncio.ensure_future(threads.run(lambda: (began.set(), work())))
        while not began.is_set():
            await checkpoint()
        first.cancel()
        second = asyncio.ensure_future(threads.run(work))
        for _ in range(50):
            await checkpoint()
        go.set()
        await second
        threads.close()

    asyncio.run(main())
    assert most == 1


def test_a_synchronous_metric_that_has_begun_is_waited_for_beyond_the_timeout() -> None:
    """Its rollout is paid: its answer counts."""

    async def main() -> None:
        bench, threads = Bench(timeout_seconds=10.0), Threads(2, "test")

        def scored(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> float:
            loop = asyncio_loop
            loop.wait_from_thread(asyncio.sleep(30.0))
            return 0.75

        asyncio_loop: Any = asyncio.get_running_loop()
        metric = Metric(scored, threads)

        async def call() -> Rollout:
            await anyio.sleep(5.0)
            return Rollout("output", await metric.score(None, None))

        rollout, paid = await bench.rollouts.rollout("key", FIRST, bench.reserved(), call)
        assert (rollout.score, paid, now()) == (0.75, True, 35.0)
        assert (bench.budget.spent, bench.rollouts.timed_out) == (1, 0)
        threads.close(wait=False)

    run(main)


def test_a_coroutine_metric_is_given_up_and_paid() -> None:
    async def main() -> None:
        bench, threads, judged = Bench(timeout_seconds=10.0), Threads(2, "test"), list[float]()

        async def judge(
            gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None
        ) -> float:
            judged.append(now())
            await anyio.sleep(1000.0 if len(judged) == 1 else 1.0)
            return 0.25

        metric = Metric(judge, threads)

        async def call() -> Rollout:
            return Rollout("output", await metric.score(None, None))

        await bench.rollouts.rollout("key", FIRST, bench.reserved(), call)
        assert judged == [0.0, 10.0]
        assert bench.budget.spent == 2, "the metric was called twice"
        threads.close()

    run(main)


# Duplicates


def test_a_rollout_far_beyond_the_others_is_begun_a_second_time_and_the_first_answer_counts() -> None:
    async def main() -> None:
        bench, call = Bench(duplicates=EAGER), Taking(1000.0, 3.0)
        await bench.after(2.0, 2.0)
        reservation = bench.reserved()
        rollout, paid = await bench.rollouts.rollout("key", SECOND, reservation, call)
        assert (rollout.output, paid, now()) == ("run 1", True, 4.0 + 3 * 2.0 + 3.0)
        assert bench.of(RolloutDuplicated) == [RolloutDuplicated(10.0, 1, "screen")]
        assert (bench.rollouts.duplicated, call.cancelled) == (1, 1)
        assert (reservation.settled, bench.budget.spent) == (1, 3), "the other call was given back"
        bench.check_nothing_is_held()

    run(main)


def test_the_original_may_still_be_the_first() -> None:
    async def main() -> None:
        bench, call = Bench(duplicates=EAGER), Taking(8.0, 1000.0)
        await bench.after(2.0, 2.0)
        rollout, _ = await bench.rollouts.rollout("key", SECOND, bench.reserved(), call)
        assert (rollout.output, now(), call.cancelled) == ("run 0", 12.0, 1)
        assert (bench.budget.spent, bench.rollouts.duplicated) == (3, 1)
        bench.check_nothing_is_held()

    run(main)


def test_the_loser_is_paid_where_its_metric_had_begun() -> None:
    async def main() -> None:
        bench, call = Bench(duplicates=EAGER), Taking(1000.0, 3.0, metric_after=2.5)
        await bench.after(2.0, 2.0)
        reservation = bench.reserved()
        await bench.rollouts.rollout("key", SECOND, reservation, call)
        assert (reservation.settled, bench.budget.spent) == (2, 4)
        bench.check_nothing_is_held()

    run(main)


def test_a_loser_that_cannot_be_cancelled_any_more_is_paid_and_reported_and_the_first_answer_counts() -> None:
    async def main() -> None:
        bench, runs = Bench(duplicates=EAGER), list[int]()

        async def call() -> Rollout:
            runs.append(len(runs))
            number = runs[-1]
            if number == 0:
                with anyio.CancelScope(shield=True):  # as a metric in a thread
                    await anyio.sleep(20.0)
            else:
                await anyio.sleep(1.0)
            return Rollout(f"run {number}", 0.5)

        await bench.after(2.0, 2.0)
        reservation = bench.reserved()
        rollout, _ = await bench.rollouts.rollout("key", SECOND, reservation, call)
        assert rollout.output == "run 1"
        assert (reservation.settled, bench.budget.spent, len(bench.of(RolloutFinished))) == (2, 4, 4)
        bench.check_nothing_is_held()

    run(main)


@pytest.mark.parametrize(
    ("rule", "limit", "runs"),
    [
        (None, 100, 1),
        (Duplicates(least=3), 100, 1),
        (Duplicates(least=2, share=0.3), 100, 1),
        (Duplicates(least=2, share=0.4), 100, 2),
        (EAGER, 3, 1),
        (EAGER, 4, 2),
    ],
    ids=["off", "too few", "share", "within the share", "no budget", "budget"],
)
def test_a_duplicate_needs_a_rule_a_median_a_share_and_a_call(rule: Duplicates | None, limit: int, runs: int) -> None:
    async def main() -> None:
        bench, call = Bench(limit=limit, duplicates=rule), Taking(1000.0)
        await bench.after(2.0, 2.0)
        await bench.rollouts.rollout("key", SECOND, bench.reserved(), call)
        assert call.runs == runs
        assert bench.rollouts.duplicated == runs - 1

    run(main)


def test_kinds_are_compared_with_their_own() -> None:
    async def main() -> None:
        bench, call = Bench(duplicates=EAGER), Taking(1000.0)
        await bench.after(2.0, 2.0)
        await bench.rollouts.rollout("key", Claim(2, "validate", 4), bench.reserved(), call)
        assert call.runs == 1

    run(main)


def test_a_straggler_that_was_there_before_the_median_was_known_is_duplicated_when_it_is() -> None:
    async def main() -> None:
        bench, call = Bench(duplicates=EAGER), Taking(1000.0, 1.0)
        async with anyio.create_task_group() as group:
            group.start_soon(bench.rollouts.rollout, "key", SECOND, bench.reserved(), call)
            await anyio.sleep(50.0)
            await bench.after(2.0, 2.0)
        assert [event.seconds for event in bench.of(RolloutDuplicated)] == [54.0]
        assert now() == 55.0

    run(main)


def test_a_duplicate_that_got_no_slot_is_not_counted() -> None:
    async def main() -> None:
        bench, call = Bench(slots=1, duplicates=EAGER), Taking(9.0)
        await bench.after(2.0, 2.0)
        await bench.rollouts.rollout("key", SECOND, bench.reserved(), call)
        assert (call.runs, bench.rollouts.duplicated, bench.of(RolloutDuplicated)) == (1, 0, [])
        bench.check_nothing_is_held()
        stragglers = bench.rollouts._stragglers
        assert stragglers is not None
        assert stragglers._allowed == 0

    run(main)


@pytest.mark.parametrize("at", [11.0, 15.0])
def test_cancelling_in_the_middle_of_a_duplicate_leaves_no_slot_held_and_nothing_reserved(at: float) -> None:
    async def main() -> None:
        bench, call = Bench(slots=2, duplicates=EAGER), Taking(1000.0)
        await bench.after(2.0, 2.0)
        reservation = bench.reserved()
        async with anyio.create_task_group() as group:
            if at == 11.0:  # the duplicate waits for a slot
                group.start_soon(bench.rollouts.request, FIRST, Taking(1000.0))
            group.start_soon(bench.rollouts.rollout, "key", SECOND, reservation, call)
            await anyio.sleep(at - now())
            assert bench.budget.reserved == 2
            assert bench.slots.statistics().waiting == (at == 11.0)
            group.cancel_scope.cancel()
        assert (call.runs, call.cancelled) == ((1, 1) if at == 11.0 else (2, 2))
        assert (reservation.open, reservation.settled) == (1, 0)
        reservation.refund()
        bench.check_nothing_is_held()
        assert bench.rollouts._flights == {}

    run(main)


def failing(error: Exception, first: bool, after: float = 20.0) -> Callable[[], Awaitable[Rollout]]:
    """Of two runs, one fails after a while; the other answers 40 seconds after it began."""
    runs = 0

    async def call() -> Rollout:
        nonlocal runs
        runs += 1
        number = runs
        if (number == 1) == first and number <= 2:
            await anyio.sleep(after)
            raise error
        await anyio.sleep(40.0)
        return Rollout(f"run {number}", 0.5)

    return call


@pytest.mark.parametrize("error", [TransientError("429"), RunAbortedError("no key"), ValueError("a bug")])
def test_what_a_duplicate_raises_counts_for_nothing(error: Exception) -> None:
    async def main() -> None:
        bench = Bench(duplicates=EAGER)
        await bench.after(2.0, 2.0)
        rollout, _ = await bench.rollouts.rollout("key", SECOND, bench.reserved(), failing(error, first=False))
        assert (rollout.output, now(), bench.rollouts.retried) == ("run 1", 44.0, 0)
        bench.check_nothing_is_held()

    run(main)


def test_where_the_original_gets_no_answer_that_of_the_duplicate_is_waited_for() -> None:
    async def main() -> None:
        bench = Bench(duplicates=EAGER)
        await bench.after(2.0, 2.0)
        call = failing(TransientError("429"), first=True)
        rollout, _ = await bench.rollouts.rollout("key", SECOND, bench.reserved(), call)
        assert (rollout.output, now(), bench.rollouts.retried) == ("run 2", 50.0, 0)
        bench.check_nothing_is_held()

    run(main)


def test_another_error_of_the_original_ends_the_duplicate() -> None:
    async def main() -> None:
        bench = Bench(duplicates=EAGER)
        await bench.after(2.0, 2.0)
        reservation = bench.reserved()
        with pytest.raises(RunAbortedError, match="no key"):
            await bench.rollouts.rollout("key", SECOND, reservation, failing(RunAbortedError("no key"), first=True))
        assert now() == 24.0
        reservation.refund()
        bench.check_nothing_is_held()

    run(main)


def test_a_duplicate_is_bounded_like_any_run_and_the_next_attempt_may_have_its_own() -> None:
    async def main() -> None:
        bench, call = Bench(timeout_seconds=10.0, duplicates=EAGER), Taking(1000.0, 1000.0, 1000.0, 1.0)
        await bench.after(2.0, 2.0)
        rollout, _ = await bench.rollouts.rollout("key", SECOND, bench.reserved(), call)
        # The original from 4 to 14, its duplicate from 10 to 20; the next from 20, its duplicate from 26 to 27.
        assert (rollout.output, now()) == ("run 3", 27.0)
        assert [(event.seconds, event.attempt) for event in bench.of(RolloutTimedOut)] == [(14.0, 1), (20.0, 1)]
        assert (bench.rollouts.duplicated, bench.budget.spent) == (2, 3)
        bench.check_nothing_is_held()

    run(main)


def test_the_limit_is_a_multiple_of_the_median_of_the_newest() -> None:
    stragglers = Stragglers(Duplicates(factor=2.0, least=3), now)
    for seconds in (1.0, 100.0):
        stragglers.finished("screen", seconds)
    assert stragglers.limit_seconds("screen") is None
    stragglers.finished("screen", 3.0)
    assert stragglers.limit_seconds("screen") == 6.0
    for _ in range(200):
        stragglers.finished("screen", 10.0)
    assert stragglers.limit_seconds("screen") == 20.0
    assert stragglers.limit_seconds("validate") is None


@pytest.mark.parametrize(
    ("field_name", "value", "message"),
    [
        ("factor", 1.0, "factor is 1.0, expected above 1"),
        ("least", 0, "least is 0, expected at least 1"),
        ("share", 0.0, "share is 0.0, expected above 0 and at most 1"),
        ("share", 1.5, "share is 1.5"),
    ],
)
def test_a_bad_rule_is_refused(field_name: str, value: float, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"duplicates: {message}"):
        Duplicates(**{field_name: value})  # type: ignore[arg-type]


# Whatever happens


@dataclass
class Plan:
    """One rollout of a random run."""

    key: int
    at: float
    seconds: list[float]
    metric_after: float | None
    cancel_after: float | None
    fails: bool = field(default=False)


TIMES = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 30.0, 300.0])
PLANS = st.lists(
    st.builds(
        Plan,
        key=st.integers(0, 5),
        at=st.sampled_from([0.0, 0.5, 1.0, 4.0]),
        seconds=st.lists(TIMES, min_size=1, max_size=3),
        metric_after=st.none() | TIMES,
        cancel_after=st.none() | TIMES,
        fails=st.booleans(),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150)
@given(PLANS, st.integers(1, 5), st.integers(1, 16), st.none() | st.sampled_from([1.5, 10.0]), st.booleans())
def test_budget_slots_and_counts_hold_whatever_happens(
    plans: list[Plan], slots: int, limit: int, timeout: float | None, single_flight: bool
) -> None:
    rule = Duplicates(factor=1.5, least=1, share=0.5)

    async def main() -> None:
        bench = Bench(slots, limit, timeout_seconds=timeout, duplicates=rule, single_flight=single_flight)
        reservations: list[Reservation] = []

        def holds() -> None:
            assert bench.budget.spent + bench.budget.reserved <= limit
            assert bench.slots.statistics().busy <= slots
            assert bench.rollouts.duplicated <= rule.share * bench.slots.statistics().granted

        async def one(plan: Plan, claim: Claim) -> None:
            await anyio.sleep(plan.at)
            reservation = bench.budget.reserve(1)
            if reservation is None:
                return
            reservations.append(reservation)
            taking = Taking(*plan.seconds, metric_after=plan.metric_after)

            async def call() -> Rollout:
                holds()
                rollout = await taking()
                holds()
                if plan.fails and taking.ended == 1:
                    raise TransientError("503")
                return rollout

            with anyio.move_on_after(plan.cancel_after):
                with contextlib.suppress(RolloutUnresolvedError):
                    _, paid = await bench.rollouts.rollout(plan.key, claim, reservation, call)
                    assert reservation.open == (0 if paid else 1), "what is not spent is given back at once"
            holds()
            reservation.refund()

        async with anyio.create_task_group() as group:
            for number, plan in enumerate(plans):
                group.start_soon(one, plan, Claim(number, "screen", 3))
        holds()
        bench.check_nothing_is_held()
        assert bench.budget.spent == sum(reservation.settled for reservation in reservations)
        assert bench.budget.spent >= len(bench.of(RolloutFinished))
        assert bench.rollouts.duplicated == len(bench.of(RolloutDuplicated))
        assert bench.rollouts.timed_out == len(bench.of(RolloutTimedOut))
        assert bench.rollouts._flights == {}

    run(main)
