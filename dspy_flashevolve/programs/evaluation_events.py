"""dspy's callbacks on evaluations: a validation made by the run looks to them like one of ``dspy.Evaluate``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import dspy
from dspy.evaluate.evaluate import EvaluationResult
from dspy.primitives.code_interpreter import CodeInterpreterError
from dspy.primitives.module import Module
from dspy.teleprompt.gepa.gepa_utils import DspyAdapter
from dspy.utils.callback import with_callbacks

from dspy_flashevolve.engine.loop import Threads

T = TypeVar("T")


async def announce_evaluation(
    adapter: DspyAdapter,
    threads: Threads,
    candidate: dict[str, str],
    examples: Sequence[Any],
    evaluate: Callable[[], Awaitable[T]],
    results: Callable[[T], Sequence[tuple[Any, float]]],
) -> T:
    """Evaluate a candidate between dspy's ``on_evaluate_start`` and ``on_evaluate_end``, where somebody listens.

    Args:
        adapter: builds the program that callbacks are shown.
        threads: where it is built.
        examples: what the candidate is evaluated on.
        evaluate: makes the evaluation.
        results: output and score of each example.
    """
    if not dspy.settings.callbacks:
        return await evaluate()
    try:
        program = await threads.run(adapter.build_program, candidate)
    except (SyntaxError, CodeInterpreterError):  # its rollouts will say so
        program = adapter.student
    evaluations: list[T] = []

    async def rows() -> list[tuple[Any, ...]]:
        evaluations.append(await evaluate())
        return [(example, *result) for example, result in zip(examples, results(evaluations[0]), strict=True)]

    announced = _AnnouncedEvaluation(
        rows,
        devset=list(examples),
        metric=adapter.metric_fn,
        num_threads=adapter.num_threads,
        failure_score=adapter.failure_score,
    )
    await announced(program, callback_metadata={"metric_key": "eval_full"})
    return evaluations[0]


class _AnnouncedEvaluation(dspy.Evaluate):
    """An evaluation as dspy's callbacks know it, made by the run.

    Args:
        rows: makes it, and returns example, output and score of each example.
        options: of ``dspy.Evaluate``.
    """

    def __init__(self, rows: Callable[[], Awaitable[list[tuple[Any, ...]]]], **options: Any) -> None:
        super().__init__(**options)
        self._rows = rows

    @with_callbacks
    async def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        program: Module,
        metric: Any = None,
        devset: Any = None,
        num_threads: int | None = None,
        display_progress: bool | None = None,
        display_table: bool | int | None = None,
        callback_metadata: dict[str, Any] | None = None,
        save_as_csv: str | None = None,
        save_as_json: str | None = None,
    ) -> EvaluationResult:
        # Callbacks are given the arguments by their names: the signature is that of dspy.Evaluate.
        rows: Any = await self._rows()
        score = 100 * sum(row[-1] for row in rows) / len(rows)
        return EvaluationResult(round(score, 2), rows)
