"""Stage queues and slots: the one way to a provider.

A request waits in the queue of its stage for a slot; a slot is one request in flight. The slots are shared by all
stages, so that none is idle while any request waits. Requests of one step in one stage stand in one line, and each time
that a slot comes free the order (:func:`priority`, a pure function) decides between lines. Below the total an endpoint
may have a limit of its own, which may change at any time, and a stage a share; lines that wait for one endpoint do not
hold up those of another.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol, TypeVar

import anyio

from dspy_flashevolve.engine.errors import ConfigurationError, TransientError

T = TypeVar("T")
Priority = tuple[float, int]

BASE_WORTH = 0.1
"""Of a step of which nothing is known, in score: new candidates may come from anywhere."""
DISCOUNT = 0.9
"""What a step keeps of its worth for each commit that it has not seen."""


def priority(depth: int, value: float, version: int, requests: int, held: int, step: int, first: int) -> Priority:
    """The line with the smallest priority gets the next slot: what is worth most a request.

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
    """Who asks: a step, or what stands for one."""

    @property
    def number(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def value(self) -> float: ...


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """What became of a stage's requests so far.

    Args:
        waiting, running: now.
        served_seconds: in a slot, summed over requests.
    """

    waiting: int
    running: int
    served_seconds: float


@dataclass(frozen=True, slots=True)
class SlotStatistics:
    """How the slots were used so far.

    Args:
        limit: slots there are, over all endpoints.
        peak: the most that were ever held at once.
        limit_seconds: slots that there were, by all limits, summed over the time since the first request. Where a
            limit falls below what is in flight, requests keep their slots: these count as long as they are held.
        stages: stage -> its requests.
    """

    limit: int
    peak: int
    limit_seconds: float
    stages: dict[str, StageStatistics]

    @property
    def busy(self) -> int:
        """Slots held now."""
        return sum(one.running for one in self.stages.values())

    @property
    def busy_seconds(self) -> float:
        """Summed over slots and time."""
        return sum(one.served_seconds for one in self.stages.values())


@dataclass(frozen=True, slots=True)
class StageVisit:
    """A step's time in one stage: its requests there, from the first that came to the last that left.

    Args:
        queued, began, ended: when the first came, when the first had a slot, when the last left; seconds of the clock.
    """

    step: int
    stage: str
    queued: float
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class StageWindow:
    """What a stage did in the last window: steps it finished with, requests that wait and run, slots it may have."""

    finished: int
    waiting: int
    running: int
    share: int


def median_shares(windows: Mapping[str, StageWindow], slots: int) -> dict[str, int]:
    """The slots that each stage may have next: FlashEvolve's rule (arXiv 2605.08520, section 3.4) as a share of slots.

    The median is taken over the stages that had work. A stage that finished under half of it, has requests waiting and
    all of its share in use, may have a slot more; one over twice the median a slot fewer, and never under 1.

    >>> slow, even, fast = StageWindow(2, 9, 4, 4), StageWindow(6, 0, 1, 8), StageWindow(13, 0, 4, 8)
    >>> median_shares({"propose": slow, "screen": even, "rollout": fast}, 8)
    {'propose': 5, 'screen': 8, 'rollout': 7}
    """
    active = [one.finished for one in windows.values() if one.finished or one.running or one.waiting]
    middle = median(active) if active else 0
    shares: dict[str, int] = {}
    for name, one in windows.items():
        starved = 2 * one.finished < middle and one.waiting > 0 and one.running >= one.share
        change = 1 if starved else -1 if one.finished > 2 * middle else 0
        shares[name] = max(1, min(slots, one.share + change))
    return shares


@dataclass(slots=True)
class _Stage:
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
    """What is in flight at one endpoint; ``width_seconds`` is ``busy`` summed over the time up to ``since``.

    ``coming`` counts slots whose holder has not asked yet; with ``room`` no more are given than it is above them.
    """

    since: float
    limit: int | None = None
    room: int | None = None
    busy: int = 0
    coming: int = 0
    pressed: bool = False
    width_seconds: float = 0.0
    lines: list[tuple[Priority, int, _Line]] = field(default_factory=list["tuple[Priority, int, _Line]"])

    @property
    def is_full(self) -> bool:
        return self.limit is not None and self.busy >= self.limit

    @property
    def is_closed(self) -> bool:
        return self.is_full or (self.room is not None and self.coming >= self.room)

    def count(self, change: int, now: float) -> None:
        self.width_seconds += self.busy * (now - self.since)
        self.since = now
        self.busy += change


@dataclass(slots=True, eq=False)
class _Line:
    """The requests of one step in one stage; ``behind`` are those of its batch that have not come yet."""

    stage: _Stage
    step: Requester
    queued: float
    began: float = math.nan
    held: int = 0
    behind: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque["asyncio.Future[None]"])
    priority: Priority | None = None


