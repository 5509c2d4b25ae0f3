"""A reply that comes a byte now and then: a request has a total time, whatever way a program makes it.

Each byte resets the timeout of an LM that is one between two bytes. The whole reply would take half a
minute, and be good.
"""

from __future__ import annotations

import asyncio
from typing import Any

import dspy
import httpx
import pytest

from tests.broken_server import BrokenServer
from tests.contract.surface import VAL, compiled
from tests.contract.test_unanswered import dripping_first
from tests.fakes import Chain, reflection_lm


class ByParallel(Chain):
    def forward(self, question: str) -> dspy.Prediction:
        pairs = [(self.steps[0], {"question": f"{question} {number}"}) for number in range(2)]
        answers: Any = dspy.Parallel(num_threads=2, disable_progress_bar=True)(pairs)
        return dspy.Prediction(answer=" ".join(one.answer for one in answers))


class OnItsOwnLoop(Chain):
    def forward(self, question: str) -> dspy.Prediction:
        return dspy.Prediction(answer=asyncio.run(self.steps[0].acall(question=question)).answer)


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["async", "lockstep"])
@pytest.mark.parametrize("program", [ByParallel, OnItsOwnLoop])
def test_a_drip_in_what_a_program_asks_by_threads_or_loops_of_its_own_is_given_up_and_asked_again(
    program: Any, schedule: Any
) -> None:
    with BrokenServer(dripping_first()) as server, dspy.context(lm=server.lm("chosen", timeout=3.0)):
        options: dict[str, Any] = {"metric": lambda *_: 0.5, "schedule": schedule, "reflection_lm": reflection_lm()}
        details = compiled(30, program(), **options).detailed_results
    assert details.async_stats.retried_requests >= 1
    assert list(details.val_subscores[0].values()) == [0.5] * len(VAL)


@pytest.mark.long
def test_a_timeout_that_is_one_of_httpx_bounds_the_whole_request_too() -> None:
    with BrokenServer(dripping_first()) as server:
        lm = server.lm("chosen", timeout=httpx.Timeout(3.0), engine="litellm")
        with dspy.context(lm=lm):
            details = compiled(30, metric=lambda *_: 0.5, reflection_lm=reflection_lm()).detailed_results
    assert details.async_stats.retried_requests >= 1
