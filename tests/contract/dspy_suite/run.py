"""Compare dspy's own GEPA tests under `dspy.GEPA` and under `AsyncGEPA`.

    python -m tests.contract.dspy_suite.run PATH_TO_DSPY_CHECKOUT [--schedule async|lockstep|auto]

dspy's tests are no part of its wheel or sdist, so the checkout is the caller's: the tag of the installed version.
Each column of the table is one pytest run in a process of its own (see `plugin.py`). A test counts as passed where
one of the schedules that ran passes it; a test that fails under `dspy.GEPA` as well counts for nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PLUGIN = Path(__file__).with_name("plugin.py")
ASYNC_GEPA = "dspy_flashevolve:AsyncGEPA"
BASELINE = "dspy.GEPA"
SCHEDULES = {"async": ("async",), "lockstep": ("lockstep",), "auto": ("async", "lockstep")}
TIMEOUT_SECONDS = 1200.0


class SuiteError(RuntimeError):
    """The comparison could not be made: no tests in the folder, or a pytest process that wrote no report."""


@dataclass(frozen=True)
class Column:
    """What one pytest run gave: per test id its outcome, and for a failed test the first line of the message."""

    title: str
    outcomes: dict[str, str]
    reasons: dict[str, str]

    def passed(self, test_id: str) -> bool:
        """Whether this run passed the test."""
        return self.outcomes.get(test_id) == "passed"


@dataclass(frozen=True)
class Comparison:
    """The baseline column and one column per schedule, in the order in which they ran."""

    baseline: Column
    schedules: tuple[Column, ...]

    def expected(self) -> list[str]:
        """The ids of the tests that `dspy.GEPA` passes."""
        return [test_id for test_id in self.baseline.outcomes if self.baseline.passed(test_id)]

    def failed(self) -> list[str]:
        """The ids of the tests that `dspy.GEPA` passes and no schedule does."""
        return [test_id for test_id in self.expected() if not any(c.passed(test_id) for c in self.schedules)]

    def lockstep_only(self) -> list[str]:
        """The ids of the tests that the first schedule fails and a later one passes."""
        first, *later = self.schedules
        return [t for t in self.expected() if not first.passed(t) and any(c.passed(t) for c in later)]

    def columns(self) -> tuple[Column, ...]:
        """All columns, the baseline first."""
        return (self.baseline, *self.schedules)


def gepa_test_files(checkout: Path) -> list[Path]:
    """The checkout's test files whose name holds "gepa", relative to it.

    Raises:
        SuiteError: if there is none.
    """
    files = sorted(path.relative_to(checkout) for path in checkout.glob("tests/**/test_*gepa*.py"))
    if not files:
        raise SuiteError(f"no tests/**/test_*gepa*.py under {checkout}: name the root of a dspy checkout")
    return files


def run_column(checkout: Path, files: Iterable[Path], title: str, plugin_options: Sequence[str]) -> Column:
    """Run the files once by pytest in a process of its own.

    Raises:
        SuiteError: if the process ends without a report, with the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, str(PLUGIN), *plugin_options, str(report), "--"]
        command += ["-q", "-p", "no:cacheprovider", "-o", "addopts=", *map(str, files)]
        # litellm would fetch its price list from the network on each start
        environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DSPY_CACHEDIR": folder}
        done = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
        if not report.is_file():
            raise SuiteError(f"{title}: pytest wrote no report (exit {done.returncode})\n{tail(done)}")
        content = json.loads(report.read_text(encoding="utf-8"))
    return Column(title, content["outcomes"], content["reasons"])


def tail(done: subprocess.CompletedProcess[str]) -> str:
    """The last lines that a process wrote."""
    return "\n".join((done.stdout + done.stderr).splitlines()[-30:])


def compare(checkout: Path, schedule: str = "auto", optimizer: str = ASYNC_GEPA) -> Comparison:
    """Run the checkout's GEPA tests under `dspy.GEPA`, then under `optimizer` with each schedule asked for.

    Args:
        checkout: the root of a dspy checkout.
        schedule: a key of `SCHEDULES`.
        optimizer: `MODULE:CLASS`, a class with `dspy.GEPA`'s constructor and a keyword `schedule`.

    Raises:
        SuiteError: if there are no such tests, or a pytest process wrote no report.
    """
    root = checkout.resolve()
    files = gepa_test_files(root)
    baseline = run_column(root, files, BASELINE, ())
    columns = tuple(
        run_column(root, files, name, ("--optimizer", optimizer, "--schedule", name)) for name in SCHEDULES[schedule]
    )
    return Comparison(baseline, columns)


def table(comparison: Comparison) -> str:
    """The table of outcomes, the tests that need lockstep, the failures with their reasons, and the closing line."""
    columns, first = comparison.columns(), comparison.schedules[0]
    test_ids = list(dict.fromkeys(test_id for column in columns for test_id in column.outcomes))
    width = max(map(len, test_ids), default=0)
    lines = ["  ".join([f"{'test':<{width}}", *(f"{column.title:<9}" for column in columns)])]
    for test_id in test_ids:
        cells = (f"{column.outcomes.get(test_id, 'absent'):<9}" for column in columns)
        lines.append("  ".join([f"{test_id:<{width}}", *cells]).rstrip())
    for test_id in comparison.lockstep_only():
        lines += [f"lockstep only: {test_id}", f"    {first.title}: {reason(first, test_id)}"]
    lines += [f"not counted, fails under {BASELINE}: {t}" for t in not_counted(comparison)]
    failed = comparison.failed()
    for test_id in failed:
        lines += [f"failed: {test_id}", *(f"    {c.title}: {reason(c, test_id)}" for c in comparison.schedules)]
    lines.append(f"{len(comparison.expected()) - len(failed)} passed, {len(failed)} failed")
    return "\n".join(lines)


def not_counted(comparison: Comparison) -> list[str]:
    """The ids of the tests that fail under `dspy.GEPA` itself."""
    return [test_id for test_id, outcome in comparison.baseline.outcomes.items() if outcome in ("failed", "error")]


def reason(column: Column, test_id: str) -> str:
    """Why this column did not pass the test, in at most 160 characters."""
    return (column.reasons.get(test_id) or column.outcomes.get(test_id, "the test was not run"))[:160]


def main(arguments: list[str] | None = None) -> int:
    """The command; 0 where nothing failed, 1 where a test did, 2 where the comparison could not be made."""
    parser = argparse.ArgumentParser(prog="python -m tests.contract.dspy_suite.run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("checkout", type=Path, help="the root of a dspy checkout")
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), default="auto")
    parser.add_argument("--optimizer", default=ASYNC_GEPA, help="MODULE:CLASS (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        comparison = compare(options.checkout, options.schedule, options.optimizer)
    except SuiteError as error:
        print(error, file=sys.stderr)
        return 2
    print(table(comparison))
    return 1 if comparison.failed() else 0


if __name__ == "__main__":
    sys.exit(main())
