"""Providers: which stages share a queue, when a server pauses, who of several is asked, and who is given up."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspy_flashevolve.engine.events import EndpointPaused, Event, EventBus
from dspy_flashevolve.engine.limits import Bounds
from dspy_flashevolve.engine.provider import (
    ENOUGH_ANSWERS,
    MAX_PAUSES,
    REFUSALS_IN_A_ROW,
    SERVER_SEPARATOR,
    Attempts,
    Failure,
    Providers,
    RetryPolicy,
    queues_of,
)
from dspy_flashevolve.engine.scheduler import Scheduler, current_slot
from dspy_flashevolve.sim.virtual import run
from tests.engine.stepped import Asker
from tests.engine.test_requests import now

ASKED = {"rollout": ["task"], "propose": ["reflection"], "validate": ["task", "judge"]}
BOTH = SERVER_SEPARATOR.join(["fast", "slow"])


class Bench:
    def __init__(self, slots: int = 4, adaptive: Bounds | None = None, asked: Any = ASKED) -> None:
        self.events: list[Event] = []
        self.scheduler = Scheduler(slots, list(asked), queues_of(asked), now)
        bus, policy = EventBus([self.events.append]), RetryPolicy(first_seconds=1.0)
        self.providers = Providers(asked, adaptive, self.scheduler, bus, now, policy, random.Random(0))

    def sent(self, name: str) -> Attempts:
        """A request that was sent to a provider; of several servers it has chosen one."""
        request = Attempts(self.providers.provider(name))
        request.server = request.provider.choose(request)
        request.send()
        return request

    def refuse(self, name: str, times: int, retry_after: float | None = 8.0, overload: str = "refused") -> None:
        for _ in range(times):
            request = self.sent(name)
            request.leave()
            request.server.record_failure(request, overload, retry_after)

    def turn_away(self, request: Attempts, reason: str = "429") -> None:
        request.leave()
        request.provider.record_failure(request, Failure(reason))

    def answer(self, name: str, times: int) -> None:
        for _ in range(times):
            self.sent(name).answered()

    async def admitted(self, name: str) -> None:
        await Attempts(self.providers.provider(name), current_slot()).begin()

    @property
    def pauses(self) -> list[tuple[str, float]]:
        return [(one.endpoint, one.pause_seconds) for one in self.events if isinstance(one, EndpointPaused)]


def several(slots: int = 256, adaptive: Bounds | None = None, rollout: tuple[str, ...] = (BOTH,)) -> Bench:
    return Bench(slots, adaptive, {"rollout": list(rollout)})


@given(st.dictionaries(st.sampled_from("stuvwx"), st.sets(st.sampled_from("abcdef"), min_size=1), min_size=1))
def test_stages_share_a_queue_where_servers_connect_them(asked: dict[str, set[str]]) -> None:
    queues = queues_of(asked)
    assert set(queues) == set(asked)
    for one, other in [(one, other) for one in asked for other in asked if asked[one] & asked[other]]:
        assert queues[one] == queues[other]
    for stage, queue in queues.items():
        assert asked[stage] <= set(queue.split(" + "))
    assert queues == queues_of(dict(reversed(asked.items())))


# Pauses


def test_refusals_in_a_row_pause_a_server_and_no_other_and_longer_the_less_is_answered_in_between() -> None:
    bench = Bench()

    async def main() -> None:
        bench.refuse("task", REFUSALS_IN_A_ROW - 1)
        assert bench.pauses == []
        bench.refuse("task", 3)
        assert bench.pauses == [("task", 8.0)]
        await bench.admitted("reflection")
        assert now() == 0.0
        await bench.admitted("task")
        assert 8.0 <= now() <= 9.0
        for pause in (2.0, 4.0, 8.0, 8.0):
            bench.refuse("task", REFUSALS_IN_A_ROW, None)
            assert bench.pauses[-1] == ("task", pause)
            await bench.admitted("task")
        bench.answer("task", ENOUGH_ANSWERS)
        bench.refuse("task", REFUSALS_IN_A_ROW, None)
        assert bench.pauses[-1] == ("task", 1.0)

    run(main)


def test_a_request_that_waits_for_the_end_of_a_pause_holds_no_slot_and_is_sent_at_last_all_the_same() -> None:
    bench = Bench(slots=1)
    order: list[str] = []

    async def request(name: str) -> None:
        await bench.admitted("task")
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


# Silence


def test_a_provider_that_refuses_and_leaves_requests_hanging_is_said_to_be_silent_after_ten_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()

    async def main() -> None:
        bench.sent("task")
        for seconds in (0, 3, 3, 3, 2):
            assert "does not answer" not in caplog.text
            await anyio.sleep(seconds)
            bench.turn_away(bench.sent("task"))
        assert "task does not answer (429)" in caplog.text

    run(main)


def test_one_request_that_hangs_alone_for_longer_than_an_outage_may_last_is_asked_again() -> None:
    """As where there is one slot: nothing else is asked meanwhile, and nothing tells whether the server is there."""
    bench = Bench()

    async def main() -> None:
        request = Attempts(bench.providers.provider("task"))
        for _ in range(3):
            assert not bench.providers.outage
            request.send()
            await anyio.sleep(600)
            bench.turn_away(request, "no answer within 600 seconds")
        assert bench.providers.outage

    run(main)


# Several servers of one model


class Machine:
    """Writes so many tokens a second for each of at most ``width`` requests; more wait."""

    def __init__(self, width: int, seconds: float) -> None:
        self.places, self.seconds, self.answered = anyio.Semaphore(width), seconds, 0

    async def answer(self, seconds: float) -> None:
        async with self.places:
            await anyio.sleep(self.seconds * seconds)
        self.answered += 1


async def ask(bench: Bench, machines: dict[str, Machine], name: str, seconds: float) -> None:
    """One request in a slot."""
    request = Attempts(bench.providers.provider(name), current_slot())
    await request.begin()
    request.send()
    try:
        await machines[request.server.name].answer(seconds)
        request.answered()
    finally:
        request.leave()


async def load(bench: Bench, machines: dict[str, Machine], seconds: float) -> None:
    """Rollouts for so long, from 200 steps."""
    draws = random.Random(0)

    async def work(number: int) -> None:
        while True:
            await bench.scheduler.run(
                "rollout", Asker(number), lambda: ask(bench, machines, BOTH, draws.expovariate(1.0))
            )

    with anyio.move_on_after(seconds):
        async with anyio.create_task_group() as group:
            for number in range(200):
                group.start_soon(work, number)


@pytest.mark.long
def test_two_servers_of_unequal_speed_reach_six_sevenths_of_the_sum_of_their_ceilings() -> None:
    async def main() -> None:
        for slots, adaptive in ((256, Bounds(8)), (64, None)):
            bench, machines = several(slots, adaptive), {"fast": Machine(32, 1.0), "slow": Machine(8, 2.0)}
            await load(bench, machines, 60.0)
            before = sum(one.answered for one in machines.values())
            await load(bench, machines, 60.0)
            assert sum(one.answered for one in machines.values()) - before >= 6 / 7 * 60 * (32 / 1.0 + 8 / 2.0)

    run(main)


def test_a_server_that_was_slow_once_is_asked_again_after_a_minute_and_gets_its_share() -> None:
    bench, asked = several(2), Counter[str]()

    async def repeated() -> None:
        for _ in range(300):
            request = bench.sent(BOTH)
            name = request.server.name
            asked[name] += 1
            await anyio.sleep(60.0 if name == "slow" and asked["slow"] == 1 else 1.0)
            request.answered()

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(repeated)

    run(main)
    assert min(asked.values()) > 100


def test_slots_follow_the_limits_of_the_servers_that_are_there() -> None:
    async def main() -> None:
        bench = several(adaptive=Bounds(8))
        assert bench.scheduler.limit == 16
        bench.refuse("fast", REFUSALS_IN_A_ROW, None, overload="")
        assert bench.scheduler.limit == 8

    run(main)


def test_a_server_that_is_asked_alone_too_has_one_limit_for_both() -> None:
    async def main() -> None:
        bench = Bench(64, Bounds(8), {"rollout": [BOTH], "propose": ["fast"]})
        assert bench.providers.provider("fast").servers[0] in bench.providers.provider(BOTH).servers
        assert bench.scheduler.limit == 16

    run(main)


# What waits in a pause


async def refused(bench: Bench, provider: str, sent: list[float]) -> None:
    """One request in a slot, which is turned away as long as the run asks again."""
    request = Attempts(bench.providers.provider(provider), current_slot())
    while True:
        await request.begin()
        if bench.providers.outage:
            return
        request.send()
        sent.append(now())
        await anyio.sleep(0.1)
        if not await request.try_again(Failure("503", overload="refused")):
            return


@pytest.mark.parametrize("asked", ["fast", BOTH])
def test_a_provider_all_of_whose_servers_are_dead_is_given_up_though_requests_wait_for_the_end_of_a_pause(
    asked: str,
) -> None:
    bench, sent = several(8, None, (asked,)), list[float]()

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for number in range(32):
                group.start_soon(bench.scheduler.run, "rollout", Asker(number), lambda: refused(bench, asked, sent))
            while not bench.providers.outage:
                await anyio.sleep(1.0)
                assert now() < 90, "an outage may last sixty seconds"

    run(main)


def test_slots_of_requests_that_wait_for_the_end_of_a_pause_are_not_idle() -> None:
    bench = Bench(slots=4)

    async def main() -> None:
        bench.refuse("task", REFUSALS_IN_A_ROW)
        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(bench.scheduler.run, "rollout", Asker(number), lambda: bench.admitted("task"))
            await anyio.sleep(1.0)
            assert bench.scheduler.idle == 0
        assert bench.scheduler.idle == 4

    run(main)
