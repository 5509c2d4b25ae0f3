"""Mistakes on this side of the wire end a run at once, with their own error; no endpoint is blamed for them."""

from __future__ import annotations

import json
from typing import Any

import dspy
import pytest
from dspy.lm15 import Request, Response
from dspy.utils.exceptions import LMRateLimitError

from tests.broken_server import BrokenServer
from tests.contract.surface import compiled, simulated
from tests.fakes import Chain, fake_lm, reflection_lm, reply_for, task_lm

FIRST = 8
"""Rollouts that fail alike before a run ends."""
SLOTS = 4


class Unsendable:
    """dspy's engine contract: an argument is no JSON, so that no request is sent."""

    def __init__(self) -> None:
        self.calls = 0

    def complete(self, request: Request) -> Response:
        self.calls += 1
        json.dumps({"lm": self})
        raise AssertionError("it cannot be written")


def test_a_request_that_cannot_be_written_is_not_made_again_and_ends_the_run_with_its_error() -> None:
    engine = Unsendable()
    lm = dspy.LM("fake/model", engine=engine, cache=False)
    with dspy.context(lm=lm), pytest.raises(Exception, match="Unsendable is not JSON serializable"):
        simulated(100)
    assert engine.calls <= FIRST + SLOTS


UNSENDABLE: dict[str, tuple[str, dict[str, Any], str]] = {
    "an LM in lm= of a predictor, which dspy 3.4 sends on": ("auto", {"lm": task_lm()}, "LM is not JSON serializable"),
    "an argument that is no JSON": ("litellm", {"foo": {1, 2}}, "set is not JSON serializable"),
    "an argument of a wrong type": ("litellm", {"response_format": 5}, "Unsupported response_format"),
    "a key with a line break": ("lm15", {"api_key": "ke\ny"}, "forbidden byte in HTTP header"),
    "the same through litellm": ("litellm", {"api_key": "ke\ny"}, "control character"),
    "an address without a scheme": ("lm15", {"api_base": "localhost:3/v1"}, "missing scheme"),
    "an address that is none": ("litellm", {"api_base": "http://[bad"}, "Invalid IPv6"),
}
"""What is wrong -> dspy's engine, the argument, a part of the error."""


@pytest.mark.parametrize("name", UNSENDABLE)
def test_what_keeps_requests_from_leaving_is_told_as_it_is_and_nobody_is_asked(name: str) -> None:
    engine, argument, says = UNSENDABLE[name]
    asked: list[str] = []

    def choose(prompt: str) -> str:
        asked.append(prompt)
        return reply_for(prompt, answer="3")

    with BrokenServer(choose) as server:
        lm = server.lm("chosen", engine)
        program = Chain()
        program.steps[0].config |= argument
        with dspy.context(lm=lm), pytest.raises(Exception, match=says) as caught:
            compiled(100, program, reflection_lm=reflection_lm())
    assert "has answered nothing" not in str(caught.value)
    assert not asked


def test_a_refusal_of_the_call_that_makes_up_for_an_unsendable_one_is_asked_again() -> None:
    """Its chain of causes has both errors; the provider's own is the one that counts."""
    refused: list[str] = []

    def answer(prompt: str) -> str:
        if len(refused) < 3:
            refused.append(prompt)
            try:
                json.dumps(object())
            except TypeError as error:
                raise LMRateLimitError("429") from RuntimeError("after", error)
        return reply_for(prompt, answer="3")

    with dspy.context(lm=fake_lm(answer)):
        details = simulated(30, metric=lambda *_: 0.5).detailed_results
    assert details.async_stats.retried_requests == 3
    assert set(details.val_subscores[0].values()) == {0.5}
