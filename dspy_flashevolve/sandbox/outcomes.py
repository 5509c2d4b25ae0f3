"""What became of one run of candidate code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dspy_flashevolve.engine.errors import FlashEvolveError

Reason = Literal[
    "error", "time", "cpu", "memory", "output", "lm_calls", "lm_tokens", "processes", "forbidden", "protocol", "died",
    "interface",
]  # fmt: skip
"""Why a run failed: an exception of its own, a limit, something forbidden, a broken protocol, or a sudden death."""
REASONS: frozenset[str] = frozenset(Reason.__args__)  # pyright: ignore[reportAttributeAccessIssue]


class SandboxError(FlashEvolveError):
    """The sandbox itself failed, not the candidate: nothing is scored."""


@dataclass(frozen=True)
class Failure:
    """Why candidate code failed.

    Args:
        reason: in one word.
        message: for people, and for the LM that writes the next candidate; partly written by the candidate.
    """

    reason: Reason
    message: str

    @property
    def is_grave(self) -> bool:
        """It ends the candidate, not only its run on one example: it went past a limit, or did what none may do."""
        return self.reason not in ("error", "interface")

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


@dataclass(frozen=True)
class LmRecord:
    """One LM call that the host made for a candidate, as the host saw it.

    Args:
        messages: what was sent.
        outputs: what came back; texts or, with reasoning or tool calls, objects.
        prompt_tokens, completion_tokens: as the provider reported them.
        seconds: how long the call took, waiting for a slot included.
    """

    messages: list[dict[str, Any]]
    outputs: list[Any]
    prompt_tokens: int
    completion_tokens: int
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Of its prompt and its replies."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Outcome:
    """What one run of candidate code came to.

    Args:
        fields: of the prediction, as JSON; empty where it failed.
        memory: of the module after the run, as JSON.
        failure: None where it did not fail.
        calls: the LM calls that it made, in order.
        printed: the end of what it printed.
        seconds: of its own wall time, LM calls left out.
        cpu_seconds: of processor time.
    """

    fields: dict[str, Any]
    memory: Any = None
    failure: Failure | None = None
    calls: tuple[LmRecord, ...] = ()
    printed: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Of all its LM calls."""
        return sum(call.tokens for call in self.calls)
