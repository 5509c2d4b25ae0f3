"""How many steps may live at once: the bounds, and what does not count against them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.engine.steps import LiveSteps, Load
from dspy_flashevolve.gepa.admission import SearchWidth
from dspy_flashevolve.gepa.settings import Workflow

RULES = st.builds(LiveSteps, st.integers(1, 64), st.none() | st.integers(1, 64), st.floats(0, 30), st.integers(1, 8))
CALLS = st.tuples(st.integers(0, 5000) | st.none(), st.integers(0, 5000), st.floats(0, 200))
IDLE = Load(0, 0, 64, None, 0, 30.0)


def search_of(joins: bool | None, calls_alone: int) -> Any:
    """What a width asks of a search and of a run's spending."""
    return SimpleNamespace(come_together=joins), SimpleNamespace(calls_alone=calls_alone)


@given(RULES, CALLS)
def test_one_step_may_always_live_and_never_more_than_the_bound(
    rule: LiveSteps, calls: tuple[int | None, int, float]
) -> None:
    bound = rule.bound(Load(0, 0, 0, *calls))
    assert 1 <= bound <= rule.limit
    assert rule.admits(Load(0, 0, 0, *calls))
    assert not rule.admits(Load(bound, 0, 64, *calls))


@given(st.integers(1, 20), st.integers(0, 40), st.integers(0, 40))
def test_parked_steps_do_not_count_unless_it_is_strict(limit: int, live: int, parked: int) -> None:
    load = replace(IDLE, live=live, parked=min(parked, live))
    assert LiveSteps(limit).admits(load) == (live - load.parked < limit)
    assert LiveSteps(limit, strict=True).admits(load) == (live < limit)


def test_a_small_budget_is_spread_over_the_generations_asked_for() -> None:
    rule = LiveSteps(16, generations=10)
    assert rule.bound(replace(IDLE, calls_left=900)) == 3
    assert rule.bound(replace(IDLE, calls_left=600, calls_reserved=300)) == 3
    assert rule.bound(IDLE) == 16


@given(st.integers(1, 128), st.integers(1, 128), st.integers(0, 200), st.integers(0, 64))
def test_while_there_may_be_fewer_slots_the_bounds_shrink_with_them(
    most: int, now: int, live: int, working: int
) -> None:
    """As many steps as a rule for half as many slots again would let in, give or take what is rounded."""
    load = Load(live, working, 0, None, 0, 1.0, slots=now)
    rule, own = (LiveSteps(slots, max(1, slots // 4), slots=slots) for slots in (most, min(now, most)))
    assert own.bound(load) <= rule.bound(load) <= rule.limit
    assert rule.bound(load) <= 1.5 * own.limit + 3
    assert rule.bound(replace(load, slots=None)) == rule.limit
    if own.admits(load):
        assert rule.admits(load)


@pytest.mark.parametrize(
    ("joins", "expects_edits", "alone"), [(True, True, 8), (None, True, 8), (None, False, 1), (False, True, 2)]
)
def test_a_budget_is_spread_by_what_children_are_like(joins: bool | None, expects_edits: bool, alone: int) -> None:
    rule = SearchWidth(Workflow(), 64, 3, *search_of(joins, 25), expects_edits)
    loads = [replace(IDLE, live=live, calls_left=600, calls_per_step=25.0) for live in range(20)]
    assert sum(map(rule.admits, loads)) == alone
    late = [replace(load, calls_left=150, ended=18) for load in loads]
    assert sum(map(rule.admits, late)) == (8 if joins is not False else 1), "changes: as wide as at the beginning"
    endless = [replace(load, calls_left=None) for load in loads]
    assert all(map(rule.admits, endless)), "without a budget of calls nothing is to be spread"
    given = SearchWidth(Workflow(live_steps=6), 64, 3, *search_of(joins, 25), True)
    assert sum(map(given.admits, loads)) == 6
