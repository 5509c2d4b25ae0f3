"""The progress bar over metric calls: tqdm in scripts; in notebooks its widget, or a text redrawn in its place."""

from __future__ import annotations

import io
import logging
import sys
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

from tqdm.std import tqdm

from dspy_flashevolve.engine.events import Committed, Event, RolloutFinished, SeedValidated, StepClosed
from dspy_flashevolve.engine.run import EvolutionRun
from dspy_flashevolve.observe.formatting import time_left

REDRAW_SECONDS = 2.0
"""Least seconds between two drawings. Each is a message to the page, which many make slow, and a page that cannot
replace an output shows them all: 64 of them in 8 seconds were too many, 4 are not."""


def kernel_display() -> Callable[..., Any] | None:
    """Return IPython's ``display`` in the kernel of a notebook; None anywhere else, IPython in a terminal included."""
    module: Any = sys.modules.get("IPython")  # not imported here: a notebook's kernel has done so
    if module is None or getattr(module.get_ipython(), "kernel", None) is None:
        return None
    return module.display.display


class Output:
    """A text in a notebook, which replaces the one before.

    Args:
        display: IPython's ``display``, or a function with its arguments.
        clock: returns seconds.
    """

    def __init__(self, display: Callable[..., Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._display, self._clock = display, clock
        self._handle: Any = None
        self._drawn_seconds = 0.0

    def draw(self, text: Callable[[], str], is_last: bool = False) -> None:
        """Draw a text, unless the last drawing was less than :data:`REDRAW_SECONDS` ago.

        Args:
            text: makes the text; not called where nothing is drawn.
            is_last: draw it in any case, since this one is saved.
        """
        now = self._clock()
        if self._handle is not None and not is_last and now - self._drawn_seconds < REDRAW_SECONDS:
            return
        self._drawn_seconds = now
        shown = {"text/plain": text()}
        if self._handle is None:
            self._handle = self._display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


LEAST_BAR = 16
"""Characters that the bar itself keeps when the text beside it is set. With fewer than 10 it shows no progress, and
times and rates grow by up to 6 until the text is set again."""
DROP_FIRST = ("tokens", "slots", "dollars", "phase")
"""Parts of the text beside the bar that a narrow terminal does without, in this order; the score stays."""
NOTEBOOK_COLUMNS = 110
"""Characters of the bar's line in a notebook, which cannot be asked how wide it is."""


class Display:
    """Base of what shows runs while they go on. A callback of dspy's with this base takes the place of the bar."""


class Progress(Display):
    """A bar of metric calls against the budget; beside it scores, requests in flight, tokens and dollars."""

    def __init__(self) -> None:
        self._run: Any = None  # a DspyRun
        self._bar: Any = None
        self._used_before = 0.0
        """Share of the loop's own limits that earlier sessions have used."""
        self._streams: list[tuple[logging.StreamHandler[Any], Any]] = []

    @contextmanager
    def observing(self, run: EvolutionRun) -> Generator[None, None, None]:
        """Show the bar while the run goes on; see :class:`~dspy_flashevolve.engine.run.Observer`."""
        self._begin(run)
        run.bus.subscribe(self)
        try:
            yield
        finally:
            self._close()

    def _begin(self, run: Any) -> None:
        display = kernel_display()
        bar: Any = _bar() if display is None or _has_widgets() else notebook_bar()
        more = {"output": Output(display)} if display is not None and bar is notebook_bar() else {}
        total, spent = run.statistics().max_metric_calls, 0 if run.journal is None else run.journal.spent
        self._run, self._used_before = run, used_share(run)
        self._bar = bar(total=total, initial=spent, desc=run.name, unit="rollouts", dynamic_ncols=True, **more)
        self._bar.set_postfix_str("going on" if spent else "validating the seed program")
        for handler in (*logging.root.handlers, *logging.getLogger("dspy").handlers):
            to_file = isinstance(handler, logging.FileHandler)
            if isinstance(handler, logging.StreamHandler) and not to_file and not isinstance(handler.stream, _AboveBar):
                self._streams.append((handler, handler.setStream(_AboveBar(handler.stream, bar))))

    def __call__(self, event: Event) -> None:
        """Move the bar, or set the text beside it, after an event."""
        if isinstance(event, RolloutFinished):
            self._bar.update()
        elif isinstance(event, SeedValidated | Committed | StepClosed):
            if isinstance(event, SeedValidated) and not self._bar.n:  # dspy.GEPA has validated the seed, in its own run
                self._bar.begin_at(self._run.statistics().metric_calls)
            self._set_text()

    def _set_text(self, is_over: bool = False) -> None:
        run, stats = self._run, self._run.statistics()
        best, seed, tokens = run.recorder.best_score, run.recorder.seed_score, sum(stats.tokens_by_stage.values())
        seed_text = "" if seed is None else f" (seed {seed:.3f})"
        phase = "finishing" if stats.stop_reason else self._time_left(stats.seconds)
        parts = {
            "phase": "" if is_over else phase,
            "best": "" if best is None else f"best {best:.3f}{seed_text}, {len(stats.commits)} accepted",
            "slots": f"{run.scheduler.statistics().busy}/{run.scheduler.limit} in flight",
            "tokens": f"{tokens / 1000:.0f}k tokens" if tokens else "",
            "dollars": f"${stats.cost_dollars:.2f}" if stats.cost_dollars else "",  # the summary says what has no price
        }
        self._bar.set_postfix_str(beside_bar(parts, self._bar.format_dict), refresh=False)

    def _time_left(self, seconds: float) -> str:
        """Estimate the time by limits other than metric calls; tqdm itself shows how long those will last."""
        return time_left(seconds, self._run.max_seconds, share_since(self._used_before, used_share(self._run)))

    def _close(self) -> None:
        if self._run.recorder.best_score is not None:
            self._set_text(is_over=True)
        for handler, stream in self._streams:
            handler.setStream(stream)
        self._streams.clear()
        self._bar.end()


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


def beside_bar(parts: Mapping[str, str], state: Mapping[str, Any]) -> str:
    """Join as many parts of the text as leave the bar its width; those of :data:`DROP_FIRST` are dropped in order.

    Args:
        parts: name -> part; empty ones are left out.
        state: tqdm's ``format_dict``; its ``ncols`` is the width of the terminal, or None.
    """
    shown, columns = {name: part for name, part in parts.items() if part}, state.get("ncols")
    if not isinstance(columns, int):  # no terminal; of the widget, which wraps, a width in percent
        return ", ".join(shown.values())
    settings: dict[str, Any] = {**state, "ncols": None, "postfix": None, "bar_format": "{l_bar}{r_bar}"}
    alone = tqdm.format_meter(**settings)
    room = columns - len(alone) - LEAST_BAR
    for name in DROP_FIRST:
        if len(", ".join(["", *shown.values()])) > room:
            shown.pop(name, None)
    return ", ".join(shown.values())


def _has_widgets() -> bool:
    return find_spec("ipywidgets") is not None


@cache
def notebook_bar() -> Any:
    """Return the class of a bar that is a text, for notebooks without widgets."""

    base: Any = tqdm  # generic to type checkers alone

    class NotebookBar(base):
        def __init__(self, *, output: Output, **options: Any) -> None:
            self._output = output
            # tqdm redraws its line by control characters in its file. Here each drawing replaces the output as a whole.
            settings: dict[str, Any] = {**options, "dynamic_ncols": False, "ncols": NOTEBOOK_COLUMNS}
            super().__init__(file=io.StringIO(), **settings)

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            self._output.draw(lambda: str(self) if msg is None else msg)

        def begin_at(self, count: int) -> None:
            """Begin at what was done before."""
            self.initial = self.n = count
            self.refresh()

        def end(self) -> None:
            """End at 100%: what is left of the budget belongs to no step."""
            self.total = self.n or None
            if not self.disable:
                self._output.draw(lambda: str(self), is_last=True)
            self.close()

    return NotebookBar


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
