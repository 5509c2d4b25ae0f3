"""FiNER's tags and Symptom2Disease's labels."""

from __future__ import annotations

import dspy
import pytest

from benchmarks.workloads import finer, symptom2disease


@pytest.mark.parametrize(("text", "score"), [("the Common Cold!", 1), ("dengue", 0), ("common cold or dengue", 0)])
def test_a_diagnosis_is_one_disease(text: str, score: int) -> None:
    verdict = symptom2disease.metric(dspy.Example(disease="common cold"), dspy.Prediction(disease=text))
    assert verdict.score == score
    assert '"common cold"' in verdict.feedback


def test_a_tag_is_not_found_inside_a_longer_one() -> None:
    gold = dspy.Example(tag="LineOfCredit")
    assert finer.metric(gold, dspy.Prediction(tag="`LineOfCredit`")).score == 1
    wrong = finer.metric(gold, dspy.Prediction(tag="LineOfCreditFacilityMaximumBorrowingCapacity"))
    assert (wrong.score, wrong.feedback.endswith("the right one is LineOfCredit.")) == (0, True)


def test_the_labels_stand_in_every_prompt_whatever_the_instruction() -> None:
    for signature, labels in ((finer.Tag, finer.TAGS), (symptom2disease.Diagnose, symptom2disease.DISEASES)):
        changed = signature.with_instructions("Something else.")
        description = next(iter(changed.output_fields.values())).json_schema_extra["desc"]
        assert all(label in description for label in labels)
