"""Symptom2Disease: which of 22 diseases has someone who describes these symptoms?"""

from __future__ import annotations

from typing import Any

import dspy

from benchmarks.workloads.answers import label_in
from benchmarks.workloads.definition import Definition, Pools, Size, text_of
from benchmarks.workloads.rows import Hub, Row, Source, load_rows
from dspy_flashevolve.sim import LengthLaw

_HUB_SPLITS = {"train": ("train", slice(200)), "val": ("train", slice(200, 250)), "test": ("test", None)}
DISEASES = (
    "allergy", "arthritis", "bronchial asthma", "cervical spondylosis", "chicken pox", "common cold", "dengue",
    "diabetes", "drug reaction", "fungal infection", "gastroesophageal reflux disease", "hypertension", "impetigo",
    "jaundice", "malaria", "migraine", "peptic ulcer disease", "pneumonia", "psoriasis", "typhoid",
    "urinary tract infection", "varicose veins",
)  # fmt: skip


def from_hub(row: Row) -> Row:
    """The hub has other names for the fields."""
    return {"question": row["input_text"], "answer": row["output_text"]}


SOURCES = {
    split: Source(
        f"symptom2disease/{split}.jsonl",
        ("question", "answer"),
        Hub("gretelai/symptom_to_diagnosis", hub_split, part=part, convert=from_hub),
        "Symptom2Disease with 22 labels",
    )
    for split, (hub_split, part) in _HUB_SPLITS.items()
}


def example(row: Row) -> dspy.Example:
    """A row as an example: the symptoms, with the disease."""
    return dspy.Example(symptoms=row["question"], disease=row["answer"]).with_inputs("symptoms")


class Diagnose(dspy.Signature):
    """Name the disease that fits the symptoms best."""

    symptoms: str = dspy.InputField()
    disease: str = dspy.OutputField(desc=f"one of: {', '.join(DISEASES)}")


def program() -> dspy.Module:
    """One predictor. The diseases stand in its output field, where no optimizer can lose them."""
    return dspy.Predict(Diagnose)


def metric(
    gold: Any, pred: Any, trace: Any = None, pred_name: str | None = None, pred_trace: Any = None
) -> dspy.Prediction:
    """1 for the right disease, else 0; the feedback names it."""
    text = text_of(pred, "disease")
    given = label_in(text, DISEASES)
    if given == gold.disease:
        return dspy.Prediction(score=1.0, feedback=f'The diagnosis "{given}" is right.')
    wrong = f'The diagnosis "{given}" is wrong' if given else f'"{text}" does not name exactly one of the diseases'
    return dspy.Prediction(score=0.0, feedback=f'{wrong}: the right one is "{gold.disease}".')


def _pools() -> Pools:
    return Pools(**{split: [example(row) for row in load_rows(source)] for split, source in SOURCES.items()})


DEFINITION = Definition(
    name="symptom2disease",
    size=Size(train=200, val=49, test=212),
    pools=_pools,
    question="symptoms",
    program=program,
    metric=metric,
    outputs={"self": "disease"},
    reply_length=LengthLaw(median_tokens=15, sigma=0.3),
)
