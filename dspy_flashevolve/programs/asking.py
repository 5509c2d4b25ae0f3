"""Asking a dspy module once: on the loop or in a thread, its usage counted, the provider's faults told from its own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import anyio
import dspy
from dspy.primitives.module import Module
from dspy.utils.usage_tracker import track_usage

from dspy_flashevolve.engine.flights import Spent
from dspy_flashevolve.engine.threads import Threads
from dspy_flashevolve.programs.faults import heard_lm_calls, raise_provider_fault
from dspy_flashevolve.programs.lm import calls_of, cost_of, tokens_of
from dspy_flashevolve.programs.runner import runs_on_loop

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked(Generic[T]):
    """What became of a question. It has cost what it has cost, whether or not there is an answer.

    Args:
        answer: what was read; None when there is an error.
        error: what the module, or the reading of its answer, raised; a reply that did not fit the format, say.
        calls: LM calls that reported their usage.
        spent: tokens that the LMs reported, and dollars, 0 where no price is known or none was asked for.
    """

    answer: T | None
    error: Exception | None
    calls: int
    spent: Spent


async def ask_module(
    module: Module,
    inputs: Mapping[str, Any],
    *,
    lm: Any,
    threads: Threads,
    priced: bool,
    read: Callable[[Any], T],
) -> Asked[T]:
    """Call a module once.

    Args:
        module: nobody else's: it is called as it is, not copied.
        inputs: its keyword arguments.
        lm: what it asks, unless its predictors have LMs of their own.
        threads: where it runs when it cannot be awaited.
        priced: work out what the calls cost.
        read: makes of what the module returns what is wanted. What it raises is the module's error.

    Raises:
        TransientError: the provider asks to come back later.
        RunAbortedError: the provider refuses for good.
    """
    answer: T | None = None
    failure: Exception | None = None
    with track_usage() as usage, dspy.context(lm=lm), heard_lm_calls() as calls:
        try:
            if runs_on_loop(module):
                answer = read(await module.acall(**inputs))
            else:
                answer = read(await threads.run(module, **inputs))
        except asyncio.CancelledError as error:
            if anyio.current_effective_deadline() == -math.inf:
                raise  # the run is being cancelled, not the module by itself
            failure = RuntimeError(f"the module was cancelled: {error}")
        except Exception as error:
            raise_provider_fault(error, calls.errors)
            failure = error
    problem = "" if failure is None else f"{type(failure).__name__}: {failure}"[:300]
    spent = Spent(tokens_of(usage), cost_of(usage) if priced else 0.0, problem)
    return Asked(answer, failure, calls_of(usage), spent)
