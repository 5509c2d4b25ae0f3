"""A loop of its own for a synchronous caller, wherever it is called from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

import anyio
from anyio.from_thread import start_blocking_portal

from dspy_flashevolve.engine.signals import REASONS, heard

T = TypeVar("T")


class LoopClock:
    """The time of one run's loop, real or virtual: on the loop, and from any thread once it is attached.

    A loop that is not known yet is the one that runs where it is asked.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self) -> None:
        """Take the loop that runs here for the run's."""
        self._loop = asyncio.get_running_loop()

    def __call__(self) -> float:
        """Seconds."""
        return anyio.current_time() if self._loop is None else self._loop.time()


def run_to_end(main: Callable[[], Awaitable[T]], stop: Callable[[str], None]) -> T:
    """Run ``main`` on a loop in a thread of its own, and wait for it.

    It works in a script, in a thread, and where a loop is running already (a notebook cell), since the
    loop is never the caller's. ``main`` sees the caller's context variables. The thread ends with it.

    In the main thread, Ctrl-C (a notebook's "Interrupt" is one) and SIGTERM are the same: the first asks for an end,
    the second cancels, and a third does what it would do without this function. See
    :func:`~dspy_flashevolve.engine.signals.heard` for whose handlers are left alone; a KeyboardInterrupt that such a
    handler raises counts like a signal, and any other exception of it cancels.

    Args:
        main: an async function without arguments.
        stop: asks ``main`` to end soon; called with the reason, on its loop, at the first signal.

    Raises:
        KeyboardInterrupt: ``main`` was cancelled by the second signal, and has ended.
        Exception: what ``main`` raised.
    """
    ending = _Ending(main, stop)
    with heard(ending.hear), start_blocking_portal("asyncio") as portal:
        future = portal.start_task_soon(ending.run)
        results = ending.wait(future)
    if not results:
        raise KeyboardInterrupt(ending.reason)
    return results[0]


class _Ending(Generic[T]):
    """``main``, and the two ways to end it early."""

    def __init__(self, main: Callable[[], Awaitable[T]], stop: Callable[[str], None]) -> None:
        self._main = main
        self._stop = stop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scope: anyio.CancelScope | None = None
        self._signals = 0
        self._asked = False
        self.reason = ""

    async def run(self) -> list[T]:
        """The result of ``main``; an empty list when it was cancelled."""
        results: list[T] = []
        with anyio.CancelScope() as self._scope:
            self._loop = asyncio.get_running_loop()
            await self._end_early()  # signals that came before there was a loop
            results.append(await self._main())
        return results

    def wait(self, future: Future[list[T]]) -> list[T]:
        """Wait for :meth:`run`, in the caller's thread."""
        while True:
            try:
                return future.result()
            except KeyboardInterrupt:  # by a handler that is not ours
                if future.done() or self._signals > 1:
                    raise
                self.hear(REASONS["SIGINT"])

    def hear(self, reason: str) -> bool:
        """Hear of a signal, in the main thread; whether a further one is to be heard."""
        self._signals += 1
        self.reason = reason
        if self._loop is not None:
            work = self._end_early()
            try:  # a task, since anyio wants one; never waited for, since the loop may be busy
                asyncio.run_coroutine_threadsafe(work, self._loop)
            except RuntimeError:  # it has ended
                work.close()
        return self._signals < 2

    async def _end_early(self) -> None:
        if self._signals > 0 and not self._asked:
            self._asked = True
            self._stop(self.reason)
        if self._signals > 1 and self._scope is not None:
            self._scope.cancel()
