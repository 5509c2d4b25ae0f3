"""The operations of a curator on a playbook: how they are read from its reply, and how the one writer applies them.

A reply may hold anything. What can be read becomes an operation; everything else becomes a `Problem`, which is counted
and does not hold up the other operations. A curator writes for the version of the playbook that it was shown. Newer
versions may exist when its operations are applied: a bullet that was removed since cannot be changed, and a text that
another curator has changed since is not overwritten.
"""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from pydantic import TypeAdapter

from dspy_flashevolve.ace.playbook import TAGS, Bullet, CountTokens, Playbook, Tag, cleaned
from dspy_flashevolve.ace.similarity import same_words
from dspy_flashevolve.modules.reading import MOST_CHARACTERS, json_values
from dspy_flashevolve.observe.statistics import Problem

MOST_OPERATIONS = 200
"""Operations of one reply that are read; the rest is one problem.

A bound on the work of one reply: each operation renders the playbook anew to count its tokens. A playbook of the
default budget has room for some 250 bullets of 100 characters, and a sample has a handful of things to say about them.
"""
KINDS = ("ADD", "UPDATE", "MERGE", "REMOVE", "DELETE")
"""Words for an operation's type. DELETE is what many models write for REMOVE."""
_TAG_OF: dict[str, Tag] = {tag: tag for tag in TAGS}
_DEPTH = 4
"""How many lists and objects inside each other are searched for operations.

The usual form, ``{"operations": [{...}]}``, has three; one is to spare. Without a bound a reply of nothing but brackets
would exhaust Python's stack.
"""
_MOST_LITERAL = 50_000
"""Longest text, in characters, that is read as a Python literal. `ast.literal_eval` takes up to 25 microseconds a
character (measured), on the run's event loop, where everything else waits for it."""
NEWEST = 4
"""The newest of every four bullets is protected when bullets make room: it has had no chance to be cited yet.

Without that, a playbook at its token budget would evict each addition at once, since old bullets have been tagged.
"""
MOST_DRIVEN_OUT = 4
"""One operation may drive out one of every four bullets, and always at least one. More would let a single long bullet
replace what all samples before it have taught."""
MOST_EXAMPLES = 50
"""Problems that are kept with their details, for the statistics; all others are only counted. A run of thousands of
samples would otherwise keep megabytes of broken replies."""


@dataclass(frozen=True, slots=True)
class Add:
    """Add a bullet to a section."""

    section: str
    content: str


@dataclass(frozen=True, slots=True)
class Update:
    """Give a bullet another text."""

    id: str
    content: str


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge several bullets into the first of them, with a new text; their counters are added up."""

    ids: tuple[str, ...]
    content: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a bullet."""

    id: str


Operation = Add | Update | Merge | Remove


def ids_of(operation: Operation) -> tuple[str, ...]:
    """Return the ids of the bullets that an operation changes; none for an `Add`."""
    if isinstance(operation, Add):
        return ()
    return operation.ids if isinstance(operation, Merge) else (operation.id,)


def parse_operations(reply: object) -> tuple[list[Operation], list[Problem]]:
    """Read the operations in a curator's reply.

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
    candidates = [data for value in values for data in _objects(value)]
    read = [_operation(data) for data in candidates[:MOST_OPERATIONS]]
    if len(candidates) > MOST_OPERATIONS:
        read.append(Problem("too many operations", f"{len(candidates)}, read {MOST_OPERATIONS}"))
    return [entry for entry in read if not isinstance(entry, Problem)], [
        entry for entry in read if isinstance(entry, Problem)
    ]


def parse_tags(reply: object) -> tuple[list[tuple[str, Tag]], list[Problem]]:
    """Read the tags that a reflection gives to the bullets that were cited.

    Args:
        reply: an object of id to tag, or a list of objects with "id" and "tag"; also as text, see
            `parse_operations`.

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
        for item in cast("list[object]", value)[:MOST_OPERATIONS]:
            yield from _pairs(item, depth - 1)
    elif isinstance(value, Mapping):
        tagged = cast("Mapping[object, object]", value)
        if "id" in tagged:
            yield _id(tagged["id"]), tagged.get("tag")
            return
        for key, item in list(tagged.items())[:MOST_OPERATIONS]:
            if isinstance(item, str):
                yield _id(key), item
            else:
                yield from _pairs(item, depth - 1)


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
    ids = list(dict.fromkeys(_id(raw_id) for raw_id in raw if isinstance(raw_id, str) and raw_id.strip()))
    if not ids:
        return Problem("no id", str(dict(data))[:200])
    if kind == "MERGE":
        return Merge(tuple(ids), text) if len(ids) > 1 else Problem("merge of one", ids[0][:80])
    if len(ids) > 1:
        return Problem("several ids", f"{kind} {', '.join(ids)}"[:200])
    return Update(ids[0], text) if kind == "UPDATE" else Remove(ids[0])


