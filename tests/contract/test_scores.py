"""What scores decide by themselves: a perfect program ends the search, and those of another scale are told at once."""

from __future__ import annotations

import logging
from typing import Any

import dspy
import pytest
from gepa.utils import MaxMetricCallsStopper

from dspy_flashevolve import AsyncGEPA
from tests.contract.surface import listening
from tests.contract.worlds import World, play, quality
from tests.fakes import Chain, digits, examples, fake_lm, reflection_lm, reply_for

PERFECT = "the best candidate has the perfect score on every validation example"


def test_a_perfect_seed_ends_the_run_with_its_validation() -> None:
    world = World(score=lambda text, question: 1.0)
    stats = play(world, 600).async_stats
    assert (stats.outcome, stats.stop_reason) == ("finished", f"{PERFECT}: nothing can be better")
    assert stats.commits == []
    assert world.reflections == 0
    assert stats.metric_calls < world.val + 50, "steps that ran beside the seed's validation end with it"


def test_a_perfect_candidate_ends_the_run_and_is_returned() -> None:
    """The first child is always right."""
    world = World(score=lambda text, question: 1.0 if quality(text) > 0.55 else 0.1, improved=lambda it, draw: it + 0.3)
    program = play(world, 5000)
    assert program.async_stats.stop_reason.startswith(PERFECT)
    assert program.async_stats.best_score == 1.0
    assert program.async_stats.metric_calls < 1000


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_a_run_makes_no_more_requests_for_a_perfect_program_than_dspy_gepa(schedule: Any) -> None:
    """dspy.GEPA asks the cache of its LM from there on."""
    asked: list[str] = []
    lm = fake_lm(lambda prompt: asked.append(prompt) or reply_for(prompt, answer="6"))

    def requests(kind: Any, **options: Any) -> int:
        asked.clear()
        data = {"trainset": examples("t", 7), "valset": examples("v", 9)}
        settings: dict[str, Any] = {"max_metric_calls": 300, "num_threads": 4, "reflection_lm": reflection_lm()}
        with dspy.context(lm=lm):
            kind(digits, **settings, **options).compile(Chain(), **data)
        return len(set(asked)) if kind is dspy.GEPA or schedule == "lockstep" else len(asked)

    assert requests(AsyncGEPA, schedule=schedule) <= requests(dspy.GEPA)


@pytest.mark.parametrize(
    "options",
    [
        {"skip_perfect_score": False},
        {"gepa_kwargs": {"stop_callbacks": MaxMetricCallsStopper(150)}},
        {"schedule": "lockstep"},
    ],
    ids=["skip_perfect_score=False", "a stopper", "lockstep"],
)
def test_the_search_goes_on_after_a_perfect_score_where_the_user_says_so(options: dict[str, Any]) -> None:
    stats = play(World(score=lambda text, question: 1.0), 150, **options).async_stats
    assert "perfect" not in stats.stop_reason
    assert stats.metric_calls > 100


@pytest.mark.parametrize(
    "score",
    [lambda text, question: 1.0 if question.startswith("t") else 0.5, lambda text, question: 40.0],
    ids=["a perfect training set alone", "scores above the perfect one"],
)
def test_what_is_not_perfect_on_validation_ends_no_run(score: Any) -> None:
    assert PERFECT not in play(World(score=score), 150).async_stats.stop_reason


def warnings_of(caplog: pytest.LogCaptureFixture, score: float, **options: Any) -> list[str]:
    with caplog.at_level(logging.WARNING, logger="dspy_flashevolve"):
        play(World(score=lambda text, question: score), 150, **options)
    return [message for message in caplog.messages if "A rollout scored" in message]


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_scores_above_the_scale_are_told_once_with_what_to_pass(
    caplog: pytest.LogCaptureFixture, schedule: str
) -> None:
    [message] = warnings_of(caplog, 40.0, schedule=schedule)
    assert "A rollout scored 40, outside of 0 to perfect_score=1" in message
    assert "is not reflected on" in message
    assert "perfect_score=100 for scores of 0 to 100" in message


def test_scores_far_below_the_scale_are_told_once_with_what_to_return(caplog: pytest.LogCaptureFixture) -> None:
    [message] = warnings_of(caplog, -1e9)
    assert "A rollout scored -1e+09, outside of 0 to perfect_score=1" in message
    assert "outweighs all others" in message
    assert "Return 0 for the worst" in message


@pytest.mark.parametrize(
    ("score", "options"),
    [
        (0.0, {}),
        (1.0, {}),
        (40.0, {"perfect_score": 100.0}),
        (-3.0, {"perfect_score": -2.0}),
        (40.0, {"perfect_score": None, "skip_perfect_score": False}),
    ],
)
def test_scores_within_their_scale_are_not_warned_of(
    caplog: pytest.LogCaptureFixture, score: float, options: dict[str, Any]
) -> None:
    assert warnings_of(caplog, score, **options) == []


def test_the_warning_comes_with_the_first_rollouts() -> None:
    """Not in a summary at the end: before the second score of the seed."""
    scored: list[int] = []
    world = World(score=lambda text, question: 40.0)

    def hear(record: logging.LogRecord) -> None:
        if "A rollout scored" in record.getMessage():
            scored.append(len(world.scored))

    with listening(hear):
        play(world, 150)
    [count] = scored
    assert count <= 16, "as many as there are slots"
