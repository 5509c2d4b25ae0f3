"""Taking prompts apart: what is a change, and texts with changes in them."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from dspy_flashevolve.gepa.changes import Change, Weave, changes_between
from dspy_flashevolve.gepa.parts import normal, parts_of, same_text

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


def changes_of(parent: str, child: str) -> list[Change]:
    return changes_between(of(parent), of(child), ()) or []


def together(parent: str, *children: str) -> str:
    """The parent with the changes of several of its children, none of which stands for itself."""
    weave = Weave(of(parent), ())
    numbers = frozenset[int]()
    for child in children:
        taken = weave.take(frozenset(), of(child))
        assert taken is not None
        numbers |= taken[0]
    return weave.compose(numbers)["answer"]


# Parts


@given(TEXTS)
@example("a\x0bb\x1cc\x85d\u2028e")
@example("```\nnever closed\n- a")
@example(" x" * 10_000 + ". Y" * 10_000)
def test_joined_with_the_space_around_them_the_parts_are_the_text(text: str) -> None:
    assert joined(text) == text
    assert all(part.text.strip() and part.text == part.text.rstrip() for part in parts_of(text))


@given(st.text())
def test_any_text_can_be_taken_apart(text: str) -> None:
    assert joined(text) == text


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


def test_a_line_is_sentences_but_for_those_of_lists_tables_and_headings() -> None:
    assert texts_of("Be brief. Be kind, e.g. Be polite! (Or not.)") == [
        "Be brief.", "Be kind, e.g. Be polite!", "(Or not.)",
    ]  # fmt: skip
    for line in ("1. Be brief. Be kind.", "- Be brief. Be kind.", "| Brief. | Kind. Too. |", "# Be. Kind.", "> A. B."):
        assert texts_of(line) == [line]


def test_hard_wrapped_prose_is_sentences_and_not_lines() -> None:
    wrapped = (
        "Read the whole question with care before you begin to answer\nit, and then write. Keep the answer\nshort."
    )
    assert texts_of(wrapped) == [wrapped.partition(" Keep")[0], "Keep the answer\nshort."]
    assert texts_of("Label one\nLabel two") == ["Label one", "Label two"]


def test_a_labelled_input_and_its_output_are_one_part() -> None:
    pairs = ["Input: The pump is broken. Now.\nOutput: urgent", "Input: A lamp is out.\nOutput: routine"]
    assert texts_of("Examples\n" + "\n".join(pairs)) == ["Examples", *pairs]


# The invariant

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


@pytest.mark.long
@given(PAIRS)
def test_a_child_that_is_taken_apart_is_its_parent_with_its_changes(pair: tuple[str, str]) -> None:
    parent, child = pair
    weave = Weave(of(parent), ())
    taken = weave.take(frozenset(), of(child))
    if taken is not None:
        assert taken[1]
        assert same_text(weave.compose(taken[0])["answer"]) == same_text(child)
    else:
        assert not weave.changes, "nothing is left of it"


@pytest.mark.long
@given(st.lists(BLOCKS, max_size=6), st.lists(st.tuples(BLOCKS, st.integers(0, 9), st.booleans()), max_size=8), ENDS)
def test_children_of_children_are_what_is_composed_of_the_changes_in_them(
    blocks: list[str], edits: list[tuple[str, int, bool]], end: str
) -> None:
    """Each child stands on what was composed before, and puts a block in, or in a block's place."""
    weave, numbers, texts = Weave(of(end.join(blocks)), ()), frozenset[int](), list(blocks)
    for block, place, replaces in edits:
        at = place % (len(texts) + 1)
        texts[at : at + replaces] = [block]
        child = end.join(texts)
        taken = weave.take(numbers, of(child))
        if taken is None:
            return
        if taken[1]:
            assert same_text(weave.compose(taken[0])["answer"]) == same_text(child)
        numbers = taken[0]
        texts = weave.compose(numbers)["answer"].split(end)
    again = Weave.restored(json.loads(json.dumps(weave.kept())), ())
    assert again.compose(numbers) == weave.compose(numbers)


@pytest.mark.long
@given(TEXTS)
def test_no_changes_leave_a_text_as_it_is(text: str) -> None:
    assert Weave(of(text), ()).compose(()) == of(text)


@pytest.mark.long
@given(RULES, st.lists(RULES, min_size=1, max_size=4))
def test_what_changes_are_does_not_depend_on_the_order_in_which_children_came(
    parent: list[str], children: list[list[str]]
) -> None:
    texts = ["\n".join([*parent, *extra]) for extra in children]
    for order in itertools.islice(itertools.permutations(texts), 6):
        weave = Weave(of("\n".join(parent)), ())
        for text in order:
            weave.take(frozenset(), of(text))
        assert {normal(line) for change in weave.changes for line in change.part.splitlines()} == {
            normal(line) for text in texts for change in changes_of("\n".join(parent), text)
            for line in change.part.splitlines()
        }  # fmt: skip


