"""The command `flashevolve`, see `flashevolve --help`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dspy_flashevolve.engine.check import check
from dspy_flashevolve.engine.errors import ConfigurationError, FlashEvolveError, RunDirectoryError
from dspy_flashevolve.engine.store import FILE, LOCK, is_in_use
from dspy_flashevolve.engine.texts import printable
from dspy_flashevolve.observe import terminal
from dspy_flashevolve.observe.analysis import RunTotals, totals_of
from dspy_flashevolve.observe.formatting import format_score
from dspy_flashevolve.observe.history import History, read
from dspy_flashevolve.sim import process as sim_server

RUN_FILES = (LOCK, "candidate_tree.html", "candidates.json", "gepa_state.bin", "gepa.stop")
"""Files of a run directory, beside the journal's own, that no command overwrites."""
LONGEST_WAIT = 86_400.0
"""Most seconds between two looks of `watch`: a day. The system's sleep refuses numbers that are very much larger."""
FAILED, WRONG_ARGUMENT, NO_RUN, NOT_WRITTEN = 1, 2, 3, 4
"""Exit statuses that tell a script what went wrong. For a wrong argument argparse itself has 2."""


class OutputError(Exception):
    """The output of a command cannot be written where it was asked for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments without the program's name; None for those of the process.

    Returns:
        The exit status. 0: success. 1: the command failed, or `check` has found a problem. 2: an argument is wrong,
        perhaps for this run only, such as a candidate that it does not have. 3: RUN_DIR is no run that can be read. 4:
        the output cannot be written. 130: Ctrl-C ended a command that does not wait for it. Messages are on stderr.

    Raises:
        SystemExit: with status 2 when argparse finds the arguments wrong, 0 for `--help`.
    """
    arguments = _parser().parse_args(argv)
    try:
        with _reading(getattr(arguments, "run_dir", "")):
            status = COMMANDS[arguments.command](arguments)
        print(end="", flush=True)  # now, not at the interpreter's end: so a full disk or a closed pipe has its message
        return status
    except BrokenPipeError:  # `flashevolve lineage RUN_DIR | head`: the reader has left
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
    """Say in one line why a command failed, and return its exit status."""
    _drop_output()
    print(f"flashevolve: {printable(str(error))}", file=sys.stderr)
    return status


@contextmanager
def _reading(run_dir: str | list[str]) -> Generator[None, None, None]:
    """Turn an error while a run is read or shown into a RunDirectoryError that names the run or runs, if there are any.
    What this package raises on purpose keeps its message: a wrong argument is no damage of the run."""
    try:
        yield
    except (FlashEvolveError, OutputError, BrokenPipeError):
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, OSError) as error:
        if not run_dir:
            raise
        names = ", ".join([run_dir] if isinstance(run_dir, str) else run_dir)
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")
        advice = (
            "May you read it?"
            if isinstance(error, OSError)
            else "It is damaged; `flashevolve check` on it may say where."
        )
        raise RunDirectoryError(f"{names} cannot be shown ({reason}). {advice}") from error


def _drop_output() -> None:
    """Discard what stdout does not take, so that the interpreter does not try to write it again when it ends."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _ShowVersion(argparse.Action):
    """An option that looks the version up when it is given: no other command needs the package to be installed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(version("dspy-flashevolve"))
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flashevolve", description="Tools of dspy-flashevolve.")
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True)
    sim_server.add_parser(commands)
    _add_readers(commands)
    _add_estimate(commands)
    return parser


