"""What a repair said, and what becomes of the child for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from gepa.strategies.proposal_sampling import ProposalTask

from dspy_flashevolve.engine.staleness import Discard, StaleChild
from dspy_flashevolve.gepa.evaluate import as_batch
from dspy_flashevolve.gepa.records import Base, Child, Parent
from dspy_flashevolve.gepa.repair import SPARE_CHARACTERS, Repair, outcome_of, read_answer, stale_child
from dspy_flashevolve.modules.rewriting import ChildVerdict

HEAD = {"p": "head", "q": "head"}
CHILD = StaleChild(1, {"p": "mine"}, {"p": "parent"}, 0.5)


def child(texts: dict[str, str], base: int | None = None, index: int = 0) -> Child:
    task: Any = ProposalTask(index, {"p": "parent", "q": "parent"}, [0, 1], ["a", "b"])
    evaluation = as_batch([])
    evaluation.scores.extend([0.25, 0.75])
    return Child(Parent(0, task, evaluation, base), texts, ("said",))


# Reading


def said(texts: Any, verdicts: list[tuple[int, str, str]], **more: Any) -> Repair:
    judged = [SimpleNamespace(child=number, verdict=verdict, reason=reason) for number, verdict, reason in verdicts]
    return read_answer(SimpleNamespace(texts=texts, verdicts=judged, **more), CHILD, 3)


def test_texts_and_verdicts_are_read_and_what_nobody_asked_about_is_dropped() -> None:
    made = said(
        {"p": "new", "q": "not changed by the child", "r": "no component"},
        [(1, "orthogonal", "it is new"), (1, "excellent", "no verdict"), (9, "subsumed", "no child")],
    )
    verdicts = [ChildVerdict(child=1, verdict="orthogonal", reason="it is new")]
    assert made == Repair(base=3, texts={"p": "new"}, verdicts=verdicts)


def test_where_a_component_could_not_be_read_the_rest_is_not_used() -> None:
    made = said({"p": "new"}, [(1, "orthogonal", "")], failed={"q": "no reply"})
    assert made.failed == outcome_of(made, CHILD, HEAD) == "q: no reply"


# Deciding

UNUSABLE = "the reply changes nothing, and does not say that there is nothing to change"
SUBSUMED = Discard("subsumed by what was committed meanwhile")
CONFLICT = Discard("in conflict with what was committed meanwhile")


@pytest.mark.parametrize(
    ("verdicts", "text", "outcome"),
    [
        (["orthogonal"], "new", {"p": "new"}),
        (["orthogonal"], "head ", UNUSABLE),
        (["orthogonal"], None, UNUSABLE),
        (["subsumed"], None, SUBSUMED),
        (["subsumed"], "head", SUBSUMED),
        (["subsumed"], "new", SUBSUMED),
        (["conflicting"], None, CONFLICT),
        (["conflicting"], "head", CONFLICT),
        (["conflicting"], "reconciled", {"p": "reconciled"}),
        ([], "new", {"p": "new"}),
        ([], "head", UNUSABLE),
        ([], None, UNUSABLE),
        (["subsumed", "orthogonal"], "new", {"p": "new"}),
        (["subsumed", "conflicting"], None, CONFLICT),
    ],
)
def test_the_verdict_says_whether_a_child_is_dropped_and_the_text_what_it_is_patched_to(
    verdicts: list[str], text: str | None, outcome: Any
) -> None:
    made = said({} if text is None else {"p": text}, [(1, verdict, "so") for verdict in verdicts])
    assert outcome_of(made, CHILD, HEAD) == outcome


def test_a_child_is_told_with_what_it_changed_its_parents_score_and_how_far_it_is_behind() -> None:
    assert stale_child(child({"p": "mine"}), 3) == StaleChild(1, {"p": "mine"}, {"p": "parent"}, 0.5, ("said",), 3)


@pytest.mark.parametrize("length", [8 + SPARE_CHARACTERS, 9 + SPARE_CHARACTERS])
def test_a_text_may_be_as_long_as_what_it_was_made_from_and_some_more(length: int) -> None:
    outcome = outcome_of(Repair(base=3, texts={"p": "x" * length}), CHILD, HEAD)
    assert isinstance(outcome, str) == (length > 8 + SPARE_CHARACTERS)


def test_a_patched_child_stands_on_its_base_and_has_it_and_its_parent_for_parents() -> None:
    step: Any = SimpleNamespace(number=4)
    plain, stale = child({"p": "mine"}, base=7, index=2), child({"p": "mine"}, base=7, index=2)
    patched = Child(stale.parent, {"p": "patched"}, stale.feedback, Base(5, HEAD))
    assert (plain.candidate, plain.base) == ({"p": "mine", "q": "parent"}, 7)
    assert (patched.candidate, patched.source, patched.base) == ({"p": "patched", "q": "head"}, HEAD, None)
    assert (plain.proposal(step).parent_program_ids, patched.proposal(step).parent_program_ids) == ([2], [5, 2])
