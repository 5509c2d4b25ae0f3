"""Heads over a real pool: what stays, what goes with what, and who stands for those that went."""

from __future__ import annotations

from typing import Any

import pytest
from dspy_flashevolve.gepa.heads import Heads
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dspy_flashevolve.gepa.pool import Pool
from dspy_flashevolve.gepa.records import Base
from tests.gepa.pools import EXAMPLES, commit, frontier, pool_of

SEED_SCORES = [0.5] * EXAMPLES
WORSE, EQUAL = {0: -1.0, 1: -1.0}, {0: 2.0, 1: 2.0}
"""Scores on a prefix that no best candidate of these tests undercuts, and that none beats."""


class Line:
    """A pool with a validated seed, its heads, and a plain record of what was done to them.

    The record keeps for each head what it was begun on and what became of it; everything else follows from that.
    """

    def __init__(self) -> None:
        self.pool: Pool = pool_of()
        self.heads = Heads(self.pool, margin=0.0)
        self.base_of: dict[int, Base] = {}
        self.others: dict[int, tuple[int, ...]] = {}
        self.index_of: dict[int, int] = {}
        self.passed: set[int] = set()
        self.commits = 0

    @property
    def waiting(self) -> list[int]:
        return [entry.key for entry in self.pool.speculative.all()]

    def begin(self, text: str = "", others: tuple[int, ...] = ()) -> int:
        base = self.heads.newest(visible=False)
        begun = self.heads.begin({"p": text or f"head {len(self.base_of)}"}, base, others)
        assert begun is not None
        key, _, stands_on = begun
        self.base_of[key], self.others[key] = stands_on, others
        return key

    def passes(self, key: int) -> None:
        assert self.heads.judge_prefix(key, EQUAL).removed == ()
        self.passed.add(key)

    def ordinary(self, scores: list[float] | None = None) -> int:
        self.commits += 1
        return commit(self.pool, self.commits, scores or SEED_SCORES, p=f"ordinary {self.commits}").candidate

    def confirm(self, key: int) -> tuple[int, ...]:
        """As a validation does it: the parents are read, it is committed, and those under it go."""
        assert self.heads.parents_of(key)
        self.index_of[key] = self.ordinary([0.5 + 0.01 * key] * EXAMPLES)
        return self.heads.confirmed(key, self.index_of[key])

    # What follows from the record.

    def up(self, key: int) -> int | None:
        """What it was begun on, while that is a head."""
        return self.base_of[key].key

    def stands_for(self, key: int) -> set[int]:
        if key in self.index_of:
            return {self.index_of[key]}
        base = self.base_of[key]
        return {*self.others[key], *({base.index} if base.key is None else self.stands_for(base.key))}

    def waiting_ancestors(self, key: int) -> list[int]:
        found: list[int] = []
        above = self.up(key)
        while above is not None and above not in self.index_of:
            found += [above] if above in self.pool.speculative else []
            above = self.up(above)
        return found

    def goes_with(self, key: int) -> set[int]:
        """It and those without evidence that stand on it, until one with evidence."""
        gone = {key}
        for other in self.waiting:
            ancestors = self.waiting_ancestors(other)
            if other not in self.passed and ancestors and ancestors[0] in gone:
                gone.add(other)
        return gone

    def play(self, steps: list[tuple[str, int]]) -> None:
        for action, which in steps:
            alive = self.waiting
            if action == "ordinary":
                self.ordinary()
            elif action == "begin" or not alive:
                size = len(self.pool.state.program_candidates)
                self.begin(others=(which % size,) if which % 2 else ())
            else:
                self.act(action, alive[which % len(alive)])

    def act(self, action: str, key: int) -> None:
        if action == "land":
            assert self.heads.land(key)
        elif action == "pass":
            self.passes(key)
        elif action == "confirm":
            self.confirm(key)
        else:
            gone = self.heads.drop(key) if action == "drop" else self.heads.judge_prefix(key, WORSE).removed
            assert gone[0] == key


ACTIONS = ["begin", "begin", "begin", "land", "pass", "confirm", "drop", "fail", "ordinary"]
STEPS = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 7)), max_size=25)
MIDDLE_REMOVED = [("begin", 0), ("begin", 0), ("begin", 0), ("begin", 0), ("pass", 3), ("drop", 1)]
LINGERS = [("begin", 0), ("begin", 0), ("begin", 0), ("pass", 2), ("drop", 1), ("confirm", 0)]


@settings(max_examples=60)
@given(STEPS)
def test_parents_are_always_indices_of_gepas_pool_and_never_none(steps: list[tuple[str, int]]) -> None:
    line = Line()
    line.play(steps)
    size = len(line.pool.state.program_candidates)
    for key in line.base_of:
        parents = line.heads.parents_of(key)
        assert parents
        assert all(0 <= parent < size for parent in parents)
    for visible in (True, False):
        base = line.heads.newest(visible=visible)
        assert 0 <= base.index < size
    line.pool.close()


