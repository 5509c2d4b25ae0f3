"""The host's side of the sandbox: it runs candidate code in a process of its own, and makes the LM calls.

`Sandbox` starts the process; `Conversation` exchanges messages with it and enforces the limits.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import anyio
from pydantic import BaseModel, BeforeValidator, Field, StrictFloat, StrictInt, ValidationError

import dspy_flashevolve
from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.sandbox.confinement import LAYERS, Layers
from dspy_flashevolve.sandbox.contract import (
    HEADER,
    MOST_VALUES,
    REASONS,
    CallLm,
    Failure,
    Job,
    Limits,
    LmRecord,
    LmRequest,
    Outcome,
    Reason,
    SandboxError,
    WireError,
    decode,
    encode,
    has_many_values,
)

logger = logger_named(__name__)
_ROOT = str(Path(dspy_flashevolve.__file__).parent.parent)
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from dspy_flashevolve.sandbox.zygote import main; main(int(sys.argv[2]), *sys.argv[3:])"
)
S = TypeVar("S")
T = TypeVar("T")
START_SECONDS = 120.0
"""Most seconds for starting the fork server, and for forking and confining a child. Milliseconds and a few seconds are
usual; only a machine that hangs takes two minutes."""
MESSAGE_CHARACTERS = 4000
"""Most characters of a failure's message; what an honest child sends is shorter (`zygote.MESSAGE_CHARACTERS`)."""
PRINTED_CHARACTERS = 2000
"""Characters of the end of what a candidate printed; the child sends as many (`zygote.PRINTED_CHARACTERS`)."""
ANSWER_BYTES = 1 << 20
"""Most bytes of the last frame. Fields and memory are kept in the journal and sent with each later prediction."""
CPU_SHARE = 0.5
"""Share of its processor time from which a killed child counts as one that used it up.

The limit (RLIMIT_CPU) and ``wait4`` read different clocks of the kernel, the first of which samples at ticks, so that
the second may show less than the limit.
"""
Role = Literal["system", "developer", "user", "assistant", "tool"]
Number = StrictInt | StrictFloat


@dataclass(frozen=True)
class Ending:
    """How a child ended, as the fork server reported it."""

    status: int
    cpu_seconds: float
    why: str


