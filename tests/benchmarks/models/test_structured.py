"""`strong` and `strong-small`: structured texts with the rates of real lineages, edits, clean texts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import dspy
import pytest
from dspy.teleprompt.gepa import InstructionProposer

from benchmarks.lineages import simulated_pairs
from benchmarks.models import CHARACTERS_A_TOKEN, REPLY_MODELS
from benchmarks.models.fallible import HARMFUL_SENTENCES
from benchmarks.models.structured import consolidated, reworded, statements
from dspy_flashevolve.gepa.changes import Edit, EditedText
from dspy_flashevolve.gepa.edits import EditProposer, numbered
from dspy_flashevolve.gepa.parts import parts_of
from dspy_flashevolve.modules.reading import items_in
from dspy_flashevolve.sim import HouseRules
from dspy_flashevolve.sim.backend import H100_QWEN3_8B
from dspy_flashevolve.sim.prompts import parse_chat_request
from dspy_flashevolve.sim.replies import reply_to
from dspy_flashevolve.sim.virtual import SimulatedModel, run
from dspy_flashevolve.sim.words import USELESS_SENTENCES, Choices, rules_in

STRONG = REPLY_MODELS["strong"]
TASK = HouseRules(reply_model=STRONG)
RULES = TASK.all_rules()
SEED = "\n".join(["Answer the question. Follow the house rules.", *map(str, RULES[:2])])
FEEDBACK = " ".join(["Missed:", *map(str, RULES[2:16])])
EXAMPLES = [{"Inputs": {"question": "Why?"}, "Generated Outputs": {"answer": "So."}, "Feedback": FEEDBACK}]

TEST_THIRD = {
    "strong": {
        "first": {"dropped": (0.54, 1), "characters": (2160, 5130), "parts": (13, 31)},
        "later": {
            "kept": (0, 0.69), "reworded": (0.08, 0.53), "dropped": (0, 0.88), "added": (0.07, 1.29),
            "all_specifics": (0, 1), "characters": (3140, 8660), "parts": (13, 51), "nested": (0, 42),
        },
    },
    "strong-small": {
        "first": {"dropped": (0, 0.75), "added": (0.5, 5.7), "characters": (465, 1940), "parts": (5, 12)},
        "later": {
            "kept": (0.05, 1), "reworded": (0, 0.5), "dropped": (0, 0.73), "added": (0.09, 1.1),
            "characters": (825, 5100), "parts": (8, 32),
        },
    },
}  # fmt: skip
"""Of the runs that the models are not fitted to, what 10% and 90% of the children lie below: `python -m
benchmarks.lineages --fit`."""
TEST_MEANS = {"kept": 0.263, "reworded": 0.303, "dropped": 0.434, "added": 0.676, "all_specifics": 0.777}
"""Of `strong`'s test third, later children: the means, by the same command."""


def texts(count: int, current: str = SEED) -> list[str]:
    return [STRONG.new_instruction(current, FEEDBACK, Choices(0, f"request {number}")) for number in range(count)]


def reflected(proposer: Any, seed: int = 0, examples: Any = EXAMPLES, current: str = SEED) -> tuple[str, int]:
    """What a proposer makes of a reply, and the tokens that were written for it."""
    model = SimulatedModel(seed=seed, reply_model=replace(STRONG, sloppy=0))

    async def main() -> str:
        with dspy.context(lm=model.lm()):
            request = ({"answer": current}, {"answer": examples}, ["answer"])
            if isinstance(proposer, EditProposer):
                return (await proposer.acall(*request))["answer"]
            return (await asyncio.to_thread(proposer, *request))["answer"]

    return run(main), model.completion_tokens


# Whole texts


@pytest.mark.parametrize("name", list(TEST_THIRD))
def test_children_are_like_those_of_the_runs_that_the_model_is_not_fitted_to(name: str) -> None:
    pairs = simulated_pairs(name)
    for kind, spread in TEST_THIRD[name].items():
        fates = [pair.fate for pair in pairs if pair.is_first == (kind == "first")]
        for field, (low, high) in spread.items():
            known = [value for fate in fates if (value := getattr(fate, field)) is not None]
            assert low <= median(known) <= high, (kind, field)


def test_a_gpt_class_child_keeps_rewords_and_drops_about_as_much_as_those_not_fitted_to() -> None:
    fates = [pair.fate for pair in simulated_pairs("strong") if not pair.is_first]
    for field, expected in TEST_MEANS.items():
        known = [value for fate in fates if (value := getattr(fate, field)) is not None]
        assert fmean(known) == pytest.approx(expected, abs=0.2), field


def test_a_first_text_has_headings_nested_lists_and_at_times_a_line_twice() -> None:
    fates = [pair.fate for pair in simulated_pairs("strong", runs=60, generations=1)]
    assert 2500 <= median(fate.characters for fate in fates) <= 4000
    assert all(fate.headings >= 2 for fate in fates)
    assert fmean(fate.nested > 0 for fate in fates) > 0.8
    assert 0 < fmean(fate.repeats for fate in fates) < 0.5


