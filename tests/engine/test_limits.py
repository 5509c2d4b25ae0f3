"""The adaptive limit on requests in flight: it grows while it binds, and stays in its bounds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.limits import GAUGE_SECONDS, WINDOW_SECONDS, AdaptiveLimit, Bounds


class Watch:
    """A clock that a test moves, and whether requests wait because of the limit."""

    def __init__(self, bounds: Bounds) -> None:
        self.seconds, self.is_pressed = 0.0, True
        self.changes: list[tuple[int, int, str]] = []
        self.limit = AdaptiveLimit(
            bounds, lambda: self.seconds, lambda: self.is_pressed, lambda *change: self.changes.append(change)
        )

    def answer(self, count: int) -> None:
        self.seconds += WINDOW_SECONDS
        for _ in range(count):
            self.limit.record_answer()
        self.seconds += WINDOW_SECONDS
        self.limit.record_answer()


def test_it_grows_while_it_binds_and_not_otherwise() -> None:
    watch = Watch(Bounds(start=4, high=64))
    watch.answer(4)
    assert 4 < watch.limit.limit <= 64
    grown, watch.is_pressed = watch.limit.limit, False
    watch.answer(40)
    assert watch.limit.limit == grown


def test_a_cut_takes_half_of_it_at_most_and_is_told() -> None:
    watch = Watch(Bounds(start=32, high=64))
    watch.limit.cut(in_flight=1, reason="refusals")
    assert 12 <= watch.limit.limit <= 16
    assert watch.changes[-1][0] == 32
    assert watch.changes[-1][2] == "refusals"


def test_it_shrinks_to_what_runs_when_many_wait_in_the_server_twice_in_a_row() -> None:
    watch = Watch(Bounds(start=32, high=64))
    for _ in range(2):
        watch.seconds += WINDOW_SECONDS
        watch.limit.record_gauge(waiting=20, running=12, cache_use=0.5)
    assert watch.limit.limit == 12


@pytest.mark.parametrize("wrong", [{"start": 0}, {"start": 5, "high": 4}, {"start": 1, "low": 2}])
def test_bounds_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="adaptive limit"):
        Bounds(**wrong)


SIGNALS = st.one_of(
    st.tuples(st.just("answer"), st.integers(0, 50)),
    st.tuples(st.just("cut"), st.integers(0, 100)),
    st.tuples(st.just("gauge"), st.integers(0, 100)),
    st.tuples(st.just("wait"), st.floats(0, 3 * GAUGE_SECONDS)),
)


@given(st.integers(1, 8), st.integers(0, 8), st.integers(0, 64), st.lists(SIGNALS, max_size=60), st.booleans())
def test_no_signals_drive_it_out_of_its_bounds(
    low: int, more: int, most: int, signals: list[Any], pressed: bool
) -> None:
    bounds = Bounds(low=low, start=low + more, high=low + more + most)
    watch = Watch(bounds)
    watch.is_pressed = pressed
    for kind, value in signals:
        if kind == "answer":
            watch.answer(value)
        elif kind == "cut":
            watch.limit.cut(value, "refusals")
        elif kind == "gauge":
            watch.limit.record_gauge(waiting=value, running=value / 2, cache_use=0.5)
        else:
            watch.seconds += value
        assert bounds.low <= watch.limit.limit <= bounds.high
