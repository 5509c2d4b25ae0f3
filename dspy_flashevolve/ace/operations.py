"""What a curator may do to a playbook, read from whatever it wrote.

A reply may hold anything. What can be read is an operation; all else is a :class:`Problem`, which is counted and does
not hold up the others.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from dspy_flashevolve.ace.playbook import TAGS, Tag, cleaned
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
