"""BM25 over a small corpus of paragraphs, by bm25s."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple


class Paragraph(NamedTuple):
    """A titled paragraph."""

    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.title} | {self.text}"


class Corpus:
    """Paragraphs with their BM25 index, which is built once.

    A corpus never changes. So `copy.deepcopy` gives the corpus itself, which keeps copies of a program that holds it
    cheap, and a pickle holds the paragraphs alone, from which the index is built anew.

    Args:
        paragraphs: What is searched; of equal paragraphs only the first is kept.

    Raises:
        ImportError: If bm25s is not installed.
    """

    def __init__(self, paragraphs: Iterable[Paragraph]) -> None:
        self.paragraphs = tuple(dict.fromkeys(paragraphs))
        self._bm25s = _bm25s()
        self._index = self._bm25s.BM25()
        if self.paragraphs:  # bm25s cannot index nothing
            self._index.index(self._tokens(map(str, self.paragraphs)), show_progress=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Corpus:
        return self

    def __reduce__(self) -> tuple[type[Corpus], tuple[tuple[Paragraph, ...]]]:
        return Corpus, (self.paragraphs,)

    def search(self, query: str, count: int, known: Collection[Paragraph] = ()) -> list[Paragraph]:
        """Find the paragraphs that match a query best, best first; those that share no word with it are left out.

        Args:
            query: Any text.
            count: The most paragraphs that come back.
            known: Paragraphs that must not come back.
        """
        [tokens] = self._tokens([query])
        most = min(count + len(known), len(self.paragraphs))
        if not most or not tokens:
            return []
        places, scores = self._index.retrieve([tokens], k=most, show_progress=False)
        matching = [self.paragraphs[int(place)] for place, score in zip(places[0], scores[0], strict=True) if score > 0]
        return [paragraph for paragraph in matching if paragraph not in known][:count]

    def _tokens(self, texts: Iterable[str]) -> list[list[str]]:
        """The words of each text, without English stop words."""
        return self._bm25s.tokenize(list(texts), stopwords="en", show_progress=False, return_ids=False)


def _bm25s() -> Any:
    try:
        return importlib.import_module("bm25s")
    except ImportError:
        raise ImportError("retrieval needs bm25s: pip install 'dspy-flashevolve[benchmarks]'") from None
