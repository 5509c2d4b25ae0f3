"""Runs in processes of their own, which are killed in the middle: by the tests of `kill -9`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _started(module: str, *arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def killed_after(seconds: float, calls_made: Callable[[], int], module: str, *arguments: object) -> bool:
    """Run a module, and kill it `seconds` after its first metric call; False where it came to its end before.

    Args:
        calls_made: counts metric calls from outside, over all processes.
    """
    before, process = calls_made(), _started(module, *arguments)
    try:
        while process.poll() is None and calls_made() == before:
            time.sleep(0.002)  # until the process is at work: it is watched from outside
        time.sleep(seconds)
    finally:
        process.kill()
        _, errors = process.communicate()
    assert process.returncode in (0, -9), errors[-2000:]
    return process.returncode == -9


def finished(module: str, *arguments: object) -> dict[str, Any]:
    """Run a module to its end; returns the JSON in the last line that it prints."""
    process = _started(module, *arguments)
    out, errors = process.communicate()
    assert process.returncode == 0, errors[-2000:]
    return json.loads(out.splitlines()[-1])


def calls_made(directory: Path) -> int:
    """Metric calls that the metric itself has counted, a line each, over all processes."""
    path = directory / "calls.txt"
    return path.read_bytes().count(b"\n") if path.exists() else 0
