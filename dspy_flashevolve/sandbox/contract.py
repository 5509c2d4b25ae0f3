"""The contract of a sandbox: its records, its protocol class, and the frames that its two sides exchange.

Host and child both import this module, so that it imports nothing but the standard library.
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
"""Why a run failed: an exception of the candidate, a limit, something forbidden, a broken protocol, or sudden death."""
REASONS = frozenset[str](get_args(Reason))
HEADER = struct.Struct(">I")
"""The header of a frame: the length of its payload in bytes."""
MOST_DEPTH = 50
"""How deeply lists and objects of a frame may be nested. Python's JSON encoder stops at some 1,000 levels: the margin
lets the host put what it accepted into messages and files of its own."""

MOST_VALUES = 10_000
"""Values of a request, or of a field that a candidate returns, its lists and objects included: pydantic, which checks
them, makes an error of a kilobyte for each that is wrong. A round number, ten times a prompt of a hundred turns."""


class SandboxError(FlashEvolveError):
    """The sandbox itself failed, not the candidate: nothing is scored."""


class WireError(ValueError):
    """What the other side sent is not a valid frame."""


@dataclass(frozen=True)
class Limits:
    """Limits of one run of candidate code in its sandbox: one prediction, or one call of ``learn``.

    A candidate that goes past a limit is ended, and its outcome is a failure with that reason.

    Args:
        seconds: wall time of the candidate's own code, without the time of its LM calls.
        total_seconds: wall time with its LM calls, which may wait for a slot of the run.
        cpu_seconds: processor time, in whole seconds.
        memory_bytes: address space beyond what the sandbox itself needs.
        output_bytes: all bytes that the child may send to the host: its answer, and the prompts of its LM calls.
        scratch_bytes: size of the files in its scratch directory, with what it prints.
        lm_calls: LM calls; a call for n replies counts as n.
        lm_tokens: tokens of its LM calls, prompts and replies, as the provider counts them (estimated from the
            characters where it does not). No call starts once they are used up, so that the last one may go beyond.
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
        reason: the kind of failure.
        message: for people and for the LM that writes the next candidate; parts of it are the candidate's text.
    """

    reason: Reason
    message: str

    @property
    def is_grave(self) -> bool:
        """Whether it ends the candidate and not only one run: a limit was passed, or something forbidden was tried."""
        return self.reason not in ("error", "interface")

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


@dataclass(frozen=True)
class LmRecord:
    """An LM call that the host made for a candidate, as the host recorded it.

    Args:
        messages: the messages of the prompt.
        outputs: the replies; texts or, with reasoning or tool calls, objects.
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
        """Tokens of its prompt and its replies."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run of candidate code.

    Args:
        fields: fields of the prediction, as JSON; empty where the run failed.
        memory: the module's memory after the run, as JSON.
        failure: why the run failed; None where it did not.
        calls: the LM calls of the run, in order.
        printed: the end of what the candidate printed.
        seconds: wall time of its own code, without its LM calls.
        cpu_seconds: processor time.
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
        """Tokens of all its LM calls."""
        return sum(call.tokens for call in self.calls)


@dataclass(frozen=True)
class Job:
    """One run of candidate code: the source and its inputs.

    Args:
        source: source of the module.
        class_name: name of its class.
        inputs: inputs of one example, as JSON, without its labels. None makes no prediction.
        memory: value for the module's ``memory``; None leaves it as its constructor made it.
        batch: argument of ``learn``; None does not call it.
        adapter: class name of dspy's adapter.
    """

    source: str
    class_name: str
    inputs: dict[str, Any] | None = None
    memory: Any = None
    batch: list[dict[str, Any]] | None = None
    adapter: str = "ChatAdapter"


@dataclass(frozen=True)
class LmRequest:
    """A child's request for an LM call.

    Args:
        messages: as in OpenAI's chat API, with texts and with pictures that are part of the message.
        options: options of sampling; no others are allowed.
    """

    messages: list[dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def replies(self) -> int:
        """Number of replies that it asks for."""
        return int(self.options.get("n", 1))


CallLm = Callable[[LmRequest], Coroutine[Any, Any, LmRecord | str]]
"""Makes an LM call for a candidate in the host. Returns its record, or an error's text for the candidate to handle.

An exception that it raises ends the candidate's run and passes through to the caller of the sandbox.
"""


class CodeSandbox(Protocol):
    """Runs candidate code. An async context manager for the length of a search, used on one event loop."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the layers of protection that this machine does not give."""
        ...

    async def __aenter__(self) -> CodeSandbox: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def run(self, job: Job, call_lm: CallLm) -> Outcome:
        """Run candidate code once.

        Returns:
            The outcome; a failure of the candidate is one kind of outcome.

        Raises:
            SandboxError: the sandbox failed, not the candidate.
        """
        ...


def encode(message: dict[str, Any]) -> bytes:
    """Encode a message as a frame, header and payload; its texts without surrogates (`engine.texts`).

    Raises ValueError: the message has no JSON form; JSON has no infinite numbers and no NaN.
    """
    text = json.dumps(message, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    payload = text.encode("utf-8", "replace")
    return HEADER.pack(len(payload)) + payload


def decode(payload: bytes, most_depth: int | None = MOST_DEPTH) -> dict[str, Any]:
    """Decode the payload of a frame; its texts without surrogates (`engine.texts`).

    Args:
        most_depth: most levels of nested lists and objects; None for as many as Python can read.

    Raises:
        WireError: it is no JSON object, is nested too deeply, or has numbers too large to be read.
    """
    try:
        text = payload.decode()
        message: Any = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame that is not JSON ({type(error).__name__}: {error})") from error
    if not isinstance(message, dict):
        raise WireError(f"a frame that is a {type(message).__name__}, expected an object")
    if most_depth is not None:
        inner: list[Any] = [message]
        for _ in range(most_depth):
            lists = [value.values() if isinstance(value, dict) else value for value in inner]
            inner = [child for values in lists for child in values if isinstance(child, dict | list)]
        if inner:
            raise WireError(f"a frame of more than {most_depth} lists and objects in each other")
    if "\\ud" in text.lower():  # an escaped surrogate: `encode` writes none, but a candidate may
        message = json.loads(encode(cast("dict[str, Any]", message))[HEADER.size :])
    return cast("dict[str, Any]", message)


def has_many_values(value: Any) -> bool:
    """Whether JSON data has more than MOST_VALUES values."""
    count, pending = 0, [[value]]
    while pending and count <= MOST_VALUES:
        inner = pending.pop()
        count += len(inner)
        if count <= MOST_VALUES:
            values = inner.values() if isinstance(inner, dict) else inner
            pending += [each for each in values if isinstance(each, dict | list)]
    return count > MOST_VALUES


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant:.40} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)
