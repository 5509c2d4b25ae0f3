"""Playbooks that are validated beside the evolution, what is set aside for that, and the best of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from dspy_flashevolve.ace.playbook import Playbook
from dspy_flashevolve.engine.budget import Budget, Reservation


class ValidationCalls:
    """Metric calls that are set aside for validations.

    Those of the first and the last playbook are set aside from the beginning, so that samples cannot take them. For
    one that is due between, calls are saved up as samples give them back, unless the budget can never pay it.

    Args:
        budget: the run's.
        calls: of one validation.
        unpaid: how many of these a playbook still needs, where a run before this one has begun. Default: all.
    """

    def __init__(self, budget: Budget, calls: int, unpaid: Callable[[Playbook], int] | None = None) -> None:
        self._budget, self._calls = budget, calls
        self._unpaid = unpaid or (lambda playbook: calls)
        self._set_aside, self._saved = Reservation(budget, 0), Reservation(budget, 0)

    def set_aside(self) -> None:
        """Reserve what the first and the last validation cost; a run that goes on may have less than that."""
        left, wanted = self._budget.left, 2 * self._calls
        self._set_aside.extend(wanted if left is None else min(wanted, left))

    def take(self, playbook: Playbook) -> Reservation | None:
        """What one of these two costs; None where there is not enough, as after a crash that lost calls."""
        calls = self._unpaid(playbook)
        return self._set_aside.split(calls) if self._set_aside.open >= calls else None

    def save(self, calls: int | None = None) -> None:
        """Reserve what is left for the validation that is due.

        Args:
            calls: of it. Default: of a whole one.
        """
        calls, limit = self._calls if calls is None else calls, self._budget.limit
        if limit is not None and limit - self._budget.spent - self._set_aside.open < calls:
            self._saved.refund()
            return
        missing, left = max(0, calls - self._saved.open), self._budget.left
        self._saved.extend(missing if left is None else min(missing, left))

    def take_saved(self, playbook: Playbook) -> Reservation | None:
        """What a validation costs; None where there is not enough yet."""
        calls = self._unpaid(playbook)
        self.save(calls)
        return self._saved.split(calls) if self._saved.open >= calls else None

    def release(self) -> None:
        """Give back what is set aside and saved."""
        self._set_aside.refund()
        self._saved.refund()


@dataclass(frozen=True, slots=True)
class Scored:
    """A playbook with its validation score.

    Args:
        playbook: as it was when its validation began.
        score: mean over the validation set.
        seconds: since the run began, when it was known.
        tokens: of its text.
    """

    playbook: Playbook
    score: float
    seconds: float
    tokens: int = 0


class Snapshots:
    """Decides which playbooks are validated; each version once, again where the provider gave no answer.

    Validations run beside the evolution, a few at a time. Where another is due meanwhile, or cannot be paid yet, it
    waits, and a newer one takes its place: what is validated next is the newest there is.

    Args:
        every: samples between two snapshots.
        at_once: validations that run at the same time.
        validate: scores a playbook, paid by a reservation; None where it could not be scored.
        start: begins work that nobody waits for; in lockstep it is done when that returns.
        calls: pays.
        changed: called when another validation has begun, waits, or has ended.

    Attributes:
        scored: in the order in which scores came.
        superseded: snapshots that a newer one replaced before they were validated.
    """

    def __init__(
        self,
        every: int,
        at_once: int,
        validate: Callable[[Playbook, Reservation], Awaitable[Scored | None]],
        start: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]],
        calls: ValidationCalls,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._every, self._at_once = every, at_once
        self._validate, self._start, self._calls, self._changed = validate, start, calls, changed
        self._samples = 0
        self._first: Playbook | None = None
        self._waiting: Playbook | None = None
        self._under_way: list[Playbook] = []
        self._left_open: Sequence[Playbook] = ()
        self._begun: set[int] = set()
        self._refused: set[int] = set()
        self.scored: list[Scored] = []
        self.superseded = 0

    def restore(self, scored: Sequence[Scored], unscored: Sequence[Playbook], samples: int, superseded: int) -> None:
        """Go on from where another run was.

        Args:
            unscored: what :attr:`open` was.
            samples: that were learnt from.
        """
        self.scored, self._left_open = list(scored), unscored
        self._begun = {one.playbook.version for one in scored}
        self._samples, self.superseded = samples, superseded

    @property
    def open(self) -> list[Playbook]:
        """Those that are validated now, and the one that waits."""
        return [*self._left_open, *self._under_way, *([] if self._waiting is None else [self._waiting])]

    @property
    def running(self) -> int:
        """Validations that are under way."""
        return len(self._under_way)

    @property
    def best(self) -> Scored | None:
        """The first of those with the highest score, the initial playbook before others; None before there is one."""
        return max(self.scored, key=lambda one: (one.score, self._is_first(one.playbook)), default=None)

    @property
    def unpaid(self) -> int:
        """Snapshots that the budget could not pay before they were superseded."""
        return len(self._refused - self._begun)

    @property
    def waits_for_calls(self) -> bool:
        """Whether one is due that is not paid yet."""
        return self._waiting is not None and self.running < self._at_once

    async def begin(self, playbook: Playbook) -> None:
        """Have the initial playbook validated, out of what was set aside for that, and what was left open."""
        self._first = playbook
        if not self._is_scored(playbook) and (pays := self._calls.take(playbook)) is not None:
            await self._begin(playbook, pays)
        for one in self._left_open:
            await self.offer(one)
        self._left_open = ()

    async def learnt(self, playbook: Playbook) -> None:
        """A sample has been learnt from, and this is the playbook now."""
        self._samples += 1
        if self._samples % self._every:
            await self._next()
            return
        if self._first is not None:  # nothing happens unless the provider gave it no answer
            await self.offer(self._first)
        await self.offer(playbook)

    async def offer(self, playbook: Playbook) -> None:
        """Have a playbook validated, unless its version was, or a newer one comes before its turn."""
        if playbook.version in self._begun:
            return
        self._supersede(playbook)
        self._waiting = playbook
        await self._next()
        self._changed()

    async def finish(self, playbook: Playbook) -> None:
        """Validate the last playbook, now, if its version is not scored; and the first, if that still has no score."""
        self._supersede(playbook)
        self._waiting = None
        last = None if self._is_scored(playbook) else self._calls.take(playbook)
        self._calls.release()
        if last is not None:
            await self._run(playbook, last)
        first = self._first
        if first is None or first.version == playbook.version or self._is_scored(first):
            return
        if (pays := self._calls.take_saved(first)) is not None:
            await self._run(first, pays)

    def _supersede(self, playbook: Playbook) -> None:
        self.superseded += self._waiting is not None and self._waiting.version != playbook.version

    async def _next(self) -> None:
        if self._waiting is None or not self.waits_for_calls:
            return
        playbook, pays = self._waiting, self._calls.take_saved(self._waiting)
        if pays is None:
            self._refused.add(playbook.version)
            return
        self._waiting = None
        await self._begin(playbook, pays)

    async def _begin(self, playbook: Playbook, pays: Reservation) -> None:
        async def work() -> None:
            try:
                await self._run(playbook, pays)
            finally:
                self._under_way.remove(playbook)
            self._changed()
            await self._next()

        self._begun.add(playbook.version)
        self._under_way.append(playbook)
        self._changed()
        await self._start(work)

    async def _run(self, playbook: Playbook, pays: Reservation) -> None:
        try:
            scored = await self._validate(playbook, pays)
        finally:
            pays.refund()
        if scored is None:
            self._begun.discard(playbook.version)
        else:
            self.scored.append(scored)

    def _is_first(self, playbook: Playbook) -> bool:
        return self._first is not None and playbook.version == self._first.version

    def _is_scored(self, playbook: Playbook) -> bool:
        return any(one.playbook.version == playbook.version for one in self.scored)
