"""A progress bar over metric calls: tqdm in scripts, its widget in notebooks."""

from __future__ import annotations

import warnings
from typing import Any

from dspy_flashevolve.engine.events import Committed, Event, RolloutFinished, TicketClosed, TicketOpened
from dspy_flashevolve.engine.slots import Slots


class Progress:
    """Shows metric calls against the budget, slots busy, live tickets and the best score.

    Args:
        total: metric calls in the budget; None for an open end.
        slots: for how many are busy.
        name: of the optimizer.
    """

    def __init__(self, total: int | None, slots: Slots, name: str = "AsyncGEPA") -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tqdm.auto warns where a notebook has no widgets, and falls back
            from tqdm.auto import tqdm
        self._slots = slots
        self._bar: Any = tqdm(total=total, desc=name, unit="rollouts", dynamic_ncols=True)
        self._live = 0
        self._best: float | None = None

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, RolloutFinished):
            self._bar.update(1)
        elif isinstance(event, TicketOpened | TicketClosed):
            self._live = event.live
        elif isinstance(event, Committed):
            self._best = event.best_score
        else:
            return
        if isinstance(event, TicketClosed | Committed):
            used = self._slots.statistics()
            best = "-" if self._best is None else f"{self._best:.3f}"
            self._bar.set_postfix_str(f"slots {used.busy}/{used.limit}, live {self._live}, best {best}", refresh=False)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()
