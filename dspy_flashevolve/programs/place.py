"""Where the rollouts of a program run: on the event loop, or in threads."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

import dspy
from dspy.adapters.types.tool import Tool
from dspy.clients.base_lm import BaseLM
from dspy.primitives.module import Module
from dspy.utils.callback import BaseCallback
from dspy.utils.dummies import DummyLM

from dspy_flashevolve.engine.loop import Threads

logger = logging.getLogger(__name__)

T = TypeVar("T")
BLOCKING = ("CodeAct", "Flex", "ProgramOfThought", "RLM")
"""dspy's modules that run code in an interpreter and wait for it."""
WATCHED = 8
"""The first rollouts on the loop are watched for calls that block it."""
BLOCKED = 3
"""So many that do are no accident (an import, a busy machine)."""
HELD_SECONDS = 0.1
"""Who holds the loop for so long, and does nothing, waits for something."""


class NeedsThreadError(Exception):
    """A program was awaited that can only be called."""


class Place:
    """Where the rollouts of one program run: on the loop as long as that works, else in threads.

    Args:
        threads: of the run.
    """

    def __init__(self, threads: Threads) -> None:
        self.on_loop: bool | None = None
        """None before the first call."""
        self._threads = threads
        self._watched = self._blocked = 0

    async def call(self, program: Module, inputs: dict[str, Any]) -> Any:
        """What a program returns.

        Raises:
            NeedsThreadError: its ``aforward`` is no real one; a fresh copy is called by its ``forward``.
            Exception: what the program raised.
        """
        if self.on_loop is None:
            self.on_loop = runs_on_loop(program)
        if not self.on_loop:
            return await self._threads.run(_called, program, inputs)
        try:
            return await self._awaited(program, inputs)
        except NotImplementedError as error:
            if not _has(program, "forward"):
                raise
            if self.on_loop:
                self.on_loop = False
                name = type(program).__name__
                logger.warning("%s.aforward raises NotImplementedError: rollouts run in threads, by its forward.", name)
            raise NeedsThreadError from error

    async def _awaited(self, program: Module, inputs: dict[str, Any]) -> Any:
        if self._watched >= WATCHED:
            return await program.acall(**inputs)
        watch = _Watch(lambda: self._has_blocked(program))
        with dspy.context(callbacks=[*dspy.settings.callbacks, watch]):
            result = await watch.awaiting(program.acall(**inputs))
        self._watched += 1
        return result

    def _has_blocked(self, program: Module) -> None:
        self._blocked += 1
        if self._blocked >= BLOCKED and self.on_loop:
            self.on_loop = False
            logger.warning(
                "%s.aforward blocks the event loop, so that rollouts would run one after another; they run in threads "
                "instead%s. In aforward, await what waits (predictor.acall(...) instead of predictor(...), an async "
                "client), or call it by asyncio.to_thread; or leave aforward out.",
                type(program).__name__,
                ", by its forward" if _has(program, "forward") else "",
            )


def _called(program: Module, inputs: dict[str, Any]) -> Any:
    """Call a program in a thread; one without a ``forward`` on a loop of its own."""
    if _has(program, "forward") or not _has(program, "aforward"):
        return program(**inputs)
    return asyncio.run(program.acall(**inputs))


def _has(program: Module, name: str) -> bool:
    return name in vars(program) or any(name in vars(kind) for kind in type(program).__mro__)


class _Watch(BaseCallback):
    """Watches one call of a program on the loop.

    Args:
        blocks: called once, as soon as it is seen to wait without awaiting.
    """

    def __init__(self, blocks: Callable[[], None]) -> None:
        self._blocks: Callable[[], None] | None = blocks
        self._begun: set[str] = set()

    def on_lm_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        """See ``dspy.utils.callback.BaseCallback``."""
        self._begun.add(call_id)

    def on_lm_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        """A call of an LM that ends before anything else could run was not awaited."""
        if call_id in self._begun:
            self._tell()

    def _tell(self) -> None:
        if self._blocks is not None:
            self._blocks()
        self._blocks = None

    @types.coroutine
    def awaiting(self, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Await ``work``, and look at what it does between two awaits."""
        resume: Callable[[Any], Any] = work.send
        value: Any = None
        while True:
            self._begun.clear()
            began = time.perf_counter() - _occupied_seconds()
            try:
                awaited = resume(value)
            except StopIteration as end:
                return end.value
            finally:
                if time.perf_counter() - _occupied_seconds() - began > HELD_SECONDS:
                    self._tell()
            try:
                resume, value = work.send, (yield awaited)
            except GeneratorExit:
                work.close()
                raise
            except BaseException as error:
                resume, value = work.throw, error


def _occupied_seconds() -> float:
    """How long this thread has worked, or would have, had the machine had a processor for it (where Linux tells)."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            queued = int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        queued = 0.0
    return time.thread_time() + queued


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
    return _defines_first(type(program), {"aforward"}, {"forward"})


def _defines_first(kind: type, wanted: set[str], others: set[str]) -> bool:
    """Whether one of the wanted names is at least as specific as the others; BaseLM's own count for none."""
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
    """True when ``await lm.acall(...)`` works and does not block the loop for the length of a request."""
    if isinstance(lm, DummyLM):
        return True
    if not isinstance(lm, BaseLM):
        return inspect.iscoroutinefunction(getattr(lm, "acall", None))
    engine = getattr(lm, "_engine_spec", "auto")
    if not isinstance(engine, str) and getattr(lm, "_async_engine_spec", None) is None:
        return False
    kind = getattr(type(lm), "original_class", type(lm))
    return _defines_first(kind, {"aforward", "acall"}, {"forward", "__call__"})
