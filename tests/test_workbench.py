"""A run of any loop on the engine: requests, budgets, stops, faults, schedules, statistics."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import dspy
import pytest
from dspy.lm15 import Response
from dspy.utils.exceptions import AdapterParseError, LMAuthError, LMRateLimitError
from hypothesis import given, settings
from hypothesis import strategies as st

from dspy_flashevolve.engine.admission import LiveTickets
from dspy_flashevolve.engine.control import Fixed
from dspy_flashevolve.engine.errors import ConfigurationError, RunAbortedError
from dspy_flashevolve.engine.events import Event, RequestFinished, StageFinished, WorkersChanged
from dspy_flashevolve.engine.gathering import gather
from dspy_flashevolve.engine.item import End, EndKind, Item, Ticket
from dspy_flashevolve.engine.pipeline import NotNow, Opened
from dspy_flashevolve.engine.retries import RetryPolicy
from dspy_flashevolve.engine.stages import Finish, Forward, Outcome
from dspy_flashevolve.observe.statistics import RunStats
from dspy_flashevolve.sim.virtual import run
from dspy_flashevolve.workbench import Workbench
from tests.fakes import AsyncFakeEngine, Chain, FakeEngine, digits, examples, fake_lm, reply_for, task_lm

PREDICT = dspy.Predict("question -> answer")
DONE = Finish(End(EndKind.REJECTED, "done"))
TRAIN = examples("t", 5)
Handler = Callable[[Item[Any]], Awaitable[Outcome]]


class SlowEngine(AsyncFakeEngine):
    """Answers after some virtual seconds."""

    def __init__(self, engine: FakeEngine, seconds: float) -> None:
        super().__init__(engine)
        self.seconds = seconds

    async def complete(self, request: Any) -> Response:
        await asyncio.sleep(self.seconds)
        return await super().complete(request)


def slow_lm(answer: Callable[[str], str] | None = None, seconds: float = 10.0) -> dspy.LM:
    engine = FakeEngine(answer or (lambda prompt: reply_for(prompt, answer="3")))
    return dspy.LM("fake/model", engine=engine, async_engine=SlowEngine(engine, seconds), cache=False, num_retries=0)


def made(**options: Any) -> Workbench:
    defaults: dict[str, Any] = {"lms": {"work": [None]}, "num_threads": 4}
    return Workbench(**(defaults | options))


class Loop:
    """Tickets of one stage: a handler, until ``tickets`` were opened."""

    def __init__(self, bench: Workbench, handler: Handler, tickets: int = 3) -> None:
        self.bench, self.handler, self.tickets = bench, handler, tickets
        self.ends: list[End] = []
        self.options: dict[str, Any] = {}

    async def select(self, ticket: Ticket) -> Opened | NotNow:
        if ticket.number >= self.tickets:
            return NotNow.EXHAUSTED
        return Opened("work", Item(ticket.number, ticket, 0))

    async def main(self) -> RunStats:
        source = self.bench.source(self.select, **self.options)
        source.on_end = lambda ticket, end: self.ends.append(end)
        await self.bench.evolve([self.bench.stage("work", self.handler)], source)
        return self.bench.statistics()

    def play(self) -> RunStats:
        """In virtual time."""
        return run(lambda: self.bench.run_async(self.main))


def asking(bench: Workbench, module: dspy.Module = PREDICT, lm: Any = None) -> Handler:
    async def handler(item: Item[Any]) -> Outcome:
        await bench.ask(bench.claim(item, "work"), module, lm=lm, question=f"question {item.payload}")
        return DONE

    return handler


# Arguments


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"schedule": "sync"}, "schedule is 'sync', expected 'async' or 'lockstep'"),
    ({"num_threads": 0}, "num_threads is 0, expected a whole number of at least 1, or None"),
    ({"num_threads": True}, "num_threads is True"),
    ({"num_threads": 9, "max_concurrency": 8}, "num_threads is 9, above max_concurrency=8"),
    ({"budget_calls": 0}, "budget_calls is 0, expected a whole number"),
    ({"budget_calls": 2.5}, "budget_calls is 2.5"),
    ({"max_seconds": 0}, "max_seconds is 0, expected a number above 0, or None"),
    ({"rollout_timeout_seconds": -1}, "rollout_timeout_seconds is -1"),
    ({"duplicate_stragglers": True}, "duplicate_stragglers is True, expected a Duplicates, or None"),
    ({"slot_order": "fastest"}, "slot_order is 'fastest', expected one of 'deepest', 'value'"),
    ({"lms": [None]}, "expected stage -> a list of what it asks"),
    ({"lms": {"work": None}}, "expected stage -> a list of what it asks"),
    ({"lms": {"work": []}}, "expected stage -> a list of what it asks"),
    ({"depths": {"other": 1}}, "depths is {'other': 1}, expected a number above 0 for stages of lms"),
    ({"depths": {"work": 0}}, "depths is {'work': 0}"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_arguments_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        made(**options)


def test_a_claim_of_a_stage_that_asks_nobody_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"stage 'play' is not in lms, expected one of \['work'\]"):
        made().claim(Item(None, Ticket.create(0, 0), 0), "play")


def test_negative_calls_a_ticket_are_refused() -> None:
    bench = made()
    with pytest.raises(ConfigurationError, match="calls is -1, expected 0 or more"):
        bench.source(Loop(bench, asking(bench)).select, calls=-1)


def test_a_workbench_is_for_one_run_and_has_no_statistics_before_it() -> None:
    bench = made()
    with pytest.raises(ConfigurationError, match="has not been opened"):
        bench.statistics()
    loop = Loop(bench, asking(bench))
    loop.play()
    with pytest.raises(ConfigurationError, match="opened before: make another"):
        loop.play()


# Where it runs


def test_it_runs_in_a_script_on_a_running_loop_and_awaited() -> None:
    def played() -> RunStats:
        bench = made()
        return bench.run_sync(Loop(bench, asking(bench)).main)

    async def nested() -> RunStats:
        return played()

    async def awaited() -> RunStats:
        bench = made()
        return await bench.run_async(Loop(bench, asking(bench)).main)

    for stats in (played(), asyncio.run(nested()), asyncio.run(awaited())):
        assert (stats.tickets, stats.ended["rejected"], stats.outcome) == (3, 3, "finished")
        assert stats.stop_reason == "nothing more to do"


def test_what_main_returns_and_raises_reaches_the_caller() -> None:
    async def returns() -> int:
        return 7

    async def raises() -> None:
        raise ZeroDivisionError("boom")

    assert made().run_sync(returns) == 7
    bench = made()
    with pytest.raises(ZeroDivisionError, match="boom"):
        bench.run_sync(raises)
    stats = bench.statistics()
    assert (stats.outcome, stats.stop_reason) == ("aborted", "ZeroDivisionError: boom")


def test_a_run_keeps_the_settings_that_it_was_made_with() -> None:
    bench = made()
    with dspy.context(lm=fake_lm(lambda prompt: "nobody may ask this one")):
        stats = Loop(bench, asking(bench)).play()
    assert stats.ended["rejected"] == 3


# Requests


class Threaded(dspy.Module):
    """It cannot be awaited."""

    def __init__(self) -> None:
        super().__init__()
        self.step = dspy.Predict("question -> answer")

    def forward(self, question: str) -> dspy.Prediction:
        return self.step(question=question)


@pytest.mark.parametrize("module", [PREDICT, Threaded(), Chain(2)], ids=["awaited", "in a thread", "two calls"])
def test_a_module_is_asked_and_what_it_costs_is_counted(module: dspy.Module) -> None:
    bench = made(priced=True)
    heard: list[Event] = []
    bench.bus.subscribe(heard.append)
    stats = Loop(bench, asking(bench, module)).play()
    calls = 2 if isinstance(module, Chain) else 1
    assert stats.requests_by_stage == {"work": 3}
    assert stats.tokens_by_stage == {"work": 3 * 7 * calls}
    assert [event.error for event in heard if isinstance(event, RequestFinished)] == ["", "", ""]


def test_a_module_is_not_changed_and_its_own_lm_is_asked() -> None:
    mine = fake_lm(lambda prompt: reply_for(prompt, answer="mine"))
    module = dspy.Predict("question -> answer")
    module.lm = mine
    bench = made(lms={"work": [module]})
    replies: list[str] = []

    async def handler(item: Item[Any]) -> Outcome:
        claim = bench.claim(item, "work")
        for asked, lm in ((module, None), (PREDICT, mine), (PREDICT, None)):
            replies.append((await bench.ask(claim, asked, lm=lm, question="q")).answer)
        return DONE

    Loop(bench, handler, tickets=1).play()
    assert replies[:2] == ["mine", "mine"]
    assert replies[2] != "mine"
    assert module.lm is mine
    assert not module.history


def test_a_reply_that_does_not_fit_its_format_is_the_callers_and_is_paid() -> None:
    broken = fake_lm(lambda prompt: "no fields at all")
    bench = made()
    seen: list[Exception] = []

    async def handler(item: Item[Any]) -> Outcome:
        try:
            await bench.ask(bench.claim(item, "work"), PREDICT, lm=broken, question="q")
        except AdapterParseError as error:
            seen.append(error)
        return DONE

    stats = Loop(bench, handler, tickets=1).play()
    assert len(seen) == 1
    assert stats.tokens_by_stage["work"] >= 7
    assert stats.retried_requests == 0


class Turn:
    """Raises while its list of errors lasts."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def __call__(self, prompt: str) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return reply_for(prompt, answer="3")


