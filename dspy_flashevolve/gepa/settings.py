"""How a run is scheduled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from dspy_flashevolve.engine.admission import Admission
from dspy_flashevolve.engine.claims import SlotOrder
from dspy_flashevolve.engine.control import WorkflowController
from dspy_flashevolve.engine.limits import AdaptiveLimit
from dspy_flashevolve.engine.retries import RetryPolicy
from dspy_flashevolve.engine.speculation import Speculation
from dspy_flashevolve.engine.staleness import Full, StalenessPolicy
from dspy_flashevolve.engine.stragglers import Duplicates
from dspy_flashevolve.gepa.past import Past
from dspy_flashevolve.gepa.payloads import Counts


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How a run is scheduled.

    Args:
        slots: requests in flight at most, over all stages.
        live_limit: tickets that live at once at most; sizes the stages' workers and queues.
        admission: decides when a ticket may start.
        budget_calls: metric calls that are never exceeded; None for no limit of the engine's own.
        minibatch: training examples a task, for the estimate of a ticket's cost.
        lockstep: one ticket at a time, the seed first, exactly as gepa.
        seed_first: no ticket starts before the seed is validated: a strategy of the user's may look at its scores.
        staleness: looks at every child after its screen and before its commit.
        max_seconds: no ticket starts after it; None for no limit.
        same_data: the training set is the validation set.
        strict_live: tickets that only wait count as live too, so that the bound holds to the letter.
        max_reflection_calls: reflections and integrations after which no ticket starts; None for no limit.
        max_cost: dollars after which no ticket starts; None for no limit.
        speculation: how early stages release their output; None for never.
        order: who gets the next free slot; None for the default.
        adaptive: how the endpoints' limits adapt below ``slots``; None for no limit but that.
        retry: what happens when the provider asks to come back later.
        controller: decides how many workers each stage has; None gives each the most. Not asked in lockstep.
        rollout_timeout_seconds: a run of the program on an example, metric included, is given up after it and tried
            again; None for no bound.
        duplicates: begins a rollout far beyond the others a second time; None never does. Not in lockstep.
        clock: seconds.
    """

    slots: int
    live_limit: int
    admission: Admission
    budget_calls: int | None
    minibatch: int
    lockstep: bool = False
    seed_first: bool = False
    staleness: StalenessPolicy = field(default_factory=Full)
    max_seconds: float | None = None
    same_data: bool = False
    strict_live: bool = False
    max_reflection_calls: int | None = None
    max_cost: float | None = None
    speculation: Speculation | None = None
    order: SlotOrder | None = None
    adaptive: AdaptiveLimit | None = None
    retry: RetryPolicy | None = None
    controller: WorkflowController | None = None
    rollout_timeout_seconds: float | None = None
    duplicates: Duplicates | None = None
    clock: Callable[[], float] = anyio.current_time

    def spent_up(self, counts: Counts, past: Past | None) -> str | None:
        """Why no further ticket may start, by what reflections and requests have cost; None while one may.

        Args:
            counts: of this run.
            past: of an interrupted one that it goes on with; None where it is new.
        """
        calls, cost = counts.reflection_calls, counts.cost_dollars
        if past is not None:
            calls, cost = calls + past.reflection_calls, cost + past.cost_dollars
        if self.max_reflection_calls is not None and calls >= self.max_reflection_calls:
            return f"max_reflection_calls={self.max_reflection_calls} is spent"
        if self.max_cost is not None and cost >= self.max_cost:
            return f"max_cost={self.max_cost:g} dollars is spent"
        return None
