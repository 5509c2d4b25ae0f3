"""An output of a notebook's cell that is redrawn in its place, without ipywidgets.

A notebook keeps all that is written to its streams: a bar that is drawn ten times a second floods the page. A display
with an id is replaced instead, in the page and in the file that is saved.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

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