def test_a_refused_request_waits_without_its_slot_and_is_made_again() -> None:
    refused = slow_lm(Turn(LMRateLimitError("later", retry_after=100.0)), seconds=1.0)
    bench = made(num_threads=1)
    order: list[tuple[int, float]] = []

    async def handler(item: Item[Any]) -> Outcome:
        lm = refused if item.payload == 0 else slow_lm(seconds=1.0)
        await bench.ask(bench.claim(item, "work"), PREDICT, lm=lm, question="q")
        order.append((item.payload, bench.clock()))
        return DONE

    loop = Loop(bench, handler)
    loop.options = {"admission": LiveTickets(3)}
    stats = loop.play()
    assert [number for number, _ in order] == [1, 2, 0]
    assert order[1][1] < 100 < order[2][1]
    assert stats.retried_requests == 1
    assert stats.peak_slots == 1


def test_a_provider_that_stays_away_fails_the_ticket_and_then_gives_the_run_up() -> None:
    away = fake_lm(Turn(*[LMRateLimitError("later") for _ in range(1000)]))
    bench = made(retry=RetryPolicy(attempts=2))
    loop = Loop(bench, asking(bench, lm=away), tickets=1000)
    stats = loop.play()
    assert stats.failed
    assert stats.outcome == "failed"
    assert "tickets in a row failed; the last: no answer" in stats.stop_reason
    assert {end.kind for end in loop.ends} == {EndKind.FAILED}
    assert 10 <= stats.ended["failed"] < 20


