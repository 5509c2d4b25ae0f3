"""What a provider's headers say of its limits, as far as dspy's engines show them.

litellm keeps the headers of every reply; dspy's native engine shows those of errors alone. They come from outside: what
is not exactly as expected is left out, for no limit is better than a wrong one.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

from dspy_flashevolve.engine.rates import PERIOD_SECONDS, UNITS, Heard, Unit

MOST = 10**12
"""Requests or tokens a minute; what is above is no limit."""
LONGEST_SECONDS = 86400.0
_COUNT = re.compile(r"[0-9]{1,15}")
_DURATION = re.compile(
    r"(?:(\d{1,4})d)?(?:(\d{1,5})h)?(?:(\d{1,6})m(?!s))?(?:(\d{1,7}(?:\.\d{1,9})?)s)?(?:(\d{1,9}(?:\.\d{1,9})?)ms)?",
    re.A,
)
_SECONDS = re.compile(r"\d{1,7}(?:\.\d{1,9})?", re.A)


def heard_in(headers: Mapping[str, str], now: Callable[[], datetime] | None = None) -> dict[Unit, Heard]:
    """The limits that a reply's headers tell, in OpenAI's form (also Azure's, Groq's and others') or in Anthropic's.

    Args:
        headers: by their names in lower case.
        now: for Anthropic's, which say at what time there is room again.

    >>> heard_in({"x-ratelimit-limit-requests": "600", "x-ratelimit-remaining-requests": "599",
    ...           "x-ratelimit-reset-requests": "100ms"})
    {'requests': Heard(limit=600.0, remaining=599.0, reset_seconds=0.1)}
    >>> heard_in({"x-ratelimit-limit-tokens": "many"})
    {}
    """
    found: dict[Unit, Heard] = {}
    for unit in UNITS:
        for form in (f"x-ratelimit-{{}}-{unit}", f"anthropic-ratelimit-{unit}-{{}}"):
            limit, left = _count(headers.get(form.format("limit"))), _count(headers.get(form.format("remaining")))
            if not limit:
                continue
            period = seconds_in(headers.get(form.format("renewalperiod"))) or PERIOD_SECONDS  # Azure's
            reset = seconds_in(headers.get(form.format("reset")), now)
            whole = left is not None and left <= limit and reset is not None
            found[unit] = Heard(limit * PERIOD_SECONDS / period, left if whole else None, reset if whole else None)
            break
    return found


def _count(text: str | None) -> float | None:
    """A whole number as it is written by a machine; None for anything else."""
    return float(text) if isinstance(text, str) and _COUNT.fullmatch(text) and int(text) <= MOST else None


def seconds_in(text: str | None, now: Callable[[], datetime] | None = None) -> float | None:
    """A time to wait, up to a day; None for anything else.

    >>> seconds_in("6m0s"), seconds_in("20ms"), seconds_in("1h2m3.5s"), seconds_in("7"), seconds_in("soon")
    (360.0, 0.02, 3723.5, 7.0, None)
    """
    if not isinstance(text, str) or not 0 < len(text) <= 64:
        return None
    if _SECONDS.fullmatch(text):
        return _bounded(float(text))
    match = _DURATION.fullmatch(text)
    if match is not None:
        parts = zip(match.groups(), (86400, 3600, 60, 1, 0.001), strict=True)
        return _bounded(sum(float(part) * unit for part, unit in parts if part))
    try:
        when = datetime.fromisoformat(text.replace("Z", "+00:00"))
        if when.tzinfo is None:
            return None
        moment = datetime.now(timezone.utc) if now is None else now()
        return _bounded(max(0.0, (when - moment).total_seconds()))
    except (ValueError, OverflowError):
        return None


def _bounded(seconds: float) -> float | None:
    return seconds if seconds <= LONGEST_SECONDS else None


def headers_of(reply: Any) -> dict[str, str]:
    """A reply's headers, by their names in lower case; empty where the engine does not show them."""
    hidden = getattr(reply, "_hidden_params", None)
    return _read(hidden.get("additional_headers") if isinstance(hidden, Mapping) else None)


def headers_of_error(chain: Iterator[BaseException]) -> dict[str, str]:
    """The headers of the reply that led to an error."""
    for one in chain:
        reply = getattr(one, "response", None)
        for held in (
            getattr(one, "rate_limit_headers", None),
            getattr(one, "litellm_response_headers", None),
            getattr(reply, "headers", None),
        ):
            if read := _read(held):
                return read
    return {}


def _read(held: Any) -> dict[str, str]:
    """Where a header came more than once its last value counts."""
    if not isinstance(held, Mapping):
        return {}
    read: dict[str, str] = {}
    for name, value in cast("Mapping[Any, Any]", held).items():
        value = value[-1] if isinstance(value, list | tuple) and value else value
        if isinstance(name, str) and isinstance(value, str) and "ratelimit" in (name := name.lower()):
            read[name.removeprefix("llm_provider-")] = value
    return read


def said_by(options: Mapping[str, Any]) -> dict[Unit, float]:
    """The limits among an LM's options, in litellm's words: ``rpm`` and ``tpm``."""
    said: dict[Unit, float] = {}
    for unit, name in (("requests", "rpm"), ("tokens", "tpm")):
        value = options.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MOST:
            said[unit] = float(value)
    return said


def account_of(lm: Any, endpoint: str, key: str | None = None) -> str:
    """Whose limits an LM's requests count against: the endpoint, the model and the key, as a hash that tells none.

    Args:
        key: of the deployment; default: the LM's, else the one of its provider in the environment.
    """
    options: dict[str, Any] = getattr(lm, "kwargs", None) or {}
    model = str(getattr(lm, "model", type(lm).__name__))
    key = key or str(options.get("api_key") or os.environ.get(f"{model.split('/', 1)[0].upper()}_API_KEY", ""))
    return hashlib.sha256("\0".join((endpoint, model, key)).encode("utf-8", "replace")).hexdigest()[:32]


def limits_folder() -> Path | None:
    """Where runs on the same key tell each other what they have sent: in the user's cache; None without a home."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return cache / "dspy-flashevolve" / "limits"