def _id(value: object) -> str:
    """Normalize an id: models write it in brackets, quotes or capitals, a playbook in small letters."""
    return str(value).strip(" \t\n[](){}<>\"'`").lower()


def _objects(value: object, depth: int = _DEPTH) -> Iterator[Mapping[str, Any]]:
    """Yield the objects that may be operations: those in lists, and in objects with a field "operations"."""
    if depth == 0 and isinstance(value, list | dict) and value:
        yield {"type": "too deep"}
    elif isinstance(value, list):
        for item in cast("list[object]", value):
            yield from _objects(item, depth - 1)
    elif isinstance(value, Mapping):
        data = cast("Mapping[str, Any]", value)
        inner = data.get("operations")
        if isinstance(inner, list | dict | str):
            yield from (data for value in _values(cast("object", inner)) for data in _objects(value, depth - 1))
        else:
            yield data


def _values(reply: object) -> Iterator[object]:
    """Yield the JSON lists and objects in a text; where there are none, the Python literal that it is.

    Of a list that breaks off, the complete objects are yielded. A reply that is no text is yielded unchanged.
    """
    if not isinstance(reply, str):
        yield reply
        return
    text = reply[:MOST_CHARACTERS]
    values = json_values(text)
    yield from values
    if values or len(text) > _MOST_LITERAL:
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
    """Counts of samples and of what became of their operations; `AceStats` explains each field."""

    samples: int = 0
    right_at_once: int = 0
    corrected: int = 0
    reflections: int = 0
    citations: int = 0
    evicted: int = 0
    rolled_back: int = 0
    additions: Counter[str] = field(default_factory=Counter[str])
    operations: Counter[str] = field(default_factory=Counter[str])
    tags: Counter[str] = field(default_factory=Counter[str])
    problems: Counter[str] = field(default_factory=Counter[str])
    first_problems: list[Problem] = field(default_factory=list[Problem])


_COUNTS = TypeAdapter(Counts)


