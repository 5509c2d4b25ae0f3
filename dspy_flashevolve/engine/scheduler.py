"""Queues and slots: the one way to a provider, for requests. How many steps run at once: gepa/admission.py.

A request waits in a queue for a slot; a slot is one request in flight. All stages share the slots, so
that none is idle while any request waits. The requests of one step in one stage form a line, and each time that a slot
comes free :func:`priority`, a pure function, decides between the lines. Below the total a queue may have a limit of
its own, which may change at any time, and a stage a share; lines that wait for one queue do not hold up those of
another.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Protocol, TypeVar

import anyio

from dspy_flashevolve.engine.errors import ConfigurationError, TransientError

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


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """Requests of a stage that wait, and that hold slots, now; and the time that its requests have spent in slots."""

    waiting: int
    running: int
    served_seconds: float


@dataclass(frozen=True, slots=True)
class SlotStatistics:
    """How the slots were used so far.

    Args:
        limit, peak: slots that there are, over all queues; that were held at once at most.
        limit_seconds: the number of slots, integrated over the time since the first request. Where a limit falls
            below what is in flight, requests keep their slots, which count as long as they are held.
    """

    limit: int
    peak: int
    limit_seconds: float
    stages: dict[str, StageStatistics]

    @property
    def busy(self) -> int:
        """Slots held now."""
        return sum(stage.running for stage in self.stages.values())

    @property
    def busy_seconds(self) -> float:
        """Time for which slots were held, summed over slots."""
        return sum(stage.served_seconds for stage in self.stages.values())


@dataclass(frozen=True, slots=True)
class StageVisit:
    """A step's time in one stage: seconds when its first request there came, when that had a slot, and when the last
    left."""

    step: int
    stage: str
    queued: float
    began: float
    ended: float


class Slot:
    """One slot of a request, which may be given back for a while from deep inside the request.

    A request that must wait, since its provider said when to come back, is not in flight: others can use its slot.
    Where a rollout has several LM calls under way in its one slot, the first that pauses gives the slot back, and the
    first that goes on takes it again.

    Args:
        scheduler, line: whose slot it is.
    """

    def __init__(self, scheduler: Scheduler, line: _Line) -> None:
        self.step_and_stage = line.step.number, line.stage.name
        """Number of the step, and the stage, whose request is in it."""
        self._scheduler, self._line = scheduler, line
        self._taking: anyio.Lock | None = None
        self._is_closed = False
        self._pauses = 0
        self.is_retrying = False
        """An LM call in it waits for its next attempt."""
        self._left_seconds = math.inf
        self._taken_seconds = 0.0
        self.is_held = False
        self.time_scope: anyio.CancelScope | None = None
        """Ends the work in the slot at its deadline, which moves on during a pause. None where nothing does."""
        self.shield_scope: anyio.CancelScope | None = None
        """Around work that is not cancelled with the rest: a metric in a thread."""

    async def take(self, followers: int = 0) -> None:
        """Wait for the slot in the run's order, unless it is held; ``followers`` requests of the same batch come once
        it is. Once closed, it takes none."""
        if self.is_held or self._is_closed:
            return
        async with self._taking or nullcontext():  # others inside the same request may want it back, too
            if self.is_held or self._is_closed:
                return
            await self._scheduler.enter(self._line, followers)
            self.is_held = True
            self._taken_seconds = self._scheduler.clock()
            if self._is_closed:  # the holder was cancelled while the slot was awaited for it
                self._give_back()

    @asynccontextmanager
    async def released(self, keep: bool = False, is_retry: bool = True) -> AsyncGenerator[None, None]:
        """Give the slot back for the block (unless ``keep``: a thread waits), and take it again after it. A block that
        raises ends without the slot."""
        lends = self.is_held and not (keep or is_retry)
        if not keep:
            self._taking = self._taking or anyio.Lock()
            self._give_back()
        with self.paused(is_retry):
            with self._scheduler.lending() if lends else nullcontext():
                yield
            await self.take()

    async def run_beside(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make another request of the same step and stage, in a slot of its own.

        A run inside a request gives the request's slot back while it waits (:meth:`released`), and makes its own
        requests by this: so the requests of both runs together stay within the limits of the outer one.
        """
        slot = Slot(self._scheduler, self._line)
        await slot.take()
        try:
            with in_slot(slot):
                return await call()
        finally:
            slot.close()

    @contextmanager
    def paused(self, is_retry: bool = True) -> Generator[None, None, None]:
        """Let the deadline of the work in the slot move on during the block, which waits for the next attempt, or (not
        ``is_retry``) for its turn."""
        self._pauses += 1
        self.is_retrying = self.is_retrying or is_retry
        if self._pauses == 1 and self.time_scope is not None:
            self._left_seconds = self.time_scope.deadline - anyio.current_time()
            self.time_scope.deadline = math.inf
        try:
            yield
        finally:
            self._pauses -= 1
            self.is_retrying = self.is_retrying and self._pauses > 0
            if not self._pauses and self.time_scope is not None:
                self.time_scope.deadline = anyio.current_time() + self._left_seconds

    def close(self) -> None:
        """Give the slot back for good."""
        self._is_closed = True
        self._give_back()

    def _give_back(self) -> None:
        if self.is_held:
            self.is_held = False
            self._scheduler.leave(self._line, self._taken_seconds)


