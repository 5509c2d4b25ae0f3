"""A run: how steps are opened and end, what they pay, what ends it; and that every run comes to its end."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from dspy_flashevolve.engine.errors import RolloutUnresolvedError, TransientError
from dspy_flashevolve.engine.events import Committed, Event, StageVisited, StepClosed, StepOpened
from dspy_flashevolve.engine.provider import Attempts, Failure, RetryPolicy
from dspy_flashevolve.engine.requests import Rollout, RolloutCall, RolloutKey, batch, gather, record_metric_call
from dspy_flashevolve.engine.run import EvolutionRun, RunLimits
from dspy_flashevolve.engine.scheduler import current_slot
from dspy_flashevolve.engine.steps import End, EndKind, LiveSteps, Load, NothingToDoError, Reservation, Step, StepEnded
from dspy_flashevolve.sim.virtual import run as in_virtual_time

STAGES = {"rollout": ["task"], "propose": ["reflection"], "validate": ["task"]}
HOURS = 1e5
"""Virtual seconds that no run here takes, if it ends at all."""


class World:
    """A run in virtual time, and what it told."""

    def __init__(self, slots: int = 4, **options: Any) -> None:
        self.events: list[Event] = []
        self.run = EvolutionRun(
            name="a loop",
            stages=STAGES,
            slots=slots,
            limits=RunLimits(**options),
            retry=RetryPolicy(attempts=3, first_seconds=1.0),
        )
        self.run.bus.subscribe(self.events.append)
        self.most_reserved = 0

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def evolve(self, step: Callable[[Step], Awaitable[End]], *arguments: Any, **options: Any) -> None:
        """Run to the end; a run that hangs is an error."""

        async def main() -> None:
            with anyio.move_on_after(HOURS) as scope:
                await self.run.evolve(step, *arguments, **options)
            assert not scope.cancelled_caught, "the run does not end"

        in_virtual_time(lambda: self.run.run_async(main))
        self.check()

    def check(self) -> None:
        """Every step that was opened ended once, and nothing is held."""
        run, opened = self.run, [event.step for event in self.of(StepOpened)]
        assert sorted(opened) == sorted(event.step for event in self.of(StepClosed))
        assert len(set(opened)) == len(opened)
        assert run.ended == {kind.value: 0 for kind in EndKind} | Counter(
            event.end.kind.value for event in self.of(StepClosed)
        )
        used = run.scheduler.statistics()
        assert (used.busy, sum(one.waiting for one in used.stages.values()), run.budget.reserved) == (0, 0, 0)
        assert run.live == []
        assert run.load().working == 0

    async def ask(self, stage: str, step: Step, seconds: float = 1.0) -> None:
        await self.run.requests.ask(stage, step, lambda: anyio.sleep(seconds))

    async def paid(self, step: Step, seconds: float = 1.0, pays: Reservation | None = None, key: Any = None) -> None:
        async def call() -> Rollout:
            await anyio.sleep(seconds)
            return Rollout(None, 0.5)

        example = object() if key is None else key
        key, pays = RolloutKey("c", "train", example), pays or step.reservation
        await self.run.requests.answer(RolloutCall(key=key, stage="rollout", step=step, reservation=pays, make=call))


def counted(world: World, count: int, seconds: float = 1.0) -> Callable[[Step], Awaitable[End]]:
    """Steps, so many of them, that make one request each."""

    async def step(step: Step) -> End:
        if step.number >= count:
            raise NothingToDoError
        world.run.begin(step, 0)
        await world.ask("rollout", step, seconds)
        return End(EndKind.REJECTED)

    return step


# Opening


def test_steps_are_opened_one_after_the_other_each_when_the_one_before_has_selected() -> None:
    world, selecting, most, order = World(8), 0, 0, list[int]()

    async def step(step: Step) -> End:
        nonlocal selecting, most
        selecting += 1
        most = max(most, selecting)
        await anyio.sleep(1.0 + step.number % 3)
        selecting -= 1
        if step.number == 20:
            raise NothingToDoError
        order.append(step.number)
        world.run.begin(step, version=step.number)
        await world.ask("rollout", step, 30.0)
        return End(EndKind.REJECTED)

    world.evolve(step, LiveSteps(8))
    assert most == 1
    assert order == [event.step for event in world.of(StepOpened)] == list(range(20))
    assert world.run.scheduler.statistics().peak > 3, "their requests overlap"


@given(st.integers(1, 6), st.integers(0, 12))
def test_as_many_steps_live_as_admission_says_and_without_one_as_there_are_slots(limit: int, count: int) -> None:
    for rule, most in ((LiveSteps(limit), limit), (None, 4)):
        world = World(4)
        world.evolve(counted(world, count), rule)
        live = [event.live for event in world.of(StepOpened)]
        assert max(live, default=0) == min(most, count)
        assert world.run.ended["rejected"] == count


class Seen:
    """An admission that keeps the loads it was asked about."""

    limit = 2

    def __init__(self) -> None:
        self.loads: list[Load] = []

    def admits(self, load: Load) -> bool:
        self.loads.append(load)
        return load.live < 2


def test_admission_sees_the_load() -> None:
    world, rule = World(4, max_metric_calls=20), Seen()

    async def step(step: Step) -> End:
        world.run.begin(step, 0)
        if step.number < 2:
            await world.paid(step, 1.0 + step.number)
            await world.paid(step, 1.0)
            world.run.mark_child_made(step)
            await world.ask("validate", step, 5.0)
        return End(EndKind.COMMITTED)

    world.evolve(
        step, rule, calls_per_step=6, stop_reason=lambda: "enough" if sum(world.run.ended.values()) > 1 else None
    )
    first, last = rule.loads[0], rule.loads[-1]
    assert (first.live, first.working, first.idle_slots, first.calls_left, first.calls_per_step) == (0, 0, 4, 20, 6.0)
    assert (last.live, last.working, last.ended, last.slots) == (1, 0, 1, 4)
    assert (last.calls_left, last.calls_reserved) == (20 - 2 - 6, 4)
    assert last.calls_per_step == pytest.approx((4 * 6 + 2) / 5)


# Ends


@given(st.lists(st.sampled_from(list(EndKind)), max_size=15), st.booleans())
def test_every_step_ends_once_however_deep_its_end_is_raised(kinds: list[EndKind], raises: bool) -> None:
    world, told = World(), list[tuple[int, End]]()

    async def step(step: Step) -> End:
        if step.number == len(kinds):
            raise NothingToDoError
        world.run.begin(step, 0)
        await world.ask("rollout", step, 1.0 + step.number % 4)
        end = End(kinds[step.number], f"reason {step.number}")
        if not raises:
            return end

        async def deep(_: int, granted: Any) -> None:
            granted()
            raise StepEnded(end.kind, end.reason)

        await batch(3, deep)
        raise AssertionError("not reached")

    async def ended(step: Step, end: End) -> None:
        told.append((step.number, end))

    world.evolve(step, on_end=ended)
    assert sorted((event.step, event.end.kind) for event in world.of(StepClosed)) == list(enumerate(kinds))
    assert sorted(number for number, _ in told) == list(range(len(kinds)))
    assert all(end.reason == f"reason {number}" for number, end in told)


def test_a_step_that_got_no_answer_fails_and_failures_in_a_row_give_the_run_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failures(success: int | None) -> World:
        world = World(1)

        async def step(step: Step) -> End:
            if step.number == 20:
                raise NothingToDoError
            world.run.begin(step, 0)
            if step.number == success:
                return End(EndKind.REJECTED)
            raise RolloutUnresolvedError("no answer after 3 attempts")

        world.evolve(step)
        return world

    with caplog.at_level(logging.WARNING):
        given_up = failures(None)
    assert (given_up.run.outcome, given_up.run.ended["failed"]) == ("failed", 10)
    assert given_up.run.stop_reason == "10 steps in a row failed; the last: no answer after 3 attempts"
    assert "10 steps in a row failed" in caplog.text
    goes_on = failures(9)
    assert (goes_on.run.outcome, goes_on.run.ended["failed"]) == ("failed", 19)
    assert failures(10 - 1).run.ended["rejected"] == 1


def test_each_end_is_told_before_another_step_starts_in_its_place() -> None:
    world, order = World(1), list[str]()

    async def step(step: Step) -> End:
        order.append(f"step {step.number}")
        if step.number == 2:
            raise NothingToDoError
        world.run.begin(step, 0)
        await world.ask("rollout", step)
        return End(EndKind.COMMITTED)

    async def ended(step: Step, end: End) -> None:
        await anyio.sleep(3.0)
        order.append(f"{end.kind.value} {step.number}")

    world.evolve(step, on_end=ended)
    assert order == ["step 0", "committed 0", "step 1", "committed 1", "step 2"]


def test_a_commit_tells_its_gap_its_generation_and_the_best_so_far() -> None:
    world = World(4)

    async def step(step: Step) -> End:
        if step.number == 3:
            raise NothingToDoError
        world.run.begin(step, version=0)
        await world.ask("rollout", step, 1.0 + step.number)
        parents = [step.number - 1] if step.number else []
        score = [0.5, 0.9, 0.7][step.number]
        world.run.commit(step, version=step.number + 1, candidate=step.number, score=score, parents=parents)
        return End(EndKind.COMMITTED)

    world.evolve(step)
    assert [(one.version, one.gap, one.generation, one.best_score) for one in world.of(Committed)] == [
        (1, 0, 0, 0.5), (2, 1, 1, 0.9), (3, 2, 2, 0.9),
    ]  # fmt: skip
    assert world.run.gaps == {"before_commit": {0: 1, 1: 1, 2: 1}}


# Stops


def test_an_admission_that_admits_nothing_ends_the_run() -> None:
    class Never(Seen):
        def admits(self, load: Load) -> bool:
            del load
            return False

    world = World()
    world.evolve(counted(world, 3), Never())
    assert (world.run.stop_reason, world.run.outcome) == ("nothing more to do", "finished")


def test_steps_run_again_and_again_in_one_run() -> None:
    world = World()

    async def main() -> None:
        await world.run.evolve(counted(world, 3))
        await world.run.evolve(counted(world, 5))

    in_virtual_time(lambda: world.run.run_async(main))
    assert [event.step for event in world.of(StepOpened)] == [0, 1, 2, 3, 4]


# Exceptions


@pytest.mark.parametrize("kind", [KeyError, SystemExit, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", ["before", "inside", "slot", "ended", "watcher", "beside", "batch", "reserve"])
def test_exceptions_leave_as_they_are_and_end_every_other_step_as_cancelled(
    where: str, kind: type[BaseException]
) -> None:
    world, error = World(4), kind("theirs")

    def broken(here: str, number: int = 1) -> None:
        if here == where and number == 1:
            raise error

    async def slow(number: int, here: str) -> None:
        await anyio.sleep(1.0)
        broken(here, number)

    async def step(step: Step) -> End:
        broken("before", step.number)
        world.run.begin(step, 0)
        if step.number == 1:
            await world.run.run_in_background(lambda: slow(1, "beside"))
        await gather([lambda n=number: slow(n, "batch") for number in range(3)] if step.number == 1 else [])
        await world.run.requests.ask("rollout", step, lambda: slow(step.number, "slot"))
        broken("inside", step.number)
        await anyio.sleep(0.0 if step.number == 1 else 100.0)
        return End(EndKind.REJECTED)

    async def ended(step: Step, end: End) -> None:
        del step, end
        broken("ended")

    def reserve() -> Reservation | None:
        broken("reserve", len(world.run.live))
        return world.run.budget.reserve(0)

    async def watcher() -> None:
        await slow(1, "watcher")
        await anyio.sleep_forever()

    with pytest.raises(kind) as caught:
        world.evolve(step, LiveSteps(3), on_end=ended, watchers=[watcher], reserve=reserve)
    assert caught.value is error
    assert (world.run.error, world.run.outcome) == (error, "aborted")
    world.check()
    assert set(world.run.ended) - {kind for kind, count in world.run.ended.items() if not count} <= {
        "cancelled", "rejected",
    }  # fmt: skip


def test_a_step_that_cancels_itself_does_not_end_the_run_in_silence() -> None:
    """asyncio's CancelledError is no Exception: code that awaits a task of its own which was cancelled raises it."""
    world = World(2)

    async def step(step: Step) -> End:
        world.run.begin(step, 0)
        await world.ask("rollout", step)
        if step.number == 1:
            task = asyncio.ensure_future(anyio.sleep(9.0))
            await checkpoint()
            task.cancel()
            await task
        return End(EndKind.REJECTED)

    with pytest.raises(RuntimeError, match="cancelled"):
        world.evolve(step)
    assert world.run.outcome == "aborted"


