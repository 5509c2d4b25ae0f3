"""What the texts of candidates are: all that is run or returned reads as a reflection meant it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import dspy
import pytest
from dspy.teleprompt.gepa import InstructionProposer

from dspy_flashevolve import EditedText, Reflective
from tests.contract.surface import text_of
from tests.contract.worlds import Rules, World, chance, play
from tests.fakes import fake_lm, hashed

WORDS = {"Billing": ("invoice", "refund", "charge"), "Repairs": ("broken", "leak", "drip"), "Access": ("badge", "key")}
SECTIONS = "Route the message.\n\n" + "\n\n".join(f"## {name}\nKeywords:\n- {name.lower()}" for name in WORDS)
CASES = {
    "The pump is broken.": "urgent", "A lamp is out.": "routine", "No water at all.": "urgent",
    "Please paint the door.": "routine", "I smell gas.": "urgent", "When do you open?": "question",
}  # fmt: skip
EXAMPLES = "Say how urgent it is.\n\n" + "\n\n".join(f"Input:\n{case}\nOutput:\nunknown" for case in CASES)


def keywords(text: str) -> dict[str, list[str]]:
    """Section -> the keywords under it."""
    parts = text.split("## ")[1:]
    return {
        part.splitlines()[0]: [line.removeprefix("- ") for line in part.splitlines() if line.startswith("- ")]
        for part in parts
    }


def labels(text: str) -> list[tuple[str, str]]:
    """Input, its output, of each record of four lines."""
    records = [record.splitlines() for record in text.split("\n\n")[1:]]
    whole = [record for record in records if len(record) == 4 and record[::2] == ["Input:", "Output:"]]
    return [(record[1], record[3]) for record in whole]


@dataclass
class Written(World):
    """A world whose seed is a text with lines that come again, and whose reflections make one edit that is right.

    Args:
        text: the seed.
        edits: text -> what a reflection may make of it.
        worth: text -> the probability of a right answer.
    """

    text: str = ""
    edits: Callable[[str], list[str]] = lambda text: []
    worth: Callable[[str], float] = lambda text: 0.0
    run_texts: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self.score = lambda text, question: 0.1 + 0.9 * (chance("s", text, question) < self.worth(text))

    def seconds(self, text: str, question: str) -> float:
        self.run_texts.add(text)
        return super().seconds(text, question)

    def student(self) -> dspy.Module:
        program: Any = super().student()
        for step in program.steps:
            step.signature = step.signature.with_instructions(self.text)
        return program

    async def acall(self, candidate: Any, reflective_dataset: Any, components_to_update: list[str]) -> dict[str, str]:
        self.reflections += 1
        draw = hashed("e", self.seed, self.reflections)
        await self.busy(self.reflection_seconds)
        made = {name: self.edits(candidate[name]) for name in components_to_update}
        return {name: as_edit(candidate[name], texts[draw % len(texts)]) for name, texts in made.items() if texts}


def as_edit(text: str, other: str) -> str:
    """Another text with the one line that it has more, or in another's place, as an edit; each line is a part."""
    lines, others = ([line for line in one.splitlines() if line] for one in (text, other))
    at = next(at for at, line in enumerate(others) if [*lines, ""][at] != line)
    action, part = ("add", at) if len(others) > len(lines) else ("replace", at + 1)
    return EditedText.of(text, [{"action": action, "part": part, "text": others[at]}])


def with_keyword(text: str) -> list[str]:
    """The text with one more keyword, each that is missing, under its section."""
    there = keywords(text)
    heads = {name: f"## {name}\nKeywords:\n" for name in WORDS}
    return [
        text.replace(heads[name], f"{heads[name]}- {word}\n")
        for name, words in WORDS.items() for word in words if word not in there[name]
    ]  # fmt: skip


def with_label(text: str) -> list[str]:
    """The text with one label corrected, each that is unknown."""
    return [
        text.replace(f"Input:\n{case}\nOutput:\nunknown", f"Input:\n{case}\nOutput:\n{label}")
        for case, label in CASES.items() if f"{case}\nOutput:\nunknown" in text
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_keywords_stay_under_the_section_for_which_they_were_written(seed: int) -> None:
    expected = {name: {name.lower(), *words} for name, words in WORDS.items()}

    def worth(text: str) -> float:
        there = keywords(text)
        return 0.2 + 0.1 * sum(word in there.get(name, ()) for name, words in WORDS.items() for word in words)

    world = Written(seed=seed, text=SECTIONS, edits=with_keyword, worth=worth, train=20, val=30)
    program = play(world, 900, search="edits")
    for text in world.run_texts:
        assert list(keywords(text)) == list(WORDS), text
        assert all(set(words) <= expected[name] for name, words in keywords(text).items()), text
        assert text.count("Keywords:") == 3, text
    assert worth(text_of(program)) > 0.7


@pytest.mark.parametrize("seed", range(3))
def test_labels_of_examples_are_those_that_a_reflection_gave_them(seed: int) -> None:
    def worth(text: str) -> float:
        return 0.2 + 0.13 * sum(label == CASES[case] for case, label in labels(text))

    world = Written(seed=seed, text=EXAMPLES, edits=with_label, worth=worth, train=20, val=30)
    program = play(world, 900, search="edits")
    for text in world.run_texts:
        assert [case for case, _ in labels(text)] == list(CASES)
        assert all(label in (CASES[case], "unknown") for case, label in labels(text)), text
    assert worth(text_of(program)) > 0.7


class Union(dspy.Module):
    """A named fake of a repair: the head with all lines of all children."""

    async def aforward(self, head: Any, children: Any, **_: Any) -> Any:
        texts = {name: [*text.splitlines(), *(line for child in children for line in child.texts[name].splitlines())]
                 for name, text in head.items()}  # fmt: skip
        verdicts = [SimpleNamespace(child=one.number, verdict="orthogonal", reason="all") for one in children]
        return dspy.Prediction(
            texts={name: "\n".join(dict.fromkeys(lines)) for name, lines in texts.items()}, verdicts=verdicts
        )


@pytest.mark.parametrize("search", ["edits", "pareto"])
def test_no_text_is_longer_than_the_limit_of_the_proposer(search: Any) -> None:
    """The reflection LM keeps to it; what is joined of its texts, or patched, would not."""

    def reply(prompt: str) -> str:
        rules = list(dict.fromkeys(re.findall(r"- rule no \d+", prompt)))[-7:]
        return json.dumps({"new_instruction": "\n".join(["0.3 seed 0", *rules, f"- rule no {hashed(prompt) % 60}"])})

    world = Rules(helps=0.05, rules=60)
    program = play(
        world, 600, reflection_lm=fake_lm(reply), instruction_proposer=InstructionProposer(max_chars=120),
        search=search, staleness=Reflective(min_gap=0), stale_candidate_reflection=Union(),
    )  # fmt: skip
    lengths = [len(text) for text, _ in world.scored]
    assert max(lengths) <= 120
    assert program.async_stats.integration_calls or len(program.async_stats.changes) > 12, "too much for one text"