class Slot:
    """One slot of a request, which may be given back for a while from deep inside it.

    A request that must wait, since its provider said when to come back, is not in flight: its slot is of use to others.
    Where a rollout has several LM calls under way in its one slot, the first that pauses gives the slot back, and the
    first that goes on takes it again.
    """

    def __init__(self, scheduler: Scheduler, line: _Line) -> None:
        self._scheduler = scheduler
        self._line = line
        self._taking: anyio.Lock | None = None
        self._closed = False
        self._pauses = 0
        self.paused_since: float | None = None
        """When the first thing in it that waits to be asked for again began to; None where nothing does."""
        self._left_seconds = math.inf
        self._since = 0.0
        self.held = False
        self._is_coming = False
        self.time_scope: anyio.CancelScope | None = None
        """Ends the work in the slot at its deadline; the time of a pause does not count. None for no bound."""
        self.shield_scope: anyio.CancelScope | None = None
        """Around what is not cancelled with the rest: a metric in a thread."""

    @property
    def step_and_stage(self) -> tuple[int, str]:
        """Number of the step, and the stage, whose request is in it."""
        return self._line.step.number, self._line.stage.name

    async def take(self, behind: int = 0) -> None:
        """Wait for the slot in the run's order, unless it is held. One that has been closed takes none."""
        if self.held or self._closed:
            return
        async with self._taking or nullcontext():  # others inside the same request may want it back, too
            if self.held or self._closed:
                return
            await self._scheduler._enter(self._line, behind)  # pyright: ignore[reportPrivateUsage]
            self.held = self._is_coming = True
            self._since = self._scheduler.clock()
            if self._closed:  # the holder was cancelled while the slot was awaited for it
                self._give_back()

    def mark_arrived(self) -> None:
        """The request in it is about to be sent, or waits for the limit of who is asked."""
        if self._is_coming:
            self._is_coming = False
            self._scheduler._arrived(self._line)  # pyright: ignore[reportPrivateUsage]

    @asynccontextmanager
    async def released(self, keep: bool = False) -> AsyncGenerator[None, None]:
        """Give the slot back for the block, and take it again after it. A block that raises ends without the slot.

        Args:
            keeps: it is not given back: a thread waits.
        """
        if not keep:
            self._taking = self._taking or anyio.Lock()
            self._give_back()
        with self.paused():
            yield
            await self.take()

    @contextmanager
    def paused(self, is_retry: bool = True) -> Generator[None, None, None]:
        """The block waits, and keeps the slot: the deadline moves on until all that waits in the slot goes on.

        Args:
            is_retry: it waits to be asked for again; False where it is not its turn yet.
        """
        self._pauses += 1
        if is_retry and self.paused_since is None:
            self.paused_since = self._scheduler.clock()
        if self._pauses == 1 and self.time_scope is not None:
            self._left_seconds = self.time_scope.deadline - anyio.current_time()
            self.time_scope.deadline = math.inf
        try:
            yield
        finally:
            self._pauses -= 1
            self.paused_since = self.paused_since if self._pauses else None
            if not self._pauses and self.time_scope is not None:
                self.time_scope.deadline = anyio.current_time() + self._left_seconds

    def close(self) -> None:
        """Give the slot back for good."""
        self._closed = True
        self._give_back()

    def _give_back(self) -> None:
        if self.held:
            self.mark_arrived()
            self.held = False
            self._scheduler._leave(self._line, self._since)  # pyright: ignore[reportPrivateUsage]


_slot: ContextVar[Slot | None] = ContextVar("flashevolve_slot", default=None)


SLOT_SETTING = "flashevolve_slot"
"""The setting of dspy's with the slot, for threads that have dspy's settings and no context of ours."""


def current_slot() -> Slot | None:
    """The slot in which this code runs, which threads and tasks of a request inherit; None outside of any."""
    return _slot.get()


@contextmanager
def shielded() -> Generator[None, None, None]:
    """What is inside is not cancelled from without, but ended where a request that it makes takes too long.

    Raises:
        TransientError: it was.
    """
    slot = current_slot()
    with anyio.CancelScope(shield=True) as scope:
        if slot is not None:
            slot.shield_scope = scope
        try:
            yield
        finally:
            if slot is not None and not scope.cancel_called:  # else its thread, which is left behind, is to see it
                slot.shield_scope = None
    if scope.cancelled_caught:
        raise TransientError("no answer in time to a request of the metric's", of_request=True)


