"""What a curator may do to a playbook: read from whatever it wrote, and done by the run's one writer.

A reply may hold anything. What can be read is an operation; all else is a :class:`Problem`, which is counted and does
not hold up the others. An operation stands for what its curator saw. The playbook may have moved on since: what is gone
cannot be changed, and what others have changed meanwhile is not overwritten.
"""

from __future__ import annotations

import ast
import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from pydantic import TypeAdapter

from dspy_flashevolve.ace.playbook import TAGS, Bullet, CountTokens, Playbook, Tag, cleaned
from dspy_flashevolve.ace.similarity import FindDuplicate
from dspy_flashevolve.observe.statistics import Problem

MOST_OPERATIONS = 200
"""Of one reply; what comes after them is not read."""
KINDS = ("ADD", "UPDATE", "MERGE", "REMOVE", "DELETE")
"""Words for an operation's type."""
_TAG_OF: dict[str, Tag] = {tag: tag for tag in TAGS}
_DEPTH = 4
"""Lists and objects in each other that are looked through for operations."""
MOST_CHARACTERS = 200_000
"""Of a reply; what comes after them is not read."""
_MOST_LITERAL = 50_000
"""Characters of a Python literal, which is slow to read."""
_MOST_MISSES = 1000
"""Brackets that open nothing, before the rest of a reply is given up."""
_OPENING = re.compile(r"[\[{]")
NEWEST = 4
"""One in so many bullets, the newest, has time to prove itself before it makes room."""
MOST_DRIVEN_OUT = 4
"""One in so many bullets may be driven out by one operation, and one bullet always."""
MOST_EXAMPLES = 50
"""Problems that are kept as they are; the others are only counted."""


@dataclass(frozen=True, slots=True)
class Add:
    """A new bullet."""

    section: str
    content: str


@dataclass(frozen=True, slots=True)
class Update:
    """Another text for a bullet."""

    id: str
    content: str


@dataclass(frozen=True, slots=True)
class Merge:
    """Several bullets become the first of them, with this text; their counters are added up."""

    ids: tuple[str, ...]
    content: str


@dataclass(frozen=True, slots=True)
class Remove:
    """A bullet goes."""

    id: str


Operation = Add | Update | Merge | Remove


def ids_of(operation: Operation) -> tuple[str, ...]:
    """The bullets that an operation is about."""
    if isinstance(operation, Add):
        return ()
    return operation.ids if isinstance(operation, Merge) else (operation.id,)


def parse_operations(reply: object) -> tuple[list[Operation], list[Problem]]:
    """Read a curator's reply.

    Args:
        reply: a list of objects with "type" (ADD, UPDATE, MERGE or REMOVE), "section", "content", "id" or "ids"; the
            same as JSON or as Python source, inside other text, cut off, or as an object that holds it.

    Returns:
        The operations in order, and what could not be read. Text without any JSON is one problem; an empty list, or
        text that is empty, asks for nothing.

    >>> parse_operations('Here: [{"type": "REMOVE", "id": "str-1"}, {"type": "SHOUT"}]')
    ([Remove(id='str-1')], [Problem(kind='unknown operation', detail='SHOUT')])
    """
    values = list(_values(reply))
    if not values and isinstance(reply, str) and reply.strip():
        return [], [Problem("unreadable reply", reply.strip()[:200])]
    found = [one for value in values for one in _objects(value)]
    read = [_operation(one) for one in found[:MOST_OPERATIONS]]
    if len(found) > MOST_OPERATIONS:
        read.append(Problem("too many operations", f"{len(found)}, read {MOST_OPERATIONS}"))
    return [one for one in read if not isinstance(one, Problem)], [one for one in read if isinstance(one, Problem)]


def parse_tags(reply: object) -> tuple[list[tuple[str, Tag]], list[Problem]]:
    """Read what a reflection says of the bullets that were cited.

    Args:
        reply: an object of id to tag, or a list of objects with "id" and "tag"; also as text, see
            :func:`parse_operations`.

    Returns:
        (id, tag), an id once; and what could not be read.

    >>> parse_tags('{"str-1": "helpful", "str-2": "splendid"}')
    ([('str-1', 'helpful')], [Problem(kind='unknown tag', detail='splendid')])
    """
    values = list(_values(reply))
    if not values and isinstance(reply, str) and reply.strip().lower() not in ("", "none", "n/a"):
        return [], [Problem("unreadable tags", reply.strip()[:200])]
    tags: dict[str, Tag] = {}
    problems: list[Problem] = []
    for bullet_id, word in (pair for value in values for pair in _pairs(value, _DEPTH)):
        tag = _TAG_OF.get(str(word).strip().lower())
        if tag is None:
            problems.append(Problem("unknown tag", str(word)[:80]))
        else:
            tags.setdefault(bullet_id, tag)
    return list(tags.items()), problems


