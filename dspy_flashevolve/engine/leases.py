"""A slot that its holder may give back for a while, from deep inside a rollout.

A request that must wait (the provider said when to come back) is not in flight: its slot is of use to others.
The lease of the rollout that runs is found through a context variable, which threads and tasks that the rollout
starts inherit, with what a thread asks the run's loop to do for it.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar

import anyio


class Lease:
    """One slot, held or given back.

    Args:
        acquire: waits for the slot in the run's order.
        release: gives it to the next one.
    """

    def __init__(self, acquire: Callable[[], Awaitable[None]], release: Callable[[], None]) -> None:
        self._acquire = acquire
        self._release = release
        self._taking = anyio.Lock()
        self._closed = False
        self._pauses = 0
        self._left_seconds = math.inf
        self.held = False
        self.bound: anyio.CancelScope | None = None
        """Ends the work in the slot at its deadline; the time of a pause does not count. None for no bound."""

    async def take(self) -> None:
        """Have the slot: wait for it unless it is held. A lease that has ended takes none."""
        if self.held or self._closed:
            return
        async with self._taking:
            if self.held or self._closed:
                return
            await self._acquire()
            self.held = True
            if self._closed:  # the holder was cancelled while the slot was awaited for it
                self.give_back()

    def give_back(self) -> None:
        """Have no slot."""
        if self.held:
            self.held = False
            self._release()

    def pause(self) -> None:
        """Something in the slot waits to be asked for again: the deadline moves on until all of that goes on."""
        self._pauses += 1
        if self._pauses == 1 and self.bound is not None:
            self._left_seconds = self.bound.deadline - anyio.current_time()
            self.bound.deadline = math.inf

    def resume(self) -> None:
        """It goes on; see :meth:`pause`."""
        self._pauses -= 1
        if self._pauses == 0 and self.bound is not None:
            self.bound.deadline = anyio.current_time() + self._left_seconds

    def close(self) -> None:
        """Give the slot back for good."""
        self._closed = True
        self.give_back()


_current: ContextVar[Lease | None] = ContextVar("flashevolve_lease", default=None)


def current_lease() -> Lease | None:
    """The slot in which this code runs; None outside of any."""
    return _current.get()


def set_current(lease: Lease | None) -> Lease | None:
    """Make it the slot of the code that follows; returns the one before."""
    before = _current.get()
    _current.set(lease)
    return before


@asynccontextmanager
async def paused_slot(lease: Lease | None) -> AsyncGenerator[None, None]:
    """Give the slot back for the block and take it again after it.

    Where a rollout has several requests under way in its one slot, the first that pauses gives the slot back, and
    the first that goes on takes it again. A block that raises ends without the slot: the next request takes it.

    Args:
        lease: the slot, such as :func:`current_lease`; None where none is given back.
    """
    if lease is None:
        yield
        return
    lease.give_back()
    lease.pause()
    try:
        yield
        await lease.take()
    finally:
        lease.resume()
