"""A loop of its own for a synchronous caller, wherever it is called from; Ctrl-C and SIGTERM while it runs; and threads
that end with the run, for code that blocks."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import contextvars
import math
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec, TypeVar

import anyio
from anyio.abc import TaskGroup
from anyio.from_thread import start_blocking_portal

from dspy_flashevolve.engine.errors import RunAbortedError

T = TypeVar("T")
EARLY_SECONDS = 0.01
"""Tolerance for timers that wake early: event loops round to their clock's resolution."""


@contextmanager
def collecting_errors(failures: list[BaseException], group: TaskGroup, what: str) -> Generator[None, None, None]:
    """Keep an exception of the block as it is, in ``failures``, where a group of tasks would wrap it, and cancel the
    group's tasks. ``what`` names the block, where code in it cancels itself."""
    try:
        yield
    except asyncio.CancelledError as error:
        if is_being_cancelled():
            raise
        failure = RuntimeError(f"{what} was cancelled by its own code")
        failure.__cause__ = error
        failures.append(failure)
        group.cancel_scope.cancel()
    except BaseException as error:
        failures.append(error)
        group.cancel_scope.cancel()


def is_being_cancelled() -> bool:
    """Whether a CancelledError that was caught here comes from outside; else the code that was called raised it."""
    return anyio.current_effective_deadline() == -math.inf


class LoopClock:
    """The time of one run's loop, real or virtual: on the loop, and from any thread once it is attached; 0 before."""

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
    """Run ``main`` on a loop in a thread of its own, and wait for it: in a script, in a thread, and where a loop is
    running already (a notebook cell). ``main`` sees the caller's context variables. The thread ends with it.

    In the main thread, Ctrl-C and SIGTERM are the same: the first asks for an end, by ``stop`` with the reason on
    the loop of ``main``; the second cancels, and a third does what it would do without this function. A
    KeyboardInterrupt that a handler of the caller's raises (:func:`handling_signals`) counts like a signal, and any
    other exception of it cancels.

    Raises:
        KeyboardInterrupt: ``main`` was cancelled by the second signal, and has ended.
        Exception: what ``main`` raised.
    """
    ending = _Ending(main, stop)
    with handling_signals(ending.hear), start_blocking_portal("asyncio") as portal:
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
        self._waits: LoopPortal | None = None
        self._scope: anyio.CancelScope | None = None
        self._signals = 0
        self._asked = False
        self.reason = ""

    async def run(self) -> list[T]:
        """The result of ``main``; an empty list when it was cancelled."""
        results: list[T] = []
        with anyio.CancelScope() as self._scope:
            self._waits = LoopPortal(asyncio.get_running_loop())
            self._end_early()  # signals that came before there was a loop
            results.append(await self._main())
        return results

    def wait(self, future: Future[list[T]]) -> list[T]:
        """Wait for :meth:`run`, in the caller's thread."""
        while True:
            try:
                while not future.done():
                    wait([future], timeout=LOOK_SECONDS)
                return future.result()
            except KeyboardInterrupt:  # by a handler that is not ours
                if future.done() or self._signals > 1:
                    raise
                self.hear(REASONS["SIGINT"])

    def hear(self, reason: str) -> bool:
        """Hear of a signal, in the main thread; whether a further one is to be heard."""
        self._signals += 1
        self.reason = reason
        if self._waits is not None:
            self._waits.call_soon(self._end_early)  # never waited for, since the loop may be busy
        return self._signals < 2

    def _end_early(self) -> None:
        if self._signals > 0 and not self._asked:
            self._asked = True
            self._stop(self.reason)
        if self._signals > 1 and self._scope is not None:
            self._scope.cancel()


LOOK_SECONDS = 0.5
"""A signal that comes just before the main thread goes to sleep does not wake it: it looks this often."""
REASONS = {"SIGINT": "interrupted by Ctrl-C", "SIGTERM": "terminated by SIGTERM"}
"""Signal -> the reason that a run gives for its end."""