def _add_estimate(commands: Any) -> None:
    """Add the command that reads no run: it comes before one, and needs objects of the user's code."""
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
    """Add the commands that read a run directory: of a run that is finished, at work or killed."""
    help_texts = {
        "watch": "how a run stands, again and again until it is over",
        "report": "a run as one HTML file",
        "compare": "runs side by side",
        "export": "a candidate as a file that program.load reads",
        "diff": "what changed in the prompts from one candidate to another",
        "lineage": "the family tree of a run: candidates, gaps, repairs and verdicts",
        "check": "whether a run's journal holds what it promises; 1 where it does not",
    }
    parsers = {name: commands.add_parser(name, help=help_text) for name, help_text in help_texts.items()}
    for name, parser in parsers.items():
        several: dict[str, Any] = {"nargs": "+"} if name == "compare" else {}
        parser.add_argument("run_dir", type=_directory, metavar="RUN_DIR", help="the log_dir of the run", **several)
    parsers["watch"].add_argument("--once", action="store_true", help="show it once")
    parsers["watch"].add_argument("--every", type=_interval, default=1.0, metavar="SECONDS", help="default: 1")
    parsers["report"].add_argument("-o", dest="out", default="report.html", metavar="FILE", help="default: report.html")
    parsers["compare"].add_argument("--json", action="store_true", help="all figures, as JSON")
    which = parsers["export"].add_mutually_exclusive_group()
    which.add_argument("--best", dest="candidate", action="store_const", const="best", default="best", help="default")
    which.add_argument("--candidate", default="best", metavar="N", help="its number in the family tree")
    parsers["export"].add_argument("out", metavar="FILE", help="to be written, such as program.json")
    parsers["export"].add_argument(
        "--program", metavar="FILE", help="what student.save wrote: demos, fields and LMs are taken from there"
    )
    parsers["diff"].add_argument("before", metavar="A", help="a candidate's number, seed or best")
    parsers["diff"].add_argument("after", metavar="B", help="the same")
    parsers["lineage"].add_argument("--prompts", action="store_true", help="show what each candidate changed")


def _history(run_dir: str, replies: bool = False) -> History:
    """Read a run directory of this package, or of dspy.GEPA."""
    path = Path(run_dir)
    if not (path / FILE).exists() and (path / "gepa_state.bin").exists():
        from dspy_flashevolve.programs.checkpoint import read_checkpoint

        return read_checkpoint(run_dir)
    _require_run(path)
    return read(run_dir, replies)


def _require_run(path: Path) -> None:
    """Raise RunDirectoryError where a path is no run directory, as far as can be seen without reading a journal."""
    if path.is_file():
        hint = f"Name the folder that it is in: {path.parent}" if path.name == FILE else "Name the log_dir of a run."
        raise RunDirectoryError(f"{path} is a file, and a run is a directory. {hint}")
    if not path.is_dir():
        raise RunDirectoryError(f"{path}: there is no such directory. Name the log_dir of a run.")
    if not (path / FILE).exists():
        runs = sorted(str(journal.parent) for journal in path.glob(f"*/{FILE}"))
        hint = f" There are runs in {', '.join(runs[:5])}." if runs else ""
        raise RunDirectoryError(f"{path / FILE} is missing: a run that is given a log_dir writes it there.{hint}")


