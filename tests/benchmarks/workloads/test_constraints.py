"""Verdicts on responses: what is met, what feedback says, what cannot be judged, and what the official ones are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.workloads import constraints, ifbench
from benchmarks.workloads.constraints import can_judge, verify
from tests.benchmarks.workloads.conftest import REAL_FOLDER

pytest.importorskip("if_verifiable", reason="if-verifiable judges the constraints, on Python 3.11 or newer")
nltk = pytest.importorskip("nltk")

OFFICIAL_VERDICTS = REAL_FOLDER / "ifbench/official_verdicts.jsonl"
KEYWORDS = {"keyword1": "kite", "keyword2": "pond", "keyword3": "fern", "keyword4": "mule", "keyword5": "drum"}


def judge(response: str, kind: str, arguments: dict[str, Any] | None = None) -> constraints.Verdict:
    """The verdict on one constraint."""
    return verify(response, [kind], [arguments or {}])


@pytest.mark.parametrize(
    ("kind", "arguments", "follows", "violates"),
    [
        ("punctuation:no_comma", {}, "No comma here.", "Well, here."),
        ("keywords:existence", {"keywords": ["kite", "pond"]}, "A Kite over a pond", "A kite"),
        ("keywords:forbidden_words", {"forbidden_words": ["kite"]}, "Kites fly", "A kite flies"),
        (
            "length_constraints:number_words",
            {"num_words": 3, "relation": "less than"},
            "Two words",
            "These are three words",
        ),
        ("detectable_format:title", {}, "<<Spring>> It is here", "Spring. It is here"),
        ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "a: 1"),
        (
            "language:response_language",
            {"language": "de"},
            "Das ist ein ganz einfacher Satz.",
            "This is a rather simple one.",
        ),
        ("count:numbers", {"N": 2}, "Between 3 and 4", "Only 3"),
        ("count:keywords_multiple", KEYWORDS, "kite" + " pond" * 2 + " fern" * 3 + " mule" * 5 + " drum" * 7, "kite"),
        ("format:no_whitespace", {}, "Together", "Not together"),
        ("words:palindrome", {}, " ".join(["level"] * 10), "nothing of the kind"),
        ("ratio:sentence_type", {}, "It is. It was. Is it?", "It is. Is it?"),
        ("custom:multiples", {}, "14, 21, 28, 35, 42, 49", "7, 14"),
    ],
)
def test_a_response_that_follows_is_met_and_one_that_violates_is_not(
    kind: str, arguments: dict[str, Any], follows: str, violates: str
) -> None:
    assert judge(follows, kind, arguments).strict == (True,)
    assert judge(violates, kind, arguments).strict == (False,)
    assert judge("", kind, arguments).loose == (False,)


def test_feedback_says_each_violated_constraint_in_words_and_no_other() -> None:
    verdict = verify(
        "A pond, and a kite",
        ["punctuation:no_comma", "keywords:existence", "count:numbers"],
        [{}, {"keywords": ["fern", "kite"]}, {"N": 0}],
    )
    assert verdict.feedback.splitlines() == [
        "Not met: In your entire response, refrain from the use of any commas.",
        "Not met: Include keywords ['fern', 'kite'] in the response.",
        "Strictly, 1 of 3 constraints are met.",
    ]
    assert (verdict.strict_share, verdict.loose_share) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert judge("A kite", "punctuation:no_comma").feedback == "Every constraint of the prompt is met."


@pytest.mark.parametrize("response", ["Sure, here:\nSTART", "Sure, here:\nSTART\nbye, bye", "START\nbye, bye"])
def test_the_loose_sense_forgives_a_first_and_a_last_line_and_feedback_says_so(response: str) -> None:
    verdict = judge(response, "punctuation:no_comma")
    assert (verdict.strict, verdict.loose) == ((False,), (True,))
    assert verdict.feedback.startswith("Met only without the first or last line or the asterisks: In your entire")


def test_thoughts_are_no_part_of_the_response() -> None:
    assert judge("<think>one, two</think>three", "punctuation:no_comma").strict == (True,)
    assert judge("<think>without an end", "punctuation:no_comma").loose == (False,)


# What cannot be judged


@pytest.mark.parametrize(
    ("kind", "reliable", "drawn"),
    [
        ("repeat:repeat_span", {"n_start": 1, "n_end": 3}, {"n_start": 0, "n_end": 3}),
        ("keywords:letter_frequency", {"letter": "q"}, {"letter": "#"}),
    ],
)
def test_a_constraint_that_a_checker_draws_by_chance_is_not_judged(
    kind: str, reliable: dict[str, Any], drawn: dict[str, Any]
) -> None:
    assert can_judge(kind, reliable)
    assert not can_judge(kind, drawn)


# The real rows


def official_verdicts() -> list[dict[str, Any]]:
    if not OFFICIAL_VERDICTS.is_file():
        pytest.skip(f"no {OFFICIAL_VERDICTS}: set FLASHEVOLVE_DATA to the folder that holds the data")
    return [json.loads(line) for line in OFFICIAL_VERDICTS.read_text(encoding="utf-8").splitlines()]


def test_verdicts_are_those_of_the_official_evaluator() -> None:
    agreed = {"strict": 0, "loose": 0}
    different: list[tuple[str, str, str]] = []
    unjudged: set[str] = set()
    for row in official_verdicts():
        for place, (kind, given) in enumerate(zip(row["instruction_id_list"], row["kwargs"], strict=True)):
            arguments = ifbench.set_arguments(given)
            if not can_judge(kind, arguments):
                unjudged.add(kind)
                continue
            verdict = judge(row["response"], kind, arguments)
            for sense, (met,) in (("strict", verdict.strict), ("loose", verdict.loose)):
                if row.get(sense) is None:
                    continue
                if met == row[sense][place]:
                    agreed[sense] += 1
                else:
                    different.append((sense, kind, row["key"]))
    # Shown by pytest -s.
    print(f"{agreed} verdicts agree, {len(different)} differ; not judged here: {sorted(unjudged)}")
    assert different == []
    assert agreed["strict"] > 500
