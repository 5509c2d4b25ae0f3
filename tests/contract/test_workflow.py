"""Partial release and the validation prefix (FlashEvolve section 3.3): the one option of the engine's own making.

These tests are few, because its spelling is not settled: ``surface.early`` knows it.
"""

from __future__ import annotations

import pytest

from dspy_flashevolve import ConfigurationError, Workflow
from tests.contract.surface import check_ends, check_winner, early
from tests.contract.worlds import World, play


@pytest.mark.parametrize(("rollout", "validate"), [(0.34, 1.0), (0.67, 0.25), (1.0, 0.5)])
def test_stages_that_release_a_part_keep_the_budget_and_a_winner_that_is_fully_validated(
    rollout: float, validate: float
) -> None:
    world = World(spread=60.0)
    program = play(world, 400, **early(rollout, validate))
    details, stats = program.detailed_results, program.async_stats
    assert len(world.scored) == stats.metric_calls <= 400
    check_ends(stats)
    check_winner(details, 12)
    assert all(set(scores) == set(range(12)) for scores in details.val_subscores)


def test_reflection_on_a_part_of_a_minibatch_starts_before_its_slowest_rollout() -> None:
    """One of three takes a thousand times as long as the others."""

    class Slow(World):
        def seconds(self, text: str, question: str) -> float:
            return 1000.0 if question == "t 0" else 1.0

    begun = {}
    for share in (0.67, 1.0):
        world = Slow(train=3)
        play(world, 60, search="pareto", **early(rollout=share))
        begun[share] = world.first_reflection
    assert begun[0.67] < 1000 <= begun[1.0]


def test_worker_pools_bound_what_the_stages_of_a_run_have_in_flight() -> None:
    stages = "rollout", "propose", "integrate", "screen", "prefix", "validate"
    pools = Workflow(workers=dict.fromkeys(stages, 1))
    narrow, wide = (
        play(World(), 200, num_threads=16, workflow=workflow).detailed_results for workflow in (pools, Workflow())
    )
    for details in (narrow, wide):
        check_ends(details.async_stats)
        check_winner(details, 12)
    assert narrow.async_stats.peak_slots <= len(stages) < wide.async_stats.peak_slots


@pytest.mark.parametrize("arguments", [{"rollout": 0.0}, {"rollout": 1.5}, {"validate": -1.0}, {"rounds": 0}])
def test_a_share_that_is_none_is_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(arguments))):
        play(World(), 60, **early(**arguments))  # type: ignore[arg-type]
