"""A DSPy program as the evolution loop sees it: roll out, build reflective data, propose and integrate texts."""

from __future__ import annotations

import copy
import inspect
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import dspy
from dspy.evaluate.evaluate import EvaluationResult
from dspy.primitives.code_interpreter import CodeInterpreterError
from dspy.primitives.module import Module
from dspy.teleprompt.gepa.gepa_utils import DspyAdapter
from dspy.utils.callback import with_callbacks
from dspy.utils.usage_tracker import track_usage
from gepa.core.adapter import EvaluationBatch

from dspy_flashevolve.engine.errors import who_raised
from dspy_flashevolve.programs.faults import heard_lm_calls, raise_provider_fault
from dspy_flashevolve.programs.lm import cost_of, tokens_of
from dspy_flashevolve.programs.metric import Metric
from dspy_flashevolve.programs.place import has_own_aforward
from dspy_flashevolve.programs.runner import ProgramRunner

logger = logging.getLogger(__name__)

T = TypeVar("T")
ReflectiveDataset = Mapping[str, Sequence[Mapping[str, Any]]]


def adapter_of(optimizer: Any, student: Module, metric: Metric, reflection_lm: Any) -> DspyAdapter:
    """dspy's adapter, set up as ``dspy.GEPA.compile`` sets it up."""
    return DspyAdapter(
        student_module=student,
        metric_fn=optimizer.metric_fn,
        feedback_map={name: _feedback(name, predictor, metric) for name, predictor in student.named_predictors()},
        failure_score=optimizer.failure_score,
        num_threads=optimizer.num_threads,
        add_format_failure_as_feedback=optimizer.add_format_failure_as_feedback,
        rng=random.Random(optimizer.seed),
        reflection_lm=reflection_lm,
        custom_instruction_proposer=optimizer.custom_instruction_proposer,
        custom_code_proposer=optimizer.custom_code_proposer,
        warn_on_score_mismatch=optimizer.warn_on_score_mismatch,
        reflection_minibatch_size=optimizer.reflection_minibatch_size,
    )


def _feedback(name: str, predictor: Any, metric: Metric) -> Callable[..., Any]:
    """What the metric says of one predictor, with a default where it says nothing."""

    def feedback(
        predictor_output: Any, predictor_inputs: Any, module_inputs: Any, module_outputs: Any, captured_trace: Any
    ) -> Any:
        trace = [(predictor, predictor_inputs, predictor_output)]
        result = metric.blocking(module_inputs, module_outputs, captured_trace, name, trace)
        if not hasattr(result, "feedback"):
            return {"score": result, "feedback": f"This trajectory got a score of {result}."}
        if result["feedback"] is None:
            result["feedback"] = f"This trajectory got a score of {result['score']}."
        return result

    return feedback


@dataclass(frozen=True, slots=True)
class Reflection:
    """What a reflection proposed.

    Args:
        texts: component -> new text.
        tokens: prompt and completion tokens that the LMs reported.
        cost_dollars: of these tokens; 0 where a price is not known.
    """

    texts: dict[str, str]
    tokens: int
    cost_dollars: float = 0.0


class _Announced(dspy.Evaluate):
    """An evaluation as dspy's callbacks know it, made by the run.

    Args:
        evaluated: makes it; example, output and score of each example.
        options: of ``dspy.Evaluate``.
    """

    def __init__(self, evaluated: Callable[[], Awaitable[list[tuple[Any, ...]]]], **options: Any) -> None:
        super().__init__(**options)
        self._evaluated = evaluated

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
        results: Any = await self._evaluated()
        score = 100 * sum(result[-1] for result in results) / len(results)
        return EvaluationResult(round(score, 2), results)


