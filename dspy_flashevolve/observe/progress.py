"""A progress bar over metric calls: tqdm in scripts, its widget in notebooks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

from dspy_flashevolve.engine.events import Committed, Event, RequestFinished, RolloutFinished, SeedValidated, StepClosed
from dspy_flashevolve.engine.run import EvolutionRun
from dspy_flashevolve.observe.text import left


class Display:
    """Shows runs while they go on. A callback of dspy's that is one takes the place of the bar."""


class Progress(Display):
    """Shows metric calls against the budget, and beside them scores, requests in flight, tokens and dollars.

    Args:
        name: of the optimizer.
        total: metric calls in the budget; None for an open end.
        max_seconds: of the run; None for no limit.
        unpriced: stages that ask a model whose price is not known.
    """

    def __init__(
        self, name: str, total: int | None, max_seconds: float | None = None, unpriced: Collection[str] = ()
    ) -> None:
        self._name, self._total = name, total
        self._max_seconds, self._unpriced = max_seconds, unpriced
        self._run: EvolutionRun | None = None
        self._bar: Any = None
        self._accepted = self._tokens = 0
        self._dollars: float | None = 0.0
        self._seed: float | None = None
        self._best: float | None = None
        self._used_before = 0.0
        """The share of a loop's own limits that earlier sessions have used."""
        self._streams: list[tuple[logging.StreamHandler[Any], Any]] = []

    @contextmanager
    def observing(self, run: EvolutionRun) -> Generator[None, None, None]:
        """Show the bar; see :class:`Observer`."""
        self._begin(run)
        run.bus.subscribe(self)
        try:
            yield
        finally:
            self._close()

    def _begin(self, run: EvolutionRun) -> None:
        bar = _bar()
        self._run, self._used_before = run, used_share(run)
        self._bar = bar(total=self._total, desc=self._name, unit="rollouts", dynamic_ncols=True)
        self._bar.set_postfix_str("validating the seed program")
        for handler in (*logging.root.handlers, *logging.getLogger("dspy").handlers):
            to_file = isinstance(handler, logging.FileHandler)
            if isinstance(handler, logging.StreamHandler) and not to_file and not isinstance(handler.stream, _AboveBar):
                self._streams.append((handler, handler.setStream(_AboveBar(handler.stream, bar))))

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, RolloutFinished | RequestFinished):
            self._tokens += event.tokens
            if event.tokens and event.stage in self._unpriced:
                self._dollars = None
            elif self._dollars is not None:
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
        self._tell()

    def _tell(self, is_over: bool = False) -> None:
        assert self._run is not None
        used = self._run.scheduler.statistics()
        seed = "" if self._seed is None else f" (seed {self._seed:.3f})"
        phase = "" if is_over else "finishing" if self._run.stop_reason else self._time_left()
        parts = [
            phase,
            "" if self._best is None else f"best {self._best:.3f}{seed}, {self._accepted} accepted",
            f"{used.busy}/{used.limit} in flight",
            f"{self._tokens / 1000:.0f}k tokens" if self._tokens else "",
            "$ unknown" if self._dollars is None else f"${self._dollars:.2f}" if self._dollars else "",
        ]
        self._bar.set_postfix_str(", ".join(filter(None, parts)), refresh=False)

    def _time_left(self) -> str:
        """By the limits of time and money; tqdm tells how long the metric calls will last."""
        assert self._run is not None
        seconds = self._run.clock() - self._run.clock.began
        used, before = used_share(self._run), self._used_before
        return left(seconds, self._max_seconds, (used - before) / (1 - before) if used > before else None)

    def _close(self) -> None:
        if self._best is not None:
            self._tell(is_over=True)
        for handler, stream in self._streams:
            handler.setStream(stream)
        self._streams.clear()
        self._bar.end()


def used_share(run: EvolutionRun) -> float:
    """The largest share of a loop's own limits that is used, from 0 to 1."""
    return max((share for of in run.used_shares if (share := of()) is not None), default=0.0)


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
