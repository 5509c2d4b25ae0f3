"""Frames between the host and a child: four bytes of length, then JSON. Never a pickle.

Both ends use it, so it needs nothing but the standard library. What a child sends is not trusted: a frame that is too
long, that is not JSON, or that is no object raises :class:`WireError`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from typing import Any, NoReturn, cast

HEADER = struct.Struct(">I")
"""The length of what follows, in bytes."""
MOST_DEPTH = 50
"""How deep lists and objects of a frame may lie in each other: what the host accepts, it can send again."""


class WireError(ValueError):
    """What came over the wire is no frame."""


def encode(message: dict[str, Any]) -> bytes:
    """One frame.

    Raises:
        ValueError: the message is not JSON, infinite numbers included.

    >>> decode(encode({"kind": "ready"})[HEADER.size:])
    {'kind': 'ready'}
    """
    payload = json.dumps(message, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
    return HEADER.pack(len(payload)) + payload


def decode(payload: bytes, most_depth: int | None = MOST_DEPTH) -> dict[str, Any]:
    """The object in a frame's payload.

    Args:
        most_depth: of lists and objects in each other; None for what Python can read.

    Raises:
        WireError: it is no JSON object, or one too deep or with numbers too large to be read.

    >>> decode(b'{"memory": 1e999}')
    Traceback (most recent call last):
    dspy_flashevolve.sandbox.wire.WireError: a frame that is not JSON (ValueError: 1e999 is no JSON number)
    """
    try:
        message: Any = json.loads(payload, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame that is not JSON ({type(error).__name__}: {error})") from error
    if not isinstance(message, dict):
        raise WireError(f"a frame that is a {type(message).__name__}, expected an object")
    if most_depth is not None and not _within(most_depth, message):
        raise WireError(f"a frame of more than {most_depth} lists and objects in each other")
    return cast("dict[str, Any]", message)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant:.40} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _within(most_depth: int, message: Any) -> bool:
    level: list[Any] = [message]
    for _ in range(most_depth):
        level = [inner for one in level for inner in _inside(one)]
        if not level:
            return True
    return not any(isinstance(one, list | dict) for one in level)


def _inside(one: Any) -> Iterable[Any]:
    if isinstance(one, dict):
        return cast("dict[str, Any]", one).values()
    return cast("list[Any]", one) if isinstance(one, list) else ()
