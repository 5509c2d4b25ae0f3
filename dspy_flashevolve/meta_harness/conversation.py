"""The host's half of the talk with one child: its limits on time, bytes and LM calls, and the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from dspy_flashevolve.meta_harness.contract import CallLm
from dspy_flashevolve.meta_harness.limits import Limits
from dspy_flashevolve.meta_harness.lm_requests import LmRequest, parse_request
from dspy_flashevolve.meta_harness.outcomes import REASONS, Failure, LmRecord, Reason
from dspy_flashevolve.meta_harness.wire import HEADER, WireError, decode, encode

S = TypeVar("S")
T = TypeVar("T")
START_SECONDS = 120.0
"""How long a child may take to be forked and locked up, on a busy machine."""
MESSAGE_CHARACTERS = 4000


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
        self._calls_left = limits.lm_calls
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
        try:
            await self._timed(self._send(job))
            while True:
                message = await self._timed(self._frame())
                if "lm" not in message:
                    return _read(self._last, message)
                await self._serve(_read(parse_request, message["lm"]))
        except _Over as error:
            return error.failure
        except WireError as error:
            return Failure("protocol", f"it sent {error}"[:MESSAGE_CHARACTERS])

    async def _serve(self, request: LmRequest) -> None:
        self._calls_left -= request.replies
        if self._calls_left < 0:
            raise _Over("lm_calls", f"it asked for more than {self._limits.lm_calls} LM calls")
        loop = asyncio.get_running_loop()
        began = loop.time()
        answer = await self._call_lm(request)
        if answer.record is None:
            await self._timed(self._send({"error": answer.error}))
            return
        self.calls.append(replace(answer.record, seconds=loop.time() - began))
        await self._timed(self._send({"outputs": answer.record.outputs}))

    def _last(self, message: dict[str, Any]) -> dict[str, Any] | Failure:
        kind, printed = message.get("kind"), message.get("printed", "")
        self.printed = printed if isinstance(printed, str) else ""
        if kind == "done" and isinstance(message.get("fields"), dict):
            return message
        reason, said = message.get("reason"), message.get("message")
        if kind != "failed" or not isinstance(reason, str) or reason not in REASONS or not isinstance(said, str):
            raise WireError(f"a frame that the protocol does not know ({sorted(message)[:5]})")
        return Failure(cast("Reason", reason), said[:MESSAGE_CHARACTERS])

    async def _frame(self) -> dict[str, Any]:
        try:
            length = HEADER.unpack(await self._reader.readexactly(HEADER.size))[0]
            self._bytes_left -= HEADER.size + length
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

    async def _timed(self, step: Awaitable[T]) -> T:
        """Await a step of the candidate's own time."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            return await asyncio.wait_for(step, max(0.0, self._limits.seconds - self.seconds))
        except asyncio.TimeoutError as error:
            raise _Over("time", f"it ran for more than {self._limits.seconds:g} seconds") from error
        finally:
            self.seconds += loop.time() - began


def _read(reader: Callable[[S], T], said: S) -> T:
    """Read what a child said; whatever goes wrong there is the child's doing, never an error of the host's."""
    try:
        return reader(said)
    except WireError:
        raise
    except Exception as error:
        raise WireError(f"what cannot be read ({type(error).__name__}: {error})") from error
