"""What a run of a harness costs: the second axis of the front."""

from __future__ import annotations

from collections.abc import Callable

from dspy_flashevolve.sandbox.outcomes import Outcome

Cost = Callable[[Outcome], float]
"""A function from one run on one example to its cost; lower is better, and it must be finite."""


def context_tokens(outcome: Outcome) -> float:
    """Tokens of all the prompts that a harness sent for one example, as counted by the host.

    >>> context_tokens(Outcome(fields={}))
    0.0
    """
    return float(sum(call.prompt_tokens for call in outcome.calls))


def lm_calls(outcome: Outcome) -> float:
    """LM calls that a harness made for one example."""
    return float(len(outcome.calls))
