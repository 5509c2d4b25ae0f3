"""How children were written is known again after a kill, each child once."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from dspy_flashevolve.gepa import resume
from dspy_flashevolve.gepa.credit import Credit
from tests.contract.worlds import World, play
from tests.fakes import hashed


class Rewriting(World):
    """Each child is the whole text in other words, and follows from what was asked; snapshots of the run directory are
    taken as a kill would leave it."""

    snap: Any = None

    async def acall(self, candidate: Any, reflective_dataset: Any, components_to_update: list[str]) -> dict[str, str]:
        self.reflections += 1
        await self.busy(self.reflection_seconds)
        key = hashed(sorted(candidate.items()), repr(reflective_dataset))
        return dict.fromkeys(components_to_update, f"0.000 text {key}. Anew {key}.")

    def metric(self, gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        if pred_name is None and self.snap is not None:
            self.snap(len(self.scored))
        return super().metric(gold, pred, trace, pred_name, pred_trace)


def copied(source: Path, to: Path) -> None:
    to.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith("journal.sqlite"):
            shutil.copy(file, to / file.name)
    name = "journal.sqlite"
    with (
        contextlib.closing(sqlite3.connect(source / name)) as one,
        contextlib.closing(sqlite3.connect(to / name)) as two,
    ):
        one.backup(two)


@pytest.mark.parametrize("at", [40, 60, 80, 100, 120])
def test_a_run_that_goes_on_knows_whether_children_are_rewrites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    credits: list[Credit] = []
    restored: list[bool | None] = []
    begin, restore = Credit.__init__, resume.restore_credit

    def begins(self: Credit, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        credits.append(self)

    def restores(journal: Any, credit: Credit) -> None:
        restore(journal, credit)
        restored.append(credit.is_of_use)

    monkeypatch.setattr(Credit, "__init__", begins)
    monkeypatch.setattr(resume, "restore_credit", restores)
    then: list[bool | None] = []
    world = Rewriting()

    def snap(calls: int) -> None:
        if calls == at:
            copied(tmp_path / "run", tmp_path / "killed")
            then.append(credits[-1].is_of_use)

    world.snap = snap
    play(world, 200, log_dir=str(tmp_path / "run"))
    assert then == [False], "children are rewrites, and the run knows it"
    play(Rewriting(), 200, log_dir=str(tmp_path / "killed"))
    assert restored[-1:] == then
