"""Sloppy forms of replies: what is asked for is said, but not in the form that was asked for."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.models.sloppy import TEXT_FORMS, VERDICT_FORMS, sloppy_form
from dspy_flashevolve.sim.words import Choices


def test_as_many_replies_are_sloppy_as_the_model_says_in_every_form() -> None:
    drawn = Counter(sloppy_form(0.6, Choices(0, str(n)), verdicts=True) for n in range(2400))
    assert set(drawn) == {None, *TEXT_FORMS, *VERDICT_FORMS}
    assert drawn[None] / 2400 == pytest.approx(0.4, abs=0.04)
    assert min(count for form, count in drawn.items()) > 60
    without = {sloppy_form(1, Choices(0, str(n)), verdicts=False) for n in range(300)}
    assert without == set(TEXT_FORMS)
    assert {sloppy_form(0, Choices(0, str(n)), verdicts=True) for n in range(100)} == {None}
