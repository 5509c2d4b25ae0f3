"""Ctrl-C and SIGTERM, while something runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

REASONS = {"SIGINT": "interrupted by Ctrl-C", "SIGTERM": "terminated by SIGTERM"}
"""Signal -> the reason that a run gives for its end."""


@contextmanager
def heard(hear: Callable[[str], bool]) -> Generator[None, None, None]:
    """Hand SIGINT and SIGTERM to ``hear`` instead of to Python, inside the ``with`` block.

    Only in the main thread, the only one that gets signals; elsewhere nothing is touched. Only where nobody else wants
    the signal: SIGINT that would raise KeyboardInterrupt, SIGTERM that would kill the process. A handler of the
    caller's own (asyncio's in ``asyncio.run`` is one) stays, and is not called by this one either. What was there
    before is put back at the end.

    Args:
        hear: called in the main thread, between any two instructions, with the reason; it must be quick and must not
            wait. When it returns False, it wants to hear no more: from then on signals do what they did before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    taken = [number for number, usual in wanted.items() if signal.getsignal(number) == usual]

    def handler(number: int, frame: Any) -> None:
        if not hear(REASONS[signal.Signals(number).name]):
            put_back()

    def put_back() -> None:
        for number in taken:
            if signal.getsignal(number) is handler:  # the caller may have set one of their own by now
                signal.signal(number, wanted[number])

    try:
        for number in taken:
            signal.signal(number, handler)
        yield
    finally:
        put_back()
