"""Stragglers: rollouts that take far longer than the others of their kind, and what may be done about one.

A rollout may be given up after a time (:class:`~dspy_flashevolve.engine.rollouts.Rollouts` does it), or
begun a second time beside the first, by the rule below. Both are off unless asked for, and both are
counted and told as events: nothing is sent again unseen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import anyio

from dspy_flashevolve.engine.budget import Reservation
from dspy_flashevolve.engine.errors import ConfigurationError, RolloutUnresolvedError, TransientError

T = TypeVar("T")

RECENT = 100
"""Rollouts of a kind whose durations are remembered, at least."""
RESOLUTION_SECONDS = 1e-6
"""Times nearer than this are the same: a clock may not be able to move by less."""


@dataclass(frozen=True, slots=True)
class Duplicates:
    """When a rollout may be begun a second time.

    A rollout in flight for longer than ``factor`` times the median of its kind gets at most one duplicate, in a slot of
    its own, where the budget pays one more call. The first answer counts; the other run is cancelled and its call given
    back, unless its metric has begun, which is paid.

    Args:
        factor: times the median duration of the rollouts that the same stage finished last; above 1.
        least: rollouts of the stage that must have finished before the median is believed; at least 1.
        share: duplicates are at most this share of the rollouts so far; above 0, at most 1.

    Raises:
        ConfigurationError: an argument out of its range.

    >>> Duplicates(share=2.0)
    Traceback (most recent call last):
        ...
    dspy_flashevolve.engine.errors.ConfigurationError: duplicates: share is 2.0, expected above 0 and at most 1.
    """

    factor: float = 3.0
    least: int = 20
    share: float = 0.05

    def __post_init__(self) -> None:
        if not self.factor > 1:
            raise ConfigurationError(f"duplicates: factor is {self.factor!r}, expected above 1.")
        if self.least < 1:
            raise ConfigurationError(f"duplicates: least is {self.least!r}, expected at least 1.")
        if not 0 < self.share <= 1:
            raise ConfigurationError(f"duplicates: share is {self.share!r}, expected above 0 and at most 1.")


class Stragglers:
    """Knows how long rollouts take, and which of those in flight may be duplicated.

    Args:
        rule: what is far, and how many there may be.
        clock: seconds.
    """

    def __init__(self, rule: Duplicates, clock: Callable[[], float]) -> None:
        self._rule = rule
        self._clock = clock
        self._seconds: dict[str, deque[float]] = {}
        self._change: anyio.Event | None = None
        self._begun = 0
        self._allowed = 0

    def begun(self) -> None:
        """A rollout that is no duplicate has begun."""
        self._begun += 1

    def finished(self, kind: str, seconds: float) -> None:
        """A rollout has given its answer."""
        self._seconds.setdefault(kind, deque(maxlen=max(RECENT, self._rule.least))).append(seconds)
        if self._change is not None:
            self._change.set()
            self._change = None

    def limit_seconds(self, kind: str) -> float | None:
        """The duration from which a rollout is far beyond the others; None while too little is known."""
        recent = self._seconds.get(kind, ())
        return self._rule.factor * median(recent) if len(recent) >= self._rule.least else None

    async def overdue(self, kind: str, since: float, reservation: Reservation) -> Reservation:
        """Wait until a rollout may be duplicated.

        Args:
            since: when it began.
            reservation: pays for it.

        Returns:
            What pays for the duplicate: one call, to be settled or refunded. Where it is not begun after all, say so
            with :meth:`not_begun`.
        """
        while True:
            limit = self.limit_seconds(kind)
            if limit is not None:
                left = since + limit - self._clock()
                if left > RESOLUTION_SECONDS:
                    await anyio.sleep(left)
                    continue  # others may have finished meanwhile
                if self._allowed + 1 <= self._rule.share * self._begun and (spare := reservation.beside(1)):
                    self._allowed += 1
                    return spare
            await self._changed()

    def not_begun(self) -> None:
        """A duplicate that was allowed got no slot before it was needless."""
        self._allowed -= 1

    async def _changed(self) -> None:
        """Wait until a rollout has finished: the median, the share or the budget may be another."""
        if self._change is None:
            self._change = anyio.Event()
        await self._change.wait()


class MetricCall:
    """Whether the metric of a rollout in flight has been called: then the rollout is paid, even if it is given up.

    Args:
        on_begin: awaited, whatever is cancelled meanwhile, before the metric is called.
    """

    def __init__(self, on_begin: Callable[[], Awaitable[None]] | None = None) -> None:
        self.begun = False
        self._on_begin = on_begin

    @contextmanager
    def watched(self) -> Generator[None, None, None]:
        """Hear of :func:`metric_begins` inside the block."""
        token = _METRIC_CALL.set(self)
        try:
            yield
        finally:
            _METRIC_CALL.reset(token)

    async def begins(self) -> None:
        """The metric is called when this returns."""
        self.begun = True
        if self._on_begin is not None:
            with anyio.CancelScope(shield=True):
                await self._on_begin()


_METRIC_CALL: ContextVar[MetricCall | None] = ContextVar("metric_call", default=None)


async def metric_begins() -> None:
    """Say, inside a rollout, that its metric is called when this returns. Outside of one it does nothing."""
    call = _METRIC_CALL.get()
    if call is not None:
        await call.begins()


async def first_answer(
    original: Callable[[], Awaitable[T]], duplicate: Callable[[], Awaitable[T]], has_begun: Callable[[], bool]
) -> T:
    """Run the original, and the duplicate beside it; the first that answers ends the other.

    What the duplicate raises counts for nothing: the original decides. Where the original got no answer
    (:class:`TransientError`, :class:`RolloutUnresolvedError`) and a duplicate has begun, that one's is waited for.

    Args:
        duplicate: waits until it may begin.
        has_begun: whether it did.

    Raises:
        Exception: what the original raised, where there is no answer.
    """
    answers: list[T] = []
    failure: Exception | None = None
    async with anyio.create_task_group() as group:

        async def beside() -> None:
            try:
                answers.append(await duplicate())
            except Exception:
                return
            group.cancel_scope.cancel()

        group.start_soon(beside)
        try:
            answers.append(await original())
        except Exception as error:
            failure = error
        if answers or not (isinstance(failure, TransientError | RolloutUnresolvedError) and has_begun()):
            group.cancel_scope.cancel()
    if answers:
        return answers[0]
    assert failure is not None
    raise failure
