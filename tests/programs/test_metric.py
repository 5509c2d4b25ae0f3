"""A metric in a thread that has begun is paid: it is not given up. (One on the loop: engine/test_stragglers.py.)"""

from __future__ import annotations

import asyncio
from typing import Any

import anyio

from dspy_flashevolve.engine.loop import Threads
from dspy_flashevolve.programs.metric import Metric


def test_a_metric_that_has_begun_in_a_thread_gives_its_score_even_to_one_who_gave_up() -> None:
    async def main() -> list[Any]:
        begun, go_on, scores = anyio.Event(), anyio.Event(), list[Any]()

        async def slow(gold: Any, pred: Any) -> float:
            begun.set()
            await go_on.wait()
            return 0.5

        def thread(gold: Any, pred: Any) -> float:
            return asyncio.run_coroutine_threadsafe(slow(gold, pred), loop).result()

        loop = asyncio.get_running_loop()
        threads = Threads(1, "metric")
        metric = Metric(thread, threads)

        async def score() -> None:
            scores.append(await metric.score(None, None))

        async with anyio.create_task_group() as group:
            group.start_soon(score)
            await begun.wait()
            group.cancel_scope.cancel()
            go_on.set()
        threads.close()
        return scores

    assert anyio.run(main) == [0.5]
