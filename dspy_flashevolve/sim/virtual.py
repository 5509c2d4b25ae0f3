"""Virtual time: the same engine and stages on a loop whose clock jumps, with a language model in the process.

A run that would take hours takes seconds, and the same run gives the same result, whatever the machine is doing.
Nothing sleeps: when the loop has nothing to do, its clock jumps to the next timer. Code that runs in a thread (a
synchronous reflection, gepa's state) has the floor while it runs: the loop waits until it is done or asks a
simulated model, so that threads and loop never run at once, and order does not depend on the machine.

    lm = SimulatedLM("h100-qwen3-8b")
    program = run(lambda: optimizer.acompile(student, trainset=..., valset=...))
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import dspy
from dspy.lm15 import Message, RateLimitError, Request, Response, TextPart, Usage

from dspy_flashevolve.sim.batching import BatchDriver, Load
from dspy_flashevolve.sim.profiles import Profile, profile_named
from dspy_flashevolve.sim.prompts import ChatRequest, parse_chat_request
from dspy_flashevolve.sim.replies import Repeats, ReplyModel, default_reply_model, reply_to
from dspy_flashevolve.sim.virtual_loop import FOREIGN, LOOP_OF, VirtualLoop, run

__all__ = ["SimulatedModel", "VirtualLoop", "run"]


class SimulatedModel:
    """The simulated server without its HTTP: one batch of sequences, shared by all the LMs that it serves.

    Args:
        profile: rates and output lengths, or the name of a calibrated profile.
        seed: seed of the replies.
        reply_model: how well the model obeys and reflects; None for the default, "plain" of `reply_model.REPLY_MODELS`.
        reflection_seconds: what each request that is no rollout's takes, as from another, slow model: it holds no place
            in this one's batch and counts for no limit. 0 where this model answers all requests.
    """

    def __init__(
        self,
        profile: Profile | str = "h100-qwen3-8b",
        seed: int = 0,
        reply_model: ReplyModel | None = None,
        reflection_seconds: float = 0.0,
    ) -> None:
        self.profile = profile_named(profile) if isinstance(profile, str) else profile
        self.seed = seed
        self.reply_model = reply_model or default_reply_model()
        self.reflection_seconds = reflection_seconds
        self.requests: dict[str, int] = {}
        """Kind of prompt -> requests answered."""
        self.tokens: dict[str, int] = {}
        """Kind of prompt -> tokens read and written for it, of requests answered."""
        self.prompt_tokens = 0
        """Prompt tokens of the requests answered."""
        self.completion_tokens = 0
        """Completion tokens of the requests answered."""
        self.sent: list[float] = []
        """When each request came, refused ones included, in virtual seconds."""
        self.refused: list[float] = []
        """When each refused request came, in virtual seconds."""
        self._repeats = Repeats()
        self._driver: BatchDriver | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def lm(self, name: str = "simulated") -> dspy.LM:
        """Return an LM that this model serves; use it inside `run` only."""
        return dspy.LM(name, engine=_Engine(self), async_engine=_AsyncEngine(self), cache=False, num_retries=0)

    def load(self) -> Load:
        """Return the state and the totals of the batch."""
        return Load(0, 0, 0.0, 0.0, 0.0) if self._driver is None else self._driver.load()

    def generated_tokens(self) -> float:
        """Return the tokens written so far, pro rata for replies that are being written."""
        return self.load().generated_tokens

    def refused_share(self, after_seconds: float = 0.0) -> float:
        """Return the share of requests refused, of those that came from then on; 0 where none came."""
        sent = sum(seconds >= after_seconds for seconds in self.sent)
        return sum(seconds >= after_seconds for seconds in self.refused) / sent if sent else 0.0

    async def answer(self, request: Request) -> Response:
        """Return the reply, after the time that it takes.

        Raises:
            RateLimitError: lm15's, with the profile's ``retry_after_seconds``: too many requests are in flight.
        """
        chat = chat_request(request)
        loop = asyncio.get_running_loop()
        if self._driver is None or self._loop is not loop:  # the driver of an earlier run
            self._loop = loop
            self._driver = BatchDriver(self.profile, time_scale=1.0)
        is_elsewhere = self.reflection_seconds > 0 and chat.kind not in ("task", "other")
        if not is_elsewhere:
            self._refuse_excess(loop.time(), self._driver.in_flight)
        reply = reply_to(chat, self.profile, self.reply_model, self.seed, self._repeats.count(chat))
        if is_elsewhere:
            await asyncio.sleep(self.reflection_seconds)
        else:
            generation = self._driver.submit(chat.prompt_tokens, reply.completion_tokens)
            try:
                await generation.finished
            finally:
                self._driver.release(generation)
        self.requests[chat.kind] = self.requests.get(chat.kind, 0) + 1
        tokens = chat.prompt_tokens + reply.completion_tokens
        self.tokens[chat.kind] = self.tokens.get(chat.kind, 0) + tokens
        self.prompt_tokens += chat.prompt_tokens
        self.completion_tokens += reply.completion_tokens
        return Response(
            id=None,
            model="simulated",
            message=Message("assistant", (TextPart(reply.text),)),
            finish_reason="length" if reply.finish_reason == "length" else "stop",
            usage=Usage(
                input_tokens=chat.prompt_tokens,
                output_tokens=reply.completion_tokens,
                total_tokens=tokens,
            ),
        )

    def _refuse_excess(self, seconds: float, in_flight: int) -> None:
        """Raise RateLimitError where the server would answer 429: as many requests are in flight as it takes."""
        self.sent.append(seconds)
        limit = self.profile.concurrency_limit
        if limit is None or in_flight < limit:
            return
        self.refused.append(seconds)
        raise RateLimitError(
            f"Rate limit reached: {limit} requests in flight.",
            status=429,
            retry_after=self.profile.retry_after_seconds,
        )


class Shared:
    """A part of an LM that its copies share: an event loop and a batch cannot be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class _AsyncEngine(Shared):
    """An engine in the sense of dspy, asked on the event loop."""

    def __init__(self, model: SimulatedModel) -> None:
        self._model = model

    async def complete(self, request: Request) -> Response:
        return await self._model.answer(request)

    async def aclose(self) -> None:
        """Nothing to close."""


class _Engine(Shared):
    """An engine in the sense of dspy, asked from a thread of the virtual loop."""

    def __init__(self, model: SimulatedModel) -> None:
        self._model = model

    def complete(self, request: Request) -> Response:
        loop = LOOP_OF.get(threading.get_ident())
        if loop is None:
            raise RuntimeError(FOREIGN)
        return loop.wait_from_thread(self._model.answer(request))

    def close(self) -> None:
        """Nothing to close."""


def chat_request(request: Request) -> ChatRequest:
    """Return a request as the server would read it."""
    messages = [{"role": "system", "content": _text(request.system)}] if request.system else []
    messages += [{"role": message.role, "content": _text(message.parts)} for message in request.messages]
    body: dict[str, Any] = {"model": request.model, "messages": messages}
    return parse_chat_request(json.dumps(body).encode())


def _text(parts: Any) -> str:
    if parts is None or isinstance(parts, str):
        return parts or ""
    return "\n".join(part.text for part in parts if isinstance(part, TextPart))
