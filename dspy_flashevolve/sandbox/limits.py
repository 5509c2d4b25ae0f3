"""What one run of candidate code may use."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dspy_flashevolve.engine.errors import ConfigurationError


@dataclass(frozen=True)
class Limits:
    """Limits of one run of candidate code in its sandbox: one prediction, or one call of ``learn``.

    Whoever goes past one ends as a failure with a reason; the host goes on.

    Args:
        seconds: wall time of the candidate's own code. The time that the host takes for its LM calls does not count.
        total_seconds: wall time with its LM calls, which may wait for a slot of the run's.
        cpu_seconds: processor time, whole seconds.
        memory_bytes: address space beyond what the sandbox itself needs.
        output_bytes: everything that the child may send to the host: its answer, and the prompts of its LM calls.
        scratch_bytes: files in its scratch directory, with what it prints.
        lm_calls: LM calls; asking for n replies at once counts as n.
        lm_tokens: of its LM calls, prompts and replies, as the provider counts them (estimated from the characters
            where it does not). Whoever has used as many makes no further call, so that the last call may go beyond.
        tasks: threads (a second process is never allowed).

    Raises:
        ConfigurationError: a limit is not above 0.

    >>> Limits(seconds=5).lm_calls
    16
    """

    seconds: float = 30.0
    total_seconds: float = 1800.0
    cpu_seconds: int = 10
    memory_bytes: int = 1 << 30
    output_bytes: int = 4 << 20
    scratch_bytes: int = 64 << 20
    lm_calls: int = 16
    lm_tokens: int = 400_000
    tasks: int = 32

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ConfigurationError(f"Limits({field.name}={value!r}): expected a number above 0.")
            if field.type != "float" and not isinstance(value, int):
                raise ConfigurationError(f"Limits({field.name}={value!r}): expected a whole number.")
