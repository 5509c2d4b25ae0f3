"""`strong` and `strong-small`: structured texts with the rates of real lineages, edits, clean texts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import dspy
import pytest
from dspy.teleprompt.gepa import InstructionProposer

from benchmarks.lineages import simulated_pairs
from benchmarks.models import REPLY_MODELS
from benchmarks.models.structured import consolidated
from dspy_flashevolve.gepa.propose import EditProposer
from dspy_flashevolve.sim import HouseRules
from dspy_flashevolve.sim.virtual import SimulatedModel, run
from dspy_flashevolve.sim.words import Choices, rules_in

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


# Through the proposers


def test_edits_hold_as_much_knowledge_in_fewer_characters() -> None:
    edits = [reflected(EditProposer(InstructionProposer()), seed) for seed in range(40)]
    whole = [reflected(InstructionProposer(), seed) for seed in range(40)]
    assert median(tokens for _, tokens in edits) < median(tokens for _, tokens in whole) / 2
    rules = [fmean(len(rules_in(text)) - 2 for text, _ in made) for made in (edits, whole)]
    assert rules[0] == pytest.approx(rules[1], abs=0.8)
    assert sum(text.startswith("Answer the question.") for text, _ in edits) > 36


# Clean texts


def test_a_consolidated_text_states_each_rule_once_and_loses_as_many_as_the_model_says() -> None:
    grown = "\n".join([SEED, *(f"- {rule} And check it." for rule in RULES), *(f"- {rule}" for rule in RULES)])
    lineage = STRONG.lineage
    assert lineage is not None
    clean = [consolidated(grown, lineage, Choices(0, str(number))) for number in range(200)]
    assert all(len(text) < len(grown) for text in clean)
    assert all(text.count(f'the word "{rule.word}"') <= 1 for text in clean for rule in RULES)
    assert fmean(len(rules_in(text)) / len(RULES) for text in clean) == pytest.approx(0.97, abs=0.01)
