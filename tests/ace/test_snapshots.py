"""Which playbooks are validated, and which is the best."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.ace.playbook import Playbook
from dspy_flashevolve.ace.snapshots import Scored, Snapshots

Work = Callable[[], Awaitable[None]]


def version(number: int) -> Playbook:
    return Playbook(version=number)


class Validations:
    """Validations that end when the test says so."""

    def __init__(self, at_once: int = 1, every: int = 1) -> None:
        self.begun: list[int] = []
        self.left: list[Work] = []
        self.scores: dict[int, float | None] = {}
        self.snapshots = Snapshots(every, at_once, self._validate, self._start)

    async def _validate(self, playbook: Playbook) -> Scored | None:
        self.begun.append(playbook.version)
        score = self.scores.get(playbook.version, playbook.version / 100)
        return None if score is None else Scored(playbook, score, 0.0)

    async def _start(self, work: Work) -> None:
        self.left.append(work)

    def merged(self, *versions: int) -> None:
        for number in versions:
            anyio.run(self.snapshots.merged, version(number))

    def end_one(self) -> None:
        anyio.run(self.left.pop(0))


def test_a_snapshot_is_taken_every_so_many_samples() -> None:
    of = Validations(at_once=9, every=3)
    of.merged(*range(1, 8))
    while of.left:
        of.end_one()
    assert of.begun == [3, 6]


def test_of_those_that_wait_the_newest_is_validated_and_the_others_are_superseded() -> None:
    of = Validations()
    of.merged(1, 2, 3, 4)
    assert (len(of.left), of.snapshots.running) == (1, 1)
    of.end_one()
    of.end_one()
    assert of.begun == [1, 4]
    assert (of.snapshots.superseded, of.snapshots.running, of.left) == (2, 0, [])


def test_a_version_is_validated_once() -> None:
    of = Validations(at_once=2)
    of.merged(1, 1)
    of.end_one()
    of.merged(1)
    assert (of.begun, of.left) == ([1], [])


def test_the_last_playbook_is_validated_unless_its_version_has_a_score() -> None:
    of = Validations()
    of.merged(1)
    of.end_one()
    anyio.run(of.snapshots.finish, version(1))
    anyio.run(of.snapshots.finish, version(2))
    assert of.begun == [1, 2]


def test_one_that_got_no_score_is_not_the_best_and_is_tried_again_at_the_end() -> None:
    of = Validations()
    of.scores[1] = None
    of.merged(1)
    of.end_one()
    assert of.snapshots.best is None
    del of.scores[1]
    anyio.run(of.snapshots.finish, version(1))
    assert of.snapshots.best is not None


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_the_best_is_the_first_with_the_highest_score(scores: list[float]) -> None:
    of = Validations(at_once=9)
    of.scores = dict(enumerate(scores))
    of.merged(*range(len(scores)))
    while of.left:
        of.end_one()
    assert of.snapshots.best is not None
    assert of.snapshots.best.playbook.version == scores.index(max(scores))
