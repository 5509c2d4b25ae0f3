"""When stages release early, in which order examples are run, and what a sum can still come to."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.gepa.evaluate import ValidationOrder, at_most, released_at
from dspy_flashevolve.gepa.settings import Workflow

SHARES = st.floats(0.0, 1.0, exclude_min=True)
SCORES = st.dictionaries(st.integers(0, 7), st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=8)
"""One candidate's scores, on some of eight examples."""
EXAMPLES = list(range(8))


# How many requests


@given(SHARES, st.integers(1, 500))
def test_what_is_released_is_at_least_one_at_most_all_and_the_share_within_a_tenth(share: float, requests: int) -> None:
    released = released_at(share, requests)
    assert 1 <= released <= requests
    assert released >= min(requests, share * requests - 0.05 - 1e-9)
    assert released < max(1, share * requests + 0.05 + 1e-9) + 1


@given(SHARES, SHARES, st.integers(1, 500))
def test_a_larger_share_never_releases_earlier(one: float, other: float, requests: int) -> None:
    low, high = sorted((one, other))
    assert released_at(low, requests) <= released_at(high, requests)


@given(st.integers(1, 10_000))
def test_the_whole_share_waits_for_all(requests: int) -> None:
    assert released_at(1.0, requests) == requests


@pytest.mark.parametrize(
    ("share", "requests", "released"), [(0.67, 3, 2), (1 / 3, 3, 1), (2 / 3, 3, 2), (0.5, 5, 3), (0.25, 12, 3)]
)
def test_shares_as_people_write_them_mean_what_they_say(share: float, requests: int, released: int) -> None:
    assert released_at(share, requests) == released


# What is refused


@pytest.mark.parametrize("share", [0, 0.0, -0.1, 1.01, float("nan"), float("inf"), True, "half", None])
def test_a_share_that_is_none_is_refused_with_its_name(share: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"Workflow: validate is {share!r}, expected a share"):
        Workflow(validate=share)


@pytest.mark.parametrize("rounds", [0, -1, 1.5, True, None, "3"])
def test_rounds_are_a_whole_number_of_at_least_one(rounds: Any) -> None:
    with pytest.raises(ConfigurationError, match="Workflow: rounds is"):
        Workflow(rounds=rounds)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "3"])
def test_live_steps_are_a_whole_number_of_at_least_one_or_none(steps: Any) -> None:
    with pytest.raises(ConfigurationError, match="Workflow: live_steps is"):
        Workflow(live_steps=steps)
    assert Workflow(live_steps=None).live_steps is None


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan"), True, "60"])
def test_a_window_of_the_median_rule_is_a_number_of_seconds(seconds: Any) -> None:
    with pytest.raises(ConfigurationError, match="Workflow: median_seconds is"):
        Workflow(median_seconds=seconds)


