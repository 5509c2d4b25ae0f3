"""IFEval and IFBench prompts as a DSPy task: rows from the data folder, program, metric with feedback."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dspy

from benchmarks.workloads.ifeval_checks import checkable, verify
from benchmarks.workloads.rows import data_folder

INSTRUCTION = "Answer the prompt."
FILES = {"ifeval": "ifeval/input_data.jsonl", "ifbench": "ifbench/test.jsonl"}
WORDS_A_TOKEN = 0.6
_WORDS_A_SENTENCE = 12
_LONG = {"num_words": 1, "min_words": 1, "N": 1, "num_sentences": _WORDS_A_SENTENCE}


def _set_arguments(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: value for name, value in given.items() if value is not None} for given in row["kwargs"]]


def words_demanded(arguments: list[dict[str, Any]]) -> float:
    """A lower bound of the words that a row's constraints ask for."""
    demands = [
        float(given[name]) * share
        for given in arguments
        for name, share in _LONG.items()
        if name in given and given.get("relation") != "less than"
    ]
    return max(demands, default=0.0)


def _rows(path: Path, max_tokens: int) -> Iterator[dspy.Example]:
    with path.open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            arguments, kinds = _set_arguments(row), row["instruction_id_list"]
            if checkable(kinds) and words_demanded(arguments) <= WORDS_A_TOKEN * max_tokens:
                yield dspy.Example(prompt=row["prompt"], kinds=kinds, arguments=arguments).with_inputs("prompt")


def examples(train: int, val: int, seed: int, max_tokens: int, source: str = "ifeval") -> tuple[list[Any], list[Any]]:
    """Two disjoint samples of the rows that we can check and that fit in `max_tokens` of output.

    Raises:
        FileNotFoundError: If the data folder does not hold the file.
        ValueError: If there are fewer rows than asked for.
    """
    path = data_folder() / FILES[source]
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: set FLASHEVOLVE_DATA to the folder that holds {FILES[source]}")
    rows = list(_rows(path, max_tokens))
    if len(rows) < train + val:
        raise ValueError(f"{source} has {len(rows)} rows that fit {max_tokens} tokens, {train + val} were asked for")
    random.Random(seed).shuffle(rows)
    return rows[:train], rows[train : train + val]


def program() -> dspy.Module:
    """One predictor with a plain instruction."""
    return dspy.Predict(dspy.Signature("prompt -> response", INSTRUCTION))


def metric(
    gold: Any, pred: Any, trace: Any = None, pred_name: str | None = None, pred_trace: Any = None
) -> dspy.Prediction:
    """The share of constraints that the response meets; the feedback names each one that it does not."""
    verdict = verify(str(pred.response or ""), gold.kinds, gold.arguments)
    feedback = " ".join(verdict.complaints) or "Every constraint of the prompt is met."
    return dspy.Prediction(score=verdict.score, feedback=feedback)
