"""Taking secrets out of what leaves the process: out of the replies and errors of LMs as they come in, so that nothing
that is made of them holds any, and out of all that is written down."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

REDACTED = "[redacted]"
SHORTEST = 12
"""A text that may be a secret, by the name of a setting, and is shorter or has no digit, is left alone."""
SHORTEST_HELD = 8
"""The same of what an LM holds, which is one, unless it stands for none."""
LONG_SEGMENT = 16
"""A part of a URL's path that is as long may be a key."""
JSON_DEPTH = 5
"""How often JSON stands in JSON: arguments of a tool, in a reply, in a field, in a trace, in a row of the journal."""
NO_SECRETS = frozenset({"not-needed", "not_needed", "no-key-needed", "no-key-required", "placeholder", "your-api-key"})
"""What people write where a server of their own wants no key; it would be found in innocent texts."""
SECRET_NAMES = re.compile(
    r"key$|keys$|token$|secret|passw(or)?d|passphrase|authorization|credential|cookie|api[_-]?key", re.IGNORECASE
)
"""Names of settings and environment variables whose values are secret."""
PUBLIC_HEADERS = re.compile(
    r"accept|content-type|user-agent|referer|title|version|beta|organization|project|connection", re.IGNORECASE
)
"""Names of headers whose values are not secret."""
_SHAPES = re.compile(
    r"\b(?:sk|pk|rk|gsk|hf|xai|ghp|glpat|AIza)[-_](?=[A-Za-z_\-]*\d)[A-Za-z0-9_\-]{12,}"
    r"|\bAIza[A-Za-z0-9_\-]{20,}"
    r"|(?i:bearer\s+)(?=[A-Za-z._~+/\-]*\d)[A-Za-z0-9._~+/\-]{8,}=*"
    r"|(?<=://)[^\s/:@\"']+:[^\s/@\"']+(?=@)"
)
"""What keys of well-known providers look like, what stands in an Authorization header, and a URL's user and password.
The first have a digit: words of a prompt ("pk_customer_orders", "bearer authentication") must stay, since a run that
goes on reads them back."""


class Redaction:
    """Replaces secrets in texts: those that it was told, and what looks like a provider's key.

    Args:
        secrets: texts that may be secrets, by the names of the settings that hold them.

    >>> Redaction(["correct-horse-7"]).redact("Authorization: Bearer abcdefgh1234, correct-horse-7")
    'Authorization: [redacted], [redacted]'
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._texts = {secret for secret in secrets if len(secret) >= SHORTEST and any(map(str.isdigit, secret))}
        self._pattern: re.Pattern[str] | None = None
        self.add(())

    def add(self, held: Iterable[str]) -> None:
        """Take note of what LMs hold, which is secret; see :func:`secrets_held_by`."""
        self._texts |= {text for text in held if len(text) >= SHORTEST_HELD and text.lower() not in NO_SECRETS}
        spellings = sorted({form for text in self._texts for form in _spellings(text)}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, spellings))) if spellings else None

    def redact(self, value: Any) -> Any:
        """A text without its secrets; anything else as it is."""
        return _SHAPES.sub(REDACTED, self.redact_known(value)) if isinstance(value, str) else value

    def redact_known(self, value: Any) -> Any:
        """A text, or texts in lists and dicts at any depth, without the secrets that it was told."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self._pattern.sub(REDACTED, value)
        if type(value) in (list, tuple):
            return type(value)(map(self.redact_known, value))
        if type(value) is dict:
            return {name: self.redact_known(item) for name, item in cast("dict[Any, Any]", value).items()}
        return value

    def redact_errors(self, errors: Iterable[BaseException]) -> None:
        """Take the secrets that it was told out of what errors say."""
        for error in errors:
            with suppress(Exception):  # an exception class may do with its attributes as it likes
                error.args = self.redact_known(error.args)
                for name, value in list(vars(error).items()):
                    if isinstance(value, str | list | dict):
                        setattr(error, name, self.redact_known(value))


def _spellings(secret: str) -> set[str]:
    """Return a text as it is, and as it stands in JSON, and in JSON that stands in JSON.

    >>> sorted(_spellings('a"b'), key=len)[:2]
    ['a"b', 'a\\\\"b']
    """
    forms = {secret, repr(secret)[1:-1]}
    for _ in range(JSON_DEPTH):
        forms |= {json.dumps(form, ensure_ascii=ascii_only)[1:-1] for form in forms for ascii_only in (True, False)}
    return forms


def secrets_in(settings: Mapping[str, Any]) -> set[str]:
    """The values of settings whose names say that they are secret, at any depth."""
    found: set[str] = set()
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= secrets_in(value)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(value, str) and SECRET_NAMES.search(str(name)):
            found.add(value)
    return found


def secrets_held_by(lm: Any) -> set[str]:
    """Keys of an LM, by its settings, its headers, and its address: user, password, query, long parts of the path.

    >>> from types import SimpleNamespace
    >>> options = {"api_base": "https://me:open-sesame@host/v1", "extra_headers": {"X-Pass": "let-me-in"}}
    >>> sorted(secrets_held_by(SimpleNamespace(kwargs=options)))
    ['let-me-in', 'me', 'open-sesame']
    """
    found: set[str] = set()
    servers: Any = getattr(lm, "deployments", None)
    for settings in (
        getattr(lm, "kwargs", None),
        getattr(lm, "__dict__", None),
        *(servers if _listed(servers) else ()),
    ):
        if not isinstance(settings, Mapping):
            continue
        options = cast("Mapping[str, Any]", settings)
        found |= secrets_in(options)
        for name in ("headers", "extra_headers", "default_headers"):
            headers = options.get(name)
            for header, value in headers.items() if isinstance(headers, Mapping) else ():  # pyright: ignore[reportUnknownVariableType]
                words = str(value).split()  # pyright: ignore[reportUnknownArgumentType]
                if len(words) in (1, 2) and not PUBLIC_HEADERS.search(str(header)):  # pyright: ignore[reportUnknownArgumentType]
                    found.add(words[-1])
        for name in ("api_base", "base_url"):
            if isinstance(options.get(name), str):
                found |= _in_address(options[name])
    return found


def _listed(value: object) -> bool:
    return isinstance(value, list | tuple)


def _in_address(address: str) -> set[str]:
    parts = urlsplit(address)
    secrets = {parts.username or "", parts.password or "", *(value for _, value in parse_qsl(parts.query))}
    secrets |= {segment for segment in parts.path.split("/") if len(segment) >= LONG_SEGMENT}
    return {form for text in secrets if text for form in (text, unquote(text))}


def without_secrets(address: str) -> str:
    """An address without user, password and query, and without what may be a key in its path.

    >>> without_secrets("https://me:open-sesame@host:8000/keys/abcdefghijklmnop/v1/?token=x")
    'https://host:8000/keys/[redacted]/v1'
    """
    parts = urlsplit(address)
    if not parts.hostname:
        return address.rstrip("/")
    path = "/".join(REDACTED if len(segment) >= LONG_SEGMENT else segment for segment in parts.path.split("/"))
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}".rstrip("/")
