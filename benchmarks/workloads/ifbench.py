"""IFBench (arXiv 2507.02833): train and validate on IFEval's kinds of constraints, test on IFBench's, which are others.

A program of two steps, as in GEPA's IFBench program: answer the prompt, then ensure its constraints. The score is the
share of constraints that the response meets in the loose sense; the feedback names the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import dspy

from benchmarks.workloads.constraints import can_judge, verify
from benchmarks.workloads.definition import Definition, Pools, Size, text_of
from benchmarks.workloads.rows import Hub, Row, Source, load_rows
from dspy_flashevolve.sim import LengthLaw

FIELDS = ("key", "prompt", "instruction_id_list", "kwargs")
SOURCES = {
    "ifeval": Source(
        "ifeval/input_data.jsonl", FIELDS, Hub("google/IFEval", "train"), "Google's IFEval, Apache-2.0"
    ),
    "ifbench": Source(
        "ifbench/test.jsonl", FIELDS, Hub("allenai/IFBench_test", "train"), "IFBench's test set, ODC-BY"
    ),
}  # fmt: skip
ANSWER = "Respond to the prompt."
ENSURE = "Ensure that the response is correct and meets every constraint of the prompt."


def examples(rows: Iterable[Row]) -> list[dspy.Example]:
    """The rows whose constraints can all be judged here, as examples with `prompt`, `kinds` and `arguments`."""
    made = map(example_of, rows)
    return [example for example in made if all(map(can_judge, example.kinds, example.arguments))]


def example_of(row: Row) -> dspy.Example:
    """A row as an example: the prompt, with the kinds and arguments of its constraints."""
    return dspy.Example(
        prompt=row["prompt"],
        kinds=list(row["instruction_id_list"]),
        arguments=[set_arguments(given or {}) for given in row["kwargs"]],
    ).with_inputs("prompt")


def set_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments that are set, with whole numbers as `int`: the files have some as floats.

    Example:
        >>> set_arguments({"N": 5.0, "word": None})
        {'N': 5}
    """
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in given.items()
        if value is not None
    }


class AnswerThenEnsure(dspy.Module):
    """prompt -> draft -> response."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = dspy.Predict(dspy.Signature("prompt -> draft", ANSWER))
        self.ensure = dspy.Predict(dspy.Signature("prompt, draft -> response", ENSURE))

    def forward(self, prompt: str) -> dspy.Prediction:
        """The response, with the draft beside it."""
        draft = self.answer(prompt=prompt).draft
        return dspy.Prediction(draft=draft, response=self.ensure(prompt=prompt, draft=draft).response)

    async def aforward(self, prompt: str) -> dspy.Prediction:
        """The same, awaited."""
        draft = (await self.answer.acall(prompt=prompt)).draft
        ensured = await self.ensure.acall(prompt=prompt, draft=draft)
        return dspy.Prediction(draft=draft, response=ensured.response)


def metric(
    gold: Any, pred: Any, trace: Any = None, pred_name: str | None = None, pred_trace: Any = None
) -> dspy.Prediction:
    """The share of constraints that the response meets in the loose sense; the feedback names those it does not."""
    verdict = verify(text_of(pred, "response"), gold.kinds, gold.arguments)
    return dspy.Prediction(score=verdict.loose_share, feedback=verdict.feedback)


DEFINITION = Definition(
    name="ifbench",
    size=Size(train=150, val=300, test=None),
    pools=lambda: Pools(
        train=examples(load_rows(SOURCES["ifeval"])),
        test=examples(load_rows(SOURCES["ifbench"])),
    ),
    question="prompt",
    program=AnswerThenEnsure,
    metric=metric,
    outputs={"answer": "draft", "ensure": "response"},
    reply_length=LengthLaw(median_tokens=345, sigma=0.4),
    reflection_length=LengthLaw(median_tokens=1390, sigma=0.5),
)