@dataclass
class _Started:
    """A running fork server."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    missing: tuple[str, ...] = ()
    endings: dict[int, asyncio.Future[Ending]] = field(default_factory=dict[int, "asyncio.Future[Ending]"])


class Sandbox:
    """Runs candidate code. Each run has a process of its own, which is gone when the run has ended.

    Use it as an async context manager, on one event loop. A fork server with dspy imported makes a child in
    milliseconds.

    Args:
        limits: limits of each run.
        accept_missing_protection: names of layers (``user``, ``namespaces``, ``landlock``, ``seccomp``) without which
            candidates may run all the same; ``docs/meta-harness.md`` says what each one is for.
        audited: end a child at the first forbidden thing that Python's audit hook sees. Off only in tests of the
            kernel's layers.
        without: layers to leave out, in tests of the others.

    Raises:
        ConfigurationError: this is not Linux; or, at its start, a layer is missing that was not accepted.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        accept_missing_protection: Iterable[str] = (),
        audited: bool = True,
        without: Iterable[str] = (),
    ) -> None:
        if not sys.platform.startswith("linux"):
            raise ConfigurationError(
                f"the sandbox for candidate code needs Linux, this is {sys.platform}: run it in a Linux machine or VM."
            )
        self.limits = limits or Limits()
        self._accepted = accepted_layers(accept_missing_protection)
        self._audited = audited
        self._without = tuple(without)
        self._server: _Started | None = None
        self._starting = asyncio.Lock()
        self._jobs = 0
        self._reaping: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Sandbox:
        await self._started()
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the fork server and every child."""
        server, self._server = self._server, None
        with anyio.CancelScope(shield=True):
            if self._reaping is not None:
                await self._reaping
            if server is not None:
                self._disconnect(server)
                await _reap(server.process)

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the layers of protection that this machine does not give; see ``docs/meta-harness.md``."""
        return () if self._server is None else self._server.missing

    @property
    def process_id(self) -> int | None:
        """Process id of the fork server; None before it has been started."""
        return None if self._server is None else self._server.process.pid

    async def run(self, job: Job, call_lm: CallLm) -> Outcome:
        """Run candidate code once; see `CodeSandbox`. A sandbox that fails is tried a second time."""
        try:
            return await self._run(job, call_lm)
        except SandboxError:
            return await self._run(job, call_lm)

    async def _run(self, job: Job, call_lm: CallLm) -> Outcome:
        server = await self._started()
        self._jobs += 1
        number, ending = self._jobs, asyncio.Future[Ending]()
        host, guest = socket.socketpair()
        server.endings[number] = ending
        try:
            host.setblocking(False)
            await self._send_order(server, {"start": number, "limits": asdict(self.limits)}, guest)
            guest.close()  # only the child holds it now: its end closes the connection
            reader, writer = await asyncio.open_connection(sock=host)
            talk = Conversation(reader, writer, self.limits, call_lm)
            try:
                answer = await talk.hold({**vars(job), "audited": self._audited})
            finally:
                with anyio.CancelScope(shield=True):
                    writer.transport.abort()
                    await self._send_order(server, {"kill": number})
                    await asyncio.wait_for(ending, START_SECONDS)
            return talk.outcome(answer, ending.result())
        except (OSError, asyncio.TimeoutError) as error:
            raise SandboxError(f"the fork server does not answer ({type(error).__name__}: {error})") from error
        finally:
            server.endings.pop(number, None)
            guest.close()
            host.close()

    async def _send_order(self, server: _Started, order: dict[str, Any], guest: socket.socket | None = None) -> None:
        payload, fds = json.dumps(order).encode(), [] if guest is None else [guest.fileno()]
        while True:
            try:
                socket.send_fds(server.control, [payload], fds)
            except BlockingIOError:
                await asyncio.sleep(0.01)
            except ConnectionError:  # its end was not read yet; the next run starts another server
                self._drop(server)
                raise
            else:
                return

    async def _started(self) -> _Started:
        async with self._starting:
            if self._server is None:
                self._server = await self._start()
            return self._server

    async def _start(self) -> _Started:
        server, loop = _launched(self._without), asyncio.get_running_loop()
        try:
            data = await asyncio.wait_for(loop.sock_recv(server.control, 4096), START_SECONDS)
            layers = Layers(**json.loads(data)["ready"]["layers"])
        except BaseException as error:
            server.control.close()
            server.process.kill()
            server.process.wait()
            if not isinstance(error, Exception):
                raise
            raise SandboxError(f"the fork server did not start ({type(error).__name__}: {error})") from error
        refused = layers.refused(self._accepted)
        if refused:
            server.control.close()
            await _reap(server.process)
            raise ConfigurationError(
                f"this machine does not give the sandbox its layers {', '.join(refused)}, so that candidate code is "
                "not run: use a machine that does, or, where the whole process is in a container or a "
                f"virtual machine that holds nothing of worth, accept_missing_protection={refused!r} "
                "(docs/meta-harness.md says what is lost)."
            )
        if layers.refused(()):
            logger.warning("Candidates run without %s, as was accepted.", ", ".join(layers.refused(())))
        server.missing = layers.missing
        loop.add_reader(server.control, self._read_ending, server)
        return server

    def _read_ending(self, server: _Started) -> None:
        try:
            data = server.control.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(server)
            return
        notice = json.loads(data)
        ending = server.endings.get(notice.pop("ended"))
        if ending is not None and not ending.done():
            ending.set_result(Ending(**notice))

    def _drop(self, server: _Started) -> None:
        self._disconnect(server)
        if self._server is server:
            self._server = None
            self._reaping = asyncio.ensure_future(_reap(server.process))

    def _disconnect(self, server: _Started) -> None:
        if server.control.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(server.control)
            server.control.close()
        for ending in server.endings.values():
            if not ending.done():
                ending.set_exception(OSError("it ended"))
                ending.exception()  # marks it as retrieved, or asyncio logs it where nobody waits any more


def accepted_layers(names: Iterable[str]) -> tuple[str, ...]:
    """Return names of layers as a tuple; ConfigurationError where one is not that of a layer."""
    accepted = (names,) if isinstance(names, str) else tuple(names)
    if not set(accepted) <= set(LAYERS):
        raise ConfigurationError(f"accept_missing_protection is {names!r}, expected names out of {LAYERS}.")
    return accepted


