"""What a run leaves: the `Result` record, JSON lines with their provenance, medians with spread, tables."""

from __future__ import annotations

import functools
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple, TypeVar

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("dspy-flashevolve", "dspy", "gepa", "litellm", "ray")


class RunKey(NamedTuple):
    """What a run was to be; see `Result` for the fields."""

    benchmark: str
    backend: str
    settings: str
    slots: int
    call_limit: int | None
    method: str
    seed: int


class Scored:
    """What the rows of all commands say of a run's program."""

    best_score: float | None
    seed_score: float | None
    true_score: float | None
    seed_true_score: float | None
    error: str

    @property
    def score(self) -> float | None:
        """The true score of the program with the best validated score; that validated score where no other is known."""
        return self.best_score if self.true_score is None else self.true_score

    @property
    def gain(self) -> float | None:
        """How far the score lies above the seed program's; `None` without one, or after an error."""
        seed = self.seed_score if self.true_score is None else self.seed_true_score
        return None if self.error or self.score is None or seed is None else self.score - seed


@dataclass(frozen=True)
class Result(Scored):
    """One method's run. Figures are taken at the limit, before the drain, unless their name says otherwise.

    Attributes:
        benchmark: The command's short name.
        method: What ran: `gepa`, `gepa-independent-10`, `async`, `evaluate`...
        backend: The simulated profile, or the real model.
        seed: Seed of the task, the server and the optimizer.
        slots: Requests in flight at most.
        seconds: Span of the figures, in the server's time.
        total_seconds: Until the run had drained and returned, in the server's time.
        proposals: New texts by that moment.
        reflections: Reflection requests the server saw, where it can tell; `None` where not.
        reflection_tokens: Tokens read and written for these, where another model than the server's answers them; else
            `None`.
        metric_calls: Counted by the optimizer at the limit.
        total_metric_calls: Counted by the optimizer when it had drained.
        scored: Rollouts that reached the metric, counted by us, drained.
        call_limit: `max_metric_calls`, or `None`.
        best_score: Best fully validated score at the limit.
        seed_score: The seed program's.
        true_score: What the program with the best score is to score on examples that nobody saw, where that is known.
        seed_true_score: The seed program's, likewise.
        depth: Generations at the limit.
        accepted: Candidates accepted at the limit.
        validations: Candidates scored on the whole validation set at the limit, the seed included; 0 in rows that are
            older than it.
        prompt_tokens: Read by the server.
        completion_tokens: Written by the server.
        requests: Answered by the server.
        refused: Turned away by the server (429).
        mean_running: Mean of the requests being served.
        error: What ended the run early; empty when nothing did.
        trajectory: Rows of `Point`'s fields where score or depth changed.
        settings: What else tells runs apart, in words: the simulated model's name, the length of replies, the time
            scale. Rows without a name of a simulated model were made by the one that is "obliging" now.
    """

    benchmark: str
    method: str
    backend: str
    seed: int
    slots: int
    seconds: float
    total_seconds: float
    proposals: int = 0
    reflections: int | None = None
    reflection_tokens: int | None = None
    metric_calls: int = 0
    total_metric_calls: int = 0
    scored: int = 0
    call_limit: int | None = None
    best_score: float | None = None
    seed_score: float | None = None
    true_score: float | None = None
    seed_true_score: float | None = None
    depth: int = 0
    accepted: int = 0
    validations: int = 0
    prompt_tokens: float = 0.0
    completion_tokens: float = 0.0
    requests: int = 0
    refused: int = 0
    mean_running: float | None = None
    error: str = ""
    trajectory: list[list[float | int | None]] = field(default_factory=list)
    settings: str = ""

    @property
    def key(self) -> RunKey:
        """Of two runs with the same key, the later counts."""
        return RunKey(self.benchmark, self.backend, self.settings, self.slots, self.call_limit, self.method, self.seed)

    @property
    def setting(self) -> RunKey:
        """What the runs that are compared have in common."""
        return self.key._replace(method="", seed=0)

    @property
    def proposals_per_minute(self) -> float:
        """Proposals a minute of the server's time."""
        return 60.0 * self.proposals / self.seconds if self.seconds else 0.0

    @property
    def pace(self) -> float:
        """Proposals a minute, with what the barriers of dspy.GEPA's batches hide.

        dspy.GEPA announces a batch's proposals together, after its last reflection; so that a batch that the limit cuts
        through is not lost to it, its finished reflections count as proposals. AsyncGEPA is given no such allowance.
        """
        if self.method.startswith("gepa") and self.reflections is not None and self.seconds:
            return 60.0 * max(self.proposals, self.reflections) / self.seconds
        return self.proposals_per_minute

    @property
    def tokens_per_second(self) -> float:
        """Tokens written a second of the server's time."""
        return self.completion_tokens / self.seconds if self.seconds else 0.0

    @property
    def overshoot(self) -> int:
        """Metric calls past the limit, drained; by the optimizer's count or by ours, whichever is more."""
        if self.call_limit is None:
            return 0
        return max(0, max(self.total_metric_calls, self.scored) - self.call_limit)


