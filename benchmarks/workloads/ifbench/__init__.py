"""IFBench (train on IFEval prompts, test on IFBench): verifiers of our own, accuracies, splits, program and metric.

A constraint is met where the official evaluator says so; `agreement` compares the verdicts.

Example:
    >>> from benchmarks.workloads.ifbench import verify
    >>> verify("Run, ran.", ["words:start_verb", "punctuation:no_comma"], [{}, {}]).strict
    (True, False)
"""

from benchmarks.workloads.definition import Definition, Pools, Size
from benchmarks.workloads.ifbench.registry import APPROXIMATE, VERIFIERS, Verifier
from benchmarks.workloads.ifbench.rows import Sizes, Splits, examples, read, splits
from benchmarks.workloads.ifbench.scoring import Accuracy, Verdict, accuracy, readings, verify
from benchmarks.workloads.ifbench.task import AnswerThenEnsure, feedback, metric, score_test, workload
from dspy_flashevolve.sim import LengthLaw

DEFINITION = Definition(
    name="ifbench",
    size=Size(train=150, val=300, test=299),
    pools=lambda: Pools(train=examples(read("ifeval")), test=examples(read("ifbench"))),
    question="prompt",
    program=AnswerThenEnsure,
    metric=metric,
    outputs={"answer": "draft", "ensure": "response"},
    reply_length=LengthLaw(median_tokens=350, sigma=0.8),
)
"""For `benchmarks.workloads.registry`."""

__all__ = [
    "APPROXIMATE", "DEFINITION", "VERIFIERS", "Accuracy", "AnswerThenEnsure", "Sizes", "Splits", "Verdict",
    "Verifier", "accuracy", "examples", "feedback", "metric", "read", "readings", "score_test", "splits", "verify",
    "workload",
]  # fmt: skip
