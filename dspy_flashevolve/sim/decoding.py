"""Sequences that decode together, as processor sharing in closed form.

All decoding sequences advance at one common rate, so one number, the tokens that a sequence would have written had
it decoded from the beginning (`progress`), says when each of them ends: a sequence that joins at progress p with n
tokens to write ends at the mark p + n. A heap over the marks makes joining and ending O(log n).

A step, one token for each of n sequences, takes base + c * (tokens in the KV cache), and a step adds n tokens to
the cache. So x steps take (base + c * cached) * x + c * n * x^2 / 2, which can be inverted.
"""

from __future__ import annotations

import heapq
import math

from dspy_flashevolve.sim.profiles import Profile


class DecodingPool:
    """The sequences that decode now. It knows no time of day: it is told how many seconds pass.

    Args:
        profile: Gives the time of a step.

    Examples:
        >>> from dspy_flashevolve.sim.profiles import PROFILES
        >>> pool = DecodingPool(PROFILES["api-gpt-4o-mini"])
        >>> pool.join(number=0, prompt_tokens=350, output_tokens=620)
        >>> round(pool.seconds_to_next_end(), 2)
        10.0
        >>> pool.pass_seconds(5.0)
        >>> round(pool.written_tokens)
        310
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._joined: dict[int, tuple[int, float]] = {}
        self._marks: list[tuple[float, int]] = []
        self._progress = 0.0
        self._prompt_tokens = 0
        self._sum_of_joins = 0.0
        self._queued_prompt_tokens = 0
        self._written = 0.0

    def __len__(self) -> int:
        return len(self._joined)

    @property
    def written_tokens(self) -> float:
        """Tokens written since the beginning, also by sequences that left."""
        return self._written

    @property
    def cached_tokens(self) -> float:
        """Prompt and output tokens of the sequences that decode now."""
        return self._prompt_tokens + len(self) * self._progress - self._sum_of_joins

    def set_queued_prompt_tokens(self, tokens: int) -> None:
        """Say how many prompt tokens wait for a shared prefill or are in it: they make steps longer."""
        self._queued_prompt_tokens = tokens

    def join(self, number: int, prompt_tokens: int, output_tokens: int) -> None:
        """Add a sequence whose prefill is over."""
        self._joined[number] = (prompt_tokens, self._progress)
        self._prompt_tokens += prompt_tokens
        self._sum_of_joins += self._progress
        heapq.heappush(self._marks, (self._progress + output_tokens, number))

    def leave(self, number: int) -> None:
        """Take a sequence out before its end."""
        prompt_tokens, join = self._joined.pop(number)
        self._prompt_tokens -= prompt_tokens
        self._sum_of_joins -= join
        if not self._joined:
            # Rounding errors would otherwise grow over the life of a server.
            self._progress = self._sum_of_joins = 0.0
            self._marks.clear()

    def seconds_to_next_end(self) -> float:
        """Seconds until a sequence has written its last token; infinite when none decodes."""
        while self._marks and self._marks[0][1] not in self._joined:
            heapq.heappop(self._marks)
        if not self._marks:
            return math.inf
        tokens = max(0.0, self._marks[0][0] - self._progress)
        step, growth = self._step()
        return step * tokens + growth * tokens * tokens / 2

    def pass_seconds(self, seconds: float) -> None:
        """Let time pass, at most `seconds_to_next_end()`."""
        if not self._joined:
            return
        step, growth = self._step()
        tokens_each = 2 * seconds / (step + math.sqrt(step * step + 2 * growth * seconds))
        self._progress += tokens_each
        self._written += tokens_each * len(self)

    def end_next(self) -> int:
        """Take out the sequence that has written its last token, and return its number."""
        mark, number = heapq.heappop(self._marks)
        self._written += mark - self._progress
        self.leave(number)
        return number

    def _step(self) -> tuple[float, float]:
        """Seconds of a step now, and seconds that each step adds to the next one."""
        each = self._profile.step_seconds_per_cached_token
        base = self._profile.step_without_cache_seconds(len(self), self._queued_prompt_tokens)
        return base + each * self.cached_tokens, each * len(self)
