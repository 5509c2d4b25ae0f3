"""The server over real HTTP, in the loop of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from dspy_flashevolve.sim.backend import API_GPT_4O_MINI, H100_QWEN3_8B, Profile
from dspy_flashevolve.sim.counters import KINDS
from dspy_flashevolve.sim.faults import Faults
from dspy_flashevolve.sim.server import ServerConfig, serve

Client = aiohttp.ClientSession
# Replies that take no time, and replies that never end on their own.
SOON = 1e5
NEVER = 1e-9


def run(
    test: Callable[[Client], Awaitable[None]],
    profile: Profile = H100_QWEN3_8B,
    time_scale: float = SOON,
    faults: Faults | None = None,
) -> None:
    async def main() -> None:
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        stop = asyncio.Event()
        config = ServerConfig(profile=profile, time_scale=time_scale, faults=faults)
        server = asyncio.create_task(serve(config, on_ready=port.set_result, stop=stop))
        async with aiohttp.ClientSession(f"http://127.0.0.1:{await port}") as session:
            await test(session)
        stop.set()
        await server

    # A guard against hanging; no test here comes near it.
    asyncio.run(asyncio.wait_for(main(), timeout=60))


def body(text: str, **extra: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": text}], **extra}


async def chat(session: Client, text: str, **extra: Any) -> dict[str, Any]:
    async with session.post("/v1/chat/completions", json=body(text, **extra)) as response:
        assert response.status == 200
        return await response.json()


async def stats(session: Client) -> dict[str, Any]:
    async with session.get("/stats") as response:
        return await response.json()


async def until_running(session: Client, running: int) -> dict[str, Any]:
    """Ask until the server has seen what was sent to it; each question is a round trip of its own."""
    while (now := await stats(session))["running"] != running:
        pass
    return now


def test_a_completion_has_openais_shape_and_its_usage_adds_up() -> None:
    async def test(session: Client) -> None:
        reply = await chat(session, "Hello " * 100)
        assert reply["object"] == "chat.completion"
        assert reply["choices"][0]["message"]["role"] == "assistant"
        assert reply["choices"][0]["finish_reason"] == "stop"
        usage = reply["usage"]
        assert usage["prompt_tokens"] == 150
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]

    run(test)


def test_the_api_refuses_what_is_over_its_limit_and_says_when_to_come_back() -> None:
    async def test(session: Client) -> None:
        tasks = [asyncio.create_task(chat(session, str(index))) for index in range(2)]
        await until_running(session, 2)
        async with session.post("/v1/chat/completions", json=body("one more")) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
            error = (await response.json())["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        now = await stats(session)
        assert (now["requests"], now["refused"]) == (2, 1)
        for task in tasks:
            task.cancel()
        await until_running(session, 0)

    run(test, replace(API_GPT_4O_MINI, concurrency_limit=2), NEVER)


def test_what_is_over_the_maximum_of_running_sequences_waits() -> None:
    async def test(session: Client) -> None:
        tasks = [asyncio.create_task(chat(session, str(index))) for index in range(5)]
        while (now := await stats(session))["requests"] != 5:
            pass
        assert (now["running"], now["waiting"]) == (3, 2)
        for task in tasks:
            task.cancel()

    run(test, replace(H100_QWEN3_8B, max_running=3), NEVER)


def test_a_client_that_goes_away_frees_its_place() -> None:
    async def test(session: Client) -> None:
        task = asyncio.create_task(chat(session, "gone"))
        await until_running(session, 1)
        task.cancel()
        now = await until_running(session, 0)
        assert (now["requests"], now["finished"], now["cancelled"]) == (1, 0, 1)

    run(test, time_scale=NEVER)


def test_stats_count_by_kind_and_begin_again_after_a_reset() -> None:
    async def test(session: Client) -> None:
        reply = await chat(session, "Hello")
        now = await stats(session)
        assert now["by_kind"]["other"] == {
            "requests": 1,
            "prompt_tokens": reply["usage"]["prompt_tokens"],
            "completion_tokens": reply["usage"]["completion_tokens"],
        }
        assert set(now["by_kind"]) == set(KINDS)
        assert now["generated_tokens"] == pytest.approx(now["completion_tokens"])
        assert now["mean_running"] > 0
        assert now["model_seconds"] == pytest.approx(now["seconds"] * SOON)
        async with session.post("/stats/reset") as response:
            assert response.status == 200
        now = await stats(session)
        assert (now["requests"], now["completion_tokens"], now["generated_tokens"]) == (0, 0, 0)

    run(test)
