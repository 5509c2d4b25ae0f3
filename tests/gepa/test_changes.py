"""Taking prompts apart: what is a change, and texts with changes in them."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from dspy_flashevolve.gepa.changes import (
    Change,
    apply,
    changes_between,
    changes_in,
    normal,
    parts_of,
)

WORDS = st.sampled_from(
    ["always", "answer", "in", "JSON", "cite", "sources", "never", "guess", "dates", "units", "name", "steps"]
)
SENTENCES = st.lists(WORDS, min_size=2, max_size=9).map(lambda words: " ".join(words).capitalize() + ".")
MARKS = st.sampled_from(["", "", "- ", "* ", "+ ", "• ", "  - ", "> "])


def numbered(lines: list[str]) -> str:
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, start=1))


BLOCKS = st.one_of(
    st.builds(lambda mark, line: mark + line, MARKS, SENTENCES),
    SENTENCES.map("# {}".format),
    st.lists(SENTENCES, min_size=1, max_size=4).map(numbered),
    st.lists(SENTENCES, min_size=1, max_size=3).map(lambda lines: "```python\n" + "\n    ".join(lines) + "\n\n```"),
    st.lists(SENTENCES, min_size=1, max_size=3).map(lambda rows: "\n".join(f"| {row} | {row} |" for row in rows)),
    st.lists(SENTENCES, min_size=8, max_size=30).map(" ".join),
    st.builds(lambda first, rest: f"- {first}\n  {rest}", SENTENCES, SENTENCES),
    st.text(max_size=60),
    st.just(""),
)
ENDS = st.sampled_from(["\n", "\n\n", "\r\n"])
TEXTS = st.builds(lambda blocks, end: end.join(blocks), st.lists(BLOCKS, max_size=8), ENDS)
"""Prompts as people and models write them, and some that nobody does."""
RULES = st.lists(st.builds(lambda mark, line: mark + line, st.sampled_from(["", "- "]), SENTENCES), max_size=9)
"""Lists of lines, each a part."""


def of(text: str) -> dict[str, str]:
    return {"answer": text}


def found(text: str) -> set[str]:
    """What tells the parts of a text apart."""
    return {normal(part) for part in parts_of(text)} - {""}


# Parts


@given(TEXTS)
@example("a\x0bb\x1cc\x85d\u2028e")
@example("```\nnever closed\n- a")
@example(" x" * 10_000 + ". Y" * 10_000)
def test_joined_the_parts_are_the_text(text: str) -> None:
    assert "".join(parts_of(text)) == text


@given(st.text())
def test_any_text_can_be_taken_apart(text: str) -> None:
    assert "".join(parts_of(text)) == text
    assert all(parts_of(text))


def test_a_line_goes_with_what_is_indented_under_it_and_a_list_within_a_list_is_parts() -> None:
    assert parts_of("Do:\n  this\n\nthat\n") == ["Do:\n  this\n\n", "that\n"]
    assert parts_of("- one\n  - under it\n- two") == ["- one\n", "  - under it\n", "- two"]


def test_fenced_code_is_one_part() -> None:
    assert parts_of("Use:\n```\na = 1\n\nb = 2\n```\nDone.") == ["Use:\n", "```\na = 1\n\nb = 2\n```\n", "Done."]


def test_a_line_is_sentences_but_for_those_of_lists_tables_and_headings() -> None:
    assert parts_of("Be brief. Be kind, e.g. Be polite! (Or not.)") == [
        "Be brief. ", "Be kind, e.g. Be polite! ", "(Or not.)",
    ]  # fmt: skip
    for line in ("1. Be brief. Be kind.", "- Be brief. Be kind.", "| Brief. | Kind. Too. |", "# Be. Kind.", "> A. B."):
        assert parts_of(line) == [line]


@given(SENTENCES)
def test_neither_bullet_nor_number_nor_space_nor_case_tells_parts_apart(line: str) -> None:
    same = [
        line,
        f"- {line}",
        f"* {line}",
        f"12. {line}",
        f"3) {line}\n\n",
        f"  - {line.upper()}",
        line.replace(" ", "  "),
    ]
    assert len({normal(one) for one in same}) == 1
    assert len({Change("answer", one, after=other).identity for one in same for other in ("", None, "x")}) == 1


# Changes

PAIRS = st.tuples(TEXTS, TEXTS) | st.builds(
    lambda blocks, added, gone, end: (
        end.join(blocks),
        end.join([*blocks[: len(blocks) // 2], *added, *blocks[len(blocks) // 2 + gone :]]),
    ),
    st.lists(BLOCKS, max_size=8),
    st.lists(BLOCKS, min_size=1, max_size=4),
    st.integers(0, 1),
    ENDS,
)
"""A parent, and a child that is anything, or has something added in the middle and at most one block less."""


@given(PAIRS)
def test_a_child_is_taken_apart_or_is_a_rewrite_and_nothing_raises(pair: tuple[str, str]) -> None:
    parent, child = pair
    changes = changes_between(of(parent), of(child), ())
    for one in changes or ():
        assert one.component == "answer"
        assert one.part or one.replaces
    assert changes_between(of(parent), of(parent), ()) is None


@given(RULES, RULES, st.randoms(use_true_random=False))
def test_a_child_that_adds_lines_anywhere_is_its_parent_with_them(
    parent: list[str], added: list[str], rng: object
) -> None:
    there = {normal(line) for line in parent}
    new = [line for line in added if normal(line) not in there]
    assume(new)
    lines = list(parent)
    for line in new:
        lines.insert(rng.randrange(len(lines) + 1), line)  # type: ignore[attr-defined]
    changes = changes_between(of("\n".join(parent)), of("\n".join(lines)), ())
    assert changes is not None
    assert {normal(one.part) for one in changes} == {normal(line) for line in new}
    assert all(not one.replaces for one in changes), "nothing went out"
    assert found(apply(of("\n".join(parent)), changes)["answer"]) == {normal(line) for line in lines}


@given(PAIRS)
def test_a_parent_with_the_changes_has_every_added_part_and_keeps_what_nothing_replaces(pair: tuple[str, str]) -> None:
    parent, child = pair
    changes = changes_between(of(parent), of(child), ()) or []
    made = found(apply(of(parent), changes)["answer"])
    assert {normal(one.part) for one in changes if one.part} <= made
    assert found(parent) - {normal(one.replaces) for one in changes} <= made


def test_what_a_parent_says_twice_and_its_child_says_otherwise_goes_out_twice() -> None:
    parent = "Answer.\nGive all dates in ISO form.\nBe kind.\nGive all dates in ISO form.\nStay calm."
    child = "Answer.\nAlways give all dates in ISO form.\nBe kind.\nStay calm."
    changes = changes_between(of(parent), of(child), ()) or []
    assert [one.replaces.strip() for one in changes] == ["Give all dates in ISO form."]
    assert apply(of(parent), changes) == of(child)
    assert changes_in(of(parent), of(child), changes) == {0}


@given(PAIRS)
def test_putting_changes_in_twice_is_putting_them_in_once(pair: tuple[str, str]) -> None:
    parent, child = pair
    changes = changes_between(of(parent), of(child), ()) or []
    once = apply(of(parent), changes)
    assert found(apply(once, changes)["answer"]) == found(once["answer"])
    assert Counter(map(normal, parts_of(apply(once, changes)["answer"]))) == Counter(
        map(normal, parts_of(once["answer"]))
    )


@given(RULES, st.lists(RULES, min_size=1, max_size=4))
def test_what_changes_are_does_not_depend_on_the_order_in_which_children_came(
    parent: list[str], children: list[list[str]]
) -> None:
    base = of("\n".join(parent))
    taken = [changes_between(base, of("\n".join([*parent, *extra])), ()) or [] for extra in children]
    for order in itertools.islice(itertools.permutations(taken), 6):
        assert {one.identity for changes in order for one in changes} == {
            one.identity for changes in taken for one in changes
        }
        assert found(apply(base, itertools.chain(*order))["answer"]) == found(
            apply(base, itertools.chain(*taken))["answer"]
        )


@given(PAIRS, st.integers(0, 255))
def test_the_changes_in_a_text_are_found_again(pair: tuple[str, str], chosen: int) -> None:
    """A run that goes on asks which changes a candidate has."""
    parent, child = pair
    changes = changes_between(of(parent), of(child), ()) or []
    some = [one for number, one in enumerate(changes) if chosen >> number & 1]
    made = apply(of(parent), some)
    again = changes_in(of(parent), made, changes)
    if again is not None:
        assert found(apply(of(parent), (changes[number] for number in sorted(again)))["answer"]) == found(
            made["answer"]
        )


def test_a_part_in_other_words_goes_in_for_the_one_that_it_rewords() -> None:
    parent = "Answer.\n- Name the city and the year.\n- Be kind.\n"
    child = "Answer.\n- Name the city and the year of birth.\n- Be kind.\n"
    [one] = changes_between(of(parent), of(child), ()) or []
    assert (normal(one.part), normal(one.replaces)) == (
        "name the city and the year of birth.", "name the city and the year.",
    )  # fmt: skip
    assert apply(of(parent), [one]) == of(child.rstrip())


def test_a_line_of_a_wording_that_others_have_as_well_rewords_none_of_them() -> None:
    """Rules of one form, each with a word of its own: who adds one and forgets another has reworded nothing."""
    apricot, cedar, walnut, acorn = (
        f"- Mention the word {word} in each of your answers.\n" for word in ("apricot", "cedar", "walnut", "acorn")
    )
    parent = f"Answer.\n{apricot}{cedar}- Be kind.\n"
    [added] = changes_between(of(parent), of(f"Answer.\n{cedar}{walnut}- Be kind.\n"), ()) or []
    assert (normal(added.part), added.replaces) == (normal(walnut), "")
    parent = f"Answer.\n{apricot}- Be kind.\n"
    both = changes_between(of(parent), of(f"Answer.\n{walnut}{acorn}- Be kind.\n"), ()) or []
    assert [(normal(one.part), one.replaces) for one in both] == [(normal(walnut), ""), (normal(acorn), "")]
    assert found(apply(of(parent), both)["answer"]) >= {normal(one) for one in (apricot, walnut, acorn)}


def test_a_child_that_only_leaves_out_is_a_change_and_one_that_adds_as_well_is_charged_for_what_it_adds() -> None:
    parent = "Answer.\n- One.\n- Two.\n- Three.\n"
    [gone] = changes_between(of(parent), of("Answer.\n- One.\n- Three.\n"), ()) or []
    assert (gone.part, normal(gone.replaces)) == ("", "two.")
    assert apply(of(parent), [gone]) == of("Answer.\n- One.\n- Three.")
    [added] = changes_between(of(parent), of("Answer.\n- One.\n- Three.\n- Four, of course.\n"), ()) or []
    assert (normal(added.part), added.replaces) == ("four, of course.", "")


def test_a_rewrite_and_a_change_of_code_cannot_be_taken_apart() -> None:
    parent = {"answer": "Answer the question.\nBe brief.", "tool": "def f():\n    return 1\n"}
    assert changes_between(parent, {**parent, "answer": "Something else altogether."}, ()) is None
    longer = {**parent, "tool": parent["tool"] + "\nx = 2\n"}
    assert changes_between(parent, longer, ["tool"]) is None
    assert changes_between(parent, {**longer, "answer": parent["answer"] + "\nCite."}, ["tool"]) is None
    assert changes_between(parent, longer, ()) is not None


def test_a_text_that_is_json_is_not_taken_apart() -> None:
    rules = ["Be brief.", "Be kind.", "Count to ten."]
    parent, child = (json.dumps({"rules": rules[:count]}, indent=1) for count in (2, 3))
    assert changes_between({"a": parent}, {"a": child}, ()) is None
    assert changes_between({"a": "Answer."}, {"a": parent}, ()) is None
    assert changes_between({"a": parent}, {"a": parent + " Be brief."}, ()) is None


def test_components_are_taken_apart_each_for_itself() -> None:
    parent = {"one": "Answer.", "two": "Check."}
    child = {"one": "Answer.\nBe brief.", "two": "Check.\nBe brief."}
    changes = changes_between(parent, child, ()) or []
    assert [one.component for one in changes] == ["one", "two"]
    assert len({one.identity for one in changes}) == 2
    assert apply(parent, changes) == child
    assert apply(parent, changes[1:]) == {"one": "Answer.", "two": "Check.\nBe brief."}


@given(TEXTS)
def test_no_changes_leave_a_text_as_it_is(text: str) -> None:
    assert apply(of(text), []) == of(text)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_part_goes_where_it_stood_and_to_the_end_where_its_neighbour_is_gone(end: str) -> None:
    text = end.join(["One.", "Two.", "Three."])
    assert parts_of(apply(of(text), [Change("answer", "New.", after="Two.")])["answer"])[2].strip() == "New."
    assert apply(of(text), [Change("answer", "New.", after="gone")])["answer"].endswith("Three.\nNew.")
    assert apply(of(text), [Change("answer", "New.")])["answer"].startswith("New.\nOne.")
