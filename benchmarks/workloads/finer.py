"""FiNER: which XBRL tag does a number of a financial report have? (arXiv 2203.06482), 12 tags, as of Meta-Harness."""

from __future__ import annotations

from typing import Any

import dspy

from benchmarks.workloads.answers import label_in
from benchmarks.workloads.definition import Definition, Pools, Size, text_of
from benchmarks.workloads.rows import Row, Source, load_rows
from dspy_flashevolve.sim import LengthLaw

SOURCES = {
    split: Source(
        f"finer/{split}.jsonl", ("question", "target"), None, "FiNER with 12 tags, of Meta-Harness's repository"
    )
    for split in ("train", "val", "test")
}
TAGS = (
    "DebtInstrumentBasisSpreadOnVariableRate1",
    "DebtInstrumentCarryingAmount",
    "DebtInstrumentFaceAmount",
    "DebtInstrumentInterestRateStatedPercentage",
    "DebtInstrumentRedemptionPricePercentage",
    "DebtInstrumentUnamortizedDiscount",
    "LettersOfCreditOutstandingAmount",
    "LineOfCredit",
    "LineOfCreditFacilityCurrentBorrowingCapacity",
    "LineOfCreditFacilityMaximumBorrowingCapacity",
    "LongTermDebt",
    "LongTermDebtFairValue",
)


def example(row: Row) -> dspy.Example:
    """A row as an example: the question, with its tag."""
    return dspy.Example(question=row["question"], tag=row["target"]).with_inputs("question")


class Tag(dspy.Signature):
    """Give the XBRL tag of the entity."""

    question: str = dspy.InputField()
    tag: str = dspy.OutputField(desc=f"one of: {', '.join(TAGS)}")


def program() -> dspy.Module:
    """One predictor. The tags stand in its output field, where no optimizer can lose them."""
    return dspy.Predict(Tag)


def metric(
    gold: Any, pred: Any, trace: Any = None, pred_name: str | None = None, pred_trace: Any = None
) -> dspy.Prediction:
    """1 for the right tag, else 0; the feedback names it."""
    text = text_of(pred, "tag")
    given = label_in(text, TAGS)
    if given == gold.tag:
        return dspy.Prediction(score=1.0, feedback=f"The tag {given} is right.")
    wrong = f"The tag {given} is wrong" if given else f'"{text}" does not name exactly one of the tags'
    return dspy.Prediction(score=0.0, feedback=f"{wrong}: the right one is {gold.tag}.")


def _pools() -> Pools:
    return Pools(**{split: [example(row) for row in load_rows(source)] for split, source in SOURCES.items()})


DEFINITION = Definition(
    name="finer",
    size=Size(train=197, val=95, test=100),
    pools=_pools,
    question="question",
    program=program,
    metric=metric,
    outputs={"self": "tag"},
    reply_length=LengthLaw(median_tokens=25, sigma=0.3),
)
