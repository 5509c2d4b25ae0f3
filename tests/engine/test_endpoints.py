"""Endpoints: which stages share a limit, when one pauses as a whole, and who is heard of it."""

from __future__ import annotations

import random
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.engine.endpoints import ENOUGH_ANSWERS, MAX_PAUSES, REFUSALS_IN_A_ROW, Endpoints, groups_of
from dspy_flashevolve.engine.events import EndpointPaused, Event, EventBus, LimitChanged
from dspy_flashevolve.engine.limits import Bounds
from dspy_flashevolve.engine.retries import SILENT_FAILURES, RetryPolicy, TrackedRequest
from dspy_flashevolve.engine.scheduler import Scheduler, current_slot
from dspy_flashevolve.sim.virtual import run
from tests.engine.stepped import Asker
from tests.engine.test_rollouts import now

ASKED = {"rollout": ["task"], "propose": ["reflection"], "validate": ["task", "judge"]}


class Bench:
    def __init__(self, slots: int = 4, adaptive: Bounds | None = None, asked: Any = ASKED) -> None:
        self.events: list[Event] = []
        self.scheduler = Scheduler(slots, list(asked), groups_of(asked), now)
        bus = EventBus([self.events.append])
        self.endpoints = Endpoints(
            asked, adaptive, self.scheduler, bus, now, RetryPolicy(first_seconds=1.0), random.Random(0)
        )

    def refuse(self, name: str, times: int, retry_after: float | None = 8.0) -> None:
        for _ in range(times):
            sent = TrackedRequest()
            self.endpoints.endpoint(name).record_sent(sent)
            self.endpoints.endpoint(name).record_refusal(sent, retry_after)

    def answer(self, name: str, times: int) -> None:
        for _ in range(times):
            sent = TrackedRequest()
            self.endpoints.endpoint(name).record_sent(sent)
            self.endpoints.endpoint(name).record_reply(sent)

    @property
    def pauses(self) -> list[tuple[str, float]]:
        return [(one.endpoint, one.pause_seconds) for one in self.events if isinstance(one, EndpointPaused)]


@given(st.dictionaries(st.sampled_from("stuvwx"), st.sets(st.sampled_from("abcdef"), min_size=1), min_size=1))
def test_stages_are_in_one_group_where_endpoints_connect_them(asked: dict[str, set[str]]) -> None:
    groups = groups_of(asked)
    assert set(groups) == set(asked)
    for one, other in [(one, other) for one in asked for other in asked if asked[one] & asked[other]]:
        assert groups[one] == groups[other]
    for stage, group in groups.items():
        assert asked[stage] <= set(group.split(" + "))
    assert groups == groups_of(dict(reversed(asked.items())))


def test_refusals_in_a_row_pause_an_endpoint_and_no_other_and_longer_the_less_is_answered_in_between() -> None:
    bench = Bench()

    async def main() -> None:
        bench.refuse("task", REFUSALS_IN_A_ROW - 1)
        assert bench.pauses == []
        bench.refuse("task", 3)
        assert bench.pauses == [("task", 8.0)]
        await bench.endpoints.endpoint("reflection").admit(None)
        assert now() == 0.0
        await bench.endpoints.endpoint("task").admit(None)
        assert 8.0 <= now() <= 9.0
        for pause in (2.0, 4.0, 8.0, 8.0):
            bench.refuse("task", REFUSALS_IN_A_ROW, None)
            assert bench.pauses[-1] == ("task", pause)
            await bench.endpoints.endpoint("task").admit(None)
        bench.answer("task", ENOUGH_ANSWERS)
        bench.refuse("task", REFUSALS_IN_A_ROW, None)
        assert bench.pauses[-1] == ("task", 1.0)

    run(main)


def test_refusals_that_come_back_sooner_than_the_answers_to_what_was_sent_between_them_pause_nothing() -> None:
    bench = Bench()

    async def main() -> None:
        sent = [TrackedRequest() for _ in range(64)]
        task = bench.endpoints.endpoint("task")
        for request in sent:
            task.record_sent(request)
        for request in sent[::3]:
            task.record_refusal(request, None)
        assert bench.pauses == []

    run(main)


