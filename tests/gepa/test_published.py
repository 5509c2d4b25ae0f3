"""FlashEvolve's release on a part of a validation, and its median rule."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.events import LimitChanged
from dspy_flashevolve.engine.requests import gather
from dspy_flashevolve.engine.steps import End, EndKind, LiveSteps, Step
from dspy_flashevolve.gepa.published import PartialRelease, Published, StageWindow, median_shares
from dspy_flashevolve.gepa.settings import STAGES, Workflow
from tests.engine.test_run import World

SCORES = st.dictionaries(st.integers(0, 7), st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=8)
"""One candidate's scores, on some of eight examples."""
EXAMPLES = list(range(8))
WINDOWS = st.dictionaries(
    st.sampled_from(STAGES),
    st.builds(StageWindow, st.integers(0, 40), st.integers(0, 9), st.integers(0, 9), st.integers(1, 12)),
    min_size=1,
)


def release_of(
    candidates: Sequence[dict[int, float]], rounds: int = 3, passing: float = 1.0, share: float = 0.5
) -> PartialRelease:
    release = PartialRelease(share, rounds, passing=passing, seed=0)
    for scores in candidates:
        release.record(scores)
    return release


def order_of(release: PartialRelease, examples: list[int]) -> list[int]:
    first, rest = release.split(examples)
    return first + rest


@pytest.mark.parametrize(
    ("share", "requests", "released"),
    [(0.67, 3, 2), (1 / 3, 3, 1), (2 / 3, 3, 2), (0.5, 5, 3), (0.25, 12, 3), (1e-9, 7, 1), (1.0, 7, 7)],
)
def test_shares_as_people_write_them_mean_what_they_say(share: float, requests: int, released: int) -> None:
    first, rest = release_of([], share=share).split(range(requests))
    assert len(first) == released
    assert sorted(first + rest) == list(range(requests))


def rotated(candidates: list[dict[int, float]], example: int, rounds: int) -> bool:
    last = [scores[example] for scores in candidates if example in scores][-rounds:]
    return len(last) == rounds and all(score >= 1.0 for score in last)


def variance(candidates: list[dict[int, float]], example: int) -> float:
    scores = [scores[example] for scores in candidates if example in scores]
    return statistics.pvariance(scores) if len(scores) > 1 else 0.0


@given(st.lists(SCORES, max_size=8), st.integers(1, 4))
def test_what_tells_candidates_apart_goes_first_and_what_rotated_out_goes_last(
    candidates: list[dict[int, float]], rounds: int
) -> None:
    there = order_of(release_of(candidates, rounds), EXAMPLES)
    out = [rotated(candidates, example, rounds) for example in there]
    assert out == sorted(out)
    for earlier, later in itertools.pairwise(there):
        if rotated(candidates, earlier, rounds) == rotated(candidates, later, rounds):
            assert variance(candidates, earlier) >= variance(candidates, later) - 1e-9


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_an_example_leaves_the_prefix_after_its_rounds_and_one_failure_brings_it_back(rounds: int) -> None:
    order = release_of([], rounds)
    order.record({0: 0.0, 1: 0.0})
    for _ in range(rounds - 1):
        order.record({0: 1.0, 1: 0.0})
        assert order_of(order, [0, 1]) == [0, 1], "it tells candidates apart"
    order.record({0: 1.0, 1: 0.0})
    assert order_of(order, [0, 1]) == [1, 0]
    order.record({1: 0.0})
    assert order_of(order, [0, 1]) == [1, 0], "a candidate that was not run on it says nothing of it"
    order.record({0: 0.9, 1: 0.0})
    assert order_of(order, [0, 1]) == [0, 1]


def test_without_a_perfect_score_nothing_rotates_out() -> None:
    order = release_of([], 1, math.inf)
    order.record({0: 0.0, 1: 0.0})
    order.record({0: 1.0, 1: 0.0})
    assert order_of(order, [0, 1]) == [0, 1]


# The median rule


