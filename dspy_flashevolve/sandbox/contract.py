"""What a sandbox is to others, in records; and the frames in which its two sides talk.

Both sides import this, so it needs nothing but the standard library.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NoReturn, Protocol, cast, get_args

from dspy_flashevolve.engine.errors import ConfigurationError, FlashEvolveError

Reason = Literal[
    "error", "time", "cpu", "memory", "output", "lm_calls", "lm_tokens", "processes", "forbidden", "protocol", "died",
    "interface",
]  # fmt: skip
"""Why a run failed: an exception of its own, a limit, something forbidden, a broken protocol, or a sudden death."""
REASONS = frozenset[str](get_args(Reason))
HEADER = struct.Struct(">I")
"""The length of what follows, in bytes."""
MOST_DEPTH = 50
"""How deep lists and objects of a frame may lie in each other: what the host accepts, it can send again."""


class SandboxError(FlashEvolveError):
    """The sandbox itself failed, not the candidate: nothing is scored."""


class WireError(ValueError):
    """What came over the wire is no frame."""


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
        for limit in fields(self):
            value = getattr(self, limit.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ConfigurationError(f"Limits({limit.name}={value!r}): expected a number above 0.")
            if limit.type != "float" and not isinstance(value, int):
                raise ConfigurationError(f"Limits({limit.name}={value!r}): expected a whole number.")


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
class LmRequest:
    """One LM call that a child asks for.

    Args:
        messages: as in OpenAI's chat API; texts, and pictures that are in the message itself.
        options: of sampling only.
    """

    messages: list[dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def replies(self) -> int:
        """How many replies it asks for."""
        return int(self.options.get("n", 1))


CallLm = Callable[[LmRequest], Coroutine[Any, Any, LmRecord | str]]
"""Makes one LM call of a candidate's, in the host: a record, or the words of an error that the candidate may handle.

What it raises ends the run of the candidate and passes through.
"""


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


def encode(message: dict[str, Any]) -> bytes:
    """One frame.

    Raises:
        ValueError: the message is not JSON, infinite numbers included.

    >>> decode(encode({"kind": "ready"})[HEADER.size:])
    {'kind': 'ready'}
    """
    text = json.dumps(message, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    payload = text.encode("utf-8", "replace")
    return HEADER.pack(len(payload)) + payload


def decode(payload: bytes, most_depth: int | None = MOST_DEPTH) -> dict[str, Any]:
    """The object in a frame's payload.

    Args:
        most_depth: of lists and objects in each other; None for what Python can read.

    Raises:
        WireError: it is no JSON object, or one too deep or with numbers too large to be read.

    >>> decode(b'{"memory": 1e999}')
    Traceback (most recent call last):
    dspy_flashevolve.sandbox.contract.WireError: a frame that is not JSON (ValueError: 1e999 is no JSON number)
    """
    try:
        message: Any = json.loads(payload, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame that is not JSON ({type(error).__name__}: {error})") from error
    if not isinstance(message, dict):
        raise WireError(f"a frame that is a {type(message).__name__}, expected an object")
    if most_depth is not None:
        inner: list[Any] = [message]
        for _ in range(most_depth):
            lists = [one.values() if isinstance(one, dict) else one for one in inner]
            inner = [one for values in lists for one in values if isinstance(one, dict | list)]
        if inner:
            raise WireError(f"a frame of more than {most_depth} lists and objects in each other")
    return cast("dict[str, Any]", message)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant:.40} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)