@pytest.mark.long
@given(PAIRS, st.integers(0, 255))
def test_the_changes_that_are_found_in_a_text_make_that_text(pair: tuple[str, str], chosen: int) -> None:
    """A run that goes on asks which changes a candidate has."""
    weave = Weave(of(pair[0]), ())
    weave.take(frozenset(), of(pair[1]))
    made = weave.compose([number for number in range(len(weave.changes)) if chosen >> number & 1])
    again = weave.numbers_in(made)
    assert again is None or same_text(weave.compose(again)["answer"]) == same_text(made["answer"])


# Repeated lines

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


@pytest.mark.parametrize("section", ["Billing", "Repairs", "Access"])
def test_a_line_goes_under_the_heading_where_the_child_has_it_though_others_have_the_same_lines(section: str) -> None:
    child = SECTIONS.replace(f"## {section}\nKeywords:\n", f"## {section}\nKeywords:\n- urgent\n")
    assert together(SECTIONS, child) == child
    other = SECTIONS.replace("- leak", "- leak\n- drip")
    both = child.replace("- leak", "- leak\n- drip")
    assert together(SECTIONS, child, other) == together(SECTIONS, other, child) == both


def test_an_equal_line_under_two_headings_is_two_changes() -> None:
    first = SECTIONS.replace("- refund", "- refund\n- please help")
    second = SECTIONS.replace("- password", "- password\n- please help")
    both = first.replace("- password", "- password\n- please help")
    assert together(SECTIONS, first, second) == both
    weave = Weave(of(SECTIONS), ())
    for child in (first, second, both):
        assert weave.take(frozenset(), of(child)) is not None
    assert len(weave.changes) == 2


def test_of_examples_with_equal_labels_the_one_that_the_child_corrects_is_corrected() -> None:
    parent = "Examples\n\nInput:\nThe pump is broken.\nOutput:\nroutine\n\nInput:\nA lamp is out.\nOutput:\nroutine"
    child = parent.replace("routine", "urgent", 1)
    third = parent + "\n\nInput:\nNo water at all.\nOutput:\nurgent"
    assert together(parent, child) == child
    assert together(parent, child, third) == third.replace("routine", "urgent", 1)


@given(st.integers(0, 3), st.integers(0, 10**6))
def test_records_that_children_put_in_stay_whole(place: int, seed: int) -> None:
    def record(number: int) -> str:
        return f"Input:\nCase {number}\nOutput:\nlabel {number}"

    records = [record(number) for number in range(3)]
    parent, rng = "\n\n".join(["Examples:", *records]), random.Random(seed)
    weave = Weave(of(parent), ())
    for new in (7, 8):
        more = [*records[:place], record(new), *records[place:]]
        assert weave.take(frozenset(), of("\n\n".join(["Examples:", *more]))) is not None
    chosen = [number for number in range(len(weave.changes)) if rng.random() < 0.7]
    made = weave.compose(chosen)["answer"].split("\n\n")
    assert set(made[1:]) <= {*records, record(7), record(8)}


# What is a change


@given(RULES, RULES, st.randoms(use_true_random=False))
def test_a_child_that_adds_lines_anywhere_is_its_parent_with_them(
    parent: list[str], added: list[str], rng: random.Random
) -> None:
    there = {normal(line) for line in parent}
    once = {normal(line).strip(" .!?:;,*_"): line for line in added}  # a line is put in once
    new = [line for line in once.values() if normal(line) not in there]
    assume(new)
    lines = list(parent)
    for line in new:
        lines.insert(rng.randrange(len(lines) + 1), line)
    changes = changes_between(of("\n".join(parent)), of("\n".join(lines)), ())
    assert changes
    assert together("\n".join(parent), "\n".join(lines)) == "\n".join(lines)


def test_a_part_in_other_words_goes_in_for_the_one_that_it_rewords() -> None:
    parent = "Answer.\n- Name the city and the year.\n- Be kind."
    [one] = changes_of(parent, parent.replace("the year", "the year of birth"))
    assert (one.part, one.replaces) == ("- Name the city and the year of birth.", "- Name the city and the year.")


def test_a_line_of_a_wording_that_others_have_as_well_rewords_none_of_them() -> None:
    """Rules of one form, each with a word of its own: who adds one and forgets another has reworded nothing."""
    apricot, cedar, walnut, acorn = (
        f"- Mention the word {word} in each of your answers.\n" for word in ("apricot", "cedar", "walnut", "acorn")
    )
    assert {(one.part, one.replaces) for one in changes_of(
        f"Answer.\n{apricot}{cedar}- Be kind.\n", f"Answer.\n{cedar}{walnut}- Be kind.\n"
    )} == {("", apricot.strip()), (walnut.strip(), "")}  # fmt: skip
    both = changes_of(f"Answer.\n{apricot}- Be kind.\n", f"Answer.\n{walnut}{acorn}- Be kind.\n")
    assert {one.part for one in both} == {"", walnut.strip(), acorn.strip()}