class Scheduler:
    """Gives slots to requests.

    Args:
        limit: slots, at least 1.
        stages: their names, in the order of the way that a step takes: a later one is nearer to a commit.
        endpoints: stage -> the endpoint that answers its requests; those that are not named share one.
        clock: seconds.
        idle: called each time that a slot comes free which nobody waits for.
        visited: told of each visit of a step to a stage, at its end.

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
        self._idle = on_idle
        self._visited = on_visit
        self._endpoints: dict[str, _Endpoint] = {}
        named = endpoints or {}
        self._stages = {
            name: _Stage(name, depth, self._at(named.get(name, ""))) for depth, name in enumerate(stages, start=1)
        }
        self._lines: dict[tuple[str, int], _Line] = {}
        self._busy = self._peak = self._entered = 0
        self._limit_seconds, self._limit_since = 0.0, math.nan

    @property
    def limit(self) -> int:
        """Slots there are now, by the total and by what the endpoints that are limited may have together."""
        allowed = [one.limit for one in list(self._endpoints.values()) if one.limit is not None]
        return min(self._limit, sum(allowed)) if allowed else self._limit

    @property
    def idle(self) -> int:
        """Slots that are free, at the endpoint that has the fewest. None is while somebody waits for it."""
        free = [one.limit - one.busy for one in self._endpoints.values() if one.limit is not None]
        free += [0 for one in self._endpoints.values() if one.is_closed]
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
            behind: requests of the same batch that will come when this one has its slot.
            granted: called when it has.

        Returns:
            What ``call`` returns; what it raises is raised.

        Raises:
            ConfigurationError: no such stage.
        """
        slot = Slot(self, self._line(stage, step))
        await slot.take(followers)
        token = _slot.set(slot)
        try:
            if on_granted is not None:
                on_granted()
            return await call()
        finally:
            _slot.reset(token)
            slot.close()

    def resize(self, limit: int, endpoint: str) -> None:
        """Let an endpoint have more or fewer slots from now on; with fewer, those who hold one keep it until the end.

        Raises:
            ConfigurationError: a limit under 1.
        """
        self._count_slots()
        self._at(endpoint).limit = _checked(limit)
        self._hand_on()

    def set_room(self, room: int | None, endpoint: str) -> None:
        """Let so many slots of an endpoint be held by those who have not asked yet; None for any number.

        Who is asked takes only so many a minute: what cannot be sent yet waits in the queue, in the run's order.
        """
        at = self._at(endpoint)
        more = at.room is not None and (room is None or room > at.room)
        at.room = room
        if more:
            self._hand_on()

    def set_shares(self, shares: Mapping[str, int]) -> None:
        """Let stages have at most so many slots each from now on."""
        for name, slots in shares.items():
            self._stages[name].share = _checked(slots)
        self._hand_on()

    def take_windows(self) -> dict[str, StageWindow]:
        """What each stage did since this was last asked, for :func:`median_shares`."""
        found: dict[str, StageWindow] = {}
        for name, one in self._stages.items():
            share = self._limit if one.share is None else one.share
            found[name] = StageWindow(one.visits, one.waiting, one.running, share)
            one.visits = 0
        return found

    def take_pressure(self, endpoint: str) -> bool:
        """Whether a request waited for this endpoint's own limit, at any time since this was last asked."""
        at = self._at(endpoint)
        waits = at.is_full and any(line.waiting for _, _, line in at.lines)
        pressed, at.pressed = at.pressed or waits, False
        return pressed

    def busy_at(self, endpoint: str) -> int:
        """Slots held now by requests of one endpoint."""
        return self._at(endpoint).busy

    def waiting_at(self, endpoint: str) -> int:
        """Requests of one endpoint that wait for a slot now."""
        return sum(stage.waiting for stage in self._stages.values() if stage.endpoint is self._endpoints.get(endpoint))

    def width_seconds(self, endpoint: str) -> float:
        """Slots held by requests of one endpoint, summed over the time so far."""
        at = self._at(endpoint)
        at.count(0, self.clock())
        return at.width_seconds

    def statistics(self) -> SlotStatistics:
        """How the slots were used so far, from any thread; what is still held counts once it is given back."""
        stages = {
            name: StageStatistics(one.waiting, one.running, one.served_seconds) for name, one in self._stages.items()
        }
        return SlotStatistics(self._limit, self._peak, self._all_limit_seconds(), stages)

    def _at(self, endpoint: str) -> _Endpoint:
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

    async def _enter(self, line: _Line, behind: int) -> None:
        """Have a slot for a request of the line, waiting for its turn."""
        stage, at = line.stage, line.stage.endpoint
        if not line.held and not line.waiting:  # its last request may have left while this one waited for nothing
            self._lines[stage.name, line.step.number] = line
        line.behind = behind
        if self._busy < self._limit and not at.is_closed and not stage.is_full:
            self._grant(line)  # what is free has nobody who waits for it: it is handed on at once
            return
        at.pressed = at.pressed or at.is_full
        future = asyncio.get_running_loop().create_future()
        line.waiting.append(future)
        stage.waiting += 1
        self._place(line)
        try:
            await future
        except BaseException:
            if future.done() and not future.cancelled():
                stage.endpoint.coming -= 1
                self._leave(line, self.clock())
            elif future in line.waiting:
                line.waiting.remove(future)
                stage.waiting -= 1
                self._place(line)
                self._forget(line)
            raise

    def _grant(self, line: _Line) -> None:
        now, stage = self.clock(), line.stage
        if math.isnan(self._limit_since):
            self._limit_since = now
        self._count_slots()
        if math.isnan(line.began):
            line.began = now
        line.held += 1
        stage.running += 1
        self._busy += 1
        self._peak = max(self._peak, self._busy)
        stage.endpoint.count(1, now)
        stage.endpoint.coming += 1

    def _arrived(self, line: _Line) -> None:
        at = line.stage.endpoint
        was_closed = at.is_closed
        at.coming -= 1
        if was_closed:
            self._hand_on()

    def _leave(self, line: _Line, since: float) -> None:
        now, stage = self.clock(), line.stage
        line.held -= 1
        stage.running -= 1
        stage.served_seconds += now - since
        self._count_slots()
        self._busy -= 1
        stage.endpoint.count(-1, now)
        if line.waiting:
            self._place(line)
        self._forget(line)
        self._hand_on()

    def _forget(self, line: _Line) -> None:
        """Let go of a line that has come to its end."""
        if line.held or line.waiting:
            return
        self._lines.pop((line.stage.name, line.step.number), None)
        if not math.isnan(line.began):
            line.stage.visits += 1
            self._visited(StageVisit(line.step.number, line.stage.name, line.queued, line.began, self.clock()))
        line.queued, line.began = self.clock(), math.nan  # a request in a pause may come back to it

    def _place(self, line: _Line) -> None:
        """Put a line where it belongs among those that wait; the place that it had before counts no more."""
        if not line.waiting:
            line.priority = None
            return
        step = line.step
        requests = line.held + len(line.waiting) + line.behind
        first = max(1, self._limit // 2)
        place = priority(line.stage.depth, step.value, step.version, requests, line.held, step.number, first)
        if place != line.priority:
            line.priority = place
            self._entered += 1
            heapq.heappush(line.stage.endpoint.lines, (place, self._entered, line))

    def _hand_on(self) -> None:
        """Give free slots to those who wait, in order, and say so where some are left."""
        while self._busy < self._limit and (line := self._next()) is not None:
            future = line.waiting.popleft()
            line.stage.waiting -= 1
            if future.cancelled():  # whoever waited was cancelled, and has not run since
                self._place(line)
                self._forget(line)
                continue
            self._grant(line)
            self._place(line)
            future.set_result(None)
        if self._busy < self._limit and self.idle:
            self._idle()

    def _next(self) -> _Line | None:
        best: _Line | None = None
        for at in self._endpoints.values():
            if at.is_closed:
                continue
            held_up: list[tuple[Priority, int, _Line]] = []
            while at.lines:
                place, _, line = at.lines[0]
                if line.priority != place or not line.waiting:
                    heapq.heappop(at.lines)  # it stands elsewhere by now
                elif line.stage.is_full:
                    held_up.append(heapq.heappop(at.lines))
                else:
                    if best is None or best.priority is None or place < best.priority:
                        best = line
                    break
            for entry in held_up:
                heapq.heappush(at.lines, entry)
        return best

    def _all_limit_seconds(self) -> float:
        since, slots = self._limit_since, max(self.limit, self._busy)
        return self._limit_seconds + (0.0 if math.isnan(since) else slots * (self.clock() - since))

    def _count_slots(self) -> None:
        """Sum up the slots that there have been; before their number or that of requests in flight changes."""
        self._limit_seconds = self._all_limit_seconds()
        if not math.isnan(self._limit_since):
            self._limit_since = self.clock()


def _checked(limit: int) -> int:
    if limit < 1:
        raise ConfigurationError(f"slots: the limit is {limit}, expected at least 1.")
    return limit
