"""Edits of prompts as data: parts, patches, and texts with patches in them."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dspy_flashevolve.gepa.edits import Edit, EditedText, Patches
from dspy_flashevolve.gepa.parts import parts_of
from tests.gepa.test_edits import edit

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
    st.sampled_from(["Keywords:", "Input:", "Output:", "Input:\nThe pump is broken.\nOutput:\nurgent", "## Format"]),
    st.lists(SENTENCES, min_size=1, max_size=3).map(lambda lines: "- Do:\n" + "\n".join(f"  - {one}" for one in lines)),
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


def texts_of(text: str) -> list[str]:
    return [part.text for part in parts_of(text)]


def joined(text: str) -> str:
    parts = parts_of(text)
    return "".join(part.before + part.text for part in parts) + parts[-1].after if parts else text


def take(patches: Patches, chosen: frozenset[int], *edits: Edit) -> frozenset[int]:
    """The patches in a text once these edits are made of it."""
    numbers = patches.take(0, chosen, {"answer": edits})
    assert numbers is not None
    return numbers


def together(parent: str, *children: list[Edit]) -> str:
    """The parent with the edits of several of its children."""
    patches = Patches(of(parent))
    numbers = {number for edits in children for number in take(patches, frozenset(), *edits)}
    return patches.render(numbers)["answer"]


# Parts


@given(TEXTS)
@example("a\x0bb\x1cc\x85d\u2028e")
@example("```\nnever closed\n- a")
@example(" x" * 10_000 + ". Y" * 10_000)
def test_joined_with_the_space_around_them_the_parts_are_the_text(text: str) -> None:
    assert joined(text) == text
    assert all(part.text.strip() and part.text == part.text.rstrip() for part in parts_of(text))


def test_what_is_indented_under_a_line_belongs_to_it_and_so_does_a_list_within_a_list() -> None:
    assert texts_of("Do:\n  this\n\nthat\n") == ["Do:\n  this", "that"]
    nested = "- one\n  - under it\n\n    - and under that\n  more"
    assert texts_of(f"{nested}\n- two") == [nested, "- two"]
    assert texts_of("Do:\n  - one\n  - two\nEnd") == ["Do:", "  - one", "  - two", "End"]


def test_fenced_code_and_a_table_are_one_part_each() -> None:
    assert texts_of("Use:\n```\na = 1\n\nb = 2\n```\nDone.") == ["Use:", "```\na = 1\n\nb = 2\n```", "Done."]
    assert texts_of("See:\n| a | b |\n|---|---|\n| 1 | 2 |\nDone.") == [
        "See:",
        "| a | b |\n|---|---|\n| 1 | 2 |",
        "Done.",
    ]


def test_hard_wrapped_prose_is_sentences_and_not_lines() -> None:
    wrapped = (
        "Read the whole question with care before you begin to answer\nit, and then write. Keep the answer\nshort."
    )
    assert texts_of(wrapped) == [wrapped.partition(" Keep")[0], "Keep the answer\nshort."]
    assert texts_of("Label one\nLabel two") == ["Label one", "Label two"]


def test_a_labelled_input_and_its_output_are_one_part() -> None:
    pairs = ["Input: The pump is broken. Now.\nOutput: urgent", "Input: A lamp is out.\nOutput: routine"]
    assert texts_of("Examples\n" + "\n".join(pairs)) == ["Examples", *pairs]


# The invariants

EDITS = st.lists(st.builds(edit, st.sampled_from(["add", "replace", "remove"]), st.integers(-1, 9), BLOCKS), max_size=5)


def words_in(text: str) -> set[str]:
    return set(re.findall(r"[^\W\d]+", text.lower()))


@pytest.mark.long
@given(TEXTS, st.lists(EDITS, min_size=1, max_size=4))
def test_a_child_of_what_was_rendered_is_what_is_rendered_of_the_patches_in_it(
    text: str, generations: list[list[Edit]]
) -> None:
    """But for space, and for a part that is put in twice, which stands there once."""
    patches, numbers = Patches(of(text)), frozenset[int]()
    for edits in generations:
        parent = patches.render(numbers)["answer"]
        child, made = EditedText.of(parent, edits), patches.take(0, numbers, {"answer": edits})
        if made is None:
            break
        numbers = made
        if "```" not in child:  # a fence that an edit leaves open makes a whole text
            assert words_in(patches.render(numbers)["answer"]) == words_in(child)
    again = Patches.from_json(json.loads(json.dumps(patches.to_json())))
    assert again.render(numbers) == patches.render(numbers)


@given(TEXTS, EDITS)
def test_parts_that_no_edit_names_stay_in_order_whatever_else_is_chosen(text: str, edits: list[Edit]) -> None:
    named = {one.part for one in edits if one.action != "add"}
    kept = [part.text for number, part in enumerate(parts_of(text), start=1) if number not in named]
    patches = Patches(of(text))
    numbers = take(patches, frozenset(), *edits)
    for chosen in (numbers, [number for number in numbers if number % 2]):
        made, at = patches.render(chosen)["answer"], 0
        for part in kept:
            line = part.splitlines()[0].lstrip("0123456789")  # lists are numbered anew
            at = made.index(line, at) + len(line)


@given(TEXTS)
def test_no_patches_leave_a_text_as_it_is(text: str) -> None:
    assert Patches(of(text)).render(()) == of(text)
    assert EditedText.of(text, []) == text


RULES = ["- Be brief.", "- Cite sources.", "- Name units.", "- Never guess."]


@given(st.lists(st.lists(st.sampled_from(RULES), min_size=1, max_size=3, unique=True), min_size=2, max_size=4))
def test_what_several_children_add_to_one_part_does_not_depend_on_which_came_first(children: list[list[str]]) -> None:
    made = {
        tuple(sorted(together("Answer.\n- Be kind.\n\nEnd.", *order).splitlines()))
        for order in itertools.permutations([[edit("add", 2, rule) for rule in rules] for rules in children])
    }
    assert made == {tuple(sorted({"Answer.", "- Be kind.", "", "End.", *(rule for one in children for rule in one)}))}


# Where an edit lands

SECTIONS = """## Billing
Keywords:
- invoice
- refund

