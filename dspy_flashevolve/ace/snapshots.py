"""Playbooks that are validated beside the evolution, and the best of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dspy_flashevolve.ace.playbook import Playbook


@dataclass(frozen=True, slots=True)
class Scored:
    """A playbook with its validation score.

    Args:
        playbook: as it was when its validation began.
        score: mean over the validation set.
        seconds: the run's clock when it was known.
    """

    playbook: Playbook
    score: float
    seconds: float


class Snapshots:
    """Decides which playbooks are validated; each version once.

    Validations run beside the evolution, a few at a time. Where another is due meanwhile it waits, and a newer one
    takes its place: what is validated next is the newest there is.

    Args:
        every: samples between two snapshots.
        at_once: validations that run at the same time.
        validate: scores a playbook; None where it could not be scored.
        start: begins work that nobody waits for; in lockstep it is done when that returns.

    Attributes:
        scored: in the order in which scores came.
        superseded: snapshots that a newer one replaced before they were validated.
        running: validations that are under way.
    """

    def __init__(
        self,
        every: int,
        at_once: int,
        validate: Callable[[Playbook], Awaitable[Scored | None]],
        start: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]],
    ) -> None:
        self._every = every
        self._at_once = at_once
        self._validate = validate
        self._start = start
        self._samples = self.running = 0
        self._waiting: Playbook | None = None
        self._versions: set[int] = set()
        self.scored: list[Scored] = []
        self.superseded = 0

    @property
    def best(self) -> Scored | None:
        """The first of those with the highest score; None before there is one."""
        return max(self.scored, key=lambda one: one.score, default=None)

    async def merged(self, playbook: Playbook) -> None:
        """A sample was merged, and this is the playbook now."""
        self._samples += 1
        if self._samples % self._every == 0:
            await self.offer(playbook)

    async def offer(self, playbook: Playbook) -> None:
        """Have a playbook validated, unless its version was, or a newer one comes before its turn."""
        waits = None if self._waiting is None else self._waiting.version
        if playbook.version in self._versions or playbook.version == waits:
            return
        if self.running < self._at_once:
            self._begin(playbook)
            await self._start(lambda: self._run(playbook))
            return
        self.superseded += self._waiting is not None
        self._waiting = playbook

    async def finish(self, playbook: Playbook) -> None:
        """Validate the last playbook, now, if its version is not scored."""
        if all(one.playbook.version != playbook.version for one in self.scored):
            self._begin(playbook)
            await self._run(playbook)

    def _begin(self, playbook: Playbook) -> None:
        self._versions.add(playbook.version)
        self.running += 1

    async def _run(self, playbook: Playbook) -> None:
        try:
            scored = await self._validate(playbook)
        finally:
            self.running -= 1
        if scored is not None:
            self.scored.append(scored)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            await self.offer(waiting)
