"""Operations applied to a playbook: pure functions, used by the one writer.

An operation stands for what its curator saw. The playbook may have moved on since: what is gone cannot be changed, and
what others have changed meanwhile is not overwritten. Whatever cannot be done is a :class:`Problem`; the rest is done.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dspy_flashevolve.ace.operations import Add, Merge, Operation, Problem, Remove, Update, ids_of
from dspy_flashevolve.ace.playbook import Bullet, Playbook
from dspy_flashevolve.ace.similarity import same_words
from dspy_flashevolve.ace.text import CountTokens, approximate_tokens

NEWEST = 4
"""One in so many bullets, the newest, has time to prove itself before it makes room."""
MOST_DRIVEN_OUT = 4
"""One in so many bullets may be driven out by one operation, and one bullet always."""

Twin = Callable[[str, Sequence[Bullet]], Bullet | None]
"""The bullet, of those given, that says the same as a text; None where there is none."""


@dataclass(frozen=True, slots=True)
class Merged:
    """What became of a list of operations.

    Args:
        playbook: with what could be done; one version later where a text changed.
        applied: what was done, in order.
        problems: what was not.
        evicted: ids of bullets that made room.
    """

    playbook: Playbook
    applied: tuple[Operation, ...] = ()
    problems: tuple[Problem, ...] = ()
    evicted: tuple[str, ...] = ()


def merge(
    playbook: Playbook,
    operations: Iterable[Operation],
    *,
    token_budget: int | None = None,
    count_tokens: CountTokens = approximate_tokens,
    changed: Mapping[str, int] | None = None,
    seen: int | None = None,
    twin: Twin = same_words,
) -> Merged:
    """Apply operations in order.

    Of two operations of the list on one bullet the first counts. An ADD of what a bullet says already raises that
    bullet's helpful counter instead. Beyond the token budget, bullets make room: those that are worth least first, of
    these the oldest; the newest quarter goes last unless it has done harm. An operation whose bullet would not fit
    alone, or would drive out more than one bullet and more than a quarter of them, or itself, is not done.

    Args:
        playbook: as it is now.
        operations: what a curator asks for.
        token_budget: tokens of the rendered playbook at most; None for no bound.
        count_tokens: counts them.
        changed: id -> the version that last changed its text, where that is later than its creation.
        seen: the version that the curator read; None for this one.
        twin: finds a bullet that says the same as a new one.
    """
    work = _Work(
        playbook, changed or {}, playbook.version if seen is None else seen, twin, _Room(token_budget, count_tokens)
    )
    for operation in operations:
        work.apply(operation)
    evicted = work.room.wanting(work.playbook)
    after = work.playbook.replacing(one for one in work.playbook.bullets if one.id not in evicted)
    problems = [*work.problems, *(Problem("over the token budget", one) for one in evicted)]
    if _texts(after) == _texts(playbook):
        after = replace(after, version=playbook.version, next_number=playbook.next_number)
    return Merged(after, tuple(work.applied), tuple(problems), tuple(evicted))


@dataclass(frozen=True, slots=True)
class _Room:
    """What fits within the token budget."""

    token_budget: int | None
    count_tokens: CountTokens

    def fits(self, playbook: Playbook) -> bool:
        return self.token_budget is None or playbook.tokens(self.count_tokens) <= self.token_budget

    def wanting(self, playbook: Playbook) -> list[str]:
        """The ids of the bullets that have to go, first those that are worth least."""
        if self.fits(playbook):
            return []
        order = _least_first(playbook.bullets)

        def fits_without(count: int) -> bool:
            gone = set(order[:count])
            return self.fits(playbook.replacing(one for one in playbook.bullets if one.id not in gone))

        return order[: bisect_left(range(len(order)), True, key=fits_without)]


def _least_first(bullets: Sequence[Bullet]) -> list[str]:
    spared = max(1, len(bullets) // NEWEST)
    by_age = sorted(enumerate(bullets), key=lambda pair: (pair[1].created_version, pair[0]))
    new = {one.id for _, one in by_age[-spared:] if one.worth >= 0}
    return [one.id for _, one in sorted(by_age, key=lambda pair: (pair[1].id in new, pair[1].worth))]


class _Work:
    """A playbook while a list of operations is applied to it."""

    def __init__(self, playbook: Playbook, changed: Mapping[str, int], seen: int, twin: Twin, room: _Room) -> None:
        self.playbook = replace(playbook, version=playbook.version + 1)
        self.room = room
        self._driven_out = len(room.wanting(playbook))
        self.applied: list[Operation] = []
        self.problems: list[Problem] = []
        self._changed = changed
        self._seen = seen
        self._twin = twin
        self._touched: dict[str, Operation] = {}

    def apply(self, operation: Operation) -> None:
        """Do it, or note why not."""
        before = self.playbook
        problem = self._add(operation) if isinstance(operation, Add) else self._change(operation)
        if problem is None and (problem := self._crowding(before, operation)) is not None:
            self.playbook = before
            for one in ids_of(operation):
                del self._touched[one]
        if problem is not None:
            self.problems.append(problem)
        else:
            self.applied.append(operation)

    def _add(self, operation: Add) -> Problem | None:
        section = next((s for s in self.playbook.sections if s.lower() == operation.section.lower()), None)
        if section is None:
            return Problem("unknown section", operation.section[:80])
        known = self._twin(operation.content, self.playbook.bullets)
        if known is not None:
            self.playbook = self.playbook.tagged([(known.id, "helpful")])
            return Problem("said already", f"{known.id}: {operation.content}"[:200])
        self.playbook = self.playbook.adding(section, operation.content, version=self.playbook.version)
        return None

    def _change(self, operation: Update | Merge | Remove) -> Problem | None:
        problem = next((found for one in ids_of(operation) if (found := self._hindrance(one, operation))), None)
        if problem is not None:
            return problem
        self._touched |= dict.fromkeys(ids_of(operation), operation)
        ids, bullets = ids_of(operation), self.playbook.bullets
        if isinstance(operation, Remove):
            self.playbook = self.playbook.replacing(b for b in bullets if b.id not in ids)
            return None
        parts = [b for b in bullets if b.id in ids]
        kept = replace(
            next(b for b in parts if b.id == ids[0]),
            content=operation.content,
            helpful=sum(b.helpful for b in parts),
            harmful=sum(b.harmful for b in parts),
        )
        self.playbook = self.playbook.replacing(
            kept if b.id == kept.id else b for b in bullets if b.id not in ids or b.id == kept.id
        )
        return None

    def _crowding(self, before: Playbook, operation: Operation) -> Problem | None:
        """Why an operation that was done takes too much room; None where it does not."""
        detail = f"{type(operation).__name__}: {getattr(operation, 'content', '')}"[:200]
        written = [one for one in self.playbook.bullets if one.content != getattr(before.get(one.id), "content", None)]
        if any(not self.room.fits(self.playbook.replacing([one])) for one in written):
            return Problem("longer than the token budget", detail)
        wanting = self.room.wanting(self.playbook)
        driven_out = len(wanting)
        most = max(1, len(self.playbook) // MOST_DRIVEN_OUT)
        if driven_out - self._driven_out > most or any(one.id in wanting for one in written):
            return Problem("takes too much room", detail)
        self._driven_out = driven_out
        return None

    def _hindrance(self, bullet_id: str, operation: Operation) -> Problem | None:
        earlier = self._touched.get(bullet_id)
        if earlier is not None:
            kind = "said twice" if earlier == operation else "contradiction"
            return Problem(kind, f"{type(operation).__name__} after {type(earlier).__name__} of {bullet_id}")
        if bullet_id not in self.playbook:
            return Problem("gone id" if self.playbook.has_had(bullet_id) else "unknown id", bullet_id[:80])
        if self._changed.get(bullet_id, 0) > self._seen:
            return Problem("overtaken", f"{type(operation).__name__} of {bullet_id}, which others have changed since")
        return None


def changes(before: Playbook, after: Playbook) -> dict[str, int]:
    """Id -> the version of ``after``, for bullets that were there before and say something else now."""
    old = {bullet.id: bullet.content for bullet in before.bullets}
    return {one.id: after.version for one in after.bullets if one.id in old and old[one.id] != one.content}


def newer_than(playbook: Playbook, seen: int, changed: Mapping[str, int]) -> list[Bullet]:
    """Bullets that were written, or written anew, after a version."""
    return [one for one in playbook.bullets if max(one.created_version, changed.get(one.id, 0)) > seen]


def _texts(playbook: Playbook) -> list[tuple[str, str, str]]:
    return [(one.id, one.section, one.content) for one in playbook.bullets]
