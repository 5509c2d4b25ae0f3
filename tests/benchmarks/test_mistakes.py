"""`python -m benchmarks.mistakes`: what a mistake costs."""

from __future__ import annotations

import pytest

from benchmarks import mistakes

FAST = [one for one in mistakes.MISTAKES if one.name not in ("only max_seconds", "the endpoint is down")]
"""Without what is no mistake here, and what takes a minute."""


@pytest.mark.parametrize("mistake", FAST, ids=lambda one: one.name)
def test_asyncgepa_ends_early_with_an_error(mistake: mistakes.Mistake) -> None:
    _, _, calls, _, says = mistakes.row(mistake, mistakes.AsyncGEPA)
    assert "Error: " in says
    assert int(calls) <= 120, "the first validation, and sixteen minibatches"


def test_each_optimizer_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert mistakes.main(["--only", "metric has a typo"]) == 0
    theirs, ours = capsys.readouterr().out.splitlines()[-2:]
    assert theirs.split()[4:6] == ["dspy.GEPA", "150"]
    assert ours.split()[4] == "AsyncGEPA"
    assert int(ours.split()[5]) < 20
