"""The phases of the last head's validation, and what admission may read of the head meanwhile."""

from __future__ import annotations

import random
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from gepa.core.state import ValsetEvaluation

from dspy_flashevolve.engine.steps import Budget, Step
from dspy_flashevolve.engine.store import Store
from dspy_flashevolve.gepa.credit import Head, Outlook
from dspy_flashevolve.gepa.edit_search import EditSearch
from dspy_flashevolve.gepa.ending import Phase
from dspy_flashevolve.gepa.heads import CONSOLIDATION, Heads
from dspy_flashevolve.gepa.records import Proposal, Validated
from tests.gepa.pools import iterations_of

BETTER = Head({"p": "better"}, frozenset({0}), gain=0.5)
WORSE = Head({"p": "worse"}, frozenset(), gain=0.0)


class Changes:
    """Stands for Credit: its head is what it is set to."""

    def __init__(self) -> None:
        self.scale, self.parent, self.outlook = 1.0, 0, Outlook(joins=True)
        self.now = BETTER

    def to_json(self) -> dict[str, Any]:
        return {}

    def head(self, over: frozenset[int]) -> Head:
        return WORSE if over == self.now.patches else self.now  # it is compared with the one that was tried


def heads_of(seconds_left: float = 1000.0) -> tuple[Heads, Any, Changes]:
    """Heads of a run of 1,000 seconds in which a validation takes 100; the run and the changes."""
    budget = Budget(None)
    budget.spent = 100
    run: Any = SimpleNamespace(
        live=[], store=Store(), budget=budget, max_seconds=1000.0,
        clock=type("Clock", (), {"began": 0.0, "__call__": lambda self: 1000.0 - seconds_left})(),
        scheduler=SimpleNamespace(limit=4, statistics=lambda: SimpleNamespace(stages={})),
    )  # fmt: skip
    changes: Any = Changes()
    iterations = iterations_of()
    nothing: Any = None
    heads = Heads(run, iterations.pool, iterations, EditSearch(changes, 0.25, "train"), nothing, [], False)
    heads.time.record(100.0)
    return heads, run, changes


def kept(head: dict[int, float], clean: dict[int, float], best: float | None = None) -> list[str]:
    """Tags of what is committed of a head and the same text written anew, by the scores of both."""
    heads, _, _ = heads_of()
    pool: Any = SimpleNamespace(
        best_score=best,
        speculative=SimpleNamespace(withdraw=lambda keys: None),
    )
    heads._pool = pool
    done = [
        Validated(Proposal({"p": tag}, [0], tag=tag), ValsetEvaluation({}, scores, None), len(scores), None, None)
        for tag, scores in (("head", head), (CONSOLIDATION, clean))
    ]
    return [made.proposal.tag for made in heads.preferred(step_of(1), done)]


def scores_of(right: int, of: int) -> dict[int, float]:
    return {example: float(example < right) for example in range(of)}


def test_the_clean_text_is_kept_alone_unless_the_head_is_better_beyond_doubt() -> None:
    both, alone = [CONSOLIDATION, "head"], [CONSOLIDATION]
    assert kept(scores_of(24, 50), scores_of(21, 50)) == alone
    assert kept(scores_of(30, 50), scores_of(21, 50)) == both
    assert kept(scores_of(20, 50), scores_of(21, 50)) == alone
    assert kept(scores_of(24, 50), scores_of(21, 50), best=0.44) == both, (
        "another candidate is better than the clean one"
    )
    assert kept(scores_of(24, 50), scores_of(21, 50), best=0.42) == alone


def test_with_few_validation_examples_the_higher_score_decides() -> None:
    assert kept({0: 1.0}, {0: 0.0}) == [CONSOLIDATION, "head"]
    assert kept({0: 1.0}, {0: 1.0}) == [CONSOLIDATION]
    assert kept(scores_of(2, 2), {0: 0.0, 1: 1.0}) == [CONSOLIDATION, "head"]
    assert kept({0: 1.0, 1: 1.0}, {2: 0.0, 3: 0.0}) == [CONSOLIDATION, "head"], "they share no example"


def step_of(number: int) -> Step:
    return Step(number, random.Random(number), Budget(None).reserve(0))  # pyright: ignore[reportArgumentType]


def played(main: Coroutine[Any, Any, None]) -> None:
    async def run_it() -> None:
        await main

    anyio.run(run_it)


@pytest.mark.parametrize(("left", "begins"), [(126.0, False), (124.0, True)])
def test_the_last_head_begins_as_long_before_max_seconds_as_a_validation_takes_and_a_quarter_more(
    left: float, begins: bool
) -> None:
    async def main() -> None:
        heads, _, _ = heads_of(left)
        given = await heads.take(step_of(0))
        assert (given is not None) == begins == heads.has_ended
        if given is not None:
            assert given.is_timed
            assert heads.pending is None
            assert await heads.take(step_of(1)) is None, "it begins once"

    played(main())


def test_where_the_validation_before_max_seconds_fails_only_the_end_of_the_calls_brings_another() -> None:
    async def main() -> None:
        heads, _, _ = heads_of(100.0)
        given = await heads.take(step_of(0))
        assert given is not None
        heads.begin(step_of(0), given)
        await heads.cancel_validation(step_of(0), given.is_timed)
        assert heads.phase is Phase.TIME_MISSED
        assert await heads.take(step_of(1)) is None
        await heads.refresh()
        assert heads.begin_last()
        again = await heads.take(step_of(2))
        assert again is not None
        assert not again.is_timed

    played(main())