def test_a_rejected_key_ends_the_run() -> None:
    bench = made()
    with pytest.raises(RunAbortedError):
        Loop(bench, asking(bench, lm=fake_lm(Turn(LMAuthError("no such key"))))).play()
    stats = bench.statistics()
    assert stats.outcome == "aborted"
    assert sum(stats.ended.values()) == stats.tickets


def test_each_ticket_of_a_batch_fails_where_it_got_no_answer() -> None:
    away = fake_lm(Turn(*[LMRateLimitError("later") for _ in range(1000)]))
    bench = made(retry=RetryPolicy(attempts=1))

    async def batch(items: list[Item[Any]]) -> Any:
        await bench.ask(bench.claim(items[0], "work"), PREDICT, lm=away, question="q")

    async def main() -> RunStats:
        source = bench.source(Loop(bench, asking(bench)).select)
        stage = bench.stage("work", batch, batch=3, ready=lambda waiting: waiting == 3)
        await bench.evolve([stage], source)
        return bench.statistics()

    stats = run(lambda: bench.run_async(main))
    assert stats.ended["failed"] == stats.tickets == 3


@pytest.mark.parametrize(
    ("depths", "first"), [(None, "check 0"), ({"work": 5}, "work 2")], ids=["by the order of lms", "as it is told"]
)
def test_a_later_stage_goes_first_where_slots_are_scarce(depths: dict[str, int] | None, first: str) -> None:
    lm = slow_lm(seconds=1.0)
    bench = made(lms={"work": [lm], "check": [lm]}, num_threads=1, depths=depths)
    order: list[str] = []

    def handler(stage: str, outcome: Callable[[Item[Any]], Outcome]) -> Handler:
        async def work(item: Item[Any]) -> Outcome:
            await bench.ask(bench.claim(item, stage), PREDICT, lm=lm, question="q")
            order.append(f"{stage} {item.ticket.number}")
            return outcome(item)

        return work

    async def main() -> None:
        stages = [
            bench.stage("work", handler("work", lambda item: Forward("check", item.payload))),
            bench.stage("check", handler("check", lambda item: DONE)),
        ]
        await bench.evolve(stages, bench.source(Loop(bench, asking(bench)).select, admission=LiveTickets(3)))

    run(lambda: bench.run_async(main))
    last = {"check 0": "work 2", "work 2": "check 0"}[first]
    assert order.index(first) < order.index(last)


