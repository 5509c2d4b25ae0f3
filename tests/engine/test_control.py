"""Workflow controllers: the rules, their bounds, and pipelines whose stages gain and lose workers. Virtual time."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from dspy_flashevolve.engine.control import Backlog, Fixed, MedianRate, StageWindow, WorkflowController
from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.events import Event, EventBus, TicketClosed, WorkersChanged
from dspy_flashevolve.engine.item import End, EndKind, Item, Ticket
from dspy_flashevolve.engine.pipeline import NotNow, Opened, Pipeline
from dspy_flashevolve.engine.queues import StageQueue
from dspy_flashevolve.engine.stages import Carried, Finish, Forward, Outcome, Outcomes, Stage
from dspy_flashevolve.sim.virtual import run

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def settle() -> None:
    for _ in range(50):
        await checkpoint()


def now() -> float:
    return asyncio.get_running_loop().time()


def seen(stage: str = "s", **changes: Any) -> StageWindow:
    """A window of a stage with two workers, both busy, nothing done, nothing waiting."""
    busy = StageWindow(stage, 2, 2, 0, 0, 0, 20.0, 0.0, low=1, high=8)
    return replace(busy, **changes)


# The rules


@pytest.mark.parametrize(
    ("finished", "wanted"),
    [
        ({"a": 4, "b": 10, "c": 21}, {"a": 3, "b": 2, "c": 1}),
        ({"a": 5, "b": 10, "c": 20}, {"a": 2, "b": 2, "c": 2}),
        ({"a": 0, "b": 10, "c": 10}, {"a": 3, "b": 2, "c": 2}),
        ({"a": 2, "b": 4, "c": 8, "d": 13}, {"a": 3, "b": 2, "c": 2, "d": 1}),
        ({"a": 3, "b": 4, "c": 8, "d": 12}, {"a": 2, "b": 2, "c": 2, "d": 2}),
        ({"a": 7}, {"a": 2}),
        ({"a": 0, "b": 0}, {"a": 2, "b": 2}),
        ({"a": 0, "b": 1}, {"a": 3, "b": 2}),
    ],
    ids=["half-and-twice", "exactly", "nothing-done", "even-number", "even-exactly", "alone", "no-production", "two"],
)
def test_under_half_the_median_rate_gains_one_and_over_twice_loses_one(
    finished: dict[str, int], wanted: dict[str, int]
) -> None:
    windows = [seen(stage, finished=count, queued=5) for stage, count in finished.items()]
    assert MedianRate(window_seconds=10.0).decide(windows) == wanted


@pytest.mark.parametrize(
    "idle", [{"queued": 0}, {"queued": 5, "busy": 1}, {"queued": 0, "busy": 0}], ids=["no queue", "idle worker", "idle"]
)
def test_a_stage_that_has_nothing_for_one_more_worker_does_not_gain(idle: dict[str, int]) -> None:
    others = [seen("b", finished=10), seen("c", finished=10)]
    assert MedianRate().decide([seen("a", **idle), *others])["a"] == 2


def test_stages_without_work_do_not_count_in_the_median() -> None:
    idle = [seen(name, busy=0) for name in ("x", "y", "z")]
    at_work = [seen("a", finished=4, queued=5), seen("b", finished=10), seen("c", finished=10)]
    assert MedianRate().decide([*idle, *at_work]) == {"x": 2, "y": 2, "z": 2, "a": 3, "b": 2, "c": 2}


def test_the_median_rule_begins_with_the_most_unless_told_otherwise() -> None:
    window = seen(workers=0, busy=0)
    assert MedianRate().decide([window]) == {"s": 8}
    assert MedianRate(high=5).decide([window]) == {"s": 5}
    assert MedianRate(start=3).decide([window]) == {"s": 3}


@pytest.mark.parametrize(
    ("window", "wanted"),
    [
        (seen(finished=4, worked_seconds=20.0, queued=6), 5),
        (seen(finished=4, worked_seconds=20.0, queued=1), 3),
        (seen(finished=4, worked_seconds=20.0), 2),
        (seen(finished=0, worked_seconds=20.0, queued=3), 8),
        (seen(finished=4, worked_seconds=20.0, queued=6, busy=1), 2),
        (seen(finished=1, worked_seconds=7.4), 1),
        (seen(finished=1, worked_seconds=7.5), 2),
        (seen(finished=1, worked_seconds=2.0, workers=7), 6),
        (seen(workers=0, busy=0, worked_seconds=0.0), 1),
    ],
    ids=["queue", "a bit of one", "served", "unknown", "idle worker", "slack", "within the slack", "by one", "start"],
)
def test_the_backlog_rule_wants_what_is_served_and_what_waits_within_a_window(window: StageWindow, wanted: int) -> None:
    assert Backlog(window_seconds=10.0).decide([window]) == {"s": wanted}


def test_a_fixed_number_is_the_same_whatever_happens() -> None:
    windows = [seen("a", queued=100), seen("b", workers=0)]
    assert Fixed(3).decide(windows) == {"a": 3, "b": 3}
    assert Fixed({"a": 4}).decide(windows) == {"a": 4}
    assert Fixed(3).window_seconds == math.inf


WINDOWS = st.builds(
    lambda low, span, **counts: StageWindow(stage="", low=low, high=low + span, waited_seconds=0.0, **counts),
    low=st.integers(1, 4),
    span=st.integers(0, 12),
    workers=st.integers(0, 16),
    busy=st.integers(0, 20),
    queued=st.integers(0, 50),
    arrived=st.integers(0, 50),
    finished=st.integers(0, 50),
    worked_seconds=st.floats(0.0, 200.0),
)
STAGES = st.lists(WINDOWS, min_size=1, max_size=6).map(
    lambda windows: [replace(window, stage=f"stage {number}") for number, window in enumerate(windows)]
)
RULES: st.SearchStrategy[MedianRate | Backlog] = st.builds(
    lambda rule, low, span: rule(window_seconds=10.0, low=low, high=None if span is None else low + span),
    st.sampled_from([MedianRate, Backlog]),
    st.integers(1, 6),
    st.none() | st.integers(0, 8),
)


@given(RULES, STAGES, st.randoms(use_true_random=False))
def test_decisions_are_pure_and_stay_within_the_bounds(
    rule: MedianRate | Backlog, windows: list[StageWindow], shuffler: random.Random
) -> None:
    decided = rule.decide(windows)
    shuffled = list(windows)
    shuffler.shuffle(shuffled)
    rule.decide([replace(window, finished=window.finished + 1) for window in windows])
    assert rule.decide(shuffled) == decided, "the same windows in any order, whatever was asked before"
    for window in windows:
        assert window.low <= decided[window.stage] <= window.high, "the stage's bounds go first"
        if rule.low <= window.high and (rule.high is None or rule.high >= window.low):
            assert decided[window.stage] >= rule.low
            assert rule.high is None or decided[window.stage] <= rule.high


@given(STAGES)
def test_the_median_rule_moves_a_stage_by_at_most_one(windows: list[StageWindow]) -> None:
    decided = MedianRate().decide(windows)
    for window in windows:
        if window.low <= window.workers <= window.high:
            assert abs(decided[window.stage] - window.workers) <= 1


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: MedianRate(window_seconds=0.0), "median rate: window_seconds is 0.0, expected a number above 0"),
    (lambda: MedianRate(window_seconds=math.inf), "window_seconds is inf"),
    (lambda: Backlog(window_seconds=-1.0), "backlog: window_seconds is -1.0"),
    (lambda: Backlog(window_seconds=math.nan), "window_seconds is nan"),
    (lambda: MedianRate(low=0), "median rate: low is 0, expected a whole number of at least 1"),
    (lambda: Backlog(low=3, high=2), "backlog: high is 2, under low=3"),
    (lambda: MedianRate(start=0), "start is 0"),
    (lambda: Backlog(slack=1.0), "slack is 1.0, expected a number from 0 to under 1"),
    (lambda: Fixed(0), "fixed workers: workers is 0"),
    (lambda: Fixed({"screen": 0}), "fixed workers: screen is 0"),
    (lambda: Fixed(True), "workers is True"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_argument_is_named_with_what_was_expected(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


# A worker that is wanted no more


def item(number: int) -> Item[int]:
    return Item(number, Ticket(number, random.Random(0)), 0)


async def test_a_getter_that_leaves_hands_its_wake_up_on() -> None:
    queue, got, wanted = StageQueue[int]("q", 8), list[tuple[str, int | None]](), {"first", "second"}

    async def getter(name: str) -> None:
        taken = await queue.get_while(lambda: name in wanted)
        got.append((name, None if taken is None else taken[0].payload))

    async with anyio.create_task_group() as group:
        group.start_soon(getter, "first")
        await settle()
        group.start_soon(getter, "second")
        await settle()
        await queue.put(item(7))  # wakes the first, which is not wanted any more when it looks
        wanted.remove("first")
    assert got == [("first", None), ("second", 7)]
    assert queue.statistics().waiting_getters == 0


# Pipelines


@dataclass
class Load:
    """Opens tickets in the stage "first", ``interval`` seconds apart, until ``until``; at most ``live`` at once."""

    interval: float
    until: float
    live: int = 10**6
    count: int = 10**6
    opened: int = 0
    closed: Counter[int] = field(default_factory=Counter[int])

    async def open(self, number: int, live: int) -> Opened | NotNow:
        if number >= self.count or now() >= self.until:
            return NotNow.EXHAUSTED
        if live >= self.live:
            return NotNow.FULL
        await anyio.sleep(self.interval)
        self.opened += 1
        return Opened("first", Item(number, Ticket(number, random.Random(0)), version=0))

    async def close(self, ticket: Ticket, end: End) -> None:
        self.closed[ticket.number] += 1


class Inside:
    """A stage that sleeps, and counts how many are inside at once."""

    def __init__(self, name: str, seconds: float, following: str | None, workers: int, **options: Any) -> None:
        self.seconds = seconds
        self.following = following
        self.inside = self.most = 0
        self.seen: Counter[int] = Counter()
        self.stage = Stage(name, self.handle, workers, queue_capacity=10**6, **options)

    async def handle(self, item: Item[Any]) -> Outcome:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.seen[item.ticket.number] += 1
        await anyio.sleep(self.seconds)
        self.inside -= 1
        return Finish(End(EndKind.COMMITTED)) if self.following is None else Forward(self.following, item.payload)


def row_of(*seconds: float, workers: int = 16) -> list[Inside]:
    names = ["first", "second", "third", "fourth"][: len(seconds)]
    following = [*names[1:], None]
    return [Inside(*parts, workers) for parts in zip(names, seconds, following, strict=True)]


def ran(
    stages: Sequence[Stage], load: Load, controller: WorkflowController | None
) -> tuple[list[WorkersChanged], float, Pipeline]:
    """The changes of a run to its end, when it ended, and its pipeline."""
    events: list[Event] = []
    bus = EventBus()
    bus.subscribe(events.append)

    async def main() -> tuple[float, Pipeline]:
        pipeline = Pipeline(stages, load, bus, now, controller)
        await pipeline.run()
        return now(), pipeline

    ended, pipeline = run(main)
    return [event for event in events if isinstance(event, WorkersChanged)], ended, pipeline


SECONDS = st.integers(5, 40).map(lambda tenths: tenths / 10)


def is_settled(changes: list[WorkersChanged], until: float) -> bool:
    """No stage goes up and down in the second half; a load at the edge of the slack may still take a last step."""
    late = Counter(change.stage for change in changes if until / 2 < change.seconds <= until)
    return all(count <= 1 for count in late.values())


@settings(max_examples=15)
@given(st.integers(3, 40).map(lambda tenths: tenths / 10), st.lists(SECONDS, min_size=1, max_size=3))
def test_the_backlog_rule_settles_on_a_stationary_load_with_enough_workers(interval: float, took: list[float]) -> None:
    window = 12 * max(interval, *took)
    windows = 40
    stages = row_of(*took, workers=24)
    changes, _, pipeline = ran(
        [one.stage for one in stages], Load(interval, windows * window), Backlog(window_seconds=window)
    )
    assert is_settled(changes, windows * window)
    final = {change.stage: change.after for change in changes if change.seconds <= windows * window}
    for stage in stages:
        kept_busy = stage.seconds / interval
        assert kept_busy <= final[stage.stage.name] + 1e-9
        assert final[stage.stage.name] <= max(2, 2 + 1.5 * kept_busy)
    assert sum(pipeline.statistics().ended.values()) == pipeline.statistics().opened


@settings(max_examples=15)
@given(st.lists(SECONDS, min_size=2, max_size=4), st.integers(1, 24), st.none() | st.integers(1, 8))
def test_the_median_rule_settles_on_a_stationary_load(took: list[float], live: int, start: int | None) -> None:
    window, windows = 10 * max(took), 40
    stages = [one.stage for one in row_of(*took, workers=8)]
    changes, _, _ = ran(stages, Load(0.0, windows * window, live), MedianRate(window_seconds=window, start=start))
    assert is_settled(changes, windows * window)
    assert all(1 <= change.after <= 8 for change in changes)


@dataclass(frozen=True)
class Jumping:
    """Wants any number of workers, within the bounds and beyond them."""

    plan: tuple[tuple[int, ...], ...]
    window_seconds: float
    asked: list[int] = field(default_factory=list)

    def decide(self, windows: Sequence[StageWindow]) -> dict[str, int]:
        step = self.plan[len(self.asked) % len(self.plan)]
        self.asked.append(len(windows))
        return {window.stage: step[place % len(step)] for place, window in enumerate(windows)}


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(-1, 9), min_size=1, max_size=4).map(tuple), min_size=1, max_size=12).map(tuple),
    st.lists(st.integers(0, 30).map(lambda tenths: tenths / 10), min_size=4, max_size=4),
    st.integers(1, 12),
    st.integers(0, 40),
)
def test_no_item_is_lost_while_workers_come_and_go(
    plan: tuple[tuple[int, ...], ...], took: list[float], live: int, count: int
) -> None:
    stages = row_of(*took, workers=6)
    commit = stages[-1] = Inside("fourth", took[-1], None, workers=1)
    batches: list[int] = []

    async def batch(items: list[Item[Any]]) -> Outcomes:
        batches.append(len(items))
        await anyio.sleep(took[1])
        lead, *others = items
        ends = [(one, Finish(End(EndKind.REJECTED))) for one in others[1:]]
        carried = [(one, Carried(lead.ticket.number)) for one in others[:1]]
        members = [one.ticket.number for one in others[:1]]
        return [(lead, Forward("third", members)), *carried, *ends]

    def is_due(waiting: int) -> bool:
        passed = stages[0].seen.total() - stages[0].inside
        return waiting >= 2 or passed == load.opened

    async def third(item: Item[list[int]]) -> Outcomes:
        await stages[2].handle(item)
        riders = [Item(None, Ticket(number, random.Random(0)), 0) for number in item.payload]
        return [(item, Forward("fourth", None)), *((one, Finish(End(EndKind.INTEGRATED))) for one in riders)]

    row = [
        stages[0].stage,
        Stage("second", batch, 3, 10**6, batch=3, ready=is_due),
        Stage("third", third, 6, 10**6, least_workers=2),
        commit.stage,
    ]
    load = Load(0.0, math.inf, live, count)
    changes, _, pipeline = ran(row, load, Jumping(plan, window_seconds=0.7))
    assert load.closed == Counter(range(count)), "every ticket ends, each once"
    assert sum(batches) == count
    assert stages[0].seen == Counter(range(count))
    assert pipeline.live == 0
    assert commit.most <= 1
    bounds = {"first": (1, 6), "second": (1, 3), "third": (2, 6), "fourth": (1, 1)}
    for change in changes:
        low, high = bounds[change.stage]
        assert low <= change.after <= high
    for name in bounds:
        steps = [(change.before, change.after) for change in changes if change.stage == name]
        assert steps[0][0] == 0
        assert all(after == before for (_, after), (before, _) in pairwise(steps))
        assert all(before != after for before, after in steps)


def test_a_stage_that_loses_workers_lets_them_finish_and_then_works_on_fewer_at_once() -> None:
    (stage,) = row_of(4.0, workers=4)
    ends: list[float] = []

    async def watched(item: Item[Any]) -> Outcome:
        outcome = await stage.handle(item)
        ends.append(now())
        return outcome

    plan = ((4,), (1,), (1,), (1,), (4,))
    ran([Stage("first", watched, 4, 100)], Load(0.0, math.inf, 100, 9), Jumping(plan, window_seconds=3.0))
    # Four begin at 0; from 3 on one is wanted, so one goes on alone at 4 and at 8; from 12 on there are four again.
    assert ends == [4.0] * 4 + [8.0, 12.0] + [16.0] * 3


def test_what_is_decided_is_recorded_with_what_was_seen() -> None:
    stages = [one.stage for one in row_of(1.0, 10.0, workers=4)]
    controller = Backlog(window_seconds=10.0)
    changes, _, _ = ran(stages, Load(1.0, 60.0), controller)
    assert [(change.seconds, change.stage, change.before, change.after, change.reason) for change in changes[:3]] == [
        (0.0, "first", 0, 1, "Backlog: at the start"),
        (0.0, "second", 0, 1, "Backlog: at the start"),
        (10.0, "second", 1, 4, "Backlog: 0 finished in 10 s, 1 of 1 busy, 7 queued"),
    ]


def test_equal_runs_have_equal_changes() -> None:
    def once() -> list[WorkersChanged]:
        stages = [one.stage for one in row_of(1.0, 3.5, 0.4, workers=8)]
        return ran(stages, Load(0.7, 80.0), MedianRate(window_seconds=5.0, start=1))[0]

    assert once() == once()


def test_without_a_controller_every_stage_has_its_most_and_nothing_is_recorded() -> None:
    stages = row_of(1.0, workers=5)
    changes, ended, _ = ran([stages[0].stage], Load(0.0, math.inf, 100, 10), None)
    assert (changes, ended, stages[0].most) == ([], 2.0, 5)


def test_stages_that_the_controller_leaves_out_have_their_most() -> None:
    stages = row_of(1.0, 1.0, workers=5)
    changes, _, _ = ran([one.stage for one in stages], Load(0.0, math.inf, 100, 20), Fixed({"second": 2}))
    assert (stages[0].most, stages[1].most) == (5, 2)
    assert [(change.stage, change.after) for change in changes] == [("first", 5), ("second", 2)]


@pytest.mark.parametrize("controller", [MedianRate(window_seconds=1e6), Backlog(window_seconds=1e6), Fixed(1)])
def test_a_controller_that_sleeps_does_not_delay_the_end(controller: WorkflowController) -> None:
    _, ended, _ = ran([row_of(1.0)[0].stage], Load(0.0, math.inf, 100, 1), controller)
    assert ended == 1.0


async def test_a_controller_does_not_keep_a_run_alive_that_nothing_is_left_of() -> None:
    async def never(item: Item[Any]) -> Outcome:
        raise AssertionError

    class Empty(Load):
        async def open(self, number: int, live: int) -> Opened | NotNow:
            return NotNow.FULL

    with anyio.fail_after(5):
        await Pipeline([Stage("first", never, 3, 3)], Empty(0.0, 0.0), EventBus(), controller=MedianRate()).run()


class Failing:
    window_seconds = 1.0

    def decide(self, windows: Sequence[StageWindow]) -> dict[str, int]:
        if any(window.workers for window in windows):
            raise ZeroDivisionError("boom")
        return {}


def test_an_error_in_a_controller_ends_the_run_as_it_was() -> None:
    load = Load(0.0, math.inf, 100, 3)
    events: list[Event] = []
    bus = EventBus()
    bus.subscribe(events.append)

    async def main() -> None:
        with pytest.raises(ZeroDivisionError, match="boom"):
            await Pipeline([row_of(10.0)[0].stage], load, bus, now, Failing()).run()

    run(main)
    assert [event.end.kind for event in events if isinstance(event, TicketClosed)] == [EndKind.CANCELLED] * 3


@pytest.mark.parametrize("workers", [{"frist": 2}, {"first": 1, "frist": 2}])
def test_a_controller_that_names_a_stage_that_is_not_there_is_refused(workers: Mapping[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=r"names stages \['frist'\], expected some of \['first'\]"):
        Pipeline([row_of(1.0)[0].stage], Load(0.0, 0.0), EventBus(), controller=Fixed(workers))


@pytest.mark.parametrize(("least", "message"), [(0, "least_workers is 0"), (3, "least_workers is 3, above workers=2")])
def test_a_stage_leaves_between_one_and_all_of_its_workers(least: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Stage("s", lambda item: None, 2, 1, least_workers=least)  # type: ignore[arg-type,return-value]
