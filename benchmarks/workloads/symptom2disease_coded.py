"""Symptom2Disease with codes for its 22 diseases, so that all has to be learned from feedback.

A large language model knows the diseases: one that writes down its own knowledge scores .50 after three examples. Which
code stands for which disease nobody knows beforehand, and each seed has codes of its own.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import dspy

from benchmarks.workloads.answers import normalized
from benchmarks.workloads.definition import Definition, Pools, text_of
from benchmarks.workloads.rows import Row, load_rows
from benchmarks.workloads.symptom2disease import DEFINITION as PLAIN
from benchmarks.workloads.symptom2disease import DISEASES, SOURCES

QUESTION = "question"


def codes(seed: object) -> dict[str, str]:
    """A code such as K84 for each disease."""
    numbers = random.Random(f"codes {seed}").sample(range(10, 100), len(DISEASES))
    return {disease: f"K{number}" for disease, number in zip(DISEASES, numbers, strict=True)}


def program() -> dspy.Module:
    """One predictor, whose instruction says nothing of the codes."""
    return dspy.Predict(dspy.Signature("question -> answer", "Give the class of the text."))


def metric(
    gold: Any, pred: Any, trace: Any = None, pred_name: str | None = None, pred_trace: Any = None
) -> dspy.Prediction:
    """1 for the right code and nothing else, else 0; the feedback names it."""
    if normalized(text_of(pred, "answer")) == normalized(gold.answer):
        return dspy.Prediction(score=1.0, feedback="Correct.")
    said = f"The expected answer is '{gold.answer}'. Answers are compared word for word."
    return dspy.Prediction(score=0.0, feedback=f"Wrong. {said}")


def definition(seed: object = 0) -> Definition:
    """The workload with the codes of a seed."""
    names = codes(seed)

    def example(row: Row) -> dspy.Example:
        return dspy.Example(question=row["question"], answer=names[row["answer"]]).with_inputs(QUESTION)

    def pools() -> Pools:
        return Pools(**{split: [example(row) for row in load_rows(source)] for split, source in SOURCES.items()})

    return replace(
        PLAIN, name="symptom2disease-coded", pools=pools, question=QUESTION, program=program, metric=metric,
        outputs={"self": "answer"},
    )  # fmt: skip


DEFINITION = definition()
