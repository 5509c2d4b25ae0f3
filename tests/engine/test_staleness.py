"""Staleness policies: pure decisions, what is discarded or repaired, refused values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.staleness import (
    PLACES,
    Admit,
    Discard,
    Full,
    Guarded,
    History,
    Integrate,
    Look,
    Reflective,
    check_looks,
    policy_named,
)

VERSION = 20
LOOKS = st.lists(st.builds(Look, st.sampled_from(PLACES), st.integers(0, VERSION)), max_size=6)


@given(st.integers(0, 8), LOOKS)
def test_full_admits_all_guarded_discards_what_is_too_far_behind_and_reflective_repairs_it(
    gap: int, looks: list[Look]
) -> None:
    for look in looks:
        behind, history = VERSION - look.seen, History(VERSION)
        discarded = Discard(f"{behind} commits behind, more than max_gap={gap}")
        assert Full().decide(look, history) == Admit()
        assert Guarded(gap).decide(look, history) == (discarded if behind > gap else Admit())
        assert Reflective(gap).decide(look, history) == (Integrate() if behind >= gap else Admit())


@given(st.integers(0, 6), st.integers(0, VERSION))
def test_what_was_made_from_a_candidate_that_did_not_last_is_stale_whatever_its_gap(min_gap: int, seen: int) -> None:
    look = Look("after_propose", seen, orphaned=True)
    assert Reflective(min_gap).decide(look, History(VERSION)) == Integrate()


def test_the_names_are_the_papers_and_what_acts_on_stale_items_looks_before_the_gate() -> None:
    named = [policy_named(name) for name in ("full", "guarded", "reflective")]
    assert named == [Full(), Guarded(max_gap=8), Reflective()]
    assert [policy.looks for policy in named[1:]] == [("after_propose",)] * 2


@pytest.mark.parametrize("name", ["patch", "edits", "Full", "", None, 3, Full, Reflective, object()])
def test_a_name_or_an_object_that_is_no_policy_is_refused_with_what_is_expected(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected one of 'full', 'guarded', 'reflective', or a policy"):
        policy_named(name)


def test_guarded_and_reflective_refuse_a_negative_gap() -> None:
    with pytest.raises(ConfigurationError, match="Reflective: min_gap is -1, expected a whole number of at least 0"):
        Reflective(-1)
    with pytest.raises(ConfigurationError, match="Guarded: max_gap is -1, expected 0 or more"):
        Guarded(-1)


@pytest.mark.parametrize("looks", [(), ("after_screen", "after_screen"), ("before_lunch",)])
def test_looks_name_places_each_once(looks: tuple[Any, ...]) -> None:
    for make in (lambda: Full(looks), lambda: Guarded(1, looks), lambda: check_looks(looks, "Mine")):
        with pytest.raises(ConfigurationError, match=r"(Full|Guarded|Mine): looks is .*, expected one or more of"):
            make()
