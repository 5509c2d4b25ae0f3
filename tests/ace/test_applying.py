"""Operations applied to a playbook: what must hold whatever is asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.ace.playbook import Add, Operation, Playbook, Remove
from tests.ace.books import OPERATIONS, PLAYBOOKS, apply_operations, book_of

LISTS = st.lists(OPERATIONS, max_size=8)
BOOK = book_of([("other", "a"), ("other", "b"), ("formulas", "c")])


def contents(playbook: Playbook) -> dict[str, str]:
    return {bullet.id: bullet.content for bullet in playbook.bullets}


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (Add("nowhere", "x"), "unknown section"),
        (Add("other", "B!"), "said already"),
        (Add("other", "- **b**"), "said already"),
        (Remove("nonsense"), "unknown id"),
        (Remove("oth-1"), "unknown id"),
    ],
)
def test_an_operation_that_cannot_be_done_is_told_and_the_others_are_done(wrong: Operation, kind: str) -> None:
    applied = apply_operations(BOOK, [Add("OTHER", "d"), Remove("oth-1"), wrong, Remove("for-3")])
    assert contents(applied.playbook) == {"oth-2": "b", "oth-4": "d"}
    assert [problem.kind for problem in applied.problems] == [kind]


@pytest.mark.parametrize(
    ("first", "other", "same"),
    [
        ("Divide a by b: a / b.", "divide a by b a/b", True),
        ("Take a - b.", "Take a + b.", False),
        ("Take a - b.", "Take a b.", False),
        ("Use x >= 2.", "Use x <= 2.", False),
        ("An offset of -5.", "An offset of 5.", False),
        ("Take a*b.", "Take a b.", False),
        ("The right-hand side.", "the right hand side", True),
        ("Round at the END", "- round, at the **end**.", True),
        ("Round at the end.", "At the end, round.", False),
    ],
)
def test_signs_of_arithmetic_make_a_difference_and_marks_of_writing_do_not(first: str, other: str, same: bool) -> None:
    applied = apply_operations(book_of([("other", first)]), [Add("other", other)])
    assert [problem.kind for problem in applied.problems] == ["said already"] * same
    assert applied.playbook.bullets[0].helpful == same


@given(PLAYBOOKS, LISTS, st.one_of(st.just(10**9), st.integers(0, 400)))
def test_whatever_is_asked_for_the_playbook_stays_one(
    playbook: Playbook, operations: list[Operation], budget: int
) -> None:
    applied = apply_operations(playbook, operations, token_budget=budget)
    after = applied.playbook
    assert Playbook.from_dict(after.to_dict()) == after
    assert after.tokens() <= budget
    assert len(applied.done) + len(applied.problems) == len(operations) + len(applied.evicted)
    assert after.next_number >= playbook.next_number
    fresh = contents(after).keys() - contents(playbook).keys()
    assert all(int(bullet_id.split("-")[1]) >= playbook.next_number for bullet_id in fresh)
    same = list(contents(after).items()) == list(contents(playbook).items())
    assert after.version == playbook.version + (not same)


def test_beyond_the_budget_what_is_worth_least_and_oldest_makes_room() -> None:
    book = book_of([("other", word * 20) for word in "abc"]).tagged([("oth-1", "helpful"), ("oth-2", "harmful")])
    room = apply_operations(book, [Add("other", "d" * 20)], token_budget=book.tokens())
    assert room.evicted == ["oth-2"]
    assert [problem.kind for problem in room.problems] == ["over the token budget"]
    tight = apply_operations(room.playbook, [Add("other", "e" * 20)], token_budget=book.tokens())
    assert tight.evicted == ["oth-3"]


@pytest.mark.parametrize("characters", [200, 9000])
def test_one_long_bullet_does_not_drive_out_the_playbook(characters: int) -> None:
    book = book_of([("other", f"{letter} " * 10) for letter in "abcdefghijkl"])
    applied = apply_operations(book, [Add("other", "x" * characters)], token_budget=book.tokens())
    if characters == 9000:
        assert applied.playbook == book
        assert [problem.kind for problem in applied.problems] == ["takes too much room"]
    assert len(applied.playbook) > len(book) // 2
    tiny = apply_operations(BOOK, [Add("other", "x" * 40), Remove("oth-2")], token_budget=BOOK.tokens())
    assert contents(tiny.playbook) == {"oth-1": "a", "for-3": "c"} or "oth-4" in tiny.playbook


def test_a_full_playbook_of_proven_bullets_still_learns() -> None:
    book = book_of([("other", word * 20) for word in "abcde"])
    full = book.tagged([(bullet.id, "helpful") for bullet in book.bullets])
    first = apply_operations(full, [Add("other", "f" * 20)], token_budget=book.tokens())
    assert first.evicted == ["oth-1"]
    assert "oth-6" in first.playbook
    second = apply_operations(first.playbook, [Add("other", "g" * 20)], token_budget=book.tokens())
    assert second.evicted == ["oth-6"], "it had its time"
    harmful = first.playbook.tagged([("oth-6", "harmful")])
    assert apply_operations(harmful, [Add("other", "g" * 20)], token_budget=book.tokens()).evicted == ["oth-6"]
