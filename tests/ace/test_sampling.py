"""Epochs over a training set, and windows of a stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.ace.playbook import Playbook
from dspy_flashevolve.ace.sampling import Epochs, Taken, Windows
from dspy_flashevolve.engine.item import Ticket
from dspy_flashevolve.engine.pipeline import NotNow

T = TypeVar("T")


def take(data: Epochs | Windows, number: int, version: int = 0) -> Taken | NotNow:
    """What a ticket takes; where the stream is to be read first, after that."""
    ticket, playbook = Ticket.create(number, 0), Playbook(version=version)
    taken = at_once(data.take(ticket, playbook))
    if isinstance(data, Windows) and taken is NotNow.WAITING:
        at_once(data.fill())
        taken = at_once(data.take(ticket, playbook))
    return taken


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of work that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


@given(st.integers(1, 7), st.integers(1, 3), st.integers(0, 5))
def test_every_example_is_taken_once_an_epoch(size: int, epochs: int, seed: int) -> None:
    data = Epochs(list(range(size)), epochs, seed)
    taken = [take(data, number) for number in range(size * epochs)]
    indices = [one.index for one in taken if isinstance(one, Taken)]
    assert all(Counter(indices[size * e : size * (e + 1)]) == Counter(range(size)) for e in range(epochs))
    assert take(data, size * epochs) is NotNow.EXHAUSTED
    assert [take(Epochs(list(range(size)), epochs, seed), 0)] == taken[:1]


async def stream(size: int) -> AsyncIterator[Any]:
    for number in range(size):
        yield number


def test_a_window_begins_when_all_of_the_last_one_have_ended() -> None:
    data = Windows(stream(5), 2)
    first = [take(data, 0, version=7), take(data, 1, version=9)]
    assert [one.playbook for one in first if isinstance(one, Taken)] == [Playbook(version=7)] * 2
    assert take(data, 2) is NotNow.FULL
    data.ended(Ticket.create(1, 0))
    assert take(data, 2) is NotNow.FULL
    data.ended(Ticket.create(0, 0))
    second = take(data, 2, version=9)
    assert isinstance(second, Taken)
    assert (second.example, second.window, second.playbook) == (2, 1, Playbook(version=9))


def test_the_last_window_may_have_fewer_and_then_there_is_none() -> None:
    data = Windows(stream(3), 2)
    for number in range(3):
        assert isinstance(take(data, number), Taken)
        data.ended(Ticket.create(number, 0))
    assert take(data, 3) is NotNow.EXHAUSTED
    assert [(one.examples, one.score) for one in data.windows] == [(2, None), (1, None)]


def test_a_windows_score_is_the_mean_of_those_that_were_answered() -> None:
    data = Windows(stream(2), 2)
    take(data, 0)
    take(data, 1)
    data.scored(0, 0.5)
    assert data.windows[0].score == pytest.approx(0.5)
    data.scored(0, 1.0)
    assert data.windows[0].score == pytest.approx(0.75)
