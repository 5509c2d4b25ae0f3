"""Classes of the run's twins of LMs: whose calls are paced, and whose replies are looked at."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import dspy
from dspy.clients.base_lm import BaseLM
from dspy.utils.callback import with_callbacks
from dspy.utils.exceptions import LMServerError

from dspy_flashevolve.programs.replies import is_hollow

_LOOK: ContextVar[_Look | None] = ContextVar("flashevolve_look", default=None)


class HollowReplyError(LMServerError):
    """A reply held no message."""


class _Look:
    """What one LM call was answered, and whether the user wants it in the histories."""

    def __init__(self, kept: bool) -> None:
        self.kept = kept
        self.hollow = False


@contextmanager
def replies_looked_at() -> Generator[None, None, None]:
    """Look at the replies of one LM call; dspy shows a reply as it came only to the LM's history.

    Raises:
        HollowReplyError: a reply held no message.
    """
    look = _Look(kept=not dspy.settings.disable_history)
    token = _LOOK.set(look)
    try:
        with dspy.context(disable_history=False):
            yield
    finally:
        _LOOK.reset(token)
    if look.hollow:
        raise HollowReplyError("the reply holds no message")


@lru_cache(maxsize=64)
def twin_class(kind: type[Any]) -> type[Any]:
    """A subclass whose calls are paced. Callbacks hear of a call once, however often it is made."""

    def original(twin: Any) -> Any:
        lm = copy.copy(twin)
        lm.__class__ = kind
        lm.num_retries = lm.__dict__.pop("pace").own_retries
        return lm

    call, acall = kind.__call__, kind.acall

    def own_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.pace.call(lambda **again: call(self, *args, **{**kwargs, **again}))

    async def own_acall(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await self.pace.acall(lambda **again: acall(self, *args, **{**kwargs, **again}))

    def update_history(self: Any, entry: dict[str, Any]) -> None:
        look = _LOOK.get()
        if look is not None:
            look.hollow = look.hollow or is_hollow(entry.get("response"))
        if look is None or look.kept:
            kind.update_history(self, entry)

    paced_call, paced_acall = own_call, own_acall  # a class of the user's with calls of its own
    if call is BaseLM.__call__ and acall is BaseLM.acall:
        call, acall = getattr(call, "__wrapped__", call), getattr(acall, "__wrapped__", acall)
        paced_call, paced_acall = with_callbacks(_plain_call(own_call)), with_callbacks(_plain_acall(own_acall))

    members: dict[str, Any] = {
        "__call__": paced_call,
        "acall": paced_acall,
        "update_history": update_history,
        "__reduce_ex__": lambda self, protocol: (_unchanged, (original(self),)),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "dump_state": lambda self: original(self).dump_state(),
        "original_class": kind,
    }
    return type(kind.__name__, (kind,), members)


def _plain_call(call: Any) -> Any:
    """With the arguments of dspy's own LMs, as callbacks hear of them."""

    def paced_call(self: Any, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        return call(self, prompt, messages=messages, **kwargs)

    return paced_call


def _plain_acall(call: Any) -> Any:
    """As :func:`_plain_call`, to be awaited."""

    async def paced_acall(self: Any, prompt: Any = None, *, messages: Any = None, **kwargs: Any) -> Any:
        return await call(self, prompt, messages=messages, **kwargs)

    return paced_acall


def _unchanged(value: Any) -> Any:
    return value
