"""The bound on live tickets that follows from the gap which is tolerated: its formula, and tickets in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.engine.admission import GapBound, LiveTickets, Load
from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.staleness import GapHistogram
from dspy_flashevolve.sim.virtual import run

WIDE = LiveTickets(limit=1000)


def load(live: int = 0, **options: Any) -> Load:
    return Load(
        **{"live": live, "working": 0, "idle_slots": 64, "calls_left": None, "calls_reserved": 0}
        | {"calls_per_ticket": 30.0}
        | options
    )


# The formula


@given(st.integers(0, 50), st.floats(0.01, 1.0), st.integers(1, 60))
def test_the_bound_is_the_widest_whose_mean_gap_is_tolerated(gap: int, acceptance: float, limit: int) -> None:
    bound = GapBound(gap, LiveTickets(limit), acceptance).bound(load())
    assert 1 <= bound <= limit
    assert acceptance * (bound - 1) <= gap + 1e-6
    assert bound == limit or acceptance * bound > gap - 1e-6


@given(st.floats(0, 50), st.none() | st.floats(0.01, 1.0), st.integers(0, 60), st.integers(0, 99))
def test_both_bounds_hold_and_one_ticket_may_always_live(
    gap: float, acceptance: float | None, live: int, ended: int
) -> None:
    within = LiveTickets(limit=40, working_limit=3)
    rule = GapBound(gap, within, acceptance)
    one = load(live, working=5, idle_slots=0, ended=ended, commits=ended // 3)
    assert not rule.admits(one)
    one = load(live, working=1, ended=ended, commits=ended // 3)
    assert rule.admits(one) == (live < rule.bound(one))
    assert rule.admits(load(0, ended=ended, commits=ended // 3))
    assert rule.limit == 40


def test_no_gap_means_one_ticket_at_a_time() -> None:
    assert GapBound(0, WIDE).bound(load(1, ended=50, commits=1)) == 1


def test_what_narrows_the_budget_is_the_rule_within() -> None:
    rule = GapBound(0.0, LiveTickets(limit=16, generations=10.0))
    assert not rule.is_narrowed(load())
    assert rule.is_narrowed(load(calls_left=300))


@given(st.integers(0, 200), st.integers(0, 200))
def test_an_acceptance_that_adapts_begins_at_a_half_and_ends_at_what_is_seen(ended: int, commits: int) -> None:
    rule = GapBound(2.0, WIDE)
    assert rule.bound(load()) == GapBound(2.0, WIDE, 0.5).bound(load())
    seen = (commits + 2) / (ended + 4)
    assert rule.bound(load(ended=ended, commits=commits)) == 1 + int(2.0 / seen + 1e-9)


@given(st.floats(0, 30), st.integers(0, 40))
def test_larger_gaps_than_the_formula_says_narrow_the_bound_and_smaller_ones_do_not_widen_it(
    mean_gap: float, live: int
) -> None:
    rule = GapBound(2.0, WIDE)
    without = rule.bound(load(live, ended=96, commits=18))
    seen = rule.bound(load(live, ended=96, commits=18, mean_gap=mean_gap))
    assert seen <= without == 11
    if live > 1 and mean_gap > 0.2 * (live - 1):
        assert seen == 1 + int(2.0 / (mean_gap / (live - 1)) + 1e-9)
    else:
        assert seen == without


def test_tickets_that_commit_several_candidates_each_narrow_the_bound_further() -> None:
    assert GapBound(6.0, WIDE).bound(load(ended=100, commits=300)) == 1 + int(6.0 / (302 / 104))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gap": -1.0}, "gap is -1.0, expected 0 or more"),
        ({"gap": float("nan")}, "gap is nan"),
        ({"gap": 1.0, "acceptance": 0.0}, "acceptance is 0.0, expected above 0 and up to 1"),
        ({"gap": 1.0, "acceptance": 1.5}, "acceptance is 1.5"),
    ],
)
def test_a_gap_bound_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"gap bound: {message}"):
        GapBound(within=WIDE, **options)


# Tickets in virtual time


@dataclass
class World:
    """Tickets that live for a while, and commit with a certain probability.

    Args:
        rule: admits them.
        accepted: probability of a commit, by the number of tickets that have ended.
        seconds: how long a ticket lives, by a draw.
    """

    rule: GapBound
    accepted: Callable[[int], float]
    seconds: Callable[[random.Random], float]
    tickets: int = 3000
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    gaps: list[int] = field(default_factory=list[int])
    seen: GapHistogram = field(default_factory=GapHistogram)
    room: asyncio.Event = field(default_factory=asyncio.Event)
    live = opened = ended = version = most = 0

    def load(self) -> Load:
        lately = self.seen.mean_lately("commit")
        return load(self.live, ended=self.ended, commits=self.version, mean_gap=lately)

    async def ticket(self) -> None:
        saw = self.version
        await asyncio.sleep(self.seconds(self.rng))
        self.gaps.append(self.version - saw)
        if self.rng.random() < self.accepted(self.ended):
            self.seen.record("commit", self.version - saw)
            self.version += 1
        self.live -= 1
        self.ended += 1
        self.room.set()

    async def play(self) -> World:
        async with anyio.create_task_group() as group:
            while self.opened < self.tickets:
                self.room = asyncio.Event()
                while self.opened < self.tickets and self.rule.admits(self.load()):
                    self.live += 1
                    self.opened += 1
                    self.most = max(self.most, self.live)
                    group.start_soon(self.ticket)
                await self.room.wait()
        return self

    @property
    def mean_gap(self) -> float:
        half = self.gaps[len(self.gaps) // 2 :]
        return sum(half) / len(half)


def exponential(rng: random.Random) -> float:
    return rng.expovariate(1 / 30)


def constant(rng: random.Random) -> float:
    return 30 * (0.95 + 0.1 * rng.random())


@pytest.mark.parametrize("seconds", [exponential, constant])
@pytest.mark.parametrize(("gap", "acceptance"), [(2.0, 0.25), (4.0, 0.1), (8.0, 0.5), (1.0, 0.05), (0.0, 0.5)])
def test_the_mean_gap_of_tickets_stays_at_the_bound(gap: float, acceptance: float, seconds: Any) -> None:
    world = run(World(GapBound(gap, WIDE, acceptance), lambda _: acceptance, seconds).play)
    assert world.most == 1 + int(gap / acceptance + 1e-9)
    assert 0.8 * gap <= world.mean_gap <= 1.2 * gap


@pytest.mark.parametrize("acceptance", [0.05, 0.2, 0.6])
def test_a_bound_that_adapts_keeps_the_mean_gap_under_what_is_tolerated_without_being_told(acceptance: float) -> None:
    world = run(World(GapBound(3.0, WIDE), lambda _: acceptance, exponential).play)
    assert 0.5 * 3.0 <= world.mean_gap <= 1.1 * 3.0


def test_a_bound_that_adapts_follows_an_acceptance_that_falls() -> None:
    world = run(World(GapBound(3.0, WIDE), lambda ended: 0.5 if ended < 300 else 0.05, exponential).play)
    assert world.most > 30
    assert world.mean_gap <= 1.1 * 3.0
