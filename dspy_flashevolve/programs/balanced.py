"""One model on several servers, as one LM."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import dspy
from dspy.clients.base_lm import BaseLM
from dspy.utils.callback import with_callbacks
from dspy.utils.exceptions import is_retryable_lm_error

from dspy_flashevolve.engine.errors import ConfigurationError

_SETTINGS = {"api_base", "api_key", "rpm", "tpm"}
_TURNS = itertools.count()


class BalancedLM(dspy.LM):
    """A ``dspy.LM`` that several servers answer.

    Inside of a run each server has an adaptive limit of its own, and requests go where there is room; those that begin
    alike prefer the same server, whose prefix cache knows them. One that refuses or fails is left out, and tried again
    by one request at a time; the run goes on while one answers. Outside of a run the servers are asked in turn, and the
    next one where one fails. dspy's cache has one entry for a request, whichever server has answered it.

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
        given = [api_base] if isinstance(api_base, str | Mapping) else list(api_base)
        self.deployments: tuple[dict[str, Any], ...] = tuple(
            {"api_base": one} if isinstance(one, str) else dict(one) for one in given
        )
        """Of each server: its address, and what else was given of it."""
        _check(self.deployments)
        super().__init__(model, **options)

    @with_callbacks
    def __call__(self, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        """See ``dspy.LM``; asks the next server where one does not answer."""
        for lm, where in self._attempts(kwargs):
            try:
                return _call(lm, prompt, messages=messages, **where)
            except Exception as error:
                if lm is self or not is_retryable_lm_error(error):
                    raise
        raise AssertionError("no attempt was made")

    @with_callbacks
    async def acall(self, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        """See :meth:`__call__`."""
        for lm, where in self._attempts(kwargs):
            try:
                return await _acall(lm, prompt, messages=messages, **where)
            except Exception as error:
                if lm is self or not is_retryable_lm_error(error):
                    raise
        raise AssertionError("no attempt was made")

    def _attempts(self, kwargs: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Who is asked, and how: each server in turn without a retry, and then the first one as any LM is."""
        if "api_base" in kwargs:
            yield self, kwargs
            return
        first = next(_TURNS) % len(self.deployments)
        order = [*self.deployments[first:], *self.deployments[:first]]
        once = copy.copy(self)  # shares history and connections
        once.num_retries = 0
        for one in order if len(order) > 1 else ():
            yield once, {**kwargs, **where(one)}
        yield self, {**kwargs, **where(order[0])}

    def dump_state(self) -> dict[str, Any]:
        """See ``dspy.LM``: without the keys."""
        servers = [{name: value for name, value in one.items() if name != "api_key"} for one in self.deployments]
        return {**super().dump_state(), "api_base": servers}


def where(deployment: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an LM call that ask one server."""
    return {name: deployment[name] for name in ("api_base", "api_key") if name in deployment}


_call: Any = getattr(BaseLM.__call__, "__wrapped__", BaseLM.__call__)
_acall: Any = getattr(BaseLM.acall, "__wrapped__", BaseLM.acall)


def _check(deployments: Sequence[Mapping[str, Any]]) -> None:
    if not deployments:
        raise ConfigurationError("api_base is empty, expected the address of at least one server.")
    for one in deployments:
        if not isinstance(one.get("api_base"), str) or not one["api_base"] or not set(one) <= _SETTINGS:
            shown = {name: "..." if name == "api_key" else value for name, value in one.items()}
            raise ConfigurationError(
                f"api_base has {shown!r}, expected an address, or a mapping with api_base and, of {sorted(_SETTINGS)}, "
                "what else this server needs. Give what holds for all as options of the LM."
            )
    places = [(one["api_base"].rstrip("/"), one.get("api_key")) for one in deployments]
    if len(set(places)) < len(places):
        raise ConfigurationError(f"api_base has an address twice: {[place for place, _ in places]}. Give each once.")
