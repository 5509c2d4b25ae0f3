"""Runs that the tests of this folder look at: journals written row by row, and whole runs in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dspy

from dspy_flashevolve.engine.events import Committed, Event, Integrated
from dspy_flashevolve.engine.store import Rollout, RolloutKey, Store, hash_of
from tests.contract.surface import simulated
from tests.contract.worlds import Rules, play
from tests.fakes import task_lm


class Session:
    """One run on a directory: what a loop writes and tells.

    Args:
        settings: of the optimizer.
    """

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.store = Store(directory)
        self.store.append(
            "sessions", id=self.store.session, began_at=0.0, pid=1, settings=settings, fingerprints={}
        )  # fmt: skip

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def commits(self, step: int | None, index: int, parents: list[int | None], score: float, gap: int = 0) -> None:
        self.store.record_commit(step, index, index, {"answer": f"text {index}"}, parents, {}, score)
        if step is not None:
            known = tuple(parent for parent in parents if parent is not None)
            self.store(Committed(0.0, step, index, gap, index, score, score, 1, known))

    def integrates(self, step: int, *verdicts: tuple[int, str, str]) -> None:
        """Step ``step`` brings what was made of all these to its end."""
        self.store(Integrated(0.0, step, 0, tuple(member for member, *_ in verdicts), verdicts))

    def tells(self, *events: Event) -> None:
        """Events of the bus."""
        for event in events:
            self.store(event)

    def ran(
        self, step: int, texts: dict[str, str], example: int, score: float, tokens: int = 10, **options: Any
    ) -> None:
        """A rollout, with its metric call."""
        stage, split = options.get("stage", "rollout"), options.get("split", "train")
        call = self.store.record_call(stage, step)
        key = RolloutKey(self.store.record_candidate(texts), split, example)
        rollout = Rollout(None, score, tokens=tokens, cost_dollars=options.get("cost_dollars", 0.0))
        self.store.record_rollout(key, stage, step, rollout, (options.get("trace", "null"), None), 1.0, call)

    def opens(self, step: int, texts: dict[str, str], *examples: int) -> None:
        """A step on these examples."""
        ids = [str(example) for example in examples]
        self.store.record_selection(step, 0, [{"parent": 0, "candidate": hash_of(texts), "ids": ids, "base": None}])

    def ends(self, state: str, reason: str = "") -> None:
        """The session's end."""
        self.store.record_session_end(state, reason)


def with_tokens(directory: Path) -> Any:
    """A program that AsyncGEPA has made, with language models that count tokens."""
    with dspy.context(lm=task_lm()):
        return simulated(90, 2, log_dir=str(directory), num_threads=8)


def with_changes(directory: Path) -> Any:
    """One whose candidates are lists of rules, which are taken apart into changes."""
    return play(Rules(predictors=1), 250, log_dir=str(directory))
