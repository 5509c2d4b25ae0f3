"""The pool: its frontier, its version, whose iteration gepa's code sees; speculative candidates leave no trace."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.engine.steps import Budget, Reservation, Step, step_rng
from dspy_flashevolve.gepa.published import SpeculativeCandidates
from tests.contract.surface import Heard
from tests.gepa.pools import EXAMPLES, commit, frontier, pool_of

SCORES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=EXAMPLES, max_size=EXAMPLES)


def step_of(number: int) -> Step:
    return Step(number, step_rng(number, seed=0), Reservation(Budget(None), 0))


@given(st.lists(SCORES, max_size=6), st.randoms(use_true_random=False))
def test_the_frontier_does_not_depend_on_the_order_of_commits(
    children: list[list[float]], shuffler: random.Random
) -> None:
    results = []
    order = list(enumerate(children))
    for _ in range(2):
        pool = pool_of()
        for number, (name, scores) in enumerate(order):
            commit(pool, number, scores, p=f"child {name}")
        results.append((frontier(pool), pool.best_score(), pool.version, pool.state.total_num_evals))
        pool.close()
        shuffler.shuffle(order)
    assert results[0] == results[1]


@pytest.mark.parametrize("ends", ["finish", "fail"])
def test_what_callbacks_heard_begin_has_an_end_also_where_a_stop_came_during_the_selection(ends: str) -> None:
    heard = Heard()
    pool = pool_of(callbacks=[heard])
    for number in range(3):
        pool.begin_step(step_of(number))
    pool.end_step(step_of(1), accepted=True)
    if ends == "finish":
        pool.finish()
    else:
        pool.fail(RuntimeError("the run was ended"))
    ended = [(event["iteration"], event["proposal_accepted"]) for event in heard.of("on_iteration_end")]
    assert ended == [(2, True), (1, False), (3, False)]
    assert sorted(one for one, _ in ended) == [event["iteration"] for event in heard.of("on_iteration_start")]
    pool.close()


STEPS = st.lists(st.tuples(st.sampled_from(["add", "child", "confirm", "remove"]), st.integers(0, 5)), max_size=30)


@given(STEPS)
def test_a_removed_speculative_candidate_leaves_nothing_behind(steps: list[tuple[str, int]]) -> None:
    waiting, confirmed = SpeculativeCandidates(), set[int]()
    for action, which in steps:
        alive = waiting.entries
        if action == "add" or not alive:
            waiting.add({"p": "x"})
        elif action == "child":
            waiting.add({"p": "y"}, parents=(alive[which % len(alive)].key,))
        elif action == "confirm":
            confirmed.add(key := alive[which % len(alive)].key)
            waiting.confirm(key, len(steps))
        else:
            taken = alive[which % len(alive)].key
            gone = {taken}
            for one in alive:  # oldest first
                gone |= {one.key} if gone & set(one.parents) else set()
            waiting.withdraw([taken])
            assert {one.key for one in waiting.entries} == {one.key for one in alive} - gone
        there = confirmed | {one.key for one in waiting.entries}
        assert all(set(one.parents) <= there for one in waiting.entries), "no candidate stands on one that is gone"
