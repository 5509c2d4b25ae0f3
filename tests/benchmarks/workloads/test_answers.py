"""Answers are compared as their benchmarks define it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads.answers import f1, label_in, last_number


@given(st.text(), st.text())
def test_f1_is_symmetric_and_between_0_and_1(one: str, other: str) -> None:
    assert 0 <= f1(one, other) <= 1
    assert f1(one, other) == f1(other, one)
    assert f1(one, one) == 1


def test_a_yes_that_comes_with_more_is_no_yes() -> None:
    assert f1("Yes.", "yes") == 1
    assert f1("yes and no", "yes") == 0


@pytest.mark.parametrize(
    ("text", "number"),
    [("5-3", 3), ("$1,500,000", 1500000), (".5", 0.5), ("15%", 15), ("x12", None), ("2.5e3", 2500), ("", None)],
)
def test_numbers_as_people_write_them(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_a_label_inside_another_one_does_not_count() -> None:
    assert label_in("a fungal infection", ["fungal infection", "infection"]) == "fungal infection"
    assert label_in("LongTermDebtFairValue", ["LongTermDebt", "LongTermDebtFairValue"]) == "LongTermDebtFairValue"
    assert label_in("", ["dengue"]) is None
