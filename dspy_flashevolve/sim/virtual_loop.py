"""An event loop whose clock jumps, so that a run that would take hours takes seconds.

Nothing sleeps: when the loop has nothing to do, its clock jumps to the next timer. Code that runs in a thread (a
synchronous reflection, gepa's state) has the floor while it runs: the loop waits until it is done or asks for
something on the loop, so that threads and loop never run at once, and order does not depend on the machine.
"""

from __future__ import annotations

import asyncio
import contextvars
import selectors
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
    """A selector that never waits: the time that the loop would wait is added to its clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        """Return the events that are ready; when there are none, the clock jumps by ``timeout``."""
        if timeout is None:  # nothing is planned: only another thread can wake the loop
            return super().select(None)
        events = super().select(0)
        if not events and timeout > 0:
            self.now += timeout
        return events


FOREIGN = (
    "a simulated model was called synchronously from a thread that no virtual loop has started: call it "
    "inside run(), from the loop or from a thread that the loop's run_in_executor started."
)
NEVER_WAITS = ("dspy.clients.execution", "dspy.clients.capabilities")
"""Modules whose functions dspy runs in a thread at every LM call, and which never wait for the loop."""
LOOP_OF: dict[int, VirtualLoop] = {}
"""Id of a thread -> the virtual loop that let it run."""


class _Worker:
    """A thread that makes calls one after another, until None is submitted."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.submit = self._calls.put
        threading.Thread(target=self._work, name="virtual", daemon=True).start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose ``time()`` starts at 0 and jumps from timer to timer."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._floor = threading.Condition()
        self._idle: dict[int, list[_Worker]] = {}
        self._working = 0
        self._waits: set[Future[Any]] = set()

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run ``func`` in a thread, now, before anything else happens on the loop.

        An executor whose calls follow one another gets one thread, as in reality. A function that never waits for the
        loop runs on the loop's own thread, which gives the same result without two switches of threads.
        """
        result: asyncio.Future[T] = self.create_future()
        if isinstance(func, partial) and any(
            getattr(argument, "__module__", "") in NEVER_WAITS for argument in func.args[:1]
        ):
            try:
                value = func(*args)
            except Exception as error:
                self.call_soon(_fail, result, error)
            else:
                self.call_soon(_succeed, result, value)
            return result

        idle = self._idle.setdefault(id(executor), [])
        worker = idle.pop() if idle else _Worker()

        def call() -> None:
            LOOP_OF[threading.get_ident()] = self
            try:
                value = func(*args)
            except BaseException as error:
                self._call_if_open(_fail, result, error)
            else:
                self._call_if_open(_succeed, result, value)
            finally:
                LOOP_OF.pop(threading.get_ident(), None)
                if self.is_closed():
                    worker.submit(None)
                else:
                    idle.append(worker)  # before the loop goes on: its next call finds it
                self._leave_floor()

        self._give_floor(lambda: worker.submit(call))
        return result

    def wait_from_thread(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the loop from one of its threads, which gives up the floor until it is done.

        Raises:
            RuntimeError: no virtual loop has started this thread.
        """
        if LOOP_OF.get(threading.get_ident()) is not self:
            work.close()
            raise RuntimeError(FOREIGN)
        done: Future[T] = Future()
        self._waits.add(done)

        async def on_loop() -> None:
            try:
                value = await work
            except BaseException as error:
                if done.done():  # the loop has closed
                    raise
                self._give_floor(partial(done.set_exception, error))
            else:
                self._give_floor(partial(done.set_result, value))

        self.call_soon_threadsafe(lambda: self.create_task(on_loop()))
        self._leave_floor()
        try:
            return done.result()
        finally:
            self._waits.discard(done)

    def close(self) -> None:
        """Close the loop and end its threads; one that still waits for the loop gets a CancelledError."""
        for wait in list(self._waits):
            if not wait.done():
                wait.set_exception(CancelledError())
        super().close()
        for worker in [worker for idle in self._idle.values() for worker in idle]:
            worker.submit(None)

    def _call_if_open(self, call: Callable[..., None], *args: Any) -> None:
        """Schedule a call on the loop, unless that has been closed."""
        if not self.is_closed():
            self.call_soon_threadsafe(call, *args)

    def _give_floor(self, begin: Callable[[], Any]) -> None:
        """Let a thread work, and block the loop's thread until it is done or waits for the loop."""
        with self._floor:
            self._working += 1
            begin()
            while self._working:
                self._floor.wait()

    def _leave_floor(self) -> None:
        """Give control back from a thread to the loop."""
        with self._floor:
            self._working -= 1
            self._floor.notify_all()


def _succeed(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


async def _wait_for(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def run(main: Callable[[], Awaitable[T]]) -> T:
    """Run ``main`` to its end in virtual time. Where a loop runs already, as in a notebook, that happens in a thread.

    Args:
        main: an async function without arguments; ``asyncio.get_running_loop().time()`` is its clock.

    Examples:
        >>> async def main() -> float:
        ...     await asyncio.sleep(3600)
        ...     return asyncio.get_running_loop().time()
        >>> run(main)
        3600.0
    """

    if asyncio._get_running_loop() is not None:  # pyright: ignore[reportPrivateUsage]
        with ThreadPoolExecutor(max_workers=1) as thread:  # dspy keeps its settings in context variables
            return thread.submit(contextvars.copy_context().run, run, main).result()

    async def awaited() -> T:
        return await main()

    loop = VirtualLoop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(awaited())
    finally:
        unfinished = asyncio.all_tasks(loop)
        for task in unfinished:
            task.cancel()
        loop.run_until_complete(_wait_for(unfinished))
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()
