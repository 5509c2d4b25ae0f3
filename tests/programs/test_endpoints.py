"""The run's paced LMs: retries that hold no slot, signals for the limits, and users' LMs that stay as they are."""

from __future__ import annotations

import asyncio
import copy
import pickle
import random
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import dspy
import pytest
from dspy.lm15 import RateLimitError
from dspy.utils.callback import BaseCallback
from dspy.utils.exceptions import LMRateLimitError, LMServerError

from dspy_flashevolve import AsyncGEPA, Workflow
from dspy_flashevolve.engine.errors import RolloutUnresolvedError, TransientError
from dspy_flashevolve.engine.events import Event, EventBus
from dspy_flashevolve.engine.limits import Bounds
from dspy_flashevolve.engine.loop import Threads
from dspy_flashevolve.engine.provider import Providers, RetryPolicy, queues_of
from dspy_flashevolve.engine.requests import Requests
from dspy_flashevolve.engine.scheduler import Scheduler
from dspy_flashevolve.engine.store import Store
from dspy_flashevolve.programs.faults import raise_provider_fault, retry_after_of
from dspy_flashevolve.programs.lm import LanguageModels
from dspy_flashevolve.programs.servers import account_of, endpoint_of
from dspy_flashevolve.sim import PROFILES, SimServer
from dspy_flashevolve.sim.virtual import LOOP_OF, run
from tests.broken_server import BrokenServer
from tests.engine.stepped import Asker
from tests.fakes import digits, examples, fake_lm, hashed, reflection_lm, reply_for

FAST = RetryPolicy(first_seconds=0.02)
PREDICT = dspy.Predict("question -> answer")
STEP = Asker(0)


@dataclass
class Run:
    """What a run has: a scheduler, endpoints, paced LMs and threads."""

    scheduler: Scheduler
    models: LanguageModels
    requests: Requests
    threads: Threads
    events: list[Event]

    @classmethod
    def on_loop(cls, slots: int, names: set[str], retry: RetryPolicy, adaptive: Bounds | None = None) -> Run:
        loop, events = asyncio.get_running_loop(), list[Event]()
        bus, asked = EventBus([events.append]), {"work": names}
        scheduler = Scheduler(slots, list(asked), queues_of(asked), loop.time)
        providers = Providers(asked, adaptive, scheduler, bus, loop.time, retry, random.Random(0))
        models = LanguageModels(providers)
        models.attach(loop)
        return cls(scheduler, models, Requests(scheduler, bus, providers, Store()), Threads(64, "test"), events)

    async def ask(self, lm: Any, question: str, asynchronous: bool = True) -> str:
        """One rollout of one question."""

        async def call() -> Any:
            try:
                with dspy.context(lm=self.models.pace(lm), adapter=dspy.ChatAdapter(), **self.models.settings):
                    if asynchronous:
                        return await PREDICT.acall(question=question)
                    return await self.threads.run(PREDICT, question=question)
            except Exception as error:
                raise_provider_fault(error)
                raise

        return (await self.requests.ask("work", STEP, call)).answer

    def close(self) -> None:
        self.models.close()
        self.threads.close()


def in_run(body: Callable[[Run], Awaitable[Any]], *, virtually: bool = True, slots: int = 4, **options: Any) -> Any:
    """Run ``body`` in virtual time, or in real time."""

    async def main() -> Any:
        made = Run.on_loop(slots, options.get("names", {"fake"}), options.get("retry", FAST), options.get("adaptive"))
        try:
            return await body(made)
        finally:
            made.close()

    return run(main) if virtually else asyncio.run(main())


def failing(times: int, error: Callable[[], Exception], **options: Any) -> dspy.LM:
    """Raises for the first requests and answers the rest."""
    left = [times]

    def answer(prompt: str) -> str:
        if left[0]:
            left[0] -= 1
            raise error()
        return reply_for(prompt, answer="yes")

    return fake_lm(answer, **options)


def limited() -> Exception:
    return LMRateLimitError("slow down", retry_after=7.0)


# Waiting


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_request_that_waits_for_a_retry_after_holds_no_slot_unless_it_holds_a_thread(asynchronous: bool) -> None:
    lm = failing(1, limited)

    async def body(made: Run) -> tuple[str, float, list[int]]:
        busy: list[int] = []

        async def watch() -> None:
            for _ in range(3):
                await anyio.sleep(2.0)
                busy.append(made.scheduler.statistics().busy)

        watching = asyncio.ensure_future(watch())
        answer = await made.ask(lm, "?", asynchronous)
        took = asyncio.get_running_loop().time()
        await watching
        return answer, took, busy

    answer, took, busy = in_run(body, slots=1)
    assert answer == "yes"
    assert 7.0 <= took <= 7.0 + FAST.first_seconds
    assert busy == ([0, 0, 0] if asynchronous else [1, 1, 1])


AT_WORK, MOST = set[int](), [0]


