"""dspy's own GEPA adapter, set up as ``dspy.GEPA.compile`` sets it up."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from dspy.primitives import Module
from dspy.teleprompt.gepa.gepa_utils import DspyAdapter

from dspy_flashevolve.programs.metric import Metric


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


def plain_adapter(student: Module, metric: Callable[..., Any], failure_score: float = 0.0) -> DspyAdapter:
    """dspy's adapter, for what builds and runs candidates of ``student`` and reflects on nothing."""
    return DspyAdapter(student_module=student, metric_fn=metric, feedback_map={}, failure_score=failure_score)


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
