"""AGNews: which of four kinds is this piece of news? Meta-Harness' second task of online classification.

No package of the registries holds its rows, so that they come from the hub, or from a folder of your own.
"""

from __future__ import annotations

import dspy

from benchmarks.workloads.answers import label_metric
from benchmarks.workloads.definition import Definition, Pools, Size
from benchmarks.workloads.rows import Hub, Row, Source, load_rows
from dspy_flashevolve.sim import LengthLaw

TOPICS = ("World", "Sports", "Business", "Sci/Tech")
"""By the number that the hub's rows have."""
_HUB_SPLITS = {"train": ("train", slice(1000)), "val": ("train", slice(1000, 1200)), "test": ("test", slice(500))}


def from_hub(row: Row) -> Row:
    """The hub numbers the topics."""
    return {"question": row["text"], "answer": TOPICS[row["label"]]}


SOURCES = {
    split: Source(
        f"agnews/{split}.jsonl",
        ("question", "answer"),
        Hub("fancyzhx/ag_news", hub_split, part=part, convert=from_hub),
        "AGNews with 4 topics",
    )
    for split, (hub_split, part) in _HUB_SPLITS.items()
}


def example(row: Row) -> dspy.Example:
    """A row as an example: the news, with its topic."""
    return dspy.Example(news=row["question"], topic=row["answer"]).with_inputs("news")


class Classify(dspy.Signature):
    """Name the topic of the news."""

    news: str = dspy.InputField()
    topic: str = dspy.OutputField(desc=f"one of: {', '.join(TOPICS)}")


def program() -> dspy.Module:
    """One predictor. The topics stand in its output field, where no optimizer can lose them."""
    return dspy.Predict(Classify)


metric = label_metric("topic", TOPICS)
"""1 for the right topic, else 0; the feedback names it."""


def _pools() -> Pools:
    return Pools(**{split: [example(row) for row in load_rows(source)] for split, source in SOURCES.items()})


DEFINITION = Definition(
    name="agnews",
    size=Size(train=200, val=50, test=200),
    pools=_pools,
    question="news",
    program=program,
    metric=metric,
    outputs={"self": "topic"},
    reply_length=LengthLaw(median_tokens=12, sigma=0.3),
)
