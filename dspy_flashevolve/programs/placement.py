"""Where a program's rollouts run: on the event loop where they can be awaited, else in threads; and its tools there.

dspy's ``Tool.acall`` calls a function that is no coroutine function on the loop, which waits meanwhile, and
``Tool.__call__`` raises for a coroutine function, which ``dspy.ReAct`` shows to its LM as an observation. A rollout's
program has tools that do not depend on where it runs:

======================  =============================  =====================================================
the tool's function     the program is on the loop     the program is in a thread
======================  =============================  =====================================================
coroutine function      awaited, as by dspy            runs on the run's loop, where its clients live; the
                                                       thread waits
any other               runs in a thread; a coroutine  called, as by dspy; a coroutine that it returns runs
                        that it returns is awaited     on the run's loop
======================  =============================  =====================================================
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Mapping
from functools import cache
from inspect import getattr_static
from typing import Any, cast

import dspy
from dspy.adapters.types.tool import Tool
from dspy.clients.base_lm import BaseLM
from dspy.primitives.module import Module
from dspy.utils.callback import with_callbacks
from dspy.utils.dummies import DummyLM

from dspy_flashevolve.engine.loop import LoopPortal, Threads
from dspy_flashevolve.engine.texts import logger_named

logger = logger_named(__name__)

DSPYS_TOOL_CALL: Any = getattr(Tool.__call__, "__wrapped__", Tool.__call__)
"""dspy's own way, without its callbacks."""
CODE_MODULES = ("CodeAct", "Flex", "ProgramOfThought", "RLM")
"""dspy's modules that run code in an interpreter and wait for it."""


