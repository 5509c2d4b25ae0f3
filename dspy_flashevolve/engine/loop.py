"""A loop of its own for a synchronous caller, wherever it is called from; Ctrl-C and SIGTERM while it runs."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import anyio
from anyio.from_thread import start_blocking_portal

T = TypeVar("T")


class LoopClock:
    """The time of one run's loop, real or virtual: on the loop, and from any thread once it is attached.

    Before that it is 0.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self.began = 0.0
        """When the run began."""

    def attach(self) -> None:
        """Take the loop that runs here for the run's; it begins now."""
        self._loop = asyncio.get_running_loop()
        self.began = self._loop.time()

    def __call__(self) -> float:
        """Seconds."""
        return self._loop.time() if self._loop is not None else 0.0


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


REASONS = {"SIGINT": "interrupted by Ctrl-C", "SIGTERM": "terminated by SIGTERM"}
"""Signal -> the reason that a run gives for its end."""


@contextmanager
def heard(hear: Callable[[str], bool]) -> Generator[None, None, None]:
    """Hand SIGINT and SIGTERM to ``hear`` instead of to Python, inside the ``with`` block.

    Only in the main thread, the only one that gets signals; elsewhere nothing is touched. Only where nobody else wants
    the signal: SIGINT that would raise KeyboardInterrupt, SIGTERM that would kill the process. A handler of the
    caller's own (asyncio's in ``asyncio.run`` is one) stays, and is not called by this one either. What was there
    before is put back at the end.

    Args:
        hear: called in the main thread, between any two instructions, with the reason; it must be quick and must not
            wait. When it returns False, it wants to hear no more: from then on signals do what they did before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    taken = [number for number, usual in wanted.items() if signal.getsignal(number) == usual]

    def handler(number: int, frame: Any) -> None:
        if not hear(REASONS[signal.Signals(number).name]):
            put_back()

    def put_back() -> None:
        for number in taken:
            if signal.getsignal(number) is handler:  # the caller may have set one of their own by now
                signal.signal(number, wanted[number])

    try:
        for number in taken:
            signal.signal(number, handler)
        yield
    finally:
        put_back()