def test_an_endpoint_that_refuses_some_while_it_is_at_work_on_others_is_not_said_to_be_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    endpoint, at_work = bench.endpoints.endpoint("task"), TrackedRequest()

    def turn_away() -> None:
        for _ in range(SILENT_FAILURES):
            sent = TrackedRequest()
            endpoint.record_sent(sent)
            endpoint.record_failure(sent, "429")

    async def main() -> None:
        endpoint.record_sent(at_work)
        turn_away()
        assert "does not answer" not in caplog.text
        endpoint.record_reply(at_work)
        turn_away()
        assert "task does not answer (429)" in caplog.text

    run(main)


def test_an_endpoint_that_refuses_and_leaves_requests_hanging_is_said_to_be_silent_after_ten_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    endpoint = bench.endpoints.endpoint("task")

    async def main() -> None:
        endpoint.record_sent(TrackedRequest())
        for seconds in (0, 3, 3, 3, 2):
            assert "does not answer" not in caplog.text
            await anyio.sleep(seconds)
            sent = TrackedRequest()
            endpoint.record_sent(sent)
            endpoint.record_failure(sent, "429")
        assert "task does not answer (429)" in caplog.text

    run(main)


def test_one_request_that_hangs_alone_for_longer_than_an_outage_may_last_is_asked_again() -> None:
    """As where there is one slot: nothing else is asked meanwhile, and nothing tells whether the endpoint is there."""
    bench = Bench()
    endpoint, sent = bench.endpoints.endpoint("task"), TrackedRequest()

    async def main() -> None:
        for _ in range(3):
            assert not bench.endpoints.retries.outage
            endpoint.record_sent(sent)
            await anyio.sleep(600)
            endpoint.record_failure(sent, "no answer within 600 seconds")
        assert bench.endpoints.retries.outage

    run(main)


def test_an_endpoint_that_turns_away_all_for_a_minute_is_given_up() -> None:
    bench = Bench()
    endpoint = bench.endpoints.endpoint("task")

    async def main() -> None:
        for _ in range(2):
            assert not bench.endpoints.retries.outage
            sent = TrackedRequest()
            endpoint.record_sent(sent)
            endpoint.record_failure(sent, "connection refused")
            await anyio.sleep(60)
        endpoint.record_sent(sent)
        endpoint.record_failure(sent, "connection refused")
        assert bench.endpoints.retries.outage

    run(main)


def test_a_request_that_waits_for_the_end_of_a_pause_holds_no_slot_and_is_sent_at_last_all_the_same() -> None:
    bench = Bench(slots=1)
    task = bench.endpoints.endpoint("task")
    order: list[str] = []

    async def request(name: str) -> None:
        await task.admit(current_slot())
        order.append(name)

    async def always_refusing() -> None:
        for _ in range(2 * MAX_PAUSES):
            bench.refuse("task", REFUSALS_IN_A_ROW)
            await anyio.sleep(8.0)

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(always_refusing)
            await anyio.sleep(0.1)
            group.start_soon(bench.scheduler.run, "rollout", Asker(0), lambda: request("paused"))
            await anyio.sleep(0.1)
            await bench.scheduler.run("propose", Asker(1), lambda: anyio.lowlevel.checkpoint())
            order.append("another")

    run(main)
    assert order == ["another", "paused"]


def test_each_group_has_a_limit_of_its_own_and_every_change_is_told() -> None:
    bench = Bench(8, Bounds(start=2, high=8))
    assert set(bench.endpoints.limits) == {"judge + task", "reflection"}
    assert bench.scheduler.limit == 4

    async def main() -> None:
        async def request() -> None:
            sent = TrackedRequest()
            bench.endpoints.endpoint("judge").record_sent(sent)
            await anyio.sleep(1.0)
            bench.endpoints.endpoint("judge").record_reply(sent)

        async with anyio.create_task_group() as group:
            for number in range(12):
                group.start_soon(bench.scheduler.run, "rollout", Asker(number), request)

    run(main)
    changes = [one for one in bench.events if isinstance(one, LimitChanged)]
    assert {(one.name, one.reason) for one in changes} == {("judge + task", "it binds")}
    assert changes[0].before == 2
    assert bench.endpoints.limits["reflection"].limit == 2
