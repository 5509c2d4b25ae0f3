"""Running several requests of one ticket at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

from dspy_flashevolve.engine.errors import FlashEvolveError, RolloutUnresolvedError

T = TypeVar("T")


class NoLongerWantedError(FlashEvolveError):
    """An evaluation was given up before its next rollout began: nobody needs it any more."""


async def gather(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run all at once and return their results in order.

    A rollout that stays unresolved, or is no longer wanted, does not stop the others, which may be paid already; the
    first such error is raised when all have ended. Any other error cancels the rest and is raised as it is.
    """
    results: dict[int, T] = {}
    unresolved: list[FlashEvolveError] = []
    failures: list[Exception] = []

    async def one(index: int, call: Callable[[], Awaitable[T]], scope: anyio.CancelScope) -> None:
        try:
            results[index] = await call()
        except (RolloutUnresolvedError, NoLongerWantedError) as error:
            unresolved.append(error)
        except Exception as error:
            failures.append(error)
            scope.cancel()

    async with anyio.create_task_group() as group:
        for index, call in enumerate(calls):
            group.start_soon(one, index, call, group.cancel_scope)
    for error in (*failures, *unresolved):
        raise error
    return [results[index] for index in range(len(calls))]
