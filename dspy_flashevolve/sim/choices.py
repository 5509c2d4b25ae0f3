"""Random choices that do not depend on the order of requests: hashes of (seed, content, what is decided)."""

from __future__ import annotations

import hashlib


class Choices:
    """Random choices that depend on a seed, a content and the name of the choice only.

    Examples:
        >>> Choices(0, "abc").uniform("x") == Choices(0, "abc").uniform("x")
        True
    """

    def __init__(self, seed: int, content: str) -> None:
        text = f"{seed}\0{content}".encode("utf-8", "surrogatepass")
        self._state = hashlib.blake2b(text, digest_size=16).digest()

    def uniform(self, name: str) -> float:
        """Return a number strictly between 0 and 1."""
        digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), key=self._state, digest_size=8).digest()
        # 52 bits and a half fit a float's 53 exactly, so that 0 and 1 cannot come out by rounding.
        return ((int.from_bytes(digest, "big") >> 12) + 0.5) / 2.0**52

    def index(self, name: str, size: int) -> int:
        """Return a whole number from 0 to size - 1; `size` is at least 1."""
        return min(size - 1, int(self.uniform(name) * size))
