"""Snapshots of the playbook: which are validated, which metric calls are reserved for that, and which is the best."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from dspy_flashevolve.ace.playbook import Playbook
from dspy_flashevolve.engine.steps import Budget, Reservation
from dspy_flashevolve.observe.statistics import SnapshotRecord


class Snapshots:
    """Decides which playbooks are validated: each version once, or again where the provider gave no answer.

    Validations run beside the samples, a few at a time. A snapshot that is due while as many run, or that the budget
    cannot pay yet, waits. A newer one takes its place, so that the next validation is always of the newest playbook.

    The metric calls of the first and the last playbook are set aside from the beginning, so that samples cannot take
    them. For a snapshot in between, calls that samples give back are saved up, unless the budget can never pay it.

    Args:
        every: samples between two snapshots.
        at_once: most validations at the same time.
        budget: the metric calls of the run.
        calls: metric calls of one validation.
        unpaid: returns how many of these a playbook still needs; an interrupted run may have paid some.
        validate: scores a playbook, paid by a reservation; returns None where the provider gave no answer.
        start: starts work in the background. In lockstep it returns when the work is done.
        changed: called whenever a validation begins, waits or ends.

    Attributes:
        scored: playbooks as they were when their validations began, in the order in which the scores came.
        superseded: number of snapshots that a newer one replaced before they were validated.
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
        # A run that goes on may have less: what was in flight at the crash counts as spent.
        self._set_aside.extend(2 * calls if budget.left is None else min(2 * calls, budget.left))
        self._first: Playbook | None = None
        self._waiting: Playbook | None = None
        self._validating: list[Playbook] = []
        self._left_open: Sequence[Playbook] = ()
        self._begun: set[int] = set()
        self._refused: set[int] = set()
        self._known: set[int] = set()
        self.scored: dict[Playbook, SnapshotRecord] = {}
        self.superseded = 0

    def restore(self, scored: Mapping[Playbook, SnapshotRecord], unscored: Sequence[Playbook], superseded: int) -> None:
        """Go on from the state of an interrupted run; ``unscored`` is what its `open` was."""
        self.scored, self._left_open, self.superseded = dict(scored), unscored, superseded
        self._begun = {playbook.version for playbook in scored}

    @property
    def open(self) -> list[Playbook]:
        """The playbooks that are being validated, and the one that waits."""
        return [*self._left_open, *self._validating, *([] if self._waiting is None else [self._waiting])]

    @property
    def running(self) -> int:
        """Number of validations that are being made."""
        return len(self._validating)

    @property
    def best(self) -> Playbook | None:
        """The earliest of the playbooks with the highest score; None before there is one."""
        scored = list(self.scored.items())
        return max(scored, key=lambda pair: (pair[1].score, -pair[0].version), default=(None, None))[0]

    @property
    def unpaid(self) -> int:
        """Number of snapshots that the budget could not pay before they were superseded."""
        return len(self._refused - self._begun)

    def skip(self, version: int) -> None:
        """Validate no playbook of this version: one with the same texts has a score."""
        self._known.add(version)
        self._begun.add(version)

    async def begin(self, playbook: Playbook) -> None:
        """Start the validation of the first playbook, and of those that an interrupted run left open."""
        self._first = playbook
        if not self._is_scored(playbook) and (pays := self._split(self._set_aside, playbook)) is not None:
            await self._begin(playbook, pays)
        for unscored in self._left_open:
            await self._offer(unscored)
        self._left_open = ()

    async def after_sample(self, playbook: Playbook, samples: int) -> None:
        """Take a snapshot if one is due.

        Args:
            playbook: the newest one.
            samples: how many have been applied so far.
        """
        if samples % self._every:
            await self._next()
            return
        if self._first is not None:  # offered again, in case the provider gave its validation no answer
            await self._offer(self._first)
        await self._offer(playbook)

    async def finish(self, playbook: Playbook) -> None:
        """Validate the last playbook and the first one, where they have no score yet, and wait for that."""
        self._supersede(playbook)
        self._waiting = None
        self._set_aside.lend(self._saved, self._set_aside.open)
        first = playbook if self._first is None else self._first
        for unscored in {playbook.version: playbook, first.version: first}.values():
            if not self._is_scored(unscored) and (pays := self._reserve(unscored)) is not None:
                await self._run(unscored, pays)
        self._saved.refund()

    def save_up(self) -> None:
        """Reserve calls that a sample gave back for the snapshot that waits, before another sample takes them."""
        if self._waiting is not None and self.running < self._at_once:
            self._save(self._calls)

    def _save(self, calls: int) -> None:
        limit, left, missing = self._budget.limit, self._budget.left, max(0, calls - self._saved.open)
        if limit is not None and limit - self._budget.spent - self._set_aside.open < calls:
            self._saved.refund()
        else:
            self._saved.extend(missing if left is None else min(missing, left))

    def _reserve(self, playbook: Playbook) -> Reservation | None:
        """Reserve the calls of a validation; None where the budget has not enough yet."""
        self._save(self._unpaid(playbook))
        return self._split(self._saved, playbook)

    def _split(self, calls: Reservation, playbook: Playbook) -> Reservation | None:
        part = Reservation(self._budget, 0)
        return part if calls.lend(part, self._unpaid(playbook)) else None

    async def _offer(self, playbook: Playbook) -> None:
        """Let a playbook wait for its validation, unless that has begun before."""
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
        pays = self._reserve(playbook)
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
                self._validating.remove(playbook)
            self._changed()
            await self._next()

        self._begun.add(playbook.version)
        self._validating.append(playbook)
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
        return playbook.version in self._known or any(
            scored.version == playbook.version for scored in list(self.scored)
        )
