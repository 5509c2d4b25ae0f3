"""FiNER as ACE has it: which XBRL tags do four numbers of financial reports have? (arXiv 2203.06482 and 2510.04618).

A row of ACE's repository is one text: the list of all 139 tags, and four questions. It is the program's input as it
stands, and what users load: 1,000, 500 (one of them twice) and 441 rows. The data folder may hold Meta-Harness's rows
in their place, a smaller task: they have one question each and know 12 tags. Each four of them are joined to a row in
the same form, with these 12 tags as the list; scores on them are not ACE's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

import dspy

from benchmarks.workloads.definition import Definition, Pools, Size, text_of
from benchmarks.workloads.rows import Row, Source, ace_file, load_rows
from dspy_flashevolve.sim import LengthLaw

_ACE_FILES = {
    "test": "finer_test_subset_006_seed42",
    "train": "finer_train_batched_1000_samples",
    "val": "finer_val_batched_500_samples",
}
SOURCES = {
    split: Source(f"finer/{split}.jsonl", ("context", "target"), ace_file(file), "FiNER, of ACE's repository")
    for split, file in _ACE_FILES.items()
}
"""In the order in which a question that stands in several splits is kept by the first, as `Definition.drawn` does."""
QUESTIONS_A_ROW = 4


def in_rows_of_four(rows: Sequence[Row], asked: set[str]) -> list[Row]:
    """Rows in ACE's form.

    Args:
        rows: Those of a file. ACE's come back as they are. Of rows with a `question` of their own, each four become
            one, in the order of the file, and up to three at the end are left out.
        asked: Questions of other splits, which are left out; those of these rows are added.
    """
    if not any("question" in row for row in rows):
        return list(rows)
    tags = ",".join(sorted({row["target"] for row in rows}))
    targets = {row["question"]: row["target"] for row in rows if row["question"] not in asked}
    asked.update(targets)
    questions = list(targets)
    fours = [questions[start : start + QUESTIONS_A_ROW] for start in range(0, len(questions), QUESTIONS_A_ROW)]
    return [
        {"context": _context(tags, four), "target": ",".join(targets[question] for question in four)}
        for four in fours
        if len(four) == QUESTIONS_A_ROW
    ]


def _context(tags: str, questions: Sequence[str]) -> str:
    numbered = "\n".join(f"{number}. {question}" for number, question in enumerate(questions, start=1))
    return (
        f"Here is a list of US GAAP tags: {tags}. Answer the following {len(questions)} independent questions with one "
        f"tag each, in the order of the questions, separated by commas.\n{numbered}"
    )


def example(row: Row) -> dspy.Example:
    """A row as an example: the list of tags with the four questions, and the four right tags, separated by commas."""
    return dspy.Example(question=row["context"], target=row["target"]).with_inputs("question")


def program() -> dspy.Module:
    """One predictor."""
    return dspy.Predict(
        dspy.Signature("question -> tags", "Give the XBRL tag of each entity, in order, separated by commas.")
    )


def metric(
    gold: Any, pred: Any, trace: Any = None, pred_name: str | None = None, pred_trace: Any = None
) -> dspy.Prediction:
    """The share of the four tags that are right, each in its place, in any case; the feedback names the others.

    As in ACE's evaluation, answers are separated by commas, and further ones than the four count for nothing.
    """
    given, right = _tags(text_of(pred, "tags")), _tags(gold.target)
    wrong = [
        f'Question {number}: "{tag}" is wrong, the right tag is {wanted}.'
        for number, (wanted, tag) in enumerate(zip(right, chain(given, repeat("")), strict=False), start=1)
        if tag.lower() != wanted.lower()
    ]
    score = 1 - len(wrong) / len(right)
    if wrong and len(given) != len(right):
        wrong.append(f"The answer holds {len(given)} parts between commas, {len(right)} tags are asked for.")
    return dspy.Prediction(score=score, feedback=" ".join(wrong) or f"All {len(right)} tags are right.")


def _tags(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _pools() -> Pools:
    asked: set[str] = set()
    return Pools(**{
        split: [example(row) for row in in_rows_of_four(load_rows(source), asked)] for split, source in SOURCES.items()
    })  # fmt: skip


DEFINITION = Definition(
    name="finer",
    size=Size(train=None, val=None, test=None),
    pools=_pools,
    question="question",
    program=program,
    metric=metric,
    outputs={"self": "tags"},
    reply_length=LengthLaw(median_tokens=60, sigma=0.3),
)