def _pairs(value: object, depth: int) -> Iterator[tuple[str, object]]:
    if depth == 0:
        return
    if isinstance(value, list):
        for one in cast("list[object]", value)[:MOST_OPERATIONS]:
            yield from _pairs(one, depth - 1)
    elif isinstance(value, Mapping):
        tagged = cast("Mapping[object, object]", value)
        if "id" in tagged:
            yield _id(tagged["id"]), tagged.get("tag")
            return
        for key, one in list(tagged.items())[:MOST_OPERATIONS]:
            if isinstance(one, str):
                yield _id(key), one
            else:
                yield from _pairs(one, depth - 1)


def _operation(data: Mapping[str, Any]) -> Operation | Problem:
    kind = str(data.get("type", data.get("op", data.get("operation", "")))).strip().upper()
    content = data.get("content", data.get("text"))
    text = cleaned(content) if isinstance(content, str) else ""
    if kind not in KINDS:
        return Problem("unknown operation", (kind or str(dict(data)))[:80])
    if kind in ("ADD", "UPDATE", "MERGE") and not text:
        return Problem("no content", str(dict(data))[:200])
    if kind == "ADD":
        return Add(str(data.get("section", "")).strip(), text)
    listed = data.get("ids", data.get("bullet_ids", data.get("id", data.get("bullet_id"))))
    if kind == "MERGE" and isinstance(listed, str):
        listed = listed.split(",")
    raw = cast("list[object]", listed)[:MOST_OPERATIONS] if isinstance(listed, list) else [listed]
    ids = list(dict.fromkeys(_id(one) for one in raw if isinstance(one, str) and one.strip()))
    if not ids:
        return Problem("no id", str(dict(data))[:200])
    if kind == "MERGE":
        return Merge(tuple(ids), text) if len(ids) > 1 else Problem("merge of one", ids[0][:80])
    if len(ids) > 1:
        return Problem("several ids", f"{kind} {', '.join(ids)}"[:200])
    return Update(ids[0], text) if kind == "UPDATE" else Remove(ids[0])


def _id(value: object) -> str:
    """An id as it stands in a playbook: models write it in brackets, quotes or capitals."""
    return str(value).strip(" \t\n[](){}<>\"'`").lower()


def _objects(value: object, depth: int = _DEPTH) -> Iterator[Mapping[str, Any]]:
    """The objects that may be operations: those in lists, and in objects that only hold such lists."""
    if depth == 0 and isinstance(value, list | dict) and value:
        yield {"type": "too deep"}
    elif isinstance(value, list):
        for one in cast("list[object]", value):
            yield from _objects(one, depth - 1)
    elif isinstance(value, Mapping):
        data = cast("Mapping[str, Any]", value)
        inner = data.get("operations")
        if isinstance(inner, list | dict | str):
            yield from (one for value in _values(cast("object", inner)) for one in _objects(value, depth - 1))
        else:
            yield data


def _values(reply: object) -> Iterator[object]:
    """The JSON lists and objects in a text, or, where there are none, the Python literal that it is.

    Of a list that is cut off, the objects that are whole. What is no text is yielded as it is.
    """
    if not isinstance(reply, str):
        yield reply
        return
    text = reply[:MOST_CHARACTERS]
    decoder, start, misses, found = json.JSONDecoder(strict=False), 0, 0, False
    while misses < _MOST_MISSES and (opening := _OPENING.search(text, start)) is not None:
        try:
            value, start = decoder.raw_decode(text, opening.start())
        except (ValueError, RecursionError):
            start, misses = opening.end(), misses + 1
            continue
        if isinstance(value, dict) or not value or any(isinstance(one, dict | list) for one in value):
            found = True
            yield cast("object", value)
    if found or len(text) > _MOST_LITERAL:
        return
    try:
        literal: object = ast.literal_eval(text.strip().removeprefix("```json").removeprefix("```python").strip("`\n "))
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return
    if isinstance(literal, list | dict):
        yield cast("object", literal)


