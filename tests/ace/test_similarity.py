"""When two texts say the same."""

from __future__ import annotations

import pytest

from dspy_flashevolve.ace.operations import Add, Remove
from dspy_flashevolve.ace.similarity import same_words, without_repeats
from tests.ace.books import book_of


@pytest.mark.parametrize(
    "other",
    ["Growth is a - b over b.", "Growth is a + b, over 2 b.", "Growth is not a + b over b.", "Growth is a × b over b."],
)
def test_another_sign_number_or_denial_is_no_repetition(other: str) -> None:
    book = book_of([("formulas", "Growth is a + b over b.")])
    assert without_repeats([Add("other", other)], book.bullets)[0] == [Add("other", other)]
    assert same_words(other, book.bullets) is None
    assert same_words("growth is: a + b (over b)", book.bullets) == book.bullets[0]


@pytest.mark.parametrize(
    ("one", "other", "same"),
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
def test_signs_of_arithmetic_make_a_difference_and_marks_of_writing_do_not(one: str, other: str, same: bool) -> None:
    book = book_of([("formulas", one)])
    assert (same_words(other, book.bullets) is not None) == same
    assert (without_repeats([Add("other", other)], book.bullets)[0] == []) == same


def test_an_addition_that_nearly_repeats_a_newer_bullet_goes_and_other_operations_stay() -> None:
    newer = book_of([("other", "Check the sign of each term.")]).bullets
    near, fresh = Add("other", "check the sign of each of the terms"), Add("other", "Convert the term.")
    kept, problems, repeated = without_repeats([near, fresh, Remove("oth-1")], newer)
    assert (kept, repeated) == ([fresh, Remove("oth-1")], ["oth-1"])
    assert [one.kind for one in problems] == ["repeats a newer bullet"]
