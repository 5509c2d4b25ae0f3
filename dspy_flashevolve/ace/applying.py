"""Operations applied to a playbook: pure functions, and the run's one writer, which calls them.

An operation stands for what its curator saw. The playbook may have moved on since: what is gone cannot be changed, and
what others have changed meanwhile is not overwritten. Whatever cannot be done is a :class:`Problem`; the rest is done.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from dspy_flashevolve.ace.operations import Add, Merge, Operation, Remove, Update, ids_of
from dspy_flashevolve.ace.playbook import Bullet, CountTokens, Playbook, Tag, approximate_tokens
from dspy_flashevolve.ace.similarity import FindDuplicate, same_words
from dspy_flashevolve.observe.statistics import Problem

NEWEST = 4
"""One in so many bullets, the newest, has time to prove itself before it makes room."""
MOST_DRIVEN_OUT = 4
"""One in so many bullets may be driven out by one operation, and one bullet always."""
MOST_EXAMPLES = 50
"""Problems that are kept as they are; the others are only counted."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a list of operations.

    Args:
        playbook: with what could be done; one version later where a text changed.
        done: the operations that were done, in order.
        problems: what was not.
        evicted: ids of bullets that made room.
    """

    playbook: Playbook
    done: tuple[Operation, ...] = ()
    problems: tuple[Problem, ...] = ()
    evicted: tuple[str, ...] = ()


def apply_operations(
    playbook: Playbook,
    operations: Iterable[Operation],
    *,
    token_budget: int | None = None,
    count_tokens: CountTokens = approximate_tokens,
    changed: Mapping[str, int] | None = None,
    seen: int | None = None,
    find_duplicate: FindDuplicate = same_words,
) -> Applied:
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
        find_duplicate: finds a bullet that says the same as a new one.
    """
    seen = playbook.version if seen is None else seen
    draft = _Draft(playbook, token_budget, count_tokens, changed or {}, seen, find_duplicate)
    for operation in operations:
        draft.apply(operation)
    evicted = draft.excess(draft.playbook)
    after = draft.playbook.replacing(one for one in draft.playbook.bullets if one.id not in evicted)
    problems = [*draft.problems, *(Problem("over the token budget", one) for one in evicted)]
    if _texts(after) == _texts(playbook):
        after = replace(after, version=playbook.version, next_number=playbook.next_number)
    return Applied(after, tuple(draft.done), tuple(problems), tuple(evicted))


