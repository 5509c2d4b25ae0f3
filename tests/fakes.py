"""Language models in this process, for tests that are not about language models.

They are real ``dspy.LM`` objects with an engine of ours behind them: a pure function from the whole prompt
to a reply. Named fakes; the tests of the real road over HTTP are in ``tests/sim``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import dspy
from dspy.lm15 import Message, Request, Response, TextPart, Usage


def hashed(*parts: object) -> int:
    """A number that depends on the parts and nothing else."""
    return int(hashlib.sha256(repr(parts).encode()).hexdigest(), 16)


def prompt_of(request: Request) -> str:
    """The whole prompt as text."""
    return f"{request.system}\n" + "\n".join(message.text or "" for message in request.messages)


def reply_for(prompt: str, **fields: str) -> str:
    """A reply in the format that the prompt asks for."""
    if "JSON" in prompt:
        return json.dumps(fields)
    return "\n\n".join([f"[[ ## {name} ## ]]\n{text}" for name, text in fields.items()] + ["[[ ## completed ## ]]"])


CUT_OFF = "(cut off)"
"""An answer that ends so is sent without it, as one whose tokens were used up."""


class FakeEngine:
    """Answers by a function of the prompt; counts its calls."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        self.answer = answer
        self._asked: list[None] = []  # threads may ask at once, and a list can be pickled, unlike a lock

    @property
    def calls(self) -> int:
        return len(self._asked)

    def complete(self, request: Request) -> Response:
        self._asked.append(None)
        text = self.answer(prompt_of(request))
        usage = Usage(input_tokens=3, output_tokens=4, total_tokens=7)
        message = Message.assistant([TextPart(text.removesuffix(CUT_OFF))])
        reason = "length" if text.endswith(CUT_OFF) else "stop"
        return Response(id=None, model="fake", message=message, finish_reason=reason, usage=usage)


class AsyncFakeEngine:
    """The same, awaited."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine

    async def complete(self, request: Request) -> Response:
        return self.engine.complete(request)


def fake_lm(answer: Callable[[str], str], *, asynchronous: bool = True, num_retries: int = 0) -> dspy.LM:
    """A ``dspy.LM`` that answers by ``answer(prompt)``, without a cache."""
    engine = FakeEngine(answer)
    return dspy.LM(
        "fake/model",
        engine=engine,
        async_engine=AsyncFakeEngine(engine) if asynchronous else None,
        cache=False,
        num_retries=num_retries,
    )


def task_lm(seed: int = 0, **options: Any) -> dspy.LM:
    """Answers a digit that depends on the whole prompt, so that every instruction has its own scores."""
    return fake_lm(lambda prompt: reply_for(prompt, answer=str(hashed(seed, prompt) % 7)), **options)


def reflection_lm(seed: int = 0, **options: Any) -> dspy.LM:
    """Writes an instruction that depends on the whole prompt."""
    return fake_lm(
        lambda prompt: reply_for(prompt, new_instruction=f"Instruction {hashed(seed, prompt) % 100_000}"), **options
    )


class Chain(dspy.Module):
    """``predictors`` predictors in a row, sync and async."""

    def __init__(self, predictors: int = 1) -> None:
        super().__init__()
        self.steps = [dspy.Predict("question -> answer") for _ in range(predictors)]

    def forward(self, question: str) -> dspy.Prediction:
        return dspy.Prediction(answer=" ".join(step(question=question).answer for step in self.steps))

    async def aforward(self, question: str) -> dspy.Prediction:
        answers = [(await step.acall(question=question)).answer for step in self.steps]
        return dspy.Prediction(answer=" ".join(answers))


def digits(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> dspy.Prediction:
    """The mean of the digits, from 0 to 1."""
    values = [int(word) for word in pred.answer.split()]
    score = sum(values) / (6 * len(values))
    return dspy.Prediction(score=score, feedback=f"{gold.question} got {score}")


def examples(name: str, count: int) -> list[dspy.Example]:
    """``count`` questions that differ."""
    return [dspy.Example(question=f"{name} {number}").with_inputs("question") for number in range(count)]
