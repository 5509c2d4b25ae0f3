"""A loop of its own for a synchronous caller, wherever it is called from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

T = TypeVar("T")


def run_to_end(main: Callable[[], Awaitable[T]], stop: Callable[[], None]) -> T:
    """Run ``main`` on a loop in a thread of its own, and wait for it.

    It works in a script, in a thread, and where a loop is running already (a notebook cell), since the
    loop is never the caller's. ``main`` sees the caller's context variables. The thread ends with it.

    Args:
        main: an async function without arguments.
        stop: asks ``main`` to end soon; called on its loop at the first Ctrl-C. At the second one,
            ``main`` is cancelled.

    Raises:
        KeyboardInterrupt: at the second Ctrl-C.
        Exception: what ``main`` raised.
    """
    with start_blocking_portal("asyncio") as portal:
        future = portal.start_task_soon(main)
        try:
            return _wait(future)
        except KeyboardInterrupt:
            return _drain(portal, future, stop)


def _wait(future: Future[T]) -> T:
    return future.result()


def _drain(portal: BlockingPortal, future: Future[T], stop: Callable[[], None]) -> T:
    try:
        portal.call(stop)
        return _wait(future)
    except KeyboardInterrupt:
        future.cancel()
        raise
