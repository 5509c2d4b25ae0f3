"""Where a program's rollouts run: on the event loop as long as that works, else in threads."""

from __future__ import annotations

import asyncio
import inspect
import time
import types
from collections.abc import Callable, Coroutine, Generator
from enum import Enum, auto
from typing import Any, TypeVar

import dspy
from dspy.clients.base_lm import BaseLM
from dspy.primitives.module import Module
from dspy.utils.callback import BaseCallback
from dspy.utils.dummies import DummyLM

from dspy_flashevolve.engine.loop import Threads
from dspy_flashevolve.engine.texts import logger_named
from dspy_flashevolve.programs.tools import ToolCalls, is_blocking_tool, is_coroutine_tool, tools_of

logger = logger_named(__name__)

T = TypeVar("T")
CODE_MODULES = ("CodeAct", "Flex", "ProgramOfThought", "RLM")
"""dspy's modules that run code in an interpreter and wait for it."""
WATCHED = 8
"""The first rollouts on the loop that are watched for calls that block it. More than twice ``BLOCKED``, so that a
program that blocks in every second rollout is found; a watch costs two reads of /proc for each await."""
BLOCKED = 3
"""Rollouts that block the loop before it is given up: one may be an import, two a busy machine."""
HELD_SECONDS = 0.1
"""Holding the loop for so long without working is waiting: shorter than a call of an LM or a service that is worth
overlapping, longer than reading a file."""


class NeedsThreadError(Exception):
    """A program was awaited that can only be called."""


class _Where(Enum):
    """Where rollouts run. It moves down this list only."""

    UNDECIDED = auto()
    """No rollout has begun."""
    LOOP = auto()
    """On the run's loop, awaited."""
    THREAD = auto()
    """In threads; coroutine tools run on the run's loop."""
    THREAD_ALONE = auto()
    """In threads, since the run's loop was blocked: coroutine tools, one of which may have done it, run on loops of
    their own, as in dspy."""


class Placement:
    """Decides where the rollouts of one program run, and calls the program there.

    Args:
        threads: of the run.
    """

    def __init__(self, threads: Threads) -> None:
        self._where = _Where.UNDECIDED
        self._threads = threads
        self._tools = ToolCalls(threads)
        self._watched = self._blocked = 0

    @property
    def is_on_loop(self) -> bool:
        """Whether rollouts run on the loop now; False before the first one."""
        return self._where is _Where.LOOP

    async def call(self, program: Module, inputs: dict[str, Any]) -> Any:
        """Call a program where it belongs, and return what it returns.

        Raises:
            NeedsThreadError: its ``aforward`` is no real one; a fresh copy is called by its ``forward``.
            Exception: what the program raised.
        """
        if self._where is _Where.UNDECIDED:
            self._where = _Where.LOOP if runs_on_loop(program) else _Where.THREAD
        if self._where is not _Where.LOOP:
            return await self._in_thread(program, inputs)
        self._tools.prepare_for_loop(program)
        try:
            return await self._awaited(program, inputs)
        except NotImplementedError as error:
            if not _has(program, "forward"):
                raise
            if self._where is _Where.LOOP:
                self._where = _Where.THREAD
                name = type(program).__name__
                logger.warning("%s.aforward raises NotImplementedError: rollouts run in threads, by its forward.", name)
            raise NeedsThreadError from error

    async def _in_thread(self, program: Module, inputs: dict[str, Any]) -> Any:
        if self._where is _Where.THREAD:
            self._tools.prepare_for_thread(program)
            return await self._threads.run(_call, program, inputs)
        with dspy.context(allow_tool_async_sync_conversion=True):
            return await self._threads.run(_call, program, inputs)

    async def _awaited(self, program: Module, inputs: dict[str, Any]) -> Any:
        if self._watched >= WATCHED:
            return await program.acall(**inputs)
        watch = _LoopWatch(lambda: self._record_blocking(program))
        with dspy.context(callbacks=[*dspy.settings.callbacks, watch]):
            result = await watch.awaiting(program.acall(**inputs))
        self._watched += 1
        return result

    def _record_blocking(self, program: Module) -> None:
        self._blocked += 1
        if self._blocked >= BLOCKED and self._where is _Where.LOOP:
            self._where = _Where.THREAD_ALONE
            logger.warning(
                "%s.aforward blocks the event loop, so that rollouts would run one after another; they run in threads "
                "instead%s. In aforward, await what waits (predictor.acall(...) instead of predictor(...), an async "
                "client), or call it by asyncio.to_thread; or leave aforward out.",
                type(program).__name__,
                ", by its forward" if _has(program, "forward") else "",
            )


def _call(program: Module, inputs: dict[str, Any]) -> Any:
    """Call a program in a thread; one without a ``forward`` on a loop of its own."""
    if _has(program, "forward") or not _has(program, "aforward"):
        return program(**inputs)
    return asyncio.run(program.acall(**inputs))


def _has(program: Module, name: str) -> bool:
    return name in vars(program) or any(name in vars(kind) for kind in type(program).__mro__)


class _LoopWatch(BaseCallback):
    """Watches one call of a program on the loop.

    Args:
        on_block: called once, as soon as the program is seen to wait without awaiting.
    """

    def __init__(self, on_block: Callable[[], None]) -> None:
        self._on_block: Callable[[], None] | None = on_block
        self._begun: set[str] = set()

    def on_lm_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        """See ``dspy.utils.callback.BaseCallback``."""
        self._begun.add(call_id)

    def on_lm_end(self, call_id: str, outputs: Any, exception: BaseException | None = None) -> None:
        """Report a call of an LM that ends before anything else could run: it was not awaited."""
        if call_id in self._begun:
            self._report()

    def _report(self) -> None:
        if self._on_block is not None:
            self._on_block()
        self._on_block = None

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
                    self._report()
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
    """Whether ``program`` can be awaited and then does the same as when it is called.

    It needs an ``aforward`` that is at least as specific as its ``forward``: a subclass that overrides
    only ``forward`` inherits an ``aforward`` that would skip its code. Every LM that it may call (its
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
    """Whether a module's ``aforward`` is at least as specific as its ``forward``."""
    if "forward" in vars(program) and "aforward" not in vars(program):
        return False
    return _defines_first(type(program), {"aforward"}, {"forward"})


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
