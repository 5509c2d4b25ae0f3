"""Threads that end with the run, for code that blocks."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

try:  # anyio uses it where it is installed
    import sniffio
except ImportError:
    sniffio = None

A = ParamSpec("A")
T = TypeVar("T")


def _off_the_loop(call: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
    """The copied context says that asyncio runs here, which keeps ``anyio.run`` from working: take it back."""
    if sniffio is not None:
        sniffio.current_async_library_cvar.set(None)
    return call(*args, **kwargs)


class Threads:
    """A pool of threads that one run owns.

    Calls see the caller's context variables. With one worker, calls run one at a time in the order in
    which they were made: that is how the pool's single writer is built.

    A thread cannot be interrupted. A call whose caller is cancelled goes on to its end, and what it returns or raises
    is dropped; where there are several workers one more may start in its place, so that calls which were given up do
    not hold up those that follow.

    Args:
        workers: threads at most, beside those of calls that were given up; they start when they are needed.
        name: prefix of the threads' names.
    """

    def __init__(self, workers: int, name: str) -> None:
        self._workers = workers
        self.abandoned = False
        """A call was given up while it ran: its thread may never end."""
        self._executor = ThreadPoolExecutor(max_workers=workers, thread_name_prefix=f"flashevolve-{name}")

    async def run(self, call: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
        """Run ``call`` in a thread and wait for its result on the loop."""
        context = contextvars.copy_context()
        working = False

        def in_context() -> Any:
            nonlocal working
            working = True
            try:
                return context.run(_off_the_loop, call, *args, **kwargs)
            finally:
                working = False

        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, in_context)
        except asyncio.CancelledError:
            self.abandoned = self.abandoned or working
            if working and self._workers > 1:
                self._executor._max_workers += 1  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
            raise

    def close(self, wait: bool = True) -> None:
        """End the threads; with ``wait`` after the calls that were made, without it those not begun are dropped."""
        self._executor.shutdown(wait=wait, cancel_futures=not wait)


class LoopWaits:
    """Lets threads of one run wait for coroutines on the run's loop.

    Args:
        loop: the run's. One that runs its threads in turns with itself (virtual time) has a ``wait_from_thread``.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._futures: set[Future[Any]] = set()
        self._closed = False

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the loop and wait for it in this thread, which is not the loop's.

        Raises:
            CancelledError: of :mod:`concurrent.futures`; the run has ended.
        """
        if self._closed or self.loop.is_closed():
            work.close()
            raise CancelledError("the run has ended")
        in_turns: Callable[[Coroutine[Any, Any, T]], T] | None = getattr(self.loop, "wait_from_thread", None)
        if in_turns is not None:
            return in_turns(work)
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        self._futures.add(future)
        try:
            return future.result()
        finally:
            self._futures.discard(future)

    def call(self, function: Callable[A, object], *args: A.args, **kwargs: A.kwargs) -> None:
        """Call on the loop soon, in a task, from this thread; nothing happens once the loop is closed."""

        async def called() -> None:
            function(*args, **kwargs)

        work = called()
        try:
            asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:
            work.close()

    def is_foreign(self) -> bool:
        """Whether this thread runs no loop, so that it may wait."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return True
        return False

    def close(self) -> None:
        """Wait for nothing more: threads that do get a CancelledError."""
        self._closed = True
        for future in list(self._futures):
            future.cancel()