def _launched(without: tuple[str, ...]) -> _Started:
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.setblocking(False)
    nothing, number = subprocess.DEVNULL, theirs.fileno()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, _ROOT, str(number), *without],
            env={"TMPDIR": tempfile.gettempdir()},
            pass_fds=[number],
            cwd="/",
            stdin=nothing,
            stdout=nothing,
            start_new_session=True,
        )
    return _Started(process, control)


async def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a fork server whose socket is closed.

    On the event loop and not in a thread: at the interpreter's exit no thread can be started.
    """
    number, ended = os.pidfd_open(process.pid), asyncio.Event()
    asyncio.get_running_loop().add_reader(number, ended.set)
    with anyio.move_on_after(10):
        await ended.wait()
    asyncio.get_running_loop().remove_reader(number)
    os.close(number)
    process.kill()
    process.wait()


class _CandidateFailed(Exception):
    """The candidate failed; ``failure`` has the reason."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(reason, message)


class Conversation:
    """The exchange of messages with one child, until it has answered or failed."""

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
        """The next frame, where it is awaited since an LM call."""
        self.calls: list[LmRecord] = []
        self.printed = ""
        self.seconds = 0.0

    async def hold(self, job: dict[str, Any]) -> dict[str, Any] | Failure:
        """Send the child its job, make its LM calls, and return its answer (``fields``, ``memory``), or why it failed.

        Raises OSError: the child could not be started.
        """
        try:
            started = await asyncio.wait_for(self._frame(), START_SECONDS)
            if started.get("kind") != "ready":
                raise OSError(f"a child could not be locked up: {started.get('message')}")
        except _CandidateFailed as error:
            raise OSError(f"a child ended before it was locked up ({error})") from error
        clock, limits = asyncio.get_running_loop().time, self._limits
        began, called = clock(), 0.0
        try:
            with anyio.move_on_after(limits.total_seconds) as all_of_it, anyio.move_on_after(limits.seconds) as bound:
                await self._send(job)
                while "lm" in (message := await (self._ahead or self._frame())):
                    self._ahead = None
                    request, asked_at = _read(parse_request, message["lm"]), clock()
                    self._count(request)
                    remaining, bound.deadline = bound.deadline - asked_at, math.inf
                    answer = await self._make_call(request)
                    called += clock() - asked_at
                    bound.deadline = clock() + remaining
                    if isinstance(answer, str):
                        await self._send({"error": answer})
                        continue
                    self.calls.append(replace(answer, seconds=clock() - asked_at))
                    self._tokens_left -= answer.tokens
                    await self._send({"outputs": answer.outputs})
                return _read(self._answer_of, message)
            if all_of_it.cancelled_caught:
                return Failure("time", f"it ran for more than {limits.total_seconds:g} seconds, its LM calls included")
            return Failure("time", f"it ran for more than {limits.seconds:g} seconds")
        except _CandidateFailed as error:
            return error.failure
        except WireError as error:
            return Failure("protocol", f"it sent {error}"[:MESSAGE_CHARACTERS])
        finally:
            self.seconds = clock() - began - called
            if self._ahead is not None:
                await _cancel(self._ahead)

    def outcome(self, answer: dict[str, Any] | Failure, ended: Ending) -> Outcome:
        """Return the outcome of the run, from the child's answer and the way that its process ended."""
        failure = answer if isinstance(answer, Failure) else None
        if ended.why == "processes":
            failure = Failure("processes", "it had a second process")
        elif failure is not None and failure.reason == "died":
            failure = _cause_of_death(ended, self._limits)
        result = {} if failure is not None or isinstance(answer, Failure) else answer
        calls, fields = tuple(self.calls), result.get("fields", {})
        return Outcome(fields, result.get("memory"), failure, calls, self.printed, self.seconds, ended.cpu_seconds)

    def _count(self, request: LmRequest) -> None:
        """Count an LM call; raise _CandidateFailed where the child may not make it any more."""
        self._calls_left -= request.replies
        if self._calls_left < 0:
            raise _CandidateFailed("lm_calls", f"it asked for more than {self._limits.lm_calls} LM calls")
        if self._tokens_left <= 0:
            raise _CandidateFailed(
                "lm_tokens", f"its LM calls used its {self._limits.lm_tokens} tokens, and it asked for another"
            )

    async def _make_call(self, request: LmRequest) -> LmRecord | str:
        """Make an LM call. A child that ends or answers meanwhile cancels the call."""
        call = asyncio.ensure_future(self._call_lm(request))
        try:
            if self._ahead is None:
                self._ahead = asyncio.ensure_future(self._frame())
            await asyncio.wait([call, self._ahead], return_when=asyncio.FIRST_COMPLETED)
            if not call.done() and "lm" not in self._ahead.result():
                raise WireError("an answer before its LM call had ended")
            return await call
        finally:
            await _cancel(call)

    def _answer_of(self, message: dict[str, Any]) -> dict[str, Any] | Failure:
        kind, printed = message.get("kind"), message.get("printed", "")
        self.printed = printed[-PRINTED_CHARACTERS:] if isinstance(printed, str) else ""
        if self._bytes > ANSWER_BYTES:
            raise _CandidateFailed("output", f"its answer and its memory have more than {ANSWER_BYTES} bytes")
        if kind == "done" and isinstance(message.get("fields"), dict):
            return message
        reason, text = message.get("reason"), message.get("message")
        if kind != "failed" or not isinstance(reason, str) or reason not in REASONS or not isinstance(text, str):
            raise WireError(f"a frame that the protocol does not know ({sorted(message)[:5]})")
        return Failure(cast("Reason", reason), text[:MESSAGE_CHARACTERS])

    async def _frame(self) -> dict[str, Any]:
        try:
            length = HEADER.unpack(await self._reader.readexactly(HEADER.size))[0]
            self._bytes = HEADER.size + length
            self._bytes_left -= self._bytes
            if self._bytes_left < 0:
                raise _CandidateFailed("output", f"it sent more than {self._limits.output_bytes} bytes")
            return _read(decode, await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise _CandidateFailed("died", "it ended without an answer") from error

    async def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(encode(message))
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise _CandidateFailed("died", "it ended without an answer") from error


def _read(reader: Callable[[S], T], value: S) -> T:
    """Apply a reader to a value that a child sent. Whatever it raises is a fault of the child, not of the host."""
    try:
        return reader(value)
    except (WireError, _CandidateFailed):
        raise
    except Exception as error:
        raise WireError(f"what cannot be read ({type(error).__name__}: {error})") from error


async def _cancel(work: asyncio.Future[Any]) -> None:
    """Cancel a task and wait until it has ended. Its result is dropped."""
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


class _Text(BaseModel):
    type: Literal["text"]
    text: str


class _Address(BaseModel):
    url: str = Field(pattern="^data:image/")


class _Picture(BaseModel):
    type: Literal["image_url"]
    image_url: _Address


class _Message(BaseModel):
    role: Role
    content: str | list[_Text | _Picture]


class _Options(BaseModel, extra="forbid"):
    """The options that a candidate may set, all of sampling. The bounds are those of OpenAI's API, or generous."""

    temperature: Number = Field(default=0, ge=0, le=2)
    top_p: Number = Field(default=0, ge=0, le=1)
    presence_penalty: Number = Field(default=0, ge=-2, le=2)
    frequency_penalty: Number = Field(default=0, ge=-2, le=2)
    seed: StrictInt = Field(default=0, ge=0, le=2**31)
    rollout_id: StrictInt = Field(default=0, ge=0, le=2**31)
    max_tokens: StrictInt = Field(default=1, ge=1, le=1 << 15)
    n: StrictInt = Field(default=1, ge=1, le=64)
    stop: Annotated[list[str], BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] = Field(
        default=[], max_length=16
    )


class _Request(BaseModel):
    messages: list[_Message] = Field(min_length=1)
    options: _Options = _Options()


def parse_request(message: Any) -> LmRequest:
    """Read a child's request for an LM call.

    Raises:
        WireError: it is no LM request, or has options that a candidate may not set.
    """
    if has_many_values(message):
        raise WireError(f"an LM request of more than {MOST_VALUES:,} values")
    try:
        read = _Request.model_validate(message).model_dump(exclude_unset=True)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, wrong["loc"])) or "its form"
        raise WireError(f"an LM request with {where}: {wrong['msg']}") from error
    return LmRequest(read["messages"], read.get("options", {}))
