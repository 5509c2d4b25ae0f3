"""May a program run on the event loop, or does it need a thread?"""

from __future__ import annotations

import inspect
from typing import Any

import dspy
from dspy.adapters.types.tool import Tool
from dspy.clients.base_lm import BaseLM
from dspy.primitives.module import Module
from dspy.utils.dummies import DummyLM


def runs_on_loop(program: Module) -> bool:
    """True when ``program`` can be awaited and does the same as when it is called.

    It needs an ``aforward`` that is at least as specific as its ``forward``: a subclass that overrides
    only ``forward`` inherits an ``aforward`` that would skip its code. Every LM that it may call (its
    predictors' own, else the configured one) must answer asynchronously. And what is known to block must
    not be in it: dspy calls a tool that is no coroutine function on the loop, and code interpreters wait.
    """
    return (
        has_own_aforward(program)
        and all(answers_asynchronously(lm) for lm in _language_models(program))
        and not any(_blocks(module) for _, module in program.named_sub_modules())
    )


BLOCKING = ("CodeAct", "Flex", "ProgramOfThought", "RLM")
"""dspy's modules that run code in an interpreter and wait for it."""


def _blocks(module: Any) -> bool:
    if any(kind.__name__ in BLOCKING and kind.__module__.startswith("dspy.") for kind in type(module).__mro__):
        return True
    tools = getattr(module, "tools", None)
    listed = list(tools.values()) if isinstance(tools, dict) else tools if isinstance(tools, list | tuple) else []
    return any(_blocking_tool(tool) for tool in listed)


def _blocking_tool(tool: Any) -> bool:
    function = tool.func if isinstance(tool, Tool) else tool
    call = getattr(function, "__call__", None)  # noqa: B004
    return callable(function) and not (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call))


def has_own_aforward(program: Module) -> bool:
    """Whether a module's ``aforward`` is at least as specific as its ``forward``."""
    if "forward" in vars(program) and "aforward" not in vars(program):
        return False
    for kind in type(program).__mro__:
        if "aforward" in vars(kind):
            return True
        if "forward" in vars(kind):
            return False
    return False


def _language_models(program: Module) -> list[Any]:
    own = [getattr(predictor, "lm", None) for predictor in program.predictors()]
    return [lm for lm in [*own, dspy.settings.lm] if lm is not None]


def answers_asynchronously(lm: Any) -> bool:
    """True when ``await lm.acall(...)`` works and does not block the loop for the length of a request."""
    if isinstance(lm, DummyLM):
        return True
    if not isinstance(lm, BaseLM):
        return inspect.iscoroutinefunction(getattr(lm, "acall", None))
    engine = getattr(lm, "_engine_spec", "auto")
    if not isinstance(engine, str) and getattr(lm, "_async_engine_spec", None) is None:
        return False
    return _overrides_aforward_last(getattr(type(lm), "original_class", type(lm)))


def _overrides_aforward_last(kind: type) -> bool:
    """Whether ``aforward`` is real, and no subclass changed ``forward`` or ``__call__`` alone."""
    for base in kind.__mro__:
        if base is BaseLM:
            return False
        names = vars(base)
        if "aforward" in names or "acall" in names:
            return True
        if "forward" in names or "__call__" in names:
            return False
    return False
