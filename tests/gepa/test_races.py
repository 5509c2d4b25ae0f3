"""Giving up a validation that lies clearly under the pool's best: when, and that nothing of it is kept."""

from __future__ import annotations

from typing import Any

import pytest
from dspy.utils.exceptions import LMRateLimitError
from gepa.strategies.proposal_sampling import IndependentSampling
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve import Reflective, Speculation
from dspy_flashevolve.engine.events import HeadEnded, Speculated, SpeculationEnded
from dspy_flashevolve.gepa.races import Race, against_best
from tests.gepa.test_order import EXAMPLES, commit, evaluation, pool_of
from tests.gepa.test_speculation import Promising, Slow
from tests.gepa.worlds import VAL, Callbacks, Outcome, chance, play

REASON = "it fell behind the pool's best on its validation"
SCORE = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
BEST = [0.5, 1.0, 0.5, 0.0]


# One race


@given(st.permutations(range(EXAMPLES)), st.lists(SCORE, min_size=4, max_size=4), st.floats(0, 1), st.integers(1, 4))
def test_a_candidate_goes_on_until_it_lies_more_than_the_margin_under_the_best(
    order: list[int], scores: list[float], margin: float, least: int
) -> None:
    pool = pool_of()
    pool.confirm_seed(evaluation(BEST))
    watch = Race(pool, margin, least).watch(order)
    assert watch is not None
    for count, example in enumerate(order, start=1):
        there = order[:count]
        behind = sum(BEST[i] for i in there) / count - sum(scores[i] for i in there) / count
        goes_on = watch(count - 1, scores[example])
        if abs(behind - margin) > 1e-9:
            assert goes_on == (count < least or behind <= margin)
    pool.close()


def test_nothing_is_raced_without_a_margin_or_before_there_is_anybody_to_race() -> None:
    pool = pool_of()
    assert Race(pool, None, 1).watch([0]) is None
    watch = Race(pool, 0.0, 1).watch([0])
    assert watch is not None
    assert watch(0, -1.0), "the seed is not confirmed"
    assert against_best(pool, {0: 0.5}) == (0.5, None)
    pool.close()


def test_prefix_and_rest_run_in_one_race() -> None:
    pool = pool_of()
    pool.confirm_seed(evaluation([0.5] * EXAMPLES))
    race = Race(pool, 0.2, 2)
    prefix, rest = race.watch([0, 1]), race.watch([2, 3])
    assert prefix is not None
    assert rest is not None
    assert prefix(0, 0.0)
    assert not rest(1, 0.5), "0.25 to 0.5 on examples 0 and 3"
    assert prefix(1, 1.0), "it has caught up"
    pool.close()


def test_it_is_compared_with_the_best_that_there_is_now_on_the_examples_that_both_have() -> None:
    pool = pool_of()
    pool.confirm_seed(evaluation([0.5] * EXAMPLES))
    assert against_best(pool, {0: 1.0, 3: 0.0}) == (0.5, 0.5)
    commit(pool, 1, "better", [1.0, 1.0, 1.0, 0.0])
    assert against_best(pool, {0: 1.0, 3: 0.0}) == (0.5, 0.5)
    assert against_best(pool, {0: 0.5, 1: 0.5}) == (0.5, 1.0)
    assert against_best(pool, {9: 0.25}) == (0.25, None)
    pool.close()


# Races in runs


class Falling(Promising):
    """The children of the seed are perfect on their prefix, which makes them visible, and nothing after it."""

    def __init__(self) -> None:
        super().__init__(reflection_seconds=100.0)


def raced(world: Any = None, margin: float | None = 0.05, **options: Any) -> Outcome:
    settings: dict[str, Any] = {"staleness": "full", "max_live_tickets": 24, "num_threads": 48}
    speculation = Speculation(validate=0.25, racing=margin)
    outcome = play(world or Slow(), 900, **(settings | {"speculation": speculation} | options))
    outcome.check_budget()
    return outcome


def test_a_candidate_that_is_clearly_behind_gives_up_the_rest_and_is_refused_with_its_reason() -> None:
    callbacks = Callbacks()
    outcome = raced(gepa_kwargs={"callbacks": [callbacks]})
    assert outcome.stats.end_reasons[REASON] > 0
    reasons = [event["reason"] for event in callbacks.of("on_candidate_rejected")]
    assert reasons.count("it fell behind the pool's best") == outcome.stats.end_reasons[REASON]
    run: dict[str, set[str]] = {}
    for text, question in outcome.world.scored:
        if question.startswith("v"):
            run.setdefault(text, set()).add(question)
    given_up = {text: questions for text, questions in run.items() if text not in outcome.texts}
    assert given_up
    assert any(len(questions) < len(VAL) for questions in given_up.values())
    assert all(len(run[text]) == len(VAL) for text in outcome.texts)