def test_a_reworded_rule_is_stated_as_before() -> None:
    text = texts(1)[0]
    other = reworded(text, Choices(0, "other"))
    assert len(set(text.splitlines()) & set(other.splitlines())) < len(text.splitlines()) / 2
    assert statements(other) == statements(text)
    assert TASK.true_score([other]) == TASK.true_score([text])


def test_rules_useless_and_harmful_sentences_survive_a_rewording_word_for_word_or_as_the_same_rule() -> None:
    text = f"- {RULES[0]} Check it.\n- {USELESS_SENTENCES[7]}\n- {HARMFUL_SENTENCES[7]}"
    for number in range(20):
        assert statements(reworded(text, Choices(0, str(number)))) == statements(text)


def test_a_reflection_learns_what_a_plain_one_learns() -> None:
    plain = REPLY_MODELS["plain"]
    for number in range(60):
        choices = Choices(0, f"request {number}")
        learnt = {*statements(plain.new_instruction(SEED, FEEDBACK, choices))} - {*statements(SEED)}
        assert learnt <= {*statements(STRONG.new_instruction(SEED, FEEDBACK, choices))}


def test_equal_requests_get_equal_texts_and_other_seeds_others() -> None:
    assert texts(3) == texts(3)
    assert reflected(InstructionProposer()) == reflected(InstructionProposer())
    assert reflected(InstructionProposer()) != reflected(InstructionProposer(), seed=1)
    assert len(set(texts(20))) == 20


# Through the proposers


def test_dspys_proposer_reads_the_whole_text() -> None:
    made = [reflected(InstructionProposer(), seed) for seed in range(20)]
    whole = [text for text, _ in made if "\n\n" in text]
    assert len(whole) >= 16, "one in twenty comes in a form that was not asked for"
    assert all(statements(text) for text in whole)
    assert all(
        tokens == pytest.approx(len(text) / CHARACTERS_A_TOKEN, rel=0.1) for text, tokens in made if text in whole
    )


def test_edits_hold_as_much_knowledge_in_fewer_characters() -> None:
    edits = [reflected(EditProposer(InstructionProposer()), seed) for seed in range(40)]
    whole = [reflected(InstructionProposer(), seed) for seed in range(40)]
    assert median(tokens for _, tokens in edits) < median(tokens for _, tokens in whole) / 2
    rules = [fmean(len(rules_in(text)) - 2 for text, _ in made) for made in (edits, whole)]
    assert rules[0] == pytest.approx(rules[1], abs=0.8)
    assert sum(text.startswith("Answer the question.") for text, _ in edits) > 36


def edits_replies(count: int) -> list[list[dict[str, Any]]]:
    """The edits that the model asks for, as they come."""
    proposer = EditProposer(InstructionProposer())
    signature: Any = proposer.propose_edits.signature
    inputs = {"current_instruction": numbered(texts(1)[0]), "examples_with_feedback": str(EXAMPLES)}
    messages = dspy.JSONAdapter().format(signature, [], inputs)
    request = parse_chat_request(json.dumps({"messages": messages}).encode())
    replies = [reply_to(request, H100_QWEN3_8B, STRONG, seed).text for seed in range(count)]
    known = [json.loads(text) for text in replies if text.startswith("{") and text.endswith("}")]
    return [reply["edits"] for reply in known if reply["edits"]]


def test_a_reply_has_one_to_six_edits_of_which_nine_in_ten_are_well_formed() -> None:
    replies = edits_replies(300)
    assert {len(edits) for edits in replies} >= {1, 2, 3, 4}
    assert max(map(len, replies)) <= 6
    parts = len(parts_of(texts(1)[0]))
    well_formed = [
        edit["action"] in ("add", "replace", "remove") and edit["part"] is not None and edit["part"] <= parts
        for edits in replies
        for edit in edits
    ]
    assert fmean(well_formed) == pytest.approx(0.9, abs=0.03)


def test_an_edit_that_rewords_a_part_states_what_the_part_stated() -> None:
    current = texts(1)[0]
    for edits in edits_replies(60):
        kept = [edit for edit in edits if edit["action"] in ("replace", "add")]
        after = EditedText.of(current, items_in(json.dumps(kept), Edit))
        assert {*statements(current)} <= {*statements(after)}


# Clean texts


def test_a_consolidated_text_states_each_rule_once_and_loses_as_many_as_the_model_says() -> None:
    grown = "\n".join([SEED, *(f"- {rule} And check it." for rule in RULES), *(f"- {rule}" for rule in RULES)])
    lineage = STRONG.lineage
    assert lineage is not None
    clean = [consolidated(grown, lineage, Choices(0, str(number))) for number in range(200)]
    assert all(len(text) < len(grown) for text in clean)
    assert all(text.count(f'the word "{rule.word}"') <= 1 for text in clean for rule in RULES)
    assert fmean(len(rules_in(text)) / len(RULES) for text in clean) == pytest.approx(0.97, abs=0.01)
