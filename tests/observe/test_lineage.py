"""`flashevolve lineage`: the family tree, as the journal tells it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from dspy_flashevolve.cli import main
from dspy_flashevolve.engine.store import Store
from dspy_flashevolve.observe.history import read
from dspy_flashevolve.observe.terminal import tree
from tests.observe.runs import Session


def test_every_candidate_stands_under_its_first_parent_with_what_was_said_of_its_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Session(tmp_path) as session:
        session.commits(0, 1, [0], 0.5)
        session.integrates(2, (2, "orthogonal", "Adds a rule."), (3, "subsumed", "It is there."))
        session.commits(2, 2, [1, 0], 0.75, gap=1)
        session.integrates(4, (4, "orthogonal", "It did not pass its screen."))
        session.commits(None, 3, [None], 0.25)
    assert main(["lineage", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "candidate 0 (the seed)",
        "  candidate 1: score 0.500, gap 0, step 0",
        "    candidate 2: score 0.750, gap 1, step 2, also from 0",
        "      step 2: orthogonal. Adds a rule.",
        "      step 3: subsumed. It is there.",
        "  candidate 3: score 0.250, another program",
    ]


def test_what_was_said_before_and_after_a_kill_stands_once(tmp_path: Path) -> None:
    with Session(tmp_path) as killed:
        killed.integrates(7, (7, "orthogonal", "Adds."), (8, "orthogonal", "Adds, too."))
    with Session(tmp_path) as session:
        session.integrates(7, (7, "orthogonal", "Adds."), (8, "orthogonal", "Adds, too."))
        session.commits(7, 1, [0], 0.5)
    assert tree(read(tmp_path)).splitlines() == [
        "candidate 0 (the seed)",
        "  candidate 1: score 0.500, gap 0, step 7",
        "    step 7: orthogonal. Adds.",
        "    step 8: orthogonal. Adds, too.",
    ]


def test_a_commit_of_which_a_killed_run_told_nobody_is_there(tmp_path: Path) -> None:
    with Session(tmp_path) as session:
        session.store.record_commit(0, 0, 1, {"answer": "the seed"}, [], {"0": 0.5})
        session.store.record_commit(1, 1, 2, {"answer": "x"}, [0], {"0": float("nan")})
    assert tree(read(tmp_path)) == "candidate 0 (the seed): score 0.500\n  candidate 1: score nan, step 1"


def test_a_line_of_thousands_of_candidates_is_told(tmp_path: Path) -> None:
    with Session(tmp_path) as session:
        for index in range(1, 2001):
            session.store.record_commit(index, index, index, {"answer": "x"}, [index - 1], {}, 0.5)
    last = tree(read(tmp_path)).splitlines()[-1]
    assert last.strip() == "candidate 2000: score 0.500, generation 2000, step 2000"
    assert len(last) < 200


def test_the_tree_of_a_run_that_is_at_work_can_be_read(tmp_path: Path) -> None:
    with closing(Store(tmp_path)) as store:
        assert tree(read(tmp_path)) == "candidate 0 (the seed)"
        store.record_commit(0, 1, 1, {"answer": "x"}, [0], {}, 0.5)
        store.flush_blocking()
        assert "candidate 1" in tree(read(tmp_path))