@settings(max_examples=60)
@given(STEPS)
def test_the_newest_is_the_last_begun_that_waits_and_only_visible_ones_are_offered_to_selection(
    steps: list[tuple[str, int]],
) -> None:
    line = Line()
    line.play(steps)
    waiting = line.pool.speculative
    assert line.heads.newest(visible=False).key == max(line.waiting, default=None)
    shown = [key for key in line.waiting if waiting[key].visible]
    assert line.heads.newest(visible=True).key == max(shown, default=None)
    line.pool.close()


@settings(max_examples=60)
@given(STEPS)
def test_what_goes_is_what_stands_on_it_without_evidence_and_those_that_passed_stay(
    steps: list[tuple[str, int]],
) -> None:
    line = Line()
    line.play([step for step in steps if step[0] not in ("drop", "fail")])
    for key in line.waiting[:3]:
        if key in line.pool.speculative:
            before, expected = set(line.waiting), line.goes_with(key)
            assert set(line.heads.drop(key)) == expected
            assert set(line.waiting) == before - expected
            assert expected - {key} <= before - line.passed
    line.pool.close()


@settings(max_examples=60)
@given(STEPS, st.integers(0, 7))
def test_confirming_supersedes_exactly_the_waiting_ancestors(steps: list[tuple[str, int]], which: int) -> None:
    line = Line()
    line.play([step for step in steps if step[0] not in ("drop", "fail")])
    if line.waiting:
        key = line.waiting[which % len(line.waiting)]
        before, expected = set(line.waiting), line.waiting_ancestors(key)
        assert line.confirm(key) == tuple(expected)
        assert set(line.waiting) == before - {key, *expected}
    line.pool.close()


@settings(max_examples=60)
@given(STEPS)
@example(MIDDLE_REMOVED)
def test_the_waiting_ancestors_are_those_of_the_line_less_those_that_went(steps: list[tuple[str, int]]) -> None:
    line = Line()
    line.play(steps)
    for key in line.waiting:
        assert line.pool.speculative.ancestors(key) == line.waiting_ancestors(key)
    line.pool.close()


@settings(max_examples=60)
@given(STEPS)
@example(LINGERS)
def test_confirmed_ancestors_stand_for_those_that_went(steps: list[tuple[str, int]]) -> None:
    line = Line()
    line.play(steps)
    for key in line.base_of:
        assert set(line.heads.parents_of(key)) == line.stands_for(key)
    line.pool.close()


def test_a_head_that_lost_the_one_between_stands_on_the_one_before() -> None:
    line = Line()
    first, gone, also_gone, last = (line.begin() for _ in range(4))
    line.passes(last)
    assert line.heads.drop(gone) == (gone, also_gone)
    assert line.confirm(last) == (first,)
    assert line.waiting == []
    line.pool.close()


def test_no_grandparent_lingers_once_the_parent_is_confirmed() -> None:
    line = Line()
    first, gone, last = (line.begin() for _ in range(3))
    line.passes(last)
    line.heads.drop(gone)
    line.confirm(first)
    assert line.heads.parents_of(last) == [line.index_of[first]]
    line.pool.close()


def test_one_that_went_while_its_parent_waited_is_led_to_that_parent_once_it_is_confirmed() -> None:
    line = Line()
    first, gone = line.begin(), line.begin()
    line.heads.drop(gone)
    line.confirm(first)
    assert line.heads.parents_of(gone) == [line.index_of[first]]
    line.pool.close()


def test_a_heads_own_base_comes_before_the_parents_of_its_children() -> None:
    line = Line()
    parent = line.ordinary([0.1] * EXAMPLES)
    line.begin()
    second = line.begin(others=(parent,))
    assert line.heads.parents_of(second) == [0, parent]
    assert line.heads.newest(visible=False).index == 0
    line.pool.close()


def outside(pool: Pool, heads: Heads) -> Any:
    """All that a run sees of the pool; keys of heads are counters and do not matter."""
    waiting = pool.speculative
    named = {entry.key: entry.candidate["p"] for entry in waiting.all()}
    entries = [
        (entry.candidate, [named[one] for one in entry.parents], entry.indices, entry.generation, entry.visible)
        for entry in waiting.all()
    ]
    bases = [
        (base.candidate, base.index, base.generation, named.get(base.key) if base.key is not None else None)
        for base in (heads.newest(visible=True), heads.newest(visible=False), heads.confirmed_base())
    ]
    state = pool.state
    listed = (list(state.program_candidates), state.parent_program_for_candidate, state.total_num_evals)
    return listed, frontier(pool), entries, bases, pool.version, pool.generations, pool.best_score()


