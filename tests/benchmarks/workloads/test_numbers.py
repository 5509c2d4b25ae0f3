"""AIME's integers and Formula's decimals."""

from __future__ import annotations

import dspy
import pytest

from benchmarks.workloads import aime, formula


@pytest.mark.parametrize(
    ("text", "score"), [("025", 1), (r"So \boxed{25}.", 1), ("x = 25", 1), ("25.5", 0), ("250", 0), ("many", 0)]
)
def test_aime_wants_the_integer(text: str, score: int) -> None:
    verdict = aime.metric(dspy.Example(answer="025"), dspy.Prediction(answer=text))
    assert verdict.score == score
    assert "25" in verdict.feedback


@pytest.mark.parametrize(
    ("text", "target", "score"),
    [("8.333", "8.33", 1), ("$300,000,000", "300000000.0", 1), ("0.06", "0.05", 0), ("-2", "2.0", 0), ("0", "0.0", 1)],
)
def test_formula_wants_the_number_to_two_decimals(text: str, target: str, score: int) -> None:
    verdict = formula.metric(dspy.Example(target=target), dspy.Prediction(answer=text))
    assert verdict.score == score
    assert target in verdict.feedback


def test_a_percentage_for_a_share_is_told_from_other_errors() -> None:
    gold = dspy.Example(target="0.15")
    assert "off by a factor of 100" in formula.metric(gold, dspy.Prediction(answer="15%")).feedback
    assert "factor" not in formula.metric(gold, dspy.Prediction(answer="16")).feedback
