"""Rollouts: paid once, retried, given up when they take too long; batches of them that cost no task while they wait."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspy_flashevolve.engine.errors import NoLongerWantedError, RolloutUnresolvedError, TransientError
from dspy_flashevolve.engine.events import (
    Event,
    EventBus,
    RequestFinished,
    RolloutFinished,
)
from dspy_flashevolve.engine.loop import Threads
from dspy_flashevolve.engine.provider import Providers, RetryPolicy
from dspy_flashevolve.engine.requests import (
    Call,
    RequestCost,
    Requests,
    Rollout,
    RolloutCall,
    RolloutKey,
    batch,
    gather,
    record_metric_call,
)
from dspy_flashevolve.engine.scheduler import Scheduler, current_slot
from dspy_flashevolve.engine.steps import Budget, EndKind, Reservation, StepEnded
from dspy_flashevolve.engine.store import Store
from dspy_flashevolve.programs.metric import Metric
from dspy_flashevolve.sim.virtual import run
from tests.engine.stepped import STAGES, Asker

ONE, OTHER = Asker(0), Asker(1)


def now() -> float:
    """Virtual seconds; 0 before there is a loop."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return 0.0


class Bench:
    """A rollout service in virtual time, with what it used and told."""

    def __init__(self, slots: int = 4, limit: int | None = 100, first_seconds: float = 0.0, **options: Any) -> None:
        self.events: list[Event] = []
        bus = EventBus([self.events.append])
        self.scheduler = Scheduler(slots, STAGES, clock=now)
        self.budget = Budget(limit)
        retry = RetryPolicy(attempts=3, first_seconds=first_seconds)
        self.providers = Providers(
            {stage: ["e"] for stage in STAGES}, None, self.scheduler, bus, now, retry, random.Random(0)
        )
        self.requests = Requests(self.scheduler, bus, self.providers, Store(), **options)

    def reserved(self, calls: int = 1) -> Reservation:
        reservation = self.budget.reserve(calls)
        assert reservation is not None
        return reservation

    async def rollout(
        self, call: Callable[[], Awaitable[Rollout]], pays: Reservation, step: Asker = ONE, example: Any = "example"
    ) -> tuple[Rollout, bool]:
        """The rollout, and whether it was paid here."""
        key = RolloutKey("c", "train", example)
        rollout = await self.requests.answer(
            RolloutCall(key=key, stage="screen", step=step, reservation=pays, make=call)
        )
        return rollout, pays.settled > 0

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def check_nothing_is_held(self) -> None:
        used = self.scheduler.statistics()
        assert used.busy == used.stages["screen"].waiting == 0


class Taking:
    """A rollout whose first run takes the first time, its second the second, and so on; the last repeats."""

    def __init__(self, *seconds: float, metric_after: float | None = None) -> None:
        self.seconds, self.metric_after = seconds, metric_after
        self.runs = self.ended = 0

    async def __call__(self) -> Rollout:
        number = self.runs
        self.runs += 1
        seconds = self.seconds[min(number, len(self.seconds) - 1)]
        if self.metric_after is not None and self.metric_after < seconds:
            await anyio.sleep(self.metric_after)
            await record_metric_call()
            seconds -= self.metric_after
        await anyio.sleep(seconds)
        self.ended += 1
        return Rollout(f"run {number}", 0.5, tokens=7)


def failing(times: int) -> Callable[[], Coroutine[Any, Any, Rollout]]:
    left = times

    async def call() -> Rollout:
        nonlocal left
        left -= 1
        if left >= 0:
            raise TransientError("500", of_request=True)
        return Rollout("output", 1.0)

    return call


# Paid once


