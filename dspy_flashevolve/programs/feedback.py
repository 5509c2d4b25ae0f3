"""What reflection reads of a rollout: the metric's feedback, and replies that could not be read.

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
from dataclasses import dataclass
from types import CodeType
from typing import Any, cast

from dspy.teleprompt.bootstrap_trace import FailedPrediction
from dspy.utils.exceptions import AdapterParseError

CALL_ARGUMENTS = slice(2, 5)
"""Positions of the metric's arguments that say what it is asked for: trace, pred_name, pred_trace."""
INTROSPECTION = frozenset({"_getframe", "currentframe", "dir", "eval", "exec", "locals", "vars"})
"""By these names code reads its arguments without naming them."""


def looks_at_the_call(metric: Callable[..., Any]) -> bool | None:
    """Whether a metric may answer differently when it is asked for feedback instead of a score.

    Returns:
        False where its code never uses trace, pred_name and pred_trace; None where there is no such code to look into.

    >>> looks_at_the_call(lambda gold, pred, trace=None, pred_name=None, pred_trace=None: gold == pred)
    False
    >>> looks_at_the_call(lambda gold, pred, trace=None, pred_name=None, pred_trace=None: pred_name == "step")
    True
    >>> looks_at_the_call(lambda *arguments: 1.0) is None
    True
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
    return bool(INTROSPECTION.intersection(code.co_names)) or any(name in _used_by(code) for name in names)


def _used_by(code: CodeType) -> set[str]:
    """Collect the local variables that a function's own code, or a function inside of it, uses."""
    used = set[str]()
    for instruction in dis.get_instructions(code):
        if any(kind in instruction.opname for kind in ("FAST", "DEREF", "CELL", "CLOSURE")):
            value = instruction.argval  # Python 3.13 loads two variables by one instruction
            used.update(value if isinstance(value, tuple) else [str(value)])
    return used


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
    wanted: Iterable[str] = cast(Any, error.signature).output_fields
    missing = [name for name in wanted if name not in (error.parsed_result or {})]
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
