"""The ways in which a fallible model falls short: each does what it says, as often as it says."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean

import dspy
import pytest

from benchmarks.models import REPLY_MODELS, reply_model_named
from benchmarks.models.fallible import HARMFUL_SENTENCES, RECURRING_HARM, FallibleModel, harmful_sentences
from dspy_flashevolve.sim import HouseRules
from dspy_flashevolve.sim.words import (
    USELESS_SENTENCES,
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


def test_the_shares_of_reflections_that_do_nothing_and_that_do_harm() -> None:
    texts = reflections(FallibleModel(useless=0.2, harmful=0.3, rules_added=None), count=2000)
    assert mean(bool(useless_sentences(text)) for text in texts) == pytest.approx(0.2, abs=0.03)
    assert mean(bool(harmful_sentences(text)) for text in texts) == pytest.approx(0.3, abs=0.03)
    assert mean(bool(rules_in(text)) for text in texts) == pytest.approx(0.5, abs=0.03)


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


# Integration


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
