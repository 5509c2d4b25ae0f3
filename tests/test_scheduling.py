"""AsyncGEPA's arguments of its own: what is refused, and what schedule they make."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import dspy
import pytest

from dspy_flashevolve import (
    AsyncGEPA,
    ConfigurationError,
    DeepestFirst,
    GapBound,
    Guarded,
    LiveTickets,
    Speculation,
    ValueFirst,
)
from dspy_flashevolve.engine.claims import Claim, SlotKey
from dspy_flashevolve.gepa.settings import RunSettings
from dspy_flashevolve.scheduling import DEFAULT_SPECULATION, settings_of
from tests.fakes import digits, reflection_lm
from tests.gepa.worlds import World, play


def optimizer(**options: Any) -> AsyncGEPA:
    return AsyncGEPA(digits, **({"max_metric_calls": 100, "reflection_lm": reflection_lm()} | options))


def settings(**options: Any) -> RunSettings:
    return settings_of(optimizer(**options), same_data=False)


class Mine:
    """An admission of the user's."""

    limit = 3

    def admits(self, load: Any) -> bool:
        return load.live < 3

    def is_narrowed(self, load: Any) -> bool:
        return False


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"speculation": 0.5}, "speculation is 0.5, expected a Speculation, or None"),
    ({"speculation": True}, "speculation is True"),
    ({"slot_order": "fastest"}, "slot_order is 'fastest', expected one of 'deepest', 'value', or an object"),
    ({"slot_order": ValueFirst}, "slot_order is <class"),
    ({"slot_order": SimpleNamespace(key=3)}, "slot_order is namespace"),
    ({"admission": 5}, "admission is 5, expected LiveTickets, GapBound, or an object with limit"),
    ({"admission": SimpleNamespace(limit=3, admits=len)}, "is_narrowed"),
    ({"admission": SimpleNamespace(admits=len, is_narrowed=len)}, "admission is namespace"),
    ({"admission": LiveTickets(3), "max_live_tickets": 3}, "give one of them"),
    ({"admission": Mine(), "schedule": "lockstep"}, "give one of them"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_arguments_that_cannot_work_are_refused_before_any_call(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        optimizer(**options)


def test_speculation_is_on_unless_it_is_turned_off() -> None:
    assert settings().speculation == DEFAULT_SPECULATION == Speculation()
    assert settings(speculation=None).speculation is None
    assert settings(speculation=Speculation(racing=0.1)).speculation == Speculation(racing=0.1)


def test_the_order_of_slots_is_the_users_and_a_name_makes_a_new_one_each_run() -> None:
    mine = ValueFirst(0.5)
    assert settings(slot_order=mine).order is mine
    one = optimizer(slot_order="value")
    orders = [settings_of(one, same_data=False).order for _ in range(2)]
    assert all(isinstance(order, ValueFirst) for order in orders)
    assert orders[0] is not orders[1]
    assert isinstance(settings().order, ValueFirst)
    assert isinstance(settings(slot_order="deepest").order, DeepestFirst)
    assert settings(schedule="lockstep", slot_order="value").order is None


@pytest.mark.parametrize(("threads", "first"), [(64, 32), (1, 1), (None, 32)])
def test_the_seed_has_half_of_the_slots_first_and_32_where_they_adapt(threads: int | None, first: int) -> None:
    order = settings(num_threads=threads).order
    seed, other = Claim(-1, "validate", 4, math.inf), Claim(0, "prefix", 6, 2.0)
    assert order is not None
    assert order.key(seed, first - 1, 900) < order.key(other, 0, 1) < order.key(seed, first, 900)


def test_guarded_bounds_the_gap_that_it_tolerates_unless_the_width_is_given() -> None:
    rule = settings(staleness=Guarded(5)).admission
    assert isinstance(rule, GapBound)
    assert rule.gap == 5
    assert isinstance(settings(staleness=Guarded(5), max_live_tickets=7).admission, LiveTickets)
    assert isinstance(settings(staleness="full").admission, LiveTickets)
    assert isinstance(settings(staleness="guarded", schedule="lockstep").admission, LiveTickets)
    mine = Mine()
    made = settings(staleness="guarded", admission=mine)
    assert made.admission is mine
    assert made.live_limit == 3


@pytest.mark.parametrize("order", ["value", "deepest", "mine"])
def test_runs_with_any_order_of_slots_and_admission_keep_the_budget(order: str) -> None:
    asked: list[Claim] = []

    class Random:
        def key(self, claim: Claim, held: int, waiting: int) -> SlotKey:
            asked.append(claim)
            return (hash(claim) % 7,)

    given: Any = Random() if order == "mine" else order
    for admission in (Mine(), GapBound(2.0, LiveTickets(20)), None):
        outcome = play(World(), 200, staleness="full", slot_order=given, admission=admission, num_threads=4)
        outcome.check_budget()
        assert len(outcome.texts) > 1
    assert bool(asked) == (order == "mine")


def test_a_gap_bound_holds_the_mean_gap_of_a_run_at_what_it_tolerates() -> None:
    with dspy.context(lm=None):
        narrow, wide = (
            play(World(), 3000, staleness="full", admission=rule, num_threads=64)
            for rule in (GapBound(1.0, LiveTickets(48)), LiveTickets(48))
        )
    means = []
    for outcome in (narrow, wide):
        seen = outcome.stats.gaps["before_commit"]
        means.append(sum(gap * count for gap, count in seen.items()) / sum(seen.values()))
    assert means[0] <= 1.5 < means[1]
