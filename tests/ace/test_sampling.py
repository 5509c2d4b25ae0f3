"""Epochs over a training set, and windows of a stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.ace.learner import Sample
from dspy_flashevolve.ace.playbook import Playbook
from dspy_flashevolve.ace.run import Epochs, Windows
from dspy_flashevolve.engine.steps import NothingToDoError


def take(data: Epochs | Windows, step: int, version: int = 0) -> Sample:
    """What a step takes, when nothing has to be waited for."""
    try:
        data.take(step, lambda: Playbook(version=version)).send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


@given(st.integers(1, 7), st.integers(1, 3), st.integers(0, 5))
def test_every_example_is_taken_once_an_epoch(size: int, epochs: int, seed: int) -> None:
    data = Epochs(list(range(size)), epochs, seed)
    indices = [take(data, number).index for number in range(size * epochs)]
    assert all(Counter(indices[size * e : size * (e + 1)]) == Counter(range(size)) for e in range(epochs))
    with pytest.raises(NothingToDoError):
        take(data, size * epochs)


@given(st.integers(1, 7), st.integers(0, 5), st.lists(st.integers(0, 20), max_size=5))
def test_what_a_step_takes_follows_from_its_number(size: int, seed: int, steps: list[int]) -> None:
    in_order, again = Epochs(list(range(size)), 21, seed), Epochs(list(range(size)), 21, seed)
    taken = [take(in_order, number).index for number in range(21)]
    assert [take(again, number).index for number in steps] == [taken[number] for number in steps]


def test_without_a_seed_every_epoch_takes_the_examples_in_their_order() -> None:
    data = Epochs(list("abc"), 2, None)
    taken = [take(data, number) for number in range(6)]
    assert [sample.example for sample in taken] == list("abcabc")
    assert [(sample.place, sample.total) for sample in taken] == [(1, 3), (2, 3), (3, 3)] * 2


async def stream(size: int) -> AsyncIterator[Any]:
    for number in range(size):
        yield number


class Waits:
    """Counts how often it was waited for the end of a window."""

    def __init__(self) -> None:
        self.times = 0

    async def __call__(self) -> None:
        self.times += 1


def test_a_window_begins_when_all_of_the_last_one_have_ended() -> None:
    waits = Waits()
    data = Windows(stream(5), 2, waits)
    first = [take(data, 0, version=7), take(data, 1, version=9)]
    assert [sample.playbook for sample in first] == [Playbook(version=7)] * 2
    assert waits.times == 1
    second = take(data, 2, version=9)
    assert waits.times == 2
    assert (second.example, second.index, second.window, second.playbook) == (2, 2, 1, Playbook(version=9))
    assert (second.place, second.total) == (3, None)


def test_the_last_window_may_have_fewer_and_then_there_is_none() -> None:
    data = Windows(stream(3), 2, Waits())
    assert [take(data, number).example for number in range(3)] == [0, 1, 2]
    with pytest.raises(NothingToDoError):
        take(data, 3)
    assert [(window.examples, window.scored, window.score) for window in data.windows] == [(2, 0, None), (1, 0, None)]


def test_a_windows_score_is_the_mean_of_those_that_were_answered() -> None:
    data = Windows(stream(2), 2, Waits())
    take(data, 0)
    data.record_score(0, 0.5)
    assert data.windows[0].score == pytest.approx(0.5)
    data.record_score(0, 1.0)
    assert data.windows[0].score == pytest.approx(0.75)


def test_what_a_stream_raises_ends_it_after_what_came_before() -> None:
    async def broken() -> AsyncIterator[Any]:
        yield 1
        raise ConnectionError("the line is dead")

    data = Windows(broken(), 2, Waits())
    assert take(data, 0).example == 1
    assert isinstance(data.failure, ConnectionError)
    with pytest.raises(NothingToDoError):
        take(data, 1)
