"""Runs the batching model in real time on an event loop: one timer, set for the model's next change."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from dspy_flashevolve.sim.batching import ContinuousBatching, Load
from dspy_flashevolve.sim.profiles import Profile

LATE_SECONDS = 1e-6
"""The timer is set this much after a change, so that rounding never makes it fire before the change is due. It is far
below the shortest step of a profile, 7 milliseconds."""


@dataclass(frozen=True)
class Generation:
    """A sequence that is being generated.

    Attributes:
        number: The model's number of the sequence.
        started: When it was submitted, in model seconds.
        first_token: Done when the prefill is over.
        finished: Done when the last token is written; its result is the model time of that.
    """

    number: int
    started: float
    first_token: asyncio.Future[None]
    finished: asyncio.Future[float]


class BatchDriver:
    """Lets a `ContinuousBatching` run in real time. Use it in the thread of the running event loop only.

    Args:
        profile: Rates and limits.
        time_scale: Model seconds a wall second, above 0.
    """

    def __init__(self, profile: Profile, time_scale: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._time_scale = time_scale
        self._origin = self._loop.time()
        self._model = ContinuousBatching(profile, clock=self.now)
        self._generations: dict[int, Generation] = {}
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> float:
        """Model seconds since the driver was made."""
        return (self._loop.time() - self._origin) * self._time_scale

    @property
    def in_flight(self) -> int:
        """Sequences that run or wait."""
        return self._model.in_flight

    def load(self) -> Load:
        """State and totals of the batch."""
        return self._model.load()

    def submit(self, prompt_tokens: int, output_tokens: int) -> Generation:
        """Start a sequence; the caller must `release` it in the end, finished or not."""
        number = self._model.submit(prompt_tokens, output_tokens)
        generation = Generation(number, self.now(), self._loop.create_future(), self._loop.create_future())
        self._generations[number] = generation
        self._pump()
        return generation

    def release(self, generation: Generation) -> bool:
        """Free the sequence's place; True if it was not finished. A second call does nothing and returns False."""
        if self._generations.pop(generation.number, None) is None:
            return False
        self._model.cancel(generation.number)
        self._pump()
        return True

    def _pump(self) -> None:
        for event in self._model.advance():
            generation = self._generations.get(event.sequence)
            if generation is None:
                continue
            # A client that went away has cancelled the future it waited for, and not yet released its place.
            if event.kind == "first_token":
                if not generation.first_token.done():
                    generation.first_token.set_result(None)
                continue
            del self._generations[event.sequence]
            if not generation.finished.done():
                generation.finished.set_result(event.time)
        if self._timer is not None:
            self._timer.cancel()
        change = self._model.next_change()
        due = None if change is None else self._origin + change / self._time_scale + LATE_SECONDS
        self._timer = None if due is None else self._loop.call_at(due, self._pump)
