"""The simulated server in a process of its own: for a `with` block (`SimServer`), or as `flashevolve sim-server`.

In a process of its own it takes no processor time of the client's interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import base64
import contextlib
import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspy_flashevolve.sim.backend import PROFILES, Profile, profile_named
from dspy_flashevolve.sim.counters import ServerStats
from dspy_flashevolve.sim.faults import DRAWN_KINDS, Faults
from dspy_flashevolve.sim.replies import ReplyModel

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
        reply_model: How well the simulated model obeys and reflects; None for `ReplyModel()`.
        faults: What goes wrong on purpose, and how often; None for nothing.
        quota: See `server.ServerConfig`; can be pickled.

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
        quota: Callable[[], Any] | None = None,
    ) -> None:
        self._config: dict[str, Any] = {
            "profile": profile_named(profile) if isinstance(profile, str) else profile,
            "seed": seed,
            "time_scale": time_scale,
            "reply_model": reply_model or ReplyModel(),
            "faults": faults,
            "quota": quota,
            "port": port,
        }
        self._process: subprocess.Popen[str] | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """The server's root, such as "http://127.0.0.1:8000"; a RuntimeError outside the `with` block."""
        self._running()
        return f"http://127.0.0.1:{self._port}"

    @property
    def api_base(self) -> str:
        """The address for `dspy.LM("openai/...", api_base=...)`; a RuntimeError outside the `with` block."""
        return f"{self.url}/v1"

    @property
    def pid(self) -> int:
        """The process id of the server; a RuntimeError outside the `with` block."""
        return self._running().pid

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise RuntimeError("the simulated server runs only inside its `with` block")
        return self._process

    def stats(self) -> ServerStats:
        """Return the server's statistics since the start or the last reset."""
        with urllib.request.urlopen(f"{self.url}/stats", timeout=_HTTP_SECONDS) as response:
            return ServerStats.from_json(json.load(response))

    def reset_stats(self) -> None:
        """Begin a new window of `stats`."""
        request = urllib.request.Request(f"{self.url}/stats/reset", method="POST")
        urllib.request.urlopen(request, timeout=_HTTP_SECONDS).close()

    def start(self) -> SimServer:
        """Start without a `with` block, as in a notebook: the server runs until this process ends."""
        atexit.register(self.__enter__().__exit__, None, None, None)
        return self

    def __enter__(self) -> SimServer:
        require_aiohttp()
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
            self._port = self._hand_over(self._process)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _hand_over(self, process: subprocess.Popen[str]) -> int:
        """Give the process its configuration, and return the port that it serves on."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(base64.b64encode(pickle.dumps(self._config)).decode() + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the simulated server ended before it was ready; its error is on stderr")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the simulated server could not start: {answer['error']}")
        return int(answer["port"])

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            # The child takes the end of its input as its own end.
            process.stdin.close()
            process.wait(_EXIT_SECONDS)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            process.kill()
            process.wait()
        process.stdout.close()


def require_aiohttp() -> None:
    """Raise an ImportError that names the extra to install where aiohttp is missing, the server's one dependency."""
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


# The command `flashevolve sim-server`


def add_parser(commands: Any) -> None:
    """Add the command to the parser of the command line."""
    server = commands.add_parser(
        "sim-server",
        help="a simulated LLM server with OpenAI's chat API",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    server.add_argument("--profile", choices=sorted(PROFILES), default="h100-qwen3-8b", help="the simulated backend")
    server.add_argument("--host", default="127.0.0.1", help="address to bind; there is no authentication")
    server.add_argument("--port", type=int, default=8000, help="port to bind; 0 for any free one")
    server.add_argument("--seed", type=int, default=0, help="part of every random choice")
    server.add_argument("--time-scale", type=float, default=1.0, help="model seconds a wall second")
    kinds = ", ".join(DRAWN_KINDS)
    help_text = f"a fault and its probability a request; may be repeated; kinds: {kinds}"
    server.add_argument("--fault", type=_rate, action="append", default=[], metavar="KIND=RATE", help=help_text)
    help_text = "rate limits: every so many model seconds, for so many, each request is answered 429"
    server.add_argument("--burst", type=_burst, default=(0.0, 0.0), metavar="EVERY:SECONDS", help=help_text)
    server.add_argument("--drip-seconds", type=float, default=30.0, help="model seconds of a slow drip")
    server.add_argument("--fault-seed", type=int, default=0, help="of the draws of faults")
    server.set_defaults(refuse=server.error)


def _rate(text: str) -> tuple[str, float]:
    kind, _, rate = text.partition("=")
    if kind not in DRAWN_KINDS:
        raise argparse.ArgumentTypeError(f"unknown fault {kind!r}: choose one of {', '.join(DRAWN_KINDS)}")
    with contextlib.suppress(ValueError):
        return kind, float(rate)
    raise argparse.ArgumentTypeError(f"must be a fault and its rate, such as hang=0.02, got {text!r}")


def _burst(text: str) -> tuple[float, float]:
    with contextlib.suppress(ValueError):
        every, _, seconds = text.partition(":")
        return float(every), float(seconds)
    raise argparse.ArgumentTypeError(f"must be two numbers of seconds, such as 60:5, got {text!r}")


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    require_aiohttp()
    from dspy_flashevolve.sim.server import ServerConfig

    every, seconds = arguments.burst
    rates: dict[str, Any] = dict(arguments.fault)
    try:
        config = ServerConfig(
            profile=PROFILES[arguments.profile],
            seed=arguments.seed,
            time_scale=arguments.time_scale,
            faults=Faults(
                **rates,
                burst_every_seconds=every,
                burst_seconds=seconds,
                drip_seconds=arguments.drip_seconds,
                seed=arguments.fault_seed,
            ),
            host=arguments.host,
            port=arguments.port,
        )
    except ValueError as error:
        return arguments.refuse(str(error))  # exits as argparse does for one argument: with usage, and status 2
    # Where the loop takes no signal handlers (Windows), Ctrl-C arrives as this exception.
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve_until_signal(config))
    return 0


async def _serve_until_signal(config: ServerConfig) -> None:
    from dspy_flashevolve.sim.server import serve

    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)

    message = f"{config.profile.name} at http://{config.host}:{{}}/v1 (Ctrl-C ends it)"
    await serve(config, on_ready=lambda port: print(message.format(port), flush=True), stop=stop)
