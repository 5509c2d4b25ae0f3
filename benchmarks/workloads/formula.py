"""Formula: put the numbers of a question into a financial formula, as ACE uses it (arXiv 2510.04618).

A row of ACE's repository names a formula, writes it down, and asks a question. As in its reference code, the program is
shown the question alone, with the form that the number is to have: which formula it takes is for the playbook to teach.
The number has to be the target itself, which is rounded to two decimals in every row; but for commas nothing else will
do.
"""

from __future__ import annotations

import math
from typing import Any

import dspy

from benchmarks.workloads.definition import Definition, Pools, Size, text_of
from benchmarks.workloads.rows import Row, Source, ace_file, load_rows
from dspy_flashevolve.sim import LengthLaw

_ACE_FILES = {"train": "formula_train_subset_500", "val": "formula_val_subset_300", "test": "formula_test"}
SOURCES = {
    split: Source(f"formula/{split}.jsonl", ("context", "target"), ace_file(file), "Formula, of ACE's repository")
    for split, file in _ACE_FILES.items()
}
_AROUND = ' \n"\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}'
"""What stands around the questions of rows."""
_FORM = "Answer with a plain number, rounded to two decimals where it has more. Write 5 million as 5000000.0."


def example(row: Row) -> dspy.Example:
    """A row as an example: the question and the form of its answer, and the target as text."""
    _, _, asked = row["context"].rpartition("Question: ")
    question = asked.partition(". Answer:")[0].strip(_AROUND)
    return dspy.Example(question=f"{question} {_FORM}", target=str(row["target"])).with_inputs("question")


def program() -> dspy.Module:
    """One chain of thought."""
    return dspy.ChainOfThought(dspy.Signature("question -> answer", "Answer the question with a number."))


def number_in(text: str) -> float | None:
    """The number that a text is, commas aside; None where it is anything else.

    Example:
        >>> number_in(" 300,000 "), number_in("$5")
        (300000.0, None)
    """
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def metric(
    gold: Any, pred: Any, trace: Any = None, pred_name: str | None = None, pred_trace: Any = None
) -> dspy.Prediction:
    """1 for the right number, else 0; the feedback gives the right one, and the power of ten that it is off by."""
    text, target = text_of(pred, "answer"), float(gold.target)
    number = number_in(text)
    if number is None:
        return dspy.Prediction(score=0.0, feedback=f'"{text}" is no plain number: the right answer is {gold.target}.')
    if number == target:
        return dspy.Prediction(score=1.0, feedback=f"The answer {gold.target} is right.")
    feedback = f"The answer {number} is wrong: the right answer is {gold.target}.{_on_scale(number, target)}"
    return dspy.Prediction(score=0.0, feedback=feedback)


def _on_scale(number: float, target: float) -> str:
    if not number * target > 0:
        return ""
    power = math.log10(number / target)
    is_power = abs(power - round(power)) < 1e-6 and round(power)
    return f" It is off by a factor of {10.0 ** round(power):g}: mind percentages and units." if is_power else ""


def _pools() -> Pools:
    return Pools(**{split: [example(row) for row in load_rows(source)] for split, source in SOURCES.items()})


DEFINITION = Definition(
    name="formula",
    size=Size(train=500, val=300, test=200),
    pools=_pools,
    question="question",
    program=program,
    metric=metric,
    outputs={"predict": "answer"},
    reply_length=LengthLaw(median_tokens=200, sigma=0.5),
)
