"""The pool: what callbacks hear begin has an end."""

from __future__ import annotations

import pytest

from dspy_flashevolve.engine.steps import Budget, Reservation, Step, step_rng
from tests.contract.surface import Heard
from tests.gepa.pools import iterations_of


def step_of(number: int) -> Step:
    return Step(number, step_rng(number, seed=0), Reservation(Budget(None), 0))


@pytest.mark.parametrize("ends", ["finish", "fail"])
def test_what_callbacks_heard_begin_has_an_end_also_where_a_stop_came_during_the_selection(ends: str) -> None:
    heard = Heard()
    iterations = iterations_of(callbacks=[heard])
    for number in range(3):
        iterations.begin(step_of(number))
    iterations.end(step_of(1), accepted=True)
    pool = iterations.pool
    if ends == "finish":
        pool.finish()
    else:
        pool.fail(RuntimeError("the run was ended"))
    ended = [(event["iteration"], event["proposal_accepted"]) for event in heard.of("on_iteration_end")]
    assert ended == [(2, True), (1, False), (3, False)]
    assert sorted(one for one, _ in ended) == [event["iteration"] for event in heard.of("on_iteration_start")]
    pool.close()
