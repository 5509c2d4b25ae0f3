"""When requests that were let through are paid for: the clock of a limit, and a small file in which runs share it.

Each limit is a clock that says when what was let through is paid for (the generic cell rate algorithm, ITU-T I.371): a
request is let through when the clock says now, and moves it on by what it costs.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from filelock import FileLock, Timeout

from dspy_flashevolve.engine.rate_headers import PERIOD_SECONDS, UNITS, Unit

logger = logging.getLogger(__name__)

MAX_AHEAD_SECONDS = 2 * PERIOD_SECONDS
"""A time in a shared file that lies further ahead is wrong: the computer's clock was set back. The most that is paid
for at once is a minute, so that two minutes ahead cannot be reached honestly."""
LOCK_SECONDS = 0.25
"""Longest wait for the shared file, whose holder may have been stopped in the middle. It blocks the run's loop, so it
has to be short; without the file one request is let through that other runs do not see."""
POLL_SECONDS = 0.002
"""Time between two attempts to get the file's lock, which others hold for well under a millisecond."""


def pay(due: Mapping[Unit, float], by: Mapping[Unit, float], credit_seconds: float) -> tuple[dict[Unit, float], float]:
    """Let one more request through; return the clocks after it, and how long the request waits.

    Args:
        due: unit -> time at which what was let through before is paid for, in seconds from now; negative where it has
            been paid for.
        by: unit -> seconds that it takes to pay for the request.
        credit_seconds: time of which an unused limit may be made up for; what was not used before is lost.

    >>> pay({"requests": 2.0, "tokens": -9.0}, {"requests": 0.25, "tokens": 1.0}, 0.5)
    ({'requests': 2.25, 'tokens': 2.5}, 2.0)
    """
    wait = max([0.0, *(due[unit] for unit in by)])
    return {unit: max(due[unit], wait - credit_seconds) + by[unit] for unit in by}, wait


class SharedTimes:
    """The clocks of one account's limits, in a small file that several processes share.

    A file that cannot be read is begun anew. Where it cannot be written, the run goes on without it.

    Args:
        path: of the file; its folder is made, readable by the user alone.
        clock: seconds since the epoch.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self.path, self._clock = path, clock
        self._lock = FileLock(path.with_suffix(".lock"), timeout=LOCK_SECONDS, mode=0o600, thread_local=False)
        self.is_unusable = False
        """The file cannot be used, and is not tried again."""

    def pay(self, by: Mapping[Unit, float], credit_seconds: float) -> float | None:
        """Let a request through by the shared clocks (see :func:`pay`); return how long it waits, or None where the
        file cannot be used."""
        if self.is_unusable:
            return None
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._lock.acquire(poll_interval=POLL_SECONDS):
                return self._pay(by, credit_seconds)
        except Timeout:  # its holder was stopped in the middle; next time it may go on
            return None
        except OSError as error:
            self.is_unusable = True
            logger.warning("%s cannot be used (%s): other runs on the same key are not seen.", self.path, error)
            return None

    def _pay(self, by: Mapping[Unit, float], credit_seconds: float) -> float:
        now = self._clock()
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            times = times_in(os.read(file, 1000))
            due = {unit: times.get(unit, 0.0) - now for unit in by}
            due = {unit: seconds if seconds <= MAX_AHEAD_SECONDS else 0.0 for unit, seconds in due.items()}
            due, wait = pay(due, by, credit_seconds)
            text = json.dumps({**times, **{unit: now + seconds for unit, seconds in due.items()}}).encode()
            os.lseek(file, 0, os.SEEK_SET)
            os.write(file, text)
            os.ftruncate(file, len(text))
            return wait
        finally:
            os.close(file)


def times_in(text: bytes) -> dict[Unit, float]:
    """Parse a shared file: unit -> seconds since the epoch; what is anything else is left out.

    >>> times_in(b'{"requests": 12.5, "tokens": "soon"}'), times_in(b"{")
    ({'requests': 12.5}, {})
    """
    try:
        content: object = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    times = cast("dict[str, object]", content) if isinstance(content, dict) else {}
    numbers = {
        unit: at for unit in UNITS if isinstance(at := times.get(unit), int | float) and not isinstance(at, bool)
    }
    return {unit: float(at) for unit, at in numbers.items() if 0 <= at < 1e12}
