"""Which request gets which fault: pure, seeded, and as often as configured."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspy_flashevolve.sim.faults import DRAWN_KINDS, Faults

REQUESTS = 3000
rates = st.lists(st.integers(0, 100), min_size=len(DRAWN_KINDS) + 1, max_size=len(DRAWN_KINDS) + 1).filter(sum)


def faults_of(weights: list[int], seed: int) -> Faults:
    """Rates in proportion to the weights; the last weight is that of no fault."""
    return Faults(**dict(zip(DRAWN_KINDS, (weight / (sum(weights) + 1e-6) for weight in weights))), seed=seed)  # noqa: B905


@settings(max_examples=25, deadline=None)
@given(weights=rates, seed=st.integers(0, 10**6))
def test_observed_rates_follow_the_configured_ones(weights: list[int], seed: int) -> None:
    faults = faults_of(weights, seed)
    drawn = [faults.drawn(number) for number in range(REQUESTS)]
    seen = Counter(fault.kind for fault in drawn if fault is not None)
    for kind, rate in faults.rates().items():
        deviation = math.sqrt(REQUESTS * rate * (1 - rate))
        assert abs(seen[kind] - REQUESTS * rate) <= 6 * deviation + 1


def test_another_seed_gives_other_faults() -> None:
    first, other = Faults(server_error=0.5, seed=1), Faults(server_error=0.5, seed=2)
    assert [first.drawn(number) for number in range(64)] != [other.drawn(number) for number in range(64)]


@given(
    every=st.floats(1, 1e3),
    share=st.floats(0.01, 0.99),
    burst=st.integers(0, 1000),
    within=st.floats(0.001, 0.999),
)
def test_bursts_begin_after_one_period_and_last_as_long_as_they_should(
    every: float, share: float, burst: int, within: float
) -> None:
    faults = Faults(server_error=1.0, burst_every_seconds=every, burst_seconds=every * share)
    moment = (burst + within * share) * every
    fault = faults.at(0, moment)
    assert fault is not None
    if burst == 0:
        assert fault.kind == "server_error"
    else:
        assert (fault.kind, fault.status) == ("rate_limit", 429)
        assert fault.retry_after_seconds == pytest.approx(every * share * (1 - within), abs=1e-6 * every * (burst + 1))
        assert faults.burst_remaining_seconds(moment + fault.retry_after_seconds * 1.001 + 1e-6 * moment) == 0
    pause = (burst + share + within * (1 - share)) * every
    assert faults.burst_remaining_seconds(pause) <= 1e-9 * pause


def test_a_burst_moves_no_other_fault() -> None:
    calm = Faults(hang=0.5, seed=3)
    rough = replace(calm, burst_every_seconds=10.0, burst_seconds=5.0)
    assert [rough.at(number, 9.0) for number in range(64)] == [calm.at(number, 9.0) for number in range(64)]


def test_statuses_and_variants_are_all_drawn() -> None:
    statuses = Faults(server_error=1.0, server_error_statuses=(500, 502, 503))
    assert {fault.status for n in range(64) if (fault := statuses.drawn(n))} == {500, 502, 503}
    bodies = Faults(malformed_body=1.0)
    assert {fault.variant for n in range(64) if (fault := bodies.drawn(n))} == {"json", "html", "empty"}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"hang": -0.1}, r"hang must be between 0 and 1, got -0\.1"),
        ({"hang": 1.1}, r"hang must be between 0 and 1, got 1\.1"),
        ({"hang": math.nan}, "hang must be between 0 and 1, got nan"),
        ({"hang": 0.6, "server_error": 0.6}, r"add up to at most 1, got 1\.2"),
        ({"drip_seconds": math.inf}, "drip_seconds must be at least 0 and finite, got inf"),
        ({"burst_every_seconds": -1.0}, "burst_seconds must be less than"),
        ({"burst_seconds": 5.0}, "burst_seconds must be less than burst_every_seconds"),
        ({"burst_seconds": 5.0, "burst_every_seconds": 5.0}, "burst_seconds must be less than burst_every_seconds"),
        ({"burst_every_seconds": 60.0}, "burst_seconds must be less than"),
        ({"server_error_statuses": ()}, "server_error_statuses must be from 500 to 599"),
        ({"server_error_statuses": (429,)}, "server_error_statuses must be from 500 to 599"),
    ],
)
def test_impossible_faults_are_refused_with_their_value(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Faults(**bad)
