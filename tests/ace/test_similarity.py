"""When two texts say the same."""

from __future__ import annotations

import pytest

from dspy_flashevolve.ace.similarity import closest, overlap, same_words
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
    book = book_of([("other", "a b c d e f"), ("other", "g")])
    assert closest("a b c d e x", book.bullets) == book.bullets[0]
    assert closest("a b c d x y", book.bullets) is None


@pytest.mark.parametrize(
    ("first", "other"), [("Always round a b c d e.", "Never round a b c d e."), ("Use 2 a b c d e", "Use 3 a b c d e")]
)
def test_opposites_and_other_numbers_are_no_near_duplicates(first: str, other: str) -> None:
    book = book_of([("other", first), ("other", other)])
    assert closest(other, book.bullets[:1]) is None
