"""The operations of a curator on a playbook: how they are read from its reply, and how the one writer applies them.

A reply may hold anything. What can be read becomes an operation; everything else becomes a `Problem`, which is counted
and does not hold up the other operations. Texts of bullets never change: other curators may have added and removed
bullets since this one looked, and its operations still mean what they meant.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from pydantic import TypeAdapter

from dspy_flashevolve.ace.playbook import TAGS, CountTokens, Playbook, Tag, cleaned, line_of
from dspy_flashevolve.modules.reading import MOST_CHARACTERS, json_values
from dspy_flashevolve.observe.statistics import Problem

MOST_OPERATIONS = 200
"""Operations of one reply that are read: each renders the playbook anew to count its tokens, and a playbook of the
default budget has room for some 250 bullets of 100 characters. The rest of a reply is one problem."""
_TAG_OF: dict[str, Tag] = {tag: tag for tag in TAGS}
_DEPTH = 4
"""Lists and objects inside each other that are searched for operations: ``{"operations": [{...}]}`` has three. Without
a bound a reply of nothing but brackets would exhaust Python's stack."""
_MOST_LITERAL = 50_000
"""Longest text, in characters, that is read as a Python literal. `ast.literal_eval` takes up to 25 microseconds a
character (measured), on the run's event loop, where everything else waits for it."""
NEWEST = 4
"""The newest of every four bullets is protected when bullets make room: it has had no chance to be cited yet, and a
full playbook would evict each addition at once."""
LARGEST = 4
"""A bullet may take one fourth of the token budget: a longer one would replace what all samples before have taught."""
MOST_EXAMPLES = 50
"""Problems that are kept with their details, for the statistics; all others are only counted. A run of thousands of
samples would otherwise keep megabytes of broken replies."""
_SAID = re.compile(r"\w+|[+/=<>^%\u00d7\u00f7\u2264\u2265\u2260]|(?<=\w )[-*](?= \w)|-(?=\d)|(?<=\w)\*(?=\w)")
"""The words of a text and its signs of arithmetic; a hyphen and a bullet of a list are none."""


@dataclass(frozen=True, slots=True)
class Add:
    """Add a bullet to a section."""

    section: str
    content: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a bullet."""

    id: str


Operation = Add | Remove


def parse_operations(reply: object) -> tuple[list[Operation], list[Problem]]:
    """Read the operations in a curator's reply.

    Args:
        reply: a list of objects with "type" (ADD or REMOVE), "section", "content" or "id"; the same as JSON or as
            Python source, inside other text, cut off, or as an object that holds it.

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
    problems = [entry for entry in read if isinstance(entry, Problem)]
    return [entry for entry in read if not isinstance(entry, Problem)], problems


