"""Playbooks that are validated beside the evolution, what is set aside for that, and the best of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
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
    """

    def __init__(self, budget: Budget, calls: int) -> None:
        self._budget = budget
        self._calls = calls
        self._set_aside, self._saved = Reservation(budget, 0), Reservation(budget, 0)

    def set_aside(self) -> None:
        """Reserve what the first and the last validation cost; that it fits was checked."""
        self._set_aside.extend(2 * self._calls)

    def take(self) -> Reservation:
        """What one of these two costs."""
        return self._set_aside.split(self._calls)

    def save(self) -> None:
        """Reserve what is left for the validation that is due."""
        limit = self._budget.limit
        if limit is not None and limit - self._budget.spent - self._set_aside.open < self._calls:
            self._saved.refund()
            return
        missing, left = self._calls - self._saved.open, self._budget.left
        self._saved.extend(missing if left is None else min(missing, left))

    def take_saved(self) -> Reservation | None:
        """What a validation costs; None where there is not enough yet."""
        self.save()
        return self._saved.split(self._calls) if self._saved.open >= self._calls else None

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
        seconds: the run's clock when it was known.
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

    Attributes:
        scored: in the order in which scores came.
        superseded: snapshots that a newer one replaced before they were validated.
        running: validations that are under way.
    """

    def __init__(
        self,
        every: int,
        at_once: int,
        validate: Callable[[Playbook, Reservation], Awaitable[Scored | None]],
        start: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]],
        calls: ValidationCalls,
    ) -> None:
        self._every = every
        self._at_once = at_once
        self._validate = validate
        self._start = start
        self._calls = calls
        self._samples = self.running = 0
        self._first: Playbook | None = None
        self._waiting: Playbook | None = None
        self._begun: set[int] = set()
        self._refused: set[int] = set()
        self.scored: list[Scored] = []
        self.superseded = 0

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

    async def first(self, playbook: Playbook) -> None:
        """Have the initial playbook validated, out of what was set aside for that; once."""
        if self._first is None:
            self._first = playbook
            await self._begin(playbook, self._calls.take())

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

    async def finish(self, playbook: Playbook) -> None:
        """Validate the last playbook, now, if its version is not scored; and the first, if that still has no score."""
        self._supersede(playbook)
        self._waiting = None
        last = None if self._is_scored(playbook) else self._calls.take()
        self._calls.release()
        if last is not None:
            await self._run(playbook, last)
        first = self._first
        if first is None or first.version == playbook.version or self._is_scored(first):
            return
        if (pays := self._calls.take_saved()) is not None:
            await self._run(first, pays)

    def _supersede(self, playbook: Playbook) -> None:
        self.superseded += self._waiting is not None and self._waiting.version != playbook.version

    async def _next(self) -> None:
        if self._waiting is None or not self.waits_for_calls:
            return
        playbook, pays = self._waiting, self._calls.take_saved()
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
                self.running -= 1
            await self._next()

        self._begun.add(playbook.version)
        self.running += 1
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
