"""The host's side of the sandbox: one run of candidate code in a process of its own, its LM calls made here."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import anyio

import dspy_flashevolve
from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.sandbox.confinement import LAYERS, Layers
from dspy_flashevolve.sandbox.contract import CallLm, Job, Limits, Outcome, SandboxError
from dspy_flashevolve.sandbox.conversation import START_SECONDS, Conversation, Ending

logger = logging.getLogger(__name__)
_ROOT = str(Path(dspy_flashevolve.__file__).parent.parent)
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from dspy_flashevolve.sandbox.zygote import main; main(int(sys.argv[2]), *sys.argv[3:])"
)


@dataclass
class _Started:
    """The fork server that runs."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    missing: tuple[str, ...] = ()
    endings: dict[int, asyncio.Future[Ending]] = field(default_factory=dict[int, "asyncio.Future[Ending]"])


class Sandbox:
    """Runs candidate code, each run in a process of its own that is gone when the run has ended.

    Use it as an async context manager, on one loop. A fork server that has dspy imported makes a child in milliseconds.

    Args:
        limits: of each run.
        accept_missing_protection: names of layers (``user``, ``namespaces``, ``landlock``, ``seccomp``) without which
            candidates may run all the same; ``docs/meta-harness.md`` says what each one is for.
        audited: end a child at the first forbidden thing that Python sees; off only to test what the kernel holds.
        without: layers to leave out, only to test what the others hold.

    Raises:
        ConfigurationError: on other systems than Linux; when it starts, where a layer is missing that is not accepted.
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
        with anyio.CancelScope(shield=True):
            if self._reaping is not None:
                await self._reaping
            await asyncio.to_thread(self.shut_down())

    @property
    def missing(self) -> tuple[str, ...]:
        """Layers of protection that this machine does not give; see ``docs/meta-harness.md``."""
        return () if self._server is None else self._server.missing

    @property
    def process_id(self) -> int | None:
        """Of the fork server."""
        return None if self._server is None else self._server.process.pid

    def shut_down(self) -> Callable[[], None]:
        """Begin to end the fork server and every child, on the loop.

        Returns:
            A function that waits for their end; call it in any thread.
        """
        server, self._server = self._server, None
        if server is None:
            return lambda: None
        self._lost(server)
        return lambda: _reap(server)

    async def run(self, job: Job, call_lm: CallLm) -> Outcome:
        """See :class:`CodeSandbox`; it fails where it has failed twice."""
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
            await self._order(server, {"start": number, "limits": asdict(self.limits)}, guest)
            guest.close()  # the child has it: when the child ends, the host hears it
            reader, writer = await asyncio.open_connection(sock=host)
            talk = Conversation(reader, writer, self.limits, call_lm)
            try:
                told = await talk.hold({**vars(job), "audited": self._audited})
            finally:
                with anyio.CancelScope(shield=True):
                    writer.transport.abort()
                    await self._order(server, {"kill": number})
                    await asyncio.wait_for(ending, START_SECONDS)
            return talk.outcome(told, ending.result())
        except (OSError, asyncio.TimeoutError) as error:
            raise SandboxError(f"the fork server does not answer ({type(error).__name__}: {error})") from error
        finally:
            server.endings.pop(number, None)
            guest.close()
            host.close()

    async def _order(self, server: _Started, order: dict[str, Any], guest: socket.socket | None = None) -> None:
        payload, fds = json.dumps(order).encode(), [] if guest is None else [guest.fileno()]
        while True:
            try:
                socket.send_fds(server.control, [payload], fds)
            except BlockingIOError:
                await asyncio.sleep(0.01)
            else:
                return

    async def _started(self) -> _Started:
        async with self._starting:
            if self._server is None:
                self._server = await self._start()
            return self._server

    async def _start(self) -> _Started:
        server = _launched(self._without)
        loop = asyncio.get_running_loop()
        try:
            data = await asyncio.wait_for(loop.sock_recv(server.control, 4096), START_SECONDS)
            layers = Layers(**json.loads(data)["ready"]["layers"])
        except BaseException as error:
            server.control.close()
            server.process.kill()
            _reap(server)
            if not isinstance(error, Exception):
                raise
            raise SandboxError(f"the fork server did not start ({type(error).__name__}: {error})") from error
        refused = layers.refused(self._accepted)
        if refused:
            server.control.close()
            await asyncio.to_thread(_reap, server)
            raise ConfigurationError(
                f"this machine does not give the sandbox its layers {', '.join(refused)}, so that candidate code is "
                "not run: use a machine that does, or, where the whole process is in a container or a "
                f"virtual machine that holds nothing of worth, accept_missing_protection={refused!r} "
                "(docs/meta-harness.md says what is lost)."
            )
        if layers.refused(()):
            logger.warning("Candidates run without %s, as was accepted.", ", ".join(layers.refused(())))
        server.missing = layers.missing
        loop.add_reader(server.control, self._hear, server)
        return server

    def _hear(self, server: _Started) -> None:
        try:
            data = server.control.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost(server)
            if self._server is server:
                self._server = None
            self._reaping = asyncio.get_running_loop().run_in_executor(None, _reap, server)
            return
        told = json.loads(data)
        ending = server.endings.get(told.pop("ended"))
        if ending is not None and not ending.done():
            ending.set_result(Ending(**told))

    def _lost(self, server: _Started) -> None:
        if server.control.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(server.control)
            server.control.close()
        for ending in server.endings.values():
            if not ending.done():
                ending.set_exception(OSError("it ended"))
                ending.exception()  # heard, where nobody waits for it any more


def accepted_layers(names: Iterable[str]) -> tuple[str, ...]:
    """Names of layers, checked.

    Raises:
        ConfigurationError: one is none.

    >>> accepted_layers(["namespaces"])
    ('namespaces',)
    """
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


def _reap(server: _Started) -> None:
    try:
        server.process.wait(10)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
