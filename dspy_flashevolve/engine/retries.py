"""How long to wait before a request is made again."""

from __future__ import annotations

from dataclasses import dataclass

from dspy_flashevolve.engine.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with full jitter.

    Args:
        attempts: requests in all, at least 1.
        first_seconds: the longest first wait.
        most_seconds: the longest wait, unless the provider's Retry-After is longer.

    Raises:
        ConfigurationError: attempts under 1.
    """

    attempts: int = 6
    first_seconds: float = 1.0
    most_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigurationError(f"retries: attempts is {self.attempts}, expected at least 1.")

    def wait_seconds(self, attempt: int, retry_after_seconds: float | None, chance: float) -> float:
        """How long to wait after failed attempt number ``attempt`` (from 0).

        Args:
            chance: a draw from [0, 1); spreads out requests that failed together.

        >>> RetryPolicy().wait_seconds(2, None, chance=0.5)
        2.0
        >>> RetryPolicy().wait_seconds(0, 10.0, chance=0.5)
        10.5
        """
        backoff = min(self.most_seconds, self.first_seconds * 2**attempt) * chance
        return backoff if retry_after_seconds is None else retry_after_seconds + self.first_seconds * chance
