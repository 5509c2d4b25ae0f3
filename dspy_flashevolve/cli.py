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
flashevolve estimate experiment.py
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
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspy_flashevolve.engine.check import check
from dspy_flashevolve.engine.errors import ConfigurationError, FlashEvolveError, RunDirectoryError
from dspy_flashevolve.engine.journal import FILE, LOCK, is_at_work
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


OF_A_RUN = (LOCK, "candidate_tree.html", "candidates.json", "gepa_state.bin", "gepa.stop")
"""Files of a run directory, beside the journal's own, that no command writes over."""
LONGEST_WAIT = 86_400.0
"""Seconds between two looks of `watch`: a day. The system's sleep refuses what is very much longer."""
FAILED, WRONG_ARGUMENT, NO_RUN, NOT_WRITTEN = 1, 2, 3, 4
"""Statuses that tell a script what went wrong; 2 is argparse's own for a wrong argument."""


class OutputError(Exception):
    """What a command has made cannot be written where it was asked for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments without the program's name; None for those of the process.

    Returns:
        0 when all went well; 1 when the command failed, or when `check` has found a problem; 2 when an argument is
        wrong, be it for this run (a candidate that it has not); 3 when RUN_DIR is no run that can be read; 4 when the
        output cannot be written; 130 when Ctrl-C ended a command that does not wait for it. The message is on stderr.

    Raises:
        SystemExit: With status 2 when argparse finds the arguments wrong, 0 for `--help`.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command == "sim-server":
        try:
            arguments.faults = _faults(arguments)
        except ValueError as error:
            parser.error(str(error))
    try:
        with _reading(getattr(arguments, "run_dir", "")):
            status = COMMANDS[arguments.command](arguments)
        print(end="", flush=True)  # here, not when the interpreter ends, a full disk or a closed pipe has its message
        return status
    except BrokenPipeError:  # `flashevolve lineage RUN_DIR | head`: nobody reads on
        _drop_output()
        return FAILED
    except KeyboardInterrupt:
        return 0 if arguments.command in ENDED_BY_CTRL_C else 128 + signal.SIGINT
    except RunDirectoryError as error:
        return _failed(error, NO_RUN)
    except ConfigurationError as error:
        return _failed(error, WRONG_ARGUMENT)
    except OutputError as error:
        return _failed(error, NOT_WRITTEN)
    except (ImportError, OSError, FlashEvolveError) as error:
        return _failed(error, FAILED)


def _failed(error: Exception, status: int) -> int:
    """Say why a command failed, in one line."""
    _drop_output()
    print(f"flashevolve: {text.plain(str(error))}", file=sys.stderr)
    return status


@contextmanager
def _reading(run_dir: str | list[str]) -> Generator[None, None, None]:
    """Tell, in one line with the run's name, what makes a run impossible to read or to show.

    What this package raises on purpose has its message already: a wrong argument is no damage of the run.
    """
    try:
        yield
    except (FlashEvolveError, OutputError, BrokenPipeError):
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, OSError) as error:
        if not run_dir:
            raise
        names = ", ".join([run_dir] if isinstance(run_dir, str) else run_dir)
        what = f"{type(error).__name__}: {error}".replace("\n", " ")
        advice = (
            "May you read it?"
            if isinstance(error, OSError)
            else "It is damaged; `flashevolve check` on it may say where."
        )
        raise RunDirectoryError(f"{names} cannot be shown ({what}). {advice}") from error


def _drop_output() -> None:
    """What stdout does not take is not tried again when the interpreter ends."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _ShowVersion(argparse.Action):
    """Look the version up when it is asked for: no other command needs the package to be installed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(version("dspy-flashevolve"))
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flashevolve", description="Tools of dspy-flashevolve.")
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
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
    _add_estimate(commands)
    return parser


def _add_estimate(commands: Any) -> None:
    """The command that reads no run: it comes before one, and needs what only the user's code has."""
    estimate = commands.add_parser(
        "estimate",
        help="what a run may cost, from a minibatch of rollouts and one reflection, which are paid for",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    estimate.add_argument("source", metavar="FILE", help="a Python file, or a module, with the names below")
    for name, kind in (("optimizer", "AsyncGEPA"), ("program", "dspy.Module"), ("trainset", "list of examples")):
        estimate.add_argument(f"--{name}", default=name, metavar="NAME", help=f"name of the {kind}")
    estimate.add_argument(
        "--valset",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="name of the list of validation examples (default: valset, or the trainset where there is none)",
    )


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
        command.add_argument("run_dir", type=_directory, metavar="RUN_DIR", help="the log_dir of the run", **many)
    found["watch"].add_argument("--once", action="store_true", help="show it once")
    found["watch"].add_argument("--every", type=_wait, default=1.0, metavar="SECONDS", help="default: 1")
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
    path = Path(run_dir)
    if not (path / FILE).exists() and (path / "gepa_state.bin").exists():
        from dspy_flashevolve.programs.records import read_checkpoint

        return read_checkpoint(run_dir)
    _require_run(path)
    return read(run_dir, replies)


def _require_run(path: Path) -> None:
    """Say what is wrong with a path that is no run directory, as far as that is seen without reading a journal.

    Raises:
        RunDirectoryError: There is no such directory, or it holds no journal.
    """
    if path.is_file():
        hint = f"Name the folder that it is in: {path.parent}" if path.name == FILE else "Name the log_dir of a run."
        raise RunDirectoryError(f"{path} is a file, and a run is a directory. {hint}")
    if not path.is_dir():
        raise RunDirectoryError(f"{path}: there is no such directory. Name the log_dir of a run.")
    if not (path / FILE).exists():
        runs = sorted(str(journal.parent) for journal in path.glob(f"*/{FILE}"))
        hint = f" There are runs in {', '.join(runs[:5])}." if runs else ""
        raise RunDirectoryError(f"{path / FILE} is missing: a run that is given a log_dir writes it there.{hint}")


def _say(lines: str) -> int:
    """Print a text, as far as a terminal may be sent it and its encoding can hold it."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(text.plain(lines).encode(encoding, "replace").decode(encoding), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"standard output cannot be written: {error.strerror}.") from error
    return 0


def _written(out: str, content: str) -> int:
    # A lone surrogate, which JSON may hold and UTF-8 may not, becomes its escape: in JSON the same again.
    encoded = content.encode("utf-8", "backslashreplace")
    path = Path(out)
    try:
        if (name := path.resolve().name).startswith(FILE) or name in OF_A_RUN:
            raise ConfigurationError(f"{out} is a run's {name}, which is not written over. Name another file.")
        path.write_bytes(encoded)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle; ValueError: a zero byte
        if isinstance(error, ConfigurationError):
            raise
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise OutputError(f"{out!r} cannot be written: {reason}. Name a file, in a folder that is there.") from error
    return _say(f"{out}: {len(encoded):,} bytes")


def _watch(arguments: argparse.Namespace) -> int:
    if arguments.once:
        return _say(text.status(_history(arguments.run_dir)))
    clear = "\x1b[H\x1b[2J" if sys.stdout is not None and sys.stdout.isatty() else ""

    def look() -> History | None:
        """The run; None while it is about to begin."""
        path = Path(arguments.run_dir)
        if not path.is_file() and not any((path / name).exists() for name in (FILE, "gepa_state.bin")):
            return None
        history = _history(arguments.run_dir)
        # Between the making of its journal and its first row a run has no session.
        return None if not history.sessions and is_at_work(path) else history

    def show(status: str) -> None:
        print(end=clear)
        _say(status)

    text.watch(arguments.run_dir, look, show, lambda: time.sleep(arguments.every))
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from dspy_flashevolve.observe.report import report

    return _written(arguments.out, report(_history(arguments.run_dir, replies=True)))


def _compare(arguments: argparse.Namespace) -> int:
    found: list[tuple[History, Figures]] = []
    for run_dir in arguments.run_dir:
        with _reading(run_dir):
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
    _require_run(Path(arguments.run_dir))
    found = check(arguments.run_dir)
    count = f"{len(found.problems)} problems" if found.problems else "no problems"
    _say("\n".join([*found.summary, *(f"problem: {problem}" for problem in found.problems), count]))
    return FAILED if found.problems else 0


def _estimate(arguments: argparse.Namespace) -> int:
    from dspy.primitives import Module

    from dspy_flashevolve.async_gepa import AsyncGEPA
    from dspy_flashevolve.observe.script import named, names_in

    source, sets = arguments.source, dict[str, Any]()
    try:
        names = names_in(source)
        optimizer = named(names, arguments.optimizer, source, "--optimizer", AsyncGEPA)
        program = named(names, arguments.program, source, "--program", Module)
        sets["trainset"] = named(names, arguments.trainset, source, "--trainset", list)
        if hasattr(arguments, "valset") or names.get("valset") is not None:
            sets["valset"] = named(names, getattr(arguments, "valset", "valset"), source, "--valset", list)
        return _say(repr(optimizer.estimate(program, **sets)))
    except (FlashEvolveError, OutputError, BrokenPipeError):
        raise
    except Exception:  # of the user's code: it wants its lines
        traceback.print_exc()
        return FAILED


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


def _wait(text: str) -> float:
    if (seconds := _positive(text)) > LONGEST_WAIT:
        raise argparse.ArgumentTypeError(f"must be at most {LONGEST_WAIT:g} seconds, got {text!r}")
    return seconds


def _directory(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"must be the log_dir of a run, got {text!r}")
    return text


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


ENDED_BY_CTRL_C = ("sim-server", "watch")
"""Commands that go on until somebody ends them: that is no failure."""
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
    "estimate": _estimate,
}


if __name__ == "__main__":
    sys.exit(main())