def test_a_section_with_another_name_is_one_change_and_only_one_name_stays() -> None:
    parent = "Answer.\n\n## Output format\n- One line.\n- JSON."
    [one] = changes_of(parent, parent.replace("Output", "Response"))
    assert (one.part, one.replaces) == ("## Response format", "## Output format")
    other = parent.replace("Output", "Reply")
    weave = Weave(of(parent), ())
    for child in (parent.replace("Output", "Response"), other):
        assert weave.take(frozenset(), of(child)) is not None
    assert weave.changes[0].claims & weave.changes[1].claims, "a text has one of them"


def test_a_new_section_is_one_change_with_its_heading_and_its_list() -> None:
    child = "Answer.\n\n## Style\n- Be brief.\n- Be kind.\n\n## Dates\nUse ISO:\n- 2024-01-31\n- no slashes"
    assert [one.part for one in changes_of("Answer.", child)] == [
        "## Style\n- Be brief.\n- Be kind.", "## Dates\nUse ISO:\n- 2024-01-31\n- no slashes",
    ]  # fmt: skip


def test_what_stands_under_a_new_section_needs_it() -> None:
    weave, first = Weave(of("Answer."), ()), "Answer.\n\n## Style\n- Be brief.\n- Be kind."
    numbers, _ = weave.take(frozenset(), of(first)) or (frozenset[int](), False)
    assert weave.take(numbers, of(f"{first}\n- Be calm.")) is not None
    assert weave.changes[1].needs == (0,)


@pytest.mark.parametrize("size", [17, 40])
def test_a_child_that_writes_most_of_a_text_is_one_change_and_a_text_has_one_such(size: int) -> None:
    weave = Weave(of("Answer the question."), ())
    for name in ("first", "second"):
        child = "\n".join(["Answer the question.", *(f"- Rule {number} of the {name} set" for number in range(size))])
        assert weave.take(frozenset(), of(child)) is not None
    assert len(weave.changes) == 2
    assert weave.changes[0].claims & weave.changes[1].claims


def test_numbered_lists_of_several_children_are_numbered_from_one_to_the_last() -> None:
    parent = "Do:\n1. Read.\n2. Think.\n3. Answer.\n\nThen:\n1. Check."
    first = "Do:\n1. Read.\n2. Note the dates.\n3. Think.\n4. Answer.\n\nThen:\n1. Check."
    second = "Do:\n1. Read.\n2. Think.\n3. Answer.\n4. Cite your sources.\n\nThen:\n1. Check."
    third = "Do:\n1. Think.\n2. Answer.\n\nThen:\n1. Check."
    assert together(parent, first, second, third) == (
        "Do:\n1. Note the dates.\n2. Think.\n3. Answer.\n4. Cite your sources.\n\nThen:\n1. Check."
    )


def test_no_blank_line_comes_into_a_list_and_none_is_lost_around_it() -> None:
    parent = "Do:\n\n- One.\n- Two.\n\nThen stop."
    first, last = parent.replace("- One.", "- Zero.\n- One."), parent.replace("- Two.", "- Two.\n- Three.")
    assert together(parent, first, last) == "Do:\n\n- Zero.\n- One.\n- Two.\n- Three.\n\nThen stop."


def test_a_part_that_has_moved_is_one_change() -> None:
    parent = "- One.\n- Two.\n- Three.\n- Four."
    [moved] = changes_of(parent, "- Two.\n- Three.\n- Four.\n- One.")
    assert (moved.part, moved.replaces) == ("- One.", "- One.")


def test_what_a_child_leaves_out_is_a_change_of_its_own() -> None:
    parent = "Answer.\n- One.\n- Two.\n- Three.\n"
    [gone] = changes_of(parent, "Answer.\n- One.\n- Three.\n")
    assert (gone.part, gone.replaces) == ("", "- Two.")
    both = changes_of(parent, "Answer.\n- One.\n- Three.\n- Four, of course.\n")
    assert [(one.part, one.replaces) for one in both] == [("", "- Two."), ("- Four, of course.", "")]


def test_a_child_without_what_an_earlier_one_added_is_without_that_change() -> None:
    weave, parent = Weave(of("Answer."), ()), "Answer.\n- One."
    numbers, _ = weave.take(frozenset(), of(parent)) or (frozenset[int](), False)
    assert weave.take(numbers, of("Answer.\n- Two.")) == (frozenset({1}), True)
    assert weave.compose({0, 1})["answer"].splitlines()[0] == "Answer."


