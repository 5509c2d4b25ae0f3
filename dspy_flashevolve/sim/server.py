"""The simulated LLM server: OpenAI's chat completions over real HTTP, and `/stats`.

    POST /v1/chat/completions   without streams
    GET  /v1/models  /health  /stats
    POST /stats/reset

A request is read (`prompts`), answered at once in memory (`replies`), and sent when the backend (`backend`) says that
its last token is written. When the client goes away, the request gives its place back. With `faults` in its
configuration, the server fails some requests on purpose.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from aiohttp import web

from dspy_flashevolve.sim.backend import H100_QWEN3_8B, Load, Profile
from dspy_flashevolve.sim.counters import Counters, ServerStats
from dspy_flashevolve.sim.faults import BODY_KINDS, Fault, Faults, error_of, malformed
from dspy_flashevolve.sim.prompts import BadRequest, ChatRequest, parse_chat_request
from dspy_flashevolve.sim.replies import Repeats, Reply, ReplyModel, reply_to

_MAX_BODY_BYTES = 64 * 2**20
"""Largest request that is read: more than any prompt; aiohttp's own limit, 1 MiB, is less than a long one."""
_DRIPS_PER_SECOND = 50.0
"""Most pieces a second of a slow drip: a piece is one byte, or more where one byte each would take longer than asked.
Timers of an event loop on a busy machine are no finer than some 20 milliseconds."""


@dataclass(frozen=True)
class ServerConfig:
    """The configuration of a simulated server.

    Attributes:
        profile: The backend that it plays.
        seed: Part of every random choice.
        time_scale: Model seconds a wall second; 50 makes everything 50 times faster.
        reply_model: How well the simulated model obeys and reflects.
        faults: What goes wrong on purpose, and how often; None for nothing.
        quota: Makes a counter of requests and tokens a minute, such as `benchmarks.quota.QuotaCounter`; None for any
            number.
        host: Address to bind; the loopback by default, since the server has no authentication.
        port: Port to bind; 0 for any free one.

    Raises:
        ValueError: If `time_scale` is not a positive finite number or `port` is outside 0 to 65535.
    """

    profile: Profile = H100_QWEN3_8B
    seed: int = 0
    time_scale: float = 1.0
    reply_model: ReplyModel = field(default_factory=ReplyModel)
    faults: Faults | None = None
    quota: Callable[[], Any] | None = None
    host: str = "127.0.0.1"
    port: int = 0

    def __post_init__(self) -> None:
        if not (self.time_scale > 0 and math.isfinite(self.time_scale)):
            raise ValueError(f"time_scale must be a positive number, got {self.time_scale!r}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be between 0 and 65535, got {self.port!r}")


async def serve(config: ServerConfig, on_ready: Callable[[int], None], stop: asyncio.Event) -> None:
    """Serve until `stop` is set, when requests in flight are cut off; `on_ready` is called with the port once requests
    are accepted. Raises OSError if the address cannot be bound."""
    handlers = _Handlers(config)
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.add_routes(
        [
            web.post("/v1/chat/completions", handlers.chat_completions),
            web.get("/v1/models", handlers.models),
            web.get("/health", handlers.health),
            web.get("/stats", handlers.stats),
            web.post("/stats/reset", handlers.reset_stats),
        ]
    )
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, config.host, config.port, backlog=4096)
        await site.start()
        on_ready(runner.addresses[0][1])
        await stop.wait()
    finally:
        await runner.cleanup()


@dataclass(frozen=True)
class _Window:
    """The moment and the load at which the current window of `/stats` began, and its counters."""

    started: float
    load: Load
    counters: Counters = field(default_factory=Counters)