# The one writer.


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
        token_budget: tokens of the rendered playbook at most.
        count_tokens: counts them.
        find_duplicate: finds a bullet that says the same as a new one.

    Attributes:
        counts: of the samples that were applied.
    """

    def __init__(
        self, playbook: Playbook, token_budget: int, count_tokens: CountTokens, find_duplicate: FindDuplicate
    ) -> None:
        self.playbook, self.counts, self.find_duplicate = playbook, Counts(), find_duplicate
        self._token_budget, self._count_tokens = token_budget, count_tokens
        self._changed: dict[str, int] = {}
        """Bullet's id -> the version that last changed its text, where that is later than its creation."""

    def tag(self, tags: Iterable[tuple[str, Tag]]) -> None:
        """Count tags; those of bullets that are gone are problems."""
        for bullet_id, tag in tags:
            if bullet_id in self.playbook:
                self.playbook = self.playbook.tagged([(bullet_id, tag)])
                self.counts.tags[tag] += 1
            else:
                self.note([Problem("tag of a gone bullet", bullet_id)])

    def apply(self, operations: Iterable[Operation], seen: int) -> list[Operation]:
        """Apply operations in order, for a curator who saw version ``seen``; returns those that were done.

        Of two operations of the list on one bullet the first counts. An ADD of what a bullet says already raises that
        bullet's helpful counter instead. Beyond the token budget, bullets make room: those that are worth least first,
        of these the oldest; the newest quarter goes last unless it has done harm. An operation whose bullet would not
        fit alone, or would drive out more than one bullet and more than a quarter of them, or itself, is not done.
        """
        before, draft = self.playbook, _Draft(self, seen)
        done = [one for one in operations if draft.does(one)]
        evicted = self.excess(draft.playbook)
        after = draft.playbook.replacing(one for one in draft.playbook.bullets if one.id not in evicted)
        old, new = ({one.id: one.content for one in book.bullets} for book in (before, after))
        if old == new:
            after = replace(after, version=before.version, next_number=before.next_number)
        self._changed |= {name: after.version for name, text in new.items() if old.get(name, text) != text}
        self.playbook = after
        self.counts.operations.update(type(one).__name__.lower() for one in done)
        self.counts.evicted += len(evicted)
        self.note([*draft.problems, *(Problem("over the token budget", one) for one in evicted)])
        return done

    def excess(self, playbook: Playbook) -> list[str]:
        """The ids of the bullets that have to go for the token budget, first those that are worth least."""
        if self.fits(playbook):
            return []
        by_age = sorted(enumerate(playbook.bullets), key=lambda pair: (pair[1].created_version, pair[0]))
        new = {one.id for _, one in by_age[-max(1, len(playbook) // NEWEST) :] if one.worth >= 0}
        order = [one.id for _, one in sorted(by_age, key=lambda pair: (pair[1].id in new, pair[1].worth))]

        def fits_without(count: int) -> bool:
            gone = set(order[:count])
            return self.fits(playbook.replacing(one for one in playbook.bullets if one.id not in gone))

        return order[: bisect_left(range(len(order)), True, key=fits_without)]

    def fits(self, playbook: Playbook) -> bool:
        """Whether a playbook is within the token budget."""
        return playbook.tokens(self._count_tokens) <= self._token_budget

    def has_changed(self, bullet_id: str, seen: int) -> bool:
        """Whether a bullet's text was changed after a version."""
        return self._changed.get(bullet_id, 0) > seen

    def newer_than(self, seen: int) -> list[Bullet]:
        """Bullets that were written, or written anew, after a version."""
        return [one for one in self.playbook.bullets if one.created_version > seen or self.has_changed(one.id, seen)]

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


@dataclass
class _Draft:
    """A playbook while a list of operations is applied to it."""

    writer: PlaybookWriter
    seen: int
    problems: list[Problem] = field(default_factory=list[Problem])
    touched: dict[str, Operation] = field(default_factory=dict[str, Operation])

    def __post_init__(self) -> None:
        before = self.writer.playbook
        self.playbook = replace(before, version=before.version + 1)
        self.driven_out = len(self.writer.excess(before))

    def does(self, operation: Operation) -> bool:
        """Do it, or note why not."""
        before = self.playbook
        problem = self._add(operation) if isinstance(operation, Add) else self._change(operation)
        if problem is None and (problem := self._crowding(before, operation)) is not None:
            self.playbook = before
            for one in ids_of(operation):
                del self.touched[one]
        if problem is not None:
            self.problems.append(problem)
        return problem is None

    def _add(self, operation: Add) -> Problem | None:
        section = next((s for s in self.playbook.sections if s.lower() == operation.section.lower()), None)
        if section is None:
            return Problem("unknown section", operation.section[:80])
        known = self.writer.find_duplicate(operation.content, self.playbook.bullets)
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
        old = {one.id: one.content for one in before.bullets}
        written = [one for one in self.playbook.bullets if one.content != old.get(one.id)]
        if any(not self.writer.fits(self.playbook.replacing([one])) for one in written):
            return Problem("longer than the token budget", detail)
        excess = self.writer.excess(self.playbook)
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
            return Problem("unknown id", bullet_id[:80])
        if self.writer.has_changed(bullet_id, self.seen):
            return Problem("overtaken", f"{type(operation).__name__} of {bullet_id}, which others have changed since")
        return None
