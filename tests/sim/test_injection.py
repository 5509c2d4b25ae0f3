"""Faults over real HTTP: what a client sees of each, plain and streamed, and what the server counts."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import aiohttp
import pytest

from dspy_flashevolve.sim.faults import Faults
from tests.sim.test_server import SOON, Client, run, stats


def ask(session: Client) -> Any:
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    return session.post("/v1/chat/completions", json=body)


async def until_injected(session: Client, faults: dict[str, int]) -> None:
    """Ask until the server has seen the request; each question is a round trip of its own."""
    while (await stats(session))["faults"] != faults:
        pass


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("server_error", 503, None),
        ("unauthorized", 401, "invalid_api_key"),
        ("context_too_long", 400, "context_length_exceeded"),
        ("content_filter", 400, "content_filter"),
    ],
)
def test_a_refusal_has_its_status_and_openais_body(kind: str, status: int, code: str | None) -> None:
    async def test(session: Client) -> None:
        async with ask(session) as response:
            assert response.status == status
            error = (await response.json())["error"]
        assert error["code"] == code
        assert error["message"]
        now = await stats(session)
        assert now["faults"] == {kind: 1}
        assert (now["requests"], now["refused"]) == (0, 0)

    run(test, faults=Faults(**{kind: 1.0}))


def test_in_a_burst_every_request_is_refused_and_told_when_to_come_back() -> None:
    # After the first period, all but a nanosecond of a client's time is in a burst.
    faults = Faults(burst_every_seconds=1e7, burst_seconds=1e7 - 1)

    async def test(session: Client) -> None:
        while (await stats(session))["model_seconds"] < 1e7:
            pass
        async with ask(session) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
            assert int(response.headers["retry-after-ms"]) >= 1
            assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
        now = await stats(session)
        assert (now["faults"], now["refused"], now["requests"]) == ({"rate_limit": 1}, 1, 0)

    run(test, time_scale=1e9, faults=faults)


def test_a_hang_is_never_answered_and_ends_with_the_client() -> None:
    async def test(session: Client) -> None:
        task = asyncio.create_task(ask(session).__aenter__())
        await until_injected(session, {"hang": 1})
        assert not task.done()
        now = await stats(session)
        assert (now["running"], now["requests"]) == (0, 0)
        task.cancel()

    run(test, faults=Faults(hang=1.0))


def test_a_truncated_body_is_cut_in_its_middle() -> None:
    async def test(session: Client) -> None:
        async with ask(session) as response:
            assert response.status == 200
            length = int(response.headers["Content-Length"])
            received = await response.content.readexactly(length // 2)
            assert received
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.content.read()

    run(test, faults=Faults(truncated_body=1.0))


def test_a_malformed_body_comes_with_status_200_and_is_no_answer() -> None:
    async def test(session: Client) -> None:
        seen: set[str] = set()
        while len(seen) < 3:
            async with ask(session) as response:
                assert response.status == 200
                text = await response.text()
                kind = response.content_type
            if kind == "text/html":
                assert text.startswith("<html>")
                seen.add("html")
            elif text == "{}":
                seen.add("empty")
            else:
                with pytest.raises(ValueError, match=r"."):
                    json.loads(text)
                seen.add("json")

    run(test, faults=Faults(malformed_body=1.0))


def test_a_slow_drip_says_the_same_in_many_pieces() -> None:
    answers: list[str] = []

    async def test(session: Client) -> None:
        async with ask(session) as response:
            answers.append(await response.text())

    run(test)
    run(test, faults=Faults(slow_drip=1.0, drip_seconds=0.2 * SOON))
    good, dripped = (re.sub(r'"created": \d+', "", text) for text in answers)
    assert dripped == good


def test_a_drip_does_not_hold_up_others() -> None:
    async def test(session: Client) -> None:
        task = asyncio.create_task(ask(session).__aenter__())
        response = await task
        assert response.status == 200
        assert await response.content.readexactly(1) == b"{"
        assert (await stats(session))["faults"] == {"slow_drip": 1}
        assert not response.content.at_eof()
        response.close()

    run(test, faults=Faults(slow_drip=1.0, drip_seconds=1e9 * SOON))


def test_the_nth_request_gets_what_the_pure_function_says() -> None:
    faults = Faults(server_error=0.3, unauthorized=0.2, empty_choices=0.2, seed=5)

    async def test(session: Client) -> None:
        for number in range(40):
            expected = faults.drawn(number)
            async with ask(session) as response:
                assert response.status == (200 if expected is None else expected.status)
                empty = response.status == 200 and not (await response.json())["choices"]
                assert empty == (expected is not None and expected.kind == "empty_choices")

    run(test, faults=faults)


def test_a_body_fault_is_an_accepted_request_that_takes_its_time() -> None:
    async def test(session: Client) -> None:
        async with ask(session) as response:
            await response.read()
        now = await stats(session)
        assert (now["requests"], now["finished"], now["faults"]) == (1, 1, {"empty_choices": 1})
        assert now["completion_tokens"] > 0

    run(test, faults=Faults(empty_choices=1.0))


def test_a_bad_request_draws_no_fault() -> None:
    async def test(session: Client) -> None:
        async with session.post("/v1/chat/completions", data=b"{}") as response:
            assert response.status == 400
        assert (await stats(session))["faults"] == {}

    run(test, faults=Faults(server_error=1.0))
