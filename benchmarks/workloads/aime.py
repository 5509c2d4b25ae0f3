"""AIME: competition problems whose answer is an integer from 0 to 999; train and validate on 2024, test on 2025."""

from __future__ import annotations

from typing import Any

import dspy

from benchmarks.workloads.answers import last_number
from benchmarks.workloads.definition import Definition, Pools, Size, text_of
from benchmarks.workloads.rows import Hub, Row, Source, load_rows
from dspy_flashevolve.sim import LengthLaw

SOURCES = {
    2024: Source(
        "aime/aime2024.jsonl", ("problem", "answer"), Hub("HuggingFaceH4/aime_2024", "train"), "AIME I and II of 2024"
    ),
    2025: Source("aime/aime2025.jsonl", ("problem", "answer"), Hub("math-ai/aime25", "test"), "AIME I and II of 2025"),
}


def example(row: Row) -> dspy.Example:
    """A row as an example: the problem, with its answer as text."""
    return dspy.Example(problem=row["problem"], answer=str(row["answer"])).with_inputs("problem")


def program() -> dspy.Module:
    """One chain of thought."""
    return dspy.ChainOfThought(
        dspy.Signature("problem -> answer", "Solve the problem and give the answer, an integer from 0 to 999.")
    )


def metric(
    gold: Any, pred: Any, trace: Any = None, pred_name: str | None = None, pred_trace: Any = None
) -> dspy.Prediction:
    """1 for the right integer, else 0; the feedback gives the right answer."""
    text, right = text_of(pred, "answer"), int(gold.answer)
    number = last_number(text)
    if number == right:
        return dspy.Prediction(score=1.0, feedback=f"The answer {right} is right.")
    wrong = f"The answer {number:g} is wrong" if number is not None else f'"{text}" holds no integer'
    return dspy.Prediction(score=0.0, feedback=f"{wrong}: the right answer is {right}.")


def _pools() -> Pools:
    return Pools(
        train=[example(row) for row in load_rows(SOURCES[2024])],
        test=[example(row) for row in load_rows(SOURCES[2025])],
    )


DEFINITION = Definition(
    name="aime",
    size=Size(train=15, val=15, test=30),
    pools=_pools,
    question="problem",
    program=program,
    metric=metric,
    outputs={"predict": "answer"},
    reply_length=LengthLaw(median_tokens=150, sigma=0.6),
    reflection_length=LengthLaw(median_tokens=2720, sigma=0.5),
)
