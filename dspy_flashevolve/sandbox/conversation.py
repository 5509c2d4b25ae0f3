"""The host's half of the talk with one child: its limits on time, bytes and LM calls, and the protocol."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import anyio

from dspy_flashevolve.sandbox.contract import (
    HEADER,
    REASONS,
    CallLm,
    Failure,
    Limits,
    LmAnswer,
    LmRecord,
    LmRequest,
    Outcome,
    Reason,
    SandboxError,
    WireError,
    decode,
    encode,
)

S = TypeVar("S")
T = TypeVar("T")
START_SECONDS = 120.0
"""How long a child may take to be forked and locked up, on a busy machine."""
MESSAGE_CHARACTERS = 4000
PRINTED_CHARACTERS = 2000
ANSWER_BYTES = 1 << 20
"""Of the last frame: what a prediction returns and a module remembers is kept, and sent on."""
CPU_SHARE = 0.5
"""The kernel's two counts of processor time differ; a child that was killed beyond this share had used its time."""
NUMBERS = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (0, 2**31),
    "rollout_id": (0, 2**31),
    "max_tokens": (1, 1 << 15),
    "n": (1, 64),
}
"""Options with the least and the largest value that they may have; those of whole bounds only are whole numbers."""
WHOLE = frozenset({"seed", "rollout_id", "max_tokens", "n"})
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


@dataclass(frozen=True)
class Ending:
    """How a child ended, as the fork server saw it."""

    status: int
    cpu_seconds: float
    why: str


