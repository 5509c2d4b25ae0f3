"""Label and titles count half each."""

from __future__ import annotations

import dspy
import pytest

from benchmarks.workloads.hover import is_named, label_of, metric

GOLD = dspy.Example(label="NOT_SUPPORTED", titles=["Maniac (2011 film)", "Shia LaBeouf"])


@pytest.mark.parametrize(
    ("verdict", "hops", "score", "named"),
    [
        ("NOT_SUPPORTED", "Maniac: a film\nShia LaBeouf: its director", 1.0, []),
        ("not supported.", "Maniac", 0.75, ["Shia LaBeouf"]),
        ("SUPPORTED", "Maniac (2011 film), Shia LaBeouf", 0.5, ["the claim is NOT_SUPPORTED"]),
        ("perhaps", "", 0.0, ["Maniac (2011 film)", "Shia LaBeouf", "the claim is NOT_SUPPORTED"]),
    ],
)
def test_scores_and_what_the_feedback_names(verdict: str, hops: str, score: float, named: list[str]) -> None:
    found = metric(GOLD, dspy.Prediction(verdict=verdict, hops=hops))
    assert found.score == score
    assert all(part in found.feedback for part in named)
    assert bool(named) == ("wrong" in found.feedback or "do not name" in found.feedback)


def test_a_verdict_of_both_labels_is_none() -> None:
    assert label_of("SUPPORTED or NOT_SUPPORTED") is None
    assert label_of("unsupported") is None
    assert label_of("NOT SUPPORTED") == "NOT_SUPPORTED"


def test_a_title_is_named_as_a_whole() -> None:
    assert is_named("The Old Guard", "1. the old guard - a film")
    assert not is_named("Sven", "Svenja")
