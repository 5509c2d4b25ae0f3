"""The randomness of steps, events, threads."""

from __future__ import annotations

import asyncio
import threading

import anyio
import pytest
from anyio.lowlevel import checkpoint

from dspy_flashevolve.engine.events import Event, EventBus
from dspy_flashevolve.engine.loop import Threads
from dspy_flashevolve.engine.steps import step_rng


def test_what_a_step_draws_depends_on_the_seed_and_its_number_alone() -> None:
    first, again = step_rng(5, seed=1), step_rng(5, seed=1)
    step_rng(4, seed=1).random()
    assert first.random() == again.random()
    draws = {step_rng(number, seed).random() for number in range(20) for seed in (0, 1, None)}
    assert len(draws) == 60


def test_a_subscriber_that_raises_is_dropped_with_a_warning_and_the_others_go_on() -> None:
    bus, seen = EventBus(), list[Event]()

    def broken(event: Event) -> None:
        raise ValueError("broken observer")

    bus.subscribe(broken)
    bus.subscribe(seen.append)
    with pytest.warns(UserWarning, match="broken observer"):
        bus.emit(Event(0.0))
    bus.emit(Event(1.0))
    assert [event.seconds for event in seen] == [0.0, 1.0]


def test_calls_that_were_given_up_do_not_hold_up_those_that_follow() -> None:
    go = threading.Event()

    async def main() -> None:
        threads = Threads(2, "test")
        for _ in range(3):
            began = threading.Event()
            hung = asyncio.ensure_future(threads.run(lambda: (began.set(), go.wait(timeout=10))))  # noqa: B023
            while not began.is_set():
                await checkpoint()
            hung.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hung
        with anyio.fail_after(10):
            assert await threads.run(lambda: "in time") == "in time"
        go.set()
        threads.close()

    asyncio.run(main())


def test_one_worker_stays_one_so_that_its_calls_stay_in_order() -> None:
    go, inside, most = threading.Event(), 0, 0

    def work() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        assert go.wait(timeout=10)
        inside -= 1

    async def main() -> None:
        threads = Threads(1, "test")
        began = threading.Event()
        first = asyncio.ensure_future(threads.run(lambda: (began.set(), work())))
        while not began.is_set():
            await checkpoint()
        first.cancel()
        second = asyncio.ensure_future(threads.run(work))
        for _ in range(50):
            await checkpoint()
        go.set()
        await second
        threads.close()

    asyncio.run(main())
    assert most == 1
