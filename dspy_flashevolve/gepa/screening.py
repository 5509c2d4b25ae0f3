"""Which children are run on their parent's minibatch before their edits join the prompt: the first ones, and later ones
unless nearly all of them beat their parents."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from contextlib import contextmanager

import anyio

SCREENS = 16
"""So many of the last screens count: a reflection LM that helps at first may harm once the prompt is good."""
HELPFUL = 0.8
"""Expected share of children that pass, from which on they join without a screen. On a real task with coded labels 25
of 25 children passed. Under the simulated model ``plain``, which harms in a third of its reflections, half of them
pass, three quarters where there is much to find; joining all of those without a screen halved the score."""
CHECKED_EVERY = 4
"""Every so many steps screen their child all the same, so that a change for the worse is noticed."""
FIRST_SCREENS, ENOUGH = 4, 3
"""So many of the first children are screened at once, and the others wait until so many of these screens have ended.
Three that pass are enough for the others to join without a screen, and nobody waits for the slowest of the four."""


class Screening:
    """Counts which children beat their parents, and says whether the next ones have to show that they do.

    A screen costs as many metric calls as the rollouts that a reflection reads. Where nearly all children pass, these
    calls teach more if they are the next parent's.

    >>> screening = Screening()
    >>> screening.is_needed(step=1)
    True
    >>> for _ in range(4):
    ...     screening.record(passed=True)
    >>> screening.is_needed(step=1), screening.is_needed(step=4)
    (False, True)
    """

    def __init__(self) -> None:
        self._passed = deque[bool](maxlen=SCREENS)
        self._running = 0
        self._ended = anyio.Event()
        """Set, and replaced, whenever a screen ends."""

    def record(self, passed: bool) -> None:
        """Take note of a screen."""
        self._passed.append(passed)

    def is_needed(self, step: int) -> bool:
        """Whether the child of a step is to be screened."""
        helpful = (sum(self._passed) + 1) / (len(self._passed) + 2)  # mean of its posterior, from a uniform prior
        return helpful < HELPFUL or step % CHECKED_EVERY == 0

    async def wait_for_first(self) -> None:
        """Wait while the first screens run, where one more would only tell what they tell."""
        while len(self._passed) < ENOUGH and len(self._passed) + self._running >= FIRST_SCREENS:
            await self._ended.wait()

    @contextmanager
    def running(self) -> Generator[None, None, None]:
        """Count a screen as running, however it ends."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._ended.set()
            self._ended = anyio.Event()
