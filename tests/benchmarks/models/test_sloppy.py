"""Sloppy forms of replies: what is asked for is said, but not in the form that was asked for."""

from __future__ import annotations

import json
from collections import Counter

import dspy
import pytest

from benchmarks.models import ImitatingModel
from benchmarks.models.sloppy import TEXT_FORMS, VERDICT_FORMS, sloppy_form
from dspy_flashevolve.engine.staleness import StaleChild
from dspy_flashevolve.modules.rewriting import StaleCandidateReflection
from dspy_flashevolve.sim.backend import H100_QWEN3_8B
from dspy_flashevolve.sim.prompts import parse_chat_request
from dspy_flashevolve.sim.replies import reply_to
from dspy_flashevolve.sim.words import WORDS, Choices, Rule, rules_in
from tests.fakes import fake_lm

RULES = [Rule(number, word) for number, word in enumerate(WORDS[:6], start=1)]
HEAD = f"Answer the question.\n{RULES[0]}"
CHILDREN = "\n\n".join(
    f"### Child {number}\nWhat it changed:\n+ {rule}" for number, rule in enumerate(RULES[1:4], start=5)
)
FAITHFUL = ImitatingModel(forgets=0, overload=0, useless=0, rules_added=None)
INTEGRATION = {"component": "p", "kind": "an instruction", "head_text": HEAD, "children": CHILDREN, "commits": "None."}
REFLECTION = {"current_instruction": HEAD, "examples_with_feedback": "Missed: " + " ".join(map(str, RULES[1:4]))}


@pytest.fixture
def form(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Every reply has this form."""
    monkeypatch.setattr("benchmarks.models.sloppy_form", lambda *_, **__: request.param)
    return request.param


def test_as_many_replies_are_sloppy_as_the_model_says_in_every_form() -> None:
    drawn = Counter(sloppy_form(0.6, Choices(0, str(n)), verdicts=True) for n in range(2400))
    assert set(drawn) == {None, *TEXT_FORMS, *VERDICT_FORMS}
    assert drawn[None] / 2400 == pytest.approx(0.4, abs=0.04)
    assert min(count for form, count in drawn.items()) > 60
    without = {sloppy_form(1, Choices(0, str(n)), verdicts=False) for n in range(300)}
    assert without == set(TEXT_FORMS)
    assert {sloppy_form(0, Choices(0, str(n)), verdicts=True) for n in range(100)} == {None}


@pytest.mark.parametrize("form", [*VERDICT_FORMS, "fences"], indirect=True)
def test_the_integrating_module_reads_the_text_whatever_became_of_the_verdicts(form: str) -> None:
    def simulated(prompt: str) -> str:
        system, _, user = prompt.rpartition("\n[[ ## component ## ]]")
        messages = [{"role": "system", "content": system}, {"role": "user", "content": f"[[ ## component ## ]]{user}"}]
        return reply_to(
            parse_chat_request(json.dumps({"messages": messages}).encode()), H100_QWEN3_8B, FAITHFUL, 0
        ).text

    child = StaleChild(5, {"p": f"{HEAD}\n{RULES[1]}"}, {"p": HEAD}, 0.5)
    with dspy.context(lm=fake_lm(simulated), adapter=dspy.ChatAdapter()):
        seen = StaleCandidateReflection()(head={"p": HEAD}, children=[child])
    assert rules_in(seen.texts["p"]) == RULES[:2]
    assert "```" not in seen.texts["p"]
