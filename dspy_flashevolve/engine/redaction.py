"""Taking secrets out of what is written down."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

MARK = "[redacted]"
SHORTEST = 12
"""A known secret that is shorter, or has no digit, is left alone: "not-needed", as a key of a server of one's own, is
no secret, and would be found in innocent texts."""
SECRET_NAMES = re.compile(
    r"key$|keys$|token$|secret|passw(or)?d|passphrase|authorization|credential|cookie|api[_-]?key", re.IGNORECASE
)
"""Names of settings and environment variables whose values are secret."""
_SHAPES = re.compile(
    r"\b(?:sk|pk|rk|gsk|hf|xai|ghp|glpat|AIza)[-_](?=[A-Za-z_\-]*\d)[A-Za-z0-9_\-]{12,}"
    r"|\bAIza[A-Za-z0-9_\-]{20,}"
    r"|(?i:bearer\s+)(?=[A-Za-z._~+/\-]*\d)[A-Za-z0-9._~+/\-]{8,}=*"
)
"""What keys of well-known providers look like, and what stands in an Authorization header. Each has a digit: words of a
prompt ("pk_customer_orders", "bearer authentication") must stay, since a run that goes on reads them back."""


class Redaction:
    """Replaces secrets in texts: those that it was told, and what looks like a provider's key.

    Args:
        secrets: texts that must not be written.

    >>> Redaction(["correct-horse-7"]).of("Authorization: Bearer abcdefgh1234, correct-horse-7")
    'Authorization: [redacted], [redacted]'
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = sorted(
            {one for one in secrets if len(one) >= SHORTEST and any(map(str.isdigit, one))}, key=len, reverse=True
        )
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def of(self, value: Any) -> Any:
        """A text without its secrets; anything else as it is."""
        if not isinstance(value, str):
            return value
        if self._known is not None:
            value = self._known.sub(MARK, value)
        return _SHAPES.sub(MARK, value)


def secrets_in(settings: Mapping[str, Any]) -> set[str]:
    """The values of settings whose names say that they are secret, at any depth."""
    found: set[str] = set()
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= secrets_in(value)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(value, str) and SECRET_NAMES.search(str(name)):
            found.add(value)
    return found
