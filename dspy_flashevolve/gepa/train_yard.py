"""Where children wait for trains: when one leaves, who makes room for others meanwhile, and how a run ends with a head.

It puts the stages of a policy that integrates together.
"""

from __future__ import annotations

from collections.abc import Callable

from dspy_flashevolve.engine.budget import Budget, Reservation
from dspy_flashevolve.engine.integration import Integrator
from dspy_flashevolve.engine.stages import Stage
from dspy_flashevolve.engine.staleness import Reflective
from dspy_flashevolve.gepa.head_stages import HeadStages
from dspy_flashevolve.gepa.heads import Heads
from dspy_flashevolve.gepa.known_scores import KnownScores
from dspy_flashevolve.gepa.services import Services
from dspy_flashevolve.gepa.source import GepaSource
from dspy_flashevolve.gepa.train import TrainStages


class TrainYard:
    """The stages of one policy that integrates.

    Args:
        services: shared with the other stages.
        policy: how trains are made.
        integrator: reads the children.
        heads: the line of heads.
        source: opens tickets; it hears of those that only wait.
        budget: the run's.
        strict_live: tickets that only wait make no room for others.
    """

    def __init__(
        self,
        services: Services,
        policy: Reflective,
        integrator: Integrator,
        heads: Heads,
        source: GepaSource,
        budget: Budget,
        strict_live: bool,
    ) -> None:
        self._policy = policy
        self._source = source
        self.queued: Callable[[], int] = lambda: 0
        """Tickets whose children wait for a train."""
        self.known = KnownScores()
        purse = source.keep_purse() if policy.train else Reservation(budget, 0)
        self.heads = HeadStages(services, policy, heads, purse)
        self.train = TrainStages(services, policy, integrator, heads, self.known, self.heads)
        if not strict_live:
            source.resting = self._resting

    def stage(self, capacity: int) -> Stage:
        """The stage that integrates."""
        policy = self._policy
        return Stage(
            "integrate", self.train.integrate, policy.integrators, capacity, batch=policy.batch, ready=self._is_due
        )

    def finish_resting(self, stopping: bool) -> None:
        """Where nothing more can start, the newest head that rests goes on."""
        if stopping or self._source.starved or self._source.stop_requested:
            self.heads.finish_resting()

    def _resting(self) -> int:
        """Tickets that only wait; at most two trains of them make room for others."""
        return self.heads.resting + min(self.queued(), 2 * self._policy.batch)

    def _is_due(self, waiting: int) -> bool:
        """A train leaves half full; sooner only where no ticket is at work that could still ride in it."""
        return 2 * waiting >= self._policy.batch or not self._source.working