@dataclass
class _Draft:
    """A playbook while a list of operations is applied to it."""

    playbook: Playbook
    token_budget: int | None
    count_tokens: CountTokens
    changed: Mapping[str, int]
    seen: int
    find_duplicate: FindDuplicate
    done: list[Operation] = field(default_factory=list[Operation])
    problems: list[Problem] = field(default_factory=list[Problem])
    touched: dict[str, Operation] = field(default_factory=dict[str, Operation])

    def __post_init__(self) -> None:
        self.driven_out = len(self.excess(self.playbook))
        self.playbook = replace(self.playbook, version=self.playbook.version + 1)

    def apply(self, operation: Operation) -> None:
        """Do it, or note why not."""
        before = self.playbook
        problem = self._add(operation) if isinstance(operation, Add) else self._change(operation)
        if problem is None and (problem := self._crowding(before, operation)) is not None:
            self.playbook = before
            for one in ids_of(operation):
                del self.touched[one]
        if problem is not None:
            self.problems.append(problem)
        else:
            self.done.append(operation)

    def excess(self, playbook: Playbook) -> list[str]:
        """The ids of the bullets that have to go for the token budget, first those that are worth least."""
        if self._fits(playbook):
            return []
        by_age = sorted(enumerate(playbook.bullets), key=lambda pair: (pair[1].created_version, pair[0]))
        new = {one.id for _, one in by_age[-max(1, len(playbook) // NEWEST) :] if one.worth >= 0}
        order = [one.id for _, one in sorted(by_age, key=lambda pair: (pair[1].id in new, pair[1].worth))]

        def fits_without(count: int) -> bool:
            gone = set(order[:count])
            return self._fits(playbook.replacing(one for one in playbook.bullets if one.id not in gone))

        return order[: bisect_left(range(len(order)), True, key=fits_without)]

    def _fits(self, playbook: Playbook) -> bool:
        return self.token_budget is None or playbook.tokens(self.count_tokens) <= self.token_budget

    def _add(self, operation: Add) -> Problem | None:
        section = next((s for s in self.playbook.sections if s.lower() == operation.section.lower()), None)
        if section is None:
            return Problem("unknown section", operation.section[:80])
        known = self.find_duplicate(operation.content, self.playbook.bullets)
        if known is not None:
            self.playbook = self.playbook.tagged([(known.id, "helpful")])
            return Problem("said already", f"{known.id}: {operation.content}"[:200])
        self.playbook = self.playbook.adding(section, operation.content, version=self.playbook.version)
        return None

    def _change(self, operation: Update | Merge | Remove) -> Problem | None:
        ids, bullets = ids_of(operation), self.playbook.bullets
        problem = next((found for one in ids if (found := self._hindrance(one, operation))), None)
        if problem is not None:
            return problem
        self.touched |= dict.fromkeys(ids, operation)
        if isinstance(operation, Remove):
            self.playbook = self.playbook.replacing(b for b in bullets if b.id not in ids)
            return None
        parts = {b.id: b for b in bullets if b.id in ids}
        kept = replace(
            parts[ids[0]],
            content=operation.content,
            helpful=sum(b.helpful for b in parts.values()),
            harmful=sum(b.harmful for b in parts.values()),
        )
        self.playbook = self.playbook.replacing(kept if b.id == kept.id else b for b in bullets if b.id not in ids[1:])
        return None

    def _crowding(self, before: Playbook, operation: Operation) -> Problem | None:
        """Why an operation that was done takes too much room; None where it does not."""
        detail = f"{type(operation).__name__}: {getattr(operation, 'content', '')}"[:200]
        written = [one for one in self.playbook.bullets if one.content != getattr(before.get(one.id), "content", None)]
        if any(not self._fits(self.playbook.replacing([one])) for one in written):
            return Problem("longer than the token budget", detail)
        excess = self.excess(self.playbook)
        most = max(1, len(self.playbook) // MOST_DRIVEN_OUT)
        if len(excess) - self.driven_out > most or any(one.id in excess for one in written):
            return Problem("takes too much room", detail)
        self.driven_out = len(excess)
        return None

    def _hindrance(self, bullet_id: str, operation: Operation) -> Problem | None:
        earlier = self.touched.get(bullet_id)
        if earlier is not None:
            kind = "said twice" if earlier == operation else "contradiction"
            return Problem(kind, f"{type(operation).__name__} after {type(earlier).__name__} of {bullet_id}")
        if bullet_id not in self.playbook:
            return Problem("gone id" if self.playbook.has_had(bullet_id) else "unknown id", bullet_id[:80])
        if self.changed.get(bullet_id, 0) > self.seen:
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


@dataclass
class Counts:
    """What became of samples, and of what they asked for; :class:`AceStats` explains each."""

    samples: int = 0
    right_at_once: int = 0
    corrected: int = 0
    reflections: int = 0
    citations: int = 0
    evicted: int = 0
    additions: Counter[str] = field(default_factory=Counter[str])
    operations: Counter[str] = field(default_factory=Counter[str])
    tags: Counter[str] = field(default_factory=Counter[str])
    problems: Counter[str] = field(default_factory=Counter[str])
    first_problems: list[Problem] = field(default_factory=list[Problem])


_COUNTS = TypeAdapter(Counts)


class PlaybookWriter:
    """The one writer of a run: the playbook as it is, what changed it, and what was counted on the way.

    Everything here is called on the run's loop; nothing in it waits.

    Args:
        playbook: the first one.
        token_budget, count_tokens, find_duplicate: see :func:`apply_operations`.

    Attributes:
        counts: of the samples that were applied.
    """

    def __init__(
        self,
        playbook: Playbook,
        token_budget: int | None,
        count_tokens: CountTokens = approximate_tokens,
        find_duplicate: FindDuplicate = same_words,
    ) -> None:
        self.playbook, self.counts = playbook, Counts()
        self._changed: dict[str, int] = {}
        self._apply = partial(
            apply_operations, token_budget=token_budget, count_tokens=count_tokens, find_duplicate=find_duplicate
        )

    def tag(self, tags: Iterable[tuple[str, Tag]]) -> None:
        """Count tags; those of bullets that are gone are problems."""
        for bullet_id, tag in tags:
            if bullet_id in self.playbook:
                self.playbook = self.playbook.tagged([(bullet_id, tag)])
                self.counts.tags[tag] += 1
            else:
                self.note([Problem("tag of a gone bullet", bullet_id)])

    def apply(self, operations: Sequence[Operation], seen: int) -> Applied:
        """Do what a curator asks for who saw version ``seen``."""
        applied = self._apply(self.playbook, operations, changed=self._changed, seen=seen)
        self._changed |= changes(self.playbook, applied.playbook)
        self.playbook = applied.playbook
        self.counts.operations.update(type(one).__name__.lower() for one in applied.done)
        self.counts.evicted += len(applied.evicted)
        self.note(applied.problems)
        return applied

    def newer_than(self, seen: int) -> list[Bullet]:
        """Bullets that were written, or written anew, after a version."""
        return newer_than(self.playbook, seen, self._changed)

    def note(self, problems: Iterable[Problem]) -> None:
        """Count problems, and keep the first ones."""
        for problem in problems:
            self.counts.problems[problem.kind] += 1
            if len(self.counts.first_problems) < MOST_EXAMPLES:
                self.counts.first_problems.append(problem)

    def to_dict(self) -> dict[str, Any]:
        """All that is needed to go on with another writer, as plain data."""
        counts = _COUNTS.dump_python(self.counts)
        return {"playbook": self.playbook.to_dict(), "changed": dict(self._changed), "counts": counts}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Go on from what :meth:`to_dict` gave."""
        self.playbook, self._changed = Playbook.from_dict(data["playbook"]), dict(data["changed"])
        self.counts = _COUNTS.validate_python(data["counts"])
