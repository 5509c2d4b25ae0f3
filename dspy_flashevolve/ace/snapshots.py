"""Playbooks that are validated beside the evolution, what is set aside for that, and the best of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from dspy_flashevolve.ace.playbook import Playbook
from dspy_flashevolve.engine.steps import Budget, Reservation
from dspy_flashevolve.observe.statistics import SnapshotRecord


class Snapshots:
    """Decides which playbooks are validated; each version once, again where the provider gave no answer.

    Validations run beside the evolution, a few at a time. Where another is due meanwhile, or cannot be paid yet, it
    waits, and a newer one takes its place: what is validated next is the newest there is.

    The metric calls of the first and the last playbook are set aside from the beginning, so that samples cannot take
    them. For one that is due between, calls are saved up as samples give them back, unless the budget can never pay it.

    Args:
        every: samples between two snapshots.
        at_once: validations that run at the same time.
        budget: the run's.
        calls: of one validation.
        unpaid: how many of these a playbook still needs, where a run before this one has begun.
        validate: scores a playbook, paid by a reservation; None where it could not be scored.
        start: begins work that nobody waits for; in lockstep it is done when that returns.
        changed: called when another validation has begun, waits, or has ended.

    Attributes:
        scored: playbooks as they were when their validations began, in the order in which scores came.
        superseded: snapshots that a newer one replaced before they were validated.
    """

    def __init__(
        self,
        every: int,
        at_once: int,
        budget: Budget,
        calls: int,
        unpaid: Callable[[Playbook], int],
        validate: Callable[[Playbook, Reservation], Awaitable[SnapshotRecord | None]],
        start: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]],
        changed: Callable[[], None],
    ) -> None:
        self._every, self._at_once, self._budget, self._calls, self._unpaid = every, at_once, budget, calls, unpaid
        self._validate, self._start, self._changed = validate, start, changed
        self._set_aside, self._saved = Reservation(budget, 0), Reservation(budget, 0)
        self._set_aside.extend(2 * calls if budget.left is None else min(2 * calls, budget.left))  # a crash loses some
        self._first: Playbook | None = None
        self._waiting: Playbook | None = None
        self._under_way: list[Playbook] = []
        self._left_open: Sequence[Playbook] = ()
        self._begun: set[int] = set()
        self._refused: set[int] = set()
        self.scored: dict[Playbook, SnapshotRecord] = {}
        self.superseded = 0

    def restore(self, scored: Mapping[Playbook, SnapshotRecord], unscored: Sequence[Playbook], superseded: int) -> None:
        """Go on from where another run was; ``unscored`` is what :attr:`open` was."""
        self.scored, self._left_open, self.superseded = dict(scored), unscored, superseded
        self._begun = {one.version for one in scored}

    @property
    def open(self) -> list[Playbook]:
        """Those that are validated now, and the one that waits."""
        return [*self._left_open, *self._under_way, *([] if self._waiting is None else [self._waiting])]

    @property
    def running(self) -> int:
        """Validations that are under way."""
        return len(self._under_way)

    @property
    def best(self) -> Playbook | None:
        """The earliest version of those with the highest score; None before there is one."""
        scored = list(self.scored.items())
        return max(scored, key=lambda one: (one[1].score, -one[0].version), default=(None, None))[0]

    @property
    def unpaid(self) -> int:
        """Snapshots that the budget could not pay before they were superseded."""
        return len(self._refused - self._begun)

    async def begin(self, playbook: Playbook) -> None:
        """Have the initial playbook validated, out of what is set aside for that, and what was left open."""
        self._first = playbook
        if not self._is_scored(playbook) and (pays := self._part_of(self._set_aside, playbook)) is not None:
            await self._begin(playbook, pays)
        for one in self._left_open:
            await self._offer(one)
        self._left_open = ()

    async def learnt(self, playbook: Playbook, samples: int) -> None:
        """So many samples have been learnt from, and this is the playbook now."""
        if samples % self._every:
            await self._next()
            return
        if self._first is not None:  # nothing happens unless the provider gave it no answer
            await self._offer(self._first)
        await self._offer(playbook)

    async def finish(self, playbook: Playbook) -> None:
        """Validate the last playbook, now, if its version is not scored; and the first, if that still has no score."""
        self._supersede(playbook)
        self._waiting = None
        self._set_aside.lend(self._saved, self._set_aside.open)
        first = playbook if self._first is None else self._first
        for one in {playbook.version: playbook, first.version: first}.values():
            if not self._is_scored(one) and (pays := self._paid(one)) is not None:
                await self._run(one, pays)
        self._saved.refund()

    def save_up(self) -> None:
        """Reserve what a sample gives back for a validation that is due, before another sample takes it."""
        if self._waiting is not None and self.running < self._at_once:
            self._save(self._calls)

    def _save(self, calls: int) -> None:
        limit, left, missing = self._budget.limit, self._budget.left, max(0, calls - self._saved.open)
        if limit is not None and limit - self._budget.spent - self._set_aside.open < calls:
            self._saved.refund()
        else:
            self._saved.extend(missing if left is None else min(missing, left))

    def _paid(self, playbook: Playbook) -> Reservation | None:
        """What a validation costs; None where there is not enough yet."""
        self._save(self._unpaid(playbook))
        return self._part_of(self._saved, playbook)

    def _part_of(self, calls: Reservation, playbook: Playbook) -> Reservation | None:
        needed = self._unpaid(playbook)
        return calls.split(needed) if calls.open >= needed else None

    async def _offer(self, playbook: Playbook) -> None:
        """Have a playbook validated, unless its version was, or a newer one comes before its turn."""
        if playbook.version in self._begun:
            return
        self._supersede(playbook)
        self._waiting = playbook
        await self._next()
        self._changed()

    def _supersede(self, playbook: Playbook) -> None:
        self.superseded += self._waiting is not None and self._waiting.version != playbook.version

    async def _next(self) -> None:
        playbook = self._waiting
        if playbook is None or self.running >= self._at_once:
            return
        pays = self._paid(playbook)
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
            self.scored[playbook] = scored

    def _is_scored(self, playbook: Playbook) -> bool:
        return any(one.version == playbook.version for one in list(self.scored))