_slot: ContextVar[Slot | None] = ContextVar("flashevolve_slot", default=None)
SLOT_SETTING = "flashevolve_slot"
"""The setting of dspy's with the slot, for threads that have dspy's settings and no context of ours."""


@contextmanager
def in_slot(slot: Slot | None) -> Generator[None, None, None]:
    """Make a slot the current one for the block; None for a block that is in none."""
    token = _slot.set(slot)
    try:
        yield
    finally:
        _slot.reset(token)


def current_slot() -> Slot | None:
    """Return the slot in which this code runs, which threads and tasks of a request inherit; None outside of any."""
    return _slot.get()


@contextmanager
def shielded() -> Generator[None, None, None]:
    """Shield the block from cancellation, but end it, with a TransientError, where a request that it makes takes too
    long."""
    slot = current_slot()
    with anyio.CancelScope(shield=True) as scope:
        if slot is not None:
            slot.shield_scope = scope
        try:
            yield
        finally:
            if slot is not None and not scope.cancel_called:  # else the thread that is left behind has to see it
                slot.shield_scope = None
    if scope.cancelled_caught:
        raise TransientError("no answer in time to a request of the metric's", of_request=True)


@dataclass(slots=True)
class _Stage:
    """A stage, over all of its lines."""

    name: str
    depth: int
    queue: _Queue
    share: int | None = None
    waiting: int = 0
    running: int = 0
    served_seconds: float = 0.0

    @property
    def is_full(self) -> bool:
        return self.share is not None and self.running >= self.share


@dataclass(slots=True)
class _Queue:
    """The requests of one queue of servers: at most ``limit`` in slots; ``lines`` are those that wait, with their
    priorities."""

    limit: int | None = None
    busy: int = 0
    was_full: bool = False
    lines: dict[_Line, Priority] = field(default_factory=dict["_Line", Priority])

    @property
    def is_full(self) -> bool:
        return self.limit is not None and self.busy >= self.limit


@dataclass(slots=True, eq=False)
class _Line:
    """The requests of one step in one stage; ``followers`` of its batch have not come yet. ``began`` is NaN before its
    first request has a slot."""

    stage: _Stage
    step: Requester
    queued: float
    began: float = math.nan
    held: int = 0
    followers: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque["asyncio.Future[None]"])


