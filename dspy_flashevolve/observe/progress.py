"""A progress bar over metric calls: tqdm in scripts, its widget in notebooks."""

from __future__ import annotations

import warnings
from typing import Any

from dspy_flashevolve.engine.events import Committed, Event, RolloutFinished, StepClosed, StepOpened
from dspy_flashevolve.engine.scheduler import Scheduler


class Progress:
    """Shows metric calls against the budget, slots busy, live steps and the best score.

    Args:
        name: of the optimizer.
        total: metric calls in the budget; None for an open end.
    """

    def __init__(self, name: str, total: int | None) -> None:
        self._name, self._total = name, total
        self._scheduler: Scheduler | None = None
        self._bar: Any = None
        self._live = 0
        self._best: float | None = None

    def begin(self, scheduler: Scheduler) -> None:
        """Show the bar; the scheduler knows how many slots are busy."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tqdm.auto warns where a notebook has no widgets, and falls back
            from tqdm.auto import tqdm
        self._scheduler = scheduler
        self._bar = tqdm(total=self._total, desc=self._name, unit="rollouts", dynamic_ncols=True)

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if self._scheduler is None:
            return
        if isinstance(event, RolloutFinished):
            self._bar.update(1)
        elif isinstance(event, StepOpened | StepClosed):
            self._live = event.live
        elif isinstance(event, Committed):
            self._best = event.best_score
        else:
            return
        if isinstance(event, StepClosed | Committed):
            used = self._scheduler.statistics()
            best = "-" if self._best is None else f"{self._best:.3f}"
            self._bar.set_postfix_str(f"slots {used.busy}/{used.limit}, live {self._live}, best {best}", refresh=False)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()
