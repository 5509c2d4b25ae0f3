"""Making a candidate's LM call in the host: its own messages, as they are."""

from __future__ import annotations

from typing import Any

from dspy.adapters.base import Adapter
from dspy.signatures import make_signature
from dspy.utils.usage_tracker import track_usage

from dspy_flashevolve.sandbox.contract import LmAnswer
from dspy_flashevolve.sandbox.lm_requests import LmRequest
from dspy_flashevolve.sandbox.outcomes import LmRecord

CHARACTERS_A_TOKEN = 4
"""Where a provider reports no tokens, they are estimated from the characters."""
_SIGNATURE = make_signature("request -> text")


class _AsItIs(Adapter):
    """dspy's adapters own the form of messages; this one sends those of a candidate, and hands the text back."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        super().__init__()
        self._messages = messages

    def format(self, signature: Any, demos: Any, inputs: Any) -> list[dict[str, Any]]:
        return self._messages

    def parse(self, signature: Any, completion: str) -> dict[str, Any]:
        return {"text": completion}


def call_in_thread(lm: Any, request: LmRequest) -> LmAnswer:
    """Make the call, and wait for it."""
    with track_usage() as usage:
        replies = _AsItIs(request.messages)(lm, dict(request.options), _SIGNATURE, [], {})
    return LmAnswer(_record(request, replies, usage.usage_data))


async def call_on_loop(lm: Any, request: LmRequest) -> LmAnswer:
    """Make the call of an LM that can be awaited."""
    with track_usage() as usage:
        replies = await _AsItIs(request.messages).acall(lm, dict(request.options), _SIGNATURE, [], {})
    return LmAnswer(_record(request, replies, usage.usage_data))


def _record(request: LmRequest, replies: list[dict[str, Any]], usage: dict[str, list[dict[str, Any]]]) -> LmRecord:
    texts = [str(reply.get("text") or "") for reply in replies]
    counts = [_counted(usage, name) for name in ("prompt_tokens", "completion_tokens")]
    guesses = [sum(len(str(one["content"])) for one in request.messages), sum(map(len, texts))]
    prompt, completion = (n or -(-guess // CHARACTERS_A_TOKEN) for n, guess in zip(counts, guesses, strict=True))
    return LmRecord(request.messages, texts, prompt, completion)


def _counted(usage: dict[str, list[dict[str, Any]]], name: str) -> int:
    return sum(int(entry.get(name) or 0) for entries in usage.values() for entry in entries)
