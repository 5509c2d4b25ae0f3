"""Which playbooks are validated, and which is the best."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.ace.playbook import Playbook
from dspy_flashevolve.ace.snapshots import Snapshots
from dspy_flashevolve.engine.steps import Budget, Reservation
from dspy_flashevolve.observe.statistics import SnapshotRecord

Work = Callable[[], Awaitable[None]]


def version(number: int) -> Playbook:
    return Playbook(version=number)


class Validations:
    """Validations that end when the test says so."""

    def __init__(self, every: int = 1, budget: Budget | None = None) -> None:
        self.begun: list[int] = []
        self.left: list[Work] = []
        self.scores: dict[int, float | None] = {}
        self.samples = 0
        self.snapshots = Snapshots(
            every, budget or Budget(None), 4, lambda playbook: 4, self._validate, self._start, lambda: None
        )

    async def _validate(self, playbook: Playbook, pays: Reservation) -> SnapshotRecord | None:
        self.begun.append(playbook.version)
        pays.settle(4)
        score = self.scores.get(playbook.version, playbook.version / 100)
        return None if score is None else SnapshotRecord(0.0, playbook.version, score, 0, 0)

    async def _start(self, work: Work) -> None:
        self.left.append(work)

    def learnt(self, *versions: int) -> None:
        for number in versions:
            self.samples += 1
            anyio.run(self.snapshots.after_sample, version(number), self.samples)

    def end_one(self) -> None:
        anyio.run(self.left.pop(0))


def test_of_those_that_wait_the_newest_is_validated() -> None:
    of = Validations()
    of.learnt(1, 2, 3, 4)
    assert (len(of.left), of.snapshots.is_validating) == (1, True)
    of.end_one()
    of.end_one()
    assert of.begun == [1, 4]
    assert (of.snapshots.is_validating, of.left) == (False, [])


@given(st.integers(8, 40), st.lists(st.integers(0, 4), max_size=12))
def test_the_first_and_the_last_are_validated_whatever_samples_take(limit: int, taken: list[int]) -> None:
    budget = Budget(limit)
    of = Validations(budget=budget)
    while budget.reserve(1) is not None:  # samples take all there is
        pass
    anyio.run(of.snapshots.begin, version(0))
    of.end_one()
    of.learnt(*range(1, 1 + len(taken)))
    anyio.run(of.snapshots.finish, version(99))
    assert of.begun == [0, 99]


def test_one_that_cannot_be_paid_is_tried_again_as_samples_give_calls_back() -> None:
    budget = Budget(20)
    of = Validations(budget=budget)
    samples = budget.reserve(12)
    assert samples is not None
    of.learnt(1)
    assert (of.left, of.snapshots.open) == ([], [version(1)])
    samples.refund()
    of.learnt(1)
    of.end_one()
    assert of.begun == [1]


def test_a_first_one_without_an_answer_is_tried_again_at_the_next_snapshot() -> None:
    of = Validations()
    of.scores[0] = None
    anyio.run(of.snapshots.begin, version(0))
    of.end_one()
    of.scores[0] = 0.9
    of.learnt(1)
    of.end_one()
    of.end_one()
    assert of.begun == [0, 0, 1]
    assert of.snapshots.best is not None
    assert of.snapshots.best.version == 0
