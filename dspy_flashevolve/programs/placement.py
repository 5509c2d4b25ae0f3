"""Where a program's rollouts run: on the event loop where they can be awaited, else in threads."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import dspy
from dspy.clients.base_lm import BaseLM
from dspy.primitives.module import Module
from dspy.utils.dummies import DummyLM

from dspy_flashevolve.engine.loop import Threads
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.programs.tools import is_blocking_tool, is_coroutine_tool, tools_of

logger = logger_named(__name__)

CODE_MODULES = ("CodeAct", "Flex", "ProgramOfThought", "RLM")
"""dspy's modules that run code in an interpreter and wait for it."""


class Placement:
    """Decides where the rollouts of one student run, and calls its programs there.

    Args:
        student: programs are as it is.
        threads: of the run.
    """

    def __init__(self, student: Module, threads: Threads) -> None:
        self._student, self._threads = student, threads
        self._is_on_loop: bool | None = None

    @property
    def is_on_loop(self) -> bool:
        """Whether rollouts run on the loop."""
        if self._is_on_loop is None:
            self._is_on_loop = runs_on_loop(self._student)
        return self._is_on_loop

    async def call(self, program: Module, inputs: dict[str, Any]) -> Any:
        """Call a program where it belongs, and return what it returns.

        Raises:
            Exception: what the program raised.
        """
        if self.is_on_loop:
            try:
                return await program.acall(**inputs)
            except NotImplementedError:
                if not _has(program, "forward"):
                    raise
            dspy.settings.trace.clear()  # what was traced until then is not the program's way
            if self._is_on_loop:
                self._is_on_loop = False
                name = type(program).__name__
                logger.warning("%s.aforward raises NotImplementedError: rollouts run in threads, by its forward.", name)
        return await self._threads.run(_call, program, inputs)


def _call(program: Module, inputs: dict[str, Any]) -> Any:
    """Call a program in a thread; one without a ``forward`` on a loop of its own."""
    if _has(program, "forward") or not _has(program, "aforward") or not _is_called_as_dspy_does(program):
        return program(**inputs)
    return asyncio.run(program.acall(**inputs))


def _has(program: Module, name: str) -> bool:
    return name in vars(program) or any(name in vars(kind) for kind in type(program).__mro__)


def runs_on_loop(program: Module) -> bool:
    """Whether ``program`` can be awaited and then does the same as when it is called.

    It needs an ``aforward`` that is at least as specific as its ``forward``, and no ``__call__`` of its own: who
    overrides only ``forward`` or ``__call__`` inherits what would skip that code. Every LM that it may call (its
    predictors' own, else the configured one) must answer asynchronously. And what is known to block must
    not be in it: code interpreters wait, and dspy calls a tool that is no coroutine function on the loop. Beside a
    coroutine tool, which has to be awaited, such tools run in threads: see :class:`~.tools.ToolCalls`.
    """
    tools = tools_of(program)
    return (
        has_own_aforward(program)
        and all(answers_asynchronously(lm) for lm in _language_models(program))
        and not any(_runs_code(module) for _, module in program.named_sub_modules())
        and (any(map(is_coroutine_tool, tools)) or not any(map(is_blocking_tool, tools)))
    )


def _runs_code(module: Any) -> bool:
    return any(kind.__name__ in CODE_MODULES and kind.__module__.startswith("dspy.") for kind in type(module).__mro__)


def has_own_aforward(program: Module) -> bool:
    """Whether a module's ``aforward`` is at least as specific as its ``forward``, and ``acall`` as its ``__call__``."""
    if "forward" in vars(program) and "aforward" not in vars(program):
        return False
    return _is_called_as_dspy_does(program) and _defines_first(type(program), {"aforward"}, {"forward"})


def _is_called_as_dspy_does(program: Module) -> bool:
    return _defines_first(type(program), {"acall"}, {"__call__"})


def _defines_first(kind: type, wanted: set[str], others: set[str]) -> bool:
    """Whether a class defines one of the wanted names no later in its MRO than the others; BaseLM's count for none."""
    for base in kind.__mro__:
        names = vars(base).keys()
        if base is BaseLM or (names & others and not names & wanted):
            return False
        if names & wanted:
            return True
    return False


def _language_models(program: Module) -> list[Any]:
    own = [getattr(predictor, "lm", None) for predictor in program.predictors()]
    return [lm for lm in [*own, dspy.settings.lm] if lm is not None]


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
