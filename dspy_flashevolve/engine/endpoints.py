"""Who answers the run's requests: all endpoints of a run, the groups that share slots, and their limits.

A fault of one request, or of its provider, is told apart in ``retries.py``; an endpoint that pauses is in
``endpoint.py``, several servers of one model in ``replicas.py``, and what endpoints share in ``groups.py``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from dspy_flashevolve.engine.endpoint import Endpoint
from dspy_flashevolve.engine.events import EndpointAsked, EventBus
from dspy_flashevolve.engine.groups import REPLICA_SEPARATOR, EndpointGroup, each_by_itself, groups_of, members_of
from dspy_flashevolve.engine.limits import AdaptiveLimit, Bounds
from dspy_flashevolve.engine.rates import RateLimit
from dspy_flashevolve.engine.replicas import Replicas
from dspy_flashevolve.engine.retries import Responder, Retries, RetryPolicy
from dspy_flashevolve.engine.scheduler import Scheduler

OPTIONAL_STAGES = {"integrate"}
"""A run goes on without them: where no other stage asks the same endpoint, its silence ends no run."""


class Endpoints:
    """All endpoints of a run.

    Args:
        asked: stage -> the names of the endpoints that its requests ask.
        adaptive: how their limits adapt; None for no limit but that of the run.
        scheduler: gets the limits.
        bus: told of every change.
        clock: seconds.
        retry: how long to wait before a request is made again.
        rng: source of jitter.
        on_outage: called with the reason when a provider is given up; see :class:`RetryPolicy`.
    """

    def __init__(
        self,
        asked: Mapping[str, Iterable[str]],
        adaptive: Bounds | None,
        scheduler: Scheduler,
        bus: EventBus,
        clock: Callable[[], float],
        retry: RetryPolicy,
        rng: random.Random,
        on_outage: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.retries = Retries(retry, clock, rng, bus, on_outage)
        self._scheduler, self._bus, self._clock = scheduler, bus, clock
        self._asked = {stage: set(names) for stage, names in asked.items()}
        self._group_names = groups_of(self._asked)
        self._groups: dict[str, EndpointGroup] = {}
        self._group_of_endpoint: dict[str, EndpointGroup] = {}
        self._stage_responders: dict[str, Responder] = {}
        self._endpoints: dict[str, Endpoint] = {}
        self._replicas: dict[str, Replicas] = {}
        for group_name in sorted(set(self._group_names.values())):
            stages = [stage for stage, name in self._group_names.items() if name == group_name]
            names = {name for stage in stages for name in self._asked[stage]}
            models = {name for name in names if REPLICA_SEPARATOR in name}
            alone = names - models - each_by_itself(models)
            bounds = adaptive if alone else None
            self._groups[group_name] = group = EndpointGroup(group_name, scheduler, bus, clock, bounds)
            self._group_of_endpoint.update(dict.fromkeys({*names, *each_by_itself(models)}, group))
            for name in sorted(models):
                self._add_replicas(name, group, adaptive or self._replica_bounds(name))
            group.update_slots()

    @property
    def names(self) -> list[str]:
        """The endpoints that stages are known to ask, each by itself."""
        return sorted(each_by_itself(name for names in self._asked.values() for name in names))

    @property
    def limits(self) -> dict[str, AdaptiveLimit]:
        """Name of a group, or of a replica -> its limit, where that adapts."""
        limits = {group.name: group.limit for group in self._groups.values()}
        for replicas in self._replicas.values():
            limits.update({replica.name: replica.adaptive_limit for replica in replicas.members})
        return {name: limit for name, limit in limits.items() if limit is not None}

    def endpoint(self, name: str) -> Endpoint:
        """Return the endpoint of that name, one object a name."""
        if name not in self._endpoints:
            self._endpoints[name] = Endpoint(name, self.retries, self._group(name), self._is_optional(name))
        return self._endpoints[name]

    def replicas(self, name: str) -> Replicas:
        """Return the replicas of a model, by their common name."""
        if name not in self._replicas:
            self._add_replicas(name, self._group(name), None)
        return self._replicas[name]

    def responder_of_stage(self, stage: str) -> Responder:
        """Return what stands for all that a stage asks, and for others that ask the same: it compares the outcomes of
        whole requests, when the endpoints' own requests were made again already."""
        name = self._group_names.get(stage, stage)
        if name not in self._stage_responders:
            self._stage_responders[name] = Responder(name, self.retries, self._is_optional(name))
        return self._stage_responders[name]

    def rate_limit(self, name: str, account: str, folder: Path | None = None) -> RateLimit:
        """Return the limits a minute of an account at an endpoint; see :meth:`EndpointGroup.rate_limit`."""
        return self._group(name).rate_limit(account, folder)

    def rollout_limit(self, stage: str) -> AdaptiveLimit | None:
        """Return the limit that learns from whole rollouts of a stage, since its LM calls cannot be observed (an LM of
        the user's own kind); None where it learns from LM calls, or there is none."""
        group = self._groups.get(self._group_names.get(stage, ""))
        return None if group is None or group.sees_lm_calls else group.limit

    def group_of(self, name: str) -> str:
        """Return the name of the group that an endpoint shares its slots with."""
        group = self._group_of_endpoint.get(name)
        return name if group is None else group.name

    def emit_totals(self) -> None:
        """Tell the observers what each endpoint has answered, at the end of a run."""
        for name, endpoint in self._endpoints.items():
            if endpoint.answered_requests:
                self._bus.emit(EndpointAsked(self._clock(), name, endpoint.answered_requests))

    def _group(self, name: str) -> EndpointGroup:
        if name not in self._group_of_endpoint:
            group = EndpointGroup(name, self._scheduler, self._bus, self._clock, is_scheduled=False)
            self._group_of_endpoint[name] = group
        return self._group_of_endpoint[name]

    def _add_replicas(self, name: str, group: EndpointGroup, bounds: Bounds | None) -> None:
        replicas = Replicas(name, self.retries, group, bounds, self._is_optional(name))
        self._replicas[name] = replicas
        self._endpoints.update({replica.name: replica for replica in replicas.members})

    def _replica_bounds(self, name: str) -> Bounds:
        """Replicas have limits that adapt even where the run's number of slots is fixed: how many of these each takes
        is not known."""
        slots = self._scheduler.statistics().limit
        return Bounds(start=math.ceil(slots / len(members_of(name))), high=slots)

    def _is_optional(self, name: str) -> bool:
        """Whether only stages that a run can do without ask an endpoint, or a group of them."""
        stages = {
            stage
            for stage, names in self._asked.items()
            if name in names or name == self._group_names.get(stage, stage)
        }
        return bool(stages) and stages <= OPTIONAL_STAGES
