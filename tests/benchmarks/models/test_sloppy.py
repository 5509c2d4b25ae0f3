"""Sloppy forms of replies: what is asked for is said, but not in the form that was asked for."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import dspy
import pytest
from dspy.teleprompt.gepa.instruction_proposal import ProposeInstruction

from benchmarks.models import ImitatingModel
from benchmarks.models.sloppy import REFUSAL, TEXT_FORMS, VERDICT_FORMS, sloppy_form
from dspy_flashevolve.engine.staleness import StaleChild
from dspy_flashevolve.modules.integrate import RepairChild, StaleCandidateReflection
from dspy_flashevolve.sim.backend import H100_QWEN3_8B
from dspy_flashevolve.sim.prompts import ChatRequest, parse_chat_request
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


def asked(signature: Any, inputs: dict[str, str], adapter: Any = None) -> ChatRequest:
    messages = (adapter or dspy.ChatAdapter()).format(signature, [], inputs)
    return parse_chat_request(json.dumps({"messages": messages}).encode())


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


@pytest.mark.parametrize("form", TEXT_FORMS, indirect=True)
@pytest.mark.parametrize("kind", ["reflection", "integration"])
def test_a_text_comes_in_each_form(form: str, kind: str) -> None:
    signature, inputs = (ProposeInstruction, REFLECTION) if kind == "reflection" else (RepairChild, INTEGRATION)
    request = asked(signature, inputs)
    assert request.kind == kind
    text = reply_to(request, H100_QWEN3_8B, FAITHFUL, 0).text
    whole = {"empty": "", "refusal": REFUSAL}
    if form in whole:
        assert text == whole[form]
        return
    if form == "cut":
        assert text
        assert "[[ ## completed ## ]]" not in text
        return
    assert text.endswith("[[ ## completed ## ]]")
    assert set(rules_in(text.rpartition("new_")[2])) >= {RULES[0]}
    assert (RULES[1] in rules_in(text)) == (form != "unchanged")
    assert ("Certainly!" in text) == (form == "prose")
    assert ("```" in text) == (form == "fences")


@pytest.mark.parametrize("form", VERDICT_FORMS, indirect=True)
@pytest.mark.parametrize("adapter", [dspy.ChatAdapter(), dspy.JSONAdapter()])
def test_verdicts_come_in_each_form_and_the_text_is_good(form: str, adapter: Any) -> None:
    text = reply_to(asked(RepairChild, INTEGRATION, adapter), H100_QWEN3_8B, FAITHFUL, 0).text
    assert set(rules_in(text)) == set(RULES[:4])
    numbers = [number for number in (5, 6, 7) if f'"child": {number}' in text.replace("'", '"').replace("\\", "")]
    assert numbers == {"some verdicts": [5, 7], "unknown verdicts": [5, 6, 7], "python list": [5, 6, 7]}.get(form, [])
    assert ("good" in text) == (form == "unknown verdicts")
    assert ("verdicts" in text) == (form != "no verdicts")
    assert ("'child'" in text) == (form == "python list")


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
