"""Order does not matter: the same finished work, in whatever order it finishes, gives the same frontier.

DESIGN section 4, invariant 4.
"""

from __future__ import annotations

import asyncio
from typing import Any

import dspy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.surface import POLICIES, SEARCHES
from tests.contract.worlds import World, chance, play

CHILDREN, VALIDATED = 5, 6
SCORES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=VALIDATED, max_size=VALIDATED)


class First:
    """Selects the seed, always."""

    def select_candidate_idx(self, state: Any) -> int:
        return 0


class Turn:
    """Minibatches of one example, in turn."""

    def __init__(self) -> None:
        self._next = 0

    def next_minibatch_ids(self, loader: Any, state: Any) -> list[int]:
        self._next += 1
        return [self._next % CHILDREN]


class Table(World):
    """Reflecting on training example n gives child n, whose scores are given; only how long things take is drawn."""

    def __init__(self, table: list[list[float]], timing: int) -> None:
        super().__init__(seed=timing, train=CHILDREN, val=VALIDATED, spread=60.0)
        self.score = self._score
        self._table = {f"0.5 child {number}": scores for number, scores in enumerate(table[1:])}
        self._table["0.3 seed 0"] = table[0]

    def _score(self, text: str, question: str) -> float:
        kind, number = question.split()
        return self._table[text][int(number)] if kind == "v" else float(text != "0.3 seed 0")

    async def acall(self, candidate: Any, reflective_dataset: Any, components_to_update: list[str]) -> dict[str, str]:
        self.reflections += 1
        await asyncio.sleep(1 + 60 * chance("reflect", self.seed, self.reflections) ** 3)
        [record] = next(iter(reflective_dataset.values()))
        return {name: f"0.5 child {record['Inputs']['question'].split()[1]}" for name in components_to_update}


def frontier(program: Any) -> tuple[Any, ...]:
    """The pool's texts; for each validation example the best score and who has it."""
    details = program.detailed_results
    texts = [candidate.steps[0].signature.instructions for candidate in details.candidates]
    holders = [
        {texts[index] for index in front} for _, front in sorted(details.per_val_instance_best_candidates.items())
    ]
    best = [max(scores[example] for scores in details.val_subscores) for example in range(VALIDATED)]
    return set(texts), best, holders, max(details.val_aggregate_scores)


def expected(table: list[list[float]]) -> tuple[Any, ...]:
    """The same, worked out from the scores alone."""
    texts = ["0.3 seed 0", *(f"0.5 child {number}" for number in range(CHILDREN))]
    best = [max(scores[example] for scores in table) for example in range(VALIDATED)]
    holders = [
        {text for text, scores in zip(texts, table, strict=True) if scores[example] == best[example]}
        for example in range(VALIDATED)
    ]
    return set(texts), best, holders, max(sum(scores) / VALIDATED for scores in table)


def order(table: list[list[float]], timing: int) -> list[str]:
    """The pool's texts in the order of their commits, where the frontier is what it has to be."""
    program = play(
        Table(table, timing), 150, candidate_selection_strategy=First(), reflection_minibatch_size=None,
        gepa_kwargs={"batch_sampler": Turn()}, skip_perfect_score=False, search="pareto", use_merge=False,
    )  # fmt: skip
    assert frontier(program) == expected(table)
    return [one.steps[0].signature.instructions for one in program.detailed_results.candidates]


@settings(max_examples=8)
@given(st.lists(SCORES, min_size=CHILDREN + 1, max_size=CHILDREN + 1), st.integers(0, 10**6))
def test_whatever_finishes_first_the_frontier_is_that_of_the_scores(table: list[list[float]], timing: int) -> None:
    order(table, timing)


def test_the_same_work_does_finish_in_different_orders() -> None:
    table = [[chance(row, column) for column in range(VALIDATED)] for row in range(CHILDREN + 1)]
    assert len({tuple(order(table, timing)) for timing in range(3)}) > 1


@pytest.mark.long
@settings(max_examples=10)
@given(st.integers(0, 10**6), st.sampled_from([4, 64]), SEARCHES, POLICIES)
def test_the_frontier_is_always_that_of_the_scores_of_what_was_committed(
    seed: int, slots: int, search: Any, staleness: Any
) -> None:
    """Whatever was decided on a part of the scores, or ahead of them, leaves nothing behind."""
    details = play(World(seed=seed), 90, num_threads=slots, search=search, staleness=staleness).detailed_results
    scores = details.val_subscores
    assert all(set(one) == set(range(12)) for one in scores)
    assert details.val_aggregate_scores == [sum(one.values()) / 12 for one in scores]
    for example, front in details.per_val_instance_best_candidates.items():
        best = max(one[example] for one in scores)
        assert front == {index for index, one in enumerate(scores) if one[example] == best}
    assert all(
        parent < index for index, parents in enumerate(details.parents) for parent in parents if parent is not None
    )
    best_so_far = [commit.best_score for commit in details.async_stats.commits]
    assert best_so_far == sorted(best_so_far)
    assert isinstance(details.best_candidate, dspy.Module)
