"""A small OpenAI-compatible server in a thread, for language models that are a function."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

Reply = Callable[[list[tuple[str, str]]], Awaitable[str]]
"""Messages as pairs of role and text -> the reply."""
LONGEST_REQUEST = 2**26
"""Bytes; aiohttp's own limit of 1 MiB is less than a long prompt."""


@contextmanager
def serving(reply: Reply) -> Iterator[str]:
    """Serve a model until the block ends, and give its ``api_base``.

    Tokens are counted as four characters each.
    """
    loop, ready, base = asyncio.new_event_loop(), threading.Event(), list[str]()
    stop = asyncio.Event()
    numbers = itertools.count()

    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        messages = [(message["role"], text_of(message["content"])) for message in body["messages"]]
        written = await reply(messages)
        usage = {"prompt_tokens": sum(len(text) for _, text in messages) // 4, "completion_tokens": len(written) // 4}
        choice = {"index": 0, "message": {"role": "assistant", "content": written}, "finish_reason": "stop"}
        return web.json_response(
            {
                "id": f"reply-{next(numbers)}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": body.get("model"),
                "choices": [choice],
                "usage": {**usage, "total_tokens": sum(usage.values())},
            }
        )

    async def serve() -> None:
        app = web.Application(client_max_size=LONGEST_REQUEST)
        app.router.add_post("/v1/chat/completions", chat)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        base.append(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), name="local server", daemon=True)
    thread.start()
    ready.wait()
    try:
        yield base[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def text_of(content: Any) -> str:
    """The text of a message's content, which is a string or a list of parts."""
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)
