"""What a sandbox is to the rest of Meta-Harness."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dspy_flashevolve.sandbox.lm_requests import LmRequest
from dspy_flashevolve.sandbox.outcomes import LmRecord, Outcome


@dataclass(frozen=True)
class Job:
    """What candidate code is run on.

    Args:
        source: the module's source.
        class_name: the class in it to run.
        inputs: of one example, as JSON: its labels stay with the host. None makes no prediction.
        memory: what the module's ``memory`` is set to; None leaves it as its constructor made it.
        batch: what ``learn`` is called with; None does not call it.
        adapter: the class name of dspy's adapter.
    """

    source: str
    class_name: str
    inputs: dict[str, Any] | None = None
    memory: Any = None
    batch: list[dict[str, Any]] | None = None
    adapter: str = "ChatAdapter"


@dataclass(frozen=True)
class LmAnswer:
    """What an LM call came to: a record, or the words of an error that the candidate may handle."""

    record: LmRecord | None
    error: str = ""


CallLm = Callable[[LmRequest], Awaitable[LmAnswer]]
"""Makes one LM call of a candidate's, in the host. What it raises ends the run of the candidate and passes through."""


class CodeSandbox(Protocol):
    """Runs candidate code. An async context manager, for the length of a search, on one loop."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Layers of protection that this machine does not give."""
        ...

    async def __aenter__(self) -> CodeSandbox: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def run(self, job: Job, call_lm: CallLm) -> Outcome:
        """Run candidate code once.

        Returns:
            What became of it; a failure of the candidate is one kind of outcome.

        Raises:
            SandboxError: the sandbox failed, not the candidate.
        """
        ...
