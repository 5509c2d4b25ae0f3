"""Frames between the host and a child: four bytes of length, then JSON. Never a pickle.

Both ends use it, so it needs nothing but the standard library. What a child sends is not trusted: a frame that is too
long, that is not JSON, or that is no object raises :class:`WireError`.
"""

from __future__ import annotations

import json
import struct
from typing import Any, NoReturn, cast

HEADER = struct.Struct(">I")
"""The length of what follows, in bytes."""


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


def decode(payload: bytes) -> dict[str, Any]:
    """The object in a frame's payload.

    Raises:
        WireError: it is no JSON object, or one too deep or with numbers too large to be read.
    """
    try:
        message: Any = json.loads(payload, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame that is not JSON ({type(error).__name__}: {error})") from error
    if not isinstance(message, dict):
        raise WireError(f"a frame that is a {type(message).__name__}, expected an object")
    return cast("dict[str, Any]", message)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
