"""The command `flashevolve sim-server`: its arguments, and serving until a signal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Any

from dspy_flashevolve.sim.faults import DRAWN_KINDS, Faults
from dspy_flashevolve.sim.process import require_aiohttp
from dspy_flashevolve.sim.profiles import PROFILES, profile_named
from dspy_flashevolve.sim.replies import DEFAULT_MODEL, REPLY_MODELS

if TYPE_CHECKING:
    from dspy_flashevolve.sim.server import ServerConfig


def add_parser(commands: Any) -> None:
    """Add the command to the parser of the command line."""
    server = commands.add_parser(
        "sim-server",
        help="a simulated LLM server with OpenAI's chat API",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    server.add_argument("--profile", type=_profile_name, default="h100-qwen3-8b", help=" | ".join(sorted(PROFILES)))
    server.add_argument(
        "--model",
        choices=REPLY_MODELS,
        default=DEFAULT_MODEL,
        help="how well the simulated model obeys, reflects and integrates",
    )
    server.add_argument("--host", default="127.0.0.1", help="address to bind; there is no authentication")
    server.add_argument("--port", type=_port, default=8000, help="port to bind; 0 for any free one")
    server.add_argument("--seed", type=int, default=0, help="part of every random choice")
    server.add_argument("--time-scale", type=positive_number, default=1.0, help="model seconds a wall second")
    server.add_argument(
        "--fault",
        type=_rate,
        action="append",
        default=[],
        metavar="KIND=RATE",
        help=f"a fault and its probability a request; may be repeated; kinds: {', '.join(DRAWN_KINDS)}",
    )
    server.add_argument(
        "--burst",
        type=_burst,
        default=(0.0, 0.0),
        metavar="EVERY:SECONDS",
        help="rate limits: every so many model seconds, for so many, each request is answered 429",
    )
    server.add_argument("--drip-seconds", type=positive_number, default=30.0, help="model seconds of a slow drip")
    server.add_argument("--fault-seed", type=int, default=0, help="of the draws of faults")
    server.set_defaults(refuse=server.error)


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    require_aiohttp()
    try:
        faults = _faults(arguments)
    except ValueError as error:
        return arguments.refuse(str(error))  # exits as argparse does for one argument: with usage, and status 2
    from dspy_flashevolve.sim.server import ServerConfig

    config = ServerConfig(
        profile=profile_named(arguments.profile),
        seed=arguments.seed,
        time_scale=arguments.time_scale,
        reply_model=REPLY_MODELS[arguments.model],
        faults=faults,
        host=arguments.host,
        port=arguments.port,
    )
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

    def announce(port: int) -> None:
        print(f"{config.profile.name} at http://{config.host}:{port}/v1 (Ctrl-C ends it)", flush=True)

    await serve(config, on_ready=announce, stop=stop)


def _faults(arguments: argparse.Namespace) -> Faults | None:
    every, seconds = arguments.burst
    rates: dict[str, Any] = dict(arguments.fault)
    faults = Faults(
        **rates,
        burst_every_seconds=every,
        burst_seconds=seconds,
        drip_seconds=arguments.drip_seconds,
        seed=arguments.fault_seed,
    )
    return faults if any(faults.rates().values()) or every else None


def _profile_name(text: str) -> str:
    try:
        return profile_named(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _port(text: str) -> int:
    with contextlib.suppress(ValueError):
        if 0 <= int(text) <= 65535:
            return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number between 0 and 65535, got {text!r}")


def positive_number(text: str) -> float:
    """Read an argument that is a number above 0."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")


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
