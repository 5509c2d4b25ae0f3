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
    [
        ("8.33", "8.33", 1),
        (" 300,000,000 ", "300000000.0", 1),
        ("0", "0.0", 1),
        ("8.333", "8.33", 0),
        ("-2", "2.0", 0),
        ("$5", "5.0", 0),
        ("It is 5.", "5.0", 0),
        ("nan", "5.0", 0),
    ],
)
def test_formula_wants_the_plain_number_itself(text: str, target: str, score: int) -> None:
    verdict = formula.metric(dspy.Example(target=target), dspy.Prediction(answer=text))
    assert verdict.score == score
    assert target in verdict.feedback


def test_a_percentage_for_a_share_is_told_from_other_errors() -> None:
    gold = dspy.Example(target="0.15")
    assert "off by a factor of 100" in formula.metric(gold, dspy.Prediction(answer="15")).feedback
    assert "factor" not in formula.metric(gold, dspy.Prediction(answer="16")).feedback


def test_formula_shows_the_question_without_the_formula_and_the_form_of_the_answer() -> None:
    row = {
        "context": 'Use formula F to answer. Formula: F = a / b. Question:  "Find F of 1 and 2."\n. Answer:',
        "target": "0.5",
    }
    asked = formula.example(row)
    assert asked.question == (
        "Find F of 1 and 2. Answer with a plain number, rounded to two decimals where it has more. Write 5 million as "
        "5000000.0."
    )
    assert asked.target == "0.5"
