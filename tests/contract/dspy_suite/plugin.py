"""A child process of test_dspy_suite.py: pytest on dspy's tests, with AsyncGEPA under the name `dspy.GEPA`.

Run as a script, so that `sys.path` starts at this folder and not at the checkout: `dspy` is then the installed one.

    python plugin.py REPORT.json SCHEDULE PYTEST_ARGUMENTS

SCHEDULE is `async` or `lockstep`, or `-` for dspy.GEPA itself.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import dspy.teleprompt.gepa
import pytest


class Outcomes:
    """A pytest plugin that keeps which tests passed, and why the others did not."""

    def __init__(self) -> None:
        self.passed, self.failed = set[str](), dict[str, str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = report.longreprtext[-160:]
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = report.longreprtext[-160:]


def with_schedule(optimizer: type[Any], schedule: str) -> type[Any]:
    """A subclass whose `schedule` is this one where the caller names none."""

    class Scheduled(optimizer):  # type: ignore[misc]
        @functools.wraps(optimizer.__init__)
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.setdefault("schedule", schedule)
            super().__init__(*args, **kwargs)

    Scheduled.__name__, Scheduled.__qualname__ = optimizer.__name__, optimizer.__qualname__
    Scheduled.__doc__ = optimizer.__doc__
    return Scheduled


def replace_gepa(replacement: type[Any]) -> None:
    """Put a class under each name by which dspy's modules hold `dspy.GEPA`, before test modules import it."""
    original = dspy.GEPA
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == "dspy" and module.__dict__.get("GEPA") is original:
            vars(module)["GEPA"] = replacement


if __name__ == "__main__":
    report, schedule, *arguments = sys.argv[1:]
    if schedule != "-":
        from dspy_flashevolve import AsyncGEPA

        replace_gepa(with_schedule(AsyncGEPA, schedule))
    outcomes = Outcomes()
    pytest.main(arguments, plugins=[outcomes])
    passed = sorted(outcomes.passed - outcomes.failed.keys())
    Path(report).write_text(json.dumps({"passed": passed, "failed": outcomes.failed}), encoding="utf-8")