def test_calls_are_priced_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspy_flashevolve.programs.lm.rates_of", lambda model: (1.0, 2.0))
    costs: list[float] = []
    for priced in (True, False):
        bench = made(priced=priced)
        costs.append(Loop(bench, asking(bench)).play().cost_dollars)
    assert costs == [3 * (3 * 1.0 + 4 * 2.0), 0.0]


# Rollouts and the budget


class Rolling:
    """Each ticket runs the program on some examples."""

    def __init__(self, bench: Workbench, per_ticket: int, keys: Callable[[int, int], Any], tickets: int = 1000) -> None:
        self.bench, self.per_ticket, self.keys, self.tickets = bench, per_ticket, keys, tickets
        self.runner = bench.runner(Chain(), digits)
        self.source = bench.source(self.select, calls=per_ticket)
        self.most = 0

    async def select(self, ticket: Ticket) -> Opened | NotNow:
        if ticket.number >= self.tickets:
            return NotNow.EXHAUSTED
        return Opened("work", Item(ticket.number, ticket, 0))

    async def handler(self, item: Item[int]) -> Outcome:
        claim, pays = self.bench.claim(item, "work"), self.source.reservations[item.ticket.number]

        async def one(index: int) -> Any:
            key = self.keys(item.payload, index)
            return await self.bench.rollout(claim, pays, self.runner, {}, TRAIN[index % len(TRAIN)], key)

        rollouts = await gather([lambda index=index: one(index) for index in range(self.per_ticket)])
        assert all(0 <= rollout.score <= 1 for rollout in rollouts)
        self.most = max(self.most, self.bench.budget.spent + self.bench.budget.reserved)
        return DONE

    def play(self) -> RunStats:
        async def main() -> RunStats:
            await self.bench.evolve([self.bench.stage("work", self.handler)], self.source)
            return self.bench.statistics()

        return run(lambda: self.bench.run_async(main))


@settings(max_examples=15)
@given(
    budget=st.integers(1, 40),
    per_ticket=st.integers(1, 9),
    slots=st.integers(1, 6),
    schedule=st.sampled_from(["async", "lockstep"]),
)
def test_metric_calls_never_exceed_the_budget(budget: int, per_ticket: int, slots: int, schedule: str) -> None:
    with dspy.context(lm=slow_lm()):
        bench = made(budget_calls=budget, num_threads=slots, schedule=schedule)
        rolling = Rolling(bench, per_ticket, lambda ticket, index: (ticket, index))
        stats = rolling.play()
    assert rolling.most <= budget
    assert stats.metric_calls == budget // per_ticket * per_ticket
    assert bench.budget.reserved == 0
    assert stats.outcome == "finished"
    assert f"the budget of {budget} calls" in stats.stop_reason
    assert stats.peak_slots <= slots


