"""Splits are drawn by the seed alone and never overlap."""

from __future__ import annotations

import dspy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads.definition import Definition, Pools, Size
from benchmarks.workloads.registry import workload_named
from dspy_flashevolve.sim import LengthLaw
from tests.benchmarks.workloads.samples import REAL_NAMES

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


@pytest.mark.parametrize("name", REAL_NAMES)
def test_the_real_rows_fill_the_usual_size(name: str, real_rows: object) -> None:
    workload = workload_named(name)
    question = next(iter(workload.trainset[0].inputs().keys()))
    questions = [one[question] for one in (*workload.trainset, *workload.valset, *workload.testset)]
    assert len(set(questions)) == len(questions)
    assert all(value > 0 for value in vars(workload.size).values())
