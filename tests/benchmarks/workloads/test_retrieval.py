"""BM25 over a small corpus."""

from __future__ import annotations

import copy
import pickle
import sys

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


def test_what_is_known_makes_room_for_the_next_best() -> None:
    pytest.importorskip("bm25s")
    found = Corpus(PARAGRAPHS).search("books on animals, made by an American", 1, known=PARAGRAPHS[1:2])
    assert found == [PARAGRAPHS[0]]


@pytest.mark.parametrize("query", ["", "the of", "quantum chromodynamics", "???"])
def test_a_query_that_matches_nothing_finds_nothing(query: str) -> None:
    pytest.importorskip("bm25s")
    assert Corpus(PARAGRAPHS).search(query, 3) == []


def test_no_paragraphs_hold_nothing() -> None:
    pytest.importorskip("bm25s")
    assert Corpus([]).search("books", 3) == []


def test_a_copy_is_the_corpus_itself_and_a_pickle_holds_the_paragraphs_alone() -> None:
    pytest.importorskip("bm25s")
    corpus = Corpus([*PARAGRAPHS, PARAGRAPHS[0]])
    assert copy.deepcopy(corpus) is corpus
    pickled = pickle.dumps(corpus)
    assert len(pickled) < 500
    loaded = pickle.loads(pickled)
    assert loaded.paragraphs == tuple(PARAGRAPHS)
    assert loaded.search("Arkansas", 1) == [PARAGRAPHS[2]]


def test_without_bm25s_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ImportError, match=r"dspy-flashevolve\[benchmarks\]"):
        Corpus(PARAGRAPHS)
