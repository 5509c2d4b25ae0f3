"""BM25 over a small corpus."""

from __future__ import annotations

import pytest

from benchmarks.workloads.retrieval import Corpus, Paragraph

PARAGRAPHS = [
    Paragraph("Ed Wood", "An American filmmaker."),
    Paragraph("Animorphs", "A science fantasy series of books about animals."),
    Paragraph("Woodson", "A place in Arkansas."),
]


def test_the_best_match_comes_first_and_strangers_not_at_all() -> None:
    pytest.importorskip("bm25s")
    corpus = Corpus(PARAGRAPHS)
    assert corpus.search("books on animals, made by an American", 3) == [PARAGRAPHS[1], PARAGRAPHS[0]]
    assert corpus.search("books on animals, made by an American", 1) == [PARAGRAPHS[1]]


@pytest.mark.parametrize("query", ["", "the of", "quantum chromodynamics", "???"])
def test_a_query_that_matches_nothing_finds_nothing(query: str) -> None:
    pytest.importorskip("bm25s")
    assert Corpus(PARAGRAPHS).search(query, 3) == []
