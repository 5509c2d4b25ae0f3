"""What selection picks from, and that a speculative candidate which goes leaves nothing of itself."""

from __future__ import annotations

import pickle
from typing import Any

from gepa.core.state import ValsetEvaluation
from gepa.gepa_utils import find_dominator_programs
from hypothesis import given, settings
from hypothesis import strategies as st

from dspy_flashevolve.gepa.pool import Pool
from tests.gepa.pools import EXAMPLES, commit, frontier, iterations_of, pool_of

FULL = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=EXAMPLES, max_size=EXAMPLES)
PREFIX = st.dictionaries(st.integers(0, EXAMPLES - 1), st.sampled_from([0.0, 0.5, 1.0]), min_size=1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), FULL, st.just(0)),
        st.tuples(st.sampled_from(["add", "add", "doomed", "doomed", "confirm", "look"]), PREFIX, st.integers(0, 5)),
    ),
    max_size=14,
)


def part(scores: dict[int, float]) -> ValsetEvaluation[Any, Any]:
    return ValsetEvaluation(dict.fromkeys(scores), dict(scores), None)


def pickled(pool: Pool) -> bytes:
    """GEPA's state as its checkpoint has it."""
    return pickle.dumps({name: value for name, value in vars(pool.state).items() if name != "_budget_hooks"})


def view_of(pool: Pool) -> Any:
    """Everything that a selector of gepa reads."""
    view, keys = pool.speculative.selectable(pool.state)
    scores = view.per_program_tracked_scores
    mapping = view.get_pareto_front_mapping()
    listed = (view.program_candidates, view.prog_candidate_val_subscores, view.parent_program_for_candidate)
    best = find_dominator_programs(mapping, scores)
    return listed, scores, mapping, best, len(keys), view.is_consistent()


class Play:
    """The same steps with or without the candidates that will not stay."""

    def __init__(self, doomed_too: bool) -> None:
        self.iterations = iterations_of()
        self.pool = self.iterations.pool
        self.doomed_too = doomed_too
        self.kept: list[int] = []
        self.doomed: list[int] = []
        self.committed = 0

    def commit(self, scores: list[float]) -> int:
        self.committed += 1
        return commit(self.iterations, self.committed, scores, p=f"committed {self.committed}").candidate

    def step(self, action: str, scores: Any, which: int) -> None:
        waiting = self.pool.speculative
        alive = [entry.key for entry in waiting.entries if entry.key in self.kept]
        if action == "commit":
            self.commit(scores)
        elif action == "add":
            parents = (alive[which % len(alive)],) if alive and which % 2 else ()
            name = f"kept {len(self.kept)}"
            self.kept.append(waiting.add({"p": name}, parents, (0,), evaluation=part(scores)).key)
        elif action == "doomed" and self.doomed_too:
            under = [*self.doomed, *alive]
            parents = (under[which % len(under)],) if under and which % 2 else ()
            self.doomed.append(waiting.add({"p": "doomed"}, parents, (0,), evaluation=part(scores)).key)
        elif action == "confirm" and alive:
            waiting.confirm(alive[which % len(alive)], self.commit([0.5] * EXAMPLES))
        elif action == "look":
            self.pool.speculative.selectable(self.pool.state)

    def end(self) -> Any:
        self.pool.speculative.withdraw(self.doomed)
        waiting = self.pool.speculative
        entries = [(entry.candidate, waiting.resolve(entry.parents), entry.indices) for entry in waiting.entries]
        stands_for = [waiting.resolve((key,)) for key in self.kept]
        pool = self.pool
        pool.close()
        return view_of(pool), frontier(pool), entries, stands_for, pool.version, pickled(pool)


@settings(max_examples=80)
@given(STEPS)
def test_a_candidate_that_goes_leaves_the_pool_as_if_it_had_never_been_there(steps: list[Any]) -> None:
    outcomes = []
    for doomed_too in (True, False):
        play = Play(doomed_too)
        for step in steps:
            play.step(*step)
        outcomes.append(play.end())
    assert outcomes[0] == outcomes[1]


@settings(max_examples=60)
@given(STEPS)
def test_gepas_state_holds_what_was_committed_and_looking_does_not_change_it(steps: list[Any]) -> None:
    play = Play(doomed_too=True)
    for step in steps:
        play.step(*step)
    pool, before = play.pool, pickled(play.pool)
    view, keys = pool.speculative.selectable(pool.state)
    assert pickled(pool) == before
    assert len(pool.state.program_candidates) == 1 + play.committed
    confirmed = len(pool.state.program_candidates)
    assert view.program_candidates[:confirmed] == pool.state.program_candidates
    assert (view is pool.state) == (not keys)
    for place, key in enumerate(keys, start=confirmed):
        [entry] = [one for one in pool.speculative.entries if one.key == key]
        assert view.program_candidates[place] == entry.candidate
        assert entry.evaluation is not None
        assert view.prog_candidate_val_subscores[place] == entry.evaluation.scores_by_val_id
        assert all(0 <= parent < confirmed for parent in view.parent_program_for_candidate[place])
    pool.close()


def test_what_has_no_scores_yet_is_not_in_the_view() -> None:
    pool = pool_of()
    pool.speculative.add({"p": "the seed, while it is being validated"})
    assert pool.speculative.selectable(pool.state) == (pool.state, [])
    pool.close()


# Who stands for whom


def test_one_that_went_with_its_parent_and_was_confirmed_all_the_same_stands_for_itself() -> None:
    pool = pool_of()
    waiting = pool.speculative
    parent = waiting.add({"p": "parent"}, (), (0,))
    child = waiting.add({"p": "child"}, (parent.key,), ())
    grandchild = waiting.add({"p": "grandchild"}, (child.key,), ())
    waiting.withdraw([parent.key])
    assert waiting.fallen == {parent.key, child.key, grandchild.key}
    assert waiting.resolve((grandchild.key,)) == (0,)
    waiting.confirm(child.key, 7)
    assert waiting.resolve((child.key,)) == waiting.resolve((grandchild.key,)) == (7,)
    assert waiting.resolve((parent.key,)) == (0,)
    assert waiting.fallen == {parent.key, grandchild.key}
    pool.close()