# What runs beside the steps, and rest


@pytest.mark.parametrize("lockstep", [False, True])
def test_work_beside_the_steps_is_waited_for_at_the_end_and_done_at_once_in_lockstep(lockstep: bool) -> None:
    world, order = World(schedule="lockstep" if lockstep else "async"), list[str]()

    async def beside() -> None:
        await anyio.sleep(50.0)
        order.append("beside")

    async def step(step: Step) -> End:
        if step.number == 1:
            raise NothingToDoError
        world.run.begin(step, 0)
        await world.run.run_in_background(beside)
        order.append("step")
        return End(EndKind.REJECTED)

    world.evolve(step)
    assert order == (["beside", "step"] if lockstep else ["step", "beside"])


def test_work_beside_the_steps_may_begin_before_them_and_what_got_no_answer_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()

    async def beside() -> None:
        raise RolloutUnresolvedError("no answer after 3 attempts")

    async def main() -> None:
        await world.run.run_in_background(beside)
        await world.run.evolve(counted(world, 2))

    with caplog.at_level(logging.WARNING):
        in_virtual_time(lambda: world.run.run_async(main))
    world.check()
    assert "work beside the steps is left undone: no answer after 3 attempts" in caplog.text
    assert world.run.outcome == "finished"


# Slots by stage


