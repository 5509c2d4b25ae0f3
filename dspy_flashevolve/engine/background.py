"""Work that outlives the handler that began it, but not the run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any

import anyio
from anyio.abc import TaskGroup


class Background:
    """Runs what stages have begun and do not wait for.

    Use it as an async context manager around the run: leaving it normally waits for what still runs. An exception of
    the block, or of a piece of work, cancels the rest. That of the block leaves it; the first one of the work ends the
    block, and is kept as ``failure``, as it is.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.running = 0
        """Pieces of work that have begun and not ended."""
        self.ended: Callable[[], None] = lambda: None
        """Called each time that a piece of work has ended."""
        self._group: TaskGroup | None = None

    async def __aenter__(self) -> Background:
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        assert self._group is not None
        if error is not None:
            self._group.cancel_scope.cancel()
        if isinstance(error, anyio.get_cancelled_exc_class()):  # the group knows whether it is its own
            return bool(await self._group.__aexit__(kind, error, trace))
        await self._group.__aexit__(None, None, None)
        return False

    def start(self, work: Callable[[], Awaitable[None]]) -> None:
        """Begin ``work``."""
        assert self._group is not None, "work was begun outside of the run"
        self.running += 1
        self._group.start_soon(self._guarded, work)

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:
            self.failure = self.failure or error
            assert self._group is not None
            self._group.cancel_scope.cancel()
        finally:
            self.running -= 1
            self.ended()


async def run_with(
    background: Background,
    work: Callable[[], Awaitable[None]],
    watchers: Iterable[Callable[[], Coroutine[Any, Any, None]]],
) -> None:
    """Run ``work``, and what it begins in ``background``, to their ends.

    Args:
        background: what ``work`` begins and does not wait for.
        watchers: what runs beside them until then, and is cancelled.

    Raises:
        Exception: the first failure of the background, else that of ``work``, as it is; the rest was cancelled.
    """
    failures: list[Exception] = []
    async with anyio.create_task_group() as group:
        for watch in watchers:
            group.start_soon(watch)
        try:
            async with background:
                await work()
        except Exception as error:
            failures.append(error)
        group.cancel_scope.cancel()
    for failure in (background.failure, *failures):
        if failure is not None:
            raise failure
