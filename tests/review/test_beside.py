"""Late rollouts that run beside the steps hand back what they do not spend: the run waits for them before it ends."""

from __future__ import annotations

from dspy_flashevolve import Workflow
from dspy_flashevolve.engine.staleness import Admit, Decision, Discard, History, Look
from tests.contract.worlds import Rules, play


class EveryThird:
    """Discards some, before they are reflected on too, so that late rollouts outlive their steps."""

    looks = ("before_propose", "after_propose", "after_screen", "before_commit")

    def decide(self, look: Look, history: History) -> Decision:
        odd = (look.seen + history.version) % 3 == 1
        return Discard("odd") if odd and look.place != "before_commit" else Admit()


def test_a_run_does_not_end_while_work_beside_the_steps_holds_calls_that_it_may_hand_back() -> None:
    calls, world = 160, Rules(seed=236, val=9, train=6)
    early = Workflow(rollout=0.4)
    stats = play(
        world, calls, num_threads=8, reflection_minibatch_size=20, workflow=early, staleness=EveryThird()
    ).async_stats
    assert calls - stats.metric_calls < 2 * world.train + world.val, stats.stop_reason