def test_the_later_stage_goes_first_and_a_step_s_time_in_each_stage_is_told() -> None:
    world, order = World(1), list[str]()

    async def step(step: Step) -> End:
        if step.number == 1:
            raise NothingToDoError
        world.run.begin(step, 0)

        async def one(stage: str) -> None:
            await world.run.requests.ask(stage, step, lambda: anyio.sleep(1.0))
            order.append(stage)

        await gather([lambda s=stage: one(s) for stage in ("propose", "rollout", "propose", "validate")])
        return End(EndKind.REJECTED)

    world.evolve(step)
    assert order == ["propose", "validate", "propose", "rollout"]
    visits = [(one.stage, one.queued_seconds, one.began_seconds, one.seconds) for one in world.of(StageVisited)]
    assert visits == [("validate", 0.0, 1.0, 2.0), ("propose", 0.0, 0.0, 3.0), ("rollout", 0.0, 3.0, 4.0)]


# Every run ends


class Chaos:
    """A loop whose steps do anything that a step may do; what they do follows from a seed."""

    def __init__(self, seed: int, slots: int, steps: int, **options: Any) -> None:
        self.rng, self.steps = random.Random(seed), steps
        self.world = World(slots, rollout_timeout_seconds=8.0, seed=seed, **options)
        self.run = self.world.run
        self.selected = anyio.Event()

    async def call(self) -> Rollout:
        """An LM call within a rollout: it may be refused, hang, pause its endpoint, or be slow."""
        rng = self.rng
        sent = Attempts(self.run.providers.provider("task"), current_slot() if rng.random() < 0.8 else None)
        await sent.begin()
        sent.send()
        await anyio.sleep(rng.random() * 3)
        fate = rng.random()
        if fate < 0.1:
            await sent.try_again(Failure("429", False, rng.choice([None, 2.0, 3600.0]), "refused"))
        elif fate < 0.15:
            raise TransientError("503", retry_after_seconds=rng.choice([None, 3.0]))
        elif fate < 0.2:
            await anyio.sleep_forever()
        elif fate < 0.25:
            await self.run.threads.run(lambda: None)
        if rng.random() < 0.5:
            await record_metric_call()
            await anyio.sleep(rng.random() * 4)
        sent.answered()
        return Rollout(None, rng.random())

    async def evaluate(self, stage: str, step: Step, count: int, pays: Reservation) -> None:
        async def one(index: int, granted: Any) -> None:
            key = RolloutKey("c", "train", self.rng.randint(0, 30))
            await self.run.requests.answer(
                RolloutCall(
                    key=key, stage=stage, step=step, reservation=pays, make=self.call,
                    followers=count - index - 1, on_granted=granted,
                )
            )  # fmt: skip

        await batch(count, one)

    async def step(self, step: Step) -> End:
        rng, run = self.rng, self.run
        await anyio.sleep(rng.choice([0.0, 0.0, 5.0]))
        if step.number >= self.steps:
            raise NothingToDoError
        run.begin(step, version=run.ended["committed"], value=rng.random())
        await self.evaluate("rollout", step, rng.randint(1, 4), step.reservation)
        if rng.random() < 0.2:
            rest = Reservation(run.budget, 0)
            step.reservation.lend(rest, min(2, step.reservation.open))

            async def beside() -> None:
                try:
                    await self.evaluate("rollout", step, rest.open, rest)
                finally:
                    rest.refund()

            await run.run_in_background(beside)
        if rng.random() < 0.5:
            with anyio.move_on_after(rng.choice([1.0, 60.0])):
                await run.requests.ask("propose", step, lambda: anyio.sleep(rng.random() * 9))
        if rng.random() < 0.7:
            run.mark_child_made(step)
        if rng.random() < 0.6:
            await run.requests.ask("propose", step, lambda: anyio.sleep(rng.random() * 5))
            if rng.random() < 0.1:
                raise RolloutUnresolvedError("no answer")
        if not step.reservation.cover(3):
            return End(EndKind.DISCARDED, "no budget is left")
        await self.evaluate("validate", step, 3, step.reservation)
        return End(rng.choice([EndKind.COMMITTED, EndKind.REJECTED]))