class _Over(Exception):
    """The candidate failed."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(reason, message)


class Conversation:
    """Talk with one child until it has answered or failed.

    Args:
        reader, writer: the socket to it.
        limits: of this run.
        call_lm: makes its LM calls.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: Limits, call_lm: CallLm
    ) -> None:
        self._reader, self._writer = reader, writer
        self._limits = limits
        self._call_lm = call_lm
        self._bytes_left = limits.output_bytes
        self._bytes = 0
        self._calls_left = limits.lm_calls
        self._tokens_left = limits.lm_tokens
        self._ahead: asyncio.Future[dict[str, Any]] | None = None
        self.calls: list[LmRecord] = []
        self.printed = ""
        self.seconds = 0.0

    async def hold(self, job: dict[str, Any]) -> dict[str, Any] | Failure:
        """Tell the child its job, serve its LM calls, and hear its answer.

        Returns:
            Its answer (``fields``, ``memory``), or why it failed.

        Raises:
            OSError: it could not be started.
        """
        try:
            started = await asyncio.wait_for(self._frame(), START_SECONDS)
            if started.get("kind") != "ready":
                raise OSError(f"a child could not be locked up: {started.get('message')}")
        except _Over as error:
            raise OSError(f"a child ended before it was locked up ({error})") from error
        clock, limits = asyncio.get_running_loop().time, self._limits
        began, called = clock(), 0.0
        try:
            with anyio.move_on_after(limits.total_seconds) as all_of_it, anyio.move_on_after(limits.seconds) as bound:
                await self._send(job)
                while "lm" in (message := await self._next()):
                    request, asked = _read(parse_request, message["lm"]), clock()
                    self._count(request)
                    left, bound.deadline = bound.deadline - asked, math.inf
                    answer = await self._called(request)
                    called += clock() - asked
                    bound.deadline = clock() + left
                    await self._send(self._kept(answer, clock() - asked))
                return _read(self._last, message)
            if all_of_it.cancelled_caught:
                return Failure("time", f"it ran for more than {limits.total_seconds:g} seconds, its LM calls included")
            return Failure("time", f"it ran for more than {limits.seconds:g} seconds")
        except _Over as error:
            return error.failure
        except WireError as error:
            return Failure("protocol", f"it sent {error}"[:MESSAGE_CHARACTERS])
        finally:
            self.seconds = clock() - began - called
            if self._ahead is not None:
                await _given_up(self._ahead)

    def outcome(self, told: dict[str, Any] | Failure, ended: Ending) -> Outcome:
        """What the run came to, by what the child said and how it ended.

        Raises:
            SandboxError: it could not be started.
        """
        failure = told if isinstance(told, Failure) else None
        if ended.why == "processes":
            failure = Failure("processes", "it had a second process")
        elif failure is not None and failure.reason == "died":
            failure = _cause_of_death(ended, self._limits)
        answer = {} if failure is not None or isinstance(told, Failure) else told
        calls, fields = tuple(self.calls), answer.get("fields", {})
        return Outcome(fields, answer.get("memory"), failure, calls, self.printed, self.seconds, ended.cpu_seconds)

    def _count(self, request: LmRequest) -> None:
        """Raise _Over where the child may not make this LM call any more."""
        self._calls_left -= request.replies
        if self._calls_left < 0:
            raise _Over("lm_calls", f"it asked for more than {self._limits.lm_calls} LM calls")
        if self._tokens_left <= 0:
            raise _Over("lm_tokens", f"its LM calls used its {self._limits.lm_tokens} tokens, and it asked for another")

    async def _called(self, request: LmRequest) -> LmAnswer:
        """Make an LM call; a child that ends meanwhile, or that has nothing to wait for, ends the call."""
        call = asyncio.ensure_future(self._call_lm(request))
        try:
            if self._ahead is None:
                self._ahead = asyncio.ensure_future(self._frame())
            await asyncio.wait([call, self._ahead], return_when=asyncio.FIRST_COMPLETED)
            if not call.done() and "lm" not in self._ahead.result():
                raise WireError("an answer before its LM call had ended")
            return await call
        finally:
            await _given_up(call)

    def _kept(self, answer: LmAnswer, seconds: float) -> dict[str, Any]:
        """Keep an LM call; returns what the child is told."""
        if answer.record is None:
            return {"error": answer.error}
        self.calls.append(replace(answer.record, seconds=seconds))
        self._tokens_left -= answer.record.tokens
        return {"outputs": answer.record.outputs}

    async def _next(self) -> dict[str, Any]:
        """The next frame, which may have been waited for during an LM call."""
        ahead, self._ahead = self._ahead, None
        return await (self._frame() if ahead is None else ahead)

    def _last(self, message: dict[str, Any]) -> dict[str, Any] | Failure:
        kind, printed = message.get("kind"), message.get("printed", "")
        self.printed = printed[-PRINTED_CHARACTERS:] if isinstance(printed, str) else ""
        if self._bytes > ANSWER_BYTES:
            raise _Over("output", f"its answer and its memory have more than {ANSWER_BYTES} bytes")
        if kind == "done" and isinstance(message.get("fields"), dict):
            return message
        reason, said = message.get("reason"), message.get("message")
        if kind != "failed" or not isinstance(reason, str) or reason not in REASONS or not isinstance(said, str):
            raise WireError(f"a frame that the protocol does not know ({sorted(message)[:5]})")
        return Failure(cast("Reason", reason), said[:MESSAGE_CHARACTERS])

    async def _frame(self) -> dict[str, Any]:
        try:
            length = HEADER.unpack(await self._reader.readexactly(HEADER.size))[0]
            self._bytes = HEADER.size + length
            self._bytes_left -= self._bytes
            if self._bytes_left < 0:
                raise _Over("output", f"it sent more than {self._limits.output_bytes} bytes")
            return _read(decode, await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise _Over("died", "it ended without an answer") from error

    async def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(encode(message))
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise _Over("died", "it ended without an answer") from error


def _read(reader: Callable[[S], T], said: S) -> T:
    """Read what a child said; whatever goes wrong there is the child's doing, never an error of the host's."""
    try:
        return reader(said)
    except (WireError, _Over):
        raise
    except Exception as error:
        raise WireError(f"what cannot be read ({type(error).__name__}: {error})") from error


async def _given_up(work: asyncio.Future[Any]) -> None:
    """Cancel what runs, and wait until it has ended; nobody asks what it came to."""
    work.cancel()
    with anyio.CancelScope(shield=True):
        await asyncio.wait([work])
    if not work.cancelled():
        work.exception()


def _cause_of_death(ended: Ending, limits: Limits) -> Failure:
    if ended.why:
        raise SandboxError(ended.why)
    if ended.cpu_seconds >= limits.cpu_seconds * CPU_SHARE and ended.status == signal.SIGKILL:
        return Failure("cpu", f"it used its {limits.cpu_seconds} seconds of processor time")
    if os.WIFSIGNALED(ended.status):
        return Failure("died", f"it was ended by {signal.Signals(os.WTERMSIG(ended.status)).name}")
    return Failure("died", f"it exited with status {os.waitstatus_to_exitcode(ended.status)} without an answer")


def parse_request(message: Any) -> LmRequest:
    """What a child asked for.

    Raises:
        WireError: it is no LM request, or asks for what a candidate may not ask for.

    >>> parse_request({"messages": [{"role": "user", "content": "Hello"}], "options": {"api_base": "http://x"}})
    Traceback (most recent call last):
    dspy_flashevolve.sandbox.contract.WireError: the LM option 'api_base' is not one that a candidate may set
    """
    if not isinstance(message, dict):
        raise WireError("an LM request that is no object")
    request = cast("dict[str, Any]", message)
    messages, options = request.get("messages"), request.get("options", {})
    if not isinstance(messages, list) or not messages or not isinstance(options, dict):
        raise WireError("an LM request without messages or with options that are no object")
    given = cast("dict[str, Any]", options)
    return LmRequest(
        [_message(one) for one in cast("list[Any]", messages)],
        {name: _option(name, value) for name, value in given.items()},
    )


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise WireError("a message that is no object")
    fields = cast("dict[str, Any]", message)
    role, content = fields.get("role"), fields.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise WireError(f"a message with the role {role!r:.40}")
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not isinstance(content, list):
        raise WireError("a message whose content is neither a text nor a list")
    return {"role": role, "content": [_part(part) for part in cast("list[Any]", content)]}


def _part(part: Any) -> dict[str, Any]:
    fields = cast("dict[str, Any]", part if isinstance(part, dict) else {})
    if fields.get("type") == "text" and isinstance(fields.get("text"), str):
        return {"type": "text", "text": fields["text"]}
    picture = fields.get("image_url")
    url = cast("dict[str, Any]", picture).get("url") if isinstance(picture, dict) else None
    if fields.get("type") == "image_url" and isinstance(url, str) and url.startswith("data:image/"):
        return {"type": "image_url", "image_url": {"url": url}}
    raise WireError("a part of a message that is neither a text nor a picture in a data: URL")


def _option(name: str, value: Any) -> Any:
    if name == "stop":
        stops = cast("list[Any]", value if isinstance(value, list) else [value])
        if len(stops) <= 16 and all(isinstance(stop, str) for stop in stops):
            return stops
    elif name in NUMBERS:
        low, high = NUMBERS[name]
        kinds = int if name in WHOLE else int | float
        if isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high:
            return value
    else:
        raise WireError(f"the LM option {name!r:.40} is not one that a candidate may set")
    raise WireError(f"the LM option {name} is {value!r:.40}")
