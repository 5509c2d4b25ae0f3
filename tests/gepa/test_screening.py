"""Which children are screened: the first ones, and later ones as long as not nearly all of them beat their parents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest

from dspy_flashevolve.gepa.credit import Credit
from dspy_flashevolve.gepa.screening import ENOUGH, FIRST_SCREENS, Screening
from dspy_flashevolve.sim.virtual import run
from tests.contract.test_edits import Reflection, compiled, tidy


def run_ten(child: Callable[[int], Awaitable[None]]) -> None:
    """Run ten children at once, in virtual time."""

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for number in range(10):
                group.start_soon(child, number)

    run(main)


@pytest.mark.parametrize(("passes", "screened"), [(True, FIRST_SCREENS), (False, 10)])
def test_of_ten_first_children_four_are_screened_and_the_others_follow_from_that(passes: bool, screened: int) -> None:
    screening, screens, waited = Screening(), list[int](), list[float]()

    async def child(number: int) -> None:
        await screening.wait_for_first()
        waited.append(anyio.current_time())
        if screening.is_needed(4 * number + 1):  # none of the steps that are checked all the same
            with screening.running():
                screens.append(number)
                await anyio.sleep(5)
                screening.record(passes)

    run_ten(child)
    assert len(screens) == screened
    assert sorted(waited)[FIRST_SCREENS] == sorted(waited)[0] + 5, "the fifth waits"


def test_nobody_waits_for_a_screen_that_ended_in_an_error() -> None:
    screening, ended = Screening(), list[int]()

    async def child(number: int) -> None:
        await screening.wait_for_first()
        try:
            with screening.running():
                await anyio.sleep(1)
                raise LookupError
        except LookupError:
            ended.append(number)

    run_ten(child)
    assert len(ended) == 10


@pytest.mark.long
def test_a_child_that_is_in_no_head_is_counted_once_among_the_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a screen it does not join, so that it is screened all the same."""
    monkeypatch.setattr(Credit, "take", lambda *_: False)
    stats = compiled(Reflection(tidy), calls=400).async_stats
    assert stats.proposals > ENOUGH
    assert 0 < sum(stats.gaps["after_screen"].values()) <= stats.proposals
