"""IFEval's or IFBench's prompts for a small real model: one predictor, and rows that a short reply can satisfy.

The benchmarks of a served model use it. `ifbench` is the workload of two steps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import dspy

from benchmarks.workloads import ifbench
from benchmarks.workloads.constraints import Arguments, verify
from benchmarks.workloads.definition import text_of
from benchmarks.workloads.rows import load_rows

INSTRUCTION = "Answer the prompt."
WORDS_PER_TOKEN = 0.6
"""A choice, below the 0.75 that is usual for English, since a reply also holds the field marks of dspy's adapter."""
_WORDS_PER_SENTENCE = 12
_WORDS_DEMANDED = {"num_words": 1, "min_words": 1, "N": 1, "num_sentences": _WORDS_PER_SENTENCE}
"""Arguments that ask for a length, and how many words each unit stands for."""


def words_demanded(arguments: Sequence[Arguments]) -> float:
    """About how many words a row's constraints ask for at least."""
    demands = [
        float(given[name]) * words
        for given in arguments
        for name, words in _WORDS_DEMANDED.items()
        if name in given and given.get("relation") != "less than"
    ]
    return max(demands, default=0.0)


def examples(
    train: int, val: int, seed: int, max_tokens: int, source: str = "ifeval"
) -> tuple[list[dspy.Example], list[dspy.Example]]:
    """Two disjoint samples of the rows whose constraints can be judged and fit in a reply.

    Args:
        train: How many training examples.
        val: How many validation examples.
        seed: Decides which rows are drawn, and their order.
        max_tokens: The longest reply.
        source: A key of `ifbench.SOURCES`.

    Raises:
        RowsMissing: The rows are nowhere to be found.
        ValueError: There are fewer rows than asked for.
    """
    judgeable = ifbench.examples(load_rows(ifbench.SOURCES[source]))
    most_words = WORDS_PER_TOKEN * max_tokens
    fitting = [example for example in judgeable if words_demanded(example.arguments) <= most_words]
    if len(fitting) < train + val:
        raise ValueError(f"{source} has {len(fitting)} rows that fit {max_tokens} tokens, {train + val} were asked for")
    random.Random(seed).shuffle(fitting)
    return fitting[:train], fitting[train : train + val]


def program() -> dspy.Module:
    """One predictor with a plain instruction."""
    return dspy.Predict(dspy.Signature("prompt -> response", INSTRUCTION))


def metric(
    gold: Any, pred: Any, trace: Any = None, pred_name: str | None = None, pred_trace: Any = None
) -> dspy.Prediction:
    """The share of constraints that the response meets as it is; the feedback names those it does not."""
    verdict = verify(text_of(pred, "response"), gold.kinds, gold.arguments)
    return dspy.Prediction(score=verdict.strict_share, feedback=verdict.feedback)
