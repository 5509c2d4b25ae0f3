"""What many steps hand in is worked on together: when, how many, in which order, and what each of them hears."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.engine.batcher import Batcher
from dspy_flashevolve.engine.errors import RolloutUnresolvedError
from dspy_flashevolve.engine.events import StepOpened
from dspy_flashevolve.engine.steps import End, EndKind, LiveSteps, NothingToDoError, Step
from tests.engine.test_run import World


class Handing:
    """Steps that hand in their number, each after its own time.

    Args:
        seconds: when each step hands in; as many steps as there are times.
        has_child: whether they say before that they work towards a child no more.
        work_seconds: of a batch.
    """

    def __init__(
        self, seconds: Sequence[float], most: int, at_once: int = 1, has_child: bool = True, work_seconds: float = 10.0
    ) -> None:
        self.world, self.seconds, self.has_child, self.work_seconds = World(16), seconds, has_child, work_seconds
        self.batcher = Batcher[int, int](self.world.run, most, at_once, self.work)
        self.batches: list[tuple[float, list[int]]] = []
        self.heard: dict[int, int] = {}
        self.running = self.most_running = 0

    async def work(self, items: Sequence[tuple[Step, int]]) -> list[int]:
        self.batches.append((self.world.run.clock(), [item for _, item in items]))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await anyio.sleep(self.work_seconds)
        self.running -= 1
        return [10 * item for _, item in items]

    async def step(self, step: Step) -> End:
        if step.number == len(self.seconds):
            raise NothingToDoError
        self.world.run.begin(step, version=step.number % 3, value=step.number % 2)
        await anyio.sleep(self.seconds[step.number])
        if self.has_child:
            self.world.run.mark_child_made(step)
        self.heard[step.number] = await self.batcher.submit(step, step.number)
        return End(EndKind.COMMITTED)

    def play(self, live: int = 99) -> Handing:
        self.world.evolve(self.step, LiveSteps(live), watchers=[self.batcher.watch])
        return self


def test_a_batch_begins_when_it_is_half_full_and_sooner_only_where_nobody_at_work_could_join_it() -> None:
    batches = Handing([1.0, 2.0, 3.0, 50.0, 60.0], most=6).play().batches
    assert batches == [(3.0, [2, 1, 0]), (60.0, [4, 3])]


def test_the_freshest_go_first_then_the_most_valuable_then_the_oldest() -> None:
    batches = Handing([0.0, *([1.0] * 7)], most=4).play().batches
    assert batches[0] == (1.0, [5, 2, 1, 7])
    assert sorted(number for _, batch in batches for number in batch) == list(range(8))


@given(st.lists(st.floats(0, 30), max_size=14), st.integers(1, 5), st.integers(1, 3), st.integers(1, 9), st.booleans())
def test_each_hears_its_own_outcome_no_batch_is_larger_and_no_more_run_at_once(
    seconds: list[float], most: int, at_once: int, live: int, has_child: bool
) -> None:
    one = Handing(seconds, most, at_once, has_child).play(live)
    assert one.heard == {number: 10 * number for number in range(len(seconds))}
    assert all(1 <= len(batch) <= most for _, batch in one.batches)
    assert one.most_running <= at_once


def test_steps_that_wait_for_a_batch_need_no_room_up_to_two_batches_of_them() -> None:
    one = Handing([1.0] * 30, most=3, work_seconds=100.0)
    one.play(live=4)
    opened = [event.seconds for event in one.world.of(StepOpened)]
    assert len([seconds for seconds in opened if seconds < 100]) == 2 * 3 + 4


def test_what_the_work_raises_is_raised_in_each_of_its_steps() -> None:
    class Refused(Handing):
        async def work(self, items: Sequence[tuple[Step, int]]) -> list[int]:
            done = await super().work(items)
            if 0 in done:
                raise RolloutUnresolvedError("no answer")
            return done

    one = Refused([0.0, 1.0, 2.0, 30.0, 31.0], most=6)
    one.play()
    assert one.world.run.ended["failed"] == 3
    assert one.heard == {3: 30, 4: 40}


def test_a_step_that_gives_up_waiting_is_in_no_later_batch() -> None:
    class Impatient(Handing):
        async def step(self, step: Step) -> End:
            with anyio.move_on_after(5.0 if step.number == 0 else 1000.0):
                return await super().step(step)
            return End(EndKind.DISCARDED, "it has waited long enough")

    one = Impatient([0.0, 20.0, 21.0, 22.0], most=8).play()
    assert one.batches == [(22.0, [2, 1, 3])]
    assert one.world.run.ended["discarded"] == 1


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_an_error_in_the_work_ends_the_run_as_it_is(kind: type[BaseException]) -> None:
    class Broken(Handing):
        async def work(self, items: Sequence[tuple[Step, int]]) -> list[int]:
            await super().work(items)
            raise kind("theirs")

    with pytest.raises(kind, match="theirs"):
        Broken([0.0, 0.0], most=2).play()