def test_equal_rollouts_in_flight_are_shared_and_cost_nothing_except_in_lockstep() -> None:
    with dspy.context(lm=slow_lm()):
        shared = Rolling(made(), 4, lambda ticket, index: "the same", tickets=2).play()
        alone = Rolling(made(schedule="lockstep"), 4, lambda ticket, index: "the same", tickets=2).play()
    assert (shared.metric_calls, shared.shared_rollouts) == (1, 7)
    assert (alone.metric_calls, alone.shared_rollouts) == (8, 0)


def test_a_runner_takes_any_metric_and_scores_failures_as_it_is_told() -> None:
    def short(gold: Any, pred: Any) -> float:
        return 1.0 / int(pred.answer)

    async def coroutine(gold: Any, pred: Any, trace: Any) -> float:
        await anyio.sleep(1)
        return 0.5

    bench = made()
    scores: list[float] = []

    async def handler(item: Item[Any]) -> Outcome:
        claim, pays = bench.claim(item, "work"), bench.budget.reserve(9)
        assert pays is not None
        for number, metric in enumerate((short, coroutine)):
            runner = bench.runner(Chain(), metric, failure_score=-1.0)
            for lm in ("0", "4"):
                with dspy.context(lm=fake_lm(lambda prompt, lm=lm: reply_for(prompt, answer=lm))):
                    rollout = await bench.rollout(claim, pays, runner, {}, TRAIN[0], (number, lm))
                scores.append(rollout.score)
        return DONE

    Loop(bench, handler, tickets=1).play()
    assert scores == [-1.0, 0.25, 0.5, 0.5]


def test_a_rollout_that_takes_too_long_is_given_up_and_paid_for_only_where_its_metric_began() -> None:
    with dspy.context(lm=slow_lm(seconds=10.0)):
        bench = made(rollout_timeout_seconds=5.0, retry=RetryPolicy(attempts=2), budget_calls=4)
        stats = Rolling(bench, 4, lambda ticket, index: (ticket, index), tickets=1).play()
    assert stats.ended["failed"] == 1
    assert (stats.timed_out_rollouts, stats.metric_calls) == (8, 0)


@pytest.mark.parametrize(("lock", "most"), [(True, 1), (False, 4)])
def test_a_metric_with_a_lock_is_called_once_at_a_time(lock: bool, most: int) -> None:
    now = peak = 0

    async def metric(gold: Any, pred: Any) -> float:
        nonlocal now, peak
        now, peak = now + 1, max(peak, now + 1)
        await anyio.sleep(1)
        now -= 1
        return 1.0

    rolling = Rolling(made(), 4, lambda ticket, index: (ticket, index), tickets=1)
    rolling.runner = rolling.bench.runner(Chain(), metric, metric_lock=lock)
    rolling.play()
    assert peak == most


# How it ends


def test_a_stop_drains_what_runs_and_starts_no_more() -> None:
    lm = slow_lm()
    bench = made()
    finished: list[int] = []

    async def handler(item: Item[Any]) -> Outcome:
        if item.payload == 0:
            bench.stop("enough", "stopped")
            bench.stop("a later reason", "failed")
        await bench.ask(bench.claim(item, "work"), PREDICT, lm=lm, question="q")
        finished.append(item.payload)
        return DONE

    loop = Loop(bench, handler, tickets=1000)
    stats = loop.play()
    assert sorted(finished) == list(range(stats.tickets))
    assert 1 <= stats.tickets <= 4
    assert (stats.outcome, stats.stop_reason, stats.failed) == ("stopped", "enough", False)


def test_a_stop_before_the_first_ticket_leaves_nothing_to_do() -> None:
    bench = made()
    bench.stop("not today")
    stats = Loop(bench, asking(bench)).play()
    assert (stats.tickets, stats.outcome, stats.stop_reason) == (0, "stopped", "not today")