class PlaybookWriter:
    """The one writer of a run: it holds the newest playbook and counts what changed it.

    It is called on the run's event loop only, and awaits nothing, so that an operation is applied as a whole.

    Args:
        playbook: the playbook to begin with.
        token_budget: most tokens of the rendered playbook.
        count_tokens: counts the tokens of a text.

    Attributes:
        counts: of the samples that were applied.
    """

    def __init__(self, playbook: Playbook, token_budget: int, count_tokens: CountTokens) -> None:
        self.playbook, self.counts = playbook, Counts()
        self._token_budget, self._count_tokens = token_budget, count_tokens
        self.rolled_back_version = 0
        """Version that the last rollback made; 0 before the first."""
        self._changed: dict[str, int] = {}
        """Id of a bullet -> the version that last changed its text, for bullets changed after they were created."""

    def tag(self, tags: Iterable[tuple[str, Tag]]) -> None:
        """Count tags; a tag of a bullet that has been removed is a problem."""
        for bullet_id, tag in tags:
            if bullet_id in self.playbook:
                self.playbook = self.playbook.tagged([(bullet_id, tag)])
                self.counts.tags[tag] += 1
            else:
                self.note([Problem("tag of a gone bullet", bullet_id)])

    def apply(self, operations: Iterable[Operation], seen: int) -> list[Operation]:
        """Apply operations in order, for a curator that was shown version ``seen``; return those that were applied.

        Of two operations of the list on one bullet the first counts. An ADD of what a bullet says already raises that
        bullet's helpful counter instead. Beyond the token budget, bullets make room: those that are worth least first,
        of these the oldest; the newest quarter goes last unless it has done harm. An operation whose bullet would not
        fit alone, or would drive out more than one bullet and more than a quarter of them, or itself, is not done.
        """
        before, draft = self.playbook, _Draft(self, seen)
        applied = [operation for operation in operations if draft.apply(operation)]
        evicted = self.excess(draft.playbook)
        after = draft.playbook.replacing(bullet for bullet in draft.playbook.bullets if bullet.id not in evicted)
        old, new = ({bullet.id: bullet.content for bullet in book.bullets} for book in (before, after))
        if old == new:
            after = replace(after, version=before.version, next_number=before.next_number)
        self._changed |= {name: after.version for name, text in new.items() if old.get(name, text) != text}
        self.playbook = after
        self.counts.operations.update(type(operation).__name__.lower() for operation in applied)
        self.counts.evicted += len(evicted)
        self.note([*draft.problems, *(Problem("over the token budget", bullet_id) for bullet_id in evicted)])
        return applied

    def roll_back(self, playbook: Playbook) -> None:
        """Go on from an earlier playbook, in a new version, with the counters that its bullets have by now."""
        newest, version = self.playbook, self.playbook.version + 1
        kept: list[Bullet] = []
        for bullet in playbook.bullets:
            now = newest.get(bullet.id)
            if now is None or now.content != bullet.content:
                self._changed[bullet.id] = version
                kept.append(bullet)
            else:
                kept.append(now)
        self.playbook = replace(newest.replacing(kept), version=version)
        self.rolled_back_version = version
        self.counts.rolled_back += 1

    def excess(self, playbook: Playbook) -> list[str]:
        """Return the ids of the bullets that the token budget has no room for, first those that are worth least."""
        if self.fits(playbook):
            return []
        by_age = sorted(enumerate(playbook.bullets), key=lambda pair: (pair[1].created_version, pair[0]))
        new = {bullet.id for _, bullet in by_age[-max(1, len(playbook) // NEWEST) :] if bullet.worth >= 0}
        order = [bullet.id for _, bullet in sorted(by_age, key=lambda pair: (pair[1].id in new, pair[1].worth))]

        def fits_without(count: int) -> bool:
            evicted = set(order[:count])
            return self.fits(playbook.replacing(bullet for bullet in playbook.bullets if bullet.id not in evicted))

        return order[: bisect_left(range(len(order)), True, key=fits_without)]

    def fits(self, playbook: Playbook) -> bool:
        """Return whether a playbook is within the token budget."""
        return playbook.tokens(self._count_tokens) <= self._token_budget

    def has_changed(self, bullet_id: str, seen: int) -> bool:
        """Return whether a bullet's text was changed after a version."""
        return self._changed.get(bullet_id, 0) > seen

    def newer_than(self, seen: int) -> list[Bullet]:
        """Return the bullets that were added or got another text after a version."""
        return [
            bullet
            for bullet in self.playbook.bullets
            if bullet.created_version > seen or self.has_changed(bullet.id, seen)
        ]

    def note(self, problems: Iterable[Problem]) -> None:
        """Count problems, and keep the first ones."""
        for problem in problems:
            self.counts.problems[problem.kind] += 1
            if len(self.counts.first_problems) < MOST_EXAMPLES:
                self.counts.first_problems.append(problem)

    def to_dict(self) -> dict[str, Any]:
        """Return the state of the writer as plain data, from which `restore` goes on."""
        counts = _COUNTS.dump_python(self.counts)
        made = {"playbook": self.playbook.to_dict(), "changed": dict(self._changed), "counts": counts}
        return {**made, "rolled_back_version": self.rolled_back_version}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Go on from the state that `to_dict` returned."""
        self.playbook, self._changed = Playbook.from_dict(data["playbook"]), dict(data["changed"])
        self.counts = _COUNTS.validate_python(data["counts"])
        self.rolled_back_version = data.get("rolled_back_version", 0)


@dataclass
class _Draft:
    """A playbook while a list of operations is applied to it.

    Args:
        writer: knows the token budget and changes since.
        seen: version of the playbook that the curator was shown.
        problems: why operations were not applied.
        touched: id of a bullet -> the operation of this list that changed it.
    """

    writer: PlaybookWriter
    seen: int
    problems: list[Problem] = field(default_factory=list[Problem])
    touched: dict[str, Operation] = field(default_factory=dict[str, Operation])

    def __post_init__(self) -> None:
        before = self.writer.playbook
        self.playbook = replace(before, version=before.version + 1)
        self.driven_out = len(self.writer.excess(before))

    def apply(self, operation: Operation) -> bool:
        """Apply an operation and return True, or note the problem that prevents it and return False."""
        before = self.playbook
        problem = self._add(operation) if isinstance(operation, Add) else self._change(operation)
        if problem is None and (problem := self._excess_of(before, operation)) is not None:
            self.playbook = before
            for bullet_id in ids_of(operation):
                del self.touched[bullet_id]
        if problem is not None:
            self.problems.append(problem)
        return problem is None

    def _add(self, operation: Add) -> Problem | None:
        section = next((s for s in self.playbook.sections if s.lower() == operation.section.lower()), None)
        if section is None:
            return Problem("unknown section", operation.section[:80])
        same = same_words(operation.content, self.playbook.bullets)
        if same is not None:  # the sample has confirmed that bullet
            self.playbook = self.playbook.tagged([(same.id, "helpful")])
            return Problem("said already", f"{same.id}: {operation.content}"[:200])
        self.playbook = self.playbook.adding(section, operation.content, version=self.playbook.version)
        return None

    def _change(self, operation: Update | Merge | Remove) -> Problem | None:
        ids, bullets = ids_of(operation), self.playbook.bullets
        problem = next((problem for bullet_id in ids if (problem := self._conflict(bullet_id, operation))), None)
        if problem is not None:
            return problem
        self.touched |= dict.fromkeys(ids, operation)
        if isinstance(operation, Remove):
            self.playbook = self.playbook.replacing(bullet for bullet in bullets if bullet.id not in ids)
            return None
        parts = {bullet.id: bullet for bullet in bullets if bullet.id in ids}
        changed = replace(
            parts[ids[0]],
            content=operation.content,
            helpful=sum(bullet.helpful for bullet in parts.values()),
            harmful=sum(bullet.harmful for bullet in parts.values()),
        )
        remaining = (bullet for bullet in bullets if bullet.id not in ids[1:])
        self.playbook = self.playbook.replacing(changed if bullet.id == changed.id else bullet for bullet in remaining)
        return None

    def _excess_of(self, before: Playbook, operation: Operation) -> Problem | None:
        """Return why an operation that was just applied takes too much room; None where it does not."""
        detail = f"{type(operation).__name__}: {getattr(operation, 'content', '')}"[:200]
        old = {bullet.id: bullet.content for bullet in before.bullets}
        written = [bullet for bullet in self.playbook.bullets if bullet.content != old.get(bullet.id)]
        if any(not self.writer.fits(self.playbook.replacing([bullet])) for bullet in written):
            return Problem("longer than the token budget", detail)
        excess = self.writer.excess(self.playbook)
        most = max(1, len(self.playbook) // MOST_DRIVEN_OUT)
        if len(excess) - self.driven_out > most or any(bullet.id in excess for bullet in written):
            return Problem("takes too much room", detail)
        self.driven_out = len(excess)
        return None

    def _conflict(self, bullet_id: str, operation: Operation) -> Problem | None:
        """Return why an operation may not change a bullet; None where it may."""
        earlier = self.touched.get(bullet_id)
        if earlier is not None:
            kind = "said twice" if earlier == operation else "contradiction"
            return Problem(kind, f"{type(operation).__name__} after {type(earlier).__name__} of {bullet_id}")
        if bullet_id not in self.playbook:
            return Problem("unknown id", bullet_id[:80])
        if self.writer.has_changed(bullet_id, self.seen):
            return Problem("overtaken", f"{type(operation).__name__} of {bullet_id}, which others have changed since")
        return None
