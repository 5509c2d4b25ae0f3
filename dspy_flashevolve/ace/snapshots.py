"""Playbooks that are validated beside the evolution, and the best of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dspy_flashevolve.ace.playbook import Playbook
from dspy_flashevolve.ace.purse import Purse
from dspy_flashevolve.engine.budget import Reservation


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
        purse: pays.

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
        purse: Purse,
    ) -> None:
        self._every = every
        self._at_once = at_once
        self._validate = validate
        self._start = start
        self._purse = purse
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
        """Have the initial playbook validated, out of what was kept for that; once."""
        if self._first is None:
            self._first = playbook
            await self._begin(playbook, self._purse.kept())

    async def merged(self, playbook: Playbook) -> None:
        """A sample was merged, and this is the playbook now."""
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
        self._replace_waiting(playbook)
        self._waiting = playbook
        await self._next()

    async def finish(self, playbook: Playbook) -> None:
        """Validate the last playbook, now, if its version is not scored; and the first, if that still has no score."""
        self._replace_waiting(playbook)
        self._waiting = None
        last = None if self._is_scored(playbook) else self._purse.kept()
        self._purse.release()
        if last is not None:
            await self._run(playbook, last)
        first = self._first
        if first is None or first.version == playbook.version or self._is_scored(first):
            return
        if (pays := self._purse.pay()) is not None:
            await self._run(first, pays)

    def _replace_waiting(self, playbook: Playbook) -> None:
        self.superseded += self._waiting is not None and self._waiting.version != playbook.version

    async def _next(self) -> None:
        if self._waiting is None or not self.waits_for_calls:
            return
        playbook, pays = self._waiting, self._purse.pay()
        if pays is None:
            self._refused.add(playbook.version)
            return
        self._waiting = None
        await self._begin(playbook, pays)

    async def _begin(self, playbook: Playbook, pays: Reservation) -> None:
        self._begun.add(playbook.version)
        self.running += 1
        await self._start(lambda: self._work(playbook, pays))

    async def _work(self, playbook: Playbook, pays: Reservation) -> None:
        try:
            await self._run(playbook, pays)
        finally:
            self.running -= 1
        await self._next()

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
