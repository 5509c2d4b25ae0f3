"""Plain data from a file, checked: each function raises ConfigurationError for what is something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from dspy_flashevolve.engine.errors import ConfigurationError


def fields_of(data: object, names: set[str], what: str) -> Mapping[str, object]:
    """A mapping with these keys and no others."""
    if not isinstance(data, Mapping) or set(cast("Mapping[str, object]", data)) != names:
        raise ConfigurationError(f"playbook: expected {what} with {sorted(names)}, got {data!r:.80}.")
    return cast("Mapping[str, object]", data)


def text_of(value: object, name: str) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ConfigurationError(f"playbook: a bullet's {name} is {value!r:.80}, expected text.")
    return value


def whole_of(value: object, name: str) -> int:
    """A whole number of at least 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigurationError(f"playbook: {name} is {value!r:.80}, expected a whole number of at least 0.")
    return value
