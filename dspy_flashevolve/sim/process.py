"""The simulated server in a process of its own, so that it takes no processor time of the client's interpreter."""

from __future__ import annotations

import asyncio
import atexit
import base64
import importlib.util
import json
import os
import pickle
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from dspy_flashevolve.sim.counters import ServerStats
from dspy_flashevolve.sim.faults import Faults
from dspy_flashevolve.sim.profiles import Profile, profile_named
from dspy_flashevolve.sim.quota import Quota
from dspy_flashevolve.sim.replies import ReplyModel, default_reply_model

if TYPE_CHECKING:
    from dspy_flashevolve.sim.server import ServerConfig

_PACKAGE_PARENT = Path(__file__).resolve().parents[2]
_CHILD = "from dspy_flashevolve.sim.process import child_main; child_main()"
_EXIT_SECONDS = 5.0
"""How long the server may take to end by itself before it is killed; it needs milliseconds."""
_HTTP_SECONDS = 30.0
"""Timeout of `/stats`, which the server answers at once, unless the machine is overloaded."""


class SimServer:
    """A simulated server in a process of its own, for the length of a `with` block, or from `start` on.

    It accepts requests when `with` is entered, and is ended and reaped on exit. It also ends when this process
    dies, and it ignores Ctrl-C, so that an interrupted run can still drain. Binds to 127.0.0.1 only.

    Args:
        profile: A profile, or the name of one.
        seed: Part of every random choice of the server.
        port: Port to bind; 0 for any free one.
        time_scale: Model seconds a wall second; 50 makes everything 50 times faster.
        reply_model: How well the simulated model obeys and reflects; None for "plain" of `REPLY_MODELS`.
        faults: What goes wrong on purpose, and how often; None for nothing.
        quota: Requests and tokens a minute; None for any number.

    Raises:
        ValueError: If the profile is unknown or a number is out of range.
        ImportError: On entry, if aiohttp is not installed.
        RuntimeError: On entry, if the server cannot start; the message says why (such as a port in use).

    Examples:
        >>> with SimServer(profile="h100-qwen3-8b", seed=0, time_scale=50) as server:
        ...     server.stats().requests
        0
    """

    def __init__(
        self,
        profile: str | Profile = "h100-qwen3-8b",
        *,
        seed: int = 0,
        port: int = 0,
        time_scale: float = 1.0,
        reply_model: ReplyModel | None = None,
        faults: Faults | None = None,
        quota: Quota | None = None,
    ) -> None:
        self._config: dict[str, Any] = {
            "profile": profile_named(profile) if isinstance(profile, str) else profile,
            "seed": seed,
            "time_scale": time_scale,
            "reply_model": reply_model or default_reply_model(),
            "faults": faults,
            "quota": quota,
            "port": port,
        }
        self._process: subprocess.Popen[str] | None = None
        self._inside = False
        self._port = 0

    @property
    def url(self) -> str:
        """The server's root, such as "http://127.0.0.1:8000".

        Raises:
            RuntimeError: Outside the `with` block.
        """
        if not self._inside:
            raise RuntimeError("the simulated server runs only inside its `with` block")
        return f"http://127.0.0.1:{self._port}"

    @property
    def api_base(self) -> str:
        """The address for `dspy.LM("openai/...", api_base=...)`.

        Raises:
            RuntimeError: Outside the `with` block.
        """
        return f"{self.url}/v1"

    @property
    def pid(self) -> int:
        """The process id of the server.

        Raises:
            RuntimeError: Outside the `with` block, and while the server is down.
        """
        if self._process is None:
            raise RuntimeError("the simulated server runs only inside its `with` block, and not while it is down")
        return self._process.pid

    def stats(self) -> ServerStats:
        """Return the server's statistics since the start or the last reset."""
        with urllib.request.urlopen(f"{self.url}/stats", timeout=_HTTP_SECONDS) as response:
            return ServerStats.from_json(json.load(response))

    def reset_stats(self) -> None:
        """Begin a new window of `stats`; `/metrics` goes on counting from the start."""
        request = urllib.request.Request(f"{self.url}/stats/reset", method="POST")
        urllib.request.urlopen(request, timeout=_HTTP_SECONDS).close()

    @contextmanager
    def down(self) -> Generator[ServerStats, None, None]:
        """End the server for the length of the block, and start it again on the same port.

        Requests in flight are cut off and connections are refused meanwhile. The new server begins from nothing: its
        clock, its counters, and what its faults draw by the number of a request. One restart at a time, within the
        server's own `with` block; it may be in another thread than that.

        Yields:
            The statistics of the server at its end.

        Raises:
            RuntimeError: Outside the server's `with` block, and when it cannot start again: another process has taken
                the port.

        Examples:
            >>> with SimServer() as server:
            ...     with server.down() as before:
            ...         pass
            ...     (before.requests, server.stats().requests)
            (0, 0)
        """
        before = self.stats()
        self._end()
        try:
            yield before
        finally:
            self._begin({**self._config, "port": self._port})

    def start(self) -> SimServer:
        """Start without a `with` block, as in a notebook: the server runs until this process ends.

        Raises:
            ImportError: If aiohttp is not installed.
            RuntimeError: If the server cannot start; the message says why.
        """
        atexit.register(self.__enter__().__exit__, None, None, None)
        return self

    def __enter__(self) -> SimServer:
        require_aiohttp()
        self._begin(self._config)
        self._inside = True
        return self

    def _begin(self, config: dict[str, Any]) -> None:
        paths = [str(_PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        try:
            self._port = self._hand_over(self._process, config)
        except BaseException:
            self._end()
            raise

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inside = False
        self._end()

    def _hand_over(self, process: subprocess.Popen[str], config: dict[str, Any]) -> int:
        stdin, stdout = _pipes(process)
        stdin.write(base64.b64encode(pickle.dumps(config)).decode() + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError("the simulated server ended before it was ready; its error is on stderr")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the simulated server could not start: {answer['error']}")
        return int(answer["port"])

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        stdin, stdout = _pipes(process)
        try:
            # The child takes the end of its input as its own end.
            stdin.close()
            process.wait(_EXIT_SECONDS)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            process.kill()
            process.wait()
        stdout.close()


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the server's process was started without pipes")
    return process.stdin, process.stdout


def require_aiohttp() -> None:
    """Check that aiohttp, the server's one dependency, is installed.

    Raises:
        ImportError: If it is not; the message names the extra to install.
    """
    if importlib.util.find_spec("aiohttp") is None:
        raise ImportError("the simulated server needs aiohttp: pip install 'dspy-flashevolve[sim]'")


def child_main() -> None:
    """Run as the server's process: read a configuration from stdin, print the port, and serve until stdin ends."""
    from dspy_flashevolve.sim.server import ServerConfig

    arguments = pickle.loads(base64.b64decode(sys.stdin.readline()))  # what this package's own process wrote
    try:
        config = ServerConfig(**arguments)
        asyncio.run(_serve_until_stdin_ends(config))
    except (OSError, ValueError) as error:
        print(json.dumps({"error": str(error)}), flush=True)


async def _serve_until_stdin_ends(config: ServerConfig) -> None:
    from dspy_flashevolve.sim.server import serve

    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def watch() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=watch, name="stdin", daemon=True).start()
    await serve(config, on_ready=lambda port: print(json.dumps({"port": port}), flush=True), stop=stop)
