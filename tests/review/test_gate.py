"""A screen that cannot pass any more is given up, also where a minibatch has an example several times."""

from __future__ import annotations

import pytest

from tests.contract.surface import on
from tests.contract.worlds import World, play


@pytest.mark.parametrize("minibatch", [2, 8])
def test_a_screen_that_cannot_pass_is_given_up_after_its_first_example(minibatch: int) -> None:
    """The seed has .8 on both examples, every child 0: after one of them a child has half of the sum at most."""
    world = World(train=2, val=5, score=lambda text, question: 0.8 if "seed" in text else 0.0)
    rejected: list[str] = []
    reasons = on("on_candidate_rejected", lambda event: rejected.append(event["reason"]))
    play(world, 60, num_threads=1, reflection_minibatch_size=minibatch, staleness="full", gepa_kwargs=reasons)
    children = {text for text, _ in world.scored if "child" in text}
    assert children
    assert len([text for text, _ in world.scored if text in children]) == len(children), rejected[0]
