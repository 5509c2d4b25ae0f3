"""Several endpoints of one model: who is asked, who is left out, and that the run goes on while one answers."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import anyio
import pytest

from dspy_flashevolve.engine.endpoints import (
    REFUSALS_IN_A_ROW,
    SERVER_SEPARATOR,
    Endpoint,
    Endpoints,
    Servers,
    groups_of,
)
from dspy_flashevolve.engine.events import Event, EventBus
from dspy_flashevolve.engine.limits import Bounds
from dspy_flashevolve.engine.retries import RetryPolicy, TrackedRequest
from dspy_flashevolve.engine.scheduler import Scheduler, current_slot
from dspy_flashevolve.sim.virtual import run
from tests.engine.stepped import Asker
from tests.engine.test_rollouts import now

EIGHT = Bounds(8)
BOTH = SERVER_SEPARATOR.join(["fast", "slow"])


class Bench:
    def __init__(self, slots: int = 256, adaptive: Bounds | None = EIGHT, rollout: tuple[str, ...] = (BOTH,)) -> None:
        self.events: list[Event] = []
        self.given_up: list[str] = []
        self.scheduler = Scheduler(slots, ["rollout"], {"rollout": " + ".join(sorted(rollout))}, now)
        bus, retry = EventBus([self.events.append]), RetryPolicy(first_seconds=1.0)
        self.endpoints = Endpoints(
            {"rollout": rollout}, adaptive, self.scheduler, bus, now, retry, random.Random(0), self.given_up.append
        )

    @property
    def several(self) -> Servers:
        return self.endpoints.servers(BOTH)

    def begun(self, but: Endpoint | None = None) -> tuple[Endpoint, TrackedRequest]:
        sent = TrackedRequest()
        chosen = self.several.choose(sent, exclude=but)
        chosen.record_sent(sent)
        return chosen, sent

    def fail(self, name: str, times: int = REFUSALS_IN_A_ROW) -> None:
        for _ in range(times):
            sent = TrackedRequest()
            self.endpoints.endpoint(name).record_sent(sent)
            self.endpoints.endpoint(name).leave(sent)
            self.endpoints.endpoint(name).record_no_reply(sent)


class Server:
    """Writes so many tokens a second for each of at most ``width`` requests; more wait."""

    def __init__(self, width: int, seconds: float) -> None:
        self.places, self.seconds, self.answered, self.is_down = anyio.Semaphore(width), seconds, 0, False

    async def answer(self, seconds: float) -> bool:
        if self.is_down:
            return False
        async with self.places:
            await anyio.sleep(self.seconds * seconds)
        self.answered += not self.is_down
        return not self.is_down


async def load(bench: Bench, servers: dict[str, Server], seconds: float) -> None:
    """Rollouts for so long, from 200 steps."""
    draws = random.Random(0)

    async def request() -> None:
        sent, last = TrackedRequest(), None
        while True:
            last = bench.several.choose(sent, exclude=last)
            try:
                await last.admit(current_slot())
                last.record_sent(sent)
                if await servers[last.name].answer(draws.expovariate(1.0)):
                    last.record_reply(sent)
                    return
                last.leave(sent)
                bench.several.record_failure(sent, "gone")
                last.record_no_reply(sent)
            finally:
                last.leave(sent)
            if not bench.several.has_room:
                await bench.several.pause_before_retry(current_slot(), sent, None)

    async def work(number: int) -> None:
        while True:
            await bench.scheduler.run("rollout", Asker(number), request)

    with anyio.move_on_after(seconds):
        async with anyio.create_task_group() as group:
            for number in range(200):
                group.start_soon(work, number)


def two() -> dict[str, Server]:
    return {"fast": Server(32, 1.0), "slow": Server(8, 2.0)}


@pytest.mark.long
def test_two_servers_of_unequal_speed_reach_six_sevenths_of_the_sum_of_their_ceilings() -> None:
    async def main() -> None:
        for slots, adaptive in ((256, Bounds(8)), (64, None)):
            bench, servers = Bench(slots, adaptive), two()
            await load(bench, servers, 60.0)
            before = sum(one.answered for one in servers.values())
            await load(bench, servers, 60.0)
            assert sum(one.answered for one in servers.values()) - before >= 6 / 7 * 60 * (32 / 1.0 + 8 / 2.0)

    run(main)


async def batches(bench: Bench, servers: dict[str, Server], name: str, requests: int, times: int) -> float:
    """Seconds for so many batches of requests, one after the other, with lengths that differ."""
    draws, several, began = random.Random(1), bench.endpoints.servers(name), now()

    async def request(number: int) -> None:
        sent = TrackedRequest()
        endpoint = several.choose(sent)
        await endpoint.admit(current_slot())
        endpoint.record_sent(sent)
        await servers[endpoint.name].answer(draws.uniform(0.5, 1.5))
        endpoint.record_reply(sent)

    for _ in range(times):
        async with anyio.create_task_group() as group:
            for number in range(requests):
                group.start_soon(bench.scheduler.run, "rollout", Asker(number), lambda n=number: request(n))
    return now() - began


async def alone_and_both(slots: int, adaptive: Bounds | None, places: int, requests: int, times: int) -> list[float]:
    """Seconds with the fast server alone, and with one that is four times slower beside it."""
    return [
        await batches(
            Bench(slots, adaptive, (name,)),
            {"fast": Server(places, 1.0), "slow": Server(places, 4.0)},
            name,
            requests,
            times,
        )
        for name in ("fast", BOTH)
    ]


ADAPTIVE_AND_FIXED = pytest.mark.parametrize(("slots", "adaptive"), [(64, Bounds(4, 64)), (64, None)])
SLOWEST_SECONDS = 4.0 * 1.5
"""Of a request on the server that is four times slower."""


@ADAPTIVE_AND_FIXED
@pytest.mark.parametrize("places", [8, 32])
@pytest.mark.parametrize(("requests", "times"), [(20, 1), (20, 10), (100, 1), (400, 1)])
def test_it_never_costs_more_than_two_of_its_requests(
    slots: int, adaptive: Bounds | None, places: int, requests: int, times: int
) -> None:
    async def main() -> None:
        alone, both = await alone_and_both(slots, adaptive, places, requests, times)
        assert both <= alone + 2 * SLOWEST_SECONDS

    run(main)


def test_one_that_fails_is_left_out_and_then_tried_by_one_request_at_a_time() -> None:
    async def main() -> None:
        bench = Bench()
        bench.fail("fast", REFUSALS_IN_A_ROW - 1)
        assert {bench.begun()[0].name for _ in range(8)} == {"fast", "slow"}
        bench.fail("fast", REFUSALS_IN_A_ROW)
        assert {bench.begun()[0].name for _ in range(4)} == {"slow"}
        fast: Any = bench.endpoints.endpoint("fast")
        for sent in list(fast._under_way):
            fast.leave(sent)
        for pause in (1.0, 2.0):
            await anyio.sleep(pause)
            trials = [bench.begun() for _ in range(4)]
            assert [one.name for one, _ in trials].count("fast") == 1
            trial = next(sent for one, sent in trials if one is fast)
            fast.leave(trial)
            fast.record_no_reply(trial)
            assert fast.paused_until == now() + 2 * pause
        await anyio.sleep(4.0)
        trial = next(sent for one, sent in [bench.begun() for _ in range(4)] if one is fast)
        fast.record_reply(trial)
        assert [bench.begun()[0].name for _ in range(8)].count("fast") > 1

    run(main)


def test_one_that_was_slow_once_is_asked_again_after_a_minute_and_gets_its_share() -> None:
    bench, asked = Bench(2, None), Counter[str]()

    async def request(seconds: float) -> None:
        chosen, sent = bench.begun()
        asked[chosen.name] += 1
        await anyio.sleep(60.0 if chosen.name == "slow" and asked["slow"] == 1 else seconds)
        chosen.record_reply(sent)
        chosen.leave(sent)

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(repeated)

    async def repeated() -> None:
        for _ in range(300):
            await request(1.0)

    run(main)
    assert min(asked.values()) > 100


def test_slots_follow_the_limits_of_those_that_are_there() -> None:
    async def main() -> None:
        bench = Bench(adaptive=Bounds(8))
        assert bench.scheduler.limit == 16
        bench.fail("fast")
        assert bench.scheduler.limit == 8
        bench.fail("slow")
        assert bench.scheduler.idle == 0, "what waits stays in its queue"
        await anyio.sleep(1.1)
        assert bench.scheduler.idle > 0

    run(main)


def test_one_that_answers_nothing_while_the_other_does_is_not_asked() -> None:
    async def main() -> None:
        bench = Bench()
        bench.endpoints.endpoint("fast").record_sent(TrackedRequest())
        for _ in range(30):
            sent = TrackedRequest()
            bench.endpoints.endpoint("slow").record_sent(sent)
            await anyio.sleep(1.0)
            bench.endpoints.endpoint("slow").record_reply(sent)
        assert {bench.begun()[0].name for _ in range(6)} == {"slow"}

    run(main)


def test_one_that_is_asked_alone_too_has_one_limit_for_both() -> None:
    async def main() -> None:
        asked = {"rollout": [BOTH], "propose": ["fast"]}
        scheduler = Scheduler(64, list(asked), groups_of(asked), now)
        endpoints = Endpoints(asked, Bounds(8), scheduler, EventBus(), now, RetryPolicy(), random.Random(0))
        assert set(endpoints.limits) == {"fast", "slow"}
        assert endpoints.endpoint("fast") in endpoints.servers(BOTH).members
        assert scheduler.limit == 16

    run(main)