class Placement:
    """Decides where a student's programs run, and calls them, and their tools, there."""

    def __init__(self, student: Module, threads: Threads) -> None:
        self._student, self._threads = student, threads
        self._is_on_loop: bool | None = None
        self._has_warned = False
        self._class_for = cache(self._subclass)

    @property
    def is_on_loop(self) -> bool:
        """Whether rollouts run on the loop."""
        if self._is_on_loop is None:
            self._is_on_loop = runs_on_loop(self._student)
        return self._is_on_loop

    async def call(self, program: Module, inputs: Mapping[str, Any]) -> Any:
        """Call a program where it belongs, and return what it returns."""
        # A module of dspy's warns where it is asked for its forward.
        has_forward, has_aforward = (getattr_static(program, name, None) for name in ("forward", "aforward"))
        if self.is_on_loop:
            try:
                return await program.acall(**inputs)
            except NotImplementedError:
                if not has_forward:
                    raise
            dspy.settings.trace.clear()  # what was traced until then is not the program's way
            if self._is_on_loop:
                self._is_on_loop = False
                name = type(program).__name__
                logger.warning("%s.aforward raises NotImplementedError: rollouts run in threads, by its forward.", name)

        def call() -> Any:
            if has_forward or not has_aforward or not _is_called_as_dspy_does(program):
                return program(**inputs)
            return asyncio.run(program.acall(**inputs))

        return await self._threads.run(call)

    def prepare(self, program: Module) -> None:
        """Let a program's tools run where they belong, wherever the program runs; ``program`` is a copy."""

        def replaced(tool: Any) -> Any:
            kind = type(tool)
            # A class with calls of its own knows what it does.
            if not isinstance(tool, Tool) or kind.acall is not Tool.acall or kind.__call__ is not Tool.__call__:
                return tool
            result = copy.copy(tool)
            # Only the calls change: its function stays what programs and interpreters see.
            object.__setattr__(result, "__class__", self._class_for(kind, _is_blocking(tool)))
            return result

        modules: list[tuple[str, Any]] = list(program.named_sub_modules())
        for _, module in modules:
            tools: Any = getattr(module, "tools", None)
            if isinstance(tools, dict):
                named = cast("dict[Any, Any]", tools)
                module.tools = {name: replaced(tool) for name, tool in named.items()}
            elif type(tools) in (list, tuple):
                module.tools = type(tools)(map(replaced, tools))

    def _subclass(self, kind: type, blocks: bool) -> type:
        """Make a class of the same name with other calls; dspy's callbacks are told of them as of the tool's own."""

        def call(tool: Any, **kwargs: Any) -> Any:
            if self._is_called_on_loop():
                return DSPYS_TOOL_CALL(tool, **kwargs)
            result = tool.func(**tool._validate_and_parse_args(**kwargs))
            if not inspect.iscoroutine(result):
                return result
            if not self._has_warned and not dspy.settings.allow_tool_async_sync_conversion:
                self._has_warned = True
                logger.warning(
                    "Tool %s is a coroutine function, in a program that is called synchronously. It is awaited here; "
                    "where you call the program yourself, use `await program.acall(...)`, or "
                    "dspy.configure(allow_tool_async_sync_conversion=True), or dspy refuses to call the tool.",
                    tool.name,
                )
            return LoopPortal(self._threads.loop).run(result)

        async def acall(tool: Any, **kwargs: Any) -> Any:
            arguments = tool._validate_and_parse_args(**kwargs)
            if self._is_called_on_loop():
                result = await self._threads.run(tool.func, **arguments) if blocks else tool.func(**arguments)
                return await result if inspect.iscoroutine(result) else result
            result = tool.func(**arguments)
            if not inspect.iscoroutine(result):
                return result
            # The loop of this thread ends with the rollout; what a tool keeps open belongs to the run's.
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(result, self._threads.loop))

        members: dict[str, Any] = {"__call__": with_callbacks(call), "acall": with_callbacks(acall)}
        return type(kind)(kind.__name__, (kind,), {**members, "__module__": kind.__module__})

    def _is_called_on_loop(self) -> bool:
        """Whether this is the run's loop; before the run has used a thread, there is no other."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return False
        return running is getattr(self._threads, "loop", running)


def _is_coroutine_tool(tool: Any) -> bool:
    """Whether a tool has to be awaited: by its function, what that wraps, or an ``acall`` of its own."""
    if isinstance(tool, Tool) and type(tool).acall is not Tool.acall:
        return True
    function: Any = tool.func if isinstance(tool, Tool) else tool
    forms = (form for one in (function, inspect.unwrap(function)) for form in (one, getattr(one, "__call__", None)))  # noqa: B004
    return any(map(inspect.iscoroutinefunction, forms))


def _is_blocking(tool: Any) -> bool:
    """Whether a tool may hold up the loop; the function by which dspy.ReAct says that it has finished does not."""
    function: Any = tool.func if isinstance(tool, Tool) else tool
    is_finish = inspect.isfunction(function) and function.__module__ == dspy.ReAct.__module__
    return callable(function) and not is_finish and not _is_coroutine_tool(tool)


def runs_on_loop(program: Module) -> bool:
    """Whether ``program`` can be awaited and then does the same as when it is called.

    It needs an ``aforward`` that is at least as specific as its ``forward``, and no ``__call__`` of its own: who
    overrides only ``forward`` or ``__call__`` inherits what would skip that code. Every LM that it may call (its
    predictors' own, else the configured one) must answer asynchronously. And what is known to block must
    not be in it: code interpreters wait, and dspy calls a tool that is no coroutine function on the loop. Beside a
    coroutine tool, which has to be awaited, such tools run in threads: see :meth:`Placement.prepare`.
    """
    tools, modules = list[Any](), list(program.named_sub_modules())
    for _, module in modules:
        listed: Any = getattr(module, "tools", None)  # dspy.ReAct has its tools there
        tools += listed.values() if isinstance(listed, dict) else listed if isinstance(listed, list | tuple) else ()
    kinds = {kind for _, module in modules for kind in type(module).__mro__}
    own_lms = [getattr(predictor, "lm", None) for predictor in program.predictors()]
    return (
        has_own_aforward(program)
        and all(answers_asynchronously(lm) for lm in [*own_lms, dspy.settings.lm] if lm is not None)
        and not any(kind.__name__ in CODE_MODULES and kind.__module__.startswith("dspy.") for kind in kinds)
        and (any(map(_is_coroutine_tool, tools)) or not any(map(_is_blocking, tools)))
    )


def has_own_aforward(program: Module) -> bool:
    """Whether a module's ``aforward`` is at least as specific as its ``forward``, and ``acall`` as its ``__call__``."""
    if "forward" in vars(program) and "aforward" not in vars(program):
        return False
    return _is_called_as_dspy_does(program) and _defines_first(type(program), {"aforward"}, {"forward"})


def _is_called_as_dspy_does(program: Module) -> bool:
    return _defines_first(type(program), {"acall"}, {"__call__"})


def _defines_first(kind: type, methods: set[str], others: set[str]) -> bool:
    """Whether a class defines one of ``methods`` no later in its MRO than the others; BaseLM's count for none."""
    for base in kind.__mro__:
        names = vars(base).keys()
        if base is BaseLM or (names & others and not names & methods):
            return False
        if names & methods:
            return True
    return False


def answers_asynchronously(lm: Any) -> bool:
    """Whether ``await lm.acall(...)`` works and does not block the loop for the length of a request."""
    if isinstance(lm, DummyLM):
        return True
    if not isinstance(lm, BaseLM):
        return inspect.iscoroutinefunction(getattr(lm, "acall", None))
    engine = getattr(lm, "_engine_spec", "auto")
    if not isinstance(engine, str) and getattr(lm, "_async_engine_spec", None) is None:
        return False
    kind = getattr(type(lm), "original_class", type(lm))
    return _defines_first(kind, {"aforward", "acall"}, {"forward", "__call__"})
