"""ACE's stages, one sample at a time over a learner that says what it is told to say."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.ace.operations import Add, Remove, Update
from dspy_flashevolve.ace.playbook import Playbook
from dspy_flashevolve.engine.events import Looked
from dspy_flashevolve.engine.item import EndKind
from dspy_flashevolve.engine.staleness import Full, Guarded, Reflective, StalenessPolicy
from tests.ace.books import book_of
from tests.ace.learners import Workshop

BOOK = book_of([("other", "Mind units."), ("other", "Round late.")])
GUARDED = Guarded(max_gap=2, looks=("before_commit",))


def walked(shop: Workshop, stage: str = "rollout") -> tuple[list[str], Any]:
    return anyio.run(shop.walk, shop.sample(), stage)


def texts(shop: Workshop) -> list[str]:
    return [one.content for one in shop.writer.playbook.bullets]


def test_a_right_answer_is_reflected_on_once_and_not_tried_again() -> None:
    shop = Workshop(BOOK)
    shop.learner.scores = lambda attempt: 1.0
    passed, _ = walked(shop)
    assert passed == ["rollout", "reflect", "curate", "apply"]
    assert (shop.stages.counts.right_at_once, shop.stages.counts.corrected) == (1, 0)


def test_a_wrong_answer_is_tried_again_with_the_reflection_until_it_is_right() -> None:
    shop = Workshop(BOOK)
    shop.learner.scores = lambda attempt: float(attempt == 2)
    passed, _ = walked(shop)
    assert passed == ["rollout", "reflect", "rollout", "reflect", "rollout", "curate", "apply"]
    attempts = [one for one in shop.learner.asked if one[0] == "attempt"]
    assert attempts == [("attempt", ""), ("attempt", "an insight"), ("attempt", "an insight")]
    assert (shop.stages.counts.right_at_once, shop.stages.counts.corrected) == (0, 1)
    assert len(shop.first_attempts) == 1


@given(st.integers(1, 5))
def test_no_sample_has_more_rounds_than_it_may(max_rounds: int) -> None:
    shop = Workshop(BOOK, max_rounds=max_rounds)
    passed, _ = walked(shop)
    assert passed.count("reflect") == max_rounds
    assert passed.count("rollout") == 1 + max_rounds


def test_a_reflection_that_says_nothing_ends_the_rounds_and_its_tags_still_count() -> None:
    shop = Workshop(BOOK)
    shop.learner.text, shop.learner.tags = "", (("oth-1", "harmful"),)
    passed, finish = walked(shop)
    assert passed == ["rollout", "reflect", "apply"]
    assert finish.end.kind is EndKind.REJECTED
    assert shop.writer.playbook.bullets[0].harmful == 1


def test_tags_count_once_a_sample_leave_the_version_and_pass_by_what_is_gone() -> None:
    shop = Workshop(BOOK)
    shop.learner.tags = (("oth-1", "helpful"), ("oth-9", "harmful"))
    _, finish = walked(shop)
    assert shop.writer.playbook.bullets[0].helpful == 1, "three reflections, one sample"
    assert (shop.writer.playbook.version, finish.end.kind) == (BOOK.version, EndKind.REJECTED)
    assert shop.writer.problems["tag of a gone bullet"] == 1


def test_operations_are_applied_and_what_is_wrong_with_some_does_not_stop_the_others() -> None:
    shop = Workshop(BOOK)
    shop.learner.operations = (
        Add("other", "Sum first."), Add("nowhere", "x"), Remove("oth-9"), Update("oth-1", "a"), Remove("oth-1")
    )  # fmt: skip
    _, finish = walked(shop)
    assert finish.end.kind is EndKind.COMMITTED
    assert texts(shop) == ["a", "Round late.", "Sum first."]
    assert dict(shop.writer.operations) == {"add": 1, "update": 1}
    found = {kind: count for kind, count in shop.writer.problems.items() if kind not in ("unknown tag",)}
    assert found == {"unknown operation": 1, "unknown section": 1, "unknown id": 1, "contradiction": 1}


def test_texts_are_made_ready_for_comparison_before_they_are_merged() -> None:
    shop = Workshop(BOOK)
    shop.learner.operations = (Add("other", "Sum first."),)
    walked(shop)
    assert ("prepare", ["Mind units.", "Round late.", "Sum first."]) in shop.learner.asked
    assert shop.applications == 1


# Staleness


def stale(policy: StalenessPolicy, content: str, others: list[str]) -> tuple[Workshop, list[str]]:
    """A sample whose ADD is curated while others add bullets, each in a version of its own."""
    shop = Workshop(BOOK, policy)
    shop.learner.scores = lambda attempt: 1.0
    shop.learner.operations = (Add("other", content), Update("oth-1", "Mind all units."))
    shop.learner.tags = (("oth-2", "helpful"),)

    def meanwhile() -> None:
        for other in others:
            shop.writer.apply([Add("other", other)], shop.writer.playbook.version)
        others.clear()

    shop.learner.meanwhile = meanwhile
    passed, _ = walked(shop)
    return shop, passed


NEAR, NEW = "Always check the sign of each of the terms", "Convert percentages"


def test_full_admits_stale_additions_as_they_are() -> None:
    shop, passed = stale(Full(looks=("before_commit",)), f"{NEAR} first.", [f"{NEAR}."])
    assert texts(shop)[2:] == [f"{NEAR}.", f"{NEAR} first."]
    assert "reconcile" not in passed
    assert dict(shop.stages.counts.additions) == {"admitted": 1}


def test_guarded_merges_an_addition_into_the_newer_bullet_that_nearly_says_it() -> None:
    shop, _ = stale(GUARDED, f"{NEAR} first.", [f"{NEAR}."])
    assert texts(shop)[2:] == [f"{NEAR}."]
    assert shop.writer.playbook.bullets[2].helpful == 1
    assert shop.stages.counts.additions["merged"] == 1
    assert shop.writer.problems["repeats a newer bullet"] == 1


def test_guarded_admits_what_is_new_and_not_too_late() -> None:
    shop, _ = stale(GUARDED, NEW, [NEAR, "b"])
    assert NEW in texts(shop)
    assert shop.stages.counts.additions["admitted"] == 1


def test_guarded_drops_what_is_too_late_and_only_additions() -> None:
    shop, _ = stale(GUARDED, NEW, ["a", "b", "c"])
    assert NEW not in texts(shop)
    assert texts(shop)[0] == "Mind all units."
    assert shop.stages.counts.additions["dropped"] == 1
    assert shop.writer.problems["stale addition"] == 1
    (look,) = [event for event in shop.events if isinstance(event, Looked)]
    assert (look.decision, look.gap) == ("discard", 3)


def test_an_addition_that_nobody_overtook_is_no_business_of_the_policy() -> None:
    shop, passed = stale(Reflective(), NEW, [])
    assert (NEW in texts(shop), passed[-1], shop.events) == (True, "apply", [])


def test_reflective_lets_the_curator_read_stale_additions_and_the_rest_does_not_wait() -> None:
    shop = Workshop(BOOK, Reflective())
    shop.learner.operations = (Add("other", NEW), Update("oth-1", "Mind all units."))
    shop.learner.tags = (("oth-2", "helpful"),)
    shop.learner.reconciled = (Update("oth-3", "merged text"),)
    shop.learner.scores = lambda attempt: 1.0
    seen: list[list[str]] = []

    def meanwhile() -> None:
        if not seen:
            shop.writer.apply([Add("other", "b")], shop.writer.playbook.version)
        seen.append(texts(shop))

    shop.learner.meanwhile = meanwhile
    passed, _ = walked(shop)
    assert passed[-3:] == ["apply", "reconcile", "apply"]
    assert ("reconcile", [NEW], ["oth-1", "oth-3"]) in shop.learner.asked
    assert seen[1] == ["Mind all units.", "Round late.", "b"], "the update did not wait for the model"
    assert texts(shop) == ["Mind all units.", "Round late.", "merged text"]
    assert shop.writer.playbook.bullets[1].helpful == 1, "tags count once"
    assert dict(shop.stages.counts.additions) == {"admitted": 0, "merged": 1, "dropped": 0}


def test_what_is_reconciled_is_not_reconciled_again_but_compared_by_words() -> None:
    shop = Workshop(BOOK, Reflective())
    shop.learner.operations = shop.learner.reconciled = (Add("other", f"{NEAR} first."),)
    shop.learner.scores = lambda attempt: 1.0
    others = ["b", f"{NEAR}."]
    shop.learner.meanwhile = lambda: shop.writer.apply([Add("other", others.pop(0))], 99) and None
    passed, _ = walked(shop)
    assert passed.count("reconcile") == 1
    assert texts(shop)[2:] == ["b", f"{NEAR}."]


def test_an_update_of_what_others_changed_meanwhile_does_not_overwrite_it() -> None:
    shop = Workshop(BOOK)
    shop.learner.operations = (Update("oth-1", "late"),)
    shop.learner.meanwhile = lambda: shop.writer.apply([Update("oth-1", "early")], 99) and None
    walked(shop)
    assert texts(shop)[0] == "early"
    assert shop.writer.problems["overtaken"] == 1


@pytest.mark.parametrize("budget", [60, 100])
def test_the_token_budget_holds_after_every_merge(budget: int) -> None:
    shop = Workshop(Playbook(), token_budget=budget)
    for number in range(30):
        shop.learner.operations = (Add("other", f"Insight number {number} of many."),)
        walked(shop, "curate" if number else "rollout")
        assert shop.writer.playbook.tokens() <= budget
    assert shop.writer.evicted > 0
    assert shop.writer.playbook.bullets
