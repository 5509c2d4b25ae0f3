"""Values and texts of a run as people read them, in a terminal or on a page."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from dspy_flashevolve.observe.history import Candidate

UNKNOWN = "unknown"


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay rows out in columns, one line each; all columns but the first are aligned to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *rows]
    ]


def format_number(value: float | None, places: int = 0) -> str:
    """Write a number with separators; None is unknown.

    >>> format_number(1234567), format_number(0.5, 3), format_number(None)
    ('1,234,567', '0.500', 'unknown')
    """
    return UNKNOWN if value is None else f"{value:,.{places}f}"


def format_duration(seconds: float | None) -> str:
    """Write seconds in the units that a person would choose; None is unknown.

    >>> format_duration(7.25), format_duration(3725), format_duration(None)
    ('7.2 s', '1 h 02 min', 'unknown')
    """
    if seconds is None:
        return UNKNOWN
    minutes = int(seconds // 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {int(seconds % 60):02d} s" if minutes else f"{seconds:.1f} s"


def format_score(score: float | None) -> str:
    """Write a score; None is unknown."""
    return format_number(score, 4)


def format_standing(candidate: Candidate) -> str:
    """Write a candidate's score or, while it is being validated, how many examples are done."""
    if candidate.score is None and candidate.scores:
        total = "" if candidate.examples is None else f" of {candidate.examples}"
        return f"{len(candidate.scores)}{total} examples"
    return format_score(candidate.score)


def time_left(seconds: float, max_seconds: float | None, share: float | None) -> str:
    """Estimate how much longer a run may take, by the limit that it reaches first; empty where no limit tells.

    Args:
        seconds: seconds that it has taken.
        max_seconds: the limit in seconds.
        share: share of its metric calls, dollars or reflections that is used, from 0 to 1.

    >>> time_left(30, 100, None), time_left(30, 100, 0.5), time_left(30, None, None)
    ('about 1 min 10 s left', 'about 30.0 s left', '')
    """
    # As if the rest were spent as fast as what was: steps are many and alike, so that this is good enough to wait by.
    by_limit = [max_seconds - seconds] if max_seconds is not None else []
    by_limit += [seconds / share - seconds] if share else []
    return f"about {format_duration(max(0.0, min(by_limit)))} left" if by_limit else ""


def texts_diff(before: Mapping[str, str], after: Mapping[str, str], old: str, new: str, context: int) -> list[str]:
    """Compare the texts of two candidates, component by component, as a unified diff; `old`, `new` end its headings."""
    lines: list[str] = []
    for name in dict.fromkeys([*before, *after]):  # a component that only one of them has is a difference, too
        texts = before.get(name, "").splitlines(), after.get(name, "").splitlines()
        lines += difflib.unified_diff(*texts, name + old, name + new, lineterm="", n=context)
    return lines


def candidates_diff(before: Candidate, after: Candidate) -> list[str]:
    """Compare two candidates of a run, component by component, as a unified diff."""
    old, new = (f" of candidate {candidate.index}" for candidate in (before, after))
    return texts_diff(before.texts, after.texts, old, new, 2)
