"""IFBench as a DSPy task: a program of two stages, a metric with feedback, and the benchmarks' workload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dspy

from benchmarks.methods import Workload
from benchmarks.workloads.ifbench.rows import Splits
from benchmarks.workloads.ifbench.scoring import Accuracy, Verdict, accuracy, verify

ANSWER = "Respond to the prompt."
ENSURE = "Ensure that the response is correct and meets every constraint of the prompt."


class AnswerThenEnsure(dspy.Module):
    """Answers a prompt, and then makes sure that the answer meets the prompt's constraints.

    Two predictors, as in GEPA's IFBench program: `answer` (prompt to draft), `ensure` (prompt and draft to response).
    """

    def __init__(self) -> None:
        super().__init__()
        self.answer = dspy.Predict(dspy.Signature("prompt -> draft", ANSWER))
        self.ensure = dspy.Predict(dspy.Signature("prompt, draft -> response", ENSURE))

    def forward(self, prompt: str) -> dspy.Prediction:
        """The response, with the draft beside it."""
        draft = self.answer(prompt=prompt).draft
        return dspy.Prediction(draft=draft, response=self.ensure(prompt=prompt, draft=draft).response)

    async def aforward(self, prompt: str) -> dspy.Prediction:
        """As `forward`."""
        draft = (await self.answer.acall(prompt=prompt)).draft
        ensured = await self.ensure.acall(prompt=prompt, draft=draft)
        return dspy.Prediction(draft=draft, response=ensured.response)


def metric(
    gold: Any, pred: Any, trace: Any = None, pred_name: str | None = None, pred_trace: Any = None
) -> dspy.Prediction:
    """The share of constraints that the response meets in the loose sense, with feedback.

    The feedback names each constraint that is not met, and says how many the response meets as it stands.
    """
    verdict = verify(_response(pred), gold.kinds, gold.arguments)
    return dspy.Prediction(score=verdict.score, feedback=feedback(verdict))


def feedback(verdict: Verdict) -> str:
    """What is wrong with a response, in sentences.

    Example:
        >>> feedback(Verdict((False, True), (False, True), ("Use no comma.", "Begin with a verb.")))
        'Not met: Use no comma.\\nStrictly, 1 of 2 constraints are met.'
    """
    parts = [f"Not met: {constraint}" for constraint in verdict.not_met]
    parts += [
        f"Met only without the first or last line or the asterisks: {constraint}"
        for constraint in verdict.met_loosely_only
    ]
    if not parts:
        return "Every constraint of the prompt is met."
    return "\n".join([*parts, f"Strictly, {sum(verdict.strict)} of {len(verdict.strict)} constraints are met."])


def score_test(examples: Sequence[Any], predictions: Sequence[Any]) -> Accuracy:
    """Strict and loose accuracy of a program's predictions, one an example; a failed one may be `None`."""
    pairs = zip(examples, predictions, strict=True)
    return accuracy([verify(_response(pred), example.kinds, example.arguments) for example, pred in pairs])


def workload(drawn: Splits, task_lm: dspy.LM, reflection_lm: dspy.LM, adapter: dspy.Adapter | None = None) -> Workload:
    """The benchmarks' workload of these splits; every model must have its cache off.

    Args:
        drawn: From `splits`; its test set is for `score_test` and no part of the workload.
        task_lm: Serves the program.
        reflection_lm: Serves the optimizer.
        adapter: How prompts are formatted; `None` for DSPy's default.
    """
    return Workload(
        program=AnswerThenEnsure,
        trainset=drawn.train,
        valset=drawn.val,
        metric=metric,
        task_lm=task_lm,
        reflection_lm=reflection_lm,
        adapter=adapter,
    )


def _response(pred: Any) -> str:
    return str(getattr(pred, "response", None) or "")
