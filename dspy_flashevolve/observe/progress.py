"""A progress bar over metric calls: tqdm in scripts, its widget in notebooks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

from dspy_flashevolve.engine.events import Committed, Event, RequestFinished, RolloutFinished, SeedValidated, StepClosed
from dspy_flashevolve.engine.run import EvolutionRun
from dspy_flashevolve.engine.scheduler import Scheduler


class Display:
    """Shows runs while they go on. A callback of dspy's that is one takes the place of the bar."""


class Progress(Display):
    """Shows metric calls against the budget, and beside them scores, requests in flight, tokens and dollars.

    Args:
        name: of the optimizer.
        total: metric calls in the budget; None for an open end.
    """

    def __init__(self, name: str, total: int | None) -> None:
        self._name, self._total = name, total
        self._scheduler: Scheduler | None = None
        self._bar: Any = None
        self._accepted = self._tokens = 0
        self._dollars = 0.0
        self._seed: float | None = None
        self._best: float | None = None
        self._streams: list[tuple[logging.StreamHandler[Any], Any]] = []

    @contextmanager
    def observing(self, run: EvolutionRun) -> Generator[None, None, None]:
        """Show the bar; see :class:`Observer`."""
        self._begin(run.scheduler)
        run.bus.subscribe(self)
        try:
            yield
        finally:
            self._close()

    def _begin(self, scheduler: Scheduler) -> None:
        bar = _bar()
        self._scheduler = scheduler
        self._bar = bar(total=self._total, desc=self._name, unit="rollouts", dynamic_ncols=True)
        self._bar.set_postfix_str("validating the seed program")
        for handler in (*logging.root.handlers, *logging.getLogger("dspy").handlers):
            to_file = isinstance(handler, logging.FileHandler)
            if isinstance(handler, logging.StreamHandler) and not to_file and not isinstance(handler.stream, _AboveBar):
                self._streams.append((handler, handler.setStream(_AboveBar(handler.stream, bar))))

    def __call__(self, event: Event) -> None:
        """Take one event."""
        assert self._scheduler is not None
        if isinstance(event, RolloutFinished | RequestFinished):
            self._tokens += event.tokens
            self._dollars += event.cost_dollars
            self._bar.update(isinstance(event, RolloutFinished))
            return
        if isinstance(event, SeedValidated):
            self._seed = self._best = event.score
        elif isinstance(event, Committed):
            self._best = event.best_score
            self._accepted += 1
        elif not isinstance(event, StepClosed):
            return
        used = self._scheduler.statistics()
        seed = "" if self._seed is None else f" (seed {self._seed:.3f})"
        parts = [
            "" if self._best is None else f"best {self._best:.3f}{seed}, {self._accepted} accepted",
            f"{used.busy}/{used.limit} in flight",
            f"{self._tokens / 1000:.0f}k tokens" if self._tokens else "",
            f"${self._dollars:.2f}" if self._dollars else "",
        ]
        self._bar.set_postfix_str(", ".join(filter(None, parts)), refresh=False)

    def _close(self) -> None:
        for handler, stream in self._streams:
            handler.setStream(stream)
        self._streams.clear()
        self._bar.end()


@cache
def _bar() -> Any:
    """One class for all runs: tqdm starts a thread for each class, which stays until the process ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm.auto warns where a notebook has no widgets, and falls back
        from tqdm.auto import tqdm

    class Bar(tqdm):
        def end(self) -> None:
            """What is left of the budget belongs to no step: it is at its end."""
            self.total = self.n or None
            self.refresh()
            self.close()

    return Bar


class _AboveBar:
    """Writes above the bar what would else tear it."""

    def __init__(self, stream: Any, tqdm: Any) -> None:
        self._stream, self._tqdm = stream, tqdm

    def write(self, text: str) -> None:
        with self._tqdm.external_write_mode():
            self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
