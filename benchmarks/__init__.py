"""Benchmarks of AsyncGEPA beside dspy.GEPA; `benchmarks/README.md` says what each command measures."""

from __future__ import annotations

import os

# Progress bars cost time and hide the tables; tqdm reads this when it is imported, so it is set here, first.
os.environ.setdefault("TQDM_DISABLE", "1")
