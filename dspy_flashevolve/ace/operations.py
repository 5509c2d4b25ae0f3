"""Reading what a curator and a reflector wrote: operations on the playbook, and tags of its bullets.

A reply may hold anything. What can be read counts; everything else becomes a `Problem`, which is counted and does not
hold up the other operations. Texts of bullets never change: other curators may have added and removed bullets since
this one looked, and its operations still mean what they meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from dspy_flashevolve.ace.playbook import TAGS, Add, Operation, Remove, Tag, cleaned
from dspy_flashevolve.modules.reading import MOST_CHARACTERS, json_values
from dspy_flashevolve.observe.statistics import Problem

MOST_OPERATIONS = 200
"""Operations of one reply that are read: each renders the playbook anew to count its tokens, and a playbook of the
default budget has room for some 250 bullets of 100 characters. The rest of a reply is one problem."""
_DEPTH = 4
"""Lists and objects inside each other that are searched for operations: ``{"operations": [{...}]}`` has three. Without
a bound a reply of nothing but brackets would exhaust Python's stack."""


def parse_operations(reply: object) -> tuple[list[Operation], list[Problem]]:
    """Read the operations in a curator's reply.

    Args:
        reply: a list of objects with "type" (ADD or REMOVE), "section", "content" or "id"; the same as JSON, inside
            other text, cut off, or as an object that holds it.

    Returns:
        The operations in order, and what could not be read. Text without any JSON is one problem; an empty list, or
        text that is empty, asks for nothing.

    >>> parse_operations('Here: [{"type": "REMOVE", "id": "str-1"}, {"type": "SHOUT"}]')
    ([Remove(id='str-1')], [Problem(kind='unknown operation', detail='SHOUT')])
    """
    objects, problems = _objects_of(reply)
    operations: list[Operation] = []
    for operation in map(_operation, objects):
        problems.append(operation) if isinstance(operation, Problem) else operations.append(operation)
    return operations, problems


def parse_tags(reply: object) -> tuple[list[tuple[str, Tag]], list[Problem]]:
    """Read the tags that a reflection gives to the bullets that were cited.

    Args:
        reply: an object of id to tag, or a list of objects with "id" and "tag"; also as text, see `parse_operations`.

    Returns:
        (id, tag), an id once; and what could not be read.

    >>> parse_tags('{"str-1": "helpful", "str-2": "splendid"}')
    ([('str-1', 'helpful')], [Problem(kind='unknown tag', detail='splendid')])
    """
    is_none = isinstance(reply, str) and reply.strip().lower() in ("none", "n/a")
    objects, problems = _objects_of("" if is_none else reply)
    tags: dict[str, Tag] = {}
    for data in objects:
        pairs = [(data["id"], data.get("tag"))] if "id" in data else list(data.items())[:MOST_OPERATIONS]
        for bullet_id, word in pairs:
            tag = str(word).strip().lower()
            if tag in TAGS:
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


def _objects_of(reply: object) -> tuple[list[Mapping[str, Any]], list[Problem]]:
    """Return the objects in a reply, at most `MOST_OPERATIONS`, and its problems; see `parse_operations`."""
    values = json_values(reply[:MOST_CHARACTERS]) if isinstance(reply, str) else [reply]
    objects = [data for value in values for data in _objects_in(value, _DEPTH)]
    problems: list[Problem] = []
    if isinstance(reply, str) and reply.strip() and not values:
        problems.append(Problem("unreadable reply", reply.strip()[:200]))
    if len(objects) > MOST_OPERATIONS:
        problems.append(Problem("too many operations", f"{len(objects)}, read {MOST_OPERATIONS}"))
    return objects[:MOST_OPERATIONS], problems


def _objects_in(value: object, depth: int) -> Iterator[Mapping[str, Any]]:
    """Yield the objects in lists, and in objects with a field "operations" or "bullet_tags", which may be a text."""
    if depth == 0 and isinstance(value, list | dict) and value:
        yield {"type": "too deep"}
    elif isinstance(value, list):
        for item in cast("list[object]", value):
            yield from _objects_in(item, depth - 1)
    elif isinstance(value, Mapping):
        data = cast("Mapping[str, Any]", value)
        inner = data.get("operations", data.get("bullet_tags"))
        if isinstance(inner, str):
            inner = json_values(inner[:MOST_CHARACTERS])
        if isinstance(inner, list | dict):
            yield from _objects_in(cast("object", inner), depth - 1)
        else:
            yield data
