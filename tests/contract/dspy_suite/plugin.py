"""A child process of `run.py`: pytest on dspy's tests with another optimizer under the name `dspy.GEPA`.

Run as a script, so that `sys.path` starts at this folder and not at the checkout: `dspy` is then the installed
one although a checkout has a `dspy/` folder of its own beside its tests.

    python plugin.py [--optimizer MODULE:CLASS] [--schedule async|lockstep] REPORT.json -- PYTEST_ARGUMENTS
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

RANKS = ("skipped", "passed", "failed", "error")


class OutcomeRecorder:
    """A pytest plugin that keeps, per test id, the worst outcome of its phases and the line that says why."""

    def __init__(self, report: Path) -> None:
        self.report = report
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    def record(self, test_id: str, outcome: str, reason: str = "") -> None:
        """Keep `outcome` unless a worse one is known for this test."""
        known = self.outcomes.get(test_id)
        if known is None or RANKS.index(outcome) > RANKS.index(known):
            self.outcomes[test_id] = outcome
            self.reasons[test_id] = reason

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest for the set-up, the call and the tear-down of each test."""
        if report.when == "call" or not report.passed:
            outcome = "error" if report.failed and report.when != "call" else str(report.outcome)
            self.record(report.nodeid, outcome, last_line(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported counts as one test in error, under the file's name."""
        if report.failed:
            self.record(report.nodeid, "error", last_line(report))

    def pytest_sessionfinish(self) -> None:
        """Write what `run.py` reads."""
        self.report.write_text(json.dumps({"outcomes": self.outcomes, "reasons": self.reasons}), encoding="utf-8")


def last_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The first line of the error message of a failed report, empty for any other."""
    if not report.failed:
        return ""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash is not None else report.longrepr).strip().splitlines()
    return (lines[0] if crash is not None else lines[-1]) if lines else ""


def with_schedule(optimizer: type[Any], schedule: str) -> type[Any]:
    """A subclass of `optimizer` whose `schedule` is `schedule` where the caller names none."""

    class Scheduled(optimizer):  # type: ignore[misc]
        @functools.wraps(optimizer.__init__)
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.setdefault("schedule", schedule)
            super().__init__(*args, **kwargs)

    Scheduled.__name__ = optimizer.__name__
    Scheduled.__qualname__ = optimizer.__qualname__
    Scheduled.__doc__ = optimizer.__doc__
    return Scheduled


def replace_gepa(replacement: type[Any]) -> list[str]:
    """Put `replacement` under each name by which dspy's modules hold `dspy.GEPA`; give back those names.

    To be called before collection: a test module's `from dspy.teleprompt import GEPA` then finds the replacement.
    """
    import dspy
    import dspy.teleprompt.gepa

    original = dspy.GEPA
    replaced: list[str] = []
    for name, module in sorted(sys.modules.items()):
        if (name == "dspy" or name.startswith("dspy.")) and module.__dict__.get("GEPA") is original:
            vars(module)["GEPA"] = replacement
            replaced.append(f"{name}.GEPA")
    return replaced


def main(arguments: list[str] | None = None) -> int:
    """Run pytest once in this process; give back its exit code."""
    parser = argparse.ArgumentParser(prog="plugin.py")
    parser.add_argument("report", type=Path)
    parser.add_argument("--optimizer", default="", help="MODULE:CLASS to put in the place of dspy.GEPA")
    parser.add_argument("--schedule", default="lockstep", choices=("async", "lockstep"))
    parser.add_argument("pytest_arguments", nargs="*")
    options = parser.parse_args(arguments)
    importlib.import_module("dspy")  # the installed one, before pytest puts the checkout on sys.path
    if options.optimizer:
        module, _, name = options.optimizer.partition(":")
        optimizer = getattr(importlib.import_module(module), name)
        print("replaced:", ", ".join(replace_gepa(with_schedule(optimizer, options.schedule))))
    return int(pytest.main(options.pytest_arguments, plugins=[OutcomeRecorder(options.report)]))


if __name__ == "__main__":
    sys.exit(main())
