"""The order of slots by worth a request."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.engine.claims import Claim
from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.orders import ValueFirst

CLAIMS = st.builds(
    Claim,
    ticket=st.integers(0, 99),
    stage=st.just("stage"),
    depth=st.integers(1, 7),
    value=st.floats(-1.0, 2.0),
    version=st.integers(0, 60),
    rank=st.sampled_from([0.0, 1.0, 2.0]),
)
REQUESTS = st.integers(0, 80)
ONE = Claim(ticket=5, stage="validate", depth=4, value=0.5, version=3)


@given(st.lists(st.tuples(CLAIMS, REQUESTS, REQUESTS), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_who_goes_first_does_not_depend_on_what_was_asked_before(
    asked: list[tuple[Claim, int, int]], shuffler: random.Random
) -> None:
    fresh = [ValueFirst().key(*one) for one in asked]
    order = ValueFirst()
    again = list(range(len(asked)))
    shuffler.shuffle(again)
    for index in again:
        assert order.key(*asked[index]) == fresh[index]


@given(CLAIMS, st.integers(0, 40), st.integers(1, 40), st.integers(1, 40))
def test_of_equal_items_the_one_with_fewer_requests_left_goes_first(
    claim: Claim, held: int, waiting: int, more: int
) -> None:
    order = ValueFirst()
    assert order.key(claim, held, waiting) < order.key(claim, held, waiting + more)
    assert order.key(claim, held, waiting) == order.key(claim, held + waiting, 0)


@given(CLAIMS, REQUESTS, st.integers(1, 5), st.floats(0.01, 2.0))
def test_what_is_deeper_worth_more_fresher_or_ranked_higher_goes_first(
    claim: Claim, waiting: int, more: int, worth: float
) -> None:
    order = ValueFirst()
    mine = order.key(claim, 0, waiting)
    assert order.key(replace(claim, depth=claim.depth + more), 0, waiting) < mine
    assert order.key(replace(claim, value=max(0.0, claim.value) + worth), 0, waiting) < mine
    assert order.key(replace(claim, version=claim.version + more), 0, waiting) < mine
    assert order.key(replace(claim, rank=claim.rank + more), 0, waiting) < mine
    assert order.key(replace(claim, ticket=claim.ticket - 1), 0, waiting) < mine, "of equals the older ticket"


def test_the_end_of_a_validation_goes_before_its_beginning_and_a_screen_in_between() -> None:
    order = ValueFirst()
    screen = Claim(ticket=1, stage="screen", depth=5, value=0.5, version=3)
    assert order.key(ONE, 2, 0) < order.key(screen, 0, 3) < order.key(ONE, 0, 50)


@pytest.mark.parametrize(("discount", "behind"), [(0.9, 1), (0.5, 1), (0.5, 3), (0.9, 7)])
def test_each_commit_that_was_not_seen_costs_the_discount(discount: float, behind: int) -> None:
    order = ValueFirst(discount)
    stale = replace(ONE, value=2.0, version=ONE.version - behind)
    worth = 2.1 * discount**behind - 0.1  # the value at which a fresh claim is worth as much
    assert order.key(replace(ONE, value=worth - 0.001), 0, 6) > order.key(stale, 0, 6)
    assert order.key(replace(ONE, value=worth + 0.001), 0, 6) < order.key(stale, 0, 6)


def test_without_a_discount_the_version_does_not_matter() -> None:
    order = ValueFirst(1.0)
    assert order.key(replace(ONE, version=0), 1, 1) == order.key(replace(ONE, version=50_000), 1, 1)


def test_the_seeds_validation_has_its_slots_first_and_beyond_them_holds_nobody_back() -> None:
    """Every commit waits for the seed, so that its value has no end."""
    order = ValueFirst(first=8)
    seed = Claim(ticket=-1, stage="validate", depth=4, value=math.inf)
    first = Claim(ticket=0, stage="rollout", depth=1)
    best = replace(ONE, value=2.0, rank=9.0)
    nothing = replace(ONE, depth=0, version=0)
    assert order.key(seed, 7, 300) < order.key(best, 0, 1)
    assert order.key(first, 0, 3) < order.key(seed, 8, 300) < order.key(nothing, 0, 1)
    assert order.key(seed, 8, 0) < order.key(nothing, 0, 1)


@pytest.mark.parametrize("first", [0, -3])
def test_a_share_of_no_slots_is_refused(first: int) -> None:
    with pytest.raises(ConfigurationError, match=f"first is {first}, expected at least 1"):
        ValueFirst(first=first)


@pytest.mark.parametrize("discount", [0.0, -0.1, 1.1, float("nan")])
def test_a_discount_that_cannot_be_is_refused(discount: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"discount is {discount}, expected above 0 and up to 1"):
        ValueFirst(discount)
