"""The arguments of `AsyncACE` as one run sees them: a frozen record, made when the run is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dspy.primitives.module import Module

from dspy_flashevolve.ace.playbook import CountTokens
from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.staleness import Full, Guarded, Reflective, StalenessPolicy
from dspy_flashevolve.programs.settings import RunSettings

POLICIES: dict[str, StalenessPolicy] = {
    "full": Full(looks=("before_commit",)),
    "guarded": Guarded(max_gap=64, looks=("before_commit",)),
}
"""The policies that the names of ``staleness`` stand for.

64 is the number of slots in the benchmarks of docs/ace.md: as many samples can be applied while one curator writes, so
that an addition is dropped only where its curator was slower than all of them. "full" and "guarded" scored alike there;
the value was not tuned further.
"""


def policy_of(staleness: Any) -> StalenessPolicy:
    """Return the policy that a name stands for, or the policy itself.

    Raises:
        ConfigurationError: there is no such name, or the policy could not be one of AsyncACE's.
    """
    if isinstance(staleness, str) and staleness in POLICIES:
        return POLICIES[staleness]
    if isinstance(staleness, str | type | Reflective) or not callable(getattr(staleness, "decide", None)):
        raise ConfigurationError(
            f"staleness is {staleness!r}, expected 'full', 'guarded', or a policy: an object with "
            "decide(look, history) that admits or discards. In place of 'reflective' and Reflective use 'guarded'."
        )
    return staleness


@dataclass(frozen=True, kw_only=True)
class AceSettings:
    """What one run of `AsyncACE` is told to do.

    ``run`` is what it has in common with other optimizers. Every other field is the argument of that name; `AsyncACE`
    explains it.
    """

    run: RunSettings
    metric: Callable[..., Any]
    reflector: Module
    reflector_lm: Any
    curator: Module
    curator_lm: Any
    max_rounds: int
    epochs: int
    curator_frequency: int
    no_ground_truth: bool
    token_budget: int
    count_tokens: CountTokens
    sections: tuple[str, ...]
    eval_every: int
    validations_at_once: int
    staleness: StalenessPolicy
    perfect_score: float
    failure_score: float
    metric_lock: bool
