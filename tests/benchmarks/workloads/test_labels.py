"""FiNER's tags, Symptom2Disease's labels and AGNews' topics."""

from __future__ import annotations

import shutil
from pathlib import Path

import dspy
import pytest

from benchmarks.workloads import agnews, debian, finer, symptom2disease
from benchmarks.workloads.rows import VARIABLE


@pytest.mark.parametrize(("text", "score"), [("the Common Cold!", 1), ("dengue", 0), ("common cold or dengue", 0)])
def test_a_diagnosis_is_one_disease(text: str, score: int) -> None:
    verdict = symptom2disease.metric(dspy.Example(disease="common cold"), dspy.Prediction(disease=text))
    assert verdict.score == score
    assert '"common cold"' in verdict.feedback


@pytest.mark.parametrize(
    ("text", "score"), [("sci/tech.", 1), ("Sci / Tech", 1), ("World", 0), ("World or Sci/Tech", 0), ("", 0)]
)
def test_a_piece_of_news_has_one_topic(text: str, score: int) -> None:
    verdict = agnews.metric(dspy.Example(topic="Sci/Tech"), dspy.Prediction(topic=text))
    assert verdict.score == score
    assert '"Sci/Tech"' in verdict.feedback


PACKAGES = """Package: gnuchess
Section: games
Description: Plays a game of chess
 with more lines, Section: web

Package: gnuchess-data
Section: games
Description: Plays a game of chess (data)

Package: bash
Section: shells
Description: GNU Bourne Again SHell

Package: broken
Section: web
"""


def test_packages_of_debian_are_rows_by_their_own_descriptions_and_sections() -> None:
    assert debian.rows_of(PACKAGES) == [{"question": "Plays a game of chess", "answer": "games"}]
    assert debian.rows_of("") == []


@pytest.mark.skipif(shutil.which("apt-cache") is None, reason="no list of Debian's packages")
def test_a_machine_with_debian_fills_the_usual_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    if not debian.load():
        pytest.skip("its lists are empty")
    drawn = debian.DEFINITION.drawn(debian.DEFINITION.size, 0)
    assert (len(drawn.trainset), len(drawn.valset), len(drawn.testset)) == (200, 50, 200)
    assert {row.section for row in drawn.trainset} == set(debian.SECTIONS)


@pytest.mark.parametrize(
    ("text", "score", "feedback"),
    [
        ("LineOfCredit, goodwill ,Revenues,SharePrice", 1, "All 4 tags are right."),
        ("LineOfCredit,Revenues,Revenues,SharePrice,Goodwill", 0.75,
         'Question 2: "Revenues" is wrong, the right tag is Goodwill. '
         "The answer holds 5 parts between commas, 4 tags are asked for."),
        ("LineOfCredit,Goodwill,Revenues,Depreciation", 0.75,
         'Question 4: "Depreciation" is wrong, the right tag is SharePrice.'),
        ("LineOfCredit", 0.25, 'Question 4: "" is wrong, the right tag is SharePrice. The answer holds 1 parts'),
    ],
)  # fmt: skip
def test_each_of_four_tags_counts_in_its_place(text: str, score: float, feedback: str) -> None:
    gold = dspy.Example(target="LineOfCredit,Goodwill,Revenues,SharePrice")
    verdict = finer.metric(gold, dspy.Prediction(tags=text))
    assert verdict.score == score
    assert feedback in verdict.feedback


def test_four_rows_of_one_question_become_one_that_lists_the_tags_of_all() -> None:
    rows = [{"question": f"Which tag has {n}?", "target": f"T{n % 5}", "context": ""} for n in range(10)]
    asked = {"Which tag has 1?"}
    first, second = finer.in_rows_of_four(rows, asked)
    assert first["target"] == "T0,T2,T3,T4"
    assert "T0,T1,T2,T3,T4" in first["context"]
    assert "\n1. Which tag has 0?\n2. Which tag has 2?" in first["context"]
    assert "Which tag has 9?" not in second["context"], "it is one of three that are too few for a row"
    assert len(asked) == 10


def test_rows_of_ace_stay_as_they_are() -> None:
    rows = [{"context": "Tags: A,B. 1. Which has 5?", "target": "A"}]
    assert finer.in_rows_of_four(rows, set()) == rows
    assert finer.example(rows[0]).question == rows[0]["context"]


def test_the_diseases_stand_in_every_prompt_whatever_the_instruction() -> None:
    changed = symptom2disease.Diagnose.with_instructions("Something else.")
    description = changed.output_fields["disease"].json_schema_extra["desc"]
    assert all(disease in description for disease in symptom2disease.DISEASES)
