"""The estimate for unseen examples that stands beside a validated score."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dspy_flashevolve.gepa.compilation import expected_on_unseen
from tests.contract.surface import TRAIN, compiled, optimizer
from tests.fakes import Chain


def drawn(true: list[float], examples: int, rng: np.random.Generator) -> list[dict[int, float]]:
    """Validation scores of candidates with these true scores; what is easy for one is easier for all."""
    ease = rng.normal(size=examples)
    return [
        {i: float(ease[i] + rng.normal() < math.sqrt(2) * _quantile(score)) for i in range(examples)} for score in true
    ]


def _quantile(share: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(share)


@pytest.mark.parametrize(
    ("true", "examples"), [([0.4] * 10, 50), ([0.2, 0.25, 0.3, 0.35, 0.4], 50), ([0.3] * 20, 16), ([0.5, 0.52], 100)]
)
def test_the_estimate_is_nearer_to_the_truth_than_the_validated_score_of_the_best_of_many(
    true: list[float], examples: int
) -> None:
    rng, validated, estimated, squares = np.random.default_rng(0), [], [], []
    for _ in range(150):
        scores = drawn(true, examples, rng)
        means = [sum(own.values()) / examples for own in scores]
        best = means.index(max(means))
        estimate = expected_on_unseen(scores)
        assert estimate is not None
        validated.append(means[best] - true[best])
        estimated.append(estimate[0] - true[best])
        squares.append((estimated[-1] / max(estimate[1], 1e-9)) ** 2)
    assert abs(np.mean(estimated)) < 0.025
    assert abs(np.mean(estimated)) < abs(np.mean(validated))
    assert 0.5 < np.mean(squares) < 2, "its standard error is of the right size"


@pytest.mark.parametrize(
    "subscores", [[], [{1: 1.0}], [dict.fromkeys(range(9), 1.0), {1: 0.0}], [dict.fromkeys(range(9), math.nan)]]
)
def test_without_enough_scores_nothing_is_estimated(subscores: list[dict[int, float]]) -> None:
    assert expected_on_unseen(subscores) is None


def test_a_run_tells_the_estimate_beside_the_validated_score_and_in_its_summary() -> None:
    stats = compiled(200).async_stats
    assert 0 <= stats.unseen_score <= stats.best_score + 0.2
    assert stats.unseen_error > 0
    assert f"on unseen examples: about {stats.unseen_score:.4g} +- {stats.unseen_error:.2g}" in str(stats)
    assert stats.to_dict()["unseen_score"] == stats.unseen_score


def test_where_prompts_are_written_from_the_validation_examples_nothing_is_said_of_unseen_ones() -> None:
    stats = optimizer(100).compile(Chain(), trainset=TRAIN).async_stats
    assert stats.unseen_score is None
    assert "unseen" not in str(stats)
