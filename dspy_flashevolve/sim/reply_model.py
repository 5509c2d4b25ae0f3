"""How well the simulated model obeys, reflects and integrates, and the random choices that it makes.

Every random choice is a hash of (seed, content, what is decided): equal requests get equal replies in any order.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ReplyModel:
    """How well the simulated model obeys and how well it reflects. All probabilities are between 0 and 1.

    Attributes:
        obedience: Probability that a reply follows a rule of its instruction, drawn for each rule and request.
        crowding: How obedience falls with the number of rules n in an instruction: it is multiplied by
            exp(-crowding * n). 0 means never.
        rules_added: The most rules that one reflection adds; it adds 1 to this many, equally likely.
        forgets: Probability that a reflection drops one of the rules it had.
        useless: Probability that a reflection adds no rule, only a general sentence.
        rivals: True when rules 1 and 2, 3 and 4, ... contradict each other: of two that an instruction holds both, a
            reply follows one at most, either as likely.
        spots_conflicts: Probability that an integration sees that a child contradicts the head or another child.
        overload: How integrations lose in a crowd: of n rules to be added each is lost with probability
            1 - exp(-overload * n).

    Raises:
        ValueError: If a probability is outside [0, 1], `crowding` is negative or `rules_added` is below 1.

    Example:
        >>> ReplyModel().obedience_with(24)
        0.9
        >>> round(ReplyModel(crowding=0.01).obedience_with(24), 3)
        0.708
    """

    obedience: float = 0.9
    crowding: float = 0.0
    rules_added: int = 2
    forgets: float = 0.1
    useless: float = 0.15
    rivals: bool = False
    spots_conflicts: float = 0.8
    overload: float = 0.01

    def __post_init__(self) -> None:
        for name in ("obedience", "forgets", "useless", "spots_conflicts"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)!r}")
        if not self.crowding >= 0:
            raise ValueError(f"crowding must not be negative, got {self.crowding!r}")
        if not self.overload >= 0:
            raise ValueError(f"overload must not be negative, got {self.overload!r}")
        if self.rules_added < 1:
            raise ValueError(f"rules_added must be at least 1, got {self.rules_added!r}")

    def obedience_with(self, rules: int) -> float:
        """Probability that a rule is followed when the instruction holds `rules` rules."""
        return self.obedience * math.exp(-self.crowding * rules)


class Choices:
    """Random choices that depend on a seed, a content and the name of the choice only.

    Example:
        >>> Choices(0, "abc").uniform("x") == Choices(0, "abc").uniform("x")
        True
    """

    def __init__(self, seed: int, content: str) -> None:
        text = f"{seed}\0{content}".encode("utf-8", "surrogatepass")
        self._state = hashlib.blake2b(text, digest_size=16).digest()

    def uniform(self, name: str) -> float:
        """A number strictly between 0 and 1."""
        digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), key=self._state, digest_size=8).digest()
        # 52 bits and a half fit a float's 53 exactly, so that 0 and 1 cannot come out by rounding.
        return ((int.from_bytes(digest, "big") >> 12) + 0.5) / 2.0**52

    def index(self, name: str, size: int) -> int:
        """A whole number from 0 to size - 1; `size` is at least 1."""
        return min(size - 1, int(self.uniform(name) * size))
