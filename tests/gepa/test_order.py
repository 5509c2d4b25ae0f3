"""DESIGN section 4, invariants 1 and 4, on the pool itself; and speculative candidates that leave no trace."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from gepa.core.data_loader import ListDataLoader
from gepa.core.state import ValsetEvaluation
from gepa.proposer.base import CandidateProposal
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.item import Ticket
from dspy_flashevolve.gepa.options import GepaOptions
from dspy_flashevolve.gepa.parts import build_parts
from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.speculative import SpeculativeCandidates

EXAMPLES = 4
SCORES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=EXAMPLES, max_size=EXAMPLES)
QUIET = SimpleNamespace(log=lambda message: None)


def pool_of() -> Pool:
    loader = ListDataLoader(list(range(EXAMPLES)))
    options = GepaOptions(max_metric_calls=1000)
    parts = build_parts(options, loader, QUIET)
    return Pool(parts, options, object(), {"p": "seed"}, loader, loader, QUIET, 0.0, False)


def evaluation(scores: list[float]) -> ValsetEvaluation[Any, Any]:
    by_id = dict(enumerate(scores))
    return ValsetEvaluation(dict.fromkeys(by_id), by_id, None)


def commit(pool: Pool, number: int, text: str, scores: list[float]) -> Any:
    ticket = Ticket.create(number, 0)
    pool.begin_ticket(ticket)
    return pool.add(ticket, CandidateProposal({"p": text}, [0]), evaluation(scores), EXAMPLES)


def frontier(pool: Pool) -> tuple[dict[int, float], dict[int, set[str]]]:
    """Best score and best texts, for each validation example."""
    texts = [candidate["p"] for candidate in pool.state.program_candidates]
    fronts = pool.state.program_at_pareto_front_valset
    return dict(pool.state.pareto_front_valset), {i: {texts[c] for c in front} for i, front in fronts.items()}


@given(SCORES, st.lists(SCORES, max_size=6), st.randoms(use_true_random=False))
def test_the_frontier_does_not_depend_on_the_order_of_commits(
    seed: list[float], children: list[list[float]], shuffler: random.Random
) -> None:
    results = []
    order = list(enumerate(children))
    for _ in range(2):
        pool = pool_of()
        pool.confirm_seed(evaluation(seed))
        for number, (name, scores) in enumerate(order):
            commit(pool, number, f"child {name}", scores)
        results.append((frontier(pool), pool.best_score(), pool.version, pool.state.total_num_evals))
        pool.close()
        shuffler.shuffle(order)
    assert results[0] == results[1]


@given(SCORES, st.lists(SCORES, max_size=6))
def test_the_version_rises_by_one_a_commit_and_the_best_never_falls(
    seed: list[float], children: list[list[float]]
) -> None:
    pool = pool_of()
    pool.confirm_seed(evaluation(seed))
    best = [sum(seed) / EXAMPLES]
    for number, scores in enumerate(children):
        done = commit(pool, number, f"child {number}", scores)
        assert (done.version, done.candidate, done.generation) == (number + 1, number + 1, 1)
        best.append(done.best_score)
    assert best == sorted(best)
    assert pool.state.is_consistent()
    pool.close()


def test_what_tickets_did_before_the_seed_was_confirmed_stays() -> None:
    pool = pool_of()
    early = pool.state
    for number in range(3):
        pool.begin_ticket(Ticket.create(number, 0))
    pool.count_calls(6)
    pool.confirm_seed(evaluation([0.5] * EXAMPLES))
    assert pool.state is early
    assert (early.i, early.total_num_evals, len(early.full_program_trace)) == (2, 6 + EXAMPLES, 3)
    assert len(pool.speculative) == 0
    pool.close()


def test_gepas_code_sees_the_iteration_of_the_ticket_it_acts_for() -> None:
    pool = pool_of()
    pool.confirm_seed(evaluation([0.0] * EXAMPLES))
    tickets = [Ticket.create(number, 0) for number in range(3)]
    for ticket in tickets:
        pool.begin_ticket(ticket)
    with pool.acting_for(tickets[1]):
        assert pool.state.i == 1
        pool.state.full_program_trace[-1]["mark"] = True
    assert pool.state.i == 2
    assert [entry.get("mark") for entry in pool.state.full_program_trace] == [None, True, None]
    pool.close()


STEPS = st.lists(st.tuples(st.sampled_from(["add", "child", "confirm", "remove"]), st.integers(0, 5)), max_size=30)


@given(STEPS)
def test_a_removed_speculative_candidate_leaves_nothing_behind(steps: list[tuple[str, int]]) -> None:
    waiting = SpeculativeCandidates()
    for action, which in steps:
        alive = waiting.all()
        if action == "add" or not alive:
            waiting.add({"p": "x"})
        elif action == "child":
            waiting.add({"p": "y"}, parents=(alive[which % len(alive)].key,))
        elif action == "confirm":
            waiting.confirm(alive[which % len(alive)].key)
        else:
            before = {one.key for one in alive}
            gone = {one.key for one in waiting.remove(alive[which % len(alive)].key)}
            assert {one.key for one in waiting.all()} == before - gone
        left = {one.key for one in waiting.all()}
        assert all(set(one.parents) <= left for one in waiting.all()), "no candidate stands on one that is gone"


def test_confirming_what_is_not_speculative_is_an_error() -> None:
    waiting = SpeculativeCandidates()
    for call in (waiting.confirm, waiting.remove):
        with pytest.raises(ConfigurationError, match="candidate 7 is not speculative"):
            call(7)
    with pytest.raises(ConfigurationError, match=r"speculative parents \[3\]"):
        waiting.add({"p": "x"}, parents=(3,))