class DspyProgram(ProgramRunner):
    """Runs candidates of a student and reflects on them, through dspy's own GEPA adapter."""

    async def announced(
        self,
        candidate: dict[str, str],
        examples: Sequence[Any],
        evaluate: Callable[[], Awaitable[T]],
        results: Callable[[T], Sequence[tuple[Any, float]]],
    ) -> T:
        """An evaluation of a candidate, of which dspy's callbacks hear as of one of ``dspy.Evaluate``.

        Args:
            examples: what it is evaluated on.
            evaluate: makes it.
            results: output and score of each example.
        """
        if not dspy.settings.callbacks:
            return await evaluate()
        try:
            program = await self._threads.run(self.adapter.build_program, candidate)
        except (SyntaxError, CodeInterpreterError):  # its rollouts will say so
            program = self.adapter.student
        found: list[T] = []

        async def evaluated() -> list[tuple[Any, ...]]:
            found.append(await evaluate())
            return [(example, *result) for example, result in zip(examples, results(found[0]), strict=True)]

        adapter = self.adapter
        announced = _Announced(
            evaluated,
            devset=list(examples),
            metric=adapter.metric_fn,
            num_threads=adapter.num_threads,
            failure_score=adapter.failure_score,
        )
        await announced(program, callback_metadata={"metric_key": "eval_full"})
        return found[0]

    async def reflective_dataset(
        self,
        candidate: dict[str, str],
        evaluation: EvaluationBatch[Any, Any],
        components: list[str],
        rng: random.Random | None,
    ) -> ReflectiveDataset:
        """The records that reflection reads, one list a component.

        Args:
            rng: picks one of several calls of a predictor; None for the adapter's own, shared one.

        Raises:
            TransientError: the provider of an LM judge asks to come back later.
            RunAbortedError: it refuses for good.
            Exception: what the metric raised while it gave feedback, or that there was nothing to reflect on.
        """
        adapter = self.adapter
        if rng is not None:
            adapter = copy.copy(adapter)
            adapter.rng = rng
        async with self._metric.turn():
            dataset = await self._watched(
                lambda: self._threads.run(adapter.make_reflective_dataset, candidate, evaluation, components)
            )
        # The adapter warns once of scores that differ; its copies must not warn again.
        self.adapter.warn_on_score_mismatch &= adapter.warn_on_score_mismatch
        return dataset

    async def propose(self, candidate: dict[str, str], dataset: ReflectiveDataset, components: list[str]) -> Reflection:
        """Ask the reflection LM, or the user's proposer, for new texts; a proposer with an async ``acall`` is awaited.

        Raises:
            TransientError: the provider asks to come back later.
            RunAbortedError: the provider refuses for good.
            Exception: what the proposer raised, or that what it returned is no text.
        """
        acall = self._awaitable_proposer(components)

        async def call() -> dict[str, str]:
            if acall is None:
                propose: Any = self.adapter.propose_new_texts
                texts = await self._threads.run(propose, candidate, dict(dataset), components)
            else:
                with dspy.context(lm=self.adapter.reflection_lm or dspy.settings.lm):
                    texts = await acall(
                        candidate=candidate, reflective_dataset=dict(dataset), components_to_update=components
                    )
            return checked_texts(texts or {})

        with track_usage() as usage:
            texts = await self._watched(call)
        return Reflection(texts, tokens_of(usage), cost_of(usage))

    def _awaitable_proposer(self, components: list[str]) -> Callable[..., Awaitable[Any]] | None:
        proposer = self.adapter.custom_instruction_proposer
        acall = getattr(proposer, "acall", None)
        if isinstance(proposer, Module) and not has_own_aforward(proposer):
            return None  # every module has an ``acall``; not every one can be awaited
        has_code = any(name in self.adapter._flex_paths for name in components)  # pyright: ignore[reportPrivateUsage]
        return acall if inspect.iscoroutinefunction(acall) and not has_code else None

    async def _watched(self, call: Callable[[], Awaitable[T]]) -> T:
        """Tell the provider's faults from what the user's code raised, and name that code."""
        with heard_lm_calls() as calls:
            try:
                return await call()
            except Exception as error:
                raise_provider_fault(error, calls.errors)
                adapter = self.adapter
                hooks = {
                    "instruction_proposer": _of_the_users(adapter.custom_instruction_proposer),
                    "code_proposer": _of_the_users(adapter.custom_code_proposer),
                    "metric": adapter.metric_fn,
                }
                hook = who_raised(error, hooks)
                if hook is not None:
                    logger.warning("%s raised %s: %.300s", hook, type(error).__name__, error)
                raise


def _of_the_users(proposer: Any) -> Any:
    """A proposer, unless it is dspy's own: what that raises says something of the reflection LM's reply."""
    return None if type(proposer).__module__.startswith("dspy.") else proposer


def checked_texts(texts: Mapping[str, Any]) -> dict[str, str]:
    """New texts of components, if a program can be built with them.

    Raises:
        TypeError: one is no text.
        ValueError: one has half a character in it (a lone surrogate), which no provider can receive.
    """
    for name, text in texts.items():
        if not isinstance(text, str):
            raise TypeError(f"the proposal for {name!r} is {text!r}, expected a text.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the proposal for {name!r} is not valid Unicode: {error.reason}.") from None
    return dict(texts)
