"""The progress bar over metric calls: tqdm's, in scripts and notebooks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

from dspy_flashevolve.engine.events import Committed, Event, RolloutFinished, SeedValidated, StepClosed
from dspy_flashevolve.engine.run import EvolutionRun
from dspy_flashevolve.observe.formatting import time_left


class Display:
    """Base of what shows runs while they go on. A callback of dspy's with this base takes the place of the bar."""


class Progress(Display):
    """A bar of metric calls against the budget; beside it the time that is left, scores and dollars."""

    def __init__(self) -> None:
        self._run: Any = None  # a DspyRun
        self._bar: Any = None
        self._used_before = 0.0
        """Share of the loop's own limits that earlier sessions have used."""

    @contextmanager
    def observing(self, run: Any) -> Generator[None, None, None]:
        """Show the bar while the run goes on; see :class:`~dspy_flashevolve.engine.run.Observer`."""
        bar: Any = _bar()
        total, spent = run.statistics().max_metric_calls, run.store.spent
        self._run, self._used_before = run, used_share(run)
        self._bar = bar(total=total, initial=spent, desc=run.name, unit="rollouts", dynamic_ncols=True)
        self._bar.set_postfix_str("going on" if spent else "validating the seed program")
        streams: list[tuple[logging.StreamHandler[Any], Any]] = []
        for handler in (*logging.root.handlers, *logging.getLogger("dspy").handlers):
            to_file = isinstance(handler, logging.FileHandler)
            if isinstance(handler, logging.StreamHandler) and not to_file and not isinstance(handler.stream, _AboveBar):
                streams.append((handler, handler.setStream(_AboveBar(handler.stream, bar))))
        run.bus.subscribe(self)
        try:
            yield
        finally:
            if run.recorder.best_score is not None:
                self._set_text(is_over=True)
            for handler, stream in streams:
                handler.setStream(stream)
            self._bar.end()

    def __call__(self, event: Event) -> None:
        """Move the bar, or set the text beside it, after an event."""
        if isinstance(event, RolloutFinished):
            self._bar.update()
        elif isinstance(event, SeedValidated | Committed | StepClosed):
            if isinstance(event, SeedValidated) and not self._bar.n:  # dspy.GEPA has validated the seed, in its own run
                self._bar.begin_at(self._run.statistics().metric_calls)
            self._set_text()

    def _set_text(self, is_over: bool = False) -> None:
        stats, best, seed = self._run.statistics(), self._run.recorder.best_score, self._run.recorder.seed_score
        # tqdm itself shows how long the metric calls will last.
        share = share_since(self._used_before, used_share(self._run))
        phase = "finishing" if stats.stop_reason else time_left(stats.seconds, self._run.max_seconds, share)
        seed_text = "" if seed is None else f" (seed {seed:.3f})"
        parts = [
            "" if is_over else phase,
            "" if best is None else f"best {best:.3f}{seed_text}, {len(stats.commits)} accepted",
            f"${stats.cost_dollars:.2f}" if stats.cost_dollars else "",  # the summary says what has no price
        ]
        self._bar.set_postfix_str(", ".join(filter(None, parts)), refresh=False)


def used_share(run: EvolutionRun) -> float:
    """Return the largest share of a loop's own limits that is used, from 0 to 1."""
    return max((used() for used in run.used_shares), default=0.0)


def share_since(before: float, now: float) -> float | None:
    """Return the share that a session has used of what it had left; None where that tells nothing.

    Args:
        before, now: used shares of a limit, when the session began and now. A last step may take more than there is.

    >>> share_since(0.5, 0.75), share_since(0.5, 0.5), share_since(1.0, 1.1)
    (0.5, None, None)
    """
    return (now - before) / (1 - before) if before < min(1.0, now) else None


@cache
def _bar() -> Any:
    """Return the class of bars, one for all runs: tqdm starts a thread for each class, which never ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm.auto warns where a notebook has no widgets, and falls back
        from tqdm.auto import tqdm

    class Bar(tqdm):
        def begin_at(self, count: int) -> None:
            """Begin at what was done before."""
            self.initial = self.n = count
            self.refresh()

        def end(self) -> None:
            """End at 100%: what is left of the budget belongs to no step."""
            self.total = self.n or None
            self.refresh()
            self.close()

    return Bar


class _AboveBar:
    """A log handler's stream that writes above the bar, which it would otherwise tear."""

    def __init__(self, stream: Any, tqdm: Any) -> None:
        self._stream, self._tqdm = stream, tqdm

    def write(self, text: str) -> None:
        with self._tqdm.external_write_mode():
            self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