def _print(text: str) -> int:
    """Print a text, without what a terminal should not be sent or its encoding cannot hold."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(printable(text).encode(encoding, "replace").decode(encoding), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"standard output cannot be written: {error.strerror}.") from error
    return 0


def _write_file(out: str, content: str) -> int:
    """Write a file, and say how large it is; ConfigurationError for a file of a run, OutputError where it cannot be
    written."""
    # A lone surrogate, which JSON may hold and UTF-8 may not, becomes its escape: in JSON the same again.
    encoded = content.encode("utf-8", "backslashreplace")
    path = Path(out)
    try:
        if (name := path.resolve().name).startswith(FILE) or name in RUN_FILES:
            raise ConfigurationError(f"{out} is a run's {name}, which is not written over. Name another file.")
        path.write_bytes(encoded)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle; ValueError: a zero byte
        if isinstance(error, ConfigurationError):
            raise
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise OutputError(f"{out!r} cannot be written: {reason}. Name a file, in a folder that is there.") from error
    return _print(f"{out}: {len(encoded):,} bytes")


def _watch(arguments: argparse.Namespace) -> int:
    if arguments.once:
        return _print(terminal.status(_history(arguments.run_dir)))
    clear = "\x1b[H\x1b[2J" if sys.stdout is not None and sys.stdout.isatty() else ""

    def look() -> History | None:
        """Read the run; None while it is about to begin."""
        path = Path(arguments.run_dir)
        if not path.is_file() and not any((path / name).exists() for name in (FILE, "gepa_state.bin")):
            return None
        history = _history(arguments.run_dir)
        # Between the creation of its journal and the first row a run has no session.
        return None if not history.sessions and is_in_use(path) else history

    def show(status: str) -> None:
        print(end=clear)
        _print(status)

    terminal.watch(arguments.run_dir, look, show, lambda: time.sleep(arguments.every))
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from dspy_flashevolve.observe.report import report

    return _write_file(arguments.out, report(_history(arguments.run_dir, replies=True)))


def _compare(arguments: argparse.Namespace) -> int:
    runs: list[tuple[History, RunTotals]] = []
    for run_dir in arguments.run_dir:
        with _reading(run_dir):
            history = _history(run_dir)
            runs.append((history, totals_of(history)))
    if arguments.json:
        return _print(json.dumps([{"run": history.directory, **asdict(totals)} for history, totals in runs], indent=2))
    return _print(terminal.compare(runs))


def _export(arguments: argparse.Namespace) -> int:
    history = _history(arguments.run_dir)
    candidate = terminal.candidate_of(history, arguments.candidate)
    state = terminal.program_state(history, candidate, arguments.program)
    _write_file(arguments.out, json.dumps(state, indent=2, ensure_ascii=False) + "\n")
    rest = "" if arguments.program or "module_src" in state else "; demos and fields stay those of the program"
    return _print(
        f"candidate {candidate.index}, score {format_score(candidate.score)}: program.load({arguments.out!r}){rest}"
    )


def _check(arguments: argparse.Namespace) -> int:
    _require_run(Path(arguments.run_dir))
    result = check(arguments.run_dir)
    count = f"{len(result.problems)} problems" if result.problems else "no problems"
    _print("\n".join([*result.summary, *(f"problem: {problem}" for problem in result.problems), count]))
    return FAILED if result.problems else 0


def _names_in(source: str) -> Mapping[str, Any]:
    """Execute a file, or import a module, as ``python FILE`` or ``python -m MODULE`` find it, and return its names.

    What a file does under ``if __name__ == "__main__":``, such as a run, is not done.

    Raises:
        ConfigurationError: There is no such file or module.
    """
    path = Path(source)
    if path.suffix == ".py" or path.exists():
        if not path.is_file():
            raise ConfigurationError(f"{source}: there is no such file. Name a Python file, or a module.")
        sys.path.insert(0, str(path.resolve().parent))  # as `python FILE` does, for the modules beside the file
        return runpy.run_path(source, run_name="flashevolve_script")
    sys.path.insert(0, "")
    try:
        return vars(importlib.import_module(source))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{source}.".startswith(f"{error.name}."):  # a module that it imports itself
            raise
        raise ConfigurationError(f"{source}: there is no such file or module (no module {error.name!r}).") from error
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{source!r} is the name of no file and no module ({error}).") from error


def _estimate(arguments: argparse.Namespace) -> int:
    from dspy.primitives import Module

    from dspy_flashevolve.async_gepa import AsyncGEPA

    try:
        names = _names_in(arguments.source)

        def named(option: str, kind: type) -> Any:
            """Return the object that an option names, which has to be of a kind."""
            name = getattr(arguments, option, option)
            if isinstance(value := names.get(name), kind):
                return value
            fitting = ", ".join(key for key, one in names.items() if isinstance(one, kind) and key[0] != "_") or "none"
            there = f"is a {type(value).__name__}" if name in names else "is not there"
            raise ConfigurationError(
                f"{name!r} {there} in {arguments.source}. Give the name of a {kind.__name__} in it by --{option}: "
                f"there are {fitting}."
            )

        optimizer, program = named("optimizer", AsyncGEPA), named("program", Module)
        data = {"trainset": named("trainset", list)}
        if hasattr(arguments, "valset") or names.get("valset") is not None:
            data["valset"] = named("valset", list)
        return _print(repr(optimizer.estimate(program, **data)))
    except (FlashEvolveError, OutputError, BrokenPipeError):
        raise
    except Exception:  # from the user's code, whose traceback the user needs
        traceback.print_exc()
        return FAILED


def _interval(text: str) -> float:
    with suppress(ValueError):
        if 0 < (seconds := float(text)) <= LONGEST_WAIT:
            return seconds
    raise argparse.ArgumentTypeError(f"must be above 0 and at most {LONGEST_WAIT:g} seconds, got {text!r}")


def _directory(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"must be the log_dir of a run, got {text!r}")
    return text


ENDED_BY_CTRL_C = ("sim-server", "watch")
"""Commands that go on until somebody ends them, so that Ctrl-C is no failure."""
COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "sim-server": sim_server.run,
    "watch": _watch,
    "report": _report,
    "compare": _compare,
    "export": _export,
    "diff": lambda arguments: _print(terminal.diff(_history(arguments.run_dir), arguments.before, arguments.after)),
    "lineage": lambda arguments: _print(terminal.tree(_history(arguments.run_dir), arguments.prompts)),
    "check": _check,
    "estimate": _estimate,
}


if __name__ == "__main__":
    sys.exit(main())
