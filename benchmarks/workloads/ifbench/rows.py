"""The rows of IFEval and IFBench: from the data folder, else from the Hugging Face hub; and their splits."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import dspy

from benchmarks.workloads.ifbench.verifier import set_arguments
from benchmarks.workloads.ifeval import FILES, WORDS_A_TOKEN, words_demanded
from benchmarks.workloads.rows import Hub, Source, load_rows

FIELDS = ("key", "prompt", "instruction_id_list", "kwargs")
SOURCES = {
    "ifeval": Source(FILES["ifeval"], FIELDS, Hub("google/IFEval", "train"), "Google's IFEval"),
    "ifbench": Source(FILES["ifbench"], FIELDS, Hub("allenai/IFBench_test", "train"), "IFBench's test set"),
}


@dataclass(frozen=True)
class Sizes:
    """How many examples a split has.

    Attributes:
        train: IFEval prompts that the optimizer learns from.
        val: Other IFEval prompts that it selects programs by.
        test: IFBench prompts; `None` for all of them.
    """

    train: int = 150
    val: int = 300
    test: int | None = None


@dataclass(frozen=True)
class Splits:
    """Examples with the fields `prompt` (the input), `kinds` and `arguments` (of the constraints)."""

    train: list[dspy.Example]
    val: list[dspy.Example]
    test: list[dspy.Example]


def read(source: str) -> list[dict[str, Any]]:
    """The rows of a source as they are.

    Args:
        source: `"ifeval"` or `"ifbench"`.

    Raises:
        RowsMissing: If the rows are neither in the data folder nor to be had from the hub.
    """
    return load_rows(SOURCES[source])


def examples(rows: Iterable[dict[str, Any]], max_tokens: int | None = None) -> list[dspy.Example]:
    """The rows as examples.

    Args:
        rows: Rows with `prompt`, `instruction_id_list` and `kwargs`.
        max_tokens: Leave out the rows whose constraints ask for more words than fit in so many tokens of output.
    """
    limit = float("inf") if max_tokens is None else WORDS_A_TOKEN * max_tokens
    made = [
        dspy.Example(
            prompt=row["prompt"],
            kinds=list(row["instruction_id_list"]),
            arguments=[set_arguments(given or {}) for given in row["kwargs"]],
        ).with_inputs("prompt")
        for row in rows
    ]
    return [example for example in made if words_demanded(example.arguments) <= limit]


def splits(sizes: Sizes | None = None, seed: int = 0, max_tokens: int | None = None) -> Splits:
    """Train and validation sets drawn by a seed from IFEval, and a test set from IFBench; no prompt is in two of them.

    Args:
        sizes: How many of each; `None` for 150, 300 and all of IFBench.
        seed: The same seed draws the same examples.
        max_tokens: See `examples`.

    Raises:
        RowsMissing: If the rows are neither in the data folder nor to be had from the hub.
        ValueError: If there are fewer rows than asked for.
    """
    wanted = sizes or Sizes()
    learned = _drawn("ifeval", wanted.train + wanted.val, seed, max_tokens)
    return Splits(learned[: wanted.train], learned[wanted.train :], _drawn("ifbench", wanted.test, seed, max_tokens))


def _drawn(source: str, size: int | None, seed: int, max_tokens: int | None) -> list[dspy.Example]:
    # A prompt that occurs twice counts once, so that no prompt can be in two splits.
    found = list({example.prompt: example for example in examples(read(source), max_tokens)}.values())
    if size is not None and len(found) < size:
        fitting = "" if max_tokens is None else f" that fit in {max_tokens} tokens"
        raise ValueError(f"{source} has {len(found)} different prompts{fitting}, {size} were asked for: ask for fewer")
    random.Random(seed).shuffle(found)
    return found[:size]
