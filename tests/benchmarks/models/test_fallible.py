"""The ways in which a fallible model falls short: each does what it says, as often as it says."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from statistics import mean
from typing import Any

import dspy
import pytest

from benchmarks.models import REPLY_MODELS, reply_model_named
from benchmarks.models.fallible import HARMFUL_SENTENCES, RECURRING_HARM, FallibleModel, harmful_sentences
from dspy_flashevolve.gepa.parts import normal, parts_of
from dspy_flashevolve.sim import HouseRules
from dspy_flashevolve.sim.words import (
    USELESS_SENTENCES,
    WORDINGS,
    WORDS,
    Choices,
    Rule,
    rules_in,
    useless_sentences,
    words_present,
)

RULES = [Rule(number, word) for number, word in enumerate(WORDS[:40], start=1)]
HEAD = "Do it well."
FEEDBACK = "Missed: " + " ".join(map(str, RULES[:20]))


def text_of(*parts: object) -> str:
    return "\n".join([HEAD, *map(str, parts)])


def many(count: int = 600) -> list[Choices]:
    return [Choices(0, f"request {index}") for index in range(count)]


def reflections(model: FallibleModel, current: str = HEAD, feedback: str = FEEDBACK, count: int = 600) -> list[str]:
    return [model.new_instruction(current, feedback, choices) for choices in many(count)]


def integrations(model: FallibleModel, head: str, added: str, count: int = 300) -> list[str]:
    child = "### Child 1\nWhat it changed:\n" + "\n".join(f"+ {line}" for line in added.splitlines())
    return [model.integrate(head, child, choices)[1] for choices in many(count)]


# Reflections


@pytest.mark.parametrize("reads", [0.0, 0.3, 1.0])
def test_each_named_rule_is_written_with_the_probability_that_it_is_read(reads: float) -> None:
    model = FallibleModel(rules_added=None, reads=reads, useless=0)
    written = [len(rules_in(text)) for text in reflections(model)]
    assert mean(written) == pytest.approx(20 * reads, abs=0.3)
    assert max(written) <= 20


def test_a_reflection_that_reads_nothing_says_something_that_does_nothing() -> None:
    for text in reflections(FallibleModel(reads=0, useless=0, harmful=0), count=30):
        assert (rules_in(text), len(useless_sentences(text)), harmful_sentences(text)) == ([], 1, [])


def test_the_shares_of_reflections_that_do_nothing_and_that_do_harm() -> None:
    texts = reflections(FallibleModel(useless=0.2, harmful=0.3, rules_added=None), count=2000)
    assert mean(bool(useless_sentences(text)) for text in texts) == pytest.approx(0.2, abs=0.03)
    assert mean(bool(harmful_sentences(text)) for text in texts) == pytest.approx(0.3, abs=0.03)
    assert mean(bool(rules_in(text)) for text in texts) == pytest.approx(0.5, abs=0.03)


def test_harm_is_mostly_distinct_and_sometimes_recurs() -> None:
    texts = reflections(FallibleModel(useless=0, harmful=1, recurring=0.25), count=1000)
    sentences = [sentence for text in texts for sentence in harmful_sentences(text)]
    assert len(sentences) == 1000
    assert mean(sentence in RECURRING_HARM for sentence in sentences) == pytest.approx(0.25, abs=0.04)
    assert len(set(sentences)) > 150


def test_sentences_are_told_from_each_other_and_hold_no_word_of_a_rule() -> None:
    for sentence in USELESS_SENTENCES:
        assert (useless_sentences(sentence), harmful_sentences(sentence)) == ([sentence], [])
    for sentence in (*HARMFUL_SENTENCES, *RECURRING_HARM):
        assert (useless_sentences(sentence), harmful_sentences(sentence)) == ([], [sentence])
    everything = " ".join([*USELESS_SENTENCES, *HARMFUL_SENTENCES, *RECURRING_HARM]).lower()
    assert not [word for word in WORDS if word in everything]


# Obedience


def test_each_harmful_sentence_lowers_the_obedience_to_every_rule() -> None:
    model = FallibleModel(obedience=0.8, harm=0.5)
    clean, harmed = text_of(*RULES[:3]), text_of(*RULES[:3], *HARMFUL_SENTENCES[:2])
    assert set(model.obeyed(clean).values()) == {0.8}
    assert set(model.obeyed(harmed).values()) == {0.8 * 0.25}
    kept = [len(words_present(model.answer(harmed, choices), WORDS)) for choices in many()]
    assert mean(kept) == pytest.approx(3 * 0.2, abs=0.1)


def test_length_counts_rules_and_added_sentences() -> None:
    model = FallibleModel(obedience=1, crowding=0.1, harm=1)
    for parts, length in ((RULES[:4], 4), ([*RULES[:4], USELESS_SENTENCES[0], HARMFUL_SENTENCES[0]], 6)):
        assert set(model.obeyed(text_of(*parts)).values()) == {math.exp(-0.1 * length)}


def test_obedience_differs_from_rule_to_rule_and_some_rules_are_never_obeyed() -> None:
    model = FallibleModel(unevenness=1, ignored=0.25)
    shares = [model.obedience_to(f"word{number}") for number in range(2000)]
    assert mean(share == 0 for share in shares) == pytest.approx(0.25, abs=0.03)
    assert mean(share for share in shares if share) == pytest.approx(0.5, abs=0.03)
    assert max(shares) > 0.95
    assert [model.obedience_to(word) for word in WORDS] == [model.obedience_to(word) for word in WORDS]
    assert {FallibleModel().obedience_to(word) for word in WORDS} == {1.0}


def test_a_rewriting_reflection_learns_as_much_and_leaves_no_part_as_it_was() -> None:
    faithful, start = FallibleModel(forgets=0, useless=0), text_of(*RULES[:4])
    current, feedback = start, "Missed: " + " ".join(map(str, RULES[3:9]))
    for choices in many(40):
        plain, text = (
            model.new_instruction(current, feedback, choices) for model in (faithful, replace(faithful, rewrites=1.0))
        )
        assert set(rules_in(text)) == set(rules_in(plain))
        assert HEAD in text
        assert len(parts_of(text)) < len(parts_of(current)) or len(parts_of(current)) == 1
        assert not {normal(part.text) for part in parts_of(text)} & {normal(part.text) for part in parts_of(current)}
        current = start if len(rules_in(text)) == 9 else text


# Integration


def test_a_crowd_is_integrated_worse_than_a_few() -> None:
    model = FallibleModel(forgets=0, overload=0.05)

    def kept(count: int) -> float:
        children = "\n".join(f"### Child {number}\n+ {RULES[number]}" for number in range(count))
        texts = [model.integrate(HEAD, children, choices)[1] for choices in many(300)]
        return mean(len(rules_in(text)) / count for text in texts)

    assert kept(1) == pytest.approx(0.951, abs=0.04)
    assert kept(16) == pytest.approx(0.449, abs=0.04)


def test_an_integration_puts_in_and_drops_parts_as_often_as_the_model_says() -> None:
    model = FallibleModel(forgets=0, overload=0, keeps=0.7, loses=0.2)
    head, added = text_of(*RULES[:10], USELESS_SENTENCES[5]), text_of(*RULES[10:20], HARMFUL_SENTENCES[5])
    texts = integrations(model, head, added)
    held = [set(rules_in(text)) for text in texts]
    assert mean(len(rules & set(RULES[:10])) for rules in held) == pytest.approx(8, abs=0.3)
    assert mean(len(rules & set(RULES[10:20])) for rules in held) == pytest.approx(7, abs=0.3)
    assert mean(bool(useless_sentences(text)) for text in texts) == pytest.approx(0.8, abs=0.07)
    assert mean(bool(harmful_sentences(text)) for text in texts) == pytest.approx(0.7, abs=0.07)
    assert all(text.startswith(HEAD) for text in texts)


def test_a_rule_in_other_words_is_another_line_and_works_as_well() -> None:
    model = FallibleModel(obedience=1, forgets=0, overload=0, rewords=0.5)
    head = text_of(*RULES[:20])
    texts = integrations(model, head, "")
    changed = [len(set(head.splitlines()) - set(text.splitlines())) for text in texts]
    assert mean(changed) == pytest.approx(10, abs=0.5)
    for text in texts[:20]:
        assert rules_in(text) == RULES[:20]
        assert len(words_present(model.answer(text, Choices(0, text)), WORDS)) == 20
    assert len({str(RULES[0].reworded(by)) for by in range(WORDINGS)}) == WORDINGS


# Feedback and noise


def test_feedback_leaves_missed_rules_unnamed_as_often_as_the_model_says() -> None:
    task = HouseRules(reply_model=FallibleModel(vague=0.4))
    results = [task.metric(gold, dspy.Prediction(answer="Nothing.")) for gold in task.trainset(300)]
    assert {result.score for result in results} == {0.0}
    assert mean(len(rules_in(result.feedback)) / 6 for result in results) == pytest.approx(0.6, abs=0.04)
    gold = task.trainset(1)[0]
    assert len({task.metric(gold, dspy.Prediction(answer=f"{number}")).feedback for number in range(20)}) > 1


# True scores


@pytest.mark.long
def test_the_true_score_is_what_a_large_sample_scores() -> None:
    for name in REPLY_MODELS:
        task = HouseRules(reply_model=REPLY_MODELS[name])
        rules = task.all_rules()
        text = text_of(*rules[:9], USELESS_SENTENCES[3], HARMFUL_SENTENCES[7])
        scores: list[float] = []
        for index, gold in enumerate(task.valset(300)):
            reply = task.reply_model.answer(text, Choices(0, f"{index} {gold.question}"))
            scores.append(task.metric(gold, dspy.Prediction(answer=reply)).score)
        assert mean(scores) == pytest.approx(task.true_score([text]), abs=0.03)


def test_no_choice_of_rules_has_a_higher_true_score_than_the_optimum() -> None:
    for name in REPLY_MODELS:
        task = HouseRules(reply_model=REPLY_MODELS[name])
        best = rules_in(task.optimal_instruction())
        worth = sorted(task.all_rules(), key=lambda rule: task.reply_model.obedience_to(rule.word), reverse=True)
        others = [text_of(*worth[:length]) for length in range(25)]
        assert task.optimum == pytest.approx(max(task.true_score([text]) for text in others))
        assert task.true_score([text_of(*best, HARMFUL_SENTENCES[0])]) <= task.optimum


# Named models


def test_the_named_models_go_from_obliging_to_harsh() -> None:
    optima = [HouseRules(reply_model=REPLY_MODELS[name]).optimum for name in ("obliging", "plain", "harsh")]
    assert all(kinder > harsher + 0.05 for kinder, harsher in pairwise(optima))
    with pytest.raises(ValueError, match="unknown model 'kind': choose one of obliging, plain"):
        reply_model_named("kind")


@pytest.mark.parametrize(
    "bad",
    [
        *({name: 1.5} for name in ("ignored", "reads", "vague", "harmful", "harm", "recurring", "keeps", "loses")),
        *({name: -0.5} for name in ("rewords", "unevenness")),
        {"useless": 0.6, "harmful": 0.6},
    ],
)
def test_impossible_numbers_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        FallibleModel(**bad)
