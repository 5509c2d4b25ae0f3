"""Servers that answer LM calls: one model on several of them as one LM, and whose limits a call counts against."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import dspy
from dspy.utils.callback import with_callbacks
from dspy.utils.exceptions import is_retryable_lm_error

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.engine.provider import SERVER_SEPARATOR
from dspy_flashevolve.engine.rates import MAX_LIMIT, Unit
from dspy_flashevolve.engine.redaction import without_secrets
from dspy_flashevolve.programs.faults import DSPYS_ACALL, DSPYS_CALL

_SETTINGS = {"api_base", "api_key", "rpm", "tpm"}
_TURNS = itertools.count()


class BalancedLM(dspy.LM):
    """A ``dspy.LM`` that several servers answer.

    Inside of a run each server has a limit of its own where limits adapt, and a request goes to the one that is
    expected to answer it first. One that turns most requests away is left out, and tried again by one request at a
    time; the run goes on while one answers. Outside of a run the servers are asked in turn, and the next one where one
    fails. dspy's cache has one entry for a request, whichever server has answered it.

    Args:
        model: as for ``dspy.LM``; all servers have it under this name.
        api_base: the servers' addresses, at least one; or a mapping for each, in litellm's words: ``api_base``, and
            where they differ ``api_key``, ``rpm`` and ``tpm`` (requests and tokens a minute).
        options: as for ``dspy.LM``.

    Raises:
        ConfigurationError: no address, one that comes twice with the same key, or a setting that is none of these.

    >>> lm = BalancedLM("openai/Qwen/Qwen3-8B", api_base=["http://gpu-1:8000/v1", "http://gpu-2:8000/v1"])
    >>> len(lm.deployments)
    2
    """

    def __init__(self, model: str, *, api_base: Sequence[str | Mapping[str, Any]], **options: Any) -> None:
        servers = [api_base] if isinstance(api_base, str | Mapping) else list(api_base)
        self.deployments: tuple[dict[str, Any], ...] = tuple(
            {"api_base": server} if isinstance(server, str) else dict(server) for server in servers
        )
        """Of each server: its address, and what else was given of it."""
        _check(self.deployments)
        super().__init__(model, **options)

    @with_callbacks
    def __call__(self, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        """See ``dspy.LM``; asks the next server where one does not answer."""
        for lm, arguments in self._attempts(kwargs):
            try:
                return DSPYS_CALL(lm, prompt, messages=messages, **arguments)
            except Exception as error:
                if lm is self or not is_retryable_lm_error(error):
                    raise
        raise AssertionError("no attempt was made")

    @with_callbacks
    async def acall(self, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        """See :meth:`__call__`."""
        for lm, arguments in self._attempts(kwargs):
            try:
                return await DSPYS_ACALL(lm, prompt, messages=messages, **arguments)
            except Exception as error:
                if lm is self or not is_retryable_lm_error(error):
                    raise
        raise AssertionError("no attempt was made")

    def _attempts(self, kwargs: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield whom to ask, and how: each server in turn without a retry, then the first one as any LM is asked."""
        if "api_base" in kwargs:
            yield self, kwargs
            return
        first = next(_TURNS) % len(self.deployments)
        order = [*self.deployments[first:], *self.deployments[:first]]
        once = copy.copy(self)  # shares history and connections
        once.num_retries = 0
        for deployment in order if len(order) > 1 else ():
            yield once, {**kwargs, **arguments_for(deployment)}
        yield self, {**kwargs, **arguments_for(order[0])}

    def dump_state(self) -> dict[str, Any]:
        """See ``dspy.LM``: without the keys."""
        servers = [
            {name: value for name, value in deployment.items() if name != "api_key"} for deployment in self.deployments
        ]
        return {**super().dump_state(), "api_base": servers}


def arguments_for(deployment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an LM call that ask one server."""
    return {name: deployment[name] for name in ("api_base", "api_key") if name in deployment}


def _check(deployments: Sequence[Mapping[str, Any]]) -> None:
    if not deployments:
        raise ConfigurationError("api_base is empty, expected the address of at least one server.")
    for deployment in deployments:
        if (
            not isinstance(deployment.get("api_base"), str)
            or not deployment["api_base"]
            or not set(deployment) <= _SETTINGS
        ):
            shown = {name: "..." if name == "api_key" else value for name, value in deployment.items()}
            raise ConfigurationError(
                f"api_base has {shown!r}, expected an address, or a mapping with api_base and, of {sorted(_SETTINGS)}, "
                "what else this server needs. Give what holds for all as options of the LM."
            )
    places = [(deployment["api_base"].rstrip("/"), deployment.get("api_key")) for deployment in deployments]
    if len(set(places)) < len(places):
        raise ConfigurationError(f"api_base has an address twice: {[place for place, _ in places]}. Give each once.")


def endpoint_of(lm: Any) -> str:
    """Name the endpoint that answers an LM's requests: its address, else its provider.

    >>> import dspy
    >>> endpoint_of(dspy.LM("openai/gpt-5", api_base="http://localhost:8000/v1/"))
    'http://localhost:8000/v1'
    >>> endpoint_of(dspy.LM("anthropic/claude-haiku-4-5")), endpoint_of(dspy.LM("gpt-5"))
    ('anthropic', 'openai')
    """
    if isinstance(lm, BalancedLM):
        return SERVER_SEPARATOR.join(_names_of(lm))
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


def account_of(lm: Any, endpoint: str, key: str | None = None) -> tuple[str, str, str]:
    """Name the account whose limits an LM's requests count against: endpoint, model and key."""
    options: dict[str, Any] = getattr(lm, "kwargs", None) or {}
    model = str(getattr(lm, "model", type(lm).__name__))
    key = key or str(options.get("api_key") or os.environ.get(f"{model.split('/', 1)[0].upper()}_API_KEY", ""))
    return endpoint, model, key