## Repairs
Keywords:
- broken
- leak

## Access
Keywords:
- password"""


@pytest.mark.parametrize(("section", "part"), [("Billing", 2), ("Repairs", 6), ("Access", 10)])
def test_a_line_goes_behind_the_part_that_the_edit_names_though_others_are_the_same(section: str, part: int) -> None:
    child, other = [edit("add", part, "- urgent")], [edit("add", 8, "- drip")]
    expected = SECTIONS.replace(f"## {section}\nKeywords:\n", f"## {section}\nKeywords:\n- urgent\n")
    assert together(SECTIONS, child) == expected
    both = expected.replace("- leak", "- leak\n- drip")
    assert together(SECTIONS, child, other) == together(SECTIONS, other, child) == both


def test_an_equal_line_under_two_headings_is_two_patches_and_under_one_it_is_one() -> None:
    patches = Patches(of(SECTIONS))
    for part in (4, 11, 4):
        take(patches, frozenset(), edit("add", part, "- please help"))
    assert len(patches.by_number) == 2
    expected = SECTIONS.replace("- refund", "- refund\n- please help") + "\n- please help"
    assert patches.render({1, 2})["answer"] == expected


def test_of_equal_sentences_of_two_children_one_is_in_a_text_and_taken_out_it_comes_back_from_neither() -> None:
    patches, line = Patches(of(SECTIONS)), "- Never use an abbreviation here."
    for part in (4, 11):
        take(patches, frozenset(), edit("add", part, line))
    both = patches.render({1, 2})["answer"]
    assert both.count(line) == 1
    without = take(patches, frozenset({1, 2}), edit("remove", texts_of(both).index(line) + 1))
    assert patches.render(without)["answer"] == SECTIONS


def test_a_sentence_that_is_moved_is_neither_lost_nor_doubled() -> None:
    text = "Answer.\n- Never use an abbreviation here.\n- Be kind."
    edits = [edit("remove", 2), edit("add", 3, "- Never use an abbreviation here.")]
    assert EditedText.of(text, edits) == EditedText.of(text, edits[::-1])
    assert EditedText.of(text, edits) == "Answer.\n- Be kind.\n- Never use an abbreviation here."


def test_numbered_lists_of_several_children_are_numbered_from_one_to_the_last() -> None:
    parent = "Do:\n1. Read.\n2. Think.\n3. Answer.\n\nThen:\n1. Check."
    children = [edit("add", 2, "2. Note the dates.")], [edit("add", 4, "4. Cite your sources.")], [edit("remove", 2)]
    assert together(parent, *children) == (
        "Do:\n1. Note the dates.\n2. Think.\n3. Answer.\n4. Cite your sources.\n\nThen:\n1. Check."
    )


def test_no_blank_line_comes_into_a_list_and_none_is_lost_around_it() -> None:
    parent = "Do:\n\n- One.\n- Two.\n\nThen stop."
    both = together(parent, [edit("add", 1, "- Zero.")], [edit("add", 3, "- Three.")])
    assert both == "Do:\n\n- Zero.\n- One.\n- Two.\n- Three.\n\nThen stop."


def test_children_that_replace_the_same_line_keep_what_they_add_beside_it_behind_it() -> None:
    patches = Patches(of("Answer the question."))
    for number, word in enumerate(("cough", "rash")):
        take(patches, frozenset(), edit("replace", 1, f"Answer with a code, {word}.\n- K1{number}: {word}."))
    texts = {patches.render({first, 2, 4})["answer"] for first in (1, 3)}
    assert texts == {f"Answer with a code, {word}.\n- K10: cough.\n- K11: rash." for word in ("cough", "rash")}
    assert patches.that_fit([1, 2, 3, 4]) == [1, 2, 4], "a text has one of them"


def test_the_replacement_of_a_line_that_another_patch_put_in_is_a_rival_of_that_patch() -> None:
    patches, base = Patches(of("Answer.\n- Be brief.")), frozenset[int]()
    first = take(patches, base, edit("replace", 2, "- Be short."))
    second = take(patches, first, edit("replace", 2, "- Use ten words."))
    assert (first, second) == ({1}, {2})
    assert patches.render(second)["answer"] == "Answer.\n- Use ten words."
    assert patches.replaced(patches.by_number[2]) == "- Be brief.", "without the other patch that is what goes"
    assert patches.that_fit([2, 1]) == [2]
    third = take(patches, second, edit("remove", 2))
    assert patches.render(third)["answer"] == "Answer.", "and without what it replaced"


def test_what_is_added_to_a_new_section_needs_it_and_a_line_beside_a_line_does_not() -> None:
    patches = Patches(of("Answer."))
    section = take(patches, frozenset(), edit("add", 1, "## Style\n- Be brief.\n- Be kind."))
    take(patches, section, edit("add", 4, "- Be calm."))
    line = take(patches, frozenset(), edit("add", 1, "- Think."))
    take(patches, line, edit("add", 2, "- Read."))
    assert [patch.needs for patch in patches.by_number.values()] == [set(), {1}, set(), set()]
    assert patches.that_fit([2, 4]) == [4]


def test_an_edit_with_a_heading_or_a_lead_is_one_patch_and_of_others_each_line_is_one() -> None:
    for text, count in (("Use one of:\n- yes\n- no", 1), ("# Steps\n1. Read all.\n2. Write it.", 1), ("- a\n- b", 2)):
        patches = Patches(of("Answer."))
        take(patches, frozenset(), edit("add", 1, text))
        assert len(patches.by_number) == count


def test_edits_of_a_text_in_which_two_parts_read_as_one_are_not_taken() -> None:
    """Its reader numbers them otherwise than they are: the child stands for itself."""
    patches = Patches(of("Look at the table of all the codes that there are before you\nanswer."))
    first = take(patches, frozenset(), edit("replace", 1, "Look at the table of all of the codes there are and"))
    assert first is not None
    second = take(patches, first, edit("add", 1, "answer with one."))
    assert second is not None
    assert patches.take(0, second, {"answer": [edit("replace", 1, "Answer.")]}) is None


# Texts that were written as a whole


@pytest.mark.parametrize(
    "edits",
    [
        [edit("replace", 1, "Something else.")],
        [edit("replace", 1, "Something else."), edit("remove", 2)],
        [edit("add", 1, "```\nnever closed")],
    ],
    ids=["its one part", "all of its parts", "an open fence"],
)
def test_a_whole_text_in_the_form_of_edits_is_a_whole_text(edits: list[Edit]) -> None:
    text = EditedText.of("Answer.\nBe kind." if len(edits) > 1 else "Answer.", edits)
    assert edits[0].text in text
    assert text.edits == ()
