"""A state that candidates get copies of: a directory, and the MCP servers over stdio that work on it."""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import signal
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import anyio

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.evoflux.tools import call_mcp, result_of, tools_of

START_SECONDS = 30.0
"""The longest that a server may take to start; a round number, above what importing a large package takes."""
CONNECTION_CLOSED = -32000
"""Code of the error by which the SDK answers what a server that has ended was asked."""
MARK = "FLASHEVOLVE_SERVER"
"""Variable in the environment of a server, by which what it started is known."""


class DirectoryWorld:
    """A directory, and the MCP servers that work on it; a tool of Evoflux, and the state that its candidates copy.

    Use it as an asynchronous context manager: after it no process and no copy is left.

    Args:
        directory: holds all that the servers change. A copy's links lead into the copy.
        servers: name -> the program and its arguments, in which ``{directory}`` stands for the directory. A server
            starts when it is needed, in each copy anew. It gets PATH, HOME and the like of the environment and no
            keys: give what it needs as ``["env", "NAME=value", "server"]``.

    Raises:
        ConfigurationError: there is no such directory; or, once the tools are listed, a link leads out of it, it holds
            a socket, pipe or device, or the MCP SDK is not installed.
        RuntimeError: a server did not start.
    """

    def __init__(self, directory: str | Path, servers: Mapping[str, Sequence[str]]) -> None:
        self.directory, self.servers = Path(directory).resolve(), servers
        if not self.directory.is_dir():
            raise ConfigurationError(f"directory is {str(directory)!r}, which is no directory.")
        self._is_copy = False
        self._owners: dict[str, asyncio.Task[None]] = {}
        self._retired: set[asyncio.Task[None]] = set()
        self._calls = Counter[asyncio.Task[None]]()
        self._sessions: dict[str, Any] = {}
        self._server_of: dict[str, str] = {}
        self._starting = asyncio.Lock()

    async def list_tools(self) -> Any:
        """List the tools of all its servers."""
        if not self._is_copy:  # before anything is paid
            await asyncio.to_thread(lambda: list(_links(self.directory, self.directory)))
        tools: list[Any] = []
        for name in self.servers:
            listed = await tools_of(await self._session(name))
            self._server_of.update({tool.name: name for tool in listed})
            tools += listed
        return SimpleNamespace(tools=tools)

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a tool on this directory. A server that ended or gives no answer is started anew for the next call.

        Other calls of that server, which may be writing, come to their end first. Raises ConnectionError: the server
        ended.
        """
        server = self._server_of[name]
        session = await self._session(server)
        owner = self._owners[server]
        self._calls[owner] += 1
        call = asyncio.ensure_future(result_of(session, name, arguments))
        try:
            await asyncio.wait([call, owner], return_when=asyncio.FIRST_COMPLETED)
            if not call.done() or _has_no_server(call.exception()):
                raise ConnectionError(f"the MCP server {server!r} has ended")
            return call.result()
        except BaseException as error:
            if type(error).__name__ != "McpError":  # that is an answer
                self._retired.add(owner)
                if self._owners.get(server) is owner:
                    del self._owners[server]
            raise
        finally:
            call.cancel()
            self._calls[owner] -= 1
            if owner in self._retired and not self._calls[owner]:
                await self._end(owner)

    def holds(self, tool: str) -> bool:
        """See :class:`~.execution.World`."""
        return tool in self._server_of

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        """See :class:`~.execution.World`."""
        return await call_mcp(self, tool, arguments)

    async def prepare(self, tool: str) -> None:
        """See :class:`~.execution.World`."""
        await self._session(self._server_of[tool])

    async def fork(self) -> DirectoryWorld:
        """See :class:`~.execution.World`."""
        place = Path(tempfile.mkdtemp(prefix="flashevolve-world-")) / self.directory.name
        try:
            with anyio.CancelScope(shield=True):  # else a thread would go on copying what nobody deletes
                await asyncio.to_thread(_copy, self.directory, place)
        except BaseException:
            shutil.rmtree(place.parent, ignore_errors=True)
            raise
        world = DirectoryWorld(place, self.servers)
        world._is_copy, world._server_of = True, self._server_of
        return world

    async def close(self) -> None:
        """End its servers, and delete the directory if it is a copy."""
        await self._end(*self._owners.values(), *self._retired)
        self._owners.clear()
        if self._is_copy:
            await asyncio.to_thread(shutil.rmtree, self.directory.parent, ignore_errors=True)

    async def _session(self, name: str) -> Any:
        """The session with a server, which is started unless it runs."""
        async with self._starting:
            if name in self._owners and self._owners[name].done():
                await self._end(self._owners.pop(name))
            if name not in self._owners:
                ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                # The SDK's scopes have to be left by the task that entered them, so a task of its own owns a server.
                self._owners[name] = asyncio.create_task(self._own(self.servers[name], ready), name=uuid4().hex)
                try:
                    with anyio.fail_after(START_SECONDS):
                        self._sessions[name] = await asyncio.shield(ready)
                except BaseException as error:
                    ready.cancel()  # nobody waits for it any more
                    await self._end(self._owners.pop(name))
                    if isinstance(error, TimeoutError):
                        message = f"the MCP server {name!r} did not start within {START_SECONDS:g} seconds."
                        raise RuntimeError(message) from None
                    raise
        return self._sessions[name]

    async def _own(self, command: Sequence[str], ready: asyncio.Future[Any]) -> None:
        """Run a server until this task is cancelled."""
        program, *arguments = [part.replace("{directory}", str(self.directory)) for part in command]
        try:
            sdk, stdio = importlib.import_module("mcp"), importlib.import_module("mcp.client.stdio")
            mark = {MARK: cast("asyncio.Task[None]", asyncio.current_task()).get_name()}
            parameters = sdk.StdioServerParameters(command=program, args=arguments, cwd=self.directory, env=mark)
            with Path(os.devnull).open("w") as silent:  # noqa: ASYNC230, it does not block
                async with (
                    stdio.stdio_client(parameters, errlog=silent) as streams,
                    sdk.ClientSession(*streams) as session,
                ):
                    await session.initialize()
                    ready.set_result(session)
                    await asyncio.Event().wait()
        except ImportError as error:
            message = f"MCP servers need the package mcp ({error}): pip install 'dspy-flashevolve[evoflux]'."
            ready.set_exception(ConfigurationError(message))
        except Exception as error:
            if not ready.done():
                ready.set_exception(RuntimeError(f"the MCP server {list(command)} did not start: {error}"))

    async def _end(self, *owners: asyncio.Task[None]) -> None:
        """End servers; nothing of them is left."""
        self._retired.difference_update(owners)
        for owner in owners:
            self._calls.pop(owner, None)
            owner.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.gather(*owners, return_exceptions=True)
            await asyncio.to_thread(_kill_rest, {owner.get_name() for owner in owners})

    async def __aenter__(self) -> DirectoryWorld:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> DirectoryWorld:
        return self


def _has_no_server(error: BaseException | None) -> bool:
    """Whether a call failed because its server has ended."""
    is_closed = isinstance(error, anyio.ClosedResourceError | anyio.BrokenResourceError)
    return is_closed or getattr(getattr(error, "error", None), "code", None) == CONNECTION_CLOSED


def _links(place: Path, root: Path) -> Iterator[tuple[Path, str]]:
    """Yield each link of a directory ``root``, or of its copy at ``place``, with its target relative to the link;
    refuse one that leads out of ``root``, and what cannot be copied."""
    for folder, folders, files in os.walk(place):
        for path in (Path(folder, name) for name in (*folders, *files)):
            origin, mode = root / path.relative_to(place), path.lstat().st_mode
            if stat.S_ISLNK(mode):
                target = os.path.realpath(origin.parent / os.readlink(path))
                if not Path(target).is_relative_to(root):
                    raise ConfigurationError(
                        f"{origin} is a link to {target}, outside of {root}: candidates would write there on the real "
                        "state. Put what it leads to into the directory."
                    )
                yield path, os.path.relpath(target, origin.parent)
            elif not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                raise ConfigurationError(f"{origin} is a socket, pipe or device, which has no copy: move it elsewhere.")


def _copy(directory: Path, place: Path) -> None:
    """Copy a directory with files of its own, and with links that lead into the copy."""
    list(_links(directory, directory))  # a device must not be read
    shutil.copytree(directory, place, symlinks=True)
    for path, target in list(_links(place, directory)):
        if os.readlink(path) != str(target):
            path.unlink()
            path.symlink_to(target)


def _kill_rest(marks: set[str]) -> None:
    """Kill what servers left behind: the SDK ends their process groups, and not what began a session of its own."""
    for _ in range(100):  # until they are gone, and what they started meanwhile
        is_left = False
        for place in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                variables = place.read_bytes().decode(errors="replace").split("\0")
                if any(f"{MARK}={mark}" in variables for mark in marks):
                    os.kill(int(place.parent.name), signal.SIGKILL)
                    is_left = True
        if not is_left:
            return
        time.sleep(0.01)
