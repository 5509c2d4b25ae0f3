"""The multi-hop program and its feedback."""

from __future__ import annotations

import dspy
import pytest

from benchmarks.workloads.hotpotqa import metric
from benchmarks.workloads.registry import workload_named
from tests.fakes import fake_lm, reply_for

GOLD = dspy.Example(answer="Chief of Protocol", titles=["Kiss and Tell", "Shirley Temple"])


def _found(first: list[str], second: list[str], answer: str = "Chief of Protocol") -> dspy.Prediction:
    return dspy.Prediction(first_titles=first, second_titles=second, answer=answer)


def test_the_second_query_looks_for_what_the_first_did_not_find() -> None:
    pytest.importorskip("bm25s")
    example = workload_named("hotpotqa", train=1, val=0, test=0).trainset[0]
    place, person = example.titles
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return reply_for(prompt, first_query=place, second_query=place, reasoning="So.", answer="x")

    with dspy.context(lm=fake_lm(answer)):
        prediction = workload_named("hotpotqa", train=1, val=0, test=0).program()(**example.inputs())
    assert place in prediction.first_titles
    assert not set(prediction.first_titles) & set(prediction.second_titles)
    assert f"{place} | " not in prompts[0]
    assert f"{place} is governed by {person}." in prompts[1]


def test_a_query_searches_the_paragraphs_of_all_rows_and_no_prompt_holds_them() -> None:
    pytest.importorskip("bm25s")
    workload = workload_named("hotpotqa", train=10, val=10, test=10)
    asked, other = workload.trainset[0], workload.testset[0]
    assert set(asked.inputs().keys()) == {"question"}
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return reply_for(prompt, first_query=other.titles[0], second_query="zzz", reasoning="So.", answer="x")

    with dspy.context(lm=fake_lm(answer)):
        prediction = workload.program()(**asked.inputs())
    assert other.titles[0] in prediction.first_titles
    assert all("Bystander" not in prompt for prompt in prompts)


def test_a_part_of_the_answer_gets_a_part_of_the_score() -> None:
    verdict = metric(GOLD, _found(GOLD.titles, [], "Protocol"))
    assert verdict.score == 0.5
    assert 'The answer "Protocol" is wrong: the right one is "Chief of Protocol".' in verdict.feedback


def test_missed_titles_are_named() -> None:
    feedback = metric(GOLD, _found(["Kiss and Tell"], ["Janet Waldo"])).feedback
    assert 'found "Kiss and Tell", "Janet Waldo" and missed the supporting paragraphs "Shirley Temple".' in feedback


def test_the_first_query_hears_of_its_own_titles_only() -> None:
    prediction = _found(["Kiss and Tell"], ["Shirley Temple"])
    assert '"Shirley Temple"' in metric(GOLD, prediction, None, "first_query").feedback
    assert "missed" in metric(GOLD, prediction, None, "first_query").feedback
    assert "missed" not in metric(GOLD, prediction, None, "second_query").feedback