class _Handlers:
    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._profile = config.profile
        self._batch = config.profile.batch(config.time_scale)
        self._quota = None if config.quota is None else config.quota()
        self._received = 0
        self._repeats = Repeats()
        self._window = _Window(self._batch.now(), self._batch.load())

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        try:
            chat = parse_chat_request(await request.read())
        except BadRequest as error:
            return web.json_response(_error("invalid_request_error", str(error), param=error.param), status=400)
        fault = self._fault()
        if fault is not None and fault.kind not in BODY_KINDS:
            return await self._faulty(fault)
        limit = self._profile.concurrency_limit
        if limit is not None and self._batch.in_flight >= limit:
            seconds = self._profile.retry_after_seconds / self._config.time_scale
            return self._refusal(f"{limit} requests in flight. Please try again in {seconds:.3f}s.", seconds)
        reply = reply_to(chat, self._profile, self._config.reply_model, self._config.seed, self._repeats.count(chat))
        if self._quota is not None:
            now = self._batch.now() / self._config.time_scale
            wait = self._quota.admit(now, chat.prompt_tokens + reply.completion_tokens)
            if wait is not None:
                return self._refusal("too many requests or tokens in this minute.", wait)
        self._window.counters.requests += 1
        generation = self._batch.submit(chat.prompt_tokens, reply.completion_tokens)
        try:
            await generation.finished
            self._window.counters.finish(chat.kind, chat.prompt_tokens, reply.completion_tokens)
            if fault is not None:
                return await self._damaged(request, fault, chat, reply)
            return web.json_response(_completion(chat, reply, self._profile), headers=self._quota_headers())
        finally:
            if self._batch.release(generation):
                self._window.counters.cancelled += 1

    def _fault(self) -> Fault | None:
        """Draw the fault of the request that has just come."""
        number, faults = self._received, self._config.faults
        self._received += 1
        fault = None if faults is None else faults.at(number, self._batch.now())
        if fault is not None:
            self._window.counters.inject(fault.kind)
        return fault

    async def _faulty(self, fault: Fault) -> web.Response:
        """Answer a fault that needs no reply; a hang ends only when the client goes away."""
        if fault.kind == "hang":
            await asyncio.Event().wait()
        is_limit = fault.kind == "rate_limit"
        headers = _retry_headers(fault.retry_after_seconds / self._config.time_scale) if is_limit else None
        return web.json_response({"error": error_of(fault)}, status=fault.status, headers=headers)

    async def _damaged(self, request: web.Request, fault: Fault, chat: ChatRequest, reply: Reply) -> web.StreamResponse:
        """Send the reply with the fault in its body."""
        answer = _completion(chat, reply, self._profile)
        body = json.dumps(answer | ({"choices": []} if fault.kind == "empty_choices" else {})).encode()
        content_type = "application/json"
        if fault.kind == "malformed_body":
            body, content_type = malformed(fault, body)
        response = web.StreamResponse(headers={"Content-Type": content_type})
        response.content_length = len(body)
        await response.prepare(request)
        if fault.kind == "truncated_body":
            await response.write(body[: len(body) // 2])
            if request.transport is not None:
                request.transport.close()
            return response
        if fault.kind == "slow_drip" and self._config.faults is not None:
            wall_seconds = self._config.faults.drip_seconds / self._config.time_scale
            for piece in drips(body, wall_seconds):
                await response.write(piece)
                await asyncio.sleep(wall_seconds * len(piece) / len(body))
        else:
            await response.write(body)
        await response.write_eof()
        return response

    def _refusal(self, reason: str, wall_seconds: float) -> web.Response:
        self._window.counters.refused += 1
        body = _error("rate_limit_error", f"Rate limit reached: {reason}", code="rate_limit_exceeded")
        headers = {**_retry_headers(wall_seconds), **self._quota_headers()}
        return web.json_response(body, status=429, headers=headers)

    def _quota_headers(self) -> dict[str, str]:
        return {} if self._quota is None else self._quota.headers(self._batch.now() / self._config.time_scale)

    async def models(self, _: web.Request) -> web.Response:
        card = {"id": self._profile.model, "object": "model", "created": 0, "owned_by": "dspy-flashevolve"}
        return web.json_response({"object": "list", "data": [card]})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def reset_stats(self, _: web.Request) -> web.Response:
        self._window = _Window(self._batch.now(), self._batch.load())
        return web.json_response({})

    async def stats(self, _: web.Request) -> web.Response:
        load, window, counters = self._batch.load(), self._window, self._window.counters
        elapsed = self._batch.now() - window.started
        running_seconds = load.running_seconds - window.load.running_seconds
        stats = ServerStats(
            profile=self._profile.name,
            seed=self._config.seed,
            time_scale=self._config.time_scale,
            seconds=elapsed / self._config.time_scale,
            model_seconds=elapsed,
            requests=counters.requests,
            finished=counters.total(0),
            cancelled=counters.cancelled,
            refused=counters.refused,
            running=load.running,
            waiting=load.waiting,
            prompt_tokens=counters.total(1),
            completion_tokens=counters.total(2),
            generated_tokens=load.generated_tokens - window.load.generated_tokens,
            mean_running=running_seconds / elapsed if elapsed > 0 else 0.0,
            by_kind=counters.kind_stats(),
            faults=dict(counters.faults),
        )
        return web.json_response(asdict(stats))


# The bodies of OpenAI's API


def _completion(chat: ChatRequest, reply: Reply, profile: Profile) -> dict[str, Any]:
    """Return the body of an answer."""
    digest = hashlib.blake2b(chat.content.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
    message = {"role": "assistant", "content": reply.text}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}
    usage = {
        "prompt_tokens": chat.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": chat.prompt_tokens + reply.completion_tokens,
    }
    head = {"id": f"chatcmpl-{digest}", "object": "chat.completion", "created": int(time.time())}
    return {**head, "model": chat.model or profile.model, "choices": [choice], "usage": usage}


def _error(error_type: str, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def _retry_headers(wall_seconds: float) -> dict[str, str]:
    """Return the headers by which OpenAI's API says when to retry: in whole seconds and in milliseconds."""
    return {"Retry-After": str(math.ceil(wall_seconds)), "retry-after-ms": str(math.ceil(wall_seconds * 1000))}


def drips(body: bytes, wall_seconds: float) -> Iterator[bytes]:
    """Yield the pieces of a slow drip: single bytes, unless these would have to come faster than timers fire.

    Examples:
        >>> list(drips(b"abcd", wall_seconds=60)), list(drips(b"abcd", wall_seconds=0.04))
        ([b'a', b'b', b'c', b'd'], [b'ab', b'cd'])
    """
    size = max(1, math.ceil(len(body) / max(1.0, wall_seconds * _DRIPS_PER_SECOND)))
    for start in range(0, len(body), size):
        yield body[start : start + size]
