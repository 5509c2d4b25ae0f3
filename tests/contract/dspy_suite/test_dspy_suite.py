"""AsyncGEPA passes dspy's own GEPA tests wherever dspy.GEPA does."""

import os
from pathlib import Path

import pytest

from .run import Column, Comparison, SuiteError, compare, gepa_test_files, table

CHECKOUT = "FLASHEVOLVE_DSPY_CHECKOUT"


@pytest.mark.slow
def test_async_gepa_passes_dspys_own_gepa_tests_where_dspy_gepa_passes() -> None:
    folder = os.environ.get(CHECKOUT)
    if not folder:
        pytest.skip(f"{CHECKOUT} names no dspy checkout; dspy's sdist carries no tests")
    comparison = compare(Path(folder))
    assert comparison.expected(), table(comparison)
    assert not comparison.failed(), table(comparison)


def column(title: str, **outcomes: str) -> Column:
    return Column(title, outcomes, dict.fromkeys(outcomes, f"{title} says why"))


def test_a_test_counts_as_failed_only_where_dspy_gepa_passes_and_no_schedule_does() -> None:
    comparison = Comparison(
        column("dspy.GEPA", both="passed", pinned="passed", broken="passed", theirs="failed", skips="skipped"),
        (
            column("async", both="passed", pinned="failed", broken="failed", theirs="failed", skips="skipped"),
            column("lockstep", both="passed", pinned="passed", broken="error", theirs="failed", skips="skipped"),
        ),
    )
    assert comparison.failed() == ["broken"]
    assert comparison.lockstep_only() == ["pinned"]
    lines = table(comparison).splitlines()
    assert lines[-1] == "2 passed, 1 failed"
    assert "lockstep only: pinned" in lines
    assert "not counted, fails under dspy.GEPA: theirs" in lines
    assert "    async: async says why" in lines


def test_a_folder_without_gepa_tests_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match=tmp_path.name):
        gepa_test_files(tmp_path)
