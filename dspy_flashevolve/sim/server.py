"""The simulated LLM server: OpenAI's chat completions over real HTTP, vLLM's metrics, and `/stats`.

    POST /v1/chat/completions   plain, or server-sent events with `stream: true`
    GET  /v1/models  /health  /metrics  /stats
    POST /stats/reset

A request is read (`prompts`), answered at once in memory (`replies`), and sent when the batching model (`batching`,
`driver`) says that its last token is written. When the client goes away, the sequence gives its place back. With
`faults` in its configuration, the server fails some requests on purpose (`faults`, `injection`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from dspy_flashevolve.sim import answers
from dspy_flashevolve.sim.answers import damage, refuse, retry_headers
from dspy_flashevolve.sim.batching import BatchDriver, Generation, Load
from dspy_flashevolve.sim.counters import Counters, ServerStats, prometheus_text
from dspy_flashevolve.sim.faults import BODY_KINDS, Fault, Faults
from dspy_flashevolve.sim.profiles import H100_QWEN3_8B, Profile
from dspy_flashevolve.sim.prompts import BadRequest, ChatRequest, parse_chat_request
from dspy_flashevolve.sim.quota import Quota, QuotaCounter
from dspy_flashevolve.sim.replies import Repeats, Reply, ReplyModel, default_reply_model, reply_to

_MAX_BODY_BYTES = 64 * 2**20
"""Largest request that is read: more than any prompt; aiohttp's own limit, 1 MiB, is less than a long one."""


@dataclass(frozen=True)
class ServerConfig:
    """The configuration of a simulated server.

    Attributes:
        profile: The backend that it plays.
        seed: Part of every random choice.
        time_scale: Model seconds a wall second; 50 makes everything 50 times faster.
        reply_model: How well the simulated model obeys and reflects.
        faults: What goes wrong on purpose, and how often; None for nothing.
        quota: Requests and tokens a minute; None for any number. A server with a quota has no `/metrics`.
        host: Address to bind; the loopback by default, since the server has no authentication.
        port: Port to bind; 0 for any free one.

    Raises:
        ValueError: If `time_scale` is not a positive finite number or `port` is outside 0 to 65535.
    """

    profile: Profile = H100_QWEN3_8B
    seed: int = 0
    time_scale: float = 1.0
    reply_model: ReplyModel = field(default_factory=default_reply_model)
    faults: Faults | None = None
    quota: Quota | None = None
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
    """Return the server as an aiohttp application, to be run with `handler_cancellation=True`; needs a running loop."""
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
    if config.quota is None:  # providers with quotas do not show the load of their servers
        app.add_routes([web.get("/metrics", handlers.metrics)])
    return app


@dataclass(frozen=True)
class _Window:
    """The moment and the load at which the current window of `/stats` began."""

    started: float
    load: Load
    counters: Counters = field(default_factory=Counters)


class _Handlers:
    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._profile = config.profile
        self._driver = BatchDriver(config.profile, config.time_scale)
        self._quota = None if config.quota is None else QuotaCounter(config.quota)
        self._since_start = Counters()
        self._received = 0
        self._repeats = Repeats()
        self._window = _Window(self._driver.now(), self._driver.load())

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        try:
            chat = parse_chat_request(await request.read())
        except BadRequest as error:
            body = answers.error("invalid_request_error", str(error), param=error.param)
            return web.json_response(body, status=400)
        fault = self._fault()
        if fault is not None and fault.kind not in BODY_KINDS:
            return await refuse(fault, self._config.time_scale)
        limit = self._profile.concurrency_limit
        if limit is not None and self._driver.in_flight >= limit:
            return self._refusal(limit)
        repeat = self._repeats.count(chat)
        reply = reply_to(chat, self._profile, self._config.reply_model, self._config.seed, repeat)
        wait = (
            None
            if self._quota is None
            else self._quota.admit(self._wall(), chat.prompt_tokens + reply.completion_tokens)
        )
        if wait is not None:
            return self._over_quota(wait)
        for counters in self._counters:
            counters.requests += 1
        generation = self._driver.submit(chat.prompt_tokens, reply.completion_tokens)
        try:
            if chat.stream and fault is None:
                return await self._stream(request, chat, reply, generation)
            self._count(chat, reply, generation, await generation.finished)
            if fault is not None:
                return await self._damaged(request, fault, chat, reply)
            headers = None if self._quota is None else self._quota.headers(self._wall())
            return web.json_response(answers.completion(chat, reply, self._profile), headers=headers)
        finally:
            if self._driver.release(generation):
                for counters in self._counters:
                    counters.abort()

    @property
    def _counters(self) -> tuple[Counters, Counters]:
        return self._since_start, self._window.counters

    def _fault(self) -> Fault | None:
        """Draw the fault of the request that has just come."""
        number, faults = self._received, self._config.faults
        self._received += 1
        fault = None if faults is None else faults.at(number, self._driver.now())
        if fault is not None:
            for counters in self._counters:
                counters.inject(fault.kind)
        return fault

    async def _damaged(self, request: web.Request, fault: Fault, chat: ChatRequest, reply: Reply) -> web.StreamResponse:
        faults = self._config.faults
        drip_seconds = 0.0 if faults is None else faults.drip_seconds / self._config.time_scale
        return await damage(request, fault, chat, reply, self._profile, drip_seconds)

    async def _stream(
        self, request: web.Request, chat: ChatRequest, reply: Reply, generation: Generation
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        await generation.first_token
        await response.write(answers.event(answers.opening(chat, self._profile)))
        self._count(chat, reply, generation, await generation.finished)
        for chunk in answers.chunks(chat, reply, self._profile):
            await response.write(answers.event(chunk))
        await response.write(answers.DONE)
        await response.write_eof()
        return response

    def _count(self, chat: ChatRequest, reply: Reply, generation: Generation, finished: float) -> None:
        latency = finished - generation.started
        for counters in self._counters:
            counters.finish(chat.kind, reply.finish_reason, chat.prompt_tokens, reply.completion_tokens, latency)

    def _refusal(self, limit: int) -> web.Response:
        for counters in self._counters:
            counters.refused += 1
        seconds = self._profile.retry_after_seconds / self._config.time_scale
        message = f"Rate limit reached: {limit} requests in flight. Please try again in {seconds:.3f}s."
        body = answers.error("rate_limit_error", message, code="rate_limit_exceeded")
        return web.json_response(body, status=429, headers=retry_headers(seconds))

    def _over_quota(self, seconds: float) -> web.Response:
        assert self._quota is not None
        for counters in self._counters:
            counters.refused += 1
        body = answers.error("rate_limit_error", "Rate limit reached for this minute.", code="rate_limit_exceeded")
        headers = {**retry_headers(seconds), **self._quota.headers(self._wall())}
        return web.json_response(body, status=429, headers=headers)

    def _wall(self) -> float:
        return self._driver.now() / self._config.time_scale

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
            faults=counters.faults_by_name(),
        )