@given(WINDOWS, st.integers(1, 6), st.integers(0, 6))
def test_the_median_rule_moves_a_stage_by_at_most_one_slot_within_its_bounds(
    windows: dict[str, StageWindow], least: int, more: int
) -> None:
    most = least + more
    for name, share in median_shares(windows, dict.fromkeys(windows, (least, most))).items():
        window = windows[name]
        assert least <= share <= most
        assert abs(share - max(least, min(most, window.share))) <= 1
        if share > max(least, window.share):
            assert window.waiting, "only what waits gets more"
            assert window.running >= window.share


def test_a_worker_pool_bounds_the_requests_of_its_stage_and_the_median_rule_moves_it_within_its_bounds() -> None:
    world = World(12, max_seconds=400.0)
    running, most = Counter[str](), Counter[str]()

    async def ask(stage: str, step: Step, seconds: float) -> None:
        async def call() -> None:
            running[stage] += 1
            most[stage] = max(most[stage], running[stage])
            await anyio.sleep(seconds)
            running[stage] -= 1

        await world.run.requests.ask(stage, step, call)

    async def step(step: Step) -> End:
        world.run.begin(step, 0)
        await ask("propose", step, 2.0)
        if step.number % 4 == 0:  # so that it finishes far more than the two others
            await gather([lambda: ask("rollout", step, 0.5)] * 4)
            await gather([lambda: ask("validate", step, 0.1)] * 6)
        return End(EndKind.REJECTED)

    workflow = Workflow(workers={"rollout": 2, "propose": (1, 3)}, median_seconds=10.0)
    world.evolve(step, LiveSteps(12), watchers=Published(workflow, 1.0, 0).watchers(world.run))
    changes = [(one.before, one.after) for one in world.of(LimitChanged) if one.name == "propose"]
    assert changes[:2] == [(3, 2), (2, 1)]
    assert {after for _, after in changes} <= {1, 2, 3}
    assert not [one for one in world.of(LimitChanged) if one.name == "rollout"]
    assert most["rollout"] == 2
    assert most["propose"] == 3
    assert most["validate"] > 3


# What is refused


NO_STAGES = [4, "rollout", [("rollout", 2)], {"screens": 2}, {1: 2}, {"rollout": 2, None: 1}]
REFUSED = {
    "validate": (
        [0, 0.0, -0.1, 1.01, float("nan"), float("inf"), True, "half", None],
        "validate is .*, expected a share",
    ),
    "rounds": ([0, -1, 1.5, True, None, "3"], "rounds is"),
    "live_steps": ([0, -1, 1.5, True, "3"], "live_steps is"),
    "median_seconds": ([0, -1.0, float("nan"), True, "60"], "median_seconds is"),
    "workers": (NO_STAGES, "workers is .*; stages are rollout, propose, integrate"),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (values, _) in REFUSED.items() for value in values]
)
def test_an_option_out_of_its_range_is_refused_with_its_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"Workflow: {REFUSED[name][1]}") as caught:
        Workflow(**{name: value})
    assert f"{name} is {value!r}" in str(caught.value)


@pytest.mark.parametrize("pool", [0, -1, 1.5, True, "8", None, (4,), (4, 2), (0, 3), (1, 2, 3), [2, 4]])
def test_workers_are_a_number_for_a_stage_or_the_fewest_and_the_most(pool: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Workflow: workers\['propose'\] is .*, expected a whole number"):
        Workflow(workers={"propose": pool}, median_seconds=10.0)


def test_workers_that_may_change_need_something_that_moves_them() -> None:
    with pytest.raises(ConfigurationError, match=r"workers\['propose'\] is \(2, 4\), but nothing moves it"):
        Workflow(workers={"propose": (2, 4)})
    assert Workflow(workers={"propose": (2, 4), "rollout": 8}, median_seconds=10.0).workers is not None


def test_the_ends_of_the_ranges_are_allowed_and_by_default_every_stage_waits_for_all() -> None:
    one = Workflow(validate=1e-9, rounds=1, live_steps=1, median_seconds=0.1)
    assert (one.rounds, one.live_steps) == (1, 1)
    one = Workflow()
    assert (one.validate, one.median_seconds) == (1.0, None)
    assert Workflow(live_steps=None).live_steps is None
    assert len({Workflow(), Workflow(), Workflow(validate=0.5)}) == 2
