"""The arguments of `AsyncMetaHarness` as one run sees them: a frozen record, made when the run is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspy_flashevolve.harness.archive import Cost
from dspy_flashevolve.sandbox.contract import Limits


@dataclass(frozen=True, kw_only=True)
class HarnessSettings:
    """What one run of `AsyncMetaHarness` is told to do. Each field is the argument of that name, explained there."""

    metric: Callable[..., Any]
    proposer_lm: Any
    iterations: int
    k: int
    proposers: int
    proposer: Callable[..., Any] | None
    proposer_steps: int
    proposer_runs: int
    proposer_tokens: int | None
    directions: tuple[str, ...]
    cost: Cost
    limits: Limits
    learn_batch: int
    failure_score: float
    log_dir: Path | None
    accept_missing_protection: tuple[str, ...]
