"""What the constructors of the cases share."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import strategies as st

# Without vowels none of these is in a list of English words; each has a cluster of consonants.
PLAIN = st.text("bdfgk", min_size=2, max_size=6)


class Case(NamedTuple):
    """A constraint's arguments with a text that satisfies it and one that does not."""

    arguments: dict[str, Any]
    good: str
    bad: str


def filler(draw: Any, count: int | None = None) -> list[str]:
    """Some words that mean nothing."""
    size = draw(st.integers(1, 5)) if count is None else count
    return draw(st.lists(PLAIN, min_size=size, max_size=size))


def different(draw: Any, count: int) -> list[str]:
    """Words of which no two are equal."""
    return draw(st.lists(PLAIN, min_size=count, max_size=count, unique=True))
