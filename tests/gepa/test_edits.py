"""Proposals as edits: what the reflection LM sees, what its edits make of a text, and every form of a reply."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import dspy
import pytest
from dspy.teleprompt.gepa import InstructionProposer
from pydantic import ValidationError

from dspy_flashevolve.gepa.edits import Edit, EditedText
from dspy_flashevolve.gepa.parts import parts_of
from dspy_flashevolve.gepa.propose import MOST_UNREADABLE, EditProposer
from tests.fakes import fake_lm

TEXT = """# Task

Answer the question. Think first.

## Rules
- Be brief.
- Be kind.

1. One
2. Two

End."""
RECORDS = [{"Inputs": {"question": "q"}, "Generated Outputs": {"answer": "a"}, "Feedback": "Wrong."}]


def edit(action: Any, part: int, text: str = "") -> Edit:
    return Edit(action=action, part=part, text=text)


def proposed(reply: str | list[str], text: str = TEXT, **settings: Any) -> tuple[str, list[str]]:
    """The text that a proposer makes of one whose reflection LM gives these replies, and the prompts."""
    replies, prompts = [reply] if isinstance(reply, str) else list(reply), list[str]()

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return replies[min(len(prompts), len(replies)) - 1]

    proposer = EditProposer(InstructionProposer(**settings))
    with dspy.context(lm=fake_lm(answer)):
        texts = asyncio.run(proposer.acall({"self": text}, {"self": RECORDS}, ["self"]))
    return texts["self"], prompts


def as_edits(*edits: Edit) -> str:
    return json.dumps({"edits": [one.model_dump() for one in edits]})


def test_additions_take_the_form_and_the_space_of_their_neighbours() -> None:
    text = EditedText.of(
        TEXT,
        [
            edit("add", 2, "Cite sources."),
            edit("add", 6, "- Be exact."),
            edit("add", 8, "3. Three"),
            edit("add", 9, "## More\n- x"),
        ],
    )
    assert (
        text
        == TEXT.replace("question. ", "question. Cite sources. ")
        .replace("- Be kind.", "- Be kind.\n- Be exact.")
        .replace("2. Two", "2. Two\n3. Three")
        + "\n\n## More\n- x"
    )


def test_a_part_is_replaced_in_its_place_and_removed_with_the_space_around_it() -> None:
    text = EditedText.of(TEXT, [edit("replace", 5, "- Be short."), edit("remove", 3), edit("remove", 9)])
    assert text == TEXT.replace("- Be brief.", "- Be short.").replace(" Think first.", "").replace("\n\nEnd.", "")


@pytest.mark.parametrize(
    "reply",
    [
        as_edits(edit("add", 6, "- Be exact.")),
        '<add after="6">- Be exact.</add>',
        'Sure!\n```json\n[{"action": "add", "part": "6", "text": "- Be exact."}]\n```\nAnything else?',
        '{"edits": [{"action": "add", "part": 6, "text": "[7] - Be exact.", "reason": "x"}], "more": 1}',
    ],
    ids=["as asked", "tags", "a list in a fence", "numbers and further fields"],
)
def test_one_reply_is_enough_where_edits_can_be_found_in_it(reply: str) -> None:
    text, prompts = proposed(reply)
    assert text == TEXT.replace("- Be kind.", "- Be kind.\n- Be exact.")
    assert not [prompt for prompt in prompts if "[6] - Be kind." not in prompt]


def test_a_whole_text_in_the_place_of_edits_is_taken_as_it_is() -> None:
    assert proposed(json.dumps({"new_instruction": "Answer in French."}))[0] == "Answer in French."


def test_part_numbers_that_a_model_copies_into_a_whole_text_do_not_stay() -> None:
    """They would make each later child a rewrite of its parent, and the user's prompt unfit to use."""
    copied = "\n".join(f"[{number}] {line}" for number, line in enumerate(["# Task", "Answer in French."], start=1))
    assert proposed(json.dumps({"new_instruction": copied}))[0] == "# Task\nAnswer in French."


def test_a_reply_without_edits_is_asked_for_once_more_as_a_whole_text() -> None:
    def answer(prompt: str) -> str:
        return "I cannot do that." if "[1] # Task" in prompt else json.dumps({"new_instruction": "Whole."})

    proposer, prompts = EditProposer(InstructionProposer()), list[str]()
    with dspy.context(lm=fake_lm(lambda prompt: prompts.append(prompt) or answer(prompt))):
        for _ in range(MOST_UNREADABLE + 1):
            texts = asyncio.run(proposer.acall({"self": TEXT}, {"self": RECORDS}, ["self"]))
            assert texts == {"self": "Whole."}
    assert "[1] # Task" not in prompts[-1]
    assert "[1] # Task" not in prompts[-2]  # after some of them, whole texts are asked for at once


def test_json_is_asked_for_as_a_whole() -> None:
    text, prompts = proposed(json.dumps({"new_instruction": '{"rules": []}'}), text='{"rules": ["Be brief."]}')
    assert text == '{"rules": []}'
    assert "[1]" not in prompts[0]


def test_the_settings_of_dspys_proposer_hold() -> None:
    settings = {"skills": "A skill\nof two lines.", "additional_instructions": "Write in French.", "max_chars": 40}
    text, prompts = proposed(
        [as_edits(edit("add", 1, "- " + "long " * 20)), json.dumps({"shortened_instruction": "Short."})],
        text="Answer.",
        **settings,
    )
    assert text == "Short."
    assert all(word in prompts[0] for word in ("A skill", "Write in French.", "at most 40 characters"))
    base = proposed(as_edits(edit("add", 1, "x")), base_instructions="You improve recipes.")[1]
    assert "You improve recipes." in base[0]


def test_what_stays_too_long_is_no_candidate() -> None:
    with pytest.raises(ValidationError):
        proposed([as_edits(edit("add", 1, "x" * 50)), json.dumps({"shortened_instruction": "y" * 41})], max_chars=40)


@pytest.mark.parametrize(
    ("edit", "instruction"),
    [
        ({"action": "remove", "part": 2, "text": None, "reason": None}, "Answer.\n- Be brief."),
        ({"action": "Remove", "part": "[2]"}, "Answer.\n- Be brief."),
    ],
)
def test_an_edit_is_read_as_it_is_meant(edit: dict[str, Any], instruction: str) -> None:
    assert EditedText.of(instruction, [edit]).strip() == "Answer."


def test_long_blocks_of_a_reply_are_read_line_by_line() -> None:
    """Each line was compared with all of its block: 6,000 lines took half a minute."""
    fenced = "```\n" + "a = 1\n" * 6000 + "```"
    labelled = "".join(f"Label {number}: b\n" for number in range(3000))
    assert len(parts_of(fenced)) == 1
    assert parts_of(labelled)
