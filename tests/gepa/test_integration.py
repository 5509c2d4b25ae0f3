"""What an integration said, and what becomes of each child for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gepa.proposer.base import CandidateProposal
from gepa.strategies.proposal_sampling import ProposalTask
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve import Reflective
from dspy_flashevolve.engine.staleness import StaleChild
from dspy_flashevolve.gepa.evaluate import as_batch
from dspy_flashevolve.gepa.integration import (
    SPARE_CHARACTERS,
    Integrations,
    _Landing,  # pyright: ignore[reportPrivateUsage]
    changed_components,
    read_answer,
    stale_child,
    too_long,
)
from dspy_flashevolve.gepa.records import Child, Parent
from dspy_flashevolve.modules.integrate import VERDICTS, ChildVerdict, Integration
from tests.gepa.pools import EXAMPLES, commit, configured, pool_of

HEAD = {"p": "head", "q": "head"}
CHILDREN = [StaleChild(1, {"p": "one"}, {"p": "head"}, 0.5), StaleChild(2, {"p": "two"}, {"p": "head"}, 0.5)]


def child(texts: dict[str, str], base: int | None = None, parent: dict[str, str] = HEAD, index: int = 0) -> Child:
    task: Any = ProposalTask(index, parent, [0, 1], ["a", "b"])
    evaluation = as_batch([])
    evaluation.scores.extend([0.25, 0.75])
    return Child(Parent(0, task, evaluation, None, base), texts, ("said",))


# Reading


def said(texts: Any, verdicts: list[tuple[int, str, str]], **more: Any) -> Integration:
    judged = [SimpleNamespace(child=number, verdict=verdict, reason=reason) for number, verdict, reason in verdicts]
    return read_answer(SimpleNamespace(texts=texts, verdicts=judged, **more), CHILDREN)


def test_texts_and_verdicts_are_read_and_what_nobody_asked_about_is_dropped() -> None:
    made = said(
        {"p": "new", "q": "changed by no child", "r": "no component"},
        [(1, "orthogonal", "it is new"), (2, "excellent", "no verdict"), (9, "subsumed", "no child")],
    )
    assert made == Integration(
        texts={"p": "new"}, verdicts=[ChildVerdict(child=1, verdict="orthogonal", reason="it is new")]
    )


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
    assert all(one.child in (1, 2) and one.verdict in VERDICTS for one in made.verdicts)
    assert bool(made.failed) == (not made.texts and not made.verdicts)


def test_a_child_is_told_with_what_it_changed_its_scores_and_how_far_it_is_behind() -> None:
    one = child({"p": "mine"})
    proposal: Any = CandidateProposal(one.candidate, [0], subsample_scores_after=[1.0, 0.5])
    assert stale_child(4, one, proposal, 3) == StaleChild(4, {"p": "mine"}, {"p": "head"}, 0.5, 0.75, ("said",), 3)
    assert changed_components([one, child({"q": "other"}), child({"p": "again"})]) == ("p", "q")


# What is too long


@given(st.lists(st.text(max_size=2000), min_size=2, max_size=2), st.integers(0, 6000))
def test_a_text_is_too_long_when_it_is_longer_than_all_that_it_was_made_from_and_some_more(
    children: list[str], length: int
) -> None:
    stale = [StaleChild(n, {"p": text}, {"p": "head"}, 0.5) for n, text in enumerate(children)]
    most = SPARE_CHARACTERS + sum(map(len, [HEAD["p"], *children]))
    assert too_long({"p": "x" * length}, HEAD, stale) == (length > most)
    assert not too_long({"p": "\n".join([HEAD["p"], *children])}, HEAD, stale), "nothing is too long that only joins"


# Who is whose parent


def test_the_parents_of_an_integration_are_its_base_and_the_childrens_as_far_as_they_are_confirmed() -> None:
    pool = pool_of()
    nothing: Any = None
    integrations = Integrations(nothing, pool, nothing, Reflective(batch=4), nothing, configured(), [], nothing)
    index = commit(pool, 1, [0.75] * EXAMPLES, p="committed").candidate
    waiting = pool.speculative
    under = waiting.add({"p": "under"}, (), (0,)).key
    base = waiting.add({"p": "base"}, (under,), ()).key

    def parents(key: int | None, nearest: int) -> list[int]:
        members: Any = [(None, [(child({}, key, index=nearest), None)])]
        landing = _Landing(HEAD, HEAD, 0, pool.version, members)
        return integrations._parents(landing)  # pyright: ignore[reportPrivateUsage]

    assert parents(None, index) == [0, index]
    assert parents(base, 0) == [0]
    waiting.confirm(under, 3)
    assert parents(base, 0) == [0, 3]
    waiting.confirm(base, 4)
    assert parents(base, 0) == [0, 4]
    pool.close()
