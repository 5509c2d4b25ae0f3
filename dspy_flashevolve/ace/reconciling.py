"""Stale additions: what was written before others added bullets, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dspy_flashevolve.ace.operations import Add, Operation, Problem, Update, parse_objects
from dspy_flashevolve.ace.playbook import Bullet
from dspy_flashevolve.ace.similarity import closest
from dspy_flashevolve.ace.text import cleaned

LEAST_OVERLAP = 0.7
"""Shared words from which an addition repeats a newer bullet."""


def without_repeats(
    operations: Iterable[Operation], newer: Sequence[Bullet]
) -> tuple[list[Operation], list[Problem], list[str]]:
    """The operations without additions that nearly repeat a newer bullet.

    Returns:
        The other operations, a problem for each addition that went, and the ids of the bullets that say it: the
        addition is merged into these, and speaks for them.
    """
    kept: list[Operation] = []
    problems: list[Problem] = []
    repeated: list[str] = []
    for operation in operations:
        bullet = closest(operation.content, newer, LEAST_OVERLAP) if isinstance(operation, Add) else None
        if bullet is None:
            kept.append(operation)
        else:
            problems.append(Problem("repeats a newer bullet", f"{bullet.id}: {bullet.content}"[:200]))
            repeated.append(bullet.id)
    return kept, problems, repeated


def decided(additions: Sequence[Add], newer: Sequence[Bullet], reply: object) -> tuple[list[Operation], list[Problem]]:
    """What a reply makes of stale additions; one that it does not mention, or not clearly, is admitted.

    Args:
        additions: numbered from 1 in the reply.
        newer: bullets that an addition may be merged with.
        reply: a list of objects with "addition", "decision" (admit, drop or merge), and for a merge "id" and "content".

    Returns:
        Operations in place of the additions, and what was dropped or could not be used.
    """
    found, problems = parse_objects(reply)
    decisions: dict[int, dict[str, Any]] = {}
    for one in found:
        number = _number(one.get("addition"))
        if number is None or not 1 <= number <= len(additions):
            problems.append(Problem("unknown addition", str(one.get("addition"))[:80]))
        else:
            decisions.setdefault(number, dict(one))
    ids = {bullet.id for bullet in newer}
    operations: list[Operation] = []
    for number, addition in enumerate(additions, start=1):
        decision = decisions.get(number, {})
        word = str(decision.get("decision", "admit")).strip().lower()
        target, content = str(decision.get("id", "")).strip(" []").lower(), decision.get("content")
        if word == "drop":
            problems.append(Problem("stale addition dropped", addition.content[:200]))
        elif word == "merge" and target in ids and isinstance(content, str) and cleaned(content):
            operations.append(Update(target, cleaned(content)))
        else:
            if word != "admit":
                problems.append(Problem("unknown decision", f"{word} {target}"[:80]))
            operations.append(addition)
    return operations, problems


def _number(value: object) -> int | None:
    try:
        return int(str(value).strip(" .#"))
    except ValueError:
        return None
