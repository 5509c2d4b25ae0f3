"""A reflection LM in this process: the imperfect simulated reflector, which writes of a real model's house style.

It reads and writes rules of the simulated model, so that the sentences of the style are turned into these before it
reads, and back after it wrote (`benchmarks.workloads.house_style`). How it reads feedback, what it forgets, the useless
and harmful sentences that it adds, what its integrations lose and the forms of its replies are the simulated model's
(`sim.reply_model`); whether any of it helps, the real task model decides.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace

import dspy
from dspy.lm15 import Message, Request, Response, TextPart, Usage

from benchmarks.workloads.house_style import from_rules, to_rules
from dspy_flashevolve.sim.profiles import profile_named
from dspy_flashevolve.sim.replies import Repeats, reply_to
from dspy_flashevolve.sim.reply_model import ReplyModel
from dspy_flashevolve.sim.virtual import Shared, chat_request


class ScriptedReflection:
    """Answers reflections and integrations, after the seconds that a model of its own would take.

    Args:
        model: How the simulated model reflects and integrates.
        profile: The simulated backend whose lengths of replies and speed it has, one reply at a time; seconds are real.
        seed: Of its random choices.
        pace: What the seconds are multiplied by; 0 for replies at once.

    Attributes:
        calls: Requests answered.
        tokens: Read and written for them, by the profile's lengths.
    """

    def __init__(self, model: ReplyModel, profile: str, seed: int, pace: float = 1.0) -> None:
        self._model, self._profile, self._seed = model, profile_named(profile), seed
        self._pace, self._repeats, self._lock = pace, Repeats(), threading.Lock()
        self.calls = self.tokens = 0

    def lm(self) -> dspy.LM:
        """The LM; its copies are the same model."""
        return dspy.LM("scripted", engine=_Engine(self), async_engine=_AsyncEngine(self), cache=False, num_retries=0)

    def answer(self, request: Request) -> tuple[Response, float]:
        """The reply, and how many seconds it takes."""
        profile, chat = self._profile, chat_request(request)
        chat = replace(chat, inputs={name: to_rules(text) for name, text in chat.inputs.items()})
        with self._lock:
            reply = reply_to(chat, profile, self._model, self._seed, self._repeats.count(chat))
            self.calls += 1
            self.tokens += chat.prompt_tokens + reply.completion_tokens
        usage = Usage(
            input_tokens=chat.prompt_tokens,
            output_tokens=reply.completion_tokens,
            total_tokens=chat.prompt_tokens + reply.completion_tokens,
        )
        message = Message("assistant", (TextPart(from_rules(reply.text)),))
        response = Response(id=None, model="scripted", message=message, finish_reason=reply.finish_reason, usage=usage)
        seconds = profile.time_to_first_token_seconds + chat.prompt_tokens / profile.prefill_tokens_per_second
        return response, self._pace * (seconds + profile.step_seconds * reply.completion_tokens)


class _Engine(Shared):
    """dspy's engine contract."""

    def __init__(self, model: ScriptedReflection) -> None:
        self._model = model

    def complete(self, request: Request) -> Response:
        response, seconds = self._model.answer(request)
        time.sleep(seconds)
        return response

    def close(self) -> None:
        """Nothing to close."""


class _AsyncEngine(Shared):
    """The same, awaited."""

    def __init__(self, model: ScriptedReflection) -> None:
        self._model = model

    async def complete(self, request: Request) -> Response:
        response, seconds = self._model.answer(request)
        await asyncio.sleep(seconds)
        return response

    async def aclose(self) -> None:
        """Nothing to close."""
