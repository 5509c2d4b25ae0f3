"""Calling a metric as dspy.GEPA calls it, on the loop or off it; its feedback, and replies that could not be read.

dspy.GEPA calls the metric once for the score, and again for the feedback on each predictor that is reflected on. A
judge that answers anew then speaks of another score than the one that counted, and is paid twice. So the feedback that
came with the score is used where a second call could say nothing else:

==========================================================  ==================  ================
the metric gave feedback with the score, and                one predictor       several
==========================================================  ==================  ================
its code uses none of ``trace``, ``pred_name``,             that feedback       that feedback
``pred_trace``
its code uses one of them                                   asked again [1]_    asked again
its code cannot be looked into (``*args``, a builtin)       that feedback       asked again
==========================================================  ==================  ================

.. [1] Where it then gives another score than the one that counted, the feedback that came with that one is used, and
   from then on it is not asked again: it judges anew. Lockstep asks it as dspy.GEPA does.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import CodeType
from typing import Any, cast

import anyio
from dspy.teleprompt.bootstrap_trace import FailedPrediction
from dspy.utils.exceptions import AdapterParseError

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.loop import Threads
from dspy_flashevolve.engine.requests import record_metric_call
from dspy_flashevolve.engine.scheduler import shielded

CALL_ARGUMENTS = slice(2, 5)
"""Positions of the metric's arguments that say what it is asked for: trace, pred_name, pred_trace."""
INTROSPECTION = frozenset({"_getframe", "currentframe", "dir", "eval", "exec", "locals", "vars"})
"""By these names code reads its arguments without naming them."""


def looks_at_the_call(metric: Callable[..., Any]) -> bool | None:
    """Whether a metric may answer differently when it is asked for feedback instead of a score: its code uses trace,
    pred_name or pred_trace. None where there is no such code to look into.
    """
    function: Any = metric
    while isinstance(function, functools.partial):
        function = function.func
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        function = getattr(function, "__call__", None)  # noqa: B004
    code = getattr(function, "__code__", None)
    try:
        parameters = inspect.signature(metric, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in positional][CALL_ARGUMENTS]
    if not isinstance(code, CodeType) or len(names) < 3:
        return None
    values = (instruction.argval for instruction in dis.get_instructions(code))
    # Python 3.13 loads two variables by one instruction.
    used = {name for value in values for name in (value if isinstance(value, tuple) else (value,))}
    return not used.isdisjoint([*names, *INTROSPECTION])


def text_with(score: Any) -> str | None:
    """Return the feedback that a metric gave with a score; None where it gave none."""
    text = getattr(score, "feedback", None)
    return text if isinstance(text, str) and text.strip() else None


def value_of(score: Any) -> Any:
    """Return the score in what a metric returned."""
    return score["score"] if hasattr(score, "score") else score


def text_of(answer: Any) -> Any:
    """Return the feedback of a metric that was asked for it, with dspy.GEPA's default."""
    if not hasattr(answer, "feedback"):
        return f"This trajectory got a score of {answer}."
    text = answer["feedback"]
    return f"This trajectory got a score of {answer['score']}." if text is None else text


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What the metric may be asked for: feedback on one predictor in one rollout.

    Args:
        arguments: of the metric.
        score: what it returned when it scored the rollout.
    """

    arguments: tuple[Any, Any, Any, str, list[Any]]
    score: Any


def questions_for(
    predictors: Iterable[tuple[str, Any]], trajectories: Sequence[Mapping[str, Any]]
) -> dict[str, Callable[..., Any]]:
    """Make a ``feedback_map`` for dspy's adapter that leaves a :class:`Question` where the feedback belongs.

    So the adapter chooses what is reflected on, and fails or succeeds, before anything is asked.
    """
    scores = {id(trajectory["trace"]): trajectory["score"] for trajectory in trajectories}

    def question_on(name: str, predictor: Any) -> Callable[..., Any]:
        def question(
            predictor_output: Any, predictor_inputs: Any, module_inputs: Any, module_outputs: Any, captured_trace: Any
        ) -> dict[str, Any]:
            pred_trace = [(predictor, predictor_inputs, predictor_output)]
            score = scores[id(captured_trace)]
            arguments = module_inputs, module_outputs, captured_trace, name, pred_trace
            return {"score": value_of(score), "feedback": Question(arguments, score)}

        return question

    return {name: question_on(name, predictor) for name, predictor in predictors}


@dataclass
class FaultyReply(FailedPrediction):
    """A reply in a trace that lacks a field, or has one with a value of another type.

    Args:
        fault: what is wrong with it, in a sentence.
    """

    fault: str = ""


def fault_in(error: AdapterParseError) -> str:
    """What is wrong with a reply of which some fields were read, for a reflection to read."""
    fields: Iterable[str] = cast(Any, error.signature).output_fields
    missing = [name for name in fields if name not in (error.parsed_result or {})]
    if missing:
        return f"Your output lacks the field {', '.join(f'`{name}`' for name in missing)}."
    reason = str(error).partition(f"\n\nAdapter {error.adapter_name} failed")[0]
    lines = [line.strip() for line in reason.splitlines() if "For further information visit" not in line]
    return f"Your output has a field that is not valid. {' '.join(lines)}."


def name_faults(records: Iterable[dict[str, Any]], trajectories: Iterable[Mapping[str, Any]]) -> None:
    """Say in the feedback on faulty replies what is wrong with them; dspy's adapter gives the raw reply."""
    replies = [
        output for trajectory in trajectories for _, _, output in trajectory["trace"] if isinstance(output, FaultyReply)
    ]
    for record in records:
        shown = record.get("Generated Outputs")
        for reply in replies if isinstance(shown, str) else ():
            if f"```\n{reply.completion_text}\n```" in str(shown):
                record["Feedback"] = f"{reply.fault} {record['Feedback']}"
                break