class Scheduler:
    """Gives slots to requests.

    Args:
        limit: number of slots, at least 1.
        stages: their names, in the order in which a step passes them: a later one is nearer to a commit.
        queues: stage -> the queue of the servers that its requests ask; stages that are not named share one.
        on_idle: called each time that a slot comes free for which nobody waits.
        on_visit: told of each visit of a step to a stage, at its end.

    Raises:
        ConfigurationError: a limit under 1.
    """

    def __init__(
        self,
        limit: int,
        stages: Sequence[str],
        queues: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_idle: Callable[[], None] = lambda: None,
        on_visit: Callable[[StageVisit], None] = lambda visit: None,
    ) -> None:
        self._limit = _checked(limit)
        self.clock = clock
        self._on_idle = on_idle
        self._on_visit = on_visit
        self._queues: dict[str, _Queue] = {}
        named = queues or {}
        self._stages = {
            name: _Stage(name, depth, self._queue(named.get(name, ""))) for depth, name in enumerate(stages, start=1)
        }
        self._lines: dict[tuple[str, int], _Line] = {}
        self._busy = self._peak = self._lent = 0
        self._limit_seconds, self._limit_measured_seconds = 0.0, math.nan

    @property
    def limit(self) -> int:
        """Number of slots now: the total, or what the queues with a limit may have together, if that is less."""
        # A copy, since observers ask from threads of their own.
        limits = [queue.limit for queue in list(self._queues.values()) if queue.limit is not None]
        return min(self._limit, sum(limits)) if limits else self._limit

    @property
    def idle(self) -> int:
        """Number of free slots, at the queue that has the fewest; those of requests that wait for the end of a pause
        are not free: more steps would only wait, too."""
        queues = self._queues.values()
        free = [queue.limit - queue.busy for queue in queues if queue.limit is not None]
        return max(0, min([self._limit - self._busy, *free]) - self._lent)

    @contextmanager
    def lending(self) -> Generator[None, None, None]:
        """Let a request's slot be used by others for the block, but not count as free."""
        self._lent += 1
        try:
            yield
        finally:
            self._lent -= 1

    async def run(
        self,
        stage: str,
        step: Requester,
        call: Callable[[], Awaitable[T]],
        *,
        followers: int = 0,
        on_granted: Callable[[], None] | None = None,
    ) -> T:
        """Wait for a slot, and make a request in it. The one way to a provider.

        The version and value of ``step`` decide when it is its turn. ``followers`` requests of the same batch come
        once it has its slot, and ``on_granted`` was called; ``call`` may find the slot by :func:`current_slot`.

        Raises:
            ConfigurationError: no such stage.
        """
        slot = Slot(self, self._line(stage, step))
        await slot.take(followers)
        try:
            with in_slot(slot):
                if on_granted is not None:
                    on_granted()
                return await call()
        finally:
            slot.close()

    def resize(self, limit: int, queue: str) -> None:
        """Let a queue have more or fewer slots from now on, at least 1. With fewer, requests that hold a slot keep
        it."""
        self._count_slots()
        self._queue(queue).limit = _checked(limit)
        self._hand_on()

    def set_shares(self, shares: Mapping[str, int]) -> None:
        """Bound the slots of stages from now on: stage -> slots."""
        for name, slots in shares.items():
            self._stages[name].share = _checked(slots)
        self._hand_on()

    def take_pressure(self, queue: str) -> bool:
        """Return whether a request waited for this queue's own limit since this was last called."""
        asked = self._queue(queue)
        is_full = asked.is_full and bool(asked.lines)
        was_full, asked.was_full = asked.was_full or is_full, False
        return was_full

    def statistics(self) -> SlotStatistics:
        """Return how the slots were used so far, from any thread; what is still held counts once it is given back."""
        stages = {
            name: StageStatistics(stage.waiting, stage.running, stage.served_seconds)
            for name, stage in self._stages.items()
        }
        return SlotStatistics(self._limit, self._peak, self._all_limit_seconds(), stages)

    def _queue(self, queue: str) -> _Queue:
        return self._queues.setdefault(queue, _Queue())

    def _line(self, stage: str, step: Requester) -> _Line:
        line = self._lines.get((stage, step.number))
        if line is None:
            if stage not in self._stages:
                raise ConfigurationError(f"stage {stage!r} is not one of the run's: {list(self._stages)}.")
            line = self._lines[stage, step.number] = _Line(self._stages[stage], step, self.clock())
        return line

    async def enter(self, line: _Line, followers: int) -> None:
        """Wait until a request of the line has a slot."""
        stage, queue = line.stage, line.stage.queue
        if not line.held and not line.waiting:  # its last request may have left while this one waited for nothing
            self._lines[stage.name, line.step.number] = line
        line.followers = followers
        if self._busy < self._limit and not queue.is_full and not stage.is_full:
            self._grant(line)  # nobody waits for a free slot: it would have been handed on at once
            return
        queue.was_full = queue.was_full or queue.is_full
        future = asyncio.get_running_loop().create_future()
        line.waiting.append(future)
        stage.waiting += 1
        self._place(line)
        try:
            await future
        except BaseException:
            if future.done() and not future.cancelled():  # the slot came together with the cancellation
                self.leave(line, self.clock())
            elif future in line.waiting:
                line.waiting.remove(future)
                stage.waiting -= 1
                self._place(line)
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
        stage.queue.busy += 1

    def leave(self, line: _Line, since: float) -> None:
        """Take back a slot that a request of the line has held since then."""
        now, stage = self.clock(), line.stage
        line.held -= 1
        stage.running -= 1
        stage.served_seconds += now - since
        self._count_slots()
        self._busy -= 1
        stage.queue.busy -= 1
        if line.waiting:
            self._place(line)
        self._forget(line)
        self._hand_on()

    def _forget(self, line: _Line) -> None:
        """End the visit of a line without requests."""
        if line.held or line.waiting:
            return
        self._lines.pop((line.stage.name, line.step.number), None)
        if not math.isnan(line.began):
            self._on_visit(StageVisit(line.step.number, line.stage.name, line.queued, line.began, self.clock()))
        line.queued, line.began = self.clock(), math.nan  # a request that has given its slot back may come back

    def _place(self, line: _Line) -> None:
        """Put a line among those that wait for its queue, in its place by now; or take it out."""
        if not line.waiting:
            line.stage.queue.lines.pop(line, None)
            return
        step, requests = line.step, line.held + len(line.waiting) + line.followers
        line.stage.queue.lines[line] = priority(
            line.stage.depth, step.value, step.version, requests, line.held, step.number, max(1, self._limit // 2)
        )

    def _hand_on(self) -> None:
        """Give free slots to waiting requests, in order, and tell ``on_idle`` where some are left."""
        while self._busy < self._limit and (line := self._next()) is not None:
            future = line.waiting.popleft()
            line.stage.waiting -= 1
            if future.cancelled():  # its request was cancelled, and has had no time to leave
                self._place(line)
                self._forget(line)
                continue
            self._grant(line)
            self._place(line)
            future.set_result(None)
        if self._busy < self._limit and self.idle:
            self._on_idle()

    def _next(self) -> _Line | None:
        """The line whose request gets the next slot; None where no request can have one."""
        waiting = [
            (key, line)
            for queue in self._queues.values()
            if not queue.is_full
            for line, key in queue.lines.items()
            if not line.stage.is_full
        ]
        return min(waiting, key=itemgetter(0), default=(None, None))[1]

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
