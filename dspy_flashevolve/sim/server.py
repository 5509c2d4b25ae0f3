"""The simulated LLM server: OpenAI's chat completions over real HTTP, vLLM's metrics, and `/stats`.

    POST /v1/chat/completions   plain, or server-sent events with `stream: true`
    GET  /v1/models  /health  /metrics  /stats
    POST /stats/reset

A request is read (`prompts`), answered at once in memory (`replies`), and sent when the batching model (`batching`,
`driver`) says that its last token is written. When the client goes away, the sequence gives its place back.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from dspy_flashevolve.sim.batching import Load
from dspy_flashevolve.sim.counters import Counters, ServerStats, prometheus_text
from dspy_flashevolve.sim.driver import BatchDriver, Generation
from dspy_flashevolve.sim.profiles import H100_QWEN3_8B, Profile
from dspy_flashevolve.sim.prompts import BadRequest, ChatRequest, parse_chat_request
from dspy_flashevolve.sim.replies import Reply, ReplyModel, reply_to

_MAX_BODY_BYTES = 64 * 2**20
_STREAMED_PIECE_CHARACTERS = 200


@dataclass(frozen=True)
class ServerConfig:
    """What a simulated server is.

    Attributes:
        profile: The backend that it plays.
        seed: Part of every random choice.
        time_scale: Model seconds a wall second; 50 makes everything 50 times faster.
        reply_model: How well the simulated model obeys and reflects.
        host: Address to bind; the loopback by default, since the server has no authentication.
        port: Port to bind; 0 for any free one.

    Raises:
        ValueError: If `time_scale` is not a positive finite number or `port` is outside 0 to 65535.
    """

    profile: Profile = H100_QWEN3_8B
    seed: int = 0
    time_scale: float = 1.0
    reply_model: ReplyModel = field(default_factory=ReplyModel)
    host: str = "127.0.0.1"
    port: int = 0

    def __post_init__(self) -> None:
        if not (self.time_scale > 0 and math.isfinite(self.time_scale)):
            raise ValueError(f"time_scale must be a positive number, got {self.time_scale!r}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be between 0 and 65535, got {self.port!r}")


async def serve(config: ServerConfig, on_ready: Callable[[int], None], stop: asyncio.Event) -> None:
    """Serve until `stop` is set.

    Args:
        config: What to serve and where.
        on_ready: Called once with the port, when requests are accepted.
        stop: Ends the server; requests in flight are cut off.

    Raises:
        OSError: If the address cannot be bound.
    """
    runner = web.AppRunner(make_app(config), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, config.host, config.port, backlog=4096)
        await site.start()
        on_ready(runner.addresses[0][1])
        await stop.wait()
    finally:
        await runner.cleanup()


def make_app(config: ServerConfig) -> web.Application:
    """The server as an aiohttp application; run it with `handler_cancellation=True`. Needs a running event loop."""
    handlers = _Handlers(config)
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.add_routes(
        [
            web.post("/v1/chat/completions", handlers.chat_completions),
            web.get("/v1/models", handlers.models),
            web.get("/health", handlers.health),
            web.get("/metrics", handlers.metrics),
            web.get("/stats", handlers.stats),
            web.post("/stats/reset", handlers.reset_stats),
        ]
    )
    return app


@dataclass(frozen=True)
class _Window:
    """Where the current window of `/stats` began."""

    started: float
    load: Load
    counters: Counters = field(default_factory=Counters)


class _Handlers:
    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._profile = config.profile
        self._driver = BatchDriver(config.profile, config.time_scale)
        self._since_start = Counters()
        self._window = _Window(self._driver.now(), self._driver.load())

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        try:
            chat = parse_chat_request(await request.read())
        except BadRequest as error:
            return _error(400, "invalid_request_error", str(error), param=error.param)
        limit = self._profile.concurrency_limit
        if limit is not None and self._driver.in_flight >= limit:
            return self._refusal(limit)
        reply = reply_to(chat, self._profile, self._config.reply_model, self._config.seed)
        for counters in (self._since_start, self._window.counters):
            counters.requests += 1
        generation = self._driver.submit(chat.prompt_tokens, reply.completion_tokens)
        try:
            if chat.stream:
                return await self._stream(request, chat, reply, generation)
            self._count(chat, reply, generation, await generation.finished)
            return web.json_response(_completion(chat, reply, self._profile))
        finally:
            if self._driver.release(generation):
                self._since_start.abort()
                self._window.counters.abort()

    async def _stream(
        self, request: web.Request, chat: ChatRequest, reply: Reply, generation: Generation
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        await generation.first_token
        await response.write(_event(_chunk(chat, self._profile, {"role": "assistant", "content": ""})))
        self._count(chat, reply, generation, await generation.finished)
        for start in range(0, len(reply.text), _STREAMED_PIECE_CHARACTERS):
            piece = reply.text[start : start + _STREAMED_PIECE_CHARACTERS]
            await response.write(_event(_chunk(chat, self._profile, {"content": piece})))
        await response.write(_event(_chunk(chat, self._profile, {}, reply.finish_reason)))
        if chat.include_usage:
            await response.write(
                _event({**_chunk(chat, self._profile, {}), "choices": [], "usage": _usage(chat, reply)})
            )
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _count(self, chat: ChatRequest, reply: Reply, generation: Generation, finished: float) -> None:
        latency = finished - generation.started
        for counters in (self._since_start, self._window.counters):
            counters.finish(chat.kind, reply.finish_reason, chat.prompt_tokens, reply.completion_tokens, latency)

    def _refusal(self, limit: int) -> web.Response:
        for counters in (self._since_start, self._window.counters):
            counters.refused += 1
        seconds = self._profile.retry_after_seconds / self._config.time_scale
        headers = {"Retry-After": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}
        message = f"Rate limit reached: {limit} requests in flight. Please try again in {seconds:.3f}s."
        return _error(429, "rate_limit_error", message, code="rate_limit_exceeded", headers=headers)

    async def models(self, _: web.Request) -> web.Response:
        card = {"id": self._profile.model, "object": "model", "created": 0, "owned_by": "dspy-flashevolve"}
        return web.json_response({"object": "list", "data": [card]})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=prometheus_text(self._profile, self._driver.load(), self._since_start))

    async def reset_stats(self, _: web.Request) -> web.Response:
        self._window = _Window(self._driver.now(), self._driver.load())
        return web.json_response({})

    async def stats(self, _: web.Request) -> web.Response:
        return web.json_response(self._server_stats().to_json())

    def _server_stats(self) -> ServerStats:
        load, window, counters = self._driver.load(), self._window, self._window.counters
        elapsed = self._driver.now() - window.started
        running_seconds = load.running_seconds - window.load.running_seconds
        return ServerStats(
            profile=self._profile.name,
            seed=self._config.seed,
            time_scale=self._config.time_scale,
            seconds=elapsed / self._config.time_scale,
            model_seconds=elapsed,
            requests=counters.requests,
            finished=counters.total(0),
            cancelled=counters.of_reason["abort"],
            refused=counters.refused,
            running=load.running,
            waiting=load.waiting,
            prompt_tokens=counters.total(1),
            completion_tokens=counters.total(2),
            generated_tokens=load.generated_tokens - window.load.generated_tokens,
            mean_running=running_seconds / elapsed if elapsed > 0 else 0.0,
            by_kind=counters.kind_stats(),
        )


def _usage(chat: ChatRequest, reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": chat.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": chat.prompt_tokens + reply.completion_tokens,
    }


def _head(chat: ChatRequest, profile: Profile, kind: str) -> dict[str, Any]:
    digest = hashlib.blake2b(chat.content.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
    model = chat.model or profile.model
    return {"id": f"chatcmpl-{digest}", "object": kind, "created": int(time.time()), "model": model}


def _completion(chat: ChatRequest, reply: Reply, profile: Profile) -> dict[str, Any]:
    message = {"role": "assistant", "content": reply.text}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}
    return {**_head(chat, profile, "chat.completion"), "choices": [choice], "usage": _usage(chat, reply)}


def _chunk(
    chat: ChatRequest, profile: Profile, delta: dict[str, str], finish_reason: str | None = None
) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return {**_head(chat, profile, "chat.completion.chunk"), "choices": [choice]}


def _event(payload: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(payload)}\n\n".encode()


def _error(
    status: int,
    error_type: str,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> web.Response:
    body = {"error": {"message": message, "type": error_type, "param": param, "code": code}}
    return web.json_response(body, status=status, headers=headers)
