"""What an integration said, and what becomes of each child for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from dspy_flashevolve.gepa.heads import Heads
from gepa.proposer.base import CandidateProposal
from gepa.strategies.proposal_sampling import ProposalTask
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve import Reflective
from dspy_flashevolve.engine.budget import Budget
from dspy_flashevolve.engine.staleness import VERDICTS, Integration, IntegrationRequest, Judgement, StaleChild
from dspy_flashevolve.engine.steps import End, EndKind, Step, rng_of
from dspy_flashevolve.gepa.evaluate import as_batch
from dspy_flashevolve.gepa.integration import Integrations, Waiting, changed_components, read_answer, stale_child
from dspy_flashevolve.gepa.records import Child, Parent
from dspy_flashevolve.sim.virtual import run
from tests.gepa.pools import EXAMPLES, commit, pool_of

HEAD = {"p": "head", "q": "head"}
REQUEST = IntegrationRequest(
    HEAD, [StaleChild(1, {"p": "one"}, {"p": "head"}, 0.5), StaleChild(2, {"p": "two"}, {"p": "head"}, 0.5)]
)


def child(texts: dict[str, str], base: int | None = None, parent: dict[str, str] = HEAD, index: int = 0) -> Child:
    task: Any = ProposalTask(index, parent, [0, 1], ["a", "b"])
    evaluation = as_batch([])
    evaluation.scores.extend([0.25, 0.75])
    return Child(Parent(0, task, evaluation, None, base), {**parent, **texts}, {}, ("said",))


# Reading


def said(texts: Any, verdicts: list[tuple[int, str, str]], **more: Any) -> Integration:
    judged = [SimpleNamespace(child=number, verdict=verdict, reason=reason) for number, verdict, reason in verdicts]
    return read_answer(SimpleNamespace(texts=texts, verdicts=judged, **more), REQUEST)


def test_texts_and_verdicts_are_read_and_what_nobody_asked_about_is_dropped() -> None:
    made = said(
        {"p": "new", "q": "changed by no child", "r": "no component"},
        [(1, "orthogonal", "it is new"), (2, "excellent", "no verdict"), (9, "subsumed", "no child")],
    )
    assert made == Integration({"p": "new"}, (Judgement(1, "orthogonal", "it is new"),))


def test_a_text_without_a_verdict_and_a_verdict_without_a_text_are_answers_and_nothing_at_all_is_none() -> None:
    assert said({"p": "new"}, []).failed == ""
    assert said({}, [(1, "subsumed", "")]).failed == ""
    assert said({}, []).failed == said({"p": ""}, []).failed == "the module returned neither text nor verdict"


def test_where_a_component_could_not_be_read_the_rest_is_not_used() -> None:
    assert said({"p": "new"}, [(1, "orthogonal", "")], failed={"q": "no reply"}).failed == "q: no reply"


ANY = st.none() | st.text() | st.integers() | st.lists(st.text(), max_size=2)


@given(
    st.dictionaries(st.sampled_from(["p", "q", "zzz"]), ANY),
    st.lists(st.tuples(ANY.filter(lambda one: not isinstance(one, list)), ANY, ANY), max_size=4),
)
def test_whatever_was_said_only_asked_components_and_children_are_in_what_is_read(texts: Any, verdicts: Any) -> None:
    made = said(
        texts, [(number, "x" if isinstance(verdict, list) else verdict, why) for number, verdict, why in verdicts]
    )
    assert set(made.texts) <= {"p"}
    assert all(isinstance(text, str) and text for text in made.texts.values())
    assert all(one.child in (1, 2) and one.verdict in VERDICTS for one in made.judgements)
    assert bool(made.failed) == (not made.texts and not made.judgements)


def test_a_child_is_told_with_what_it_changed_its_scores_and_how_far_it_is_behind() -> None:
    one = child({"p": "mine"})
    assert stale_child(4, one, [], 3) == StaleChild(4, {"p": "mine"}, {"p": "head"}, 0.5, None, ("said",), 3)
    proposal: Any = CandidateProposal(one.candidate, [0], subsample_scores_after=[1.0, 0.5])
    assert stale_child(4, one, [proposal], 0).score_after == 0.75
    assert changed_components([one, child({"q": "other"}), child({"p": "again"})]) == ("p", "q")


# Sorting


class Sorted:
    """What becomes of steps with one child each, by what an integration said.

    Args:
        verdicts: of each child; None for one that was not judged.
        shown: children that the module reads at most; None for all.
        committed: a text that the pool has already.
    """

    def __init__(
        self,
        verdicts: list[str | None],
        policy: Reflective,
        texts: dict[str, str] | None = None,
        shown: int | None = None,
        committed: str = "other",
    ) -> None:
        self.pool = pool_of(**HEAD)
        commit(self.pool, 99, [0.1] * EXAMPLES, p=committed)
        self.heads = Heads(self.pool, 0.0)
        module: Any = SimpleNamespace() if shown is None else SimpleNamespace(max_children=shown)
        nothing: Any = None
        run_: Any = SimpleNamespace()
        integrations = Integrations(run_, self.pool, nothing, self.heads, policy, nothing, module, None, [])
        self.budget = Budget(100)
        group = [(self.step(number), Waiting((child({"p": f"child {number}"}),))) for number in range(len(verdicts))]
        judged: list[Any] = [
            Judgement(number, verdict, f"reason {number}")  # type: ignore[arg-type]
            for number, verdict in enumerate(verdicts)
            if verdict is not None
        ]
        made = Integration({"p": "joined"} if texts is None else texts, tuple(judged), 1)
        self.base = self.heads.newest(visible=False)
        owner = {number: number for number in range(len(verdicts))}
        composed = integrations._composed(group, owner, self.base, 0, made)  # pyright: ignore[reportPrivateUsage]
        self.outcomes = {step.number: outcome for step, outcome in run(lambda: composed)}

    def step(self, number: int) -> Step:
        pays = self.budget.reserve(5)
        assert pays is not None
        return Step(number, rng_of(number, 0), pays)

    def taken(self) -> list[int]:
        return sorted(number for number, one in self.outcomes.items() if hasattr(one, "members"))

    def left(self) -> dict[int, tuple[str, str]]:
        return {number: (one.fate, one.reason) for number, one in self.outcomes.items() if hasattr(one, "fate")}


POLICY = Reflective(batch=4)


def test_each_child_goes_where_its_verdict_says() -> None:
    one = Sorted(["orthogonal", "conflicting", "subsumed", "orthogonal"], POLICY)
    assert one.taken() == [0, 3]
    assert one.left() == {1: ("retry", "conflicting: reason 1")}
    assert one.outcomes[2] == End(EndKind.DISCARDED, "subsumed: reason 2")
    landing: Any = one.outcomes[0]
    assert landing is one.outcomes[3]
    assert (landing.candidate, landing.base.index) == ({"p": "joined", "q": "head"}, 0)
    assert landing.key in one.pool.speculative
    assert not one.pool.speculative[landing.key].visible
    assert one.budget.reserved == 3 * 5, "one of those that are in it pays"


def test_a_child_that_was_shown_and_not_judged_is_taken_for_being_in_the_new_text() -> None:
    assert Sorted([None, "conflicting", None], POLICY).taken() == [0, 2]
    assert Sorted([None] * 4, POLICY, shown=4).taken() == [0, 1, 2, 3]


def test_where_no_text_is_new_or_not_all_were_shown_a_child_goes_on_as_if_nothing_could_be_read_of_it() -> None:
    out = ("alone", "it is not in the integrated text")
    assert Sorted([None, "orthogonal", None], POLICY, shown=2).left() == {0: out, 2: out}
    assert Sorted([None, "orthogonal"], POLICY, texts={"p": "head"}).left() == {0: out, 1: out}
    assert Sorted([None], Reflective(batch=4, unreadable="drop"), texts={}).left() == {0: ("drop", out[1])}


@pytest.mark.parametrize("left_out", ["alone", "retry", "drop"])
def test_what_is_left_out_goes_on_as_the_policy_says(left_out: Any) -> None:
    one = Sorted(["conflicting"], Reflective(batch=4, left_out=left_out))
    assert one.left() == {0: (left_out, "conflicting: reason 0")}


def test_a_text_that_is_a_candidate_already_is_not_run_again() -> None:
    one = Sorted(["orthogonal", "orthogonal"], POLICY, committed="joined")
    assert set(one.outcomes.values()) == {End(EndKind.DISCARDED, "the integrated text is a candidate already")}
    assert len(one.pool.speculative) == 0


def test_a_patch_makes_no_head() -> None:
    one = Sorted(["orthogonal"], Reflective(batch=1))
    landing: Any = one.outcomes[0]
    assert landing.key is None
    assert len(one.pool.speculative) == 0


# Who is whose parent


def test_the_parent_of_a_child_is_itself_once_it_is_confirmed() -> None:
    pool = pool_of()
    nothing: Any = None
    integrations = Integrations(nothing, pool, nothing, Heads(pool, 0.0), POLICY, nothing, nothing, None, [])
    index = commit(pool, 1, [0.75] * EXAMPLES, p="committed").candidate
    waiting = pool.speculative
    under = waiting.add({"p": "under"}, (), (0,), 1).key
    base = waiting.add({"p": "base"}, (under,), (), 2).key

    def parent(key: int | None, nearest: int) -> int:
        return integrations._parent_of(child({}, key, index=nearest))  # pyright: ignore[reportPrivateUsage]

    assert parent(None, index) == index
    assert parent(base, 0) == 0
    waiting.confirm_late(under, 3)
    assert parent(base, 0) == 3
    waiting.confirm_late(base, 4)
    assert parent(base, 0) == 4
    pool.close()