@settings(max_examples=120)
@given(
    seed=st.integers(0, 2**20),
    slots=st.integers(1, 6),
    live=st.integers(1, 9),
    steps=st.integers(0, 14),
    budget=st.none() | st.integers(1, 120),
    more=st.sampled_from([{}, {"schedule": "lockstep"}, {"max_seconds": 20.0}]),
)
def test_every_run_ends_whatever_its_steps_meet(
    seed: int, slots: int, live: int, steps: int, budget: int | None, more: dict[str, Any]
) -> None:
    """None is left with free slots, requests that wait, and nothing in flight."""
    chaos = Chaos(seed, slots, steps, max_metric_calls=budget, **more)
    chaos.world.evolve(chaos.step, LiveSteps(live), calls_per_step=8)
    assert budget is None or chaos.run.budget.spent <= budget
    used = chaos.run.scheduler.statistics()
    assert used.peak <= slots


@pytest.mark.parametrize("ticks", range(8))
def test_a_stop_in_any_moment_ends_a_step_that_still_waits_for_something_to_work_on(ticks: int) -> None:
    world = World(4)

    async def step(step: Step) -> End:
        if step.number == 1:
            await anyio.sleep_forever()
        world.run.begin(step, 0)
        await anyio.sleep(5)
        return End(EndKind.REJECTED)

    async def stopper() -> None:
        await anyio.sleep(5)
        for _ in range(ticks):
            await checkpoint()
        world.run.stop("enough")

    world.evolve(step, LiveSteps(1), watchers=[stopper])
    assert world.run.ended["rejected"] == 1
