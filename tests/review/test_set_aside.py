"""A validation that was set aside for a head, where children turn out to be rewrites, is of use to nobody."""

from __future__ import annotations

from typing import Any

from tests.contract.worlds import Rules, play


class RuleThenRewrites(Rules):
    """Its first child adds a rule; every other child is the whole text in other words, and no better."""

    async def acall(self, candidate: Any, reflective_dataset: Any, components_to_update: list[str]) -> dict[str, str]:
        if not self.reflections:
            return await super().acall(candidate, reflective_dataset, components_to_update)
        self.reflections += 1
        await self.busy(self.reflection_seconds)
        return dict.fromkeys(components_to_update, f"0.000 rewrite {self.reflections}. Nothing is as it was.")


def test_what_was_set_aside_for_a_head_pays_steps_again_where_children_are_rewrites() -> None:
    world = RuleThenRewrites(val=50, helps=-0.2)
    calls = 200
    stats = play(world, calls).async_stats
    a_step = 2 * 3 + world.val
    assert calls - stats.metric_calls < a_step, stats.stop_reason