@contextmanager
def handling_signals(hear: Callable[[str], bool]) -> Generator[None, None, None]:
    """Hand SIGINT and SIGTERM to ``hear`` instead of to Python, inside the block; only in the main thread, and only
    where nobody else wants the signal: a handler of the caller's own stays.

    ``hear`` is called between any two instructions, with the reason; when it returns False, signals do what they did
    before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    default_handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    taken = [number for number, usual in default_handlers.items() if signal.getsignal(number) == usual]

    def handler(number: int, frame: Any) -> None:
        if not hear(REASONS[signal.Signals(number).name]):
            put_back()

    def put_back() -> None:
        for number in taken:
            if signal.getsignal(number) is handler:  # the caller may have set one of their own by now
                signal.signal(number, default_handlers[number])

    try:
        for number in taken:
            signal.signal(number, handler)
        yield
    finally:
        put_back()


try:  # anyio uses it where it is installed
    import sniffio
except ImportError:
    sniffio = None

A = ParamSpec("A")


def _off_the_loop(call: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
    """The copied context says that asyncio runs here, which keeps ``anyio.run`` from working: take it back."""
    if sniffio is not None:
        sniffio.current_async_library_cvar.set(None)
    return call(*args, **kwargs)


def check_main_thread() -> None:
    """Raise RunAbortedError where the main thread has ended: what a program gets then is no result of its own."""
    # The interpreter closes its pools of threads, and waits for them, before it marks the main thread as ended.
    if not threading.main_thread().is_alive() or getattr(concurrent.futures.thread, "_shutdown", False):
        raise RunAbortedError(
            "The main thread has ended while the run went on in another one, and Python starts no more work in threads "
            "then. Wait for the run's thread (thread.join()) before the main thread ends."
        )


class Threads:
    """A pool of threads that one run owns; calls see the caller's context variables. With one worker, calls run one at
    a time in their order: that is how the pool's single writer is built.

    A thread cannot be interrupted. A call whose caller is cancelled goes on to its end, and what it returns or
    raises is dropped; where there are several workers one more may start in its place.
    """

    def __init__(self, workers: int, name: str) -> None:
        self._workers = workers
        self.abandoned = False
        """A call was given up while it ran: its thread may never end."""
        self.loop: asyncio.AbstractEventLoop
        """Of the run; there is one once a call was made."""
        self._executor = ThreadPoolExecutor(max_workers=workers, thread_name_prefix=f"flashevolve-{name}")

    async def run(self, call: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
        """Run ``call`` in a thread and wait for its result on the loop."""
        context, self.loop = contextvars.copy_context(), asyncio.get_running_loop()
        working = False

        def in_context() -> Any:
            nonlocal working
            working = True
            try:
                return context.run(_off_the_loop, call, *args, **kwargs)
            finally:
                working = False

        try:
            return await self.loop.run_in_executor(self._executor, in_context)
        except RuntimeError:
            check_main_thread()
            raise
        except asyncio.CancelledError:
            self.abandoned = self.abandoned or working
            if working and self._workers > 1:
                self._executor._max_workers += 1  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
            raise

    def close(self, wait: bool = True) -> None:
        """End the threads; with ``wait`` after the calls that were made, without it those not begun are dropped."""
        self._executor.shutdown(wait=wait, cancel_futures=not wait)


class LoopPortal:
    """Lets threads of one run wait for coroutines on the run's loop.

    Args:
        loop: the run's. One that runs its threads in turns with itself (virtual time) has a ``wait_from_thread``.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._futures: set[Future[Any]] = set()
        self._closed = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the loop and wait for it in this thread, which is not the loop's; a CancelledError of
        :mod:`concurrent.futures` where the run has ended."""
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

    def call_soon(self, function: Callable[A, object], *args: A.args, **kwargs: A.kwargs) -> None:
        """Call on the loop soon, from any thread, in a task, since anyio wants one; nothing once the loop is closed."""

        async def called() -> None:
            function(*args, **kwargs)

        work = called()
        try:
            asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:
            work.close()

    def is_on_loop(self) -> bool:
        """Whether this is the thread of the run's loop, in which other tasks of the user's may run, too."""
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False

    def may_block(self) -> bool:
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