def test_equal_rollouts_in_flight_are_run_and_paid_once() -> None:
    bench, call, results = Bench(), Taking(3.0), list[bool]()

    async def one(step: Asker, pays: Reservation) -> None:
        rollout, paid = await bench.rollout(call, pays, step)
        assert rollout.output == "run 0"
        results.append(paid)

    async def main() -> None:
        first, second = bench.reserved(), bench.reserved()
        await gather([lambda: one(ONE, first), lambda: one(OTHER, second)])
        assert {first.settled, second.settled} == {0, 1}

    run(main)
    assert (call.runs, sorted(results), bench.requests.joined) == (1, [False, True], 1)


@pytest.mark.parametrize(("error", "runs"), [("", 1), ("it failed", 2)])
def test_one_with_a_trace_joins_one_without_unless_that_failed_since_failures_are_told_apart(
    error: str, runs: int
) -> None:
    bench, made = Bench(), list[str]()

    async def call() -> Rollout:
        made.append("rollout")
        await anyio.sleep(1.0)
        return Rollout("output", 0.5, error=error)

    async def one(traced: bool) -> None:
        key = RolloutKey("c", "val", "example", traced)
        await bench.requests.answer(
            RolloutCall(key=key, stage="screen", step=ONE, reservation=bench.reserved(), make=call)
        )

    run(lambda: gather([lambda traced=traced: one(traced) for traced in (False, True)]))
    assert (len(made), bench.budget.spent) == (runs, runs)


def test_one_who_joined_runs_it_himself_when_the_first_is_cancelled_or_got_no_answer() -> None:
    for seconds, call in ((2.0, Taking(9.0)), (99.0, failing(3))):
        bench, results = Bench(first_seconds=1.0), list[tuple[Rollout, bool]]()

        async def first(bench: Bench = bench, call: Any = call, seconds: float = seconds) -> None:
            with anyio.move_on_after(seconds):
                with pytest.raises(RolloutUnresolvedError):
                    await bench.rollout(call, bench.reserved())

        async def second(bench: Bench = bench, call: Any = call, results: Any = results) -> None:
            await anyio.sleep(0.1)
            results.append(await bench.rollout(call, bench.reserved(), OTHER))

        async def main(first: Any = first, second: Any = second) -> None:
            await gather([first, second])

        run(main)
        assert [paid for _, paid in results] == [True]
        assert bench.budget.spent == 1


def test_a_paid_rollout_and_a_request_are_told_with_what_they_cost() -> None:
    bench = Bench()

    async def main() -> None:
        await bench.rollout(Taking(2.0), bench.reserved())
        await bench.requests.answer(
            Call(stage="propose", step=OTHER, make=lambda: anyio.sleep(3.0), cost_of=lambda _: RequestCost(5, 0.1))
        )

    run(main)
    ran, asked = bench.events
    assert isinstance(ran, RolloutFinished)
    assert (ran.step, ran.stage, ran.score, ran.latency_seconds, ran.tokens) == (0, "screen", 0.5, 2.0, 7)
    assert isinstance(asked, RequestFinished)
    assert (asked.step, asked.stage, asked.latency_seconds, asked.tokens) == (1, "propose", 3.0, 5)


# Rollouts that take too long


def test_neither_the_wait_for_a_slot_nor_what_the_provider_lets_it_wait_counts() -> None:
    bench = Bench(slots=1, timeout_seconds=5.0)

    async def paused() -> Rollout:
        slot = current_slot()
        assert slot is not None
        await anyio.sleep(2.0)
        async with slot.released():
            await anyio.sleep(100.0)
        await anyio.sleep(2.0)
        return Rollout("paused", 1.0)

    async def main() -> None:
        answers = await gather(
            [lambda n=n: bench.rollout(paused, bench.reserved(), Asker(n), n) for n in range(3)]
        )  # fmt: skip
        assert [rollout.output for rollout, _ in answers] == ["paused"] * 3

    run(main)
    assert bench.requests.timed_out == 0


def test_without_budget_for_another_attempt_it_is_unresolved() -> None:
    bench = Bench(timeout_seconds=5.0, limit=1)

    async def main() -> None:
        with pytest.raises(RolloutUnresolvedError, match="the budget does not pay another attempt"):
            await bench.rollout(Taking(60.0, metric_after=1.0), bench.reserved())

    run(main)
    assert bench.budget.spent == 1