MetricFn = Callable[..., Any]


def check_metric(metric: MetricFn) -> None:
    """Refuse what can never score an example."""
    if not callable(metric):
        raise ConfigurationError(
            f"metric is {metric!r}, expected a function (gold, pred, trace=None, pred_name=None, pred_trace=None)."
        )
    try:
        inspect.signature(metric).bind(None, None, None, None, None)
    except TypeError as error:
        raise TypeError(
            "GEPA metric must accept five arguments: (gold, pred, trace, pred_name, pred_trace). "
            f"{name_of(metric)}{inspect.signature(metric)} does not: {error}."
        ) from error


def name_of(code: Any) -> str:
    """Name a user's function, or the class of a callable object, for a message."""
    return str(getattr(code, "__qualname__", None) or type(code).__qualname__)


class Metric:
    """A user's metric, sync or coroutine."""

    def __init__(self, function: MetricFn, threads: Threads, lock: bool = False) -> None:
        self.name = name_of(function)
        """How to call the user's function in a message."""
        self.looks_at_the_call = looks_at_the_call(function)
        """Whether it may answer differently when it is asked for feedback; None where that cannot be known."""
        self._lock = lock
        self._turn = anyio.Lock() if lock else nullcontext()
        self._function = function
        self._threads = threads
        call = getattr(function, "__call__", None)  # noqa: B004
        self._coroutine = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
        self._declared, self._padding = _arguments_of(function)

    async def score(self, example: Any, prediction: Any, *, scoring_trace: Any = None, flex: bool = False) -> Any:
        """Call the metric for a score, and return what it returns; the user's errors pass through."""
        if flex:
            values = {"trace": None, "pred_name": None, "pred_trace": None, "program_trace": scoring_trace}
            kwargs = {name: value for name, value in values.items() if name in self._declared}
            args: tuple[Any, ...] = (example, prediction)
        else:
            kwargs, args = {}, (example, prediction, *[None] * self._padding)
        async with self._turn:
            await record_metric_call()
            # One that has begun in a thread cannot be called back: its rollout is paid, and must be counted.
            return await self._call(not self._coroutine, *args, **kwargs)

    async def feedback(self, example: Any, prediction: Any, trace: Any, pred_name: str, pred_trace: Any) -> Any:
        """Call the metric for feedback on one predictor, and return what it returns; the user's errors pass through."""
        async with self._turn:
            # With a lock it is not cancelled: a thread would go on with it after its turn.
            return await self._call(self._lock, example, prediction, trace, pred_name, pred_trace)

    async def _call(self, to_its_end: bool, *args: Any, **kwargs: Any) -> Any:
        result: Any = None
        with shielded() if to_its_end else nullcontext():
            if self._coroutine:
                return await self._function(*args, **kwargs)
            result = await self._threads.run(self._function, *args, **kwargs)
        return await result if inspect.isawaitable(result) else result


def _arguments_of(function: MetricFn) -> tuple[frozenset[str], int]:
    """Return the names that a metric declares, and how many it needs beyond example and prediction: these get None."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset(), 0
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in positional and p.default is inspect.Parameter.empty]
    return frozenset(p.name for p in parameters), max(0, len(required) - 2)
