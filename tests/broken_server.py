"""A real HTTP server on 127.0.0.1 that answers chat completions in every broken way that providers have."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import dspy
from aiohttp import web

REPLY = "[[ ## answer ## ]]\n5\n\n[[ ## completed ## ]]"


def completion(**message: Any) -> dict[str, Any]:
    """A chat completion; ``finish_reason`` is the choice's, everything else the message's."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": message.pop("finish_reason", "stop")}
    choice["message"] = {"role": "assistant", **message}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


GOOD = completion(content=REPLY)
SILENT = {**completion(content=""), "usage": {"prompt_tokens": 1, "completion_tokens": 0, "total_tokens": 1}}
FAULT = {"code": 502, "message": "Upstream error"}
"""What OpenRouter puts beside the message where its provider failed after it had said 200."""


def with_choice(body: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**body, "choices": [{**body["choices"][0], **more}]}


BODIES: dict[str, Any] = {
    "good": GOOD,
    "empty_object": {},
    "no_choices": {**GOOD, "choices": []},
    "nothing_but_no_choices": {"choices": []},
    "null_choices": {**GOOD, "choices": None},
    "no_message": {**GOOD, "choices": [{"index": 0, "finish_reason": "stop"}]},
    "null_content": completion(content=None),
    "a_list": [],
    "null": None,
    "a_notice": {"detail": "the queue is full"},
    "an_error_with_status_200": {"error": {"message": "overloaded", "code": 500}},
    "choice_error": with_choice(completion(content=""), error=FAULT),
    "choice_error_beside_a_text": with_choice(completion(content="[[ ## answer ## ]]\n"), error=FAULT),
    "finish_reason_error": completion(content="[[ ## answer ## ]]\n", finish_reason="error"),
    "finish_reason_abort": completion(content="", finish_reason="abort"),
    "no_completion_token": SILENT,
    "filtered": completion(content=None, finish_reason="content_filter"),
    "cut_off": completion(content=None, finish_reason="length"),
    "filtered_without_a_token": with_choice(SILENT, finish_reason="content_filter"),
    "cut_off_without_a_token": with_choice(SILENT, finish_reason="length"),
    "refused": completion(content=None, refusal="I will not."),
    "empty_text": completion(content=""),
    "unparsable": completion(content="no field in sight"),
}
"""Name -> body of a reply with status 200."""
TEXTS = {
    "truncated": (json.dumps(GOOD)[:60], "application/json"),
    "html": ("<html>Bad gateway</html>", "text/html"),
    "html_called_json": ("<html>Bad gateway</html>", "application/json"),
    "no_body": ("", "application/json"),
}
BROKEN = ("closed_in_mid_body", "reset")
"""Connections that are lost."""


class BrokenServer:
    """Answers by name: the path of a request begins with it.

    Args:
        choose: which name a request to "chosen" is answered by.
    """

    def __init__(self, choose: Callable[[str], str] = lambda prompt: "good") -> None:
        self.choose = choose
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> BrokenServer:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def lm(self, name: str, engine: Any = "lm15", **options: Any) -> dspy.LM:
        """An LM that asks this server and is answered as ``name`` says."""
        address = f"{self.address}/{name}/v1"
        settings = {"api_base": address, "api_key": "key", "cache": False, "num_retries": 0} | options
        return dspy.LM("openai/m", engine=engine, **settings)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()
        for answer in asyncio.all_tasks(self._loop):
            answer.cancel()  # nobody waits for the rest of a drip
        self._loop.run_until_complete(runner.cleanup())

    async def _start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/{name}/v1/chat/completions", self._answer)
        app.router.add_post("/{place}/{name}/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name == "chosen":
            name = self.choose(await request.text())
        if name in BODIES:
            return web.json_response(BODIES[name])
        if name.startswith('{"error"'):  # an error's whole body
            return web.json_response(json.loads(name), status=400)
        if name in TEXTS:
            text, kind = TEXTS[name]
            return web.Response(text=text, content_type=kind)
        if name == "drip":
            return await _dripping(request)
        if name in BROKEN:
            return await _lost(request, begun=name == "closed_in_mid_body")
        if not name[0].isdigit():  # the text of a good reply
            return web.json_response(completion(content=name))
        status, _, code = name.partition("-")
        return web.json_response({"error": {"message": name, "type": code, "code": code or None}}, status=int(status))


async def _dripping(request: web.Request) -> web.StreamResponse:
    """A good reply, a byte at a time."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    for byte in json.dumps(GOOD).encode():
        await response.write(bytes([byte]))
        await asyncio.sleep(0.1)
    return response


async def _lost(request: web.Request, begun: bool) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
    if begun:
        await response.prepare(request)
        await response.write(b'{"id":')
    assert request.transport is not None
    request.transport.abort() if not begun else request.transport.close()
    return response
