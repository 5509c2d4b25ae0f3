"""The simulated model plays ACE: its replies to the modules of a playbook, and to a program that cites bullets."""

from __future__ import annotations

from typing import Any

import dspy
import pytest

from benchmarks.models import ImitatingModel
from benchmarks.models.playbook_replies import CITATIONS
from dspy_flashevolve.ace.operations import Add, parse_operations, parse_tags
from dspy_flashevolve.ace.playbook import Playbook, attached
from dspy_flashevolve.modules.playbook import PlaybookCuration, SampleReflection
from dspy_flashevolve.sim.virtual import SimulatedModel, run
from dspy_flashevolve.sim.words import WORDS, Rule, words_present

RULES = [Rule(number, word) for number, word in enumerate(WORDS[:6], start=1)]
FAITHFUL = {"obedience": 1.0, "forgets": 0.0, "useless": 0.0}
BOOK = Playbook().adding("strategies", str(RULES[0])).adding("other", str(RULES[1])).adding("other", "Be brief.")
ADAPTERS = pytest.mark.parametrize("adapter", [dspy.ChatAdapter(), dspy.JSONAdapter()])


def asked(module: dspy.Module, kind: str, adapter: dspy.Adapter | None = None, **inputs: Any) -> Any:
    """What a module makes of the simulated model's reply to it, which must be of that kind."""
    options = {**FAITHFUL, **inputs.pop("model", {})}
    model = SimulatedModel(seed=inputs.pop("seed", 0), reply_model=ImitatingModel(**options))

    async def main() -> Any:
        with dspy.context(lm=model.lm(), adapter=adapter):
            return await module.acall(**inputs)

    reply = run(main)
    assert model.requests == {kind: 1}
    return reply


def curated(reflection: str, book: Playbook = BOOK, **options: Any) -> list[Any]:
    shown = {"playbook": book.render(), "sections": "strategies, other", "progress": "Sample 1 of 9."}
    inputs = {**shown, "task": "q", "reflection": reflection, **options}
    operations, problems = parse_operations(asked(PlaybookCuration(), "curation", **inputs).operations)
    assert not problems
    return operations


@ADAPTERS
def test_the_reflector_names_the_missed_rules_and_tags_what_was_cited(adapter: dspy.Adapter) -> None:
    feedback = "Missed: " + " ".join(map(str, RULES[:3]))
    inputs = {"task": "q", "attempt": "a", "feedback": feedback, "cited_bullets": BOOK.render()}
    reply = asked(SampleReflection(), "sample_reflection", adapter, **inputs)
    assert all(str(rule) in reply.insight for rule in RULES[:3])
    assert parse_tags(reply.bullet_tags) == ([(bullet.id, "helpful") for bullet in BOOK.bullets], [])


@ADAPTERS
def test_the_curator_adds_rules_that_the_playbook_has_not(adapter: dspy.Adapter) -> None:
    added = curated("Keep these: " + " ".join(map(str, RULES[:3])), adapter=adapter)
    assert added == [Add("strategies", str(RULES[2]))]
    assert curated("Keep these: " + str(RULES[0])) == []


@ADAPTERS
def test_a_reply_obeys_the_rules_of_the_playbook_and_cites_them(adapter: dspy.Adapter) -> None:
    field = dspy.OutputField(default="")
    signature = dspy.Signature("question -> answer", attached("Answer.", BOOK.render())).append(CITATIONS, field, str)
    reply = asked(dspy.Predict(signature), "task", adapter, question="Why?")
    assert words_present(reply.answer, WORDS) == [WORDS[0], WORDS[1]]
    assert BOOK.cited(reply[CITATIONS]) == ("str-1", "oth-2")
