"""Replies: obedience, reflection, lengths; equal for equal requests."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import mean, median
from typing import Any

import dspy
import pytest

from dspy_flashevolve.engine.staleness import StaleChild
from dspy_flashevolve.modules.rewriting import StaleCandidateReflection
from dspy_flashevolve.sim.backend import H100_QWEN3_8B
from dspy_flashevolve.sim.prompts import ChatRequest, parse_chat_request
from dspy_flashevolve.sim.replies import Repeats, ReplyModel, reply_to
from dspy_flashevolve.sim.words import (
    FILLER_CLOSING,
    FILLER_OPENING,
    FILLER_SENTENCES,
    USELESS_SENTENCES,
    WORDS,
    Choices,
    Rule,
    instructed_words,
    rules_in,
    words_present,
)
from tests.fakes import fake_lm

RULES = [Rule(number, word) for number, word in enumerate(WORDS[:10], start=1)]
CURRENT = "\n".join(["Do it well.", *map(str, RULES[:4])])
FEEDBACK = json.dumps({"Feedback": "Missed: " + " ".join(map(str, RULES[3:9]))})
FAITHFUL = ReplyModel(forgets=0, useless=0)


def request(text: str, **extra: object) -> ChatRequest:
    return parse_chat_request(json.dumps({"messages": [{"role": "user", "content": text}], **extra}).encode())


def many(n: int = 400) -> list[Choices]:
    return [Choices(0, f"request {index}") for index in range(n)]


def test_the_words_are_at_least_96_and_none_lies_in_another_or_in_the_filler() -> None:
    assert len(set(WORDS)) == len(WORDS) >= 96
    assert not [(a, b) for a in WORDS for b in WORDS if a != b and a in b]
    filler = " ".join([FILLER_OPENING, *FILLER_SENTENCES, FILLER_CLOSING, *USELESS_SENTENCES]).lower()
    assert not [word for word in WORDS if word in filler]


def test_each_instructed_word_is_there_with_the_models_obedience() -> None:
    kept = [len(words_present(ReplyModel().answer(CURRENT, choices), WORDS)) for choices in many()]
    assert mean(kept) == pytest.approx(4 * 0.9, abs=0.1)


def test_a_faithful_reflection_adds_one_or_two_missed_rules_and_keeps_the_rest() -> None:
    sizes: set[int] = set()
    for choices in many():
        rules = rules_in(FAITHFUL.new_instruction(CURRENT, FEEDBACK, choices))
        assert set(RULES[:4]) <= set(rules) <= set(RULES[:9])
        sizes.add(len(rules) - 4)
    assert sizes == {1, 2}


def test_reflections_forget_and_are_useless_as_often_as_the_model_says() -> None:
    results = [set(rules_in(ReplyModel().new_instruction(CURRENT, FEEDBACK, choices))) for choices in many(2000)]
    assert mean(not set(RULES[:4]) <= rules for rules in results) == pytest.approx(0.1, abs=0.03)
    assert mean(not rules - set(RULES[:4]) for rules in results) == pytest.approx(0.15, abs=0.03)


def test_a_reply_depends_on_content_and_seed_only() -> None:
    def text(prompt: str, seed: int) -> str:
        return reply_to(request(prompt), H100_QWEN3_8B, ReplyModel(), seed).text

    prompts = [f"{CURRENT} {index}" for index in range(30)]
    system = [json.dumps({"messages": [{"role": "system", "content": prompt}]}).encode() for prompt in prompts]
    forward = [reply_to(parse_chat_request(body), H100_QWEN3_8B, ReplyModel(), 0) for body in system]
    backward = [reply_to(parse_chat_request(body), H100_QWEN3_8B, ReplyModel(), 0) for body in reversed(system)]
    other_seed = [reply_to(parse_chat_request(body), H100_QWEN3_8B, ReplyModel(), 1) for body in system]
    assert forward == backward[::-1]
    assert forward != other_seed
    assert text("a", 0) == text("a", 0)


def test_lengths_follow_the_profile_and_are_cut_at_max_tokens() -> None:
    lengths = [reply_to(request(str(i)), H100_QWEN3_8B, ReplyModel(), 0).completion_tokens for i in range(1000)]
    assert median(lengths) == pytest.approx(250, rel=0.1)
    assert max(lengths) > 1500
    cut = [reply_to(request(str(i), max_tokens=250), H100_QWEN3_8B, ReplyModel(), 0) for i in range(100)]
    assert {reply.finish_reason for reply in cut} == {"stop", "length"}
    assert max(reply.completion_tokens for reply in cut) == 250
    assert all((reply.completion_tokens == 250) >= (reply.finish_reason == "length") for reply in cut)
    short = replace(H100_QWEN3_8B, max_output_tokens=10)
    assert reply_to(request("x", max_tokens=10**30), short, ReplyModel(), 0).completion_tokens == 10


def test_rules_are_found_in_plain_and_in_escaped_text_once_each() -> None:
    text = (
        'Rule 01: mention the word "Amber". ' + json.dumps('Rule 02: mention the word "plum".') + str(Rule(3, "plum"))
    )
    assert rules_in(text) == [Rule(1, "amber"), Rule(2, "plum")]
    assert instructed_words(text) == ["amber", "plum"]


@pytest.mark.parametrize("bad", [{"obedience": 1.1}, {"forgets": -0.1}, {"useless": 2}, {"rules_added": 0}])
def test_a_reply_model_refuses_impossible_numbers(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        ReplyModel(**bad)  # type: ignore[arg-type]


# Integrations


@pytest.mark.parametrize("adapter", [dspy.ChatAdapter(), dspy.JSONAdapter()])
def test_the_default_module_reads_what_the_simulated_model_writes(adapter: Any) -> None:
    def simulated(prompt: str) -> str:
        system, _, user = prompt.rpartition("\n[[ ## component ## ]]")
        messages = [{"role": "system", "content": system}, {"role": "user", "content": f"[[ ## component ## ]]{user}"}]
        read = parse_chat_request(json.dumps({"messages": messages}).encode())
        assert read.kind == "integration"
        return reply_to(read, H100_QWEN3_8B, FAITHFUL, 0).text

    head = {"p": f"Do it well.\n{RULES[0]}"}
    children = [
        StaleChild(number, {"p": f"Do it well.\n{rule}"}, {"p": "Do it well."}, 0.5)
        for number, rule in ((2, RULES[4]), (3, RULES[0]))
    ]
    with dspy.context(lm=fake_lm(simulated), adapter=adapter):
        seen = StaleCandidateReflection()(head=head, children=children)
    assert {verdict.child: verdict.verdict for verdict in seen.verdicts} == {2: "orthogonal", 3: "subsumed"}
    assert rules_in(seen.texts["p"]) == [RULES[0], RULES[4]]


def test_a_request_that_comes_again_is_answered_anew_by_a_model_that_resamples() -> None:
    def texts(model: ReplyModel) -> list[str]:
        body = {"messages": [{"role": "system", "content": CURRENT}]}
        asked, repeats = parse_chat_request(json.dumps(body).encode()), Repeats()
        return [reply_to(asked, H100_QWEN3_8B, model, 0, repeats.count(asked)).text for _ in range(5)]

    same, anew = ReplyModel(obedience=0.5), ReplyModel(obedience=0.5, resamples=True)
    assert len(set(texts(same))) == 1
    assert len(set(texts(anew))) > 1
    assert texts(anew)[0] == texts(same)[0]
