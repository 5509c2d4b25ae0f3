"""The run's paced LMs: retries that hold no slot, signals for the limits, and users' LMs that stay as they are."""

from __future__ import annotations

import asyncio
import copy
import itertools
import pickle
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import dspy
import pytest
from dspy.lm15 import RateLimitError
from dspy.utils.callback import BaseCallback
from dspy.utils.dummies import DummyLM
from dspy.utils.exceptions import LMAuthError, LMRateLimitError, LMServerError, LMTimeoutError

from dspy_flashevolve import AsyncGEPA, Workflow
from dspy_flashevolve.engine.endpoints import Endpoints, groups_of
from dspy_flashevolve.engine.errors import RolloutUnresolvedError, TransientError
from dspy_flashevolve.engine.events import Event, EventBus, LimitChanged
from dspy_flashevolve.engine.limits import Bounds
from dspy_flashevolve.engine.loop import EARLY_SECONDS, Threads
from dspy_flashevolve.engine.retries import RetryPolicy
from dspy_flashevolve.engine.rollouts import Rollout, RolloutKey, Rollouts
from dspy_flashevolve.engine.scheduler import Scheduler
from dspy_flashevolve.engine.steps import Budget
from dspy_flashevolve.programs.faults import raise_provider_fault, retry_after_of
from dspy_flashevolve.programs.lm import LanguageModels
from dspy_flashevolve.programs.placement import answers_asynchronously
from dspy_flashevolve.programs.servers import account_of, endpoint_of
from dspy_flashevolve.sim import PROFILES, SimServer
from dspy_flashevolve.sim.virtual import SimulatedModel, run
from dspy_flashevolve.sim.virtual_loop import LOOP_OF
from tests.broken_server import BrokenServer
from tests.engine.stepped import Asker
from tests.fakes import Chain, digits, examples, fake_lm, hashed, reflection_lm, reply_for

FAST = RetryPolicy(first_seconds=0.02)
PREDICT = dspy.Predict("question -> answer")
STEP = Asker(0)


@dataclass
class Run:
    """What a run has: a scheduler, endpoints, paced LMs and threads."""

    scheduler: Scheduler
    models: LanguageModels
    rollouts: Rollouts
    threads: Threads
    events: list[Event]

    @classmethod
    def on_loop(cls, slots: int, names: set[str], retry: RetryPolicy, adaptive: Bounds | None = None) -> Run:
        loop, events = asyncio.get_running_loop(), list[Event]()
        bus, asked = EventBus([events.append]), {"work": names}
        scheduler = Scheduler(slots, list(asked), groups_of(asked), loop.time)
        endpoints = Endpoints(asked, adaptive, scheduler, bus, loop.time, retry, random.Random(0))
        models = LanguageModels(endpoints)
        models.attach(loop)
        return cls(scheduler, models, Rollouts(scheduler, bus, endpoints), Threads(64, "test"), events)

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

        return (await self.rollouts.request("work", STEP, call)).answer

    async def ask_all(self, lm: Any, count: int, asynchronous: bool = True) -> list[str]:
        return await asyncio.gather(*(self.ask(lm, f"question {n}", asynchronous) for n in range(count)))

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


def test_another_rollout_takes_the_slot_meanwhile() -> None:
    async def body(made: Run) -> list[str]:
        ended: list[str] = []

        async def one(name: str, lm: Any) -> None:
            await made.ask(lm, name)
            ended.append(name)

        await asyncio.gather(one("refused", failing(1, limited)), one("other", failing(0, limited)))
        return ended

    assert in_run(body, slots=1) == ["other", "refused"]


def test_a_burst_of_refusals_pauses_the_whole_endpoint() -> None:
    lm, asked = failing(6, limited), list[float]()

    async def body(made: Run) -> None:
        paced = made.models.pace(lm)
        clock = asyncio.get_running_loop().time
        inner = lm._async_engine_spec.engine.answer

        def answer(prompt: str) -> str:
            asked.append(clock())
            return inner(prompt)

        paced._async_engine_spec.engine.answer = answer

        async def late(n: int) -> None:
            await anyio.sleep(1.0 + n)
            await made.ask(lm, f"late {n}")

        await asyncio.gather(made.ask_all(lm, 6), *(late(n) for n in range(3)))

    in_run(body)
    assert len(asked) == 15
    assert [seconds for seconds in asked if 0 < seconds < 7.0] == []


