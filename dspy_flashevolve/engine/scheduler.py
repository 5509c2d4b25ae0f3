"""Stage queues and slots: the one way to a provider.

A request waits in the queue of its stage for a slot; a slot is one request in flight. All stages share the slots, so
that none is idle while any request waits. The requests of one step in one stage form a line, and each time that a slot
comes free :func:`priority`, a pure function, decides between the lines. Below the total an endpoint may have a limit of
its own, which may change at any time, and a stage a share; lines that wait for one endpoint do not hold up those of
another.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.slot import Slot, in_slot
from dspy_flashevolve.engine.stages import SlotStatistics, StageStatistics, StageVisit, StageWindow

T = TypeVar("T")
Priority = tuple[float, int]

BASE_WORTH = 0.1
"""Score that every step is worth beside the one that it is expected to reach, since a good child may come from any
parent. Without it a step whose parent scores 0 would get no slot while others ask. A round number: with half or double
of it the order changes only between steps that are worth less than about that score."""
DISCOUNT = 0.9
"""Share of its worth that a step keeps for each commit that it has not seen. A round number: at 1 the age of a step is
no matter, and far below it a step that was overtaken a few times gets no slot any more."""


def priority(depth: int, value: float, version: int, requests: int, held: int, step: int, first: int) -> Priority:
    """Return the sort key of a line: the smallest gets the next slot, which is the one worth most a request.

    A step is worth what it is thought to reach (its parent's score, and its child's gain on the screen once it is
    known), more the nearer its stage is to a commit, less for each commit that it has not seen, shared by the requests
    that it still needs. So the last two requests of a validation go before its first fifty, and those before nothing.

    Args:
        depth: of the stage; deeper is nearer to a commit.
        value: of the step, in score. Infinity (the seed's validation, on which every commit waits) has ``first`` slots
            before all others; what it could use beyond them goes by its requests alone.
        version: the pool's version that the step saw.
        requests: of the line, in flight and waiting.
        held: of these, in flight.
        first: see value.

    >>> few, many = priority(3, 0.5, 7, 2, 0, 4, 32), priority(3, 0.5, 7, 50, 0, 3, 32)
    >>> few < many, priority(3, 0.5, 8, 50, 0, 5, 32) < many
    (True, True)
    """
    if value == math.inf and held < first:
        return (-math.inf, step)
    worth = (BASE_WORTH + (max(0.0, value) if math.isfinite(value) else 0.0)) * depth
    # The logarithm of the share of worth, up to what is the same for all lines: how many commits there are.
    return (version * math.log(DISCOUNT) - math.log(worth) + math.log(max(1, requests)), step)


class Requester(Protocol):
    """Whoever asks: a step, or what stands for one."""

    @property
    def number(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def value(self) -> float: ...


@dataclass(slots=True)
class _Stage:
    """A stage's queue, over all of its lines."""

    name: str
    depth: int
    endpoint: _Endpoint
    share: int | None = None
    waiting: int = 0
    running: int = 0
    visits: int = 0
    served_seconds: float = 0.0

    @property
    def is_full(self) -> bool:
        return self.share is not None and self.running >= self.share


@dataclass(slots=True)
class _Endpoint:
    """The requests of one endpoint, or of a group that shares slots.

    Args:
        measured_seconds: time up to which ``width_seconds`` is known.
        limit: slots that it may have; None for any number.
        room: slots whose requests may be on their way to it, since its limit a minute holds them up there; None for any
            number.
        busy: slots held.
        arriving: slots held by requests that have not reached it yet.
        was_full: a request waited for its limit since :meth:`Scheduler.take_pressure` was last called.
        width_seconds: ``busy``, integrated over the time.
        lines: heap of waiting lines; entries whose priority is not their line's any more are skipped.
    """

    measured_seconds: float
    limit: int | None = None
    room: int | None = None
    busy: int = 0
    arriving: int = 0
    was_full: bool = False
    width_seconds: float = 0.0
    lines: list[tuple[Priority, int, _Line]] = field(default_factory=list["tuple[Priority, int, _Line]"])

    @property
    def is_full(self) -> bool:
        return self.limit is not None and self.busy >= self.limit

    @property
    def is_closed(self) -> bool:
        return self.is_full or (self.room is not None and self.arriving >= self.room)

    def count(self, change: int, now: float) -> None:
        self.width_seconds += self.busy * (now - self.measured_seconds)
        self.measured_seconds = now
        self.busy += change


@dataclass(slots=True, eq=False)
class _Line:
    """The requests of one step in one stage.

    Args:
        queued, began: when its first request came, and when that got a slot (NaN before).
        held: slots that its requests hold.
        followers: requests of its batch that have not come yet.
        waiting: requests that wait for a slot, in order.
        priority: of its entry in the endpoint's heap; None where it has none.
    """

    stage: _Stage
    step: Requester
    queued: float
    began: float = math.nan
    held: int = 0
    followers: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque["asyncio.Future[None]"])
    priority: Priority | None = None


