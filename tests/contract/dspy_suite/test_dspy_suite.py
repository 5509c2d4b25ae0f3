"""AsyncGEPA passes dspy's own GEPA tests wherever dspy.GEPA does, under one of its schedules.

dspy's tests are no part of its wheel or sdist, so the checkout is the caller's: the tag of the installed version.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = "FLASHEVOLVE_DSPY_CHECKOUT"


def outcomes(checkout: Path, schedule: str, report: Path) -> tuple[set[str], dict[str, str]]:
    """Of the checkout's GEPA tests, run in a process of its own: those that pass, and why others do not."""
    files = [str(path.relative_to(checkout)) for path in sorted(checkout.glob("tests/**/test_*gepa*.py"))]
    assert files, f"{checkout} is no root of a dspy checkout: it has no tests of GEPA"
    command = [sys.executable, str(Path(__file__).with_name("plugin.py")), str(report), schedule]
    command += ["-q", "-p", "no:cacheprovider", "-o", "addopts=", *files]
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DSPY_CACHEDIR": str(report.parent)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=1200)
    assert report.is_file(), done.stdout + done.stderr
    content = json.loads(report.read_text(encoding="utf-8"))
    return set(content["passed"]), content["failed"]


@pytest.mark.slow
def test_async_gepa_passes_dspys_own_gepa_tests_where_dspy_gepa_passes(tmp_path: Path) -> None:
    folder = os.environ.get(CHECKOUT)
    if not folder:
        pytest.skip(f"{CHECKOUT} names no dspy checkout; dspy's sdist carries no tests")
    expected, _ = outcomes(Path(folder).resolve(), "-", tmp_path / "dspy.json")
    assert expected
    for schedule in ("async", "lockstep"):
        passed, failed = outcomes(Path(folder).resolve(), schedule, tmp_path / f"{schedule}.json")
        expected -= passed
    assert not expected, {test: failed.get(test, "it was not run") for test in expected}