class Asking(dspy.Module):
    """A program with ``forward`` alone, which runs in threads; counts how many of them are at work."""

    def __init__(self) -> None:
        super().__init__()
        self.step = dspy.Predict("question -> answer")

    def forward(self, question: str) -> dspy.Prediction:
        AT_WORK.add(threading.get_ident())
        MOST[0] = max(MOST[0], len(AT_WORK))
        try:
            return self.step(question=question)
        finally:
            AT_WORK.discard(threading.get_ident())


AT_WORK, MOST = set[int](), [0]


class SlowAsking(Asking):
    """Takes a while, in virtual time."""

    def forward(self, question: str) -> dspy.Prediction:
        LOOP_OF[threading.get_ident()].wait_from_thread(asyncio.sleep(0.2 + hashed(question) % 7 / 10))
        return super().forward(question)


def limited_at_once() -> Exception:
    return LMRateLimitError("slow down")


OUTAGES: dict[str, tuple[float, float, Callable[[], Exception]]] = {
    "503 from the start": (0.0, 2.0, lambda: LMServerError("503")),
    "503": (0.5, 2.5, lambda: LMServerError("503")),
    "429": (0.5, 2.5, limited_at_once),
    "429 with a Retry-After": (0.5, 2.5, limited),
}
"""Name -> when it begins and ends, in seconds, and what is said meanwhile."""


def through_an_outage(program: dspy.Module, outage: str, num_threads: int | None, virtually: bool = True) -> None:
    """A run that has one comes to its end, with every answer."""
    begins, ends, error = OUTAGES[outage]
    AT_WORK.clear()
    MOST[0] = 0

    async def main() -> Any:
        loop = asyncio.get_running_loop()
        began, numbers = loop.time(), itertools.count()

        def answer(prompt: str) -> str:
            # In real time an outage of seconds may be over before a busy machine asks for the first time.
            is_out = begins <= loop.time() - began < ends if virtually else next(numbers) < 6
            if is_out:
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
        with dspy.context(lm=fake_lm(answer)), anyio.fail_after(1000 if virtually else 30):
            return await optimizer.acompile(program, trainset=examples("t", 7), valset=examples("v", 20))

    details = (run(main) if virtually else asyncio.run(main())).detailed_results
    assert details.async_stats.outcome == "finished"
    assert details.async_stats.retried_requests > 0
    assert min(details.val_subscores[0].values()) > 0
    assert 1 < MOST[0] <= (num_threads or details.async_stats.peak_slots)


@pytest.mark.parametrize("num_threads", [4, 16, None])
@pytest.mark.parametrize("outage", list(OUTAGES))
def test_a_short_outage_does_not_hang_a_program_that_runs_in_threads(outage: str, num_threads: int | None) -> None:
    """A thread that waits to ask again keeps its slot: else more rollouts begin than there are threads to end them."""
    through_an_outage(SlowAsking(), outage, num_threads)


def test_nor_does_it_in_real_time() -> None:
    through_an_outage(Asking(), "503 from the start", 4, virtually=False)


@pytest.mark.parametrize("program", [Asking, Chain])
def test_the_time_in_which_the_provider_lets_a_rollout_wait_is_not_the_rollouts(program: Any) -> None:
    lm = failing(5, limited)

    async def main() -> Any:
        optimizer = AsyncGEPA(
            lambda *_: 0.0,
            max_metric_calls=40,
            num_threads=4,
            track_stats=True,
            workflow=Workflow(rollout_timeout_seconds=2.0),
            reflection_lm=reflection_lm(),
        )
        with dspy.context(lm=lm):
            return await optimizer.acompile(program(), trainset=examples("t", 7), valset=examples("v", 9))

    stats = run(main).async_stats
    assert stats.retried_requests == 5
    assert stats.timed_out_rollouts == 0


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


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_lone_request_that_is_told_to_come_back_later_is_asked_until_the_provider_is_given_up(
    asynchronous: bool,
) -> None:
    lm = failing(1000, lambda: LMRateLimitError("429", retry_after=0.1))

    async def body(made: Run) -> float:
        with pytest.raises(RolloutUnresolvedError):
            await made.ask(lm, "?", asynchronous)
        return asyncio.get_running_loop().time()

    assert 60.0 - EARLY_SECONDS <= in_run(body, retry=RetryPolicy()) < 62.0


