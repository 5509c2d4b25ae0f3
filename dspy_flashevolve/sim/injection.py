"""Sends answers that are faulty on purpose (`faults` says which): refusals, hangs and damaged bodies."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator

from aiohttp import web

from dspy_flashevolve.sim.answers import DONE, chunks, completion, event, opening
from dspy_flashevolve.sim.faults import Fault, error_of, malformed, without_choices
from dspy_flashevolve.sim.profiles import Profile
from dspy_flashevolve.sim.prompts import ChatRequest
from dspy_flashevolve.sim.replies import Reply

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
