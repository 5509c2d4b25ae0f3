"""BM25 over the few paragraphs of one example, by bm25s."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple


class Paragraph(NamedTuple):
    """A titled paragraph."""

    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.title} | {self.text}"


def _bm25s() -> Any:
    try:
        return importlib.import_module("bm25s")
    except ImportError:
        raise ImportError("retrieval needs bm25s: pip install 'dspy-flashevolve[benchmarks]'") from None


@functools.lru_cache(maxsize=1024)
def _index(paragraphs: tuple[Paragraph, ...]) -> Any:
    bm25s = _bm25s()
    index = bm25s.BM25()
    index.index(bm25s.tokenize([str(one) for one in paragraphs], stopwords="en", show_progress=False),
                show_progress=False)  # fmt: skip
    return index


def retrieve(query: str, paragraphs: Sequence[Paragraph], count: int) -> list[Paragraph]:
    """The paragraphs that match the query best, best first; those that share no word with it are left out.

    Args:
        query: Any text.
        paragraphs: What is searched; indexed once for each list.
        count: The most that come back.

    Raises:
        ImportError: If bm25s is not installed.
    """
    bm25s = _bm25s()
    known = tuple(paragraphs)
    tokens = bm25s.tokenize([query], stopwords="en", show_progress=False, return_ids=False)
    if not known or not tokens[0]:
        return []
    found, scores = _index(known).retrieve(tokens, k=min(count, len(known)), show_progress=False)
    return [known[int(place)] for place, score in zip(found[0], scores[0], strict=True) if score > 0]