# Threads cannot be interrupted


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

        rollout, paid = await bench.rollout(call, bench.reserved())
        assert (rollout.score, paid, now()) == (0.75, True, 35.0)
        assert (bench.budget.spent, bench.requests.timed_out) == (1, 0)
        threads.close(wait=False)

    run(main)


# Batches


@pytest.mark.long
@pytest.mark.parametrize(("steps", "examples", "slots"), [(1, 5000, 8), (40, 250, 16)])
def test_what_waits_for_a_slot_costs_no_task(steps: int, examples: int, slots: int) -> None:
    bench, most = Bench(slots=slots, limit=None), 0

    async def one(step: Asker) -> None:
        async def call() -> Rollout:
            nonlocal most
            most = max(most, len(asyncio.all_tasks()))
            await anyio.sleep(1.0)
            return Rollout(None, 0.0)

        async def example(index: int, granted: Callable[[], None]) -> None:
            key = RolloutKey("c", str(step.number), index)
            pays, behind = bench.reserved(), examples - index - 1
            await bench.requests.answer(
                RolloutCall(
                    key=key, stage="screen", step=step, reservation=pays, make=call,
                    followers=behind, on_granted=granted,
                )
            )  # fmt: skip

        await batch(examples, example)

    async def main() -> None:
        await gather([lambda n=n: one(Asker(n)) for n in range(steps)])

    run(main)
    assert bench.budget.spent == steps * examples
    assert bench.scheduler.statistics().peak == slots
    assert most <= slots + 3 * steps + 5


def test_one_without_an_answer_is_raised_when_the_others_have_ended_which_may_be_paid_already() -> None:
    ended: list[int] = []

    async def call(index: int, granted: Callable[[], None]) -> None:
        granted()
        await anyio.sleep(1.0 + index)
        if index == 0:
            raise RolloutUnresolvedError("no answer")
        if index == 1:
            raise StepEnded(EndKind.DISCARDED, "goes before it")
        if index == 2:
            raise NoLongerWantedError
        ended.append(index)

    async def main() -> None:
        with pytest.raises(StepEnded, match="goes before it"):
            await batch(6, call)

    run(main)
    assert ended == [3, 4, 5]


# Whatever happens


@settings(max_examples=60)
@given(st.integers(0, 2**16), st.integers(1, 4), st.integers(1, 12), st.booleans())
def test_each_is_settled_once_for_each_call_of_its_metric_and_no_slot_is_left_held(
    seed: int, slots: int, count: int, single_flight: bool
) -> None:
    bench = Bench(slots, limit=200, timeout_seconds=4.0, single_flight=single_flight, first_seconds=1.0)
    rng, metrics, unpaid = random.Random(seed), 0, 0

    async def call() -> Rollout:
        nonlocal metrics, unpaid
        await anyio.sleep(rng.random() * 6)
        if rng.random() < 0.2:
            raise TransientError("503")
        await record_metric_call()
        metrics += 1
        if rng.random() < 0.1:
            metrics -= 1  # a metric that raises the provider's fault is no call
            unpaid += 1
            raise TransientError("the judge's 503")
        await anyio.sleep(rng.random() * 2)
        return Rollout(None, 0.5)

    async def one(number: int) -> None:
        pays = bench.reserved()
        with anyio.move_on_after(rng.choice([3.0, 1000.0])):
            with suppress(RolloutUnresolvedError):
                await bench.rollout(call, pays, Asker(number), rng.randint(0, 5))
        pays.refund()

    async def main() -> None:
        await gather([lambda n=n: one(n) for n in range(count)])

    run(main)
    bench.check_nothing_is_held()
    assert (bench.budget.spent, bench.budget.reserved) == (metrics, 0)
    assert bench.requests._flights == {}
