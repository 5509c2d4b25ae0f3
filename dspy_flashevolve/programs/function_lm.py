"""A function from prompt to text as an LM: gepa takes one as ``reflection_lm``, dspy wants an LM."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, cast

import dspy
from dspy.clients.base_lm import BaseLM
from dspy.lm15 import Message, Request, Response, TextPart, Usage

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.programs.faults import NoTextError


def lm_of(lm: Any, name: str) -> Any:
    """Make an LM of what a user gives as one: the name of a model, a function from prompt to text, or an LM as it is.

    Args:
        lm: a function is called with the whole prompt as one text, or as one message where its argument is called
            ``messages``, and returns the reply as text, or in a list as dspy's LMs do; it may be a coroutine function.
        name: of the argument, for the error.

    Raises:
        ConfigurationError: it is none of these.

    >>> lm_of(lambda prompt: prompt.upper(), "reflection_lm")("yes")
    ['YES']
    """
    if lm is None or isinstance(lm, BaseLM) or getattr(lm, "supports_decision_requests", False) is True:
        return lm  # dspy's predictors ask nothing else
    if isinstance(lm, str):
        return dspy.LM(lm)
    if not callable(lm) or not (_takes(lm, "") or _takes(lm, messages=[])):
        raise ConfigurationError(
            f"{name} is {lm!r}, expected a dspy.LM, the name of a model, or a function from prompt to reply, both text."
        )
    model = f"function/{getattr(lm, '__name__', type(lm).__name__)}"
    # What the function asks, nobody here knows: no cache.
    return dspy.LM(model, engine=_InThread(lm), async_engine=_OnLoop(lm), cache=False)


def _takes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a builtin that does not say
        return bool(args)
    return True


class _InThread:
    """dspy's engine contract: calls the function where the LM is called, which is in a thread."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._by_messages = _takes(function, messages=[]) and not _takes(function, "", messages=[])

    def call(self, request: Request) -> Any:
        """Call the function with the whole prompt as one text."""
        prompt = "\n\n".join(filter(None, [str(request.system or ""), *(message.text for message in request.messages)]))
        return (
            self.function(messages=[{"role": "user", "content": prompt}])
            if self._by_messages
            else self.function(prompt)
        )

    def response(self, reply: Any) -> Response:
        """Return the function's reply, which may be in a list."""
        if isinstance(reply, list) and len(cast("list[Any]", reply)) == 1:
            reply = reply[0]
        if not isinstance(reply, str):
            name = getattr(self.function, "__name__", type(self.function).__name__)
            raise NoTextError(f"{name} returned {reply!r:.200}, expected the reply as text.")
        message = Message.assistant([TextPart(reply)])
        return Response(id=None, model="function", message=message, finish_reason="stop", usage=Usage())

    def complete(self, request: Request) -> Response:
        """Return the function's reply; a coroutine function runs on a loop of its own."""
        reply = self.call(request)

        async def awaited() -> Any:
            return await reply

        return self.response(asyncio.run(awaited()) if inspect.isawaitable(reply) else reply)


class _OnLoop(_InThread):
    """The same for calls that are awaited: a sync function runs in a thread."""

    async def complete(self, request: Request) -> Response:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the function's reply."""
        reply = await asyncio.to_thread(self.call, request)
        return self.response(await reply if inspect.isawaitable(reply) else reply)