class Asking(dspy.Module):
    """A program with ``forward`` alone, which runs in threads for a while; counts how many of them are at work."""

    def __init__(self) -> None:
        super().__init__()
        self.step = dspy.Predict("question -> answer")

    def forward(self, question: str) -> dspy.Prediction:
        LOOP_OF[threading.get_ident()].wait_from_thread(asyncio.sleep(0.2 + hashed(question) % 7 / 10))
        AT_WORK.add(threading.get_ident())
        MOST[0] = max(MOST[0], len(AT_WORK))
        try:
            return self.step(question=question)
        finally:
            AT_WORK.discard(threading.get_ident())


OUTAGES: dict[str, tuple[float, float, Callable[[], Exception]]] = {
    "503 from the start": (0.0, 2.0, lambda: LMServerError("503")),
    "503": (0.5, 2.5, lambda: LMServerError("503")),
    "429": (0.5, 2.5, lambda: LMRateLimitError("slow down")),
    "429 with a Retry-After": (0.5, 2.5, limited),
}
"""Name -> when it begins and ends, in seconds, and what is said meanwhile."""


@pytest.mark.parametrize("num_threads", [4, 16, None])
@pytest.mark.parametrize("outage", list(OUTAGES))
def test_a_short_outage_does_not_hang_a_program_that_runs_in_threads(outage: str, num_threads: int | None) -> None:
    """A thread that waits to ask again keeps its slot: else more rollouts begin than there are threads to end them."""
    begins, ends, error = OUTAGES[outage]
    AT_WORK.clear()
    MOST[0] = 0

    async def main() -> Any:
        loop = asyncio.get_running_loop()

        def answer(prompt: str) -> str:
            if begins <= loop.time() < ends:
                raise error()
            return reply_for(prompt, answer=str(1 + hashed(prompt) % 6))

        optimizer = AsyncGEPA(
            digits,
            max_metric_calls=60,
            num_threads=num_threads,
            workflow=Workflow(live_steps=2),
            track_stats=True,
            reflection_lm=reflection_lm(),
        )
        with dspy.context(lm=fake_lm(answer)), anyio.fail_after(1000):
            return await optimizer.acompile(Asking(), trainset=examples("t", 7), valset=examples("v", 20))

    details = run(main).detailed_results
    assert details.async_stats.outcome == "finished"
    assert details.async_stats.retried_requests > 0
    assert min(details.val_subscores[0].values()) > 0
    assert 1 < MOST[0] <= (num_threads or details.async_stats.peak_slots)


# Retries in all


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("own", [0, 3])
def test_a_provider_that_gives_no_answer_is_asked_by_both_counts_together_and_no_more(
    own: int, asynchronous: bool
) -> None:
    lm = failing(1000, lambda: LMServerError("500", status=500), num_retries=own)

    async def body(made: Run) -> None:
        with pytest.raises(RolloutUnresolvedError, match=f"no answer after {6 + own} attempts"):
            await made.ask(lm, "?", asynchronous)

    in_run(body)
    assert lm.engine.calls == 6 + own


def test_where_the_run_cannot_be_waited_for_a_paced_lm_is_as_the_lm_itself() -> None:
    lm = failing(2, lambda: LMRateLimitError("429", retry_after=0.0), num_retries=3)

    async def body(made: Run) -> None:
        with dspy.context(**made.models.settings):
            assert made.models.pace(lm)("on the loop itself") == ["[[ ## answer ## ]]\nyes\n\n[[ ## completed ## ]]"]
            assert await made.threads.run(lambda: asyncio.run(lm.acall("on another loop")))

    in_run(body)
    assert lm.engine.calls == 4
    assert lm("after the run")


@pytest.mark.parametrize("virtually", [True, False])
def test_the_end_of_the_run_frees_threads_that_wait_to_ask_again(virtually: bool) -> None:
    lm = failing(1000, lambda: LMRateLimitError("429", retry_after=3600.0))

    async def body(made: Run) -> None:
        asking = asyncio.ensure_future(made.ask(lm, "?", asynchronous=False))
        await anyio.sleep(0.3)
        assert lm.engine.calls == 1
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert made.scheduler.statistics().busy == 0

    in_run(body, virtually=virtually)
    assert lm.engine.calls == 1


# The user's LM


def test_copies_and_pickles_of_a_paced_lm_are_plain_lms_again() -> None:
    lm = dspy.LM("openai/gpt-5-nano", num_retries=2, api_base="http://localhost:1/v1")
    state = lm.dump_state()

    async def body(made: Run) -> None:
        paced = made.models.pace(lm)
        assert type(paced) is not dspy.LM
        for plain in (copy.deepcopy(paced), pickle.loads(pickle.dumps(paced))):
            assert type(plain) is dspy.LM
            assert plain.num_retries == 2
        assert paced.dump_state() == state
        assert type(paced.copy(temperature=1.0)) is type(paced)

    in_run(body)
    assert type(lm) is dspy.LM
    assert lm.dump_state() == state


def test_runs_that_share_an_lm_pace_it_until_the_last_of_them_ends() -> None:
    lm = failing(0, limited)

    async def body(outer: Run) -> list[type]:
        outer.models.pace(lm)
        inner = Run.on_loop(1, {"fake"}, FAST)
        inner.models.pace(lm)
        during = type(lm)
        inner.close()
        assert await outer.ask(lm, "?") == "yes"
        return [during, type(lm)]

    during, after_inner = in_run(body)
    assert during is after_inner is not dspy.LM
    assert type(lm) is dspy.LM