BUILDING = st.lists(st.tuples(st.sampled_from(["begin", "land", "pass", "ordinary"]), st.integers(0, 7)), max_size=10)


@settings(max_examples=50)
@given(BUILDING, st.lists(st.booleans(), min_size=1, max_size=4), st.booleans(), BUILDING)
def test_a_rolled_back_head_leaves_the_pool_as_if_it_had_never_been_there(
    before: list[tuple[str, int]], shown: list[bool], by_prefix: bool, after: list[tuple[str, int]]
) -> None:
    seen = []
    for with_it in (True, False):
        line = Line()
        line.play(before)
        if with_it:
            keys = [line.begin(f"gone {number}") for number in range(len(shown))]
            for key, lands in zip(keys, shown, strict=True):
                if lands:
                    line.heads.land(key)
            gone = line.heads.judge_prefix(keys[0], WORSE).removed if by_prefix else line.heads.drop(keys[0])
            assert gone == tuple(keys)
        number = len(line.waiting)
        for action, which in after:
            if action == "begin":
                line.begin(f"after {number}")
                number += 1
            else:
                line.play([(action, which)] if line.waiting or action == "ordinary" else [])
        seen.append(outside(line.pool, line.heads))
        line.pool.close()
    assert seen[0] == seen[1]


def test_an_integration_onto_a_head_that_is_no_longer_the_newest_is_turned_away() -> None:
    line = Line()
    stale = line.heads.newest(visible=False)
    key = line.begin()
    assert line.heads.begin({"p": "late"}, stale, ()) is None
    line.heads.drop(key)
    assert line.heads.begin({"p": "in time"}, stale, ()) is not None, "the line is where it was"
    line.pool.close()


def test_an_integration_onto_a_confirmed_base_is_turned_away_when_a_better_one_was_committed() -> None:
    line = Line()
    stale = line.heads.newest(visible=False)
    line.ordinary([0.9] * EXAMPLES)
    assert line.heads.begin({"p": "late"}, stale, ()) is None
    line.pool.close()


def test_an_integration_goes_on_when_the_head_under_it_was_confirmed_meanwhile() -> None:
    line = Line()
    line.begin("text")
    base = line.heads.newest(visible=False)
    key = base.key
    assert key is not None
    index = commit(line.pool, 99, [0.9] * EXAMPLES, p="text").candidate
    line.heads.confirmed(key, index)
    begun = line.heads.begin({"p": "on it"}, base, ())
    assert begun is not None
    assert line.heads.parents_of(begun[0]) == [index]
    line.pool.close()


def test_an_integration_of_other_components_is_put_onto_the_newest_head() -> None:
    pool = pool_of(p="seed", q="seed")
    heads = Heads(pool, margin=0.0)
    base = heads.newest(visible=False)
    first, second = heads.begin({"p": "mine"}, base, ()), heads.begin({"q": "mine"}, base, ())
    assert first is not None
    assert second is not None
    _, candidate, stands_on = second
    assert (candidate, stands_on.key) == ({"p": "mine", "q": "mine"}, first[0])
    assert heads.begin({"p": "late"}, base, ()) is None
    pool.close()


def test_a_head_on_its_prefix_is_compared_on_the_same_examples_only() -> None:
    line = Line()
    line.ordinary([1.0, 0.8, 0.0, 1.0])
    key = line.begin()
    assert line.heads.judge_prefix(key, {2: 0.0}).best == 0.0
    verdict = line.heads.judge_prefix(key, {0: 1.0, 1: 0.7})
    assert (verdict.score, verdict.best, verdict.removed) == (pytest.approx(0.85), pytest.approx(0.9), (key,))
    line.pool.close()


def test_a_margin_keeps_a_head_that_is_a_little_worse() -> None:
    line = Line()
    line.heads = Heads(line.pool, margin=0.25)
    key = line.begin()
    assert line.heads.judge_prefix(key, {0: 0.25}).removed == ()
    assert line.heads.judge_prefix(key, {0: 0.2}).removed == (key,)
    line.pool.close()


def test_a_head_that_is_gone_is_neither_landed_nor_dropped_nor_superseding() -> None:
    line = Line()
    under, key = line.begin(), line.begin()
    line.heads.drop(key)
    assert not line.heads.land(key)
    assert line.heads.drop(key) == ()
    assert line.heads.confirmed(key, 0) == ()
    assert line.waiting == [under]
    line.pool.close()


def test_texts_that_wait_are_known_as_well_as_those_that_are_committed() -> None:
    line = Line()
    key = line.begin("mine")
    assert line.heads.is_known({"p": "mine"})
    assert line.heads.is_known({"p": "seed"})
    line.heads.drop(key)
    assert not line.heads.is_known({"p": "mine"})
    line.pool.close()
