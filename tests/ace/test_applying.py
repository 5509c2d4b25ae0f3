"""Operations applied to a playbook: what must hold whatever is asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.ace.operations import Add, Merge, Operation, Remove, Update, ids_of
from dspy_flashevolve.ace.playbook import Playbook, approximate_tokens
from tests.ace.books import OPERATIONS, PLAYBOOKS, apply_operations, book_of, writer_of

LISTS = st.lists(OPERATIONS, max_size=8)
BOOK = book_of([("other", "a"), ("other", "b"), ("formulas", "c")])


def contents(playbook: Playbook) -> dict[str, str]:
    return {bullet.id: bullet.content for bullet in playbook.bullets}


def test_each_operation_does_what_it_says() -> None:
    book = BOOK.tagged([("oth-1", "helpful"), ("oth-2", "helpful"), ("oth-2", "harmful")])
    assert contents(apply_operations(book, [Add("STRATEGIES", "d")]).playbook) == {**contents(BOOK), "str-4": "d"}
    assert contents(apply_operations(book, [Update("oth-2", "B")]).playbook) == {**contents(BOOK), "oth-2": "B"}
    assert contents(apply_operations(book, [Remove("oth-1")]).playbook) == {"oth-2": "b", "for-3": "c"}
    applied = apply_operations(book, [Merge(("oth-2", "oth-1"), "ab")]).playbook
    assert contents(applied) == {"oth-2": "ab", "for-3": "c"}
    assert (applied.bullets[0].helpful, applied.bullets[0].harmful) == (2, 1)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (Add("nowhere", "x"), "unknown section"),
        (Add("other", "B!"), "said already"),
        (Update("oth-9", "x"), "unknown id"),
        (Remove("nonsense"), "unknown id"),
        (Merge(("oth-1", "oth-9"), "x"), "unknown id"),
    ],
)
def test_an_operation_that_cannot_be_done_is_told_and_the_others_are_done(wrong: Operation, kind: str) -> None:
    applied = apply_operations(BOOK, [Add("other", "d"), wrong, Update("for-3", "e")])
    assert contents(applied.playbook) == {"oth-1": "a", "oth-2": "b", "for-3": "e", "oth-4": "d"}
    assert [problem.kind for problem in applied.problems] == [kind]


@pytest.mark.parametrize(
    ("pair", "kind", "left"),
    [
        ([Update("oth-1", "x"), Remove("oth-1")], "contradiction", "x"),
        ([Update("oth-1", "x"), Update("oth-1", "y")], "contradiction", "x"),
        ([Remove("oth-1"), Update("oth-1", "x")], "contradiction", None),
        ([Remove("oth-1"), Remove("oth-1")], "said twice", None),
        ([Merge(("oth-1", "oth-2"), "m"), Remove("oth-2")], "contradiction", "m"),
        ([Remove("oth-2"), Merge(("oth-1", "oth-2"), "m")], "contradiction", "a"),
    ],
)
def test_of_two_operations_on_one_bullet_the_first_counts(pair: list[Operation], kind: str, left: str | None) -> None:
    applied = apply_operations(BOOK, [*pair, Add("other", "z")])
    assert contents(applied.playbook).get("oth-1") == left
    assert "z" in contents(applied.playbook).values()
    assert [problem.kind for problem in applied.problems] == [kind]


def test_what_others_changed_since_the_curator_looked_is_not_overwritten() -> None:
    writer = writer_of(BOOK)
    writer.apply([Update("oth-1", "new")], BOOK.version)
    writer.apply([Update("oth-1", "old idea"), Remove("oth-2")], BOOK.version)
    assert contents(writer.playbook) == {"oth-1": "new", "for-3": "c"}
    assert writer.counts.problems == {"overtaken": 1}
    assert writer.apply([Update("oth-1", "again")], writer.playbook.version)


def test_newer_bullets_are_those_written_or_changed_since() -> None:
    writer = writer_of(BOOK)
    writer.apply([Update("oth-1", "new"), Add("other", "d")], BOOK.version)
    assert [bullet.id for bullet in writer.newer_than(BOOK.version)] == ["oth-1", "oth-4"]
    assert writer.newer_than(writer.playbook.version) == []


@given(PLAYBOOKS, LISTS, st.one_of(st.just(10**9), st.integers(0, 120)))
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
    same = [(o.id, o.content) for o in after.bullets] == [(o.id, o.content) for o in playbook.bullets]
    assert after.version == playbook.version + (not same)


@given(PLAYBOOKS, LISTS)
def test_a_list_without_what_could_not_be_done_does_the_same(playbook: Playbook, operations: list[Operation]) -> None:
    applied = apply_operations(playbook, operations)
    again = apply_operations(playbook, applied.done)
    assert contents(again.playbook) == contents(applied.playbook)
    assert not again.problems


@given(PLAYBOOKS, LISTS, LISTS)
def test_lists_about_different_bullets_give_the_same_texts_in_any_order(
    playbook: Playbook, first: list[Operation], other: list[Operation]
) -> None:
    ours = [o for o in first if not isinstance(o, Add)]
    theirs = [o for o in other if not isinstance(o, Add)]
    if {i for o in ours for i in ids_of(o)} & {i for o in theirs for i in ids_of(o)}:
        return
    forth = apply_operations(apply_operations(playbook, ours).playbook, theirs).playbook
    back = apply_operations(apply_operations(playbook, theirs).playbook, ours).playbook
    assert contents(forth) == contents(back)


def test_beyond_the_budget_what_is_worth_least_and_oldest_makes_room() -> None:
    book = book_of([("other", word * 20) for word in "abc"]).tagged([("oth-1", "helpful"), ("oth-2", "harmful")])
    room = apply_operations(book, [Add("other", "d" * 20)], token_budget=book.tokens())
    assert room.evicted == ["oth-2"]
    assert [problem.kind for problem in room.problems] == ["over the token budget"]
    tight = apply_operations(room.playbook, [Add("other", "e" * 20)], token_budget=book.tokens())
    assert tight.evicted == ["oth-3"]


@pytest.mark.long
@pytest.mark.parametrize(
    "operation",
    [Add("other", "x" * 9000), Update("oth-1", "x" * 9000), Merge(("oth-1", "oth-2"), "x" * 9000)],
)
def test_what_alone_is_too_long_changes_nothing(operation: Operation) -> None:
    applied = apply_operations(BOOK, [operation, Remove("oth-2")], token_budget=99)
    assert contents(applied.playbook) == {"oth-1": "a", "for-3": "c"}
    assert [problem.kind for problem in applied.problems] == ["longer than the token budget"]
    assert applied.evicted == []


@pytest.mark.parametrize(
    "operation", [Add("other", "x" * 200), Update("oth-1", "x" * 200), Merge(("oth-1", "oth-2"), "x" * 200)]
)
def test_one_operation_does_not_drive_out_the_playbook(operation: Operation) -> None:
    book = book_of([("other", f"{letter} " * 10) for letter in "abcdefghijkl"])
    applied = apply_operations(book, [operation], token_budget=book.tokens())
    assert applied.playbook == book
    assert [problem.kind for problem in applied.problems] == ["takes too much room"]


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


def test_what_makes_room_is_found_in_few_counts() -> None:
    book = book_of([("other", f"insight {number}") for number in range(300)])
    counts = 0

    def counting(text: str) -> int:
        nonlocal counts
        counts += 1
        return approximate_tokens(text)

    writer = writer_of(book, token_budget=200, count_tokens=counting)
    writer.apply([], book.version)
    assert writer.counts.evicted > 200
    assert counts < 40


def test_tokens_are_counted_by_the_users_counter() -> None:
    applied = apply_operations(BOOK, [Add("other", "d")], token_budget=3, count_tokens=lambda text: text.count("["))
    assert len(applied.playbook) == 3
    assert approximate_tokens("ü" * 4) == 2
