"""`benchmarks.provider_limits`: what it counts, and what its table says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from benchmarks import provider_limits
from benchmarks.provider_limits import CASES, Use, used


def stats(requests: int, tokens: int, refused: int) -> Any:
    return SimpleNamespace(requests=requests, prompt_tokens=tokens, completion_tokens=0, refused=refused)


def test_use_is_what_came_between_two_readings_as_a_share_of_the_limits() -> None:
    use = used(stats(10, 1000, 1), stats(1210, 301_000, 7), 120.0)
    assert use == Use(120.0, 1200, 300_000, 6)
    assert use.shares == (1.0, 0.75)
    assert use.refused_share == 6 / 1206
    assert provider_limits.row(CASES[0], use)[-3:] == ["100.0%", "75.0%", "0.50% (6)"]
