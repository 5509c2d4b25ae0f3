"""Who answers an LM's requests, and whose limits they count against."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspy_flashevolve.engine.groups import REPLICA_SEPARATOR
from dspy_flashevolve.engine.rate_headers import MAX_LIMIT, Unit
from dspy_flashevolve.engine.redaction import without_secrets
from dspy_flashevolve.programs.servers import BalancedLM


def endpoint_of(lm: Any) -> str:
    """Name the endpoint that answers an LM's requests: its address, else its provider.

    >>> import dspy
    >>> endpoint_of(dspy.LM("openai/gpt-5", api_base="http://localhost:8000/v1/"))
    'http://localhost:8000/v1'
    >>> endpoint_of(dspy.LM("anthropic/claude-haiku-4-5")), endpoint_of(dspy.LM("gpt-5"))
    ('anthropic', 'openai')
    """
    if isinstance(lm, BalancedLM):
        return REPLICA_SEPARATOR.join(_names_of(lm))
    options: dict[str, Any] = getattr(lm, "kwargs", None) or {}
    address = options.get("api_base") or options.get("base_url")
    if address:
        return without_secrets(str(address))
    model = str(getattr(lm, "model", type(lm).__name__))
    if "/" in model:
        return model.split("/", 1)[0]
    return "openai" if isinstance(getattr(lm, "_engine_spec", None), str) else model


def _names_of(lm: BalancedLM) -> list[str]:
    """Name the endpoints of one model; an address that is there with several keys is numbered."""
    names: list[str] = []
    for deployment in lm.deployments:
        address = without_secrets(str(deployment["api_base"]))
        same = sum(name.partition(" #")[0] == address for name in names)
        names.append(f"{address} #{same + 1}" if same else address)
    return names


def limits_in_options(options: Mapping[str, Any]) -> dict[Unit, float]:
    """Read the limits a minute among an LM's options, in litellm's words: ``rpm`` and ``tpm``."""
    limits: dict[Unit, float] = {}
    for unit, name in (("requests", "rpm"), ("tokens", "tpm")):
        value = options.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_LIMIT:
            limits[unit] = float(value)
    return limits


def account_of(lm: Any, endpoint: str, key: str | None = None) -> str:
    """Name the account whose limits an LM's requests count against: a hash of endpoint, model and key.

    Args:
        key: of the deployment; default: the LM's, else the one of its provider in the environment.
    """
    options: dict[str, Any] = getattr(lm, "kwargs", None) or {}
    model = str(getattr(lm, "model", type(lm).__name__))
    key = key or str(options.get("api_key") or os.environ.get(f"{model.split('/', 1)[0].upper()}_API_KEY", ""))
    return hashlib.sha256("\0".join((endpoint, model, key)).encode("utf-8", "replace")).hexdigest()[:32]


def limits_folder() -> Path | None:
    """Return where runs on one key share what they have sent: in the user's cache; None without a home."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return cache / "dspy-flashevolve" / "limits"
