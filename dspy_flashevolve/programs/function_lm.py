"""A function from prompt to text as an LM: gepa takes one as ``reflection_lm``, dspy wants an LM."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import dspy
from dspy.clients.base_lm import BaseLM
from dspy.lm15 import Message, Request, Response, TextPart, Usage

from dspy_flashevolve.engine.errors import ConfigurationError
from dspy_flashevolve.programs.faults import NoTextError


def lm_of(given: Any, name: str) -> Any:
    """Make an LM of what a user gives as one: the name of a model, a function from prompt to text, or an LM as it is.

    Args:
        given: a function is called with the whole prompt as one text, or as one message where its argument is called
            ``messages``, and returns the reply as text, or in a list as dspy's LMs do; it may be a coroutine function.
        name: of the argument, for the error.

    Raises:
        ConfigurationError: it is none of these.

    >>> lm_of(lambda prompt: prompt.upper(), "reflection_lm")("yes")
    ['YES']
    """
    if given is None or isinstance(given, BaseLM) or getattr(given, "supports_decision_requests", False) is True:
        return given  # dspy's predictors ask nothing else
    if isinstance(given, str):
        return dspy.LM(given)
    function = _of_prompt(given) if callable(given) else None
    if function is not None:
        return dspy.LM(
            f"function/{getattr(given, '__name__', type(given).__name__)}",
            engine=_InThread(function),
            async_engine=_OnLoop(function),
            cache=False,  # what the function asks, nobody here knows
        )
    raise ConfigurationError(
        f"{name} is {given!r}, expected a dspy.LM, the name of a model, or a function from prompt to reply, both text."
    )


def _of_prompt(given: Callable[..., Any]) -> Callable[[str], Any] | None:
    """What is given as a function of the prompt; None where it can be called neither with it nor with messages."""

    @functools.wraps(given, updated=())
    def with_messages(prompt: str) -> Any:
        return given(messages=[{"role": "user", "content": prompt}])

    takes_messages = _takes(given, messages=[])
    if _takes(given, "") and not (takes_messages and not _takes(given, "", messages=[])):
        return given
    return with_messages if takes_messages else None


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

    def __init__(self, function: Callable[[str], Any]) -> None:
        self.function = function

    def complete(self, request: Request) -> Response:
        """Return the function's reply; a coroutine function runs on a loop of its own."""
        reply = self.function(_prompt_of(request))

        async def awaited() -> Any:
            return await reply

        return _response(self.function, asyncio.run(awaited()) if inspect.isawaitable(reply) else reply)


class _OnLoop(_InThread):
    """The same for calls that are awaited: a sync function runs in a thread."""

    async def complete(self, request: Request) -> Response:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the function's reply."""
        reply = await asyncio.to_thread(self.function, _prompt_of(request))
        return _response(self.function, await reply if inspect.isawaitable(reply) else reply)


def _prompt_of(request: Request) -> str:
    """Join the whole prompt to one text."""
    return "\n\n".join(filter(None, [str(request.system or ""), *(message.text for message in request.messages)]))


def _response(function: Callable[..., Any], reply: Any) -> Response:
    if isinstance(reply, list) and len(cast("list[Any]", reply)) == 1:
        reply = reply[0]
    if not isinstance(reply, str):
        name = getattr(function, "__name__", type(function).__name__)
        raise NoTextError(f"{name} returned {reply!r:.200}, expected the reply as text.")
    message = Message.assistant([TextPart(reply)])
    return Response(id=None, model="function", message=message, finish_reason="stop", usage=Usage())
