"""The command `flashevolve`.

flashevolve sim-server --profile h100-qwen3-8b --port 8000
flashevolve sim-server --fault server_error=0.2 --fault hang=0.02 --burst 60:5
flashevolve watch RUN_DIR
flashevolve report RUN_DIR -o report.html
flashevolve compare RUN_DIR RUN_DIR
flashevolve export RUN_DIR --best program.json
flashevolve diff RUN_DIR seed best
flashevolve lineage RUN_DIR --prompts
flashevolve timeline RUN_DIR -o trace.json
flashevolve check RUN_DIR
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspy_flashevolve.engine.check import check
from dspy_flashevolve.engine.errors import ConfigurationError, RunDirectoryError
from dspy_flashevolve.engine.journal import FILE
from dspy_flashevolve.observe import text
from dspy_flashevolve.observe.export import program_state, trace
from dspy_flashevolve.observe.figures import Figures, figures
from dspy_flashevolve.observe.history import History, read
from dspy_flashevolve.sim.faults import DRAWN_KINDS, Faults
from dspy_flashevolve.sim.process import require_aiohttp
from dspy_flashevolve.sim.profiles import PROFILES, profile_named
from dspy_flashevolve.sim.reply_model import DEFAULT_MODEL, REPLY_MODELS

if TYPE_CHECKING:
    from dspy_flashevolve.sim.server import ServerConfig


OF_GEPA = ("candidate_tree.html", "candidates.json", "gepa_state.bin")
"""Files that gepa keeps in a run directory."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments without the program's name; None for those of the process.

    Returns:
        0 when all went well, 1 when the command failed; its message is on stderr.

    Raises:
        SystemExit: With status 2 when the arguments are wrong (argparse), 0 for `--help`.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command == "sim-server":
        try:
            arguments.faults = _faults(arguments)
        except ValueError as error:
            parser.error(str(error))
    try:
        with _shown(getattr(arguments, "run_dir", "")):
            status = COMMANDS[arguments.command](arguments)
        print(end="", flush=True)  # here, not when the interpreter ends, a full disk or a closed pipe has its message
        return status
    except BrokenPipeError:  # `flashevolve lineage RUN_DIR | head`: nobody reads on
        _drop_output()
        return 1
    except (ImportError, OSError, RunDirectoryError, ConfigurationError) as error:
        _drop_output()
        print(f"flashevolve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


@contextmanager
def _shown(run_dir: str | list[str]) -> Generator[None, None, None]:
    """What a damaged run makes impossible is told in one line, with the run's name."""
    try:
        yield
    except RunDirectoryError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if not run_dir:
            raise
        names = ", ".join([run_dir] if isinstance(run_dir, str) else run_dir)
        what = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise RunDirectoryError(f"{names} cannot be shown ({what}): it is damaged.") from error


def _drop_output() -> None:
    """What stdout does not take is not tried again when the interpreter ends."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flashevolve", description="Tools of dspy-flashevolve.")
    parser.add_argument("--version", action="version", version=version("dspy-flashevolve"))
    commands = parser.add_subparsers(dest="command", required=True)
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
    server.add_argument("--time-scale", type=_positive, default=1.0, help="model seconds a wall second")
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
    server.add_argument("--drip-seconds", type=_positive, default=30.0, help="model seconds of a slow drip")
    server.add_argument("--fault-seed", type=int, default=0, help="of the draws of faults")
    _add_readers(commands)
    return parser


def _add_readers(commands: Any) -> None:
    """The commands that read a run directory: of a run that is finished, at work or killed."""
    said = {
        "watch": "how a run stands, again and again until it is over",
        "report": "a run as one HTML file",
        "compare": "runs side by side",
        "export": "a candidate as a file that program.load reads",
        "diff": "what changed in the prompts from one candidate to another",
        "lineage": "the family tree of a run: candidates, gaps, integrations and verdicts",
        "timeline": "a run as a trace that ui.perfetto.dev opens",
        "check": "whether a run's journal holds what it promises; 1 where it does not",
    }
    found = {name: commands.add_parser(name, help=help_text) for name, help_text in said.items()}
    for name, command in found.items():
        many: dict[str, Any] = {"nargs": "+"} if name == "compare" else {}
        command.add_argument("run_dir", metavar="RUN_DIR", help="the log_dir of the run", **many)
    found["watch"].add_argument("--once", action="store_true", help="show it once")
    found["watch"].add_argument("--every", type=_positive, default=1.0, metavar="SECONDS", help="default: 1")
    found["report"].add_argument("-o", dest="out", default="report.html", metavar="FILE", help="default: report.html")
    found["timeline"].add_argument("-o", dest="out", default="trace.json", metavar="FILE", help="default: trace.json")
    found["compare"].add_argument("--json", action="store_true", help="all figures, as JSON")
    which = found["export"].add_mutually_exclusive_group()
    which.add_argument("--best", dest="candidate", action="store_const", const="best", default="best", help="default")
    which.add_argument("--candidate", default="best", metavar="N", help="its number in the family tree")
    found["export"].add_argument("out", metavar="FILE", help="to be written, such as program.json")
    found["export"].add_argument(
        "--program", metavar="FILE", help="what student.save wrote: demos, fields and LMs are taken from there"
    )
    found["diff"].add_argument("before", metavar="A", help="a candidate's number, seed or best")
    found["diff"].add_argument("after", metavar="B", help="the same")
    found["lineage"].add_argument("--prompts", action="store_true", help="show what each candidate changed")


def _history(run_dir: str, replies: bool = False) -> History:
    """A run directory of this package, or of dspy.GEPA."""
    if not (Path(run_dir) / FILE).exists() and (Path(run_dir) / "gepa_state.bin").exists():
        from dspy_flashevolve.programs.records import read_checkpoint

        return read_checkpoint(run_dir)
    return read(run_dir, replies)


def _say(lines: str) -> int:
    print(text.plain(lines))
    return 0


def _written(out: str, content: str) -> int:
    path = Path(out)
    if (name := path.resolve().name).startswith(FILE) or name in OF_GEPA:
        raise ConfigurationError(f"{out} is a run's {name}, which is not written over. Name another file.")
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"{out!r} cannot be written: {error.strerror}. Name a file, in a folder that is there."
        ) from error
    return _say(f"{out}: {len(content.encode()):,} bytes")


def _watch(arguments: argparse.Namespace) -> int:
    if arguments.once:
        return _say(text.status(_history(arguments.run_dir)))
    clear = "\x1b[H\x1b[2J" if sys.stdout is not None and sys.stdout.isatty() else ""
    text.watch(
        lambda: _history(arguments.run_dir),
        lambda status: print(f"{clear}{status}", flush=True),
        lambda: time.sleep(arguments.every),
    )
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from dspy_flashevolve.observe.report import report

    return _written(arguments.out, report(_history(arguments.run_dir, replies=True)))


def _compare(arguments: argparse.Namespace) -> int:
    found: list[tuple[History, Figures]] = []
    for run_dir in arguments.run_dir:
        with _shown(run_dir):
            history = _history(run_dir)
            found.append((history, figures(history)))
    if arguments.json:
        return _say(json.dumps([{"run": one.directory, **asdict(its)} for one, its in found], indent=2))
    return _say(text.compare(found))


def _export(arguments: argparse.Namespace) -> int:
    history = _history(arguments.run_dir)
    candidate = text.candidate_of(history, arguments.candidate)
    state = program_state(history, candidate, arguments.program)
    _written(arguments.out, json.dumps(state, indent=2, ensure_ascii=False) + "\n")
    kept = "" if arguments.program or "module_src" in state else "; demos and fields stay those of the program"
    return _say(
        f"candidate {candidate.index}, score {text.score(candidate.score)}: program.load({arguments.out!r}){kept}"
    )


def _check(arguments: argparse.Namespace) -> int:
    found = check(arguments.run_dir)
    print("\n".join(found.summary))
    for problem in found.problems:
        print(f"problem: {problem}")
    print("no problems" if not found.problems else f"{len(found.problems)} problems")
    return int(bool(found.problems))


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


def _positive(text: str) -> float:
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


def _sim_server(arguments: argparse.Namespace) -> int:
    require_aiohttp()
    from dspy_flashevolve.sim.server import ServerConfig

    config = ServerConfig(
        profile=profile_named(arguments.profile),
        seed=arguments.seed,
        time_scale=arguments.time_scale,
        reply_model=REPLY_MODELS[arguments.model],
        faults=arguments.faults,
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


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "sim-server": _sim_server,
    "watch": _watch,
    "report": _report,
    "compare": _compare,
    "export": _export,
    "diff": lambda given: _say(text.diff(_history(given.run_dir), given.before, given.after)),
    "lineage": lambda given: _say(text.tree(_history(given.run_dir), given.prompts)),
    "timeline": lambda given: _written(given.out, trace(_history(given.run_dir))),
    "check": _check,
}


if __name__ == "__main__":
    sys.exit(main())
