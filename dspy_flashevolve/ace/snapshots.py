"""Snapshots of the playbook: which are validated, which metric calls are reserved for that, and which is the best."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from dspy_flashevolve.ace.playbook import Playbook
from dspy_flashevolve.engine.steps import Budget, Reservation
from dspy_flashevolve.observe.statistics import SnapshotRecord


class Snapshots:
    """Decides which playbooks are validated: each version once, or again where the provider gave no answer.

    One validation at a time runs beside the samples. A snapshot that is due meanwhile, or that the budget cannot pay
    yet, waits. A newer one takes its place, so that the next validation is always of the newest playbook. The metric
    calls of the first and the last playbook are set aside from the beginning, so that samples cannot take them.

    ``unpaid`` returns how many of the ``calls`` of a validation a playbook still needs, since an interrupted run may
    have paid some; ``validate`` returns None where the provider gave no answer; ``start`` starts work in the
    background, and in lockstep returns when it is done.
    """

    def __init__(
        self,
        every: int,
        budget: Budget,
        calls: int,
        unpaid: Callable[[Playbook], int],
        validate: Callable[[Playbook, Reservation], Awaitable[SnapshotRecord | None]],
        start: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]],
        changed: Callable[[], None],
    ) -> None:
        self._every, self._budget, self._unpaid = every, budget, unpaid
        self._validate, self._start, self._changed = validate, start, changed
        self._set_aside = Reservation(budget, 0)
        # A run that goes on may have less: what was in flight at the crash counts as spent.
        self._set_aside.extend(2 * calls if budget.left is None else min(2 * calls, budget.left))
        self._first: Playbook | None = None
        self._waiting: Playbook | None = None
        self._validating: Playbook | None = None
        self._left_open: Sequence[Playbook] = ()
        self._begun: set[int] = set()
        self._known: set[int] = set()
        self.scored: dict[Playbook, SnapshotRecord] = {}

    def restore(self, scored: Mapping[Playbook, SnapshotRecord], unscored: Sequence[Playbook]) -> None:
        """Go on from the state of an interrupted run; ``unscored`` is what its `open` was."""
        self.scored, self._left_open = dict(scored), unscored
        self._begun = {playbook.version for playbook in scored}

    @property
    def open(self) -> list[Playbook]:
        """The playbook that is being validated, and the one that waits."""
        now = [playbook for playbook in (self._validating, self._waiting) if playbook is not None]
        return [*self._left_open, *now]

    @property
    def is_validating(self) -> bool:
        """Whether a validation is being made."""
        return self._validating is not None

    @property
    def best(self) -> Playbook | None:
        """The earliest of the playbooks with the highest score; None before there is one."""
        scored = list(self.scored.items())
        return max(scored, key=lambda pair: (pair[1].score, -pair[0].version), default=(None, None))[0]

    def skip(self, version: int) -> None:
        """Validate no playbook of this version: one with the same texts has a score."""
        self._known.add(version)
        self._begun.add(version)

    async def begin(self, playbook: Playbook) -> None:
        """Start the validation of the first playbook, and of those that an interrupted run left open."""
        self._first, pays = playbook, Reservation(self._budget, 0)
        if not self._is_scored(playbook) and self._set_aside.lend(pays, self._unpaid(playbook)):
            await self._begin(playbook, pays)
        for unscored in self._left_open:
            await self._offer(unscored)
        self._left_open = ()

    async def after_sample(self, playbook: Playbook, samples: int) -> None:
        """Take a snapshot of the newest playbook if one is due after so many samples."""
        if samples % self._every:
            await self._next()
            return
        if self._first is not None:  # offered again, in case the provider gave its validation no answer
            await self._offer(self._first)
        await self._offer(playbook)

    async def finish(self, playbook: Playbook) -> None:
        """Validate the last playbook and the first one, where they have no score yet, and wait for that."""
        self._waiting = None
        self._set_aside.refund()  # no sample is left that could take it
        first = playbook if self._first is None else self._first
        for unscored in {playbook.version: playbook, first.version: first}.values():
            pays = Reservation(self._budget, 0)
            if not self._is_scored(unscored) and pays.extend(self._unpaid(unscored)):
                await self._run(unscored, pays)

    async def _offer(self, playbook: Playbook) -> None:
        """Let a playbook wait for its validation, unless that has begun before."""
        if playbook.version not in self._begun:
            self._waiting = playbook
            await self._next()
            self._changed()

    async def _next(self) -> None:
        pays = Reservation(self._budget, 0)
        if self._waiting is not None and self._validating is None and pays.extend(self._unpaid(self._waiting)):
            playbook, self._waiting = self._waiting, None
            await self._begin(playbook, pays)

    async def _begin(self, playbook: Playbook, pays: Reservation) -> None:
        async def work() -> None:
            try:
                await self._run(playbook, pays)
            finally:
                self._validating = None
            self._changed()
            await self._next()

        self._begun.add(playbook.version)
        self._validating = playbook
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
        scored = {known.version for known in list(self.scored)}  # other threads ask for statistics meanwhile
        return playbook.version in self._known | scored