def test_an_error_that_no_retry_mends_is_raised_at_once() -> None:
    lm = failing(1, lambda: LMAuthError("who?"))

    async def body(made: Run) -> None:
        with dspy.context(lm=made.models.pace(lm), **made.models.settings), pytest.raises(LMAuthError):
            await PREDICT.acall(question="?")

    in_run(body)
    assert lm.engine.calls == 1


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


def test_the_users_lm_stays_as_it_is_and_keeps_its_history() -> None:
    lm = failing(1, limited, num_retries=3)
    before, kwargs = dict(vars(lm)), dict(lm.kwargs)

    async def body(made: Run) -> list[str]:
        assert made.models.pace(lm) is lm
        assert isinstance(lm, dspy.LM)
        assert lm.num_retries == 3
        return await made.ask_all(lm, 3)

    assert in_run(body) == ["yes"] * 3
    assert vars(lm) == before
    assert (lm.num_retries, lm.kwargs, type(lm)) == (3, kwargs, dspy.LM)
    assert len(lm.history) == 3


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


def test_what_is_no_dspy_lm_is_not_paced() -> None:
    dummy = DummyLM([{"answer": "yes"}])
    asynchronous, sync = fake_lm(lambda prompt: ""), fake_lm(lambda prompt: "", asynchronous=False)

    async def body(made: Run) -> None:
        assert made.models.pace(dummy) is dummy
        assert made.models.pace(None) is None
        assert answers_asynchronously(made.models.pace(asynchronous))
        assert not answers_asynchronously(made.models.pace(sync))
        assert type(dummy) is DummyLM

    in_run(body)


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
        assert made.models.endpoints.retries.count == 0

    in_run(body)
    assert lm.engine.calls == 3


@pytest.mark.parametrize("asynchronous", [True, False])
def test_cached_answers_stay_cached(asynchronous: bool) -> None:
    lm = failing(1, limited)
    lm.cache = True
    question = f"cached? {asynchronous}"

    async def body(made: Run) -> None:
        await made.ask(lm, question, asynchronous)
        asked = lm.engine.calls
        await made.ask(lm, question, asynchronous)
        assert lm.engine.calls == asked

    in_run(body)
    with dspy.context(lm=lm, adapter=dspy.ChatAdapter()):
        asked = lm.engine.calls
        assert (asyncio.run(PREDICT.acall(question=question)) if asynchronous else PREDICT(question=question)).answer
    assert lm.engine.calls == asked


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


# Endpoints


def test_lms_at_one_address_share_an_endpoint() -> None:
    here = {"api_base": "http://localhost:8000/v1"}
    task, judge = dspy.LM("openai/a", **here), dspy.LM("hosted_vllm/b", **here)
    assert endpoint_of(task) == endpoint_of(judge) == "http://localhost:8000/v1"
    assert endpoint_of(dspy.LM("openai/a")) == endpoint_of(dspy.LM("openai/b")) == "openai"
    assert endpoint_of(fake_lm(lambda prompt: "")) == "fake"


@pytest.mark.parametrize("error", [limited, lambda: LMTimeoutError("late")])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_refusals_and_timeouts_in_a_row_reach_the_limit(error: Any, asynchronous: bool) -> None:
    lm = failing(5, error)

    async def body(made: Run) -> None:
        await made.ask_all(lm, 20, asynchronous)
        changes = [event for event in made.events if isinstance(event, LimitChanged)]
        assert (changes[0].name, changes[0].before) == ("fake", 12)
        assert changes[0].after < 12

    in_run(body, slots=64, adaptive=Bounds(start=12, high=64))