def parse_tags(reply: object) -> tuple[list[tuple[str, Tag]], list[Problem]]:
    """Read the tags that a reflection gives to the bullets that were cited.

    Args:
        reply: an object of id to tag, or a list of objects with "id" and "tag"; also as text, see `parse_operations`.

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
    for data in [data for value in values for data in _objects(value)][:MOST_OPERATIONS]:
        pairs = [(data["id"], data.get("tag"))] if "id" in data else list(data.items())[:MOST_OPERATIONS]
        for bullet_id, word in pairs:
            if tag := _TAG_OF.get(str(word).strip().lower()):
                tags.setdefault(_id(bullet_id), tag)
            else:
                problems.append(Problem("unknown tag", str(word)[:80]))
    return list(tags.items()), problems


def _operation(data: Mapping[str, Any]) -> Operation | Problem:
    kind = str(data.get("type", data.get("op", data.get("operation", "")))).strip().upper()
    if kind == "ADD":
        content = data.get("content", data.get("text"))
        text = cleaned(content) if isinstance(content, str) else ""
        return Add(str(data.get("section", "")).strip(), text) if text else Problem("no content", str(dict(data))[:200])
    if kind in ("REMOVE", "DELETE"):  # DELETE is what many models write
        bullet_id = data.get("id", data.get("bullet_id"))
        is_id = isinstance(bullet_id, str) and bullet_id.strip()
        return Remove(_id(bullet_id)) if is_id else Problem("no id", str(dict(data))[:200])
    return Problem("unknown operation", (kind or str(dict(data)))[:80])


def _id(value: object) -> str:
    """Normalize an id: models write it in brackets, quotes or capitals, a playbook in small letters."""
    return str(value).strip(" \t\n[](){}<>\"'`").lower()


def _objects(value: object, depth: int = _DEPTH) -> Iterator[Mapping[str, Any]]:
    """Yield the objects in lists, and in objects with a field "operations" or "bullet_tags"."""
    if depth == 0 and isinstance(value, list | dict) and value:
        yield {"type": "too deep"}
    elif isinstance(value, list):
        for item in cast("list[object]", value):
            yield from _objects(item, depth - 1)
    elif isinstance(value, Mapping):
        data = cast("Mapping[str, Any]", value)
        inner = data.get("operations", data.get("bullet_tags"))
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
    operations: Counter[str] = field(default_factory=Counter[str])
    tags: Counter[str] = field(default_factory=Counter[str])
    problems: Counter[str] = field(default_factory=Counter[str])
    first_problems: list[Problem] = field(default_factory=list[Problem])


_COUNTS = TypeAdapter(Counts)


class PlaybookWriter:
    """The one writer of a run: it holds the newest playbook and counts what changed it.

    It is called on the run's event loop only, and awaits nothing, so that a lesson is applied as a whole.
    """

    def __init__(self, playbook: Playbook, token_budget: int, count_tokens: CountTokens) -> None:
        self.playbook, self.counts = playbook, Counts()
        self._token_budget, self._count_tokens = token_budget, count_tokens
        self.rolled_back_version = 0
        """Version that the last rollback made; 0 before the first."""

    def tag(self, tags: Iterable[tuple[str, Tag]]) -> None:
        """Count tags; a tag of a bullet that has been removed is a problem."""
        for bullet_id, tag in tags:
            if bullet_id in self.playbook:
                self.playbook = self.playbook.tagged([(bullet_id, tag)])
                self.counts.tags[tag] += 1
            else:
                self.note([Problem("tag of a gone bullet", bullet_id)])

    def apply(self, operations: Iterable[Operation]) -> list[Operation]:
        """Apply operations in order, in one new version; return those that were applied.

        An ADD of what a bullet says already raises that bullet's helpful counter instead. Beyond the token budget,
        bullets make room: those that are worth least first, of these the oldest; the newest quarter goes last unless it
        has done harm.
        """
        before = self.playbook
        self.playbook = replace(before, version=before.version + 1)
        applied: list[Operation] = []
        for operation in operations:
            problem = None
            if isinstance(operation, Add):
                problem = self._add(operation)
            elif operation.id not in self.playbook:
                problem = Problem("unknown id", operation.id[:80])
            else:
                rest = (bullet for bullet in self.playbook.bullets if bullet.id != operation.id)
                self.playbook = self.playbook.replacing(rest)
            if problem is None:
                applied.append(operation)
            else:
                self.note([problem])
        evicted = self._excess()
        after = self.playbook.replacing(bullet for bullet in self.playbook.bullets if bullet.id not in evicted)
        if [bullet.id for bullet in after.bullets] == [bullet.id for bullet in before.bullets]:
            after = replace(after, version=before.version, next_number=before.next_number)
        self.playbook = after
        self.counts.operations.update(type(operation).__name__.lower() for operation in applied)
        self.counts.evicted += len(evicted)
        self.note(Problem("over the token budget", bullet_id) for bullet_id in evicted)
        return applied

    def _add(self, operation: Add) -> Problem | None:
        """Add a bullet, or return why not."""
        playbook, detail = self.playbook, operation.content[:200]
        section = next((name for name in playbook.sections if name.lower() == operation.section.lower()), None)
        if section is None:
            return Problem("unknown section", operation.section[:80])
        said = _SAID.findall(operation.content.lower()) or [operation.content]
        for bullet in playbook.bullets:
            if (_SAID.findall(bullet.content.lower()) or [bullet.content]) == said:  # the sample has confirmed it
                self.playbook = playbook.tagged([(bullet.id, "helpful")])
                return Problem("said already", f"{bullet.id}: {detail}"[:200])
        grown = playbook.adding(section, operation.content, version=playbook.version)
        bullet = grown.bullets[-1]
        tokens = self._count_tokens(line_of(bullet))
        if tokens * LARGEST > self._token_budget or not self._fits(grown.replacing([bullet])):
            return Problem("takes too much room", detail)
        self.playbook = grown
        return None

    def roll_back(self, playbook: Playbook) -> None:
        """Go on from an earlier playbook, in a new version, with the counters that its bullets have by now."""
        newest, version = self.playbook, self.playbook.version + 1
        bullets = [newest.get(bullet.id) or bullet for bullet in playbook.bullets]
        self.playbook = replace(newest.replacing(bullets), version=version)
        self.rolled_back_version = version
        self.counts.rolled_back += 1

    def _excess(self) -> list[str]:
        """Return the ids of the bullets that the token budget has no room for, first those that are worth least."""
        playbook = self.playbook
        if self._fits(playbook):
            return []
        by_age = sorted(enumerate(playbook.bullets), key=lambda pair: (pair[1].created_version, pair[0]))
        new = {bullet.id for _, bullet in by_age[-max(1, len(playbook) // NEWEST) :] if bullet.worth >= 0}
        order = [bullet.id for _, bullet in sorted(by_age, key=lambda pair: (pair[1].id in new, pair[1].worth))]

        def fits_without(count: int) -> bool:
            evicted = set(order[:count])
            return self._fits(playbook.replacing(bullet for bullet in playbook.bullets if bullet.id not in evicted))

        return order[: bisect_left(range(len(order)), True, key=fits_without)]

    def _fits(self, playbook: Playbook) -> bool:
        return playbook.tokens(self._count_tokens) <= self._token_budget

    def note(self, problems: Iterable[Problem]) -> None:
        """Count problems, and keep the first ones."""
        for problem in problems:
            self.counts.problems[problem.kind] += 1
            if len(self.counts.first_problems) < MOST_EXAMPLES:
                self.counts.first_problems.append(problem)

    def to_dict(self) -> dict[str, Any]:
        """Return the state of the writer as plain data, from which `restore` goes on."""
        state = {"playbook": self.playbook.to_dict(), "rolled_back_version": self.rolled_back_version}
        return {**state, "counts": _COUNTS.dump_python(self.counts)}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Go on from the state that `to_dict` returned."""
        self.playbook, self.counts = Playbook.from_dict(data["playbook"]), _COUNTS.validate_python(data["counts"])
        self.rolled_back_version = data["rolled_back_version"]
