"""When two texts say the same."""

from __future__ import annotations

import pytest

from dspy_flashevolve.ace.playbook import Playbook
from dspy_flashevolve.ace.similarity import Embeddings, closest, near_duplicates, overlap, same_words
from dspy_flashevolve.engine.errors import ConfigurationError
from tests.ace.books import book_of


@pytest.mark.parametrize(
    "other",
    ["Growth is a - b over b.", "Growth is a + b, over 2 b.", "Growth is not a + b over b.", "Growth is a × b over b."],
)
def test_another_sign_number_or_denial_is_no_repetition(other: str) -> None:
    book = book_of([("formulas", "Growth is a + b over b.")])
    assert closest(other, book.bullets) is None
    assert same_words(other, book.bullets) is None
    assert same_words("growth is: a + b (over b)", book.bullets) == book.bullets[0]


@pytest.mark.parametrize(
    ("first", "other", "same"),
    [
        ("Take a / b of the rows.", "Take b / a of the rows.", False),
        ("Check that x != y there.", "Check that x = y there.", False),
        ("Keep it where x ≤ y holds.", "Keep it where x ≥ y holds.", False),
        ("Gain is price - cost here.", "Gain is price + cost here.", False),
        ("- Round up at the end.", "Round up at the end.", True),
        ("**Round** up at the end.", "Round up at the end", True),
        ("Mind the right-hand input/output.", "Mind the right hand input, output.", True),
    ],
)
def test_signs_of_arithmetic_make_a_difference_and_marks_of_writing_do_not(first: str, other: str, same: bool) -> None:
    book = book_of([("formulas", first)])
    assert (same_words(other, book.bullets) is not None) == same
    assert (closest(other, book.bullets) is not None) == same


def test_a_text_that_nearly_says_what_a_bullet_says_is_found() -> None:
    book = book_of([("other", "Check the sign of each term.")])
    assert closest("check the sign of each of the terms", book.bullets) == book.bullets[0]
    assert closest("Convert the term.", book.bullets) is None


def test_overlap_is_the_share_of_common_words() -> None:
    assert overlap("", "") == 1.0
    assert overlap("a b", "b a.") == 1.0
    book = book_of([("other", "a"), ("other", "b")])
    assert closest("a b c", book.bullets, 0.3) == book.bullets[0]
    assert closest("a b c", book.bullets, 0.5) is None


def letters(texts: list[str]) -> list[list[float]]:
    """A stand-in for an embedder: how often each letter occurs."""
    return [[float(text.lower().count(letter)) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts]


def groups_of(book: Playbook, embeddings: Embeddings | None = None) -> list[list[str]]:
    """The texts of the near-duplicates, group by group."""
    if embeddings is None:
        groups = near_duplicates(book.bullets)
    else:
        embeddings.prepare([bullet.content for bullet in book.bullets])
        groups = near_duplicates(book.bullets, (), embeddings.threshold, embeddings.cosine)
    return [[bullet.content for bullet in group] for group in groups]


def test_bullets_that_nearly_say_the_same_are_grouped_by_words_or_by_embeddings() -> None:
    near = "Check the sign of each term.", "Check the sign of each of the terms.", "Check, of each term, the sign."
    book = book_of([("other", near[0]), ("other", "Round late."), ("formulas", near[1]), ("other", near[2])])
    assert groups_of(book) == [list(near)]
    anagrams = book_of([("other", text) for text in ("abba abba", "xyz", "baab", "abx")])
    assert groups_of(anagrams) == []
    assert groups_of(anagrams, Embeddings(letters, threshold=0.99)) == [["abba abba", "baab"]]


def test_what_was_compared_before_is_compared_with_new_texts_only() -> None:
    texts = ["Mind the units of each rate.", "Mind units of each rate.", "Round late.", "Round it late."]
    book, asked = book_of([("other", text) for text in texts]), list[set[str]]()

    def alike(first: str, second: str) -> float:
        asked.append({first, second})
        return overlap(first, second)

    assert len(near_duplicates(book.bullets, (), 0.6, alike)) == 2
    asked.clear()
    [group] = near_duplicates(book.bullets, texts[:3], 0.6, alike)
    assert [bullet.content for bullet in group] == texts[2:]
    assert all(texts[3] in pair for pair in asked)


def test_equal_vectors_pass_a_threshold_of_one() -> None:
    book = book_of([("other", "one two three"), ("other", "three one two")])
    assert len(groups_of(book, Embeddings(lambda texts: [[0.1, 0.7, 0.3] for _ in texts], threshold=1.0))) == 1


def test_each_text_is_embedded_once() -> None:
    asked: list[str] = []

    def counting(texts: list[str]) -> list[list[float]]:
        asked.extend(texts)
        return letters(texts)

    embeddings = Embeddings(counting, threshold=0.9)
    for _ in range(2):
        embeddings.prepare(["a", "zz", "a"])
    assert asked == ["a", "zz"]


@pytest.mark.parametrize("vectors", [[], [[1.0], [1.0, 2.0]], [[1.0], [float("nan")]]])
def test_vectors_that_cannot_be_compared_are_refused(vectors: list[list[float]]) -> None:
    with pytest.raises(ConfigurationError, match="embedder"):
        Embeddings(lambda texts: vectors, threshold=0.9).prepare(["a", "b"])


@pytest.mark.parametrize(
    ("first", "other"), [("Always round a b c.", "Never round a b c."), ("Use 2 a b c", "Use 3 a b c")]
)
def test_opposites_and_other_numbers_are_no_near_duplicates(first: str, other: str) -> None:
    book = book_of([("other", first), ("other", other)])
    assert closest(other, book.bullets[:1], 0.5) is None
    assert near_duplicates(book.bullets, (), 0.5) == []
    assert groups_of(book, Embeddings(lambda texts: [[1.0] for _ in texts], threshold=0.9)) == []
