"""What becomes of proposals that were written while others were admitted; in real time, so that some are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes import fake_lm
from tests.harness.child import proposes, run


@pytest.mark.long
def test_a_revision_that_fits_no_format_leaves_a_stale_proposal_as_it_is(tmp_path: Path) -> None:
    def answer(prompt: str) -> str:
        return "no fields" if "patched_module" in prompt else proposes(lambda name, entry: None, prompt)

    results = run(tmp_path, "reflective", 24, proposer_lm=fake_lm(answer)).detailed_results
    assert results.stats.requests_by_stage["patch"] > 0
    assert results.stats.ended["failed"] == 0
    evaluated = len(results.candidates) + len(results.failed)
    assert results.stats.requests_by_stage["check"] == 3 * evaluated
    assert 24 * 2 - 6 < evaluated <= 1 + 24 * 2, "steps that read the same pool may write the same proposal"
