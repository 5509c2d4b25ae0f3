"""Many requests of one step at once, with their results in order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

from dspy_flashevolve.engine.errors import FlashEvolveError, NoLongerWantedError, RolloutUnresolvedError
from dspy_flashevolve.engine.loop import collecting_errors
from dspy_flashevolve.engine.steps import StepEnded

T = TypeVar("T")
OnGranted = Callable[[], None]
"""Called when a request has its slot."""


async def batch(count: int, call: Callable[[int, OnGranted], Awaitable[T]]) -> list[T]:
    """Run ``call(0)`` to ``call(count - 1)`` concurrently; return their results in order.

    Each call begins when the one before it has its slot, so that a request that waits for a slot costs no task:
    thousands of examples of thousands of steps may wait.

    Args:
        call: makes one request. It is given a function that it calls when the request has its slot, or needs none.

    Raises:
        StepEnded, RolloutUnresolvedError, NoLongerWantedError: one of them, once all other calls have ended, since what
            they do may be paid already.
        Exception: any other error, as it is, at once; the other calls are cancelled.
    """
    results: dict[int, T] = {}
    deferred_errors: list[FlashEvolveError] = []
    failures: list[BaseException] = []
    begun = 0

    async with anyio.create_task_group() as group:

        def begin_next() -> None:
            nonlocal begun
            if begun < count and not failures:
                index, begun = begun, begun + 1
                group.start_soon(make, index)

        async def make(index: int) -> None:
            was_granted = False

            def on_granted() -> None:
                nonlocal was_granted
                if not was_granted:
                    was_granted = True
                    begin_next()

            with collecting_errors(failures, group, "a request"):
                try:
                    results[index] = await call(index, on_granted)
                except (RolloutUnresolvedError, NoLongerWantedError, StepEnded) as error:
                    deferred_errors.append(error)
            on_granted()

        begin_next()
    # A step that has ended says more than a request of it that got no answer.
    for error in (*failures, *sorted(deferred_errors, key=lambda error: not isinstance(error, StepEnded))):
        raise error
    return [results[index] for index in range(count)]


async def gather(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run a few calls at once; return their results in order, and raise errors as :func:`batch` does."""

    async def make(index: int, on_granted: OnGranted) -> T:
        on_granted()
        return await calls[index]()

    return await batch(len(calls), make)