@pytest.mark.parametrize("pool", [0, -1, 1.5, True, "8", None, (4,), (4, 2), (0, 3), (1, 2, 3), [2, 4]])
def test_workers_are_a_number_for_a_stage_or_the_fewest_and_the_most(pool: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Workflow: workers\['propose'\] is .*, expected a whole number"):
        Workflow(workers={"propose": pool}, median_seconds=10.0)


@pytest.mark.parametrize("workers", [4, "rollout", [("rollout", 2)], {"screens": 2}, {1: 2}, {"rollout": 2, None: 1}])
def test_workers_are_given_by_the_names_of_stages(workers: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Workflow: workers is .*; stages are rollout, propose, integrate"):
        Workflow(workers=workers)


def test_workers_that_may_change_need_something_that_moves_them() -> None:
    with pytest.raises(ConfigurationError, match=r"workers\['propose'\] is \(2, 4\), but nothing moves it"):
        Workflow(workers={"propose": (2, 4)})
    assert Workflow(workers={"propose": (2, 4), "rollout": 8}, median_seconds=10.0).workers is not None


def test_the_ends_of_the_ranges_are_allowed_and_by_default_every_stage_waits_for_all() -> None:
    one = Workflow(validate=1e-9, rounds=1, live_steps=1, median_seconds=0.1)
    assert (one.rounds, one.live_steps) == (1, 1)
    one = Workflow()
    assert (one.validate, one.median_seconds) == (1.0, None)
    assert len({Workflow(), Workflow(), Workflow(validate=0.5)}) == 2


# The order of a validation


def order_of(candidates: list[dict[int, float]], rounds: int = 3, seed: int | None = 0) -> ValidationOrder:
    order = ValidationOrder(passing=1.0, rounds=rounds, seed=seed)
    for scores in candidates:
        order.record(scores)
    return order


def rotated(candidates: list[dict[int, float]], example: int, rounds: int) -> bool:
    last = [scores[example] for scores in candidates if example in scores][-rounds:]
    return len(last) == rounds and all(score >= 1.0 for score in last)


def variance(candidates: list[dict[int, float]], example: int) -> float:
    scores = [scores[example] for scores in candidates if example in scores]
    return statistics.pvariance(scores) if len(scores) > 1 else 0.0


@given(st.lists(SCORES, max_size=8), st.integers(1, 4), st.permutations(EXAMPLES))
def test_the_order_is_a_permutation_that_the_order_of_the_question_does_not_change(
    candidates: list[dict[int, float]], rounds: int, asked: list[int]
) -> None:
    order = order_of(candidates, rounds)
    assert sorted(order.sort(asked)) == EXAMPLES
    assert order.sort(asked) == order.sort(EXAMPLES)
    part = [example for example in order.sort(EXAMPLES) if example % 2]
    assert order.sort([1, 3, 5, 7]) == part, "a part comes in the same order"


@given(st.lists(SCORES, max_size=8), st.integers(1, 4))
def test_what_tells_candidates_apart_goes_first_and_what_rotated_out_goes_last(
    candidates: list[dict[int, float]], rounds: int
) -> None:
    there = order_of(candidates, rounds).sort(EXAMPLES)
    out = [rotated(candidates, example, rounds) for example in there]
    assert out == sorted(out)
    for earlier, later in itertools.pairwise(there):
        if rotated(candidates, earlier, rounds) == rotated(candidates, later, rounds):
            assert variance(candidates, earlier) >= variance(candidates, later) - 1e-9


@given(st.integers(0, 10**6))
def test_equals_come_in_an_order_that_follows_from_the_seed_alone(seed: int) -> None:
    nothing = ValidationOrder(1.0, 3, seed)
    equal = ValidationOrder(1.0, 3, seed)
    for _ in range(2):
        equal.record(dict.fromkeys(EXAMPLES, 0.5))
    assert nothing.sort(EXAMPLES) == equal.sort(EXAMPLES) == ValidationOrder(0.0, 9, seed).sort(EXAMPLES)


def test_other_seeds_give_other_orders() -> None:
    orders = {tuple(ValidationOrder(1.0, 3, seed).sort(EXAMPLES)) for seed in range(10)}
    assert len(orders) > 5
    assert tuple(EXAMPLES) not in orders


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_an_example_leaves_the_prefix_after_its_rounds_and_one_failure_brings_it_back(rounds: int) -> None:
    order = ValidationOrder(1.0, rounds, seed=0)
    order.record({0: 0.0, 1: 0.0})
    for _ in range(rounds - 1):
        order.record({0: 1.0, 1: 0.0})
        assert order.sort([0, 1]) == [0, 1], "it tells candidates apart"
    order.record({0: 1.0, 1: 0.0})
    assert order.sort([0, 1]) == [1, 0]
    order.record({1: 0.0})
    assert order.sort([0, 1]) == [1, 0], "a candidate that was not run on it says nothing of it"
    order.record({0: 0.9, 1: 0.0})
    assert order.sort([0, 1]) == [0, 1]


def test_without_a_perfect_score_nothing_rotates_out() -> None:
    order = ValidationOrder(math.inf, 1, seed=0)
    order.record({0: 0.0, 1: 0.0})
    order.record({0: 1.0, 1: 0.0})
    assert order.sort([0, 1]) == [0, 1]


def test_one_score_tells_nothing_apart_and_a_score_that_is_no_number_does_not_break_the_order() -> None:
    order = order_of([{0: 1.0, 1: 0.0, 2: 0.5}, {1: 0.0, 2: 1.0}], rounds=9)
    assert order.sort([0, 1, 2])[0] == 2
    order.record(dict.fromkeys(EXAMPLES, float("nan")))
    assert sorted(order.sort(EXAMPLES)) == EXAMPLES


def test_ids_need_no_order_of_their_own() -> None:
    ids: list[Any] = ["a", 3, ("b", 1), None]
    assert set(ValidationOrder(1.0, 1, None).sort(ids)) == set(ids)


# What a sum can still come to


TERMS = st.floats(-1e6, 1.0).map(lambda score: round(score, 15))
"""As precise as a metric's scores may be; see at_most on terms under 1e-30."""


@given(st.lists(TERMS, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_no_sum_in_floating_point_is_above_what_was_thought_possible(
    scores: list[float], shuffler: random.Random
) -> None:
    order = list(range(len(scores)))
    shuffler.shuffle(order)
    known: list[float | None] = [None] * len(scores)
    bound = at_most(known, 1.0)
    for index in order:
        known[index] = scores[index]
        assert sum(scores) <= at_most(known, 1.0) <= bound, "it only falls, down to the sum itself"
        bound = at_most(known, 1.0)
    assert bound == sum(scores)


@given(st.lists(st.sampled_from([0.1, 0.2, 0.3, 1 / 3, 0.7, 0.9, 1.0]), min_size=1, max_size=10), st.integers(0, 9))
def test_perfect_scores_for_the_rest_reach_the_bound_exactly(scores: list[float], missing: int) -> None:
    known: list[float | None] = [*scores]
    known[missing % len(scores)] = None
    assert at_most(known, 1.0) == sum(1.0 if score is None else score for score in known)


def test_without_a_highest_score_anything_is_possible() -> None:
    assert at_most([0.0, None], math.inf) == math.inf
    assert at_most([0.0, 0.5], math.inf) == 0.5
