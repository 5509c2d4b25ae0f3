"""HoVer: is a claim over two to four Wikipedia articles supported? (arXiv 2011.03088), closed-book.

A program of two steps: decompose the claim into hops, each an article and what has to hold there, and the verdict.
Half of the score is the label, half the share of the supporting articles that the hops name; the feedback names the
right label and the articles that are missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import dspy

from benchmarks.workloads.answers import listed, normalized
from benchmarks.workloads.definition import Definition, Pools, Size, text_of
from benchmarks.workloads.rows import Hub, Row, Source, load_rows
from dspy_flashevolve.sim import LengthLaw

LABELS = ("NOT_SUPPORTED", "SUPPORTED")


def from_hub(row: Row) -> Row:
    """The hub numbers the labels, and writes a supporting fact as key and value."""
    label = row["label"]
    facts = [[fact["key"], fact["value"]] if isinstance(fact, Mapping) else fact for fact in row["supporting_facts"]]
    return {**row, "label": LABELS[label] if isinstance(label, int) else label, "supporting_facts": facts}


SOURCE = Source(
    file="hover/dev_600.jsonl",
    fields=("claim", "supporting_facts", "label", "num_hops"),
    hub=Hub("hover-nlp/hover", "validation", revision="refs/convert/parquet", part=slice(600), convert=from_hub),
    origin="HoVer dev v1.1, 600 rows, CC BY-SA 4.0",
)


def example(row: Row) -> dspy.Example:
    """A row as an example: the claim, with its label and the titles of its supporting articles."""
    titles = list(dict.fromkeys(title for title, _ in row["supporting_facts"]))
    return dspy.Example(claim=row["claim"], label=row["label"], titles=titles).with_inputs("claim")


class Verify(dspy.Module):
    """claim -> hops -> verdict."""

    def __init__(self) -> None:
        super().__init__()
        self.decompose = dspy.Predict(
            dspy.Signature(
                "claim -> hops",
                "Decompose the claim into hops. Write a line for each: the title of a Wikipedia article, "
                "and what has to hold there.",
            )
        )
        self.verdict = dspy.ChainOfThought(
            dspy.Signature(
                "claim, hops -> verdict", "Is every hop of the claim true? Answer SUPPORTED or NOT_SUPPORTED."
            )
        )

    def forward(self, claim: str) -> dspy.Prediction:
        """The hops and the verdict."""
        hops = self.decompose(claim=claim).hops
        return dspy.Prediction(hops=hops, verdict=self.verdict(claim=claim, hops=hops).verdict)

    async def aforward(self, claim: str) -> dspy.Prediction:
        """The same, awaited."""
        hops = (await self.decompose.acall(claim=claim)).hops
        return dspy.Prediction(hops=hops, verdict=(await self.verdict.acall(claim=claim, hops=hops)).verdict)


def label_of(text: str) -> str | None:
    """The label that a verdict gives; None where it gives none or both.

    Example:
        >>> label_of("The claim is not supported."), label_of("Supported"), label_of("Perhaps")
        ('NOT_SUPPORTED', 'SUPPORTED', None)
    """
    found = {re.sub(r"\W", "_", one) for one in re.findall(r"NOT[_ -]SUPPORTED|(?<![A-Z])SUPPORTED", text.upper())}
    return found.pop() if len(found) == 1 else None


def is_named(title: str, text: str) -> bool:
    """Whether a text names an article, with or without what its title holds in brackets.

    Example:
        >>> is_named("Maniac (2011 film)", "1. Maniac: released in 2011"), is_named("Ed", "Edward")
        (True, False)
    """
    bare = normalized(re.sub(r"\s*\([^()]*\)\s*$", "", title)) or normalized(title)
    return f" {bare} " in f" {normalized(text)} "


def metric(
    gold: Any, pred: Any, trace: Any = None, pred_name: str | None = None, pred_trace: Any = None
) -> dspy.Prediction:
    """Half for the label, half for the share of supporting articles that are named; the feedback names the rest."""
    verdict, hops = text_of(pred, "verdict"), text_of(pred, "hops")
    missing = [title for title in gold.titles if not is_named(title, hops)]
    is_right = label_of(verdict) == gold.label
    share = 1 - len(missing) / len(gold.titles)
    on_label = "The verdict is right." if is_right else f'The verdict "{verdict}" is wrong: the claim is {gold.label}.'
    on_titles = (
        f"The hops do not name the articles {listed(missing)}." if missing else "The hops name every article needed."
    )
    return dspy.Prediction(score=(is_right + share) / 2, feedback=f"{on_label} {on_titles}")


DEFINITION = Definition(
    name="hover",
    size=Size(train=150, val=300, test=150),
    pools=lambda: Pools([example(row) for row in load_rows(SOURCE)]),
    question="claim",
    program=Verify,
    metric=metric,
    outputs={"decompose": "hops", "verdict.predict": "verdict"},
    reply_length=LengthLaw(median_tokens=104, sigma=0.6),
    reflection_length=LengthLaw(median_tokens=1750, sigma=0.5),
)
