"""What a verifier is, and the registry that the modules of this package fill."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Accepts = Callable[..., bool]


@dataclass(frozen=True)
class Verifier:
    """Says whether a response meets a constraint, and puts the constraint in words.

    Attributes:
        kind: The instruction id, such as `"count:numbers"`.
        accepts: The rule: takes the response and the constraint's arguments by name.
        wanted: The constraint as one sentence, a template that `str.format` fills with the arguments.
        approximate: In what the verdict may differ from the official evaluator's; empty where it does not.
    """

    kind: str
    accepts: Accepts
    wanted: str
    approximate: str = ""

    def __call__(self, response: str, **arguments: Any) -> bool:
        """Whether the response meets the constraint; an empty response meets none.

        Args:
            response: The text.
            arguments: The row's `kwargs` of the constraint; unset ones may be missing or `None`.
        """
        return bool(response.strip()) and self.accepts(response, **set_arguments(arguments))

    def describe(self, **arguments: Any) -> str:
        """The constraint as one sentence.

        Example:
            >>> Verifier("count:numbers", lambda response, N: False, "Use {N} numbers.").describe(N=3.0)
            'Use 3 numbers.'
        """
        return self.wanted.format_map({name: _shown(value) for name, value in set_arguments(arguments).items()})


VERIFIERS: dict[str, Verifier] = {}


def verifier(kind: str, wanted: str, approximate: str = "") -> Callable[[Accepts], Accepts]:
    """Register the decorated rule for an instruction id."""

    def register(accepts: Accepts) -> Accepts:
        VERIFIERS[kind] = Verifier(kind, accepts, wanted, approximate)
        return accepts

    return register


def set_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are set, with whole numbers as `int` (the data files write some as floats).

    Example:
        >>> set_arguments({"N": 5.0, "word": None})
        {'N': 5}
    """
    return {name: _whole(value) for name, value in given.items() if value is not None}


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
