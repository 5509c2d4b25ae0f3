"""The bodies of OpenAI's API: a completion, the events of a stream, an error."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from typing import Any

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