def test_a_limit_grows_with_answers_from_the_loop_and_from_threads_alike() -> None:
    def grown(asynchronous: bool) -> tuple[int, int]:
        model = SimulatedModel()
        lm = model.lm()

        async def body(made: Run) -> tuple[int, int]:
            await made.ask_all(lm, 120, asynchronous)
            return made.scheduler.limit, len([event for event in made.events if isinstance(event, LimitChanged)])

        return in_run(body, slots=64, names={endpoint_of(lm)}, adaptive=Bounds(start=4, high=64))

    assert grown(True)[0] > 16
    assert grown(False)[0] > 16


def test_an_lm_that_cannot_be_seen_is_heard_through_its_rollouts() -> None:
    async def body(made: Run) -> int:
        async def answered() -> Rollout:
            await anyio.sleep(2.0)
            return Rollout("", 1.0, {}, None)

        async def one(number: int) -> None:
            key = RolloutKey("candidate", "train", number, False)
            budget = Budget(None).reserve(1)
            assert budget is not None
            await made.rollouts.rollout(key, "work", STEP, budget, answered)

        await asyncio.gather(*(one(number) for number in range(40)))
        return made.scheduler.limit

    assert in_run(body, slots=64, adaptive=Bounds(start=4, high=64)) > 4


# Over HTTP


@pytest.fixture(scope="module")
def narrow() -> Iterator[SimServer]:
    """A server that takes three requests at once, and wants the others to come back at once."""
    profile = replace(PROFILES["api-gpt-4o-mini"], concurrency_limit=3, retry_after_seconds=0.0)
    with SimServer(profile, time_scale=100) as server:
        yield server


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


def test_a_date_to_come_back_at_is_understood() -> None:
    reply = type("Reply", (), {"headers": {"Retry-After": "Fri, 01 Jan 2100 00:00:00 GMT"}})
    error = LMServerError("503")
    error.__cause__ = type("Inner", (Exception,), {"response": reply})()
    assert (retry_after_of(error) or 0.0) > 1e6
    assert retry_after_of(LMServerError("503")) is None


@pytest.mark.parametrize("asynchronous", [True, False])
def test_rollouts_beyond_what_the_server_takes_are_all_answered(narrow: SimServer, asynchronous: bool) -> None:
    narrow.reset_stats()
    lm = over_http(narrow)

    async def body(made: Run) -> list[str]:
        answers = list[str]()
        while not narrow.stats().refused:  # on a busy machine the requests of a round may come one after the other
            answers += await made.ask_all(lm, 12, asynchronous)
        assert made.models.endpoints.retries.count == narrow.stats().refused
        assert made.scheduler.statistics().busy == 0
        return answers

    policy = RetryPolicy(attempts=50, first_seconds=0.05)
    answers = in_run(body, virtually=False, slots=8, names={endpoint_of(lm)}, retry=policy)
    assert len(answers) >= 12
    assert all(answers)
    assert (lm.num_retries, len(lm.history)) == (3, len(answers))


def test_task_and_reflection_models_of_one_server_share_its_limit(narrow: SimServer) -> None:
    narrow.reset_stats()
    task, judge = over_http(narrow), over_http(narrow, temperature=1.0)

    async def body(made: Run) -> None:
        await asyncio.gather(made.ask_all(task, 20), made.ask_all(judge, 20))
        assert made.scheduler.limit <= 4
        assert set(made.models.endpoints.limits) == {narrow.api_base}
        assert narrow.stats().finished == 40

    rules, policy = Bounds(start=6, high=8), RetryPolicy(attempts=50, first_seconds=0.05)
    in_run(body, virtually=False, slots=8, names={narrow.api_base}, adaptive=rules, retry=policy)


# Limits a minute


def test_answers_of_dspys_cache_use_up_nothing_of_a_limit(tmp_path: Path) -> None:
    with BrokenServer() as server:
        lm = server.lm("good", "litellm", cache=True, rpm=60)

        async def body(made: Run) -> float:
            for _ in range(20):
                await made.ask(lm, f"the same {tmp_path}")
            rate = made.models.endpoints.rate_limit(endpoint_of(lm), account_of(lm, endpoint_of(lm)))
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
        return made.models.endpoints.rate_limit("fake", account_of(lm, "fake")).limits

    assert in_run(body) == {"requests": 600.0, "tokens": 200_000.0}


def with_headers(error: Any, headers: Any) -> Any:
    error.rate_limit_headers = headers
    return error