class Scheduler:
    """Gives slots to requests.

    Args:
        limit: number of slots, at least 1.
        stages: their names, in the order in which a step passes them: a later one is nearer to a commit.
        endpoints: stage -> the endpoint that answers its requests; stages that are not named share one.
        clock: seconds.
        on_idle: called each time that a slot comes free for which nobody waits.
        on_visit: told of each visit of a step to a stage, at its end.

    Raises:
        ConfigurationError: a limit under 1.
    """

    def __init__(
        self,
        limit: int,
        stages: Sequence[str],
        endpoints: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_idle: Callable[[], None] = lambda: None,
        on_visit: Callable[[StageVisit], None] = lambda visit: None,
    ) -> None:
        self._limit = _checked(limit)
        self.clock = clock
        self._on_idle = on_idle
        self._on_visit = on_visit
        self._endpoints: dict[str, _Endpoint] = {}
        named = endpoints or {}
        self._stages = {
            name: _Stage(name, depth, self._endpoint(named.get(name, ""))) for depth, name in enumerate(stages, start=1)
        }
        self._lines: dict[tuple[str, int], _Line] = {}
        self._busy = self._peak = self._pushed = 0
        self._limit_seconds, self._limit_measured_seconds = 0.0, math.nan

    @property
    def limit(self) -> int:
        """Number of slots now: the total, or what the endpoints with a limit may have together, if that is less."""
        # A copy, since observers ask from threads of their own.
        limits = [endpoint.limit for endpoint in list(self._endpoints.values()) if endpoint.limit is not None]
        return min(self._limit, sum(limits)) if limits else self._limit

    @property
    def idle(self) -> int:
        """Number of free slots, at the endpoint that has the fewest."""
        endpoints = self._endpoints.values()
        free = [endpoint.limit - endpoint.busy for endpoint in endpoints if endpoint.limit is not None]
        free += [0 for endpoint in endpoints if endpoint.is_closed]
        return max(0, min([self._limit - self._busy, *free]))

    async def run(
        self,
        stage: str,
        step: Requester,
        call: Callable[[], Awaitable[T]],
        *,
        followers: int = 0,
        on_granted: Callable[[], None] | None = None,
    ) -> T:
        """Wait in the stage's queue for a slot, and make a request in it. The one way to a provider.

        Args:
            stage: one of those that the scheduler has.
            step: who asks; its version and value decide when it is its turn.
            call: makes the request; it may find its slot by :func:`current_slot`.
            followers: requests of the same batch that come once this one has its slot.
            on_granted: called when it has its slot.

        Returns:
            What ``call`` returns; what it raises is raised.

        Raises:
            ConfigurationError: no such stage.
        """
        line = self._line(stage, step)
        slot = Slot(
            (step.number, stage),
            partial(self._enter, line),
            partial(self._arrive, line),
            partial(self._leave, line),
            self.clock,
        )
        await slot.take(followers)
        try:
            with in_slot(slot):
                if on_granted is not None:
                    on_granted()
                return await call()
        finally:
            slot.close()

    def resize(self, limit: int, endpoint: str) -> None:
        """Let an endpoint have more or fewer slots from now on. With fewer, requests that hold a slot keep it.

        Raises:
            ConfigurationError: a limit under 1.
        """
        self._count_slots()
        self._endpoint(endpoint).limit = _checked(limit)
        self._hand_on()

    def set_room(self, room: int | None, endpoint: str) -> None:
        """Let at most ``room`` requests be on their way to an endpoint; None for any number.

        An endpoint takes so many requests a minute: what cannot be sent yet waits in its queue, in the run's order.
        """
        asked = self._endpoint(endpoint)
        has_grown = asked.room is not None and (room is None or room > asked.room)
        asked.room = room
        if has_grown:
            self._hand_on()

    def set_shares(self, shares: Mapping[str, int]) -> None:
        """Bound the slots of stages from now on: stage -> slots."""
        for name, slots in shares.items():
            self._stages[name].share = _checked(slots)
        self._hand_on()

    def take_windows(self) -> dict[str, StageWindow]:
        """Return what each stage did since this was last called, for :func:`~.stages.median_shares`."""
        windows: dict[str, StageWindow] = {}
        for name, stage in self._stages.items():
            share = self._limit if stage.share is None else stage.share
            windows[name] = StageWindow(stage.visits, stage.waiting, stage.running, share)
            stage.visits = 0
        return windows

    def take_pressure(self, endpoint: str) -> bool:
        """Return whether a request waited for this endpoint's own limit since this was last called."""
        asked = self._endpoint(endpoint)
        is_full = asked.is_full and any(line.waiting for _, _, line in asked.lines)
        was_full, asked.was_full = asked.was_full or is_full, False
        return was_full

    def busy_at(self, endpoint: str) -> int:
        """Slots held now by requests of one endpoint."""
        return self._endpoint(endpoint).busy

    def waiting_at(self, endpoint: str) -> int:
        """Requests of one endpoint that wait for a slot now."""
        return sum(stage.waiting for stage in self._stages.values() if stage.endpoint is self._endpoints.get(endpoint))

    def width_seconds(self, endpoint: str) -> float:
        """Slots held by requests of one endpoint, integrated over the time so far."""
        asked = self._endpoint(endpoint)
        asked.count(0, self.clock())
        return asked.width_seconds

    def statistics(self) -> SlotStatistics:
        """Return how the slots were used so far, from any thread; what is still held counts once it is given back."""
        stages = {
            name: StageStatistics(stage.waiting, stage.running, stage.served_seconds)
            for name, stage in self._stages.items()
        }
        return SlotStatistics(self._limit, self._peak, self._all_limit_seconds(), stages)

    def _endpoint(self, endpoint: str) -> _Endpoint:
        if endpoint not in self._endpoints:
            self._endpoints[endpoint] = _Endpoint(self.clock())
        return self._endpoints[endpoint]

    def _line(self, stage: str, step: Requester) -> _Line:
        line = self._lines.get((stage, step.number))
        if line is None:
            if stage not in self._stages:
                raise ConfigurationError(f"stage {stage!r} is not one of the run's: {list(self._stages)}.")
            line = self._lines[stage, step.number] = _Line(self._stages[stage], step, self.clock())
        return line

    async def _enter(self, line: _Line, followers: int) -> None:
        """Wait until a request of the line has a slot."""
        stage, endpoint = line.stage, line.stage.endpoint
        if not line.held and not line.waiting:  # its last request may have left while this one waited for nothing
            self._lines[stage.name, line.step.number] = line
        line.followers = followers
        if self._busy < self._limit and not endpoint.is_closed and not stage.is_full:
            self._grant(line)  # nobody waits for a free slot: it would have been handed on at once
            return
        endpoint.was_full = endpoint.was_full or endpoint.is_full
        future = asyncio.get_running_loop().create_future()
        line.waiting.append(future)
        stage.waiting += 1
        self._push(line)
        try:
            await future
        except BaseException:
            if future.done() and not future.cancelled():  # the slot came together with the cancellation
                endpoint.arriving -= 1
                self._leave(line, self.clock())
            elif future in line.waiting:
                line.waiting.remove(future)
                stage.waiting -= 1
                self._push(line)
                self._forget(line)
            raise

    def _grant(self, line: _Line) -> None:
        """Count a slot as held by a request of the line."""
        now, stage = self.clock(), line.stage
        if math.isnan(self._limit_measured_seconds):
            self._limit_measured_seconds = now
        self._count_slots()
        if math.isnan(line.began):
            line.began = now
        line.held += 1
        stage.running += 1
        self._busy += 1
        self._peak = max(self._peak, self._busy)
        stage.endpoint.count(1, now)
        stage.endpoint.arriving += 1

    def _arrive(self, line: _Line) -> None:
        """Count a slot as one whose request has reached its endpoint."""
        endpoint = line.stage.endpoint
        was_closed = endpoint.is_closed
        endpoint.arriving -= 1
        if was_closed:
            self._hand_on()

    def _leave(self, line: _Line, since: float) -> None:
        """Take back a slot that a request of the line has held since then."""
        now, stage = self.clock(), line.stage
        line.held -= 1
        stage.running -= 1
        stage.served_seconds += now - since
        self._count_slots()
        self._busy -= 1
        stage.endpoint.count(-1, now)
        if line.waiting:
            self._push(line)
        self._forget(line)
        self._hand_on()

    def _forget(self, line: _Line) -> None:
        """End the visit of a line without requests."""
        if line.held or line.waiting:
            return
        self._lines.pop((line.stage.name, line.step.number), None)
        if not math.isnan(line.began):
            line.stage.visits += 1
            self._on_visit(StageVisit(line.step.number, line.stage.name, line.queued, line.began, self.clock()))
        line.queued, line.began = self.clock(), math.nan  # a request that has given its slot back may come back

    def _push(self, line: _Line) -> None:
        """Enter a waiting line into its endpoint's heap, if its priority has changed; an older entry counts no more."""
        if not line.waiting:
            line.priority = None
            return
        step = line.step
        requests = line.held + len(line.waiting) + line.followers
        first = max(1, self._limit // 2)
        key = priority(line.stage.depth, step.value, step.version, requests, line.held, step.number, first)
        if key != line.priority:
            line.priority = key
            self._pushed += 1
            heapq.heappush(line.stage.endpoint.lines, (key, self._pushed, line))

    def _hand_on(self) -> None:
        """Give free slots to waiting requests, in order, and tell ``on_idle`` where some are left."""
        while self._busy < self._limit and (line := self._next()) is not None:
            future = line.waiting.popleft()
            line.stage.waiting -= 1
            if future.cancelled():  # its request was cancelled, and has had no time to leave
                self._push(line)
                self._forget(line)
                continue
            self._grant(line)
            self._push(line)
            future.set_result(None)
        if self._busy < self._limit and self.idle:
            self._on_idle()

    def _next(self) -> _Line | None:
        """The line whose request gets the next slot; None where no request can have one."""
        best: _Line | None = None
        for endpoint in self._endpoints.values():
            if endpoint.is_closed:
                continue
            held_up: list[tuple[Priority, int, _Line]] = []
            while endpoint.lines:
                key, _, line = endpoint.lines[0]
                if line.priority != key or not line.waiting:
                    heapq.heappop(endpoint.lines)  # an older entry of the line
                elif line.stage.is_full:
                    held_up.append(heapq.heappop(endpoint.lines))
                else:
                    if best is None or best.priority is None or key < best.priority:
                        best = line
                    break
            for entry in held_up:
                heapq.heappush(endpoint.lines, entry)
        return best

    def _all_limit_seconds(self) -> float:
        """The number of slots, integrated over the time up to now."""
        since, slots = self._limit_measured_seconds, max(self.limit, self._busy)
        return self._limit_seconds + (0.0 if math.isnan(since) else slots * (self.clock() - since))

    def _count_slots(self) -> None:
        """Integrate the number of slots up to now; before it, or the number of requests in flight, changes."""
        self._limit_seconds = self._all_limit_seconds()
        if not math.isnan(self._limit_measured_seconds):
            self._limit_measured_seconds = self.clock()


def _checked(limit: int) -> int:
    if limit < 1:
        raise ConfigurationError(f"slots: the limit is {limit}, expected at least 1.")
    return limit
