"""Virtual time: the clock jumps, threads and loop take turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import dspy
import pytest
from dspy.utils.exceptions import LMRateLimitError
from dspy.utils.usage_tracker import track_usage
from hypothesis import given, settings
from hypothesis import strategies as st

from dspy_flashevolve.sim import PROFILES
from dspy_flashevolve.sim.virtual import SimulatedModel, run

PREDICT = dspy.Predict("question -> answer")
OPENING = "Here is a short and plain reply"


def now() -> float:
    return asyncio.get_running_loop().time()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=12))
def test_sleepers_wake_in_the_order_of_their_times_each_at_its_own(times: list[int]) -> None:
    async def main() -> list[tuple[float, int]]:
        woken: list[tuple[float, int]] = []

        async def sleeper(number: int, seconds: int) -> None:
            await asyncio.sleep(seconds)
            woken.append((now(), number))

        await asyncio.gather(*(sleeper(number, seconds) for number, seconds in enumerate(times)))
        return woken

    woken = run(main)
    assert [time for time, _ in woken] == pytest.approx(sorted(times))
    assert [times[number] for _, number in woken] == sorted(times)


def test_threads_run_one_at_a_time_in_the_order_of_the_calls_and_the_loop_waits() -> None:
    log: list[str] = []
    inside = 0

    def work(number: int) -> int:
        nonlocal inside
        inside += 1
        assert inside == 1, "another thread works at the same time"
        log.append(f"begin {number} {threading.current_thread() is not threading.main_thread()}")
        for _ in range(1000):
            pass
        log.append(f"end {number}")
        inside -= 1
        return number

    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        jobs = [loop.run_in_executor(None, work, number) for number in range(5)]
        assert log[-1] == "end 4", "they were done when the calls returned"
        return list(await asyncio.gather(*jobs))

    assert run(main) == list(range(5))
    assert log == [line for number in range(5) for line in (f"begin {number} True", f"end {number}")]


def asking(model: SimulatedModel, question: str) -> Callable[[], Any]:
    def ask() -> Any:
        with dspy.context(lm=model.lm(), adapter=dspy.ChatAdapter()):
            return PREDICT(question=question)

    return ask


async def ask(model: SimulatedModel, question: str) -> Any:
    with dspy.context(lm=model.lm()):
        return await PREDICT.acall(question=question)


def test_a_synchronous_call_from_a_thread_waits_in_virtual_time_while_others_go_on() -> None:
    model, ticks = SimulatedModel(), list[float]()

    async def main() -> tuple[float, Any]:
        async def tick() -> None:
            while True:
                await asyncio.sleep(0.25)
                ticks.append(now())

        ticking = asyncio.create_task(tick())
        answer = await asyncio.to_thread(asking(model, "sync"))
        took = now()
        ticking.cancel()
        return took, answer

    took, answer = run(main)
    assert took > 0.5
    assert answer.answer.startswith(OPENING)
    assert len(ticks) >= int(took / 0.25) - 1
    assert model.requests == {"task": 1}


def test_awaited_and_synchronous_calls_get_the_same_answer_in_the_same_time_with_usage() -> None:
    async def main(thread: bool) -> tuple[str, float, dict[str, Any], int]:
        model = SimulatedModel()
        with track_usage() as usage:
            answer = await (asyncio.to_thread(asking(model, "why?")) if thread else ask(model, "why?"))
        return answer.answer, now(), usage.get_total_tokens(), model.completion_tokens

    awaited, threaded = run(lambda: main(False)), run(lambda: main(True))
    assert awaited == threaded
    (used,) = awaited[2].values()
    assert used["completion_tokens"] == awaited[3] > 0
    assert used["prompt_tokens"] > 0


def cause_of(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


REFUSED = "RuntimeError: a simulated model was called synchronously from a thread that no virtual loop has started"


def test_a_synchronous_call_on_a_loop_or_from_a_foreign_thread_is_refused_instead_of_hanging() -> None:
    caught: list[str] = []

    def refused() -> None:
        with pytest.raises(Exception, match="no virtual loop has started") as error:
            asking(SimulatedModel(), "x")()
        caught.append(cause_of(error.value))

    async def on_the_loop() -> None:
        refused()

    refused()
    thread = threading.Thread(target=refused)
    thread.start()
    thread.join()
    run(on_the_loop)
    assert len(caught) == 3
    assert all(text.startswith(REFUSED) for text in caught)


@pytest.mark.parametrize("how", ["raises", "returns", "cancelled"])
def test_a_thread_that_waits_for_the_model_at_the_end_hangs_nothing(how: str) -> None:
    thread_ended, model = threading.Event(), SimulatedModel()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            asking(model, "never answered")()
        except BaseException as error:
            errors.append(error)
            raise
        finally:
            thread_ended.set()

    async def main() -> str:
        waiting = asyncio.create_task(asyncio.to_thread(work))
        await asyncio.sleep(0.001)
        assert not thread_ended.is_set()
        if how == "raises":
            raise ZeroDivisionError("boom")
        if how == "cancelled":
            waiting.cancel()
            current = asyncio.current_task()
            assert current is not None
            current.cancel()
            await asyncio.sleep(1)
        return "done"

    if how == "returns":
        assert run(main) == "done"
    else:
        with pytest.raises(ZeroDivisionError if how == "raises" else asyncio.CancelledError):
            run(main)
    assert thread_ended.wait(timeout=10)
    assert len(errors) == 1


def test_requests_above_what_the_profile_takes_are_refused_with_retry_after_and_counted() -> None:
    model = SimulatedModel(replace(PROFILES["api-gpt-4o-mini"], concurrency_limit=2))

    async def main() -> list[Any]:
        together = await asyncio.gather(*(ask(model, f"question {n}") for n in range(5)), return_exceptions=True)
        thread = asyncio.to_thread(asking(model, "later"))
        return [*together, await thread]

    answers = run(main)
    refused = [answer for answer in answers if isinstance(answer, LMRateLimitError)]
    assert len(refused) == len(model.refused) == 3
    assert {answer.retry_after for answer in refused} == {1.0}
    assert model.requests == {"task": 3}


def test_where_a_loop_is_running_it_has_a_thread_and_dspys_settings_of_the_caller_and_errors_arrive_there() -> None:
    lm = SimulatedModel().lm()

    async def answer() -> str:
        return (await dspy.Predict("question -> answer").acall(question="Why?")).answer

    async def fails() -> None:
        raise ValueError("told")

    async def cell() -> str:
        with pytest.raises(ValueError, match="told"):
            run(fails)
        with dspy.context(lm=lm):
            return run(answer)

    assert asyncio.run(cell())