def test_ctrl_c_ends_the_run_early_and_a_second_one_at_once() -> None:
    def interrupted(times: int) -> Workbench:
        bench = made()

        async def handler(item: Item[Any]) -> Outcome:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
                while not bench.stop_reason:
                    await anyio.lowlevel.checkpoint()
            if times > 1:
                await anyio.sleep_forever()
            return DONE

        loop = Loop(bench, handler, tickets=1000)
        if times == 1:
            stats = bench.run_sync(loop.main)
            assert stats.ended["rejected"] == stats.tickets <= 4
        else:
            with pytest.raises(KeyboardInterrupt):
                bench.run_sync(loop.main)
        return bench

    first, second = interrupted(1).statistics(), interrupted(2).statistics()
    assert (first.outcome, first.stop_reason) == ("stopped", "interrupted by Ctrl-C")
    assert (second.outcome, second.stop_reason) == ("aborted", "cancelled")
    assert second.ended["cancelled"] == second.tickets > 0


def test_no_ticket_starts_after_max_seconds() -> None:
    bench = made(max_seconds=25.0)
    stats = Loop(bench, asking(bench, lm=slow_lm()), tickets=1000).play()
    assert stats.tickets == 3 * 4
    assert stats.seconds == pytest.approx(30.0)
    assert (stats.outcome, stats.stop_reason) == ("finished", "max_seconds=25 is over")


def test_what_a_handler_or_the_work_beside_it_raises_ends_the_run_as_it_is() -> None:
    bench = made()

    async def fails() -> None:
        await anyio.sleep(1)
        raise LookupError("beside")

    async def handler(item: Item[Any]) -> Outcome:
        await bench.beside(fails)
        await anyio.sleep_forever()
        return DONE

    loop = Loop(bench, handler)
    with pytest.raises(LookupError, match="beside"):
        loop.play()
    stats = bench.statistics()
    assert stats.ended["cancelled"] == stats.tickets > 0
    assert bench.budget.reserved == 0

    other = made()

    async def raises(item: Item[Any]) -> Outcome:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Loop(other, raises).play()


def test_a_selection_that_raises_ends_the_run_and_leaves_nothing_reserved() -> None:
    bench = made(budget_calls=10)

    async def select(ticket: Ticket) -> Opened | NotNow:
        raise KeyError("selected")

    async def main() -> None:
        await bench.evolve([bench.stage("work", asking(bench))], bench.source(select, calls=3))

    with pytest.raises(KeyError, match="selected"):
        run(lambda: bench.run_async(main))
    assert bench.budget.reserved == 0


# Schedules


def beside(schedule: str) -> list[str]:
    bench, log = made(schedule=schedule), list[str]()

    async def work() -> None:
        await anyio.sleep(100)
        log.append("beside")

    async def handler(item: Item[Any]) -> Outcome:
        await bench.beside(work)
        log.append("ticket")
        return DONE

    Loop(bench, handler, tickets=2).play()
    return log


def test_work_beside_the_tickets_is_waited_for_at_the_end_and_in_lockstep_at_once() -> None:
    assert beside("async") == ["ticket", "ticket", "beside", "beside"]
    assert beside("lockstep") == ["beside", "ticket", "beside", "ticket"]


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_work_beside_the_tickets_that_got_no_answer_is_logged_and_no_end(
    schedule: str, caplog: pytest.LogCaptureFixture
) -> None:
    away = fake_lm(Turn(*[LMRateLimitError("later") for _ in range(1000)]))
    bench = made(schedule=schedule, retry=RetryPolicy(attempts=1))

    async def handler(item: Item[Any]) -> Outcome:
        claim = bench.claim(item, "work")
        await bench.beside(lambda: bench.ask(claim, PREDICT, lm=away, question="q"))
        return DONE

    assert Loop(bench, handler, tickets=2).play().ended["rejected"] == 2
    assert caplog.text.count("work beside the steps is left undone: no answer after 1 attempts") == 2


