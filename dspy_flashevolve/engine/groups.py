"""Endpoints that share slots: those that one stage asks within one slot, and stages that ask the same endpoint.

A group has as many slots as its most limited part takes: by the adaptive limit that its endpoints share, and by what
the replicas of one model take together. Limits a minute decide how many of these slots go to requests that have to wait
before they are sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from dspy_flashevolve.engine.events import EventBus, LimitChanged
from dspy_flashevolve.engine.limits import AdaptiveLimit, Bounds
from dspy_flashevolve.engine.rates import RateLimit
from dspy_flashevolve.engine.scheduler import Scheduler
from dspy_flashevolve.engine.shared_rates import SharedTimes

REPLICA_SEPARATOR = " | "
"""Stands between the names of replicas in the name of their model's endpoint."""


class Limited(Protocol):
    """What takes so many requests at once."""

    @property
    def limit(self) -> int: ...


class EndpointGroup:
    """Endpoints that share the slots of one queue in the scheduler.

    Args:
        name: of the endpoints, joined by " + "; the scheduler knows the group by it.
        scheduler: gives the slots.
        bus: told of every change of a limit.
        clock: seconds.
        bounds: of the adaptive limit that the endpoints share, beside replicas, which have limits of their own; None
            where the run's number of slots is the only limit.
        is_scheduled: a stage asks it; else it is a single endpoint that only the user's own code asks, without a slot
            that is known to be for it.
    """

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        bus: EventBus,
        clock: Callable[[], float],
        bounds: Bounds | None = None,
        is_scheduled: bool = True,
    ) -> None:
        self.name, self.is_scheduled = name, is_scheduled
        self._scheduler, self._bus, self._clock = scheduler, bus, clock
        self._models: list[Limited] = []
        self._slots: int | None = None
        self._rate_limits: dict[str, RateLimit] = {}
        self.sees_lm_calls = False
        """An LM call was paced here, so that the limit needs no signals from whole rollouts."""
        self.limit = None if bounds is None else self.adapt(name, bounds, lambda: scheduler.take_pressure(name))

    @property
    def width(self) -> int:
        """Slots that requests to the group hold now."""
        return self._scheduler.busy_at(self.name)

    @property
    def width_seconds(self) -> float:
        """The width, integrated over the time so far."""
        return self._scheduler.width_seconds(self.name)

    @property
    def run_limit(self) -> int:
        """Slots that the run has now."""
        return self._scheduler.limit

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot of the group."""
        return self._scheduler.waiting_at(self.name)

    def adapt(self, name: str, bounds: Bounds, take_pressure: Callable[[], bool]) -> AdaptiveLimit:
        """Make an adaptive limit, whose changes change the group's slots and are told to the observers."""

        def on_change(before: int, after: int, reason: str) -> None:
            self.update_slots()
            self._bus.emit(LimitChanged(self._clock(), name, before, after, reason))

        return AdaptiveLimit(bounds, self._clock, take_pressure, on_change)

    def add_model(self, replicas: Limited) -> None:
        """Let the group's slots follow what the replicas of a model take together."""
        self._models.append(replicas)

    def update_slots(self) -> None:
        """Give the group as many slots as its most limited part takes."""
        limits = [part.limit for part in (*self._models, self.limit) if part is not None]
        if limits and self._slots != min(limits) and self.is_scheduled:
            self._slots = min(limits)
            self._scheduler.resize(self._slots, self.name)

    def mark_lm_call(self) -> None:
        """Record that an LM call was paced, so that the limit hears of each call."""
        self.sees_lm_calls = True

    def rate_limit(self, account: str, folder: Path | None) -> RateLimit:
        """Return the limits a minute of an account, one object an account.

        Args:
            folder: where several runs on one account tell each other what they have sent; None for nowhere.
        """

        def shared_times() -> SharedTimes | None:
            ahead = time.time() - self._clock()  # the processes have clocks of their own, and one epoch
            return None if folder is None else SharedTimes(folder / account, lambda: self._clock() + ahead)

        if account not in self._rate_limits:
            self._rate_limits[account] = RateLimit(self._clock, shared_times, self._update_room)
        return self._rate_limits[account]

    def _update_room(self) -> None:
        """Let no more requests into slots than their limits a minute can use soon: what waits for long waits in its
        queue, in the run's order."""
        if not self.is_scheduled:
            return
        rate_limits = self._rate_limits.values()
        known = [rate_limit for rate_limit in rate_limits if rate_limit.is_known]
        if len(known) < len(rate_limits) and REPLICA_SEPARATOR in self.name:
            known = []  # what one replica has no room for, another takes
        room = sum(max(0, rate_limit.ahead - rate_limit.waiting) for rate_limit in known) if known else None
        self._scheduler.set_room(room, self.name)


def groups_of(asked: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return stage -> the name of the group of endpoints that it asks: those with an endpoint in common are one group.

    >>> groups_of({"rollout": ["a", "b"], "propose": ["c"], "validate": ["b", "d"]})
    {'rollout': 'a + b + d', 'propose': 'c', 'validate': 'a + b + d'}
    >>> groups_of({"rollout": ["a | b"], "propose": ["b"]})["rollout"]
    'a | b + b'
    """
    united: list[frozenset[str]] = []
    for names in map(frozenset, asked.values()):
        touching = [other for other in united if each_by_itself(other) & each_by_itself(names)]
        united = [other for other in united if other not in touching] + [names.union(*touching)]
    group = {name: " + ".join(sorted(names)) for names in united for name in names}
    return {stage: group[name] for stage, names in asked.items() for name in list(names)[:1]}


def members_of(name: str) -> list[str]:
    """Return the names of the replicas that a name stands for; the name itself where it stands for one endpoint."""
    return name.split(REPLICA_SEPARATOR)


def each_by_itself(names: Iterable[str]) -> set[str]:
    """Return the names of single endpoints among, or in, some names."""
    return {member for name in names for member in members_of(name)}
