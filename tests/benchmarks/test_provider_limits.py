"""`benchmarks.provider_limits`: what its provider refuses, and what a row says."""

from __future__ import annotations

from benchmarks.provider_limits import CASES, Case, measure


def test_a_row_says_how_long_a_run_took_and_what_was_refused() -> None:
    quick = Case("quick", share=0.2, calls=80)
    row = measure(quick, "16 slots", 1.0)
    assert 0.05 * row["answered"] < row["refused"] < 0.5 * row["answered"]
    assert 0 < row["seconds"] < 200
    assert row["warnings"] == 0


def test_every_kind_has_cases_with_names_of_their_own() -> None:
    names = [case.name for cases in CASES.values() for case in cases()]
    assert len(set(names)) == len(names) > 20
