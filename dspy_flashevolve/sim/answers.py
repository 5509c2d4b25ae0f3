"""The bodies of OpenAI's API: a completion, the events of a stream, an error; and faulty ones on purpose (`faults`)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from dspy_flashevolve.sim.faults import Fault, error_of, malformed, without_choices
from dspy_flashevolve.sim.profiles import Profile
from dspy_flashevolve.sim.prompts import ChatRequest
from dspy_flashevolve.sim.replies import Reply

_STREAMED_PIECE_CHARACTERS = 200
"""Characters of a streamed chunk. Real servers send a token at a time; larger pieces cost the client less."""
DONE = b"data: [DONE]\n\n"


def completion(chat: ChatRequest, reply: Reply, profile: Profile) -> dict[str, Any]:
    """Return the body of an answer that is not streamed."""
    message = {"role": "assistant", "content": reply.text}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}
    return {**_head(chat, profile, "chat.completion"), "choices": [choice], "usage": _usage(chat, reply)}


def opening(chat: ChatRequest, profile: Profile) -> dict[str, Any]:
    """Return the first chunk of a stream, which is sent with the first token."""
    return _chunk(chat, profile, {"role": "assistant", "content": ""})


def chunks(chat: ChatRequest, reply: Reply, profile: Profile) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a stream after the first."""
    for start in range(0, len(reply.text), _STREAMED_PIECE_CHARACTERS):
        yield _chunk(chat, profile, {"content": reply.text[start : start + _STREAMED_PIECE_CHARACTERS]})
    yield _chunk(chat, profile, {}, reply.finish_reason)
    if chat.include_usage:
        yield {**_chunk(chat, profile, {}), "choices": [], "usage": _usage(chat, reply)}


def event(payload: dict[str, Any]) -> bytes:
    """Encode a payload as a server-sent event."""
    return f"data: {json.dumps(payload)}\n\n".encode()


def error(error_type: str, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error."""
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


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


def _chunk(
    chat: ChatRequest, profile: Profile, delta: dict[str, str], finish_reason: str | None = None
) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return {**_head(chat, profile, "chat.completion.chunk"), "choices": [choice]}


_DRIPS_PER_SECOND = 50.0
"""Most pieces a second of a slow drip: a piece is one byte, or more where one byte each would take longer than asked.
Timers of an event loop on a busy machine are no finer than some 20 milliseconds."""


def retry_headers(wall_seconds: float) -> dict[str, str]:
    """Return the headers by which OpenAI's API says when to retry: in whole seconds and in milliseconds."""
    return {"Retry-After": str(math.ceil(wall_seconds)), "retry-after-ms": str(math.ceil(wall_seconds * 1000))}


async def refuse(fault: Fault, time_scale: float) -> web.Response:
    """Answer a fault that needs no reply; a hang ends only when the client goes away.

    Args:
        fault: Of a kind that is not in `faults.BODY_KINDS`.
        time_scale: Model seconds a wall second.
    """
    if fault.kind == "hang":
        await asyncio.Event().wait()
    headers = retry_headers(fault.retry_after_seconds / time_scale) if fault.kind == "rate_limit" else None
    return web.json_response({"error": error_of(fault)}, status=fault.status, headers=headers)


async def damage(
    request: web.Request, fault: Fault, chat: ChatRequest, reply: Reply, profile: Profile, drip_wall_seconds: float
) -> web.StreamResponse:
    """Send the reply with the fault in its body, plain or as a stream, whichever was asked for.

    Args:
        request: To be answered.
        fault: Of a kind in `faults.BODY_KINDS`.
        chat: The request as it was read.
        reply: The reply of a good answer.
        profile: The backend.
        drip_wall_seconds: How long a slow drip takes.
    """
    body, content_type = _body(chat, reply, profile, no_choices=fault.kind == "empty_choices")
    if fault.kind == "malformed_body":
        body, content_type = malformed(fault, body)
    response = web.StreamResponse(headers={"Content-Type": content_type})
    response.content_length = len(body)
    await response.prepare(request)
    if fault.kind == "slow_drip":
        await _drip(response, body, drip_wall_seconds)
    elif fault.kind == "truncated_body":
        await response.write(body[: len(body) // 2])
        if request.transport is not None:
            request.transport.close()
        return response
    else:
        await response.write(body)
    await response.write_eof()
    return response


def _body(chat: ChatRequest, reply: Reply, profile: Profile, *, no_choices: bool) -> tuple[bytes, str]:
    """Return the whole body of the answer and its content type."""
    if not chat.stream:
        payload = completion(chat, reply, profile)
        return json.dumps(without_choices(payload) if no_choices else payload).encode(), "application/json"
    payloads = [opening(chat, profile), *chunks(chat, reply, profile)]
    events = [event(without_choices(payload) if no_choices else payload) for payload in payloads]
    return b"".join([*events, DONE]), "text/event-stream"


async def _drip(response: web.StreamResponse, body: bytes, wall_seconds: float) -> None:
    for piece in drips(body, wall_seconds):
        await response.write(piece)
        await asyncio.sleep(wall_seconds * len(piece) / len(body))


def drips(body: bytes, wall_seconds: float) -> Iterator[bytes]:
    """Yield the pieces of a slow drip: single bytes, unless these would have to come faster than timers fire.

    Examples:
        >>> list(drips(b"abcd", wall_seconds=60)), list(drips(b"abcd", wall_seconds=0.04))
        ([b'a', b'b', b'c', b'd'], [b'ab', b'cd'])
    """
    size = max(1, math.ceil(len(body) / max(1.0, wall_seconds * _DRIPS_PER_SECOND)))
    for start in range(0, len(body), size):
        yield body[start : start + size]