@pytest.mark.parametrize(("schedule", "live"), [("async", 4), ("lockstep", 1)])
def test_in_lockstep_one_ticket_lives_whatever_the_source(schedule: str, live: int) -> None:
    bench = made(schedule=schedule)
    most = 0
    now: set[int] = set()

    async def handler(item: Item[Any]) -> Outcome:
        nonlocal most
        now.add(item.payload)
        most = max(most, len(now))
        await anyio.sleep(1)
        now.discard(item.payload)
        return DONE

    loop = Loop(bench, handler, tickets=8)
    loop.options = {"admission": LiveTickets(4)}
    loop.play()
    assert most == live


@pytest.mark.parametrize(("schedule", "changes"), [("async", 1), ("lockstep", 0)])
def test_a_controller_moves_workers_except_in_lockstep(schedule: str, changes: int) -> None:
    bench = made(schedule=schedule)
    heard: list[Event] = []
    bench.bus.subscribe(heard.append)

    async def main() -> None:
        source = bench.source(Loop(bench, asking(bench)).select)
        await bench.evolve([bench.stage("work", asking(bench))], source, Fixed(2))

    run(lambda: bench.run_async(main))
    assert len([event for event in heard if isinstance(event, WorkersChanged)]) == changes
    assert len([event for event in heard if isinstance(event, StageFinished)]) == 3


def test_stages_run_again_and_again_in_one_run() -> None:
    bench = made()

    async def main() -> RunStats:
        for _ in range(3):
            await bench.evolve([bench.stage("work", asking(bench))], bench.source(Loop(bench, asking(bench)).select))
        return bench.statistics()

    assert run(lambda: bench.run_async(main)).tickets == 9


def test_slots_adapt_where_nobody_says_how_many_and_modules_can_be_awaited() -> None:
    assert made(num_threads=None).width == 256
    assert made(num_threads=None, max_concurrency=32).width == 32
    assert made(num_threads=None, lms={"work": [Threaded()]}).width == dspy.settings.num_threads
    assert made(num_threads=None, schedule="lockstep").width == dspy.settings.num_threads
    bench = made(num_threads=None, max_concurrency=32)
    Loop(bench, asking(bench, lm=slow_lm()), tickets=200).play()
    assert dspy.settings.num_threads < bench.statistics().peak_slots <= 32


# What is told


def test_a_commit_tells_its_gap_and_its_generation() -> None:
    bench = made()

    async def handler(item: Item[Any]) -> Outcome:
        number = item.payload
        parents = [number - 1] if number else []
        bench.commits.add(item, version=number + 1, candidate=number, score=1.0 - number, parents=parents)
        return Finish(End(EndKind.COMMITTED))

    stats = Loop(bench, handler).play()
    assert [(one.candidate, one.gap, one.generation) for one in stats.commits] == [(0, 0, 0), (1, 1, 1), (2, 2, 2)]
    assert [(one.score, one.best_score) for one in stats.commits] == [(1.0, 1.0), (0.0, 1.0), (-1.0, 1.0)]
    assert stats.generations == 2
    assert stats.gaps == {"before_commit": {0: 1, 1: 1, 2: 1}}
    assert stats.ended["committed"] == 3
    assert stats.to_dict()["commits"][1]["gap"] == 1


def test_a_custom_source_and_order_are_taken_as_they_are() -> None:
    asked: list[str] = []
    order = SimpleNamespace(key=lambda claim, held, waiting: (asked.append(claim.stage) or 0.0,))
    bench = made(num_threads=1, slot_order=order)

    class Two:
        """Two tickets, no budget."""

        async def open(self, number: int, live: int) -> Opened | NotNow:
            if number == 2:
                return NotNow.EXHAUSTED
            return Opened("work", Item(number, Ticket.create(number, 0), 0))

        async def close(self, ticket: Ticket, end: End) -> None:
            del ticket, end

    async def main() -> RunStats:
        await bench.evolve([bench.stage("work", asking(bench, lm=slow_lm()), workers=2)], Two())
        return bench.statistics()

    assert run(lambda: bench.run_async(main)).tickets == 2
    assert asked


def test_the_configured_lm_answers_where_none_is_named() -> None:
    lm = task_lm(3)
    with dspy.context(lm=lm):
        bench = made()
        Loop(bench, asking(bench)).play()
    assert len(lm.history) == 3
