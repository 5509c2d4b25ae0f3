"""Splits are drawn by the seed alone and never overlap."""

from __future__ import annotations

from dataclasses import replace

import dspy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads.definition import Definition, Pools, Size, text_of
from benchmarks.workloads.registry import workload_named
from dspy_flashevolve.sim import PROFILES, LengthLaw
from tests.benchmarks.workloads.samples import NAMES, REAL_NAMES
from tests.fakes import task_lm

QUESTIONS = st.lists(st.integers(0, 40).map(str), max_size=30)


def _definition(*pools: list[str] | None) -> Definition:
    made = [
        None if pool is None else [dspy.Example(question=one).with_inputs("question") for one in pool] for pool in pools
    ]
    return Definition(
        name="things",
        size=Size(1, 1, 1),
        pools=lambda: Pools(made[0] or [], made[1], made[2]),
        question="question",
        program=lambda: dspy.Predict("question -> answer"),
        metric=lambda gold, pred: dspy.Prediction(score=1.0, feedback=""),
        outputs={"self": "answer"},
        reply_length=LengthLaw(10, 0.1),
    )


@given(
    train=QUESTIONS, val=st.none() | QUESTIONS, test=st.none() | QUESTIONS, size=st.integers(0, 8), seed=st.integers()
)
def test_no_question_is_drawn_twice(
    train: list[str], val: list[str] | None, test: list[str] | None, size: int, seed: int
) -> None:
    definition = _definition(train, val, test)
    try:
        drawn = definition.drawn(Size(size, size, size), seed)
    except ValueError:
        return
    questions = [one.question for one in (*drawn.trainset, *drawn.valset, *drawn.testset)]
    assert len(set(questions)) == len(questions) == 3 * size
    again = definition.drawn(Size(size, size, size), seed)
    assert (again.trainset, again.valset, again.testset) == (drawn.trainset, drawn.valset, drawn.testset)


def test_a_test_pool_keeps_what_others_share_with_it() -> None:
    drawn = _definition(["a", "b", "c"], ["a", "d", "e"], ["b", "d"]).drawn(Size(2, 1, 2), 0)
    assert {one.question for one in drawn.testset} == {"b", "d"}
    assert {one.question for one in drawn.trainset} == {"a", "c"}
    assert [one.question for one in drawn.valset] == ["e"]


def test_too_few_rows_are_named() -> None:
    with pytest.raises(ValueError, match="things has 1 rows left for val, 2 were asked for"):
        _definition(["a", "b", "c"], None, None).drawn(Size(2, 2, 0), 0)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="val must not be negative, got -1"):
        Size(1, -1, 0)


@pytest.mark.parametrize("name", NAMES)
def test_another_seed_draws_another_order(name: str) -> None:
    drawn = [workload_named(name, train=10, val=5, test=2, seed=seed).trainset for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("name", REAL_NAMES)
def test_the_real_rows_fill_the_usual_size(name: str, real_rows: object) -> None:
    workload = workload_named(name)
    question = next(iter(workload.trainset[0].inputs().keys()))
    questions = [one[question] for one in (*workload.trainset, *workload.valset, *workload.testset)]
    assert len(set(questions)) == len(questions)
    assert all(value > 0 for value in vars(workload.size).values())


def test_served_gives_what_the_methods_run() -> None:
    workload, language_model = workload_named("aime", train=2, val=3, test=0), task_lm()
    served = workload.served(language_model)
    assert (len(served.trainset), len(served.valset)) == (2, 3)
    assert served.task_lm is language_model
    assert served.reflection_lm is not language_model


def test_the_profile_gets_the_lengths_of_the_workload() -> None:
    workload = workload_named("aime", train=1, val=1, test=0)
    profile = workload.profile("api-gpt-4o-mini")
    assert (profile.task_length, profile.reflection_length) == (workload.reply_length, workload.reflection_length)
    without = replace(workload, reflection_length=None).profile("api-gpt-4o-mini")
    assert without.reflection_length == PROFILES["api-gpt-4o-mini"].reflection_length


def test_text_of_a_field_that_is_not_there_is_empty() -> None:
    assert text_of(dspy.Prediction(answer=3), "answer") == "3"
    assert text_of(dspy.Prediction(), "answer") == ""