@dataclass(frozen=True)
class Spread:
    """The median of some figures and their range.

    Example:
        >>> str(Spread.of([3.0, 1.0, 2.0]))
        '2.00 (1.00-3.00)'
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of at least one figure; raises `ValueError` for none."""
        known = sorted(values)
        if not known:
            raise ValueError("a spread needs at least one figure, got none")
        return cls(statistics.median(known), known[0], known[-1])

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.median:.2f}"
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


R = TypeVar("R")


def middle(runs: Iterable[R], figure: Callable[[R], float | None]) -> float | None:
    """The median of a figure over the runs that have it; `None` where none has.

    Example:
        >>> middle(["a", "bcd", "ef", ""], lambda text: len(text) or None)
        2
    """
    known = [value for run in runs if (value := figure(run)) is not None]
    return statistics.median(known) if known else None


def ratio(figure: float | None, reference: float | None) -> float | None:
    """`figure / reference`, or `None` where either is missing or the reference is not above 0."""
    if figure is None or reference is None or reference <= 0:
        return None
    return figure / reference


def shown(figure: float | None, form: str = ".2f", unit: str = "") -> str:
    """A figure for a table; a dash for a missing one."""
    return "-" if figure is None else f"{figure:{form}}{unit}"


def versions() -> dict[str, str]:
    """Installed versions of what was measured."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


@functools.cache
def commit() -> str:
    """The commit that this process runs, as it was when it was first asked for; empty outside a checkout.

    "(changed)" stands after it where the code had changes that were not committed.
    """
    root = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        return subprocess.run(("git", "-C", str(root), *arguments), capture_output=True, text=True, check=True).stdout

    try:
        changed = git("status", "--porcelain", "--", "dspy_flashevolve", "benchmarks/*.py")
        return git("rev-parse", "--short=12", "HEAD").strip() + (" (changed)" if changed.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def provenance() -> dict[str, object]:
    """Command, commit, date, versions and machine, as they stand in every line of a results file."""
    spec = sys.modules["__main__"].__spec__ if hasattr(sys.modules["__main__"], "__spec__") else None
    program = ["python", "-m", spec.name] if spec else ["python", *sys.argv[:1]]
    return {
        "command": shlex.join([*program, *sys.argv[1:]]),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": {
            "cores": os.cpu_count(),
            "architecture": platform.machine(),
            "system": platform.system(),
            "python": platform.python_version(),
        },
    }


def append_json_lines(path: Path, records: Iterable[dict[str, object]]) -> None:
    """Append one JSON line a record, each with the provenance of this command."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source = provenance()
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps({**record, **source}) + "\n")


def write_result(path: Path, result: Result) -> None:
    """Append one run to a results file, with the rates that follow from its figures."""
    rates = {
        "proposals_per_minute": result.proposals_per_minute,
        "tokens_per_second": result.tokens_per_second,
        "overshoot": result.overshoot,
    }
    append_json_lines(path, [{**asdict(result), **rates}])


def read_results(path: Path) -> list[Result]:
    """The runs of a file; of equal runs (`Result.key`) the last.

    Raises:
        ValueError: a line is no JSON, or no run of a benchmark over a server; with its number.
    """
    known = {field.name for field in fields(Result)}
    needed = {"benchmark", "method", "backend", "seed", "slots", "seconds", "total_seconds"}
    runs: dict[RunKey, Result] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: no JSON ({error})") from None
        if not isinstance(row, dict) or not needed <= row.keys():
            raise ValueError(f"{path}, line {number}: expected the fields {', '.join(sorted(needed))} of a run.")
        result = Result(**{name: value for name, value in row.items() if name in known})
        runs[result.key] = result
    return list(runs.values())


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under a header, in columns as wide as their widest cell.

    Example:
        >>> print(table(["method", "score"], [["gepa", "0.34"]]))
        method  score
        ------  -----
        gepa    0.34
    """
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