def test_who_asks_from_outside_of_a_run_meanwhile_gets_the_lm_as_it_is() -> None:
    lm = failing(2, lambda: LMRateLimitError("429", retry_after=0.0), num_retries=3)

    async def body(made: Run) -> None:
        made.models.pace(lm)
        assert await lm.acall("?")
        assert made.models.providers.retried == 0

    in_run(body)
    assert lm.engine.calls == 3


@pytest.mark.parametrize("asynchronous", [True, False])
def test_callbacks_hear_of_a_call_once_however_often_it_is_made(asynchronous: bool) -> None:
    heard: list[str] = []

    class Listener(BaseCallback):
        def on_lm_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
            heard.append("start")

        def on_lm_end(self, call_id: str, outputs: Any, exception: Any = None) -> None:
            heard.append("failed" if exception else "end")

    lm = failing(2, limited)
    lm.callbacks.append(Listener())
    in_run(lambda made: made.ask(lm, "?", asynchronous))
    assert heard == ["start", "end"]


def test_a_class_of_the_users_with_a_call_of_its_own_is_repeated_as_a_whole() -> None:
    class Shouting(dspy.LM):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return [text.upper() for text in super().__call__(*args, **kwargs)]

    plain = failing(1, limited)
    lm = Shouting("fake/model", engine=plain.engine, async_engine=plain._async_engine_spec, cache=False)

    async def body(made: Run) -> Any:
        with dspy.context(**made.models.settings):
            return await made.threads.run(made.models.pace(lm), "hello")

    assert "YES" in in_run(body)[0]


# Over HTTP


def over_http(server: SimServer, **options: Any) -> dspy.LM:
    return dspy.LM("openai/sim", api_base=server.api_base, api_key="none", cache=False, **options)


@pytest.mark.parametrize("engine", ["auto", "litellm"])
def test_what_the_server_says_of_when_to_come_back_reaches_us(engine: str) -> None:
    profile = replace(PROFILES["api-gpt-4o-mini"], concurrency_limit=0, retry_after_seconds=3.0)
    with SimServer(profile) as server:
        lm = over_http(server, num_retries=0, engine=engine)
        with pytest.raises(LMRateLimitError) as caught:
            lm("hello")
        with pytest.raises(LMRateLimitError) as awaited:
            asyncio.run(lm.acall("hello"))
    assert retry_after_of(caught.value) == retry_after_of(awaited.value) == 3.0
    with pytest.raises(TransientError) as mapped:
        raise_provider_fault(caught.value)
    assert mapped.value.retry_after_seconds == 3.0


@pytest.mark.parametrize(("said", "seconds"), [("2", 2.0), (3, 3.0), (3.5, 3.5), ("soon", None), (None, None)])
def test_a_header_is_read_as_a_number_or_a_text_and_the_nearest_one_counts(said: Any, seconds: float | None) -> None:
    error = LMServerError("503")
    error.response = type("Reply", (), {"headers": {"Retry-After": said}})  # pyright: ignore[reportAttributeAccessIssue]
    assert retry_after_of(error) == seconds
    error.__cause__ = LMRateLimitError("429", retry_after=60.0)
    assert retry_after_of(error) == (60.0 if seconds is None else seconds)
    error.response.headers["Retry-After"] = "Fri, 01 Jan 2100 00:00:00 GMT"  # pyright: ignore[reportAttributeAccessIssue]
    assert (retry_after_of(error) or 0.0) > 1e6
    assert retry_after_of(LMServerError("503")) is None


# Limits a minute


def test_answers_of_dspys_cache_use_up_nothing_of_a_limit(tmp_path: Path) -> None:
    with BrokenServer() as server:
        lm = server.lm("good", "litellm", cache=True, rpm=60)

        async def body(made: Run) -> float:
            for _ in range(20):
                await made.ask(lm, f"the same {tmp_path}")
            rate = made.models.providers.rate_limit(account_of(lm, endpoint_of(lm)))
            assert rate.limits == {"requests": 60}
            began = asyncio.get_running_loop().time()
            await rate.admit(0.0, anyio.sleep)
            return asyncio.get_running_loop().time() - began

        assert in_run(body, virtually=False, names={endpoint_of(server.lm("good"))}) <= 1.1


def test_a_limit_is_learnt_from_a_refusal_where_the_engine_shows_no_other_headers() -> None:
    headers = {"x-ratelimit-limit-requests": ("600",), "x-ratelimit-limit-tokens": ["200000"]}
    lm = failing(1, lambda: with_headers(RateLimitError("slow down", retry_after=1.0), headers))

    async def body(made: Run) -> dict[str, float]:
        await made.ask(lm, "?")
        return made.models.providers.rate_limit(account_of(lm, "fake")).limits

    assert in_run(body) == {"requests": 600.0, "tokens": 200_000.0}


def with_headers(error: Any, headers: Any) -> Any:
    error.rate_limit_headers = headers
    return error
