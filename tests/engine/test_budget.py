"""DESIGN section 4, invariant 2: spent + reserved never exceeds the limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.engine.errors import BudgetError
from dspy_flashevolve.engine.steps import Budget, Reservation

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "lend", "settle", "cover", "refund"]),
        st.integers(0, 12),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(st.integers(0, 50), STEPS)
def test_spent_and_reserved_never_exceed_the_limit_and_nothing_is_lost(
    limit: int, steps: list[tuple[str, int, int]]
) -> None:
    budget, held = Budget(limit), list[Reservation]()
    for action, calls, which in steps:
        if action == "reserve":
            reservation = budget.reserve(calls)
            assert (reservation is None) == (calls > (budget.left or 0) and reservation is None)
            held.extend([reservation] if reservation is not None else [])
        elif held and action == "settle":
            one = held[which % len(held)]
            one.settle(min(calls, one.open))
        elif held and action == "cover":
            one, left = held[which % len(held)], budget.left or 0
            assert one.cover(calls) == (one.open >= calls)
            assert (budget.left or 0) <= left
        elif held and action == "lend":
            assert held[which % len(held)].lend(held[calls % len(held)], 10**6) is False
        elif held:
            held[which % len(held)].refund()
        assert budget.spent + budget.reserved <= limit
        assert budget.reserved == sum(one.open for one in held)
        assert budget.spent == sum(one.settled for one in held)
        assert budget.left == limit - budget.spent - budget.reserved


def test_settling_more_than_is_reserved_is_an_error() -> None:
    reservation = Budget(5).reserve(2)
    assert reservation is not None
    with pytest.raises(BudgetError, match="cannot settle 3 calls: 2 are reserved"):
        reservation.settle(3)