def test_a_rewrite_and_a_change_of_code_cannot_be_taken_apart() -> None:
    parent = {"answer": "Answer the question.\nBe brief.", "tool": "def f():\n    return 1\n"}
    assert changes_between(parent, {**parent, "answer": "Something else altogether."}, ()) is None
    longer = {**parent, "tool": parent["tool"] + "\nx = 2\n"}
    assert changes_between(parent, longer, ["tool"]) is None
    assert changes_between(parent, {**longer, "answer": parent["answer"] + "\nCite."}, ["tool"]) is None
    assert changes_between(parent, longer, ()) is not None


def test_a_text_that_is_json_or_whose_code_is_never_closed_is_not_taken_apart() -> None:
    rules = ["Be brief.", "Be kind.", "Count to ten."]
    parent, child = (json.dumps({"rules": rules[:count]}, indent=1) for count in (2, 3))
    assert changes_between({"a": parent}, {"a": child}, ()) is None
    assert changes_between({"a": "Answer."}, {"a": parent}, ()) is None
    assert changes_between({"a": parent}, {"a": parent + " Be brief."}, ()) is None
    assert changes_between({"a": "Answer."}, {"a": "Answer.\n```\nx = 1"}, ()) is None


def test_nothing_is_left_of_a_child_of_which_one_text_is_a_rewrite() -> None:
    parent = {"one": "Answer.", "two": "Check."}
    weave = Weave(parent, ())
    assert weave.take(frozenset(), {"one": "Answer.\nBe brief.", "two": "Everything is different."}) is None
    assert not weave.changes
    assert weave.compose(()) == parent


def test_components_are_taken_apart_each_for_itself() -> None:
    parent = {"one": "Answer.", "two": "Check."}
    child = {"one": "Answer.\nBe brief.", "two": "Check.\nBe brief."}
    weave = Weave(parent, ())
    assert weave.take(frozenset(), child) == (frozenset({0, 1}), True)
    assert [one.component for one in weave.changes] == ["one", "two"]
    assert weave.compose({0, 1}) == child
    assert weave.compose({1}) == {"one": "Answer.", "two": "Check.\nBe brief."}


LINES: Sequence[str] = ["One.", "Two.", "Three."]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_change_goes_where_it_stood_though_its_neighbour_is_gone(end: str) -> None:
    parent = end.join(LINES)
    without, added = end.join(["One.", "Three."]), end.join(["One.", "Two.", "New.", "Three."])
    assert together(parent, without, added).split(end) == ["One.", "New.", "Three."]


LAYOUTS = {
    "list under a heading": ("## {name}\nKeywords:\n- {words}", "\n- "),
    "list under a plain title": ("{name}\nKeywords:\n- {words}", "\n- "),
    "list under an underlined title": ("{name}\n-----\nKeywords:\n* {words}", "\n* "),
    "nested list": ("- {name}:\n  - Keywords:\n    - {words}", "\n    - "),
    "table": ("## {name}\n| word | use |\n|---|---|\n| {words} | yes |", " | yes |\n| "),
    "words in a line": ("## {name}\nThe words by which this queue is known are: {words}.", ", "),
    "rules with words": ("- Send to {name} all that speaks of one of these words: {words}.", ", "),
}
"""How a section is written, and what stands between its words."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_words_put_into_sections_of_one_form_stay_there_whatever_else_is_put_in(layout: str) -> None:
    section, between = LAYOUTS[layout]
    edits = [("Repairs", "leak"), ("Repairs", "broken"), ("Access", "broken")]

    def text(words: Mapping[str, Sequence[str]]) -> str:
        return "\n\n".join(
            ["Route it.", *(section.format(name=name, words=between.join(held)) for name, held in words.items())]
        )

    seed = {name: [name.lower()] for name in ("Billing", "Repairs", "Access")}
    weave = Weave(of(text(seed)), ())
    for name, word in edits:
        child = text({**seed, name: [*seed[name], word]})
        taken = weave.take(frozenset(), of(child))
        assert taken is not None
        assert weave.compose(taken[0]) == of(child)
    meant = {
        text({name: [name.lower(), *words] for name, words in zip(seed, chosen, strict=True)})
        for chosen in itertools.product(
            [()], [(), ("leak",), ("broken",), ("leak", "broken"), ("broken", "leak")], [(), ("broken",)]
        )
    }
    composed = set[str]()
    for size in range(len(weave.changes) + 1):
        for numbers in itertools.combinations(range(len(weave.changes)), size):
            claims = [claim for number in numbers for claim in weave.changes[number].claims]
            if len(claims) == len(set(claims)):
                composed.add(weave.compose(numbers)["answer"])
    assert composed <= meant
    assert len(composed) > len(edits)