def test_its_partial_scores_are_in_no_frontier_and_no_log() -> None:
    outcome = raced()
    state = outcome.state
    assert outcome.stats.end_reasons[REASON] > 0
    assert all(len(scores) == len(VAL) for scores in state.prog_candidate_val_subscores)
    for i, best in state.pareto_front_valset.items():
        assert best == max(outcome.world.score(text, f"v {i}") for text in outcome.texts)
    assert state.is_consistent()


@pytest.mark.parametrize("options", [{"margin": None}, {"speculation": None}])
def test_without_a_margin_everything_that_passed_its_screen_is_validated_to_its_end(options: dict[str, Any]) -> None:
    outcome = raced(**options)
    assert REASON not in outcome.stats.end_reasons
    run: dict[str, int] = {}
    for text, question in outcome.world.scored:
        run[text] = run.get(text, 0) + question.startswith("v")
    assert set(run.values()) <= {0, len(VAL)}


def test_races_are_never_run_in_lockstep() -> None:
    outcome = raced(schedule="lockstep", max_live_tickets=None, margin=0.0)
    assert REASON not in outcome.stats.end_reasons
    assert outcome.stats.ended["committed"] > 0


def test_one_that_falls_behind_after_it_was_visible_is_taken_back() -> None:
    outcome = raced(Falling(), candidate_selection_strategy="current_best")
    removed = [event for event in outcome.of(SpeculationEnded) if event.end.startswith("removed: it fell behind")]
    assert removed
    assert {event.key for event in outcome.of(Speculated)} == {event.key for event in outcome.of(SpeculationEnded)}
    assert len(outcome.of(Speculated)) == len(outcome.of(SpeculationEnded)), "each one ends once"
    assert not {one.key for one in removed} - outcome.run.pool.speculative.fallen
    assert len(outcome.run.pool.speculative) == 0


@pytest.mark.parametrize("seed", range(4))
def test_one_that_was_taken_back_is_told_of_once_where_another_of_its_ticket_gets_no_answer(seed: int) -> None:
    class Deaf(Falling):
        async def rollout(self, text: str, question: str) -> None:
            await super().rollout(text, question)
            if question.startswith("v") and not text.endswith("seed") and chance(seed, text, question) < 0.04:
                raise LMRateLimitError("later", model="m")

    outcome = raced(Deaf(), gepa_kwargs={"sampling_strategy": IndependentSampling(4)})
    ends = [event.end for event in outcome.of(SpeculationEnded)]
    keys = [event.key for event in outcome.of(SpeculationEnded)]
    assert len(keys) == len(set(keys))
    assert any(end.startswith("removed: it fell behind") for end in ends)
    assert outcome.stats.ended["failed"] > 0


@pytest.mark.parametrize("seed", range(3))
def test_parents_are_true_where_candidates_went_with_their_parents_and_were_confirmed_all_the_same(seed: int) -> None:
    world = Falling()
    world.seed = seed
    outcome = raced(world, candidate_selection_strategy="current_best")
    for index in range(1, len(outcome.texts)):
        text = outcome.world.children[outcome.texts[index]]
        while text not in outcome.texts[:index]:
            text = outcome.world.children[text]
        assert outcome.details.parents[index] == [outcome.texts.index(text)]


def test_a_head_that_is_clearly_behind_is_refused_and_rolled_back() -> None:
    class Worse(Slow):
        """Integrated texts are good on minibatches, and bad on the rest of the validation."""

        begun: dict[str, list[str]]

        def __init__(self) -> None:
            super().__init__(score=self.fading)
            self.begun = {}

        async def rollout(self, text: str, question: str) -> None:
            self.begun.setdefault(text, []).append(question)
            await super().rollout(text, question)

        def fading(self, text: str, question: str) -> float:
            if "child" in text or text.endswith("seed") or question.startswith("t"):
                return self.nearly_quality(text, question)
            begun = [one for one in self.begun[text] if one.startswith("v")]
            return 0.6 if begun.index(question) < 3 else 0.0

    outcome = raced(Worse(), staleness=Reflective(batch=3), margin=0.1)
    behind = [reason for reason in outcome.stats.end_reasons if "fell behind the pool's best" in reason]
    assert any(reason.startswith("head") for reason in behind)
    assert [event for event in outcome.of(HeadEnded) if event.end == "rolled back"]
    assert len(outcome.run.pool.speculative) == 0
    assert all(len(scores) == len(VAL) for scores in outcome.state.prog_candidate_val_subscores)
